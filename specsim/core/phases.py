"""The states of a round: one type for each phase, made by one phase and read by the next (sglang#24859).

Dimension key, used as the suffix of tensor names everywhere:

    B requests · K topk · S num_steps · N num_draft_tokens (verify width, root included) · P page_size
    L seq_len (committed KV, bonus token excluded) · V vocabulary · H hidden · F target features · A attention heads
    D head dim · R rows of a flattened batch · C columns (keys) of one request · Q rows of one request
    W width of an accepted path (S + 1) · I draft steps so far · M nodes of a static tree that have children, 1 + K(S-1)

    DraftInput → draft → VerifyInput → verify → VerifyOutput.draft_extend_input → draft_extend → DraftInput
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch

from specsim.core.errors import NotFinite
from specsim.core.state import Batch, PerRequest, Sampling, State, dtype_name

__all__ = [
    "Advance",
    "AutoregressiveInput",
    "Batch",
    "Candidates",
    "DraftExtendInput",
    "DraftInput",
    "ExplicitCandidates",
    "PerRequest",
    "PrefillInput",
    "PrefillOutput",
    "RoundOutput",
    "Sampling",
    "State",
    "Verdict",
    "VerifyInput",
    "VerifyOutput",
]


@dataclass(frozen=True, slots=True, repr=False)
class PrefillInput(State):
    """A chunk of every request's prompt, at least one row each, flattened over requests."""

    input_ids: torch.Tensor  # i64 [R]
    row_starts: torch.Tensor  # i64 [B+1], request b owns rows row_starts[b]..row_starts[b+1]
    start_lens: torch.Tensor  # i64 [B], tokens before the chunk, whose KV is there
    next_tokens: torch.Tensor  # i64 [B], token after the chunk where known (more prompt, a resumed request), else -1
    max_rows: int | None = None  # most rows of a request; None: the device has to be asked

    @property
    def requests(self) -> torch.Tensor:
        """Request of each row, i64 [R]."""
        requests = torch.arange(len(self.start_lens), device=self.row_starts.device)
        return requests.repeat_interleave(self.row_starts.diff(), output_size=len(self.input_ids))

    @property
    def columns(self) -> torch.Tensor:
        """Column of each row, equal to its position, i64 [R]."""
        rows = torch.arange(len(self.input_ids), device=self.row_starts.device)
        return rows + (self.start_lens - self.row_starts[:-1])[self.requests]

    @property
    def last_rows(self) -> torch.Tensor:
        """Last row of each request, i64 [B]."""
        return self.row_starts[1:] - 1

    @classmethod
    def of_prompts(cls, prompts: Sequence[Sequence[int]]) -> Self:
        """Flatten whole prompts, so that the token after each is sampled."""
        lens = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
        input_ids = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int64)
        row_starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
        longest = max(map(len, prompts), default=0)
        return cls(input_ids, row_starts, torch.zeros_like(lens), torch.full_like(lens, -1), longest)


@dataclass(frozen=True, slots=True, repr=False)
class PrefillOutput(State):
    """The token after each chunk, and the state from which the first round starts."""

    next_tokens: torch.Tensor  # i32 [B]
    logprobs: torch.Tensor  # f32 [B], of next_tokens under the target's distribution
    draft_input: "DraftInput"


@dataclass(frozen=True, slots=True, repr=False)
class DraftInput(PerRequest):
    """The state that prefill and draft-extend leave for the next draft phase.

    A drafter that keeps more than the root between rounds declares a type of its own.
    """

    has_all_drafts: ClassVar[bool] = False  # whether it holds the drafts of every depth
    bonus_tokens: torch.Tensor  # i32 [B], root of the next tree

    def narrowed(self, topk: int, num_steps: int) -> Self:
        """Keep what a setting of fewer lanes or steps reads; a root alone serves every setting."""
        return self


@dataclass(frozen=True, slots=True, repr=False)
class AutoregressiveInput(DraftInput):
    """The DraftInput of a drafter that runs a decoder once in each step: its first drafts, and their origin."""

    # f32 [B, K], scores of the first drafts: the drafter's probability of each, or its logarithm under score `logprob`;
    # at temperature 1, or at the request's temperature if drafts are sampled
    topk_scores: torch.Tensor
    topk_index: torch.Tensor  # i64 [B, K], target ids of the first drafts
    hidden: torch.Tensor  # [B, H], drafter's state that the first drafts came from
    # f32 [B, V], distribution of the first drafts by target id, 0 at temperature 0; None where verify does not read it
    draft_prob: torch.Tensor | None = None

    @classmethod
    def empty(
        cls, topk: int, hidden_size: int, dtype: torch.dtype = torch.float32, vocab_size: int | None = None
    ) -> Self:
        """Make the state without requests, to merge with when all have finished.

        vocab_size is given where there is draft_prob.
        """
        return cls.zeros(0, topk, hidden_size, dtype, vocab_size)

    @classmethod
    def zeros(
        cls, size: int, topk: int, hidden_size: int, dtype: torch.dtype = torch.float32, vocab_size: int | None = None
    ) -> Self:
        """Make the state of `size` requests with zeros in every tensor.

        vocab_size is given where there is draft_prob.
        """
        return cls(
            bonus_tokens=torch.zeros(size, dtype=torch.int32),
            topk_scores=torch.zeros(size, topk),
            topk_index=torch.zeros(size, topk, dtype=torch.int64),
            hidden=torch.zeros(size, hidden_size, dtype=dtype),
            draft_prob=None if vocab_size is None else torch.zeros(size, vocab_size),
        )

    def narrowed(self, topk: int, num_steps: int) -> Self:
        """Keep the first drafts of `topk` lanes: the best ones, or those of the first lanes where they are sampled."""
        if topk == self.topk_index.shape[1]:
            return self
        scores = self.topk_scores[:, :topk].contiguous()
        return replace(self, topk_scores=scores, topk_index=self.topk_index[:, :topk].contiguous())


@dataclass(frozen=True, slots=True, repr=False)
class Candidates(State):
    """The nodes that the tree is chosen from: K + (S-1)K² of them, KS where drafts are sampled."""

    tokens: torch.Tensor  # i64 [B, K+(S-1)K²]
    scores: torch.Tensor  # f32 [B, K+(S-1)K²]
    # i64 [B, max(1, K(S-1)+1)], flat index of the parent of each block of K siblings, -1 for the root; with sampled
    # drafts every block but the root's holds one sibling
    parent_list: torch.Tensor
    draft_logits: tuple[torch.Tensor, ...] = ()  # [B, K, draft vocabulary] of every forward, kept by the reference only
    draft_prob: torch.Tensor | None = None  # f32 [B, M, V], handed on to VerifyInput


@dataclass(frozen=True, slots=True, repr=False)
class ExplicitCandidates(State):
    """Up to M nodes for each request's tree, looked up or drafted by a block, each with its parent.

    A request may have fewer than M, or none. A parent comes before its children.
    """

    tokens: torch.Tensor  # i64 [B, M]
    parents: torch.Tensor  # i64 [B, M], index of an earlier candidate, -1 for the root
    scores: torch.Tensor  # f32 [B, M], higher is better; a candidate counts at most what its parent counts
    num_alive: torch.Tensor  # i32 [B], the first num_alive entries exist
    confidence: torch.Tensor | None = None  # f32 [B, S], logit of a confidence head for the drafts of each depth
    draft_logits: tuple[torch.Tensor, ...] = ()  # [B, parents, draft vocabulary] by depth, kept by the reference only
    draft_prob: torch.Tensor | None = None  # f32 [B, M, V] of sampled drafts, handed on to VerifyInput

    @classmethod
    def empty(cls, size: int, num_candidates: int) -> Self:
        """Make the candidates of `size` requests with nothing proposed."""
        return cls(
            tokens=torch.zeros(size, num_candidates, dtype=torch.int64),
            parents=torch.full((size, num_candidates), -1),
            scores=torch.zeros(size, num_candidates),
            num_alive=torch.zeros(size, dtype=torch.int32),
        )


@dataclass(frozen=True, slots=True, repr=False)
class VerifyInput(State):
    """One tree for each request, ready for the target's forward.

    Node 0 is the root, the last bonus token. A tree with fewer drafts ends with dead nodes, which have token 0, parent
    -1, position 0, slot -1 and no links.
    """

    draft_tokens: torch.Tensor  # i64 [B, N]
    parents: torch.Tensor  # i64 [B, N], node index of the parent, -1 for the root
    scores: torch.Tensor  # f32 [B, N], ranking score of each node; the root's is that of the empty path
    positions: torch.Tensor  # i64 [B·N], L + depth
    mask: torch.Tensor  # bool [B, N, N], whether row sees column (layout QLEN_ONLY)
    retrieve_index: torch.Tensor  # i64 [B, N], b·N + j
    retrieve_next_token: torch.Tensor  # i64 [B, N], node index of the first child, -1 for none
    retrieve_next_sibling: torch.Tensor  # i64 [B, N], node index of the next sibling, -1 for none
    cache_locations: torch.Tensor  # i64 [B·N], slots in the target pool, -1 at or beyond the length limit
    # i32 [B], depth of the deepest draft: num_steps for candidates of lanes, 0 where nothing was proposed
    proposed_depth: torch.Tensor
    candidates: Candidates | ExplicitCandidates | None = (
        None  # the pool that the tree was chosen from, where there was a choice
    )
    # f32 [B, M, V], distribution of a node's children by target id, 0 at temperature 0; None where verify does not read
    # it
    draft_prob: torch.Tensor | None = None
    # Of a lookup next to the drafter; the trees of requests that have some are chosen from them.
    looked_up: ExplicitCandidates | None = None

    def pool_of(self, request: int) -> Candidates | ExplicitCandidates | None:
        """Return the candidates that a request's tree was chosen from."""
        has_some = self.looked_up is not None and int(self.looked_up.num_alive[request]) > 0
        return self.looked_up if has_some else self.candidates

    def live_parents(self, request: int) -> list[int]:
        """List the parents of a request's root and drafts, without the dead nodes at the tree's end."""
        root, *parents = self.parents[request].tolist()
        return [root, *(parent for parent in parents if parent >= 0)]


@dataclass(frozen=True, slots=True, repr=False)
class DraftExtendInput(State):
    """The accepted rows, from whose target features the drafter rewrites its KV.

    Row j of request b has position and column seq_lens[b] + bonus_columns + j, with the drafter's bonus_columns. With
    `extend="fixed"` a request's rows from num_accepted_tokens on are padding.
    """

    row_starts: torch.Tensor  # i64 [B+1]
    hidden: torch.Tensor  # [R, F], target features of accepted node j
    input_ids: torch.Tensor  # i64 [R], the token *after* accepted node j
    positions: torch.Tensor  # i64 [R]
    cache_locations: torch.Tensor  # i64 [R], slot, -1 for a row that writes nothing
    num_accepted_drafts: torch.Tensor  # i32 [B]
    num_accepted_tokens: torch.Tensor  # i32 [B]
    bonus_tokens: torch.Tensor  # i32 [B]
    seq_lens: torch.Tensor  # i64 [B], L before the round
    req_pool_indices: torch.Tensor  # i64 [B]

    @property
    def last_rows(self) -> torch.Tensor:
        """Row of each request's last accepted token, which alone feeds the next draft phase, i64 [B]."""
        return self.row_starts[:-1] + self.num_accepted_tokens - 1


@dataclass(frozen=True, slots=True, repr=False)
class Verdict(State):
    """The accepted path of every tree."""

    predict: torch.Tensor  # i32 [B·N], by node the token after it, -1 off the accepted path
    accept_index: torch.Tensor  # i32 [B, W], global node ids of the path from the root on, padded with -1
    num_accepted_drafts: torch.Tensor  # i32 [B], in [0, S]
    num_accepted_tokens: torch.Tensor  # i32 [B], num_accepted_drafts + 1: the bonus included
    logprobs: torch.Tensor  # f32 [B, W], of predict at accept_index under penalties, bias, temperature; 0 where padded

    def accepted_tokens(self) -> list[list[int]]:
        """List the new tokens of each request, bonus last, with one copy to the host."""
        num_requests, width = self.accept_index.shape
        parts = (self.predict, self.accept_index.flatten(), self.num_accepted_tokens)
        values = torch.cat(parts).tolist()
        paths = values[len(self.predict) :]
        counts = paths[num_requests * width :]
        return [[values[node] for node in paths[row * width : row * width + count]] for row, count in enumerate(counts)]

    def accepted_path(self, request: int) -> list[int]:
        """List the accepted nodes of a request's tree, root first."""
        num_nodes = len(self.predict) // len(self.accept_index)
        count = int(self.num_accepted_tokens[request])
        return [node - request * num_nodes for node in self.accept_index[request, :count].tolist()]


@dataclass(frozen=True, slots=True, repr=False)
class VerifyOutput(State):
    """The verdict, the target's logits, and the input of draft-extend."""

    verdict: Verdict
    target_logits: torch.Tensor  # [B·N, V] in the model's dtype, as the target made them
    draft_extend_input: DraftExtendInput


class RoundOutput(NamedTuple):
    """The results of a round's three phases, in order."""

    verify_input: VerifyInput
    verify_output: VerifyOutput
    draft_input: DraftInput

    def advance(self, batch: Batch) -> "Advance":
        """Keep what a serving loop needs of this batch's round."""
        verdict = self.verify_output.verdict
        after = batch.after(verdict.num_accepted_tokens)
        return Advance(verdict, self.draft_input, after, self.verify_input.proposed_depth)


class Advance(NamedTuple):
    """The result of a round for a serving loop: its verdict and the state of the next round."""

    verdict: Verdict
    draft_input: DraftInput
    batch: Batch
    proposed_depth: torch.Tensor  # i32 [B], of the round's trees


def check_drafts(batch: Batch, drafts: Candidates | ExplicitCandidates | VerifyInput, dtype: torch.dtype) -> None:
    """Raise NotFinite if a score of the round's drafts is NaN, as those of logits with NaN or +inf are.

    Of a verify input the candidates count, where it has them.
    """
    pool = drafts.candidates if isinstance(drafts, VerifyInput) else drafts
    is_nan_B = (pool or drafts).scores.isnan().any(-1).tolist()
    if any(is_nan_B):
        index = is_nan_B.index(True)
        number = int(batch.num_rounds[index]) + 1
        raise NotFinite("drafter", dtype_name(dtype), int(batch.request_ids[index]), number)
