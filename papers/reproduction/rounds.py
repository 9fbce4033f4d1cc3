"""Figures of the cost model for published servers, with the simulator's default efficiencies: nothing is fitted."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from specsim.core.config import SpecConfig
from specsim.core.policies.goodput import Goodput
from specsim.core.policies.policy import Always
from specsim.simulator.acceptance import Option, iid
from specsim.simulator.cost import CostModel
from specsim.simulator.drafter import Drafter, drafter
from specsim.simulator.hardware import hardware
from specsim.simulator.model import Model, model
from specsim.simulator.server import simulate
from specsim.simulator.workload import closed_loop

ROOT = Path(__file__).resolve().parents[2]
DRAFTS = (1, 3, 5)  # lengths of chains that a policy chooses among, besides plain decoding
MOST_DRAFTS = 8
PLAIN = SpecConfig.plain()


def billions(config: str, active: bool = False) -> float:
    """Count the parameters of a config.json in papers/, or those that one token uses."""
    target = model(ROOT / "papers" / config)
    return (target.active_parameters if active else target.parameters) / 1e9


def mtp_closed_form(config: str, acceptance: float) -> float:
    """Compute the textbook's speed-up of one MTP module, whose cost is its share of the active parameters."""
    target = model(ROOT / "papers" / config)
    cost_ratio = drafter("mtp", target).model.active_parameters / target.active_parameters
    return (1 + acceptance) / (1 + cost_ratio)


def mtp_speedup(config: str, acceptance: float, gpu: str, gpus: int, requests: int, context: int) -> float:
    """Compute the speed-up of one draft by an MTP module over plain decoding, by the cost model."""
    target = model(ROOT / "papers" / config)
    cost = CostModel(hardware(gpu), target, drafter("mtp", target), tensor_parallel=gpus)
    contexts = np.full(requests, context)
    plain = replace(cost, drafter=None).round(contexts, PLAIN)
    return (1 + acceptance) * plain / cost.round(contexts, SpecConfig(1, 1, 2))


def plain_tokens_per_s(name: str, gpu: str, context: int, requests: int = 1) -> float:
    """Compute the tokens a second of a batch without drafts."""
    return requests / CostModel(hardware(gpu), model(name)).round(np.full(requests, context), PLAIN)


def sparse_draft_ms(name: str, gpus: int, gpu: str, prefill: int, requests: int, drafts: int, budget: int) -> float:
    """Compute the milliseconds in which the model itself, with a KV budget, drafts for a batch."""
    dense = model(name)
    sparse = replace(dense, layers=tuple(replace(group, window=budget) for group in dense.layers))
    return drafts * plain_ms(sparse, gpus, gpu, prefill, requests)


def verify_ms(name: str, gpus: int, gpu: str, prefill: int, requests: int, drafts: int) -> float:
    """Compute the milliseconds of verifying the drafts of a batch."""
    cost = CostModel(hardware(gpu), model(name), tensor_parallel=gpus)
    return 1e3 * cost.phases(np.full(requests, prefill), SpecConfig(1, drafts, drafts + 1)).verify


def plain_ms(name: str | Model, gpus: int, gpu: str, prefill: int, requests: int) -> float:
    """Compute the milliseconds of a step of a batch without drafts."""
    target = name if isinstance(name, Model) else model(name)
    return 1e3 * CostModel(hardware(gpu), target, tensor_parallel=gpus).round(np.full(requests, prefill), PLAIN)


def sparse_speedup(
    name: str, gpus: int, gpu: str, prefill: int, requests: int, drafts: int, budget: int, tokens: float
) -> float:
    """Compute MagicDec's speed-up, T_AR · Ω / (γ T_D + T_V), with the published tokens of a round Ω."""
    server = (name, gpus, gpu, prefill, requests)
    spent = sparse_draft_ms(*server, drafts, budget) + verify_ms(*server, drafts)
    return plain_ms(*server) * tokens / spent


def round_speedup(plain: float, tokens: float, draft: float, verify: float) -> float:
    """Compute T_AR · Ω / (γ T_D + T_V) from published milliseconds."""
    return plain * tokens / (draft + verify)


def block_speedup(name: str, gpu: str, layers: int, drafts: int, tokens: float, requests: int) -> float:
    """Compute the speed-up of a block drafter, which makes all drafts in one forward of its layers."""
    target = model(name)
    contexts = np.full(requests, 1024)
    plain = CostModel(hardware(gpu), target).round(contexts, PLAIN)
    return tokens * plain / _one_forward_seconds(target, gpu, layers, drafts, contexts)


def parallel_gain(name: str, gpu: str, layers: int, drafts: int, requests: int) -> float:
    """Compute the gain of one forward of several layers over EAGLE-3's one layer at a time, at equal accept length."""
    target = model(name)
    contexts = np.full(requests, 2048)
    one_by_one = CostModel(hardware(gpu), target, drafter("eagle3", target, target.vocab_size))
    seconds = one_by_one.round(contexts, SpecConfig(1, drafts, drafts + 1))
    return seconds / _one_forward_seconds(target, gpu, layers, drafts, contexts)


def goodput_gain(requests: int, acceptance: float) -> float:
    """Compute the throughput of the goodput policy over plain decoding, for two batches of requests."""
    options = [Option.plain(), *(Option(SpecConfig(1, n, n + 1), iid(acceptance, n)) for n in DRAFTS)]
    workload = closed_loop(2 * requests, requests, (256, 768), (64, 128), 0)
    cost = _eagle3()
    goodput = Goodput(cost, [option.config for option in options])
    plain, chosen = (simulate(cost, options, workload, policy=policy) for policy in (Always(0), goodput))
    return plain.duration / chosen.duration


def best_length(requests: int, acceptance: float) -> float:
    """Find the number of drafts, 0 to 8, with the largest speed-up of a chain at a batch size."""
    speedups = {0: 1.0} | {drafts: chain_speedup(requests, acceptance, drafts) for drafts in range(1, MOST_DRAFTS + 1)}
    return float(max(speedups, key=speedups.__getitem__))


def longer_at_low_load(low: int, high: int, acceptance: float) -> float:
    """Compute by how many drafts the best chain at a low load is longer than that at a high load."""
    return best_length(low, acceptance) - best_length(high, acceptance)


def chain_speedup(requests: int, acceptance: float, drafts: int) -> float:
    """Compute the speed-up of a chain at a batch size, of EAGLE-3 on Llama-3.1-8B and an H100."""
    contexts = np.full(requests, 1024)
    tokens = 1 + sum(iid(acceptance, drafts).rates())
    cost = _eagle3()
    return tokens * cost.round(contexts, PLAIN) / cost.round(contexts, SpecConfig(1, drafts, drafts + 1))


def _eagle3() -> CostModel:
    target = model("llama-3.1-8b")
    return CostModel(hardware("H100-SXM"), target, drafter("eagle3", target, 32000))


def _one_forward_seconds(target: Model, gpu: str, layers: int, drafts: int, contexts: np.ndarray) -> float:
    """Compute a round whose drafts come from draft-extend, a forward of `layers` layers, alone."""
    head = drafter("eagle3", target, target.vocab_size).model
    deep = replace(head, layers=(replace(head.layers[0], count=layers),))
    phases = CostModel(hardware(gpu), target, Drafter(deep)).phases(contexts, SpecConfig(1, drafts, drafts + 1))
    return phases.verify + phases.extend + phases.host
