"""Checks of rounds on Triton's interpreter: correct rounds pass, injected differences are found."""

import math
from dataclasses import replace
from operator import attrgetter

import pytest
import torch

import specsim.bench.clock
import specsim.bench.scene
from specsim.bench.roofline import Peaks
from specsim.bench.row import OURS, Timing
from specsim.bench.scale import MOST_TOKENS, points
from specsim.core.config import SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.core.target import Rope
from specsim.correctness.differential.pairs import rounded
from specsim.models.synthetic_pair import synthetic_pair
from specsim.models.tiny_config import tiny_config

MODEL = tiny_config(
    vocab_size=10, hidden_size=4, intermediate_size=6, num_heads=2, num_kv_heads=1, head_dim=2,
    max_position_embeddings=64,
)  # fmt: skip
PEAKS = Peaks(read=1e12, copy=1e12, dense=1e12)
TREE = SpecConfig(topk=2, num_steps=3, num_draft_tokens=5, page_size=4)
# Their tensors are on the CPU, where kernels run only if they are interpreted.
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of this machine run on its GPU")


@pytest.fixture
def scene(monkeypatch):
    return scene_of(TREE, monkeypatch)


def scene_of(config, monkeypatch):
    from specsim.bench.scene import prefilled
    from specsim.models.shapes import random_prompts
    from specsim.serving.generation import load_engine

    monkeypatch.setattr(specsim.bench.scene, "SLACK", 16)
    pair = rounded(synthetic_pair("eagle3", "qwen3"), torch.bfloat16)
    engine = load_engine(pair, config, EngineOptions("fast", torch.bfloat16, "cpu", "round", 2))
    return prefilled(pair, engine, random_prompts(2, 9, pair.target.config.vocab_size))


@interpreted
def test_a_round_is_checked_by_an_independent_forward(scene):
    from specsim.bench.round_checks import check_round

    check = check_round(scene, (0, 1))
    assert check.passed, check
    scene.rounds(2)
    scene.again(1)
    scene.replay()
    assert check_round(scene, (1,)).passed  # timed runs have changed nothing


@interpreted
def test_synthetic_acceptance_is_checked_by_its_schedule():
    from specsim.bench.round_checks import check_round
    from specsim.bench.scene import prefilled
    from specsim.models.shapes import random_prompts
    from specsim.serving.generation import load_engine

    pair = rounded(synthetic_pair("eagle3", "llama"), torch.bfloat16)
    options = EngineOptions("fast", torch.bfloat16, "cpu", "round", 1)
    engine = load_engine(pair, TREE, options, acceptance=SyntheticAcceptance((1, 1, 0)))
    scene = prefilled(pair, engine, random_prompts(1, 9, pair.target.config.vocab_size))
    check = check_round(scene)
    assert check.passed, check
    assert int(scene.round().verify_output.verdict.num_accepted_drafts[0]) == 2
    scene.engine.acceptance = None
    assert not check_round(scene, with_eager=False).passed  # the target would have accepted less


# A tensor of a round, an entry with its wrong value, and the expected text of the check.
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
    "share": ("draft_input.topk_scores", (1, 0), lambda value: 0.9 * value, "probabilities: entry 0"),
    "no share": ("draft_input.topk_scores", (0, 0), lambda value: math.nan, "probabilities: entry 0"),
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
def test_differences_injected_into_a_round_are_found(scene, planted, monkeypatch):
    from specsim.bench.round_checks import check_round

    output = scene.round()
    plant(output, planted)
    monkeypatch.setattr(type(scene), "round", lambda self: output)
    check = check_round(scene, (0, 1), with_eager=False)
    assert not check.passed
    assert PLANTED[planted][-1] in check.difference


@interpreted
def test_log_probabilities_of_first_drafts_are_checked(monkeypatch):
    from specsim.bench.round_checks import check_round

    scene = scene_of(replace(TREE, score="logprob"), monkeypatch)
    output = scene.round()
    monkeypatch.setattr(type(scene), "round", lambda self: output)
    check = check_round(scene, (0, 1), with_eager=False)
    assert check.passed, check
    with torch.inference_mode():
        output.draft_input.topk_scores[1, 0] -= 0.1  # a probability a tenth smaller
    check = check_round(scene, (0, 1), with_eager=False)
    assert "log probabilities: entry 0" in check.difference


@interpreted
def test_a_graph_that_differs_from_eager_kernels_is_found(scene, monkeypatch):
    from specsim.bench.round_checks import check_round

    right = type(scene).round

    def round_(self):
        output = right(self)
        if self.engine.options.graph == "round":
            with torch.inference_mode():
                output.verify_output.draft_extend_input.hidden[0, 1] += 1  # compared with nothing else
        return output

    monkeypatch.setattr(type(scene), "round", round_)
    assert check_round(scene, with_eager=False).passed
    check = check_round(scene)
    assert not check.passed
    assert check.difference.startswith("graph and eager bit for bit: verify_output.draft_extend_input.hidden, entry 1")


@interpreted
def test_requests_on_random_kv_are_checked_too(monkeypatch):
    from specsim.bench.round_checks import check_round
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
    check = check_round(scene, (0, 1), with_eager=False)
    assert check.passed, check
    output = scene.round()
    with torch.inference_mode():
        output.draft_input.bonus_tokens[1] += 1
    monkeypatch.setattr(type(scene), "round", lambda self: output)
    assert "next bonus token of request 1" in check_round(scene, (1,), with_eager=False).difference
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
    case = module.make_round(MODEL.with_heads(head_dim=16, rope=Rope(1e4, 16)), 20, "cpu")
    names = []
    for piece in module._pieces(case):
        check = piece.check(piece.run(0))
        assert check.passed, (piece.name, check)
        names.append(piece.name)
    assert names[0] == "cache locations, selection and tree"
    assert len(names) == 4
    assert int(case.verdict.num_accepted_drafts.max()) > 0


@interpreted
def test_trees_of_every_size_equal_the_references(monkeypatch):
    from specsim.bench import bookkeeping

    checked = []

    def contest(name, setting, contenders, *_):
        [ours] = contenders
        checked.append((setting, ours.check(ours.run(0))))

    monkeypatch.setattr(bookkeeping, "contest", contest)
    monkeypatch.setattr(bookkeeping, "TREES", (SpecConfig(4, 3, 8), SpecConfig(2, 3, 5)))
    monkeypatch.setattr(bookkeeping, "TREE_REQUESTS", (2,))
    list(bookkeeping.tree_rows(PEAKS, "cpu"))
    assert [setting["tree"] for setting, _ in checked] == ["(4, 3, 8)", "(2, 3, 5)"]
    assert all(check.passed for _, check in checked)


@pytest.fixture
def timed(monkeypatch):
    """Replace the clock: each call of `interleaved_times` gives these medians to the modes it times, in their order."""
    from specsim.bench import shipped_pair

    def interleaved_times(runs, samples, parts):
        return {mode: Timing(each, 0.0, samples) for mode, each in zip(runs, (10.0, 100.0, 50.0, 49.0), strict=False)}

    monkeypatch.setattr(shipped_pair, "interleaved_times", interleaved_times)
    return shipped_pair


@interpreted
def test_a_graph_mode_with_other_tokens_gets_no_time(scene, timed, monkeypatch):
    rounds = {id(scene): [[1, 2]]}
    other = replace(scene)
    monkeypatch.setattr(timed, "_accepted", lambda each, count: rounds.get(id(each), [[1, 3]]))
    right, wrong = timed.compared({"plain": scene, "phase": other}, 1)
    assert (right.passed, set(right.timings)) == (True, {OURS, f"{OURS}, enqueued"})
    assert (wrong.passed, wrong.timings, wrong.targets) == (False, {}, ())


@interpreted
def test_graph_modes_are_compared_with_the_best(scene, timed):
    modes = ("plain", "eager", "step", "round")
    rows = list(timed.compared(dict.fromkeys(modes, scene), 1))
    assert [row.ours_us for row in rows] == [10.0, 100.0, 50.0, 49.0]
    targets = {row.name: [(each.name, each.value, each.limit) for each in row.targets] for row in rows}
    assert targets == {
        "shipped pair, plain": [],
        "shipped pair, eager": [],
        "shipped pair, step": [("time / eager", 0.5, 1.0)],
        "shipped pair, round": [("time / best graph mode", 1.0, 1.02)],
    }
