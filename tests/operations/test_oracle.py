"""The reference engine against the oracle, which has no cache, mask or pool, with the same uniforms."""

from dataclasses import replace

import pytest
import torch

from specsim import SamplingParams, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.verifiers import DEFAULT_VERIFIER, KIND_OF, VERIFIERS
from specsim.correctness.differential.oracle import draws
from specsim.correctness.pairwise import pairwise
from specsim.models.synthetic_pair import synthetic_pair
from specsim.reference import oracle
from specsim.serving.generation import generate, load_engine

PROMPTS = [[5, 17, 3, 40, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [30] * 3]
SAMPLINGS = {
    "greedy": SamplingParams(max_new_tokens=16),
    "greedy, penalties": SamplingParams(max_new_tokens=16, repetition_penalty=1.3, frequency_penalty=0.4),
    "warm": SamplingParams(temperature=1.0, max_new_tokens=16, seed=2**63 + 9),
    "filtered": SamplingParams(temperature=0.7, top_k=12, top_p=0.9, min_p=0.02, max_new_tokens=16, seed=3),
    "penalties": SamplingParams(
        temperature=0.9, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2,
        logit_bias={3: 1.5, 7: -2.0}, max_new_tokens=16, seed=4,
    ),
}  # fmt: skip
AXES = {
    "topk": [1, 2, 4, 8, 16],
    "num_steps": [1, 2, 3, 5],
    "num_draft_tokens": [2, 8, 16, 32],
    "page_size": [1, 2, 4, 16, 64, 256],
    "batch": [1, 3],
    "sampling": list(SAMPLINGS),
    "kind": ["eagle", "eagle3"],
    "family": ["llama", "qwen3", "mistral"],
    "draft_kv": ["lane", "ancestor"],
    "extend": ["fixed", "ragged"],
    "release": ["finish", "round"],
    "score": ["prob", "logprob"],
    "penalties": ["exact", "relaxed"],
    "threshold_single": [1.0, 0.3],
    "threshold_acc": [1.0, 0.6],
    "max_len": [None, 21],
}
WINDOW = {"mistral": 7}


def is_valid(cell):
    """Check that a chain, which has only one width, has the narrowest."""
    return cell.get("topk") != 1 or cell.get("num_draft_tokens", 2) == 2


CELLS = pairwise(AXES, is_valid)


def config_of(cell):
    """Make the cell's setting, with num_draft_tokens limited by topk and num_steps."""
    topk, steps = cell["topk"], cell["num_steps"]
    width = steps + 1 if topk == 1 else min(cell["num_draft_tokens"], 1 + topk + (steps - 1) * topk**2)
    names = (
        "page_size", "draft_kv", "extend", "release", "score", "penalties",
        "threshold_single", "threshold_acc", "max_len",
    )  # fmt: skip
    return SpecConfig(topk, steps, width, **{name: cell[name] for name in names})


def truth(pair, prompts, config, sampling, grammar=None):
    vocab_size = pair.target.config.vocab_size
    return [
        oracle.generate(pair, prompt, config, sampling, draws(sampling.seed, i, vocab_size), grammar=grammar)
        for i, prompt in enumerate(prompts)
    ]


def assert_equal_to_the_oracle(pair, prompts, config, sampling, grammar=None):
    found = generate(
        pair, prompts, config, sampling, grammars=grammar, engine=EngineOptions(dtype=torch.float64)
    ).outputs
    expected = truth(pair, prompts, config, sampling, grammar)
    for each, output in zip(expected, found, strict=True):
        assert output.token_ids == each.token_ids
        assert output.finish_reason == each.finish_reason
        assert output.num_accepted_tokens_per_round == tuple(len(r.accepted) for r in each.rounds)
        assert output.logprobs == pytest.approx(each.logprobs, abs=2e-6)
    return expected


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell.values())))
def test_tokens_logprobs_and_counters_equal_the_oracle(cell):
    pair = synthetic_pair(cell["kind"], cell["family"], window=WINDOW.get(cell["family"]))
    assert_equal_to_the_oracle(pair, PROMPTS[: cell["batch"]], config_of(cell), SAMPLINGS[cell["sampling"]])


VERIFIER_AXES = {
    "verifier": [name for name in VERIFIERS if name != DEFAULT_VERIFIER],
    "topk": [1, 2, 4],
    "num_steps": [1, 2, 4],
    "page_size": [1, 4, 64],
    "batch": [1, 3],
    "sampling": list(SAMPLINGS),
    "kind": ["eagle", "eagle3"],
    "draft_kv": ["lane", "ancestor"],
    "penalties": ["exact", "relaxed"],
    "score": ["prob", "logprob"],
    "max_len": [None, 21],
    "is_constrained": [False, True],
}


def verifies(cell):
    """Check whether a verifier takes this setting.

    Those of sampled drafts verify chains.
    """
    return cell.get("topk", 1) == 1 or KIND_OF[cell.get("verifier", DEFAULT_VERIFIER)].drafts != "sampled"


def setting_of(cell):
    topk, steps, verifier = cell["topk"], cell["num_steps"], cell["verifier"]
    num_draft_tokens = 1 + topk * steps if topk == 1 or KIND_OF[verifier].has_lanes else 1 + topk + (steps > 1)
    names = "verifier", "page_size", "draft_kv", "penalties", "score", "max_len"
    return SpecConfig(topk, steps, num_draft_tokens, **{name: cell[name] for name in names})


class Alternating:
    """Outputs of 3 tokens or more, each the last plus one of `steps`, modulo 6.

    Token 0 ends them.
    """

    def __init__(self, vocab_size=48, steps=(1, 2)):
        self.vocab_size, self.steps = vocab_size, steps

    def matcher(self):
        return AlternatingMatcher(self)


class AlternatingMatcher:
    def __init__(self, grammar):
        self.grammar, self.vocab_size, self.taken = grammar, grammar.vocab_size, []

    @property
    def has_ended(self):
        return self.taken[-1:] == [0]

    def allowed(self):
        assert not self.has_ended
        ids, last = torch.arange(self.vocab_size), self.taken[-1] if self.taken else 0
        allowed_V = sum((ids - last) % 6 == step for step in self.grammar.steps).bool()
        allowed_V[0] = len(self.taken) >= 3
        return allowed_V

    def advance(self, token):
        is_allowed = bool(self.allowed()[token])
        self.taken += [token] * is_allowed
        return is_allowed

    def roll_back(self, count):
        del self.taken[len(self.taken) - count :]


@pytest.mark.parametrize("cell", pairwise(VERIFIER_AXES, verifies), ids=lambda cell: "-".join(map(str, cell.values())))
def test_every_verifier_equals_the_oracle(cell):
    """A grammar is used too, which forbids many drafts and lets outputs end in a tree."""
    pair, grammar = synthetic_pair(cell["kind"]), Alternating() if cell["is_constrained"] else None
    if grammar:
        pair = replace(pair, target=replace(pair.target, config=replace(pair.target.config, eos_token_ids=(0,))))
    assert_equal_to_the_oracle(pair, PROMPTS[: cell["batch"]], setting_of(cell), SAMPLINGS[cell["sampling"]], grammar)


@pytest.mark.parametrize(
    ("verifier", "topk"),
    [("typical", 3), ("rejection", 1), ("block", 1), ("gumbel", 1)]
    + [(name, 6) for name in ("multi_round", "traversal", "recursive")],
)
def test_every_verifier_equals_the_oracle_on_poor_drafts(verifier, topk):
    """Rounds have every length.

    Distributions are so flat that a wrong sibling's uniform would be noticed.
    """
    pair = synthetic_pair("eagle3", noise=0.1)
    thresholds = {"typical_epsilon": 0.1, "typical_delta": 0.3} if verifier == "typical" else {}
    config = SpecConfig(topk, 3, 1 + 3 * topk, page_size=4, verifier=verifier, **thresholds)
    prompts = [[i, 2 * i, 40 - i] for i in range(1, 9)]
    sampling = SamplingParams(temperature=3.0, max_new_tokens=24, seed=11)
    results = assert_equal_to_the_oracle(pair, prompts, config, sampling)
    lengths = [len(each.accepted) for result in results for each in result.rounds]
    assert set(lengths) == {1, 2, 3, 4}


@pytest.mark.parametrize("draft_kv", ["lane", "ancestor"])
@pytest.mark.parametrize("num_steps", [6, 8])
def test_eagles_own_setting_equals_the_oracle(num_steps, draft_kv):
    config = SpecConfig(10, num_steps, 60, page_size=16, draft_kv=draft_kv)
    assert_equal_to_the_oracle(
        synthetic_pair("eagle"), PROMPTS[:1], config, replace(SAMPLINGS["warm"], max_new_tokens=8)
    )


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_plain_decoding_equals_the_oracle(sampling):
    assert_equal_to_the_oracle(synthetic_pair("eagle3"), PROMPTS, SpecConfig.plain(page_size=4), sampling)


@pytest.mark.parametrize("sampling", [SAMPLINGS["greedy"], SAMPLINGS["warm"]])
@pytest.mark.parametrize("stops", [(0, 9, 21), (3, 30), tuple(range(0, 48, 3))])
@pytest.mark.parametrize("by", ["eos", "stop tokens"])
def test_requests_end_where_the_oracles_do(sampling, stops, by):
    pair, config = synthetic_pair("eagle"), SpecConfig(4, 3, 8, page_size=4)
    if by == "eos":
        pair = replace(pair, target=replace(pair.target, config=replace(pair.target.config, eos_token_ids=stops)))
    else:
        sampling = replace(sampling, stop_token_ids=stops)
    assert_equal_to_the_oracle(pair, PROMPTS, config, replace(sampling, max_new_tokens=40))


def node_paths(verify_input, request):
    tokens, parents = verify_input.draft_tokens[request].tolist(), verify_input.parents[request].tolist()
    paths = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return tuple(paths[1:])


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("draft_kv", ["lane", "ancestor"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("verifier", "num_draft_tokens"), [("target_only", 12), ("multi_round", 17)])
def test_trees_and_scores_equal_the_oracle_in_every_round(
    kind, draft_kv, page_size, verifier, num_draft_tokens, monkeypatch
):
    """A fault that only lowers acceptance leaves tokens right and trees wrong, so drafts are compared."""
    config = SpecConfig(4, 4, num_draft_tokens, page_size=page_size, draft_kv=draft_kv, verifier=verifier)
    assert_trees_equal_the_oracle(synthetic_pair(kind), config, monkeypatch)


@pytest.mark.parametrize("norm", ["norm_before_fc", "fc_norm", "norm_output", "all"])
@pytest.mark.parametrize("draft_kv", ["lane", "ancestor"])
def test_trees_of_eagle3_1_equal_the_oracle(norm, draft_kv, monkeypatch):
    """Each norm of EAGLE-3.1 alone, and all of them with four features."""
    config = SpecConfig(4, 4, 12, page_size=4, draft_kv=draft_kv)
    every = synthetic_pair("eagle3.1", noise=0.1, num_layers=4)
    pair = every if norm == "all" else synthetic_pair("eagle3", noise=0.1, fields={norm: True})
    assert_trees_equal_the_oracle(pair, config, monkeypatch)


def assert_trees_equal_the_oracle(pair, config, monkeypatch):
    """Compare trees and their scores, bit for bit, and return the trees of all rounds."""
    sampling, seen = SAMPLINGS["warm"], []
    engine_type = type(load_engine(pair, config))
    draft = engine_type.draft
    monkeypatch.setattr(engine_type, "draft", lambda *arguments: seen.append(draft(*arguments)) or seen[-1])
    generate(pair, PROMPTS[:1], config, sampling, engine=EngineOptions(dtype=torch.float64))
    rounds = truth(pair, PROMPTS[:1], config, sampling)[0].rounds
    assert [node_paths(verify_input, 0) for verify_input in seen] == [r.paths for r in rounds]
    assert [tuple(verify_input.scores[0, 1:].tolist()) for verify_input in seen] == [r.scores for r in rounds]
    assert [int(verify_input.draft_tokens[0, 0]) for verify_input in seen] == [r.root for r in rounds]
    return seen


@pytest.mark.parametrize(
    ("topk", "num_draft_tokens", "verifier", "lowest"),
    [(1, 7, "target_only", 0), (4, 60, "target_only", -104), (4, 25, "multi_round", 0)],
)
def test_peaked_trees_and_scores_equal_the_oracle(topk, num_draft_tokens, verifier, lowest, monkeypatch):
    """Logits are spread over hundreds, so log probabilities are finite, except -inf for drafts beyond max_len.

    The drafter is two positions before its draft.
    """
    pair = synthetic_pair("eagle3")
    tensors = pair.drafter.tensors | {"lm_head.weight": 30 * pair.drafter.tensors["lm_head.weight"]}
    pair = replace(pair, drafter=replace(pair.drafter, tensors=tensors))
    config = SpecConfig(topk, 6, num_draft_tokens, page_size=4, score="logprob", verifier=verifier, max_len=16)
    trees = assert_trees_equal_the_oracle(pair, config, monkeypatch)
    scores, positions = (
        torch.cat([getattr(tree, name).flatten() for tree in trees]) for name in ("scores", "positions")
    )
    assert torch.equal(scores.isfinite(), positions < 16 + 2)
    assert scores.isinf().any()
    assert scores[scores.isfinite()].min() < lowest


def test_the_oracle_refuses_a_prompt_that_leaves_no_room():
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("prompt length", 21)):
        oracle.generate(synthetic_pair(), [1] * 21, SpecConfig(max_len=21), SamplingParams(), draws(0, 0, 48))
