"""How a column carries out trials: the reference a call each, the fast column all of them in one launch."""

import math
from collections.abc import Sequence
from functools import partial

import torch

from specsim.certify.law import Column, Trial
from specsim.certify.model import Draw
from specsim.certify.verifier import Accepted, Given, Verifier
from specsim.config import SamplingParams, SpecConfig
from specsim.phases import Batch, Verdict, VerifyInput

_UNIT = math.log2(math.e)  # the temperature at which a logit's weight is 2^logit, of whole logits without rounding
_LENGTH, _ROOM = 4, 64  # of the requests, in tokens: far from the limit


def reference(verifier: Verifier) -> Column:
    """Calls of specsim.reference.acceptance."""

    def run(drafted: Sequence[Draw], trials: Sequence[Trial]) -> list[Accepted]:
        given = [Given.of(draw) for draw in drafted]
        return [verifier.accept(given[trial.draw], trial.coins, trial.final) for trial in trials]

    return run


def fast(verifier: Verifier, device: str) -> Column:
    """Launches of specsim.fast.verify, a request a trial."""
    return partial(_walk, verifier, device)


def _walk(verifier: Verifier, device: str, drafted: Sequence[Draw], trials: Sequence[Trial]) -> list[Accepted]:
    from specsim.fast.penalties import Logits
    from specsim.fast.verify import laws, walk

    draws = [drafted[trial.draw] for trial in trials]
    config, batch = _config(verifier, draws[0]), _batch(verifier, draws).to(device)
    logits_BNV = torch.tensor([[list(map(float, law)) for law in draw.target_NV] for draw in draws]).log2()
    logits_RV = logits_BNV.flatten(0, 1).to(device)
    changed_B = torch.zeros(len(trials), dtype=torch.int32, device=device)
    law = laws(batch, Logits(logits_RV, changed_B, torch.empty_like(logits_RV)))
    width = config.num_steps + 1
    coins_BW = torch.tensor([[*trial.coins, *[0.5] * (width - len(trial.coins))] for trial in trials]).double()
    coins = coins_BW.to(device), torch.tensor([trial.final for trial in trials]).double().to(device)
    return _accepted(walk(batch, _verify_input(draws).to(device), law, coins, config).to("cpu"))


def _config(verifier: Verifier, draw: Draw) -> SpecConfig:
    num_nodes = len(draw.parents)
    num_steps, topk = max(map(draw.depth, range(num_nodes))), max(map(draw.parents.count, draw.parents))
    return SpecConfig(topk, num_steps, num_nodes, 1, max_len=_ROOM, **verifier.settings)


def _batch(verifier: Verifier, draws: Sequence[Draw]) -> Batch:
    params = SamplingParams(temperature=0.0 if verifier.name == "greedy" else _UNIT)
    size, vocab_size = len(draws), len(draws[0].target_NV[0])
    return Batch.of(range(size), range(size), [_LENGTH] * size, [params] * size, vocab_size)


def _verify_input(draws: Sequence[Draw]) -> VerifyInput:
    from specsim.reference.tree import links, visibility

    parents, size = list(draws[0].parents), len(draws)
    parents_BN, next_token_BN, next_sibling_BN = (torch.tensor([row] * size) for row in (parents, *links(parents)))
    depths_N = torch.tensor([draws[0].depth(node) for node in range(len(parents))])
    index_BN = torch.arange(size * len(parents)).view(size, -1)
    return VerifyInput(
        draft_tokens=torch.tensor([draw.tokens for draw in draws]),
        parents=parents_BN,
        scores=torch.ones(parents_BN.shape),
        positions=(_LENGTH + depths_N).repeat(size),
        mask=visibility(parents).repeat(size, 1, 1),
        retrieve_index=index_BN,
        retrieve_next_token=next_token_BN,
        retrieve_next_sibling=next_sibling_BN,
        cache_locations=index_BN.flatten(),
    )


def _accepted(verdict: Verdict) -> list[Accepted]:
    nodes = len(verdict.predict) // len(verdict.accept_index)
    rows = zip(verdict.accept_index.tolist(), verdict.accepted_tokens(), strict=True)
    return [([node % nodes for node in path[: len(tokens)]], tokens[-1]) for path, tokens in rows]
