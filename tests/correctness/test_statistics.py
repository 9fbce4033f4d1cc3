import json
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from specsim import SamplingParams, SpecConfig, generate
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.phases import Batch
from specsim.correctness.statistics import run_sampling_tests
from specsim.correctness.statistics.e_value import Sample, chi_square, detectable_distance, ln_e_value
from specsim.correctness.statistics.report import SamplingTests
from specsim.correctness.statistics.samples import (
    CONFIGS,
    DRAFTERS,
    PLAIN,
    SETTINGS,
    Load,
    SamplingSetting,
    outputs,
    sample,
)
from specsim.correctness.statistics.small_vocabulary import (
    VOCAB,
    SmallVocabulary,
    draft_distribution,
    next_distribution,
    opposed,
)
from specsim.correctness.statistics.suite import CONTROLS, FALSE_ALARM
from specsim.models.synthetic.weights import CLASSES
from specsim.reference import acceptance
from specsim.reference.sampling import adjust_logits, target_prob
from specsim.serving.outputs import Output


def dyadic() -> SmallVocabulary:
    """Make distributions uniform on 2 or 4 tokens, whose float32 sums are exact in any order.

    A token is allowed where the bits of its number fit the tokens before it. The drafter knows bit 1, requires a bit 0
    that the target leaves open, and after some tokens a bit 2.
    """
    last_VV = np.zeros((VOCAB, VOCAB))
    before_VC = np.zeros((VOCAB, CLASSES))
    draft_VV = np.zeros((VOCAB, VOCAB))
    for following, last in product(range(VOCAB), repeat=2):
        bits = [following >> bit & 1 for bit in range(4)]
        is_wrong = bits[1] != (last >> 3 ^ last) & 1
        last_VV[following, last] = -1e4 * is_wrong
        draft_VV[following, last] = -1e4 * (is_wrong or bits[0] != last >> 1 & 1 or (bits[2] and last >> 2 & 1))
        before_VC[following, last % CLASSES] = -1e4 * bits[2 + last % CLASSES]
    return SmallVocabulary(last_VV, before_VC, draft_VV)


OPPOSED = opposed()
DYADIC = dyadic()
PAIRS = list(product(range(VOCAB), repeat=2))
BY_NAME = {control.name: control for control in CONTROLS}


def texts_of(control_or_config, num_tokens, settings=(PLAIN,), kind="eagle"):
    return outputs(OPPOSED, Load(control_or_config, settings, num_tokens, kind=kind), lambda count: None)


# The known distribution


@pytest.mark.parametrize("setting", [PLAIN, SETTINGS[-1]], ids=lambda setting: setting.name)
def test_log_probabilities_are_those_of_the_known_distribution(setting):
    """Every pair of last tokens, with the model in float64."""
    sampling = replace(setting.sampling(1), max_new_tokens=3)
    engine = EngineOptions(dtype=torch.float64)
    for output in generate(OPPOSED.pair(), PAIRS, SpecConfig.plain(), sampling, engine=engine).outputs:
        text = output.prompt_token_ids + output.token_ids
        for place, logprob in enumerate(output.logprobs, start=2):
            prob_V = next_distribution(OPPOSED, text[:place], 2, sampling)
            assert logprob == pytest.approx(math.log(prob_V[text[place]]), abs=1e-6)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_filters_of_the_distribution_are_the_references(setting):
    """Changing the logits by a hundred times float32's error filters the same tokens."""
    params = setting.sampling(0)
    text = (3, 9, 4, 4, 7)
    sampling = Batch.of([0], [0], [2], [params], VOCAB).sampling
    noise = np.random.default_rng(0).uniform(-1e-4, 1e-4, (3, VOCAB, VOCAB))
    near = SmallVocabulary(OPPOSED.last_VV + noise[0], OPPOSED.before_VC + noise[1, :, :2], OPPOSED.draft_VV)
    for past in PAIRS:
        exact_V, near_V = (next_distribution(each, past, 2, params) for each in (OPPOSED, near))
        assert (exact_V > 0).tolist() == (near_V > 0).tolist()
        context = torch.tensor([*text, *past])
        adjusted_V = adjust_logits(torch.from_numpy(OPPOSED.logits(*past)), context, 2, sampling, 0)
        expected = target_prob(adjusted_V, sampling, 0).numpy()
        np.testing.assert_allclose(next_distribution(OPPOSED, (*text, *past), 2, params), expected, atol=1e-12)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_token_has_the_distribution_of_its_whole_text(setting):
    params = setting.sampling(0)
    generator = np.random.default_rng(0)
    texts = [tuple(generator.integers(0, VOCAB, 8).tolist()) for _ in range(30)]
    written = [Output("", text[2:], (), "length", (1, 3, 2), prompt_token_ids=text[:2]) for text in texts]
    tested = sample(OPPOSED, setting, written)
    expected = [next_distribution(OPPOSED, text[:place], 2, params) for text in texts for place in range(2, 8)]
    np.testing.assert_allclose(tested.prob_nV, np.stack(expected), atol=1e-12)
    assert tested.token.tolist() == [token for text in texts for token in text[2:]]
    assert tested.is_first.tolist() == [False, True, True, False, False, True] * 30


def test_the_drafter_opposes_the_target_except_at_one_token():
    for last in range(VOCAB):
        target_V = OPPOSED.last_VV[:, last]
        rest = np.delete(np.arange(VOCAB), target_V.argmax())
        draft_V = np.log(draft_distribution(OPPOSED, last, 1.0))
        assert np.corrcoef(draft_V[rest], target_V[rest])[0, 1] == pytest.approx(-1)


def test_dyadic_distributions_are_uniform_and_overlap_partly():
    for before, last in PAIRS:
        prob_V = next_distribution(DYADIC, (before, last), 2, PLAIN.sampling(0))
        drafted_V = draft_distribution(DYADIC, last, 1.0)
        for each in (prob_V, drafted_V):
            assert set(each) <= {0.0, 0.25, 0.5}
            assert each.sum() == 1
        assert np.minimum(prob_V, drafted_V).any()
        assert (prob_V != drafted_V).any()


# E-values


def small(tokens):
    """Tokens of a Markov chain with three states; tokens after a 0 count as first."""
    prob_GV = np.array([[0.5, 0.25, 0.25], [0.1, 0.6, 0.3], [0.2, 0.0, 0.8]])
    past = np.array([0, *tokens[:-1]])
    prob_nV = prob_GV[past]
    marks = np.stack([prob_nV < 0.3, np.arange(3) == past[:, None]])
    return Sample(np.array(tokens), prob_nV, past, past * 2 + (past == 1), past == 0, marks)


def test_the_mean_e_value_is_one_under_the_distribution():
    """Exact sum over every text of five tokens, with its probability."""
    total = 0.0
    for tokens in product(range(3), repeat=5):
        drawn = small(tokens)
        if prob := math.prod(drawn.prob_nV[range(5), drawn.token]):
            total += prob * math.exp(ln_e_value(drawn))
    assert total == pytest.approx(1, abs=1e-9)
    assert ln_e_value(small((2, 1, 0))) == math.inf  # of a token without probability


EVEN = np.arange(80) % 2
NO_MARK = np.zeros((80, 2), dtype=bool)
OWN = np.eye(2, dtype=bool)[EVEN]


@pytest.mark.parametrize(
    "changes",
    [
        {"is_first": EVEN == 0},
        {"past_ids": EVEN},
        {"marks": np.stack([OWN, NO_MARK])},
        {"marks": np.stack([NO_MARK, OWN])},
        {"token": 0 * EVEN, "past_ids": np.arange(80)},
    ],
    ids=["first tokens of rounds", "pasts", "tokens of the first kind", "of the second", "distributions"],
)
def test_every_kind_of_error_has_a_large_e_value(changes):
    """Tokens 0 and 1 are equally probable and equally frequent, except in the groups of each change."""
    place = 0 * EVEN
    even = Sample(EVEN, np.full((80, 2), 0.5), place, place, EVEN < 0, np.stack([NO_MARK, NO_MARK]))
    assert ln_e_value(even) < 0
    assert ln_e_value(replace(even, **changes)) > 5


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_the_whole_text_decides_under_each_penalty(penalty):
    prompt, tokens = (3, 9), (5, 1, 7, 2)
    setting = SamplingSetting("one penalty", {penalty: 1.5}, num_tokens=len(tokens))
    written = Output("", tokens, (0.0,) * 4, "length", (1,) * 4, prompt_token_ids=prompt)
    expected = [next_distribution(OPPOSED, prompt + tokens[:n], 2, setting.sampling(0)) for n in range(4)]
    np.testing.assert_array_equal(sample(OPPOSED, setting, [written]).prob_nV, expected)


def drawn_sample(count, generator, share=0.0):
    """Tokens of 8 contexts with a distribution each, from a mixture with the uniform one."""
    prob_GV = np.random.default_rng(1).dirichlet(np.ones(6), 8)
    place = generator.integers(0, 8, count)
    cdf_nV = ((1 - share) * prob_GV[place] + share / 6).cumsum(1)
    token = (cdf_nV > generator.random((count, 1))).argmax(1)
    marks = np.zeros((2, count, 6), dtype=bool)
    return Sample(token, prob_GV[place], place, place, np.zeros(count, dtype=bool), marks)


def test_a_detectable_distance_is_detected():
    """Tokens are drawn at this distance from their distribution, with another error than the assumed one."""
    generator = np.random.default_rng(0)
    right = drawn_sample(4000, generator)
    least = detectable_distance(right, 1e-7)
    assert 0.02 < least < 0.1
    distance = np.abs(right.prob_nV - 1 / 6).sum(1).mean() / 2
    for share, seen in ((least / distance, True), (0.0, False)):
        found = [ln_e_value(drawn_sample(4000, generator, share)) > -math.log(1e-7) for _ in range(20)]
        assert found == [seen] * 20


def test_a_distance_is_detected_with_probability_099():
    """With the assumed error: of four equally probable tokens, two are drawn more often."""

    def even(share):
        cdf_V = (1 + share * np.array([1, -1, -1, 1])).cumsum() / 4
        place = np.zeros(500, dtype=int)
        token = np.searchsorted(cdf_V, generator.random(500), side="right")
        return Sample(token, np.full((500, 4), 0.25), place, place, place > 0, np.zeros((1, 500, 4), dtype=bool))

    generator = np.random.default_rng(0)
    share = 2 * detectable_distance(even(0.0), 1e-4)
    for part, least, most in ((1, 95, 100), (0.8, 50, 80)):
        assert least <= sum(ln_e_value(even(part * share)) > -math.log(1e-4) for _ in range(100)) <= most


def test_chi_square_merges_cells_that_expect_fewer_than_five():
    """Four contexts: no small cell, two cells that expect 6, two that expect 2 and are dropped, all cells small."""
    contexts = [
        ((0.5, 0.25, 0.25), (22, 8, 10), (0.2, 0.4, 0.0), 2),
        ((0.8, 0.1, 0.1), (21, 5, 4), (0.375, 1.5), 1),
        ((0.9, 0.05, 0.05), (15, 3, 2), (0.5,), 1),
        ((0.5, 0.25, 0.25), (0, 4, 0), (), 0),
    ]
    place = np.repeat(range(4), [sum(counts) for _, counts, *_ in contexts])
    token = np.concatenate([np.repeat(range(3), counts) for _, counts, *_ in contexts])
    prob_nV = np.array([prob_V for prob_V, *_ in contexts])[place]
    found = chi_square(Sample(token, prob_nV, place, place, place < 0, np.zeros((0, len(place), 3), dtype=bool)))
    assert found.statistic == pytest.approx(sum(sum(terms) for *_, terms, _ in contexts))
    assert found.degrees_of_freedom == sum(freedom for *_, freedom in contexts) == 4
    assert found.p_value == pytest.approx(math.exp(-found.statistic / 2) * (1 + found.statistic / 2))
    found = chi_square(drawn_sample(20000, np.random.default_rng(0)))
    assert found.degrees_of_freedom == 40
    assert 1e-3 < found.p_value < 1 - 1e-3
    assert found.statistic / found.degrees_of_freedom == pytest.approx(1, abs=0.7)


# Running engines


def test_block_verification_has_the_targets_distribution():
    """With 1,920 tokens, the false-alarm probability is at most 1e-6.

    A total variation of 0.18 is detected with probability 0.99. `specsim sampling-test` tests more tokens, all
    verifiers, and other sampling.
    """
    tested = sample(OPPOSED, PLAIN, texts_of(CONFIGS["block"], 1920)[PLAIN.name])
    assert len(tested) == 1920
    assert tested.is_first.sum() > 1000
    assert ln_e_value(tested) < -math.log(FALSE_ALARM)
    assert detectable_distance(tested, FALSE_ALARM) < 0.18


@pytest.mark.parametrize("name", ["typical acceptance", "accept if target ≥ draft", "one stream for draft and accept"])
def test_controls_are_rejected(name):
    with BY_NAME[name].injected():
        tested = sample(OPPOSED, PLAIN, texts_of(BY_NAME[name].config, 960, kind=BY_NAME[name].kind)[PLAIN.name])
    assert ln_e_value(tested) > -math.log(FALSE_ALARM)
    right = acceptance.residual
    with BY_NAME["no residual after a rejection"].injected():
        assert acceptance.residual is not right
    assert acceptance.residual is right  # a control lasts as long as its test


FILTERED = [{}, {"temperature": 1.5, "top_p": 0.5}, {"temperature": 0.7, "top_k": 2}]


def test_drafters_of_one_model_write_equal_tokens():
    """MTP and a Markov head without confidence draft as the standalone drafter does, from the same uniforms."""
    mtp, standalone = (
        [output.token_ids for output in texts_of(CONFIGS["rejection"], 96, kind=kind)[PLAIN.name]]
        for kind in ("mtp", "standalone")
    )
    assert mtp == standalone
    pair = OPPOSED.pair("dspark")
    own = pair.checkpoint.config
    whole = replace(own, block=replace(own.block, threshold=0.0))
    pairs = [pair.with_drafter(replace(pair.checkpoint, config=whole)), OPPOSED.pair("standalone")]
    sampling = SamplingParams(temperature=1.0, seed=5, max_new_tokens=24)
    texts = [generate(each, PAIRS[:16], CONFIGS["rejection"], sampling).outputs for each in pairs]
    assert [output.token_ids for output in texts[0]] == [output.token_ids for output in texts[1]]


# By test: depths that some round proposes, and the most tokens that some round accepts.
DRAFTED = {
    # some tokens cannot be drafted
    **dict.fromkeys(("rejection, standalone.tli", "multi_round, standalone.tli", "rejection, mtp.cut"), (set(), 2)),
    # drafts are cut by confidence
    **dict.fromkeys(("rejection, dspark", "block, dspark", "multi_round, dspark", "target_only, dspark"), ({0, 2}, 2)),
    # drafts of one forward do not depend on each other
    **dict.fromkeys(("rejection, p-eagle", "multi_round, p-eagle"), (set(), 3)),
    # most rounds have fewer drafts than nodes
    **dict.fromkeys(("target_only, ngram", "target_only, suffix"), ({0, 1, 2}, 2)),
}


@pytest.mark.parametrize("name", DRAFTED)
def test_drafts_have_the_targets_distribution(name):
    """With 960 tokens."""
    depths, most = DRAFTED[name]
    kind, config = DRAFTERS[name]
    found = texts_of(config, 960, kind=kind)[PLAIN.name]
    assert {depth for output in found for depth in output.proposed_depth_per_round} >= depths
    assert max(count for output in found for count in output.num_accepted_tokens_per_round) >= most
    if kind in ("standalone.tli", "mtp.cut"):
        tokens = {token for output in found for token in output.token_ids}
        assert not OPPOSED.pair(kind).checkpoint.tensors["t2d"][list(tokens)].all()
    assert ln_e_value(sample(OPPOSED, PLAIN, found)) < -math.log(FALSE_ALARM)


KINDS = {name: ("eagle", config) for name, config in CONFIGS.items()}
KINDS |= {f"rejection, {kind}": DRAFTERS[f"rejection, {kind}"] for kind in ("standalone", "mtp", "p-eagle", "dflash")}
KINDS |= {name: DRAFTERS[name] for name in ("block, dspark", "target_only, ngram")}


@pytest.mark.parametrize("verifier", KINDS)
def test_fast_and_reference_write_equal_tokens_on_dyadic_models(verifier, device):
    """Every sum is exact in float32, so tokens and rounds are equal.

    With this seed, other accept uniforms change the accepted drafts of every verifier that uses them.
    """
    sampling = [SamplingParams(**({"temperature": 1.0} | each), max_new_tokens=3, seed=60) for each in FILTERED]
    kind, config = KINDS[verifier]
    config = replace(config, max_len=12)
    pair = DYADIC.pair(kind)
    prompts = [(3, 9), (1, 2), (14, 7)]
    drafts = 0
    engine = EngineOptions("fast", device=device, graph="eager")
    found = generate(pair, prompts, config, sampling, engine=engine).outputs
    for fast, exact in zip(found, generate(pair, prompts, config, sampling).outputs, strict=True):
        assert fast.token_ids == exact.token_ids
        assert fast.num_accepted_tokens_per_round == exact.num_accepted_tokens_per_round
        drafts += sum(exact.num_accepted_tokens_per_round) - len(exact.num_accepted_tokens_per_round)
    assert drafts > 0 or kind == "ngram"


# The command


def test_the_command_prints_and_writes_the_tests(tmp_path, call):
    options = ["--verifier", "gumbel", "--tokens", "30", "--json", str(tmp_path / "tests.json")]
    status, shown, said = call("sampling-test", *options)
    assert status == 2  # as so few tokens would detect no error
    written = json.loads((tmp_path / "tests.json").read_text())
    assert "None is rejected" in shown
    assert [row["sampling"] for row in written["tests"]] == [setting.name for setting in SETTINGS]
    assert said.startswith("specsim: tokens is 30; ")
    assert (written["is_ok"], written["failures"]) == (False, [])
    assert written["false_alarm"] == FALSE_ALARM
    assert sum(row["bound"] for row in written["tests"]) == pytest.approx(FALSE_ALARM)
    assert [row["tokens"] for row in written["tests"]] == [setting.num_tokens for setting in SETTINGS]
    assert all(0 < row["round_starts"] < row["tokens"] for row in written["tests"])
    assert all(0 < row["p_value"] <= 1 for row in written["tests"])
    # One request each: its first token is of no round, and the last round may have gone on.
    assert all(
        row["tokens"] - 1 <= round(row["accept_length"] * row["round_starts"], 6) <= row["tokens"] + 1
        for row in written["tests"]
    )


def test_a_run_of_all_divides_the_false_alarm_and_has_controls(monkeypatch, device):
    control = replace(BY_NAME["accept if target ≥ draft"], tokens=480)
    few = {"SETTINGS": (replace(PLAIN, num_tokens=2),), "CONFIGS": {"block": CONFIGS["block"]}, "CONTROLS": (control,)}
    few["DRAFTERS"] = {}
    for name, value in few.items():
        monkeypatch.setattr(f"specsim.correctness.statistics.suite.{name}", value)
    found = run_sampling_tests(impl="both", device=device, tokens=1)
    *tests, wrong = found.rows
    assert [(row.impl, row.is_control) for row in found.rows] == [
        ("reference", False),
        ("fast", False),
        ("reference", True),
    ]
    assert sum(row.bound for row in tests) == pytest.approx(FALSE_ALARM)
    assert (wrong.name, wrong.tokens, wrong.is_rejected) == (control.name, 480, True)
    assert found.failures == ()


def test_rejected_tests_and_accepted_controls_are_failures():
    assert not SamplingTests((), 0, 1e-6, 0.0, "", {}).is_ok  # without tests
    found = run_sampling_tests("gumbel", tokens=1)
    assert found.failures == ()
    right, wrong = found.rows[0], replace(found.rows[0], ln_e_value=math.inf)
    for row, is_control, is_failure in (
        (right, False, False),
        (right, True, True),
        (wrong, False, True),
        (wrong, True, False),
    ):
        failures = replace(found, rows=(replace(row, is_control=is_control),)).failures
        assert failures == (("gumbel (reference), T 0.7",) if is_failure else ())


@pytest.mark.parametrize(
    "changes",
    [
        *({"tokens": tokens} for tokens in (0, 1.5, math.nan)),
        *({"verifier": "typical"}, {"impl": "slow"}, {"device": "cuda"}),
        {"seed": -1, "verifier": "block", "tokens": 1},
    ],
)
def test_bad_input_is_refused(changes):
    name, value = next(iter(changes.items()))
    with pytest.raises(InputError, check=lambda error: error.name == name and error.value is value):
        run_sampling_tests(**changes)
