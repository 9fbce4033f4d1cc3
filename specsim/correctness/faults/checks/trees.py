"""Trees of synthetic candidate pools: with many equal scores, and with malformed parent lists.

`is_tree` defines a tree here, independently of both implementations.
"""

import random
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Candidates
from specsim.correctness.faults.fault import FaultFinding

Pool = tuple[list[float], list[int]]  # scores, and the parents of every block
CONFIG = SpecConfig(topk=3, num_steps=3, num_draft_tokens=8, page_size=1)


def is_tree(chosen: list[int], parent_list: list[int], k: int) -> bool:
    """Whether every candidate is chosen once and after its parent, or hangs from the root."""
    blocks = [flat // k for flat in chosen]
    is_valid = len(set(chosen)) == len(chosen) and all(0 <= block < len(parent_list) for block in blocks)
    return is_valid and all(not block or parent_list[block] in chosen[:i] for i, block in enumerate(blocks))


def check(setting: dict[str, Any], device: str) -> list[FaultFinding]:
    """Check `count` pools, `tied` or `malformed`, with the code of `impl`."""
    rng = random.Random(0)
    pools = [_pool(rng) for _ in range(setting["count"])]
    if setting["pools"] == "tied":
        finding = _tied(pools, setting["impl"], device)
    else:
        finding = _malformed(rng, pools, setting["impl"], device)
    return [finding] if finding else []


def _pool(rng: random.Random) -> Pool:
    """Make scores of a few values, none above its parent's, and the parents of every block."""
    k = CONFIG.topk
    scores = sorted(rng.choices((1.0, 0.5, 0.25), k=k), reverse=True)
    parents = [-1]
    level = range(k)
    for _ in range(CONFIG.num_steps - 1):
        lanes = sorted(level, key=lambda flat: (-scores[flat], flat))[:k]
        parents += lanes
        first = len(scores)
        for lane in lanes:
            scores += sorted((scores[lane] * rng.choice((1.0, 0.5)) for _ in range(k)), reverse=True)
        level = range(first, len(scores))
    return scores, parents


def _tied(pools: list[Pool], impl: str, device: str) -> FaultFinding | None:
    """Build trees with candidates' own indices as tokens, so that they show the chosen ones."""
    tree = import_module(f"specsim.{impl}.tree")
    shape = (len(pools), CONFIG.num_draft_tokens)
    k = CONFIG.topk
    candidates = _candidates(pools).to(device)
    zeros = torch.zeros(len(pools), dtype=torch.int64, device=device)
    slots = torch.zeros(shape, dtype=torch.int64, device=device)
    try:
        built = tree.build(candidates, zeros.int(), zeros, slots, CONFIG)
    except tree.MalformedTree as error:
        return FaultFinding("tree", "equal scores", "a tree", str(error))
    for request, (tokens, parents) in enumerate(zip(built.draft_tokens.tolist(), built.parents.tolist(), strict=True)):
        chosen = tokens[1:]
        parent_list = pools[request][1]
        if not is_tree(chosen, parent_list, k):
            return FaultFinding("tree", f"pool {request}", "every node after its parent", str(chosen))
        expected = [0 if flat < k else 1 + chosen.index(parent_list[flat // k]) for flat in chosen]
        if parents[1:] != expected:
            return FaultFinding("tree", f"pool {request}, parents", str(expected), str(parents[1:]))
    return None


def _malformed(rng: random.Random, pools: list[Pool], impl: str, device: str) -> FaultFinding | None:
    """Whether the check agrees with `is_tree` about every choice, half of them damaged."""
    tree = import_module(f"specsim.{impl}.tree")
    count = CONFIG.num_draft_tokens - 1
    drawn = [_spoiled(rng, *pool, count) for pool in pools]
    verdicts = [_accepts(tree, impl, parent_list, chosen, device) for parent_list, chosen in drawn]
    for index, (accepted, (parent_list, chosen)) in enumerate(zip(verdicts, drawn, strict=True)):
        expected = is_tree(chosen, parent_list, CONFIG.topk)
        if accepted != expected:
            what = f"parents {parent_list}, chosen {chosen}"
            return FaultFinding("malformed trees", f"list {index}: {what}", _word(expected), _word(accepted))
    return None


def _word(accepted: bool) -> str:
    return "accepted" if accepted else "refused"


def _spoiled(rng: random.Random, scores: list[float], parents: list[int], count: int) -> tuple[list[int], list[int]]:
    """Make a correct choice, and in half of the cases change one entry of the parents or of the choice."""
    chosen = sorted(sorted(range(len(scores)), key=lambda flat: (-scores[flat], flat))[:count])
    parents = list(parents)
    if rng.random() < 0.5:
        parents[rng.randrange(1, len(parents))] = rng.randrange(-1, len(scores) + 2)
    elif rng.random() < 0.5:
        chosen = sorted({*chosen[1:], rng.randrange(len(scores))} | set(rng.sample(range(len(scores)), count)))[:count]
    return parents, chosen


def _accepts(parents: ModuleType, impl: str, parent_list: list[int], chosen: list[int], device: str) -> bool:
    try:
        if impl == "reference":
            parents.parents_of(chosen, parent_list, CONFIG.topk)
        else:
            pool = torch.zeros(1, CONFIG.num_candidates, device=device)
            candidates = Candidates(pool.long(), pool, torch.tensor([parent_list], device=device))
            parents.check(candidates, torch.tensor([chosen], device=device), CONFIG)
    except parents.MalformedTree:
        return False
    return True


def _candidates(pools: list[Pool]) -> Candidates:
    scores = torch.tensor([scores for scores, _ in pools])
    tokens = torch.arange(CONFIG.num_candidates).expand(len(pools), -1).contiguous()
    return Candidates(tokens, scores, torch.tensor([parents for _, parents in pools]))
