"""Calls of the two implementations: the reference once per trial, the fast one in one launch for all."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.core.uniforms import token_noise
from specsim.correctness.exact.cases import Draw
from specsim.correctness.exact.distribution import Implementation, VerifierCall
from specsim.correctness.exact.verifier import Accepted, DraftedTree, Verifier, rows

_UNIT = math.log2(math.e)  # at this temperature the weight of a logit is 2^logit; whole logits need no rounding
LENGTH = 4  # tokens of a request
_POOL = 2**15  # number of requests searched for noise in a region


def reference(verifier: Verifier) -> Implementation:
    """Call specsim.reference.acceptance once per trial."""

    def run(drafted: Sequence[Draw], trials: Sequence[VerifierCall]) -> list[Accepted]:
        trees = [DraftedTree.of(draw) for draw in drafted]
        return [verifier.accept(trees[trial.draw], trial.uniforms, trial.final) for trial in trials]

    return run


def fast(verifier: Verifier, device: str) -> Implementation:
    """Launch specsim.fast.verify on one request per trial."""
    return partial(_walk, verifier, device)


def _walk(verifier: Verifier, device: str, drafted: Sequence[Draw], trials: Sequence[VerifierCall]) -> list[Accepted]:
    from specsim.fast.verify import walk
    from specsim.fast.vocabulary.penalties import Logits

    draws = [drafted[trial.draw] for trial in trials]
    config = _config(verifier, max(draws, key=lambda draw: draw.depth_limit))
    batch = _batch(verifier, drafted, trials).to(device)
    logits_RV = rows([target_V for draw in draws for target_V in draw.target_NV]).log2().float().to(device)
    width = config.num_draft_tokens if config.verifier_kind.draws == "node" else config.num_steps + 1
    uniforms = [[] if verifier.is_coupled else trial.uniforms for trial in trials]
    uniforms_BW = torch.tensor([[*row, *[0.5] * (width - len(row))] for row in uniforms], dtype=torch.float64)
    final_B = torch.tensor([trial.final for trial in trials], dtype=torch.float64)
    verify_input = _verify_input(draws, config).to(device)
    logits = Logits.unchanged(logits_RV, len(trials))
    verdict = walk(batch, verify_input, logits, (uniforms_BW.to(device), final_B.to(device)), config)
    return _accepted(verdict.to("cpu"))


def _config(verifier: Verifier, draw: Draw) -> SpecConfig:
    num_nodes = len(draw.parents)
    num_steps = max(map(draw.depth, range(num_nodes)))
    topk = max(map(draw.parents.count, draw.parents))
    return SpecConfig(topk, num_steps, num_nodes, 1, max_len=LENGTH + 1 + draw.depth_limit, **verifier.settings)


def _batch(verifier: Verifier, drafted: Sequence[Draw], trials: Sequence[VerifierCall]) -> Batch:
    params = SamplingParams(temperature=0.0 if verifier.name == "greedy" else _UNIT)
    size = len(trials)
    ids = ids_with_noise(drafted, trials) if verifier.is_coupled else range(size)
    return Batch.of(ids, range(size), [LENGTH] * size, [params] * size, vocab_size=len(drafted[0].target_NV[0]))


def ids_with_noise(drafted: Sequence[Draw], trials: Sequence[VerifierCall]) -> list[int]:
    """Find requests whose own noise lies in the trials' regions, a different one for every trial of a region.

    Kernels derive noise from its name. A region is identified by the winners of each position's race under p and under
    q.
    """
    pool_PWV = _noise(len(drafted[0].parents), len(drafted[0].target_NV[0]))
    winners = {index: _winners(drafted[index], pool_PWV) for index in {trial.draw for trial in trials}}
    ids_by_region: dict[tuple, Iterator[int]] = {}
    chosen = []
    for trial in trials:
        wanted = _winners(drafted[trial.draw], torch.tensor([trial.uniforms], dtype=torch.float64))
        region = (trial.draw, *wanted[0].tolist())
        if region not in ids_by_region:
            inside = (winners[trial.draw] == wanted).all(1).nonzero().flatten().tolist()
            if not inside:
                raise LookupError(f"none of {_POOL} requests has noise in a region of tree {trial.draw}")
            ids_by_region[region] = itertools.cycle(inside)
        chosen.append(next(ids_by_region[region]))
    return chosen


@cache
def _noise(num_positions: int, vocab_size: int) -> torch.Tensor:
    """Draw the noise of the searched requests, f64 [P, W, V]."""
    ids = torch.arange(_POOL)[:, None]
    positions = LENGTH + 1 + torch.arange(num_positions)
    return token_noise(torch.zeros_like(ids), ids, positions[None, :], vocab_size)


def _winners(draw: Draw, noise_PWV: torch.Tensor) -> torch.Tensor:
    """Find the winners [P, 2W-1] of each position's race under the target and, except at the last, the drafter."""
    target_PW = (rows(draw.target_NV).log() + noise_PWV).argmax(-1)
    draft_PS = (rows(draw.draft_NV[:-1]).log() + noise_PWV[:, :-1]).argmax(-1)
    return torch.cat([target_PW, draft_PS], dim=1)


def _verify_input(draws: Sequence[Draw], config: SpecConfig) -> VerifyInput:
    from specsim.reference.tree import lay_out

    parents = [list(draw.living_parents) for draw in draws]
    tokens_BN = torch.tensor([draw.tokens for draw in draws])
    slots_BN = torch.arange(tokens_BN.numel()).view_as(tokens_BN)
    roots = (tokens_BN[:, 0], torch.full((len(draws),), LENGTH), slots_BN)
    tree = lay_out(parents, tokens_BN[:, 1:], torch.ones(tokens_BN[:, 1:].shape), roots, config)
    if not config.has_draft_prob:
        return tree
    inner = max(draws[0].parents) + 1
    return replace(tree, draft_prob=torch.stack([rows(draw.draft_NV[:inner]).float() for draw in draws]))


def _accepted(verdict: Verdict) -> list[Accepted]:
    nodes = len(verdict.predict) // len(verdict.accept_index)
    paths = zip(verdict.accept_index.tolist(), verdict.accepted_tokens(), strict=True)
    return [([node % nodes for node in path[: len(tokens)]], tokens[-1]) for path, tokens in paths]
