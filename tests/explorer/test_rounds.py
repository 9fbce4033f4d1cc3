"""Recorded rounds: the tokens of generate, states that fit together, tables and pictures of each round."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import specsim
from specsim import EngineOptions, InputError, SamplingParams, SpecConfig, generate, trace
from specsim.core.token_drafter import NgramConfig
from specsim.core.verifiers import KIND_OF, VERIFIERS
from specsim.models.synthetic_pair import synthetic_pair

PAIR = synthetic_pair("eagle3")
PROMPTS = [[5, 17, 3, 40, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
TREE = SpecConfig(topk=3, num_steps=3, num_draft_tokens=7, page_size=4)
CHAIN = SpecConfig(topk=1, num_steps=3)
PARAMS = [SamplingParams(max_new_tokens=8), SamplingParams(max_new_tokens=14)]  # the first leaves the batch early


@pytest.fixture(scope="module")
def rounds():
    return trace(PAIR, PROMPTS, TREE, PARAMS, request_ids=[7, 4])


@pytest.mark.parametrize("impl", ["reference", "fast"])
@pytest.mark.parametrize("release", ["finish", "round"])
def test_a_trace_has_the_tokens_of_generate(impl, release):
    if impl == "fast":
        pytest.importorskip("triton")
    config = replace(TREE, release=release)
    engine = EngineOptions(impl)
    sampling = [replace(each, max_new_tokens=5) for each in PARAMS]
    recorded = trace(PAIR, PROMPTS, config, sampling, engine=engine)
    outputs = generate(PAIR, PROMPTS, config, sampling, engine=engine).outputs
    assert [each.token_ids for each in recorded.generation.outputs] == [each.token_ids for each in outputs]
    assert recorded.generation.config == config
    for request, output in enumerate(outputs):  # of states that no later round has written over
        tokens = [token for each in recorded.of(request) for token in each.accepted_tokens(request)]
        assert tuple(tokens[:4]) == output.token_ids[1:]
        assert recorded.of(request)[0].verify(request).token_id[0] == output.token_ids[0]


def test_rounds_give_the_output_one_after_the_other(rounds):
    for place, request in enumerate(rounds.request_ids):
        output = rounds.generation.outputs[place]
        own = rounds.of(request)
        tokens = [token for each in own for token in each.accepted_tokens(request)]
        assert tuple(tokens[: len(output.token_ids) - 1]) == output.token_ids[1:]
        assert [len(each.accepted_tokens(request)) for each in own] == list(output.num_accepted_tokens_per_round)
    assert rounds[-1].request_ids == [4]


def test_dead_nodes_are_neither_listed_nor_drawn():
    """N-gram rounds have fewer drafts than nodes, or none; every picture and table is made of each."""
    pair = PAIR.with_drafter(NgramConfig())
    repetitive = [[5, 17, 3, 40, 5, 17], [7, 8, 9]]
    found = [
        (each, request)
        for each in trace(pair, repetitive, TREE, SamplingParams(max_new_tokens=6))
        for request in each.request_ids
    ]
    counts = set()
    for each, request in found:
        row = each.request_ids.index(request)
        live = 1 + int((each.verify_input.parents[row, 1:] >= 0).sum())
        counts.add(live)
        table = each.verify(request)
        assert table.node.tolist() == list(range(live))
        assert table.depth.tolist()[1:] == [depth for depth in table.depth if depth > 0]
        assert len(each.drafts(request)) >= live - 1
        boxes = [patch.get_gid() for patch in each.tree(request).axes[0].patches]
        assert {f"node:{node}" for node in range(live)} == {gid for gid in boxes if gid and gid.startswith("node:")}
        each.mask(request)
        each.kv_move(request)
        for phase in ("draft", "verify", "commit"):
            each.kv(phase)
    assert 1 in counts
    assert any(1 < count < TREE.num_draft_tokens for count in counts)


def test_states_of_a_round_fit_together(rounds):
    for before, after in pairwise(rounds):
        row = after.request_ids.index(4)
        left = before.request_ids.index(4)
        assert after.draft_input.bonus_tokens[row] == before.next_draft_input.bonus_tokens[left]
        assert after.batch.seq_lens[row] == before.batch.seq_lens[left] + before.verdict.num_accepted_tokens[left]
        assert torch.equal(after.verify_input.draft_tokens[:, 0].int(), after.draft_input.bonus_tokens)


def test_nodes_are_the_tree_and_the_accepted_path(rounds):
    for each in rounds:
        for request in each.request_ids:
            table = each.verify(request)
            assert list(table.node) == list(range(7))
            assert table.text[0] == f"<{table.token_id[0]}>"  # the pair has no tokenizer
            accepted = table[table.accepted]
            assert list(accepted.depth) == list(range(len(accepted)))
            assert [*accepted.token_id[1:]] == each.accepted_tokens(request)[:-1]
            assert accepted.next_token_id.iloc[-1] == each.accepted_tokens(request)[-1]  # greedy
            assert table.uniform.isna().all()
            children = table[1:]
            product = children.draft_prob.to_numpy() * table.score.to_numpy()[children.parent]
            assert product == pytest.approx(children.score.to_numpy())


def test_candidates_are_the_drafts_and_chosen_ones_are_nodes(rounds):
    table = rounds[0].drafts(4)
    assert len(table) == 3 + 2 * 9
    assert (table.step == 1).sum() == 3
    below = table[table.parent >= 0]
    assert (table.step[below.parent].to_numpy() + 1 == below.step).all()
    assert (table.score[below.parent].to_numpy() >= below.score).all()
    chosen = table[table.node.notna()]
    nodes = rounds[0].verify(4)[1:]
    assert list(chosen.node) == list(nodes.node)
    assert list(chosen.token_id) == list(nodes.token_id)
    assert list(chosen.score) == pytest.approx(list(nodes.score))
    assert chosen.score.min() >= table[table.node.isna()].score.max()


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_every_verifier_can_be_traced(verifier):
    config = SpecConfig(topk=2, num_steps=2, verifier=verifier) if KIND_OF[verifier].has_lanes else CHAIN
    sampling = SamplingParams(max_new_tokens=6, temperature=0.8, top_k=9)
    recorded = trace(PAIR, PROMPTS, replace(config, verifier=verifier), sampling)
    for each in recorded:
        table = each.verify(each.request_ids[-1])
        assert ((table.target_prob[1:] >= 0) & (table.target_prob[1:] <= 1)).all()
        assert table.uniform[1:].notna().all() == (KIND_OF[verifier].draws in ("depth", "node"))
        each.drafts()


def test_the_uniform_decides_rejection():
    """Accept a draft exactly if uniform · draft probability is below the target's, on the path down to the first no."""
    sampling = SamplingParams(max_new_tokens=40, temperature=1.0)
    recorded = trace(PAIR, PROMPTS, replace(CHAIN, verifier="rejection"), sampling)
    rejected = 0
    for each in recorded:
        for request in each.request_ids:
            nodes = each.verify(request)[1:]
            passes = (nodes.uniform * nodes.draft_prob < nodes.target_prob).to_list()
            count = len(each.accepted_tokens(request)) - 1
            assert passes[:count] == [True] * count
            assert count == len(passes) or not passes[count]
            rejected += count < len(passes)
    assert rejected > 5


def test_logarithmic_scores_and_plain_decoding_can_be_traced():
    table = trace(PAIR, PROMPTS, replace(TREE, score="logprob"), PARAMS)[0].verify()
    assert ((table.draft_prob[1:] > 0) & (table.draft_prob[1:] <= 1)).all()
    plain = trace(PAIR, PROMPTS, SpecConfig.plain(), PARAMS)
    assert len(plain[0].drafts()) == 0
    assert len(plain[0].verify()) == 1
    assert len(plain) == 13


def test_one_table_of_all_rounds(rounds):
    table = rounds.to_pandas()
    assert len(table) == 7 * sum(len(each.request_ids) for each in rounds)
    assert set(table["round"]) == {each.index for each in rounds}
    accepted = table[table.accepted].groupby(["request", "round"]).size()
    assert list(accepted[4]) == [len(each.accepted_tokens(4)) for each in rounds.of(4)]
    assert rounds.acceptance.rounds == len(accepted)


@pytest.mark.parametrize("draw", ["tree", "mask", "kv_move"])
def test_pictures_are_of_the_named_request(rounds, draw):
    pytest.importorskip("matplotlib")
    assert "request 1" in texts(getattr(rounds[0], draw)(4)) or draw == "kv_move"
    assert texts(getattr(rounds[0], draw)(4)) != texts(getattr(rounds[0], draw)(7))


def test_the_tree_of_a_round_is_drawn_by_its_number(rounds):
    request = rounds[1].request_ids[0]
    assert rounds.tree(round=1, request=request).alternative == rounds[1].tree(request).alternative


def test_slots_are_shown_phase_by_phase(rounds):
    pytest.importorskip("matplotlib")
    shown = {phase: texts(rounds[1].kv(phase)) for phase in ("draft", "verify", "commit")}
    assert "the draft lanes" in shown["draft"]
    assert "the tree, before the commit" in shown["verify"]
    assert "after the commit" in shown["commit"]


def texts(picture) -> str:
    return "\n".join(text.get_text() for text in picture.axes[0].texts)


def test_a_trace_describes_itself(rounds):
    assert repr(rounds).startswith(f"Rounds({len(rounds)} rounds of 2 requests, accept length ")
    assert "request 4: " in repr(rounds[0])
    assert len(rounds[1:]) == len(rounds) - 1


def test_text_of_models_is_shown_and_never_markup():
    pair = specsim.load()
    page = trace(pair, "<script>alert(1)</script>", TREE, SamplingParams(max_new_tokens=6))._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_html_has_every_token_of_the_output():
    pair = specsim.load()
    recorded = trace(pair, "def main():", TREE, SamplingParams(max_new_tokens=9))
    page = recorded._repr_html_()
    assert "title='prefill: 1 tokens'" in page
    counts = recorded.generation.outputs[0].num_accepted_tokens_per_round
    assert all(f"title='round {number}: " in page for number in range(len(counts)))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda rounds: rounds[0].tree(5), "request"),
        (lambda rounds: rounds.of(5), "request"),
        (lambda rounds: rounds[0].kv("extend"), "phase"),
        (lambda _: trace(None, PROMPTS), "pair"),
    ],
)
def test_bad_input_is_named(rounds, call, name):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        call(rounds)


def test_a_round_beyond_the_last_is_an_index_error(rounds):
    with pytest.raises(IndexError):
        rounds[len(rounds)]
