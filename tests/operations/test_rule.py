"""Acceptance rules of a user in both engines."""

import pytest
import torch

from specsim import (
    AcceptanceRule,
    Accepted,
    EngineOptions,
    InputError,
    SamplingParams,
    SpecConfig,
    generate,
    load_engine,
)
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.correctness.differential.pairs import make_pair
from specsim.fast.sections import RoundPhases, forward, gather, verify
from specsim.reference import acceptance
from specsim.reference.sampling import inverse_cdf
from specsim.serving.requests import make_requests
from specsim.serving.serve import serve

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [4]]
SAMPLING = [
    SamplingParams(temperature=0.8, max_new_tokens=7),
    SamplingParams(max_new_tokens=5),
    SamplingParams(temperature=1.3, top_k=9, max_new_tokens=6, seed=5),
]
SIZES = {"num_steps": 2, "page_size": 4}
CONFIGS = {
    "best": SpecConfig(topk=2, num_draft_tokens=5, **SIZES),
    "sampled": SpecConfig(topk=1, verifier="rejection", release="round", **SIZES),
    "siblings": SpecConfig(topk=2, verifier="multi_round", **SIZES),
    "distinct": SpecConfig(topk=2, verifier="recursive", **SIZES),
}


def target_only(tree, prob_NV, draft_prob_NV, uniforms, final):
    assert draft_prob_NV is None
    return acceptance.target_only(tree, prob_NV, uniforms, final, 1.0, 1.0)


RULES = {
    "best": AcceptanceRule("target-only by a user", "best", target_only),
    "sampled": AcceptanceRule("rejection by a user", "sampled", acceptance.rejection),
    "siblings": AcceptanceRule("multi-round by a user", "siblings", acceptance.multi_round),
    "distinct": AcceptanceRule("recursive by a user", "distinct", acceptance.recursive),
}


def no_drafts(_tree, prob_NV, _draft_prob_NV, _uniforms, final):
    """Accept no draft, which is lossless for given drafts."""
    return Accepted([0], inverse_cdf(prob_NV[0], final))


NONE = AcceptanceRule("no drafts", "best", no_drafts)


@pytest.fixture(scope="module")
def pair():
    return make_pair("eagle-llama")


def tokens_of(generation):
    return [(output.token_ids, output.num_accepted_tokens_per_round) for output in generation.outputs]


@pytest.mark.parametrize("drafts", CONFIGS)
def test_a_rule_gives_the_tokens_of_the_same_verifier(pair, drafts):
    named = generate(pair, PROMPTS, CONFIGS[drafts], SAMPLING)
    mine = generate(pair, PROMPTS, CONFIGS[drafts], SAMPLING, verifier=RULES[drafts])
    assert tokens_of(mine) == tokens_of(named)
    assert mine.acceptance.accept_length > 1


@pytest.mark.parametrize(
    ("drafts", "graph"), [("best", "phase"), ("sampled", "step"), ("siblings", "eager"), ("distinct", "phase")]
)
def test_the_fast_engine_runs_a_rule_as_the_reference_does(pair, drafts, graph):
    given = pair, PROMPTS, CONFIGS[drafts], SAMPLING
    options = EngineOptions("fast", device=DEVICE, graph=graph, bucket=4)
    found = generate(*given, engine=options, verifier=RULES[drafts])
    assert tokens_of(found) == tokens_of(generate(*given, verifier=RULES[drafts]))


def test_a_rule_decides_what_is_accepted(pair):
    for options in (EngineOptions(), EngineOptions("fast", device=DEVICE)):
        found = generate(pair, PROMPTS[:1], CONFIGS["best"], SAMPLING[0], engine=options, verifier=NONE)
        assert set(found.outputs[0].num_accepted_tokens_per_round) == {1}


def test_a_rule_is_not_called_at_temperature_0(pair):
    def accept(*_):
        raise AssertionError

    rule = AcceptanceRule("never called", "best", accept)
    greedy = SamplingParams(max_new_tokens=6)
    expected = generate(pair, PROMPTS[:1], CONFIGS["best"], greedy)
    for options in (EngineOptions(), EngineOptions("fast", device=DEVICE)):
        found = generate(pair, PROMPTS[:1], CONFIGS["best"], greedy, engine=options, verifier=rule)
        assert tokens_of(found) == tokens_of(expected)


def test_an_impossible_path_is_an_error_in_both_engines(pair):
    rule = AcceptanceRule("jump", "best", lambda *_: ([0, 99], 1))
    for options in (EngineOptions(), EngineOptions("fast", device=DEVICE)):
        with pytest.raises(InputError, check=lambda error: error.name == "the result of rule jump"):
            generate(pair, PROMPTS[:1], CONFIGS["best"], SAMPLING[0], engine=options, verifier=rule)


def test_plain_decoding_runs_a_rule_for_given_drafts(pair):
    plain = SpecConfig.plain(page_size=4)
    found = generate(pair, PROMPTS, plain, SAMPLING, verifier=NONE)
    assert tokens_of(found) == tokens_of(generate(pair, PROMPTS, plain, SAMPLING))


@pytest.mark.parametrize("drafts", CONFIGS)
def test_a_run_without_a_setting_has_the_rules_drafts(pair, drafts):
    found = generate(pair, PROMPTS[1:2], sampling=SAMPLING[1], verifier=RULES[drafts])
    assert found.config == RULES[drafts].config()


def test_results_name_the_rule(pair):
    found = generate(pair, PROMPTS[:1], CONFIGS["best"], SAMPLING[0], verifier=NONE)
    assert found.to_json()["acceptance"] == {"synthetic": False, "rule": "no drafts"}
    engine = load_engine(pair, CONFIGS["best"], verifier=NONE)
    served = serve(engine, make_requests(pair, PROMPTS[:1], SAMPLING[0], None, 64))
    assert served.to_json()["acceptance"] == {"synthetic": False, "rule": "no drafts"}
    assert served.trace.acceptance == "rule no drafts"
    assert served.requests[0].token_ids == list(found.outputs[0].token_ids)
    assert "rule" not in generate(pair, PROMPTS[:1], CONFIGS["best"], SAMPLING[0]).to_json()["acceptance"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("verifier", {"verifier": "rejection"}),
        ("verifier", {"verifier": no_drafts}),
        ("verifier", {"verifier": RULES["sampled"]}),
        ("verifier", {"verifier": NONE, "acceptance": SyntheticAcceptance((0.5, 0.5))}),
        ("graph", {"verifier": NONE, "options": EngineOptions("fast", device=DEVICE, graph="round")}),
    ],
)
def test_what_excludes_a_rule_is_refused(pair, name, arguments):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        load_engine(pair, CONFIGS["best"], **arguments)


def test_a_rule_needs_no_graph_of_the_walk(pair):
    config = CONFIGS["best"]
    graphs = RoundPhases.of("phase", config, rule=True).captured
    assert (forward,) in graphs
    assert (gather,) in graphs
    assert verify not in sum(graphs, ())
    chosen = load_engine(pair, config, EngineOptions("fast", device=DEVICE), verifier=NONE)
    assert chosen.options.graph == "phase"
