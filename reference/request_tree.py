"""The tree of one request, as verification walks it."""

from specsim.core.phases import Batch, VerifyInput
from specsim.core.rule import Tree


def trees(batch: Batch, verify_input: VerifyInput, max_len: int) -> list[Tree]:
    """List every request's tree.

    No node at or beyond max_len may be accepted.
    """
    lists = zip(
        verify_input.draft_tokens.tolist(),
        verify_input.parents.tolist(),
        verify_input.retrieve_next_token.tolist(),
        verify_input.retrieve_next_sibling.tolist(),
        (max_len - 1 - batch.seq_lens).tolist(),
        strict=True,
    )
    return [Tree(*each) for each in lists]
