"""KV of a round: slots, copied tails and the commit of the accepted path, and the drafter's rows after it."""

from specsim.fast.kv.extend import draft_extend_input, draft_rows, empty_extend_input, shift_left
from specsim.fast.kv.slots import (
    BatchProgress,
    commit,
    draft_kv,
    duplicate_tails,
    move_side,
    tree_locations,
    write_side,
)  # fmt: skip

__all__ = [
    "BatchProgress", "commit", "draft_extend_input", "draft_kv", "draft_rows", "duplicate_tails", "empty_extend_input",
    "move_side", "shift_left", "tree_locations", "write_side",
]  # fmt: skip
