"""Drafters with fewer tokens and with a window: their distributions, and outputs equal to plain decoding's."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from specsim import DraftWindow, EngineOptions, InputError, SamplingParams, SpecConfig, generate, load, load_engine
from specsim.core.kinds import KINDS
from specsim.core.pair import Pair
from specsim.core.phases import Batch, PrefillInput
from specsim.models.draft_limits import cut_head, limit_drafts
from specsim.models.synthetic_pair import bridged_pair, cut_pair, synthetic_pair, windowed_pair

WITH_WEIGHTS = [name for name, kind in KINDS.items() if kind.has_weights]
OWN_KV = [name for name in WITH_WEIGHTS if KINDS[name].kv == "own"]
PROMPTS = ((5, 17, 3, 40, 8, 9, 30, 2, 11), (1, 2, 4, 4), (30,))
CHAIN = SpecConfig(1, 3, page_size=4)
OPTIONS = {"reference": EngineOptions(dtype=torch.float64), "fast": EngineOptions("fast")}
either = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def root_distribution(pair: Pair, options: EngineOptions) -> torch.Tensor:
    """Give the distribution of the first draft below the root of a prompt's first round, f64 [V]."""
    engine = load_engine(pair, replace(CHAIN, verifier="rejection"), options)
    pools = engine.make_pools(1, 64)
    row = pools.open()
    pools.reserve(row, engine.config.reserved_columns(len(PROMPTS[0])))
    sampling = SamplingParams(temperature=0.8, seed=5)
    batch = Batch.of([0], [row], [len(PROMPTS[0])], [sampling], pair.target.config.vocab_size).to(engine.device)
    prefill = PrefillInput.of_prompts([PROMPTS[0]]).to(engine.device)
    state: Any = engine.prefill(batch, prefill, pools).draft_input
    return engine.drafter.propose(batch, state, pools).draft_prob[0, 0].double().cpu()


@either
@pytest.mark.parametrize("kind", WITH_WEIGHTS)
def test_a_cut_distribution_is_the_whole_one_renormalised(kind: str, options: EngineOptions):
    pair = synthetic_pair(kind)
    whole_V = root_distribution(pair, options)
    cut_V = root_distribution(cut_pair(pair), options)
    is_drafted_V = (torch.arange(len(whole_V)) % 3 != 1) & (whole_V > 0)
    assert (cut_V[~is_drafted_V] == 0).all()
    torch.testing.assert_close(cut_V, whole_V * is_drafted_V / whole_V[is_drafted_V].sum(), atol=1e-5, rtol=0)


def greedy(pair: Pair, config: SpecConfig, options: EngineOptions) -> tuple[list[tuple[int, ...]], float]:
    result = generate(pair, PROMPTS, config, SamplingParams(max_new_tokens=16), engine=options)
    return [output.token_ids for output in result.outputs], result.metrics["accept_length"]


@pytest.mark.every_value
@either
@pytest.mark.parametrize("change", [cut_pair, windowed_pair])
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("kind", OWN_KV)
def test_greedy_output_is_that_of_plain_decoding(kind, topk, change, options):
    pair = synthetic_pair(kind)
    plain, _ = greedy(pair, SpecConfig.plain(), OPTIONS["reference"])
    token_ids, accept_length = greedy(change(pair), SpecConfig(topk, 3, page_size=4), options)
    assert token_ids == plain
    assert accept_length > 1


def test_only_the_rows_of_the_list_are_left():
    pair = synthetic_pair("dspark")
    cut = cut_head(pair.checkpoint, pair.target, torch.tensor([7, 2, 40]))
    assert (torch.arange(3) + cut.tensors["d2t"]).tolist() == [2, 7, 40]
    assert torch.equal(cut.tensors["lm_head.weight"], pair.target.tensors["lm_head.weight"][[2, 7, 40]])
    name = "markov_head.markov_w2.weight"
    assert torch.equal(cut.tensors[name], pair.checkpoint.tensors[name][[2, 7, 40]])
    assert cut.config.draft_vocab_size == 3
    assert "lm_head.weight" not in pair.checkpoint.tensors  # which is unchanged


@pytest.mark.parametrize("pair", [synthetic_pair("eagle3"), bridged_pair(synthetic_pair("standalone"))])
def test_a_list_meets_the_draft_vocabulary_of_a_head(pair: Pair):
    """A token of the list that the head does not draft is left out."""
    tensors = pair.checkpoint.tensors
    before = (torch.arange(len(tensors["d2t"])) + tensors["d2t"]).tolist()
    missing = next(token for token in range(48) if token not in before)
    cut = limit_drafts(pair, [before[9], missing, before[3]]).checkpoint
    assert (torch.arange(2) + cut.tensors["d2t"]).tolist() == [before[3], before[9]]
    assert torch.equal(cut.tensors["lm_head.weight"], tensors["lm_head.weight"][[3, 9]])
    assert cut.tensors["t2d"].nonzero().flatten().tolist() == [before[3], before[9]]
    with pytest.raises(InputError, check=lambda error: error.name == "draft_vocab"):
        limit_drafts(pair, [missing])


def test_a_tree_wider_than_the_list_is_refused():
    for kind in ("eagle", "mtp", "dflash"):
        with pytest.raises(InputError, check=lambda error: error.name == "topk"):
            load_engine(limit_drafts(synthetic_pair(kind), [1, 2, 3]), SpecConfig(4, 2), OPTIONS["reference"])


def test_layers_keep_a_narrower_window_of_their_own():
    pair = synthetic_pair("dflash", num_layers=2, sliding_windows=(None, 3))
    attentions = [
        layer.attention for layer in limit_drafts(pair, None, DraftWindow(5, 2)).checkpoint.config.model.layers
    ]
    assert [(each.window, each.first_columns) for each in attentions] == [(5, 2), (3, 0)]
    assert [layer.attention.window for layer in pair.checkpoint.config.model.layers] == [None, 3]


def test_a_latent_drafter_has_a_window():
    pair = windowed_pair(synthetic_pair("mtp", "deepseek_v3"))
    plain, _ = greedy(pair, SpecConfig.plain(), OPTIONS["reference"])
    for options in OPTIONS.values():
        assert greedy(pair, CHAIN, options)[0] == plain


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"drafter": "ngram", "draft_vocab": [1]}, "draft_vocab"),
        ({"drafter": "none", "draft_vocab": [1]}, "draft_vocab"),
        ({"drafter": "frozen-kv", "draft_window": 4}, "draft_window"),
        ({"drafter": "suffix", "draft_window": 4}, "draft_window"),
        ({"draft_window": 0}, "draft_window"),
        ({"draft_vocab": [5, 5]}, "draft_vocab"),
        ({"draft_vocab": [4096]}, "draft_vocab"),
        ({"draft_vocab": []}, "draft_vocab"),
    ],
)
def test_limits_that_make_no_sense(arguments: dict[str, Any], name: str):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        load(**arguments)


def test_a_loaded_pair_is_limited_and_says_so():
    pair = load(drafter="mtp", draft_vocab=range(256), draft_window=DraftWindow(32, first_columns=4))
    assert pair.name == "tiny, mtp, 256 draft tokens, draft window 32"
    assert pair.checkpoint.config.draft_vocab_size == len(pair.checkpoint.tensors["lm_head.weight"]) == 256
    assert {layer.attention.first_columns for layer in pair.checkpoint.config.model.layers} == {4}
