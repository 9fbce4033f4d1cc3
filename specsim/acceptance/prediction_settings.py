"""Settings whose accept lengths are predicted, and the one that is recorded."""

from specsim.core.config import SpecConfig

RECORDED = SpecConfig(topk=8, num_steps=6, num_draft_tokens=64)
_TREES = {
    (2, 2): (4, 7),
    (2, 3): (6, 10),
    (2, 4): (8, 14),
    (2, 6): (8, 16),
    (3, 3): (8, 12),
    (3, 4): (10, 20),
    (3, 5): (10, 24),
    (4, 2): (6, 12),
    (4, 3): (8, 16),
    (4, 4): (16, 32),
    (4, 6): (16, 48),
    (8, 3): (16, 32),
}
SETTINGS = (
    *(SpecConfig(1, num_steps, num_steps + 1) for num_steps in range(1, 7)),
    *(SpecConfig(*tree, size) for tree, sizes in _TREES.items() for size in sizes),
)
