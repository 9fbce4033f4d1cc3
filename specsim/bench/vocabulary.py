"""Passes of a round over the vocabulary: verification under several distributions, and the drafts' top-k."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from specsim.bench.clock import copies_of
from specsim.bench.contest import Contender, contest, roofline_target
from specsim.bench.random_trees import agree_with, random_parents, tree_input
from specsim.bench.roofline import Peaks, RooflineBound, TensorBytes
from specsim.bench.round_checks import check_verdict
from specsim.bench.row import OURS, BenchRow, Check, all_of, equal, within
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.core.pool import KVBuffer, KVLayout, KVPool

SEQ_LEN = 1024
MAX_LEN = 2048
# Requests and the tree of each; their product is the number of rows.
TREES = (
    (1, SpecConfig.plain(max_len=MAX_LEN)),
    (1, SpecConfig(topk=4, num_steps=3, num_draft_tokens=8, max_len=MAX_LEN)),
    (64, SpecConfig(topk=4, num_steps=3, num_draft_tokens=8, max_len=MAX_LEN)),
    (64, SpecConfig(topk=8, num_steps=4, num_draft_tokens=32, max_len=MAX_LEN)),
)
FILTERS = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02)
# Name, sampling, standard deviation of the logits: 4 is peaked as a model's, 0.5 flat.
DISTRIBUTIONS = (
    ("greedy verify", SamplingParams(), 4.0),
    ("sampling verify", SamplingParams(temperature=1.0), 4.0),
    ("sampling verify, filters, peaked", FILTERS, 4.0),
    ("sampling verify, filters, flat", FILTERS, 0.5),
)
SHARE = 0.60
MANY_ROWS = 512
TOPK = 8
IN_CACHE = "so few logits lie in the L2 cache, as in a round after the product that makes them"


@dataclass(frozen=True, slots=True)
class Case:
    """Trees to verify."""

    batch: Batch
    verify_input: VerifyInput
    pools: KVPool
    config: SpecConfig
    logits: Sequence[torch.Tensor]


def vocabulary_rows(vocab_size: int, peaks: Peaks, quick: bool) -> Iterator[BenchRow]:
    """Time every distribution at every number of rows, then the drafts' top-k."""
    for requests, config in TREES[1:3] if quick else TREES:
        rows = requests * config.num_draft_tokens
        for name, sampling, scale in DISTRIBUTIONS:
            case = make_case(requests, config, sampling, vocab_size, scale)
            yield _row(name, rows, vocab_size, peaks, *_verify(case))
            del case
            torch.cuda.empty_cache()
        yield _row(f"draft top-{TOPK}", rows, vocab_size, peaks, *_topk(rows, vocab_size))
        torch.cuda.empty_cache()


def make_case(
    requests: int, config: SpecConfig, sampling: SamplingParams, vocab_size: int, scale: float, device: str = "cuda"
) -> Case:
    """Make random trees whose nodes the target often agrees with."""
    generator = torch.Generator().manual_seed(requests + config.num_draft_tokens)
    nodes = config.num_draft_tokens
    pools = KVPool(KVBuffer(KVLayout(1, 1, 16), 16, torch.float32, device), None, 16, requests, MAX_LEN)
    pools.token_ids.zero_()
    batch = Batch.of(
        list(range(requests)), list(range(requests)), [SEQ_LEN] * requests, [sampling] * requests, vocab_size
    )
    parents = random_parents(requests, nodes, config.num_steps, generator)
    tokens = torch.stack([torch.randperm(vocab_size, generator=generator)[:nodes] for _ in range(requests)])
    verify_input = tree_input(parents, batch.seq_lens, tokens, torch.arange(requests * nodes).view(requests, nodes))
    verify_input = verify_input.to(device)
    logits = []
    for _ in range(copies_of(2 * requests * nodes * vocab_size) if device == "cuda" else 1):
        values = torch.empty(requests * nodes, vocab_size, device=device, dtype=torch.bfloat16).normal_(0, scale)
        agree_with(values, verify_input, 0.8, generator)
        logits.append(values)
    return Case(batch.to(device), verify_input, pools, config, logits)


def _verify(case: Case) -> tuple[Contender, int]:
    from specsim.fast.verify import verify

    def run(index: int) -> Verdict:
        return verify(case.batch, case.verify_input, case.logits[index], case.config, case.pools)

    requests = case.batch.size
    checked = {0, requests - 1} if case.config.num_draft_tokens <= 8 else {requests - 1}

    def check(verdict: Verdict) -> Check:
        inputs = case.batch, case.verify_input, case.logits[0], case.config, case.pools.token_ids
        return check_verdict(*inputs, verdict, sorted(checked))

    return Contender(OURS, run, check), len(case.logits)


def _topk(rows: int, vocab_size: int) -> tuple[Contender, int]:
    from specsim.fast.vocabulary.topk import draft_topk

    copies = copies_of(2 * rows * vocab_size)
    logits = [torch.randn(rows, vocab_size, device="cuda", dtype=torch.bfloat16) * 4 for _ in range(copies)]

    def check(drafts: tuple[torch.Tensor, torch.Tensor]) -> Check:
        from specsim.reference.drafting import draft_topk as expected_topk

        rows_checked = sorted({*range(min(rows, 32)), rows - 1})
        prob, ids = expected_topk(logits[0][rows_checked].double(), TOPK, None)
        found_prob, found_ids = drafts
        exact = equal("ids", {"ids": found_ids[rows_checked]}, {"ids": ids})
        close = within("p", found_prob[rows_checked], prob, 1e-5)
        return all_of(f"top-{TOPK} of {len(rows_checked)} rows against float64", exact, close)

    return Contender(OURS, lambda index: draft_topk(logits[index], TOPK, None), check), copies


def _row(name: str, rows: int, vocab_size: int, peaks: Peaks, contender: Contender, copies: int) -> BenchRow:
    bound = RooflineBound((TensorBytes("logits", 2 * rows * vocab_size),))  # once, bf16
    note = f" ({SHARE:.0%} of read bandwidth)"
    set_targets = roofline_target(1 / SHARE, note) if rows >= MANY_ROWS else None
    notes = [IN_CACHE] if rows < MANY_ROWS else []
    return contest(
        name, {"rows": rows, "V": vocab_size}, (contender,), bound, peaks, copies, set_targets=set_targets, notes=notes
    )
