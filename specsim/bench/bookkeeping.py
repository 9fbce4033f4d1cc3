"""Operations of a round other than model and vocabulary: tree, walk, commit, preparation of draft-extend."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

from specsim.bench.contest import Contender, contest
from specsim.bench.random_trees import agree_with
from specsim.bench.roofline import Peaks, RooflineBound, TensorBytes
from specsim.bench.round_checks import check_verdict, tensors_of
from specsim.bench.row import OURS, BenchRow, Check, PerformanceTarget, all_of, equal
from specsim.bench.scene import tree_of
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.phases import AutoregressiveInput, Batch, Candidates, DraftExtendInput, Verdict, VerifyInput
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.core.target import ModelConfig

REQUESTS = 32
SEQ_LEN = 1024
VOCAB_SIZE = 64

CONFIG = SpecConfig(topk=8, num_steps=6, num_draft_tokens=64, max_len=2048)
MOST_US = 60.0


@dataclass(frozen=True, slots=True)
class RoundInputs:
    """A round just after its target forward."""

    batch: Batch
    pools: KVPool
    candidates: Candidates
    bonus_tokens: torch.Tensor
    locations: torch.Tensor
    expected: VerifyInput  # the tree by the reference
    verify_input: VerifyInput
    logits: torch.Tensor
    features: torch.Tensor
    verdict: Verdict  # of the fast implementation's walk


def make_round(model: ModelConfig, num_features: int, device: str = "cuda") -> RoundInputs:
    """Make REQUESTS requests of SEQ_LEN tokens with KV of the model's shape.

    The target agrees with many drafts. Verification has a vocabulary of only VOCAB_SIZE tokens, so that the walk
    dominates its time.
    """
    from specsim.fast.verify import verify
    from specsim.reference import tree

    generator = torch.Generator().manual_seed(0)
    reserved = CONFIG.reserved_columns(SEQ_LEN)
    kv = KVBuffer(model.kv_layout, REQUESTS * reserved, torch.bfloat16, device)
    kv.keys.normal_()
    kv.values.normal_()
    pools = KVPool(kv, None, CONFIG.page_size, REQUESTS, CONFIG.reserved_columns(CONFIG.length_limit))
    pools.token_ids.zero_()
    rows = [pools.open() for _ in range(REQUESTS)]
    for row in rows:
        pools.reserve(row, reserved)
    params = [SamplingParams()] * REQUESTS
    on_cpu = Batch.of(list(range(REQUESTS)), rows, [SEQ_LEN] * REQUESTS, params, VOCAB_SIZE)
    columns = SEQ_LEN + torch.arange(CONFIG.num_draft_tokens)
    locations = pools.req_to_token.cpu()[:, columns]
    candidates = random_candidates(REQUESTS, CONFIG, VOCAB_SIZE, generator)
    bonus_tokens = torch.zeros(REQUESTS, dtype=torch.int32)
    expected = tree.build(candidates, bonus_tokens, on_cpu.seq_lens, locations, CONFIG)
    num_rows = REQUESTS * CONFIG.num_draft_tokens
    batch = on_cpu.to(device)
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator).to(device, torch.bfloat16)
    agree_with(logits, expected, 0.8, generator)
    verify_input = expected.to(device)
    features = torch.randn(num_rows, num_features, device=device, dtype=torch.bfloat16)
    verdict = verify(batch, verify_input, logits, CONFIG, pools)
    return RoundInputs(
        batch, pools, candidates.to(device), bonus_tokens.to(device), locations.to(device), expected, verify_input,
        logits, features, verdict,
    )  # fmt: skip


def bookkeeping_rows(model: ModelConfig, num_features: int, peaks: Peaks) -> Iterator[BenchRow]:
    """Time each operation, then all of them in sequence."""
    case = make_round(model, num_features)
    accepted = float(case.verdict.num_accepted_drafts.float().mean())
    setting = {"requests": REQUESTS, "nodes": CONFIG.num_draft_tokens, "L": SEQ_LEN}
    notes = [f"{accepted:.1f} drafts accepted a request", "inputs lie in the L2 cache, as they do in a round"]
    checks: list[Callable[[Any], Check]] = []
    runs: list[Callable[[int], Any]] = []
    total = RooflineBound(())
    for piece in _pieces(case):
        checked = _once(piece.check)
        checks.append(checked)
        runs.append(piece.run)
        total += piece.bound
        yield contest(piece.name, setting, [Contender(OURS, piece.run, checked)], piece.bound, peaks, notes=notes)

    def everything(index: int) -> None:
        for run in runs:
            run(index)

    def set_targets(times: Mapping[str, float], *_: RooflineBound | Peaks) -> list[PerformanceTarget]:
        return [PerformanceTarget("total time, us", times[OURS], MOST_US)]

    def check(_: None) -> Check:
        return all_of("each of these operations, as above", *(checked(None) for checked in checks))

    name = "all operations but model and vocabulary"
    yield contest(
        name, setting, [Contender(OURS, everything, check)], total, peaks, set_targets=set_targets, notes=notes
    )


@dataclass(frozen=True, slots=True)
class Piece:
    """One operation of a round."""

    name: str
    run: Callable[[int], Any]
    check: Callable[[Any], Check]  # of the first run's result
    bound: RooflineBound


def _once(check: Callable[[Any], Check]) -> Callable[[Any], Check]:
    """Cache the first result of a check: a second run of a commit would find its own work."""
    checks: list[Check] = []

    def cached_check(output: Any) -> Check:
        if not checks:
            checks.append(check(output))
        return checks[0]

    return cached_check


def _pieces(case: RoundInputs) -> Iterator[Piece]:
    """Yield the operations in the order of a round; each is checked before the next one runs."""
    from specsim.fast import kv, tree
    from specsim.fast.kv import draft_extend_input
    from specsim.fast.verify import verify

    batch = case.batch
    pools = case.pools

    def build(_: int) -> VerifyInput:
        locations = kv.tree_locations(batch, CONFIG, pools)
        return tree.build(case.candidates, case.bonus_tokens, batch.seq_lens, locations, CONFIG, batch.draft_steps)

    yield Piece("cache locations, selection and tree", build, partial(same_tree, case.expected), RooflineBound(()))

    def walk(_: int) -> Verdict:
        return verify(batch, case.verify_input, case.logits, CONFIG, pools)

    def check_walk(verdict: Verdict) -> Check:
        inputs = batch, case.verify_input, case.logits, CONFIG, pools.token_ids
        return check_verdict(*inputs, verdict, range(REQUESTS))

    yield Piece(f"walk (verify, V={VOCAB_SIZE})", walk, check_walk, RooflineBound(()))
    before = SimpleNamespace(target=_copy(pools.target), side=pools.side, slots=pools.slots)

    def commit(_: int) -> None:
        kv.commit(batch, case.verify_input.cache_locations, case.verdict, pools)

    yield Piece("commit", commit, lambda _: _check_commit(case, before), _commit_bound(case))

    def prepare(_: int) -> DraftExtendInput:
        tables = pools.req_to_token
        return draft_extend_input(batch, case.verdict, case.features, tables, CONFIG.length_limit, CONFIG.extend)

    yield Piece("draft-extend preparation", prepare, partial(_check_extend, case), _extend_bound(case))


def _copy(kv: KVBuffer) -> KVBuffer:
    layers, slots, heads, size = kv.keys.shape
    copy = KVBuffer(KVLayout(layers, heads, size), slots, kv.keys.dtype, kv.keys.device)
    copy.copy_(kv)
    return copy


def _check_commit(case: RoundInputs, before: Any) -> Check:
    """Compare all slots of all layers with the reference's commit, and the recorded tokens."""
    from specsim.reference.kv import commit

    commit(case.batch, case.verify_input.cache_locations, case.verdict, before)
    ours = case.pools.target
    differing = sum(
        int((mine.view(torch.int16) != theirs.view(torch.int16)).sum())
        for kind in ("keys", "values")
        for mine, theirs in zip(getattr(ours, kind), getattr(before.target, kind), strict=True)
    )
    wrong = ""
    tokens = case.pools.token_ids.cpu()
    for row, (length, path) in enumerate(
        zip(case.batch.seq_lens.tolist(), case.verdict.accepted_tokens(), strict=True)
    ):
        if tokens[row, length + 1 : length + 1 + len(path)].tolist() != path:
            wrong = wrong or f"tokens of request {row}"
    return Check("KV of every slot bit for bit, and the tokens", float(differing), 0, wrong)


def _check_extend(case: RoundInputs, rows: DraftExtendInput) -> Check:
    from specsim.reference.kv import draft_extend_input

    on_cpu = case.batch.to("cpu"), case.verdict.to("cpu"), case.features.cpu(), case.pools.req_to_token.cpu()
    expected = draft_extend_input(*on_cpu, CONFIG.length_limit, CONFIG.extend)
    return equal("the reference's rows", tensors_of(rows), tensors_of(expected))


def _commit_bound(case: RoundInputs) -> RooflineBound:
    """Bound a commit: keys and values of the drafts that have to move, read and written."""
    path = case.verdict.accept_index.cpu()
    nodes = torch.where(path >= 0, path % CONFIG.num_draft_tokens, -1)
    num_moved = int(((nodes >= 0) & (nodes != torch.arange(path.shape[1]))).sum())
    numbers = case.pools.target.keys[:, 0].numel() * 2 * num_moved
    return RooflineBound(
        (TensorBytes("KV of accepted drafts, read", numbers), TensorBytes("KV of accepted drafts, written", numbers))
    )


def _extend_bound(case: RoundInputs) -> RooflineBound:
    size = 2 * REQUESTS * (CONFIG.num_steps + 1) * case.features.shape[1]
    return RooflineBound((TensorBytes("features, read", size), TensorBytes("features, written", size)))


TREES = (SpecConfig(4, 3, 8), SpecConfig(4, 3, 16), SpecConfig(8, 3, 32), SpecConfig(8, 6, 64))
TREE_REQUESTS = (1, 32)


def tree_rows(peaks: Peaks, device: str = "cuda") -> Iterator[BenchRow]:
    """Time each size of tree at each number of requests."""
    for config, requests in product(TREES, TREE_REQUESTS):
        yield _tree_row(config, requests, peaks, device)


def random_candidates(requests: int, config: SpecConfig, vocab_size: int, generator: torch.Generator) -> Candidates:
    """Make the candidates of a drafter that ranks tokens at random."""
    from specsim.reference.drafting import expand, start_lanes
    from specsim.reference.sampling import topk

    def drafts(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        prob = torch.rand(*shape, vocab_size, generator=generator).softmax(-1)
        return topk(prob * 8, config.topk)

    hidden_BKH = torch.zeros(requests, config.topk, 1)
    draft_input = AutoregressiveInput(torch.zeros(requests).int(), *drafts(requests), hidden_BKH[:, 0])
    lanes = start_lanes(draft_input, config)
    for _ in range(config.num_steps - 1):
        lanes = expand(lanes, *drafts(requests, config.topk), hidden_BKH, config)
    return lanes.candidates


def same_tree(expected: VerifyInput, verify_input: VerifyInput) -> Check:
    """Compare a tree with the reference's, without its candidates."""
    names = {name: tensor for name, tensor in tensors_of(expected).items() if "candidates" not in name}
    return equal("the reference's tree", tensors_of(verify_input), names)


def _tree_row(config: SpecConfig, requests: int, peaks: Peaks, device: str) -> BenchRow:
    from specsim.fast import tree
    from specsim.reference import tree as reference

    candidates = random_candidates(requests, config, 64, torch.Generator().manual_seed(0))
    bonus_tokens = torch.zeros(requests, dtype=torch.int32)
    seq_lens = torch.full((requests,), SEQ_LEN)
    locations = torch.arange(requests * config.num_draft_tokens).view(requests, -1)
    expected = reference.build(candidates, bonus_tokens, seq_lens, locations, config)
    inputs = (bonus_tokens.to(device), seq_lens.to(device), locations.to(device))
    on_device = candidates.to(device)
    steps = torch.full((requests,), config.num_steps, dtype=torch.int32, device=device)
    out = tree.build(on_device, *inputs, config, steps)

    def build(_: int) -> VerifyInput:
        return tree.build(on_device, *inputs, config, steps, out=out)

    ours = Contender(OURS, build, partial(same_tree, expected))
    return contest(
        "selection and tree", {"requests": requests, "tree": tree_of(config)}, [ours], RooflineBound(()), peaks
    )
