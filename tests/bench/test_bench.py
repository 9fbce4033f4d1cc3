"""Benchmarks: floors by hand, gates on planted differences. No test times anything."""

import io
import json
import math
from dataclasses import replace
from itertools import count
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import specsim.bench.clock
import specsim.bench.scene
import specsim.bench.session as run
from specsim.bench.checks import all_of, equal, within
from specsim.bench.clock import timing
from specsim.bench.contest import Contender, at_floor, contest
from specsim.bench.linears import judge_product, product_floor, shapes
from specsim.bench.roofline import Ceilings, Floor, Part, forward_floor, round_floor
from specsim.bench.row import OURS, Asked, Check, Row, Timing
from specsim.bench.scale import MOST_TOKENS, points
from specsim.bench.session import bench
from specsim.bench.show import show_row
from specsim.bench.suites import Options, Suite
from specsim.cli.main import main
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.drafter import DrafterConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.core.target import ModelConfig
from specsim.correctness.differential.pairs import rounded
from specsim.maintain import results as kept_results
from specsim.models.checkpoint.layout import target_layout
from specsim.models.synthetic_pair import synthetic_pair

CEILINGS = Ceilings(read=1e12, copy=1e12, dense=1e12)
PASSED, FAILED = Check("numbers", 0.0, 0), Check("numbers", 1.0, 0, "entry 3: 1, not 2")
MODEL = ModelConfig(
    family="llama", vocab_size=10, hidden_size=4, intermediate_size=6, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=2, rms_norm_eps=1e-5, max_position_embeddings=64, rope_theta=1e4,
)  # fmt: skip
HEAD = DrafterConfig("eagle3", replace(MODEL, num_layers=1), 7, 4, (0, 1, 1))
TREE = SpecConfig(topk=2, num_steps=3, num_draft_tokens=5, page_size=4)

# Their columns stand on the CPU, where kernels run only if they are interpreted.
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of this machine run on its GPU")


def text_of(row: Row) -> str:
    console = Console(file=io.StringIO(), width=150)
    show_row(row, console)
    return console.file.getvalue()


def parts_of(floor: Floor) -> dict[str, tuple[int, int]]:
    return {part.tensor: (part.count, part.bytes) for part in floor.parts}


# Floors.


def test_floor_of_a_forward_by_hand():
    floor = forward_floor(MODEL, requests=2, rows=3, seq_len=8)
    assert parts_of(floor) == {
        "model.embed_tokens.weight": (1, 2 * 6 * 4),  # the rows that are looked up
        "model.norm.weight": (1, 2 * 4),
        "lm_head.weight": (1, 2 * 40),
        "model.layers.*.input_layernorm.weight": (2, 2 * 2 * 4),
        "model.layers.*.post_attention_layernorm.weight": (2, 2 * 2 * 4),
        "model.layers.*.self_attn.q_proj.weight": (2, 2 * 2 * 16),
        "model.layers.*.self_attn.k_proj.weight": (2, 2 * 2 * 8),
        "model.layers.*.self_attn.v_proj.weight": (2, 2 * 2 * 8),
        "model.layers.*.self_attn.o_proj.weight": (2, 2 * 2 * 16),
        "model.layers.*.mlp.gate_proj.weight": (2, 2 * 2 * 24),
        "model.layers.*.mlp.up_proj.weight": (2, 2 * 2 * 24),
        "model.layers.*.mlp.down_proj.weight": (2, 2 * 2 * 24),
        "target KV of layer *, keys": (2, 2 * 2 * 2 * 8 * 2),
        "target KV of layer *, values": (2, 2 * 2 * 2 * 8 * 2),
    }
    products = 2 * (16 + 8 + 8 + 16 + 3 * 24) + 40
    attended = 2 * 2 * 3 * 8 * 2 * 2  # layers, requests, rows, columns, heads, head size
    assert floor.operations == 2 * 6 * products + 4 * attended


def test_floor_of_a_plain_decode_of_llama_3_8b():
    from specsim.models.shapes import shape

    model = shape("llama-3-8b").config
    floor = forward_floor(model, 1, 1, 1024)
    weights = sum(math.prod(size) for size in target_layout(model).values()) - 128256 * 4096 + 4096
    assert floor.bytes == 2 * weights + 2 * 32 * 2 * 1024 * 8 * 128
    assert floor.bytes == pytest.approx(15.0e9 + 0.134e9, rel=1e-2)


def test_floor_of_a_round_reads_the_drafter_once_a_forward():
    floor = parts_of(round_floor(MODEL, HEAD, TREE, requests=1, seq_len=8))
    target = parts_of(forward_floor(MODEL, 1, 5, 8))
    assert {name: floor[name] for name in target} == target
    drafter = {name: each for name, each in floor.items() if name not in target}
    # Two steps and the draft-extend; only that reads the features' fc. Rows looked up: 2 + 2 + 4.
    assert drafter == {
        "drafter midlayer.hidden_norm.weight": (3, 3 * 8),
        "drafter midlayer.input_layernorm.weight": (3, 3 * 8),
        "drafter midlayer.post_attention_layernorm.weight": (3, 3 * 8),
        "drafter midlayer.self_attn.q_proj.weight": (3, 3 * 2 * 32),
        "drafter midlayer.self_attn.k_proj.weight": (3, 3 * 2 * 16),
        "drafter midlayer.self_attn.v_proj.weight": (3, 3 * 2 * 16),
        "drafter midlayer.self_attn.o_proj.weight": (3, 3 * 2 * 16),
        "drafter midlayer.mlp.gate_proj.weight": (3, 3 * 2 * 24),
        "drafter midlayer.mlp.up_proj.weight": (3, 3 * 2 * 24),
        "drafter midlayer.mlp.down_proj.weight": (3, 3 * 2 * 24),
        "drafter norm.weight": (3, 3 * 8),
        "drafter lm_head.weight": (3, 3 * 2 * 28),
        "drafter fc.weight": (1, 2 * 48),
        "drafter target embed_tokens.weight": (3, 2 * (2 + 2 + 4) * 4),
        "drafter KV of layer *, keys": (3, 3 * 2 * 8 * 2),
        "drafter KV of layer *, values": (3, 3 * 2 * 8 * 2),
    }


def test_an_eagle_head_reads_the_targets_vocabulary():
    head = DrafterConfig("eagle", replace(MODEL, num_layers=1), 10, 4)
    floor = parts_of(round_floor(MODEL, head, TREE, 1, 8))
    assert floor["drafter target lm_head.weight"] == (3, 3 * 2 * 40)
    assert floor["drafter fc.weight"] == (3, 3 * 2 * 32)  # of embedding and feature: every forward has both


def test_a_plain_round_is_a_forward():
    assert round_floor(MODEL, None, SpecConfig.plain(), 3, 8) == forward_floor(MODEL, 3, 1, 8)


def test_time_of_a_floor_is_the_larger_of_bytes_and_operations():
    ceilings = Ceilings(read=2e6, copy=1.0, dense=5e6)
    assert Floor((Part("a", 4), Part("b", 6)), 5).us(ceilings) == 5
    assert Floor((Part("a", 4),), 100).us(ceilings) == 20


def test_products_of_a_layer_have_the_shapes_of_its_tensors():
    assert shapes(MODEL) == {"qkv": (8, 4), "o": (4, 4), "gate-up": (12, 4), "down": (4, 6), "lm_head": (10, 4)}
    assert product_floor(3, 8, 4).bytes == 2 * (32 + 12 + 24)
    assert product_floor(3, 8, 4).operations == 2 * 3 * 32


# Rows and contests.


def test_a_row_has_no_time_without_a_passed_check():
    time = {OURS: Timing(5.0, 1.0, 9)}
    for checks in ({}, {OURS: FAILED}, {"another": PASSED}, {OURS: Check("numbers", math.nan, 1)}):
        with pytest.raises(ValueError, match="without a passed check"):
            Row("op", {}, checks, time)
    assert Row("op", {}, {OURS: PASSED}, time, floor_us=4.0).ratio == 1.25


def never() -> Timing:
    raise AssertionError("a time was taken of what was not shown to be equal")


def entered(name: str, check: Check, us: float | None) -> Contender:
    return Contender(name, lambda index: None, lambda _: check, never if us is None else lambda: Timing(us, 2.0, 9))


def test_a_planted_difference_is_named_and_nothing_is_timed():
    row = contest("op", {"rows": 8}, [entered(OURS, FAILED, None), entered("library", PASSED, 7.0)], FLOOR, CEILINGS)
    assert not row.passed
    assert row.asked == ()
    assert math.isnan(row.ours_us)
    text = text_of(row)
    assert "ours: NOT EQUAL, so no time: numbers: entry 3: 1, not 2" in text
    assert "ours / floor" not in text
    assert "library: 7.0 us" in text


FLOOR = Floor((Part("weight", 4_000_000),), 1_000_000)  # 4 us


def test_a_rivals_difference_costs_it_its_time():
    contenders = [entered(OURS, PASSED, 6.0), entered("library", FAILED, None)]
    row = contest("op", {}, contenders, FLOOR, CEILINGS, asks=at_floor("time / floor", 1.25))
    assert not row.passed
    assert set(row.timings) == {OURS}
    assert row.asked == (Asked("time / floor", 1.5, 1.25),)
    assert "time / floor: 1.50, at most 1.25: NOT MET" in text_of(row)


def test_a_rival_that_cannot_run_is_told_of_and_we_have_to_run():
    def broken(index: int) -> None:
        raise RuntimeError("no such kernel\nand more")

    row = contest("op", {}, [entered(OURS, PASSED, 6.0), Contender("flex", broken, never)], FLOOR, CEILINGS)
    assert row.passed
    assert "flex did not run here: RuntimeError: no such kernel" in row.notes[0]
    with pytest.raises(RuntimeError):
        contest("op", {}, [Contender(OURS, broken, never)], FLOOR, CEILINGS)


def test_the_best_rival_is_none_of_ours():
    checks = dict.fromkeys((OURS, "ours, the graph alone", "a", "b"), PASSED)
    times = {name: Timing(us, 1.0, 9) for name, us in zip(checks, (5.0, 1.0, 8.0, 7.0), strict=True)}
    assert Row("op", {}, checks, times).best_rival[0] == "b"
    assert Row("op", {}, {OURS: PASSED}).best_rival is None


def test_median_and_spread():
    assert timing([4.0, 1.0, 2.0, 3.0, 100.0]).median_us == 3.0
    assert timing([10.0] * 8) == Timing(10.0, 0.0, 8)
    assert timing([1.0, 3.0]) == Timing(2.0, 100.0, 2)
    low_and_high = timing([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    assert low_and_high.spread == pytest.approx(100 * (6 - 2) / 4)


# Gates.


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


def test_of_several_checks_one_that_failed_speaks():
    small = Check("b", 0.5, 0, "")
    for checks in ((Check("a", 0.9, 1), small), (small, Check("a", 0.9, 1)), (Check("a", 0.9, 1), FAILED)):
        assert not all_of("all", *checks).passed
    assert all_of("all", Check("a", 0.9, 1), Check("b", 0.0, 0)).error == 0.9


def test_a_product_that_misses_a_summand_is_found():
    torch.manual_seed(1)
    x, weight = torch.randn(8, 512).bfloat16(), torch.randn(300, 512).bfloat16()
    judge = judge_product(x, weight)
    assert judge((x.float() @ weight.float().T).bfloat16()).passed
    assert not judge((x[:, 1:].float() @ weight[:, 1:].float().T).bfloat16()).passed


@pytest.fixture
def few_columns(monkeypatch) -> None:
    import specsim.bench.tree_attention as module

    monkeypatch.setattr(module, "KV_HEADS", 2)
    monkeypatch.setattr(module, "HEADS", 4)
    monkeypatch.setattr(module, "GROUP", 2)
    monkeypatch.setattr(module, "HEAD_DIM", 16)


@interpreted
@pytest.mark.parametrize(("requests", "nodes"), [(1, 1), (2, 5)])
def test_attention_is_judged_and_a_wrong_mask_is_found(few_columns, requests, nodes):
    from specsim.bench.tree_attention import judge_attention, ours, sdpa, trees

    case = trees(requests, nodes, 4, 2, 48, "cpu")
    judge, wrong = judge_attention(case), case.mask.clone()
    assert judge(ours(case)(0)).passed
    assert judge(sdpa(case)(0)).passed
    assert not judge(ours(case)(1)).passed  # another layer
    if nodes > 1:
        wrong[-1, -1, 0] = False  # the root, which every node sees
        assert not judge(sdpa(replace(case, mask=wrong))(0)).passed


@interpreted
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9}], ids=["greedy", "filters"])
def test_verdicts_are_judged_and_a_planted_one_is_found(sampling):
    from specsim.bench.verify_checks import judge_verdict
    from specsim.bench.vocabulary import make_case
    from specsim.fast.verify import verify

    config = SpecConfig(topk=4, num_steps=3, num_draft_tokens=8, max_len=2048)
    case = make_case(3, config, SamplingParams(**sampling), 40, 4.0, "cpu")
    found = verify(case.batch, case.verify_input, case.logits[0], config, case.pools)

    def judged(verdict) -> Check:
        given = case.batch, case.verify_input, case.logits[0], config, case.pools.token_ids
        return judge_verdict(*given, verdict, range(3))

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


# Rounds.


@pytest.fixture
def scene(monkeypatch):
    from specsim.bench.scene import prefilled, random_prompts
    from specsim.serving.generation import load_engine

    monkeypatch.setattr(specsim.bench.scene, "SLACK", 16)
    pair = rounded(synthetic_pair("eagle3", "qwen3"), torch.bfloat16)
    engine = load_engine(pair, TREE, EngineOptions("fast", torch.bfloat16, "cpu", "round", 2))
    return prefilled(pair, engine, random_prompts(2, 9, pair.target.config.vocab_size))


@interpreted
def test_a_round_is_judged_by_an_independent_forward(scene):
    from specsim.bench.round_checks import judge_round

    check = judge_round(scene, (0, 1))
    assert check.passed, check
    scene.rounds(2)
    scene.again(1)
    scene.replay()
    assert judge_round(scene, (1,)).passed  # what was timed has changed nothing


@interpreted
def test_a_round_of_synthetic_acceptance_is_judged_by_its_schedule():
    from specsim.bench.round_checks import judge_round
    from specsim.bench.scene import prefilled, random_prompts
    from specsim.serving.generation import load_engine

    pair = rounded(synthetic_pair("eagle3", "llama"), torch.bfloat16)
    options = EngineOptions("fast", torch.bfloat16, "cpu", "round", 1)
    engine = load_engine(pair, TREE, options, acceptance=SyntheticAcceptance((1, 1, 0)))
    scene = prefilled(pair, engine, random_prompts(1, 9, pair.target.config.vocab_size))
    check = judge_round(scene)
    assert check.passed, check
    assert int(scene.round().verify_output.verdict.num_accepted_drafts[0]) == 2
    scene.engine.acceptance = None
    assert not judge_round(scene, with_eager=False).passed  # the target would have accepted less


# A tensor of a round, what is written over an entry of it, and what the check says of it.
PLANTED = {
    "logits": ("verify_output.target_logits", (3, 5), lambda value: value + 0.5, "logits of request 0"),
    "hidden": ("draft_input.hidden", (0, 1), lambda value: value + 0.5, "hidden state of request 0"),
    "path": ("verify_output.verdict.accept_index", (0, 1), lambda value: 1 - value, "paths: path"),
    "count of drafts": (
        "verify_output.verdict.num_accepted_drafts",
        1,
        lambda value: value + 5,
        "counts of accepted: drafts",
    ),
    "prediction": ("verify_output.verdict.predict", 4, lambda value: 7, "tokens off the paths"),
    "logprob": ("verify_output.verdict.logprobs", (0, 3), lambda value: -1, "logprobs past the paths"),
    "other draft": ("draft_input.topk_index", (0, 1), lambda value: value + 1, "next first drafts of request 0"),
    "same draft": ("draft_input.topk_index", 1, lambda value: 0, "next first drafts of request 1"),
    "share": ("draft_input.topk_p", (1, 0), lambda value: 0.9 * value, "probabilities: entry 0"),
    "no share": ("draft_input.topk_p", (0, 0), lambda value: math.nan, "probabilities: entry 0"),
    "score": ("verify_input.scores", (1, 2), lambda value: math.nan, "trees of the candidates by the reference"),
    "place": ("verify_input.retrieve_index", (1, 3), lambda value: 0, "trees of the candidates by the reference"),
    "first draft": ("verify_input.candidates.tokens", (0, 0), lambda value: value + 1, "the drafts that the round"),
}


def plant(output, name: str) -> None:
    path, place, wrong, _ = PLANTED[name]
    tensor = attrgetter(path)(output)
    with torch.inference_mode():
        tensor[place] = wrong(tensor[place])


@interpreted
@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_planted_into_a_round_is_found(scene, planted, monkeypatch):
    from specsim.bench.round_checks import judge_round

    output = scene.round()
    plant(output, planted)
    monkeypatch.setattr(type(scene), "round", lambda self: output)
    check = judge_round(scene, (0, 1), with_eager=False)
    assert not check.passed
    assert PLANTED[planted][-1] in check.difference


@interpreted
def test_a_graph_that_differs_from_its_kernels_launched_one_by_one_is_found(scene, monkeypatch):
    from specsim.bench.round_checks import judge_round

    right = type(scene).round

    def round_(self):
        output = right(self)
        if self.engine.options.graph == "round":
            with torch.inference_mode():
                output.verify_output.draft_extend_input.hidden[0, 1] += 1  # which nothing else is held against
        return output

    monkeypatch.setattr(type(scene), "round", round_)
    assert judge_round(scene, with_eager=False).passed
    check = judge_round(scene)
    assert not check.passed
    assert check.difference.startswith("graph and eager bit for bit: verify_output.draft_extend_input.hidden, entry 1")


@interpreted
def test_requests_on_random_kv_are_judged_too(monkeypatch):
    from specsim.bench.round_checks import judge_round
    from specsim.bench.scene import close, invented, stacked
    from specsim.serving.generation import load_engine

    pair = rounded(synthetic_pair("eagle3", "llama"), torch.bfloat16)
    before = dict(pair.target.tensors)
    stacked(pair)
    assert all(torch.equal(pair.target.tensors[name], tensor) for name, tensor in before.items())
    engine = load_engine(pair, TREE, EngineOptions("fast", torch.bfloat16, "cpu", "round", 2))
    own, query = engine.target._weights, "model.layers.0.self_attn.q_proj.weight"
    assert own["model.layers.0.self_attn.qkv_proj.weight"].data_ptr() == pair.target.tensors[query].data_ptr()
    pools = engine.make_pools(2, 2 * engine.config.reserved_columns(21))
    for kv in (pools.target, pools.draft):
        kv.keys.normal_()
        kv.values.normal_()
    scene = invented(pair, engine, pools, 2, 21)
    check = judge_round(scene, (0, 1), with_eager=False)
    assert check.passed, check
    output = scene.round()
    with torch.inference_mode():
        output.draft_input.bonus_tokens[1] += 1
    monkeypatch.setattr(type(scene), "round", lambda self: output)
    assert "next bonus token of request 1" in judge_round(scene, (1,), with_eager=False).difference
    close(scene)
    assert pools.free_slots == pools.num_slots


def test_points_of_growth():
    for full in (False, True):
        grid = points(full)
        assert len(grid) == len(set(grid))
        assert all(requests * length <= MOST_TOKENS for requests, length in grid)
        assert {(1, 1024), (1, 131072), (4, 131072), (256, 1024), (256, 3504), (16, 56240)} <= set(grid)
    assert set(points(False)) <= set(points(True))


@interpreted
def test_pieces_of_a_round_equal_the_references(monkeypatch):
    import specsim.bench.bookkeeping as module

    monkeypatch.setattr(module, "REQUESTS", 2)
    monkeypatch.setattr(module, "SEQ_LEN", 24)
    monkeypatch.setattr(module, "CONFIG", SpecConfig(topk=4, num_steps=3, num_draft_tokens=12, max_len=96))
    case = module.make_round(replace(MODEL, head_dim=16), 20, "cpu")
    names = []
    for name, work, judge, _ in module._pieces(case):
        check = judge(work(0))
        assert check.passed, (name, check)
        names.append(name)
    assert names[0] == "selection and tree"
    assert len(names) == 4
    assert int(case.verdict.num_accepted_drafts.max()) > 0


# Peers, and the shipped pair.


def test_transformers_is_given_the_same_model_and_is_judged():
    from specsim.bench.baselines import Peer, _judge_logits, _same_tokens

    pair, prompt = rounded(synthetic_pair("eagle3", "llama"), torch.float32), [5, 9, 2, 11]
    peer = Peer(pair, prompt, 6, torch.float32, "cpu")
    tokens = peer()
    assert peer(assistant=peer.first_layer) == tokens
    assert peer(assistant=peer.model) == tokens
    assert _same_tokens(tokens, tokens).passed
    wrong = [*tokens[:3], (tokens[3] + 1) % 48, *tokens[4:]]
    assert _same_tokens(wrong, tokens).difference == "token 3 differs"
    assert not _same_tokens(tokens[:5], tokens).passed
    judge = _judge_logits(pair, prompt)
    assert judge(tokens).passed
    assert "behind the likeliest" in judge(wrong).difference


@interpreted
def test_a_graph_mode_with_other_tokens_gets_no_time(scene):
    from specsim.bench.modes import _accepted, _mode_row

    rounds = _accepted(scene, 2)
    assert 2 <= sum(map(len, rounds)) <= 8
    times = {}
    row = _mode_row("phase", scene, rounds, [[-1]], times)
    assert (row.passed, row.timings, times) == (False, {}, {})


@interpreted
def test_a_graph_mode_is_timed_read_and_enqueued_and_compared_with_the_mode_before(scene, monkeypatch):
    from specsim.bench import modes

    monkeypatch.setattr(modes, "walled", lambda run, samples, parts: Timing(50.0, 0.0, samples))
    rounds = modes._accepted(scene, 1)
    times = {"plain": 10.0, "step": 100.0}
    row = modes._mode_row("phase", scene, rounds, rounds, times, rounds)
    assert set(row.timings) == {OURS, f"{OURS}, enqueued"}
    assert [(each.what, each.value) for each in row.asked] == [("time / step", 0.5)]
    assert times["phase"] == 50.0


def test_outputs_are_compared_token_for_token_and_bit_for_bit():
    from specsim.bench.determinism import _equal, _same_tokens
    from specsim.serving.generation import Generation, Output

    def made(*outputs: tuple[tuple[int, ...], tuple[float, ...]]) -> Generation:
        return Generation(tuple(Output("", *each, "length", (1,)) for each in outputs), TREE, 1.0)

    company = made(((1, 2), (-0.5, -0.25)), ((3, 4), (-0.125, -0.75)))
    alone, other = made(((3, 4), (-0.125, -0.75))), made(((3, 4), (-0.125, -0.7500000001)))
    assert _equal("x", company, alone, 1).passed
    assert not _equal("x", company, alone, 0).passed
    assert _same_tokens("x", company, other, 1).passed
    assert not _equal("x", company, other, 1).passed
    assert _same_tokens("x", company, other, 0).difference == "requests [0]"


@pytest.mark.parametrize("suite", run.SUITES)
def test_the_groups_of_a_suite_are_found(suite):
    for group in run.SUITES[suite].groups.values():
        group(Options(suite), CEILINGS).close()  # nothing runs before the first row is asked for


# A run.


ASKED = (Asked("time / floor", 1.25, 1.3),)
ROWS = (
    Row("linear", {"rows": 8}, {OURS: PASSED}, {OURS: Timing(5.0, 1.0, 9)}, FLOOR, 4.0, ASKED),
    Row("linear", {"rows": 64}, {OURS: PASSED, "library": PASSED}, {"library": Timing(9.0, 1.0, 9)}, FLOOR, 4.0),
)


@pytest.fixture
def suite(monkeypatch):
    """A suite of made-up rows that needs no GPU."""

    def install(*rows: Row) -> None:
        suites = {"kernels": Suite({"some": lambda options, ceilings: iter(rows)}, 60)}
        monkeypatch.setattr("specsim.bench.session.SUITES", suites)
        monkeypatch.setattr("specsim.bench.result.SUITES", suites)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(run, "versions", lambda device: {"gpu": "a GPU", "torch": "2", "triton": "3"})
        monkeypatch.setattr(specsim.bench.clock, "measure_ceilings", lambda: CEILINGS)

    return install


def test_a_run_is_shown_and_written(suite, tmp_path, capsys):
    suite(*ROWS)
    file = tmp_path / "result.json"
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--suite", "kernels", "--json", str(file)])
    assert exit_.value.code == 0
    value = json.loads(file.read_text())
    assert value["command"] == "specsim bench --suite kernels"
    assert value["is_complete"]
    assert value["rows"][0]["floor"]["parts"] == [{"tensor": "weight", "count": 1, "bytes": 4_000_000}]
    assert value["rows"][0]["ratio"] == 1.25
    assert value["rows"][1]["ratio"] is None
    out = capsys.readouterr().out
    assert "linear: rows 8" in out
    assert "Every equality check passed; 1 of 1 asked figures are met." in " ".join(out.split())
    assert "4,000,000 bytes" in out


def test_a_failed_check_is_exit_status_1(suite, capsys):
    suite(ROWS[0], Row("linear", {"rows": 1}, {OURS: FAILED}))
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--suite", "kernels"])
    assert exit_.value.code == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "NOT EQUAL, so no time: numbers: entry 3: 1, not 2" in out
    assert "NOT EQUAL in 1 of 2 rows" in out


def test_what_time_cuts_off_is_a_part(suite):
    suite(*ROWS)
    result = bench(Options("kernels", seconds=1e-9))
    assert (result.rows, result.finished, result.is_complete) == (ROWS[:1], (), False)
    whole = bench(Options("kernels"))
    assert (whole.rows, whole.finished, whole.is_complete) == (ROWS, ("some",), True)
    assert not bench(Options("kernels", quick=True)).is_complete


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_one_sentence_and_exit_status_2(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--suite", "round"])
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("specsim: device is 'cpu'; allowed: a GPU that CUDA can use")


BAD = {"suite": "all", "only": "x", "seconds": 0, "shape": "llama-9"}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_named(name):
    with pytest.raises(InputError) as error:
        run.check_options(replace(Options("round"), **{name: BAD[name]}))
    assert error.value.name == name


def test_rows_of_a_group_that_time_cut_off_are_not_kept(suite, tmp_path, monkeypatch):
    suite()
    groups = {"some": lambda *given: iter(ROWS[:1]), "others": lambda *given: iter(ROWS[::-1])}
    for module in (run, kept_results):
        monkeypatch.setattr(module, "SUITES", {"kernels": Suite(groups, 60)})
    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=count().__next__))
    files = [tmp_path / "cut.json", tmp_path / "others.json"]
    cut = bench(Options("kernels", seconds=3), "specsim bench", files[0])
    assert (cut.rows, cut.finished, cut.unfinished) == ((ROWS[0], ROWS[1]), ("some",), 1)
    assert bench(Options("kernels", only="others"), "specsim bench", files[1]).unfinished == 0
    (path,) = kept_results.keep(files, tmp_path)
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [row["setting"] for row in rows] == [each.setting for each in (ROWS[0], *ROWS[::-1])]
