"""A token drafter outside the package: what followed the last few tokens when the text had them before.

specsim generate --drafter notebooks/examples/ngram_drafter.py:NgramDrafter --topk 1 --num-steps 5
"""

from specsim.core.token_drafter import Proposal


class NgramDrafter:
    """Drafts from the latest earlier occurrence of the longest suffix, of at most `longest` tokens."""

    def __init__(self, longest: int = 3) -> None:
        self.longest = longest

    def propose(self, request_id, tokens, limits):
        """Propose a chain; where no suffix occurred before, no draft."""
        most = min(limits.max_depth, limits.max_nodes)
        for size in range(min(self.longest, len(tokens) - 1), 0, -1):
            suffix = list(tokens[-size:])
            for end in range(len(tokens) - 1, size - 1, -1):
                if list(tokens[end - size : end]) == suffix:
                    return chain(tokens[end : end + most])
        return chain([])

    def finish(self, request_id, tokens, prompt_len):
        """Do nothing: all that is read is the request's own text."""


def chain(drafts):
    """Make a proposal in which each draft is the child of the one before."""
    return Proposal(list(drafts), list(range(-1, len(drafts) - 1)), [1.0] * len(drafts))
