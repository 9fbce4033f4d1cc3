"""Proposals of a token drafter, recorded while requests share it and replayed when one of them runs solo.

A drafter with a tree of other requests' outputs proposes other drafts in a solo run. Given the recorded proposals, a
solo run has the same trees, so its rounds and sampled tokens can be compared too.
"""

from collections.abc import Sequence

from specsim.core.token_drafter import Proposal, TokenDrafter, TreeLimits

Proposals = dict[tuple[int, tuple[int, ...]], Proposal]  # by request id and the tokens up to the root


class Recorded:
    """A token drafter that keeps every proposal of another one."""

    def __init__(self, drafter: TokenDrafter, proposals: Proposals) -> None:
        self._drafter = drafter
        self._proposals = proposals

    def propose(self, request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
        made = self._drafter.propose(request_id, tokens, limits)
        self._proposals[request_id, tuple(tokens)] = made
        return made

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        self._drafter.finish(request_id, tokens, prompt_len)


class Replayed:
    """A token drafter that repeats recorded proposals, and has none after tokens that were not recorded."""

    def __init__(self, proposals: Proposals) -> None:
        self._proposals = proposals

    def propose(self, request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
        return self._proposals.get((request_id, tuple(tokens)), Proposal([], [], []))

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        pass
