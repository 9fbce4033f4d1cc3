"""Comparison of drafts with logits known in two precisions: ranked from the best down, or drawn from a distribution."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from specsim.core.phases import Candidates, ExplicitCandidates, VerifyInput
from specsim.core.uniforms import draft_uniforms, token_noise
from specsim.correctness.differential.comparison import (
    FLOAT32_EPS,
    FieldChecks,
    Mismatch,
    Trio,
    budget,
    log_prob_budget,
    present,
)
from specsim.correctness.differential.step import ComparedRequest

C = TypeVar("C", Candidates, ExplicitCandidates)
LEAST = 1e-30  # smaller probabilities lose bits in float32, or are 0


class LogitsPair(NamedTuple):
    """Logits of the same rows in two precisions; those of the implementation under test are not needed."""

    reference: torch.Tensor
    exact: torch.Tensor

    def log_noise(self, request: ComparedRequest[Any]) -> float:
        """Bound the error of a draft's log probability at the drafts' temperature."""
        temperature = request.temperature if request.config.is_sampled else 1.0
        return log_prob_budget(self.reference, self.exact, request.check.eps) / (temperature or 1.0)


@dataclass(frozen=True, slots=True)
class Ranking:
    """Values known in two precisions, ranked from the best down."""

    reference_V: torch.Tensor
    exact_V: torch.Tensor
    noise: float  # bound on the error of a value

    def compare(self, check: FieldChecks, name: str, chosen: Trio[list[int]]) -> bool:
        """Require the best indices, best first.

        At each place the value may differ from that of exact's choice by `noise`: two values, each off by at most
        `noise`, change places only if they lie within twice that. Values that are equal in both precisions are equal by
        construction; of these the lower index comes first, whatever the rounding.
        """
        for rank, (choice, best) in enumerate(zip(chosen.fast, chosen.exact, strict=True)):
            margin = abs(float(self.exact_V[choice] - self.exact_V[best])) if choice != best else 0.0
            before = chosen.fast[:rank]
            overtaken = {index for index in self._equals(choice) if index < choice}.difference(before)
            if choice in before or overtaken or not margin <= 2 * self.noise:
                raise Mismatch(name, best, choice, rank)
        check.tally.coverage["ties"] += any(len(self._equals(index)) > 1 for index in chosen.exact)
        check.tally.fields[name] += 1
        return check.decided(chosen)

    def _equals(self, index: int) -> list[int]:
        """List the indices whose values equal this one in both precisions."""
        equal = (self.reference_V == self.reference_V[index]) & (self.exact_V == self.exact_V[index])
        return equal.nonzero().flatten().tolist()


def compare_drafts(request: ComparedRequest[Any], name: str, drafts: Trio[torch.Tensor], logits: LogitsPair) -> bool:
    """Compare the K drafts of every lane, target ids i64 [L, K], with the lanes' logits [L, draft V]."""
    draft_ids = request.step.draft_ids
    noise = budget(*logits, request.check.eps)
    for lane, rows in enumerate(zip(*logits, strict=True)):
        tokens = drafts.map(lambda lanes, i=lane: lanes[i].tolist())
        for token, expected in zip(tokens.fast, tokens.reference, strict=True):
            if not (0 <= token < len(draft_ids) and draft_ids[token] >= 0):
                raise Mismatch(name, expected, token, lane)
        ids = tokens.map(lambda chosen: draft_ids[chosen].tolist())
        if not Ranking(*rows, noise).compare(request.check, name, ids):
            return False
    return True


def log_scores(scores: torch.Tensor, score: str = "prob") -> torch.Tensor:
    """Convert scores to sums of logarithms, float64, in which wrong small probabilities show as much as large ones."""
    return scores.double().log() if score == "prob" else scores.double()


def require_falling(name: str, above: torch.Tensor, level_scores: torch.Tensor, first: int) -> None:
    """Require scores [L, K] that rise neither from parent to child nor from sibling to sibling.

    above: [L], scores of the parents. first: index of the level's first entry.
    """
    rising = (torch.cat([above[:, None], level_scores], dim=1).diff(dim=1) > 0).flatten()
    if rising.any():
        entry = int(rising.nonzero()[0])
        score = level_scores.flatten()[entry].item()
        raise Mismatch(name, "at most its parent's and its elder siblings'", score, first + entry)


@dataclass(frozen=True, slots=True)
class DraftRow:
    """Drafts of one row, with their distribution and the place of their uniform where they are drawn."""

    name: str  # field of the tokens
    tokens: Trio[torch.Tensor]  # i64 [K], target ids
    draft_prob: Trio[torch.Tensor | None]  # [V], None where the verifier reads none
    logits: LogitsPair  # [1, draft V]
    root_len: int  # L of the drafts' round
    depth: int  # of the drafts' parent
    lanes: range

    @property
    def prob_name(self) -> str:
        """Field of the distribution."""
        return "draft_input.draft_prob" if self.name.startswith("draft_input.") else "draft_prob"


def compare_row(request: ComparedRequest[Any], row: DraftRow) -> bool:
    """Compare a row's drafts with its logits: the best ones, or those drawn from its distribution."""
    if request.config.is_sampled:
        return compare_draws(request, row)
    return compare_drafts(request, row.name, row.tokens.map(lambda tokens: tokens[None]), row.logits)


def compare_draws(request: ComparedRequest[Any], row: DraftRow) -> bool:
    """Compare drafts and distribution with the row's logits; a greedy request's drafts are the best ones."""
    check = request.check
    tokens = row.tokens
    noise = row.logits.log_noise(request)
    if row.draft_prob.fast is not None:
        values = row.draft_prob.map(lambda prob_V: log_scores(present("draft_prob", prob_V).clamp(min=LEAST)))
        check.within(row.prob_name, values.exact, values.fast, noise)
    if request.temperature == 0:
        return compare_drafts(request, row.name, tokens.map(lambda row_tokens: row_tokens[None]), row.logits)
    draft_ids = request.step.draft_ids
    prob_V = torch.softmax(row.logits.exact[0].double() / request.temperature, dim=-1)
    prob_V = torch.where(draft_ids >= 0, prob_V[draft_ids], 0.0)
    is_distinct = request.config.verifier_kind.drafts == "distinct" and row.depth == 0
    for rank, (lane, token) in enumerate(zip(row.lanes, tokens.fast.tolist(), strict=True)):
        rest_V = _without(prob_V, tokens.fast.tolist()[:rank]) if is_distinct else prob_V
        if not (0 <= token < len(prob_V) and _possible(request, row, lane, rest_V)[token]):
            raise Mismatch(row.name, int(tokens.exact[rank]), token, rank)
    check.tally.fields[row.name] += 1
    return check.decided(tokens.map(torch.Tensor.tolist))


def _without(prob_V: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Distribution without some tokens, normalised, or itself where no other has mass."""
    rest_V = prob_V.clone()
    rest_V[tokens] = 0.0
    return rest_V / rest_V.sum() if bool(rest_V.any()) else prob_V


def _possible(request: ComparedRequest[Any], row: DraftRow, lane: int, prob_V: torch.Tensor) -> torch.Tensor:
    """Find the tokens that the lane's draw may have given, bool [V].

    The logarithms of their probabilities are off by at most the noise of the lane's logits.
    """
    batch = request.batch
    noise = row.logits.log_noise(request)
    if request.config.verifier_kind.is_coupled:
        position = torch.tensor([row.root_len + row.depth + 1])
        score_V = prob_V.log() + token_noise(batch.seeds, batch.request_ids, position, len(prob_V))[0]
        return (prob_V > 0) & (score_V >= score_V.max() - 2 * noise)
    root_len = torch.tensor([row.root_len])
    uniform = draft_uniforms(batch.seeds, batch.request_ids, root_len, row.depth, request.config.topk)[0, lane]
    cdf_V = prob_V.cumsum(-1)
    slack = math.expm1(noise) + 16 * FLOAT32_EPS
    return (prob_V > 0) & (cdf_V - prob_V - slack <= uniform) & (uniform <= cdf_V + slack)


def compare_lanes(request: ComparedRequest[VerifyInput], first_logits: LogitsPair) -> bool:
    """Compare a static tree's drafts: first those of the draft input, then one of every lane a step."""
    check = request.check
    k = request.config.topk
    lanes_candidates = candidates_of(request, Candidates)
    entered = request.of(request.step.entered)
    parents = lanes_candidates.field("parent_list")
    tokens = lanes_candidates.field("tokens")
    scores = lanes_candidates.field("scores")
    draft_prob = request.field("draft_prob")
    check.same("candidates.parent_list", parents.reference, parents.fast)
    check.same("candidates.tokens", entered.field("topk_index").fast.cpu(), tokens.fast[:k])
    if draft_prob.fast is not None:
        handed_in = present("draft_prob", entered.field("draft_prob").fast).cpu()
        check.same("draft_prob", handed_in, draft_prob.fast[0])
    noise_K = [first_logits.log_noise(request)] * k
    for at in range(request.config.num_steps * k):
        step, lane = divmod(at, k)
        if step:
            row = DraftRow(
                name="candidates.tokens",
                tokens=tokens.map(lambda entries, i=at: entries[i : i + 1]),
                # of the lane's last token, which is the parent
                draft_prob=draft_prob.map(lambda prob_MV, node=at - k + 1: None if prob_MV is None else prob_MV[node]),
                logits=LogitsPair(*(logits_KV[lane, None] for logits_KV in lane_logits(lanes_candidates, step))),
                root_len=request.length,
                depth=step,
                lanes=range(lane, lane + 1),
            )
            if not _compare_child(request, row):
                return False
            noise_K[lane] += row.logits.log_noise(request)
        values = scores.map(lambda entries, i=at: log_scores(entries[i : i + 1], request.config.score))
        check.within("candidates.scores", values.exact, values.fast, noise_K[lane])
    return True


def candidates_of(request: ComparedRequest[VerifyInput], kind: type[C]) -> ComparedRequest[C]:
    """Give the request with the candidates, of that type, that its tree was selected from."""

    def candidates(tree: VerifyInput) -> C:
        if not isinstance(tree.candidates, kind):
            raise Mismatch("candidates (type)", kind.__name__, type(tree.candidates).__name__)
        return tree.candidates

    return request.of(request.states.map(candidates))


def lane_logits(candidates: ComparedRequest[Candidates], step: int) -> LogitsPair:
    """Compute the logits [K, draft V] of the lanes' drafts of a step ≥ 1."""
    return LogitsPair(*(pool.draft_logits[step - 1][candidates.index] for pool in candidates.states[:2]))


def _compare_child(request: ComparedRequest[VerifyInput], row: DraftRow) -> bool:
    """Compare one lane's draft; a dropped lane proposes token 0 with a distribution of zeros."""
    if not request.is_dropped(row.depth):
        return compare_draws(request, row)
    request.check.same(row.name, row.tokens.reference, row.tokens.fast)
    if row.draft_prob.fast is not None:
        expected = present("draft_prob", row.draft_prob.reference)
        request.check.same(row.prob_name, expected, row.draft_prob.fast)
    return True
