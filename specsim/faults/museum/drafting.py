"""Faults of drafting: most leave tokens right, and only fewer drafts are accepted."""

from specsim.faults.fault import Fault, Trial
from specsim.faults.planting import Edit

TREE = dict(topk=2, num_steps=3, num_draft_tokens=5, batch=2, rounds=1)

FAULTS = (
    Fault(
        name="draft-position-early",
        source="sgl-project/sglang#25015",
        operation="drafting",
        cause="the position is raised before a draft forward, not after it",
        symptom="tokens stay right; every draft after the first is rotated one place too far and fewer are accepted",
        fields=("draft positions", "draft logits"),
        edits=(
            Edit(
                "specsim.fast.metadata",
                "tl.store(positions_ptr + offs, tl.where(live, length + step, 0), mask=mask)",
                "tl.store(positions_ptr + offs, tl.where(live, length + step + 1, 0), mask=mask)",
            ),
        ),
        trial=Trial("differential", TREE | dict(page_size=1)),
    ),
)
