"""Sampled drafts: the distribution that each was drawn from, by budget, and the draw that follows from it."""

import math
from dataclasses import dataclass

import torch

from specsim.core.phases import DraftInput, VerifyInput
from specsim.core.uniforms import draft_uniforms, gumbel_noise
from specsim.correctness.differential.budget import FLOAT32_EPS, log_prob_budget
from specsim.correctness.differential.comparison import Comparison, Trio, present
from specsim.correctness.differential.divergence import Mismatch
from specsim.correctness.differential.ranking import compare_drafts, log_scores
from specsim.correctness.differential.scene import Scene

LEAST = 1e-30  # below, float32 holds a probability with few bits or none


@dataclass(frozen=True, slots=True)
class Names:
    """By which names the drafts of one row were drawn: L of their round, depth of their parent, and their lanes."""

    root_len: int
    depth: int
    lanes: range


def temperature(scene: Scene, request: int) -> float:
    """0 for a greedy request."""
    return float(scene.batch.sampling.temperature[request])


def log_noise(scene: Scene, request: int, logits: tuple[torch.Tensor, torch.Tensor], check: Comparison) -> float:
    """Bound the error of a draft's log probability at the drafts' temperature."""
    at = temperature(scene, request) if scene.config.is_sampled else 1.0
    return log_prob_budget(*logits, check.eps) / (at or 1.0)


def compare_draws(
    scene: Scene,
    request: int,
    names: Names,
    name: str,
    tokens: Trio[torch.Tensor],
    distributions: Trio[torch.Tensor | None],
    logits: tuple[torch.Tensor, torch.Tensor],
    check: Comparison,
) -> None:
    """Drafts of one row [K], target ids, and the distribution [V] that they were drawn from, against the row's logits.

    logits: [1, draft V] of the reference and of exact. A greedy request's drafts are the best ones.
    """
    noise = log_noise(scene, request, logits, check)
    prob_name = name.rpartition(".")[0]
    prob_name = f"{prob_name}.draft_prob" if prob_name and not prob_name.startswith("candidates") else "draft_prob"
    if distributions.fast is not None:
        values = distributions.map(lambda prob_V: log_scores(present("draft_prob", prob_V).clamp(min=LEAST)))
        check.within(prob_name, values.exact, values.fast, noise)
    if temperature(scene, request) == 0:
        compare_drafts(check, name, tokens.map(lambda own: own[None]), *logits, scene.draft_ids)
        return
    prob_V = torch.softmax(logits[1][0].double() / temperature(scene, request), dim=-1)
    prob_V = torch.where(scene.draft_ids >= 0, prob_V[scene.draft_ids], 0.0)
    for place, (lane, token) in enumerate(zip(names.lanes, tokens.fast.tolist(), strict=True)):
        is_token = 0 <= token < len(prob_V) and prob_V[token] > 0
        if not is_token or not _follows(scene, request, names, lane, prob_V, token, noise):
            raise Mismatch(name, int(tokens.exact[place]), token, place)
    check.tally.fields[name] += 1
    check.decided(torch.equal(tokens.fast, tokens.exact) and torch.equal(tokens.reference, tokens.exact))


def _follows(
    scene: Scene, request: int, names: Names, lane: int, prob_V: torch.Tensor, token: int, noise: float
) -> bool:
    """Whether the draw of that name may have given the token, where logarithms of probabilities are off by noise."""
    seeds = scene.batch.seeds[request, None]
    ids = scene.batch.request_ids[request, None]
    if scene.config.verifier == "gumbel":
        position = torch.tensor([names.root_len + names.depth + 1])
        score_V = prob_V.log() + gumbel_noise(seeds, ids, position, len(prob_V))[0]
        return bool(score_V[token] >= score_V.max() - 2 * noise)
    uniform = float(draft_uniforms(seeds, ids, torch.tensor([names.root_len]), names.depth, scene.config.topk)[0, lane])
    cdf_V = prob_V.cumsum(-1)
    slack = math.expm1(noise) + 16 * FLOAT32_EPS
    return float(cdf_V[token] - prob_V[token]) - slack <= uniform <= float(cdf_V[token]) + slack


def compare_lanes(
    scene: Scene,
    request: int,
    first_logits: tuple[torch.Tensor, torch.Tensor],
    entered: Trio[DraftInput],
    trees: Trio[VerifyInput],
    check: Comparison,
) -> None:
    """A static tree's drafts: the first are those that were handed in, then one of every lane a step."""
    pools = trees.map(lambda tree: present("candidates", tree.candidates))
    k = scene.config.topk
    _, length = scene.place(request)
    tokens, scores = (pools.map(lambda pool, n=name: getattr(pool, n)[request]) for name in ("tokens", "scores"))
    distributions = trees.map(lambda tree: None if tree.draft_prob is None else tree.draft_prob[request])
    check.same("candidates.parent_list", pools.reference.parent_list[request], pools.fast.parent_list[request])
    check.same("candidates.tokens", entered.fast.topk_index[request].cpu(), tokens.fast[:k])
    if distributions.fast is not None:
        handed_in = present("draft_prob", entered.fast.draft_prob)[request].cpu()
        check.same("draft_prob", handed_in, distributions.fast[0])
    noise_K = [log_noise(scene, request, first_logits, check)] * k
    for step in range(scene.config.num_steps):
        for lane in range(k):
            at = step * k + lane
            if step:
                reference, exact = (pool.draft_logits[step - 1][request, lane, None] for pool in pools[:2])
                logits = (reference, exact)
                _compare_child(
                    scene, request, Names(length, step, range(lane, lane + 1)), at, tokens, distributions, logits, check
                )
                noise_K[lane] += log_noise(scene, request, logits, check)
            values = scores.map(lambda own, i=at: log_scores(own[i : i + 1], scene.config.score))
            check.within("candidates.scores", values.exact, values.fast, noise_K[lane])


def _compare_child(
    scene: Scene,
    request: int,
    names: Names,
    at: int,
    tokens: Trio[torch.Tensor],
    distributions: Trio[torch.Tensor | None],
    logits: tuple[torch.Tensor, torch.Tensor],
    check: Comparison,
) -> None:
    """A lane at or beyond max_len was dropped: it proposes token 0, of a distribution of zeros."""
    own = tokens.map(lambda tokens: tokens[at : at + 1])
    parent = at - scene.config.topk + 1  # node of the lane's last token
    distribution = distributions.map(lambda prob_MV: None if prob_MV is None else prob_MV[parent])
    if names.root_len + names.depth - 1 >= scene.config.length_limit:
        check.same("candidates.tokens", own.reference, own.fast)
        if distribution.fast is not None:
            check.same("draft_prob", present("draft_prob", distribution.reference), distribution.fast)
    else:
        compare_draws(scene, request, names, "candidates.tokens", own, distribution, logits, check)
