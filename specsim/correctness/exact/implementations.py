"""How a column carries out trials: the reference a call each, the fast column all of them in one launch."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.core.uniforms import gumbel_noise
from specsim.correctness.exact.distribution import Column, Trial
from specsim.correctness.exact.model import Draw
from specsim.correctness.exact.verifier import Accepted, Given, Verifier, rows

_UNIT = math.log2(math.e)  # the temperature at which a logit's weight is 2^logit, of whole logits without rounding
LENGTH, _ROOM = 4, 64  # of the requests, in tokens: far from the limit
_POOL = 2**15  # requests among whose noise that of a region is looked for


def reference(verifier: Verifier) -> Column:
    """Calls of specsim.reference.acceptance."""

    def run(drafted: Sequence[Draw], trials: Sequence[Trial]) -> list[Accepted]:
        given = [Given.of(draw) for draw in drafted]
        return [verifier.accept(given[trial.draw], trial.uniforms, trial.final) for trial in trials]

    return run


def fast(verifier: Verifier, device: str) -> Column:
    """Launches of specsim.fast.verify, a request a trial."""
    return partial(_walk, verifier, device)


def _walk(verifier: Verifier, device: str, drafted: Sequence[Draw], trials: Sequence[Trial]) -> list[Accepted]:
    from specsim.fast.verify import laws, walk
    from specsim.fast.vocabulary.penalties import Logits

    draws = [drafted[trial.draw] for trial in trials]
    config, batch = _config(verifier, draws[0]), _batch(verifier, drafted, trials).to(device)
    logits_RV = rows([law for draw in draws for law in draw.target_NV]).log2().float().to(device)
    law = laws(batch, Logits.unchanged(logits_RV, len(trials)))
    width = config.num_draft_tokens if verifier.drafts == "siblings" else config.num_steps + 1
    uniforms = [[] if verifier.is_coupled else trial.uniforms for trial in trials]
    uniforms_BW = torch.tensor([[*each, *[0.5] * (width - len(each))] for each in uniforms], dtype=torch.float64)
    final_B = torch.tensor([trial.final for trial in trials], dtype=torch.float64)
    verify_input = _verify_input(draws, config).to(device)
    return _accepted(walk(batch, verify_input, law, (uniforms_BW.to(device), final_B.to(device)), config).to("cpu"))


def _config(verifier: Verifier, draw: Draw) -> SpecConfig:
    num_nodes = len(draw.parents)
    num_steps, topk = max(map(draw.depth, range(num_nodes))), max(map(draw.parents.count, draw.parents))
    return SpecConfig(topk, num_steps, num_nodes, 1, max_len=_ROOM, **verifier.settings)


def _batch(verifier: Verifier, drafted: Sequence[Draw], trials: Sequence[Trial]) -> Batch:
    params = SamplingParams(temperature=0.0 if verifier.name == "greedy" else _UNIT)
    size, vocab_size = len(trials), len(drafted[0].target_NV[0])
    ids = ids_with_noise(drafted, trials) if verifier.is_coupled else range(size)
    return Batch.of(ids, range(size), [LENGTH] * size, [params] * size, vocab_size)


def ids_with_noise(drafted: Sequence[Draw], trials: Sequence[Trial]) -> list[int]:
    """Requests whose own noise lies in the regions of the trials' noise, another for every trial of a region.

    Kernels draw noise by its name. A region is told by who wins each position's race, under p and under q.
    """
    positions = LENGTH + 1 + torch.arange(len(drafted[0].parents))
    zero, ids = torch.zeros(_POOL, 1, dtype=torch.int64), torch.arange(_POOL)[:, None]
    pool_PWV = gumbel_noise(zero, ids, positions[None, :], len(drafted[0].target_NV[0]))
    winners = {index: _winners(drafted[index], pool_PWV) for index in {trial.draw for trial in trials}}
    found: dict[tuple, Iterator[int]] = {}
    chosen = []
    for trial in trials:
        wanted = _winners(drafted[trial.draw], torch.tensor([trial.uniforms], dtype=torch.float64))
        region = (trial.draw, *wanted[0].tolist())
        if region not in found:
            inside = (winners[trial.draw] == wanted).all(1).nonzero().flatten().tolist()
            if not inside:
                raise LookupError(f"none of {_POOL} requests has noise in a region of the tree {trial.draw}")
            found[region] = itertools.cycle(inside)
        chosen.append(next(found[region]))
    return chosen


def _winners(draw: Draw, noise_PWV: torch.Tensor) -> torch.Tensor:
    """Tokens that win each position's race, under the target's law and, but for the last, the drafter's: [P, 2W-1]."""
    target_PW = (rows(draw.target_NV).log() + noise_PWV).argmax(-1)
    draft_PS = (rows(draw.draft_NV[:-1]).log() + noise_PWV[:, :-1]).argmax(-1)
    return torch.cat([target_PW, draft_PS], dim=1)


def _verify_input(draws: Sequence[Draw], config: SpecConfig) -> VerifyInput:
    from specsim.reference.tree import links, visibility

    parents, size = list(draws[0].parents), len(draws)
    parents_BN, next_token_BN, next_sibling_BN = (torch.tensor([row] * size) for row in (parents, *links(parents)))
    depths_N = torch.tensor([draws[0].depth(node) for node in range(len(parents))])
    index_BN = torch.arange(size * len(parents)).view(size, -1)
    inner = max(parents) + 1
    laws = torch.stack([rows(draw.draft_NV[:inner]).float() for draw in draws]) if config.has_draft_prob else None
    return VerifyInput(
        draft_tokens=torch.tensor([draw.tokens for draw in draws]),
        parents=parents_BN,
        scores=torch.ones(parents_BN.shape),
        positions=(LENGTH + depths_N).repeat(size),
        mask=visibility(parents).repeat(size, 1, 1),
        retrieve_index=index_BN,
        retrieve_next_token=next_token_BN,
        retrieve_next_sibling=next_sibling_BN,
        cache_locations=index_BN.flatten(),
        draft_prob=laws,
    )


def _accepted(verdict: Verdict) -> list[Accepted]:
    nodes = len(verdict.predict) // len(verdict.accept_index)
    paths = zip(verdict.accept_index.tolist(), verdict.accepted_tokens(), strict=True)
    return [([node % nodes for node in path[: len(tokens)]], tokens[-1]) for path, tokens in paths]
