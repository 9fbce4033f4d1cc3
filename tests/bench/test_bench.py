"""Equality checks and contests of a benchmark: no time without a passed check."""

import gc
import io
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from rich.console import Console

from specsim.bench.clock import interleaved_times, timing, without_collection
from specsim.bench.contest import Contender, contest, roofline_target
from specsim.bench.linears import check_product
from specsim.bench.roofline import Peaks, RooflineBound, TensorBytes
from specsim.bench.row import OURS, BenchRow, Check, PerformanceTarget, Timing, all_of, equal, within
from specsim.bench.session import show_row
from specsim.core.config import SamplingParams, SpecConfig
from specsim.correctness.differential.pairs import rounded
from specsim.models.shapes import shape
from specsim.models.synthetic_pair import synthetic_pair

PEAKS = Peaks(read=1e12, copy=1e12, dense=1e12)
PASSED, FAILED = Check("numbers", 0.0, 0), Check("numbers", 1.0, 0, "entry 3: 1, not 2")
TREE = SpecConfig(topk=2, num_steps=3, num_draft_tokens=5, page_size=4)
# Their tensors are on the CPU, where kernels run only if they are interpreted.
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of this machine run on its GPU")


def text_of(row: BenchRow) -> str:
    console = Console(file=io.StringIO(), width=150)
    show_row(row, console)
    return console.file.getvalue()


def test_a_row_has_no_time_without_a_passed_check():
    time = {OURS: Timing(5.0, 1.0, 9)}
    for checks in ({}, {OURS: FAILED}, {"another": PASSED}, {OURS: Check("numbers", math.nan, 1)}):
        with pytest.raises(ValueError, check=lambda error: type(error) is ValueError):
            BenchRow("op", {}, checks, time)
    assert BenchRow("op", {}, {OURS: PASSED}, time, bound_us=4.0).ratio == 1.25


def never() -> Timing:
    raise AssertionError("a time was taken of what was not shown to be equal")


def entered(name: str, check: Check, us: float | None) -> Contender:
    return Contender(name, lambda index: None, lambda _: check, never if us is None else lambda: Timing(us, 2.0, 9))


def test_an_injected_difference_is_named_and_not_timed():
    row = contest("op", {"rows": 8}, [entered(OURS, FAILED, None), entered("library", PASSED, 7.0)], BOUND, PEAKS)
    assert not row.passed
    assert row.targets == ()
    assert math.isnan(row.ours_us)
    text = text_of(row)
    assert "ours: NOT EQUAL, so no time: numbers: entry 3: 1, not 2" in text
    assert "roofline bound" not in text
    assert "library: 7.0 us" in text


BOUND = RooflineBound((TensorBytes("weight", 4_000_000),), 1_000_000)  # 4 us


def test_a_baseline_that_differs_gets_no_time():
    contenders = [entered(OURS, PASSED, 6.0), entered("library", FAILED, None)]
    row = contest("op", {}, contenders, BOUND, PEAKS, set_targets=roofline_target(1.25))
    assert not row.passed
    assert set(row.timings) == {OURS}
    assert row.targets == (PerformanceTarget("time / roofline bound", 1.5, 1.25),)
    assert "time / roofline bound: 1.50; target 1.25, NOT reached" in text_of(row)


def test_a_baseline_that_cannot_run_is_noted_and_ours_has_to_run():
    def broken(index: int) -> None:
        raise RuntimeError("no such kernel\nand more")

    row = contest("op", {}, [entered(OURS, PASSED, 6.0), Contender("flex", broken, never)], BOUND, PEAKS)
    assert row.passed
    assert "flex did not run here: RuntimeError: no such kernel" in row.notes[0]
    with pytest.raises(RuntimeError):
        contest("op", {}, [Contender(OURS, broken, never)], BOUND, PEAKS)


def test_median_and_spread():
    assert timing([4.0, 1.0, 2.0, 3.0, 100.0]).median_us == 3.0
    assert timing([10.0] * 8) == Timing(10.0, 0.0, 8)
    assert timing([1.0, 3.0]) == Timing(2.0, 100.0, 2)
    low_and_high = timing([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    assert low_and_high.spread == pytest.approx(100 * (6 - 2) / 4)


def test_calls_are_timed_in_turns(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    called = []
    runs = {name: partial(called.append, name) for name in ("first", "second")}
    found = interleaved_times(runs, samples=3, parts=2)
    assert called == ["first", "second"] * 3
    assert {name: each.samples for name, each in found.items()} == {"first": 3, "second": 3}


def test_equal_sees_one_bit():
    exact = torch.tensor([0.0, 1.0, float("nan")])
    assert equal("x", {"x": exact.clone()}, {"x": exact}).passed
    for wrong in (torch.tensor([-0.0, 1.0, float("nan")]), torch.tensor([0.0, 1.0000001, float("nan")])):
        check = equal("x", {"x": wrong}, {"x": exact})
        assert not check.passed
        assert check.difference.startswith("x, entry ")
    assert not equal("x", {"x": exact[:2]}, {"x": exact}).passed
    assert not equal("x", {"x": torch.tensor([1])}, {"x": torch.tensor([2])}).passed


def test_within_names_the_worst_entry_and_takes_no_nan():
    exact = torch.tensor([1.0, 2.0, 3.0]).double()
    assert within("x", torch.tensor([1.0, 2.05, 3.0]), exact, 0.1).error == pytest.approx(0.5, rel=1e-5)
    check = within("x", torch.tensor([1.0, 2.0, 3.2]), exact, 0.1)
    assert not check.passed
    assert "entry 2" in check.difference
    assert not within("x", torch.tensor([1.0, float("nan"), 3.0]), exact, 0.1).passed
    assert not within("x", torch.ones(2), exact, 0.1).passed


def test_several_checks_report_the_failed_one():
    small = Check("b", 0.5, 0, "")
    for checks in ((Check("a", 0.9, 1), small), (small, Check("a", 0.9, 1)), (Check("a", 0.9, 1), FAILED)):
        assert not all_of("all", *checks).passed
    assert all_of("all", Check("a", 0.9, 1), Check("b", 0.0, 0)).error == 0.9


def test_a_product_that_misses_a_summand_is_found():
    torch.manual_seed(1)
    x, weight = torch.randn(8, 512).bfloat16(), torch.randn(300, 512).bfloat16()
    check = check_product(x, weight)
    assert check((x.float() @ weight.float().T).bfloat16()).passed
    assert not check((x[:, 1:].float() @ weight[:, 1:].float().T).bfloat16()).passed


@pytest.fixture
def few_columns(monkeypatch) -> None:
    import specsim.bench.tree_attention as module

    monkeypatch.setattr(module, "KV_HEADS", 2)
    monkeypatch.setattr(module, "HEADS", 4)
    monkeypatch.setattr(module, "GROUP", 2)
    monkeypatch.setattr(module, "HEAD_DIM", 16)


@interpreted
@pytest.mark.parametrize(("requests", "nodes"), [(1, 1), (2, 5)])
def test_attention_is_checked_and_a_wrong_mask_is_found(few_columns, requests, nodes):
    from specsim.bench.tree_attention import check_attention, ours, sdpa, trees

    case = trees(requests, nodes, 4, 2, 48, "cpu")
    check, wrong = check_attention(case), case.mask.clone()
    assert check(ours(case)(0)).passed
    assert check(sdpa(case)(0)).passed
    assert not check(ours(case)(1)).passed  # another layer
    if nodes > 1:
        wrong[-1, -1, 0] = False  # the root, which every node sees
        assert not check(sdpa(replace(case, mask=wrong))(0)).passed


@interpreted
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9}], ids=["greedy", "filters"])
def test_verdicts_are_checked_and_an_injected_fault_is_found(sampling):
    from specsim.bench.round_checks import check_verdict
    from specsim.bench.vocabulary import make_case
    from specsim.fast.verify import verify

    config = SpecConfig(topk=4, num_steps=3, num_draft_tokens=8, max_len=2048)
    case = make_case(3, config, SamplingParams(**sampling), 40, 4.0, "cpu")
    found = verify(case.batch, case.verify_input, case.logits[0], config, case.pools)

    def judged(verdict) -> Check:
        given = case.batch, case.verify_input, case.logits[0], config, case.pools.token_ids
        return check_verdict(*given, verdict, range(3))

    assert judged(found).passed
    assert int(found.num_accepted_drafts.max()) > 0
    path = found.accept_index.clone()
    path[1, 1] = -1 if int(path[1, 1]) >= 0 else 8 + 1
    assert "path" in judged(replace(found, accept_index=path)).difference
    last = int(found.accept_index[2, int(found.num_accepted_drafts[2])])
    predict = found.predict.clone()
    predict[last] = (predict[last] + 20) % 40
    assert "bonus token" in judged(replace(found, predict=predict)).difference
    assert "logprobs" in judged(replace(found, logprobs=found.logprobs + 1e-3)).difference
    counted = replace(found, num_accepted_tokens=found.num_accepted_drafts)
    assert "counts of accepted: tokens" in judged(counted).difference


@interpreted
@pytest.mark.parametrize("name", ["gpt-oss-20b", "qwen3-30b-a3b"])
def test_experts_are_checked_and_another_choice_is_found(name, monkeypatch):
    from specsim.bench import experts as module
    from specsim.fast.layers import Weights
    from specsim.fast.model.rows import HiddenRows, Norm
    from specsim.fast.targets.experts import mixture_residual

    monkeypatch.setattr(module, "_normal", lambda *size: torch.empty(size).normal_(0, 0.02).bfloat16())
    torch.manual_seed(0)
    experts = replace(shape(name).config.layers[-1].mlp, num_experts=8, top_k=2, size=64)
    layer, x = module._random(128, experts), torch.randn(4, 128).bfloat16()
    rows = HiddenRows(x, Norm(torch.ones(128).bfloat16(), 1e-5))
    out, chosen = mixture_residual(rows, Weights(layer), experts)
    check = module.check_experts(x, rows.normed(), layer, experts)
    assert check((out.values, chosen)).passed
    assert "chosen experts" in check((out.values, chosen.flip(1))).difference
    assert "rows against float64" in check((out.values * 1.02, chosen)).difference


def test_transformers_gets_the_same_model_and_is_checked():
    from specsim.bench.baselines import TransformersModel, _same_tokens, likeliest

    pair, prompt = rounded(synthetic_pair("eagle3", "llama"), torch.float32), [5, 9, 2, 11]
    theirs = TransformersModel(pair, prompt, 6, torch.float32, "cpu")
    tokens = theirs()
    assert theirs(assistant=theirs.first_layer) == tokens
    assert theirs(assistant=theirs.model) == tokens
    assert _same_tokens(tokens, tokens).passed
    wrong = [*tokens[:3], (tokens[3] + 1) % 48, *tokens[4:]]
    assert _same_tokens(wrong, tokens).difference == "token 3 differs"
    assert not _same_tokens(tokens[:5], tokens).passed
    check = likeliest(pair, prompt)
    assert check(tokens).passed
    assert "below the largest logit" in check(wrong).difference


def test_outputs_are_compared_token_for_token_and_bit_for_bit():
    from specsim.bench.shipped_pair import _equal, same_tokens
    from specsim.serving.outputs import Generation, Output

    def made(*outputs: tuple[tuple[int, ...], tuple[float, ...]]) -> Generation:
        return Generation(tuple(Output("", *each, "length", (1,)) for each in outputs), TREE, 1.0)

    company = made(((1, 2), (-0.5, -0.25)), ((3, 4), (-0.125, -0.75)))
    alone, other = made(((3, 4), (-0.125, -0.75))), made(((3, 4), (-0.125, -0.7500000001)))
    assert _equal("x", company, alone, 1).passed
    assert not _equal("x", company, alone, 0).passed
    assert same_tokens("x", company, other, 1).passed
    assert not _equal("x", company, other, 1).passed
    assert same_tokens("x", company, other, 0).difference == "requests [0]"


def test_no_garbage_is_collected_while_a_part_is_timed():
    seen = []
    interleaved_times({"call": lambda: seen.append(gc.isenabled())}, samples=2)
    assert seen == [False, False]
    assert gc.isenabled()


def test_garbage_is_collected_again_after_an_error():
    with pytest.raises(KeyError), without_collection():
        raise KeyError
    assert gc.isenabled()
