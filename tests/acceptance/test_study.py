"""Figures of the study equal those of its runs, and its conclusions follow from them."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from specsim import SamplingParams, SpecConfig, generate
from specsim.acceptance import study as accept
from specsim.acceptance.settings import DRAFTERS, SETTINGS, TREE, StudySetting, chain, settings_of
from specsim.acceptance.study import Measurement, Study, TargetCheck, measure, show
from specsim.core.display import stdout_console
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.kinds import KINDS
from specsim.core.metrics import Acceptance, acceptance, distinct_share
from specsim.core.pair import Pair
from specsim.core.token_drafter import NgramConfig
from specsim.models.synthetic_pair import synthetic_pair

PROMPTS = [[1, 2, 3], [7, 8, 9, 10], [11], [40, 3, 22]]
EDITS = [[5, 6, 5, 6, 5], [1, 2, 3], [11]]
NEW_TOKENS = 24
SHORT = (
    StudySetting("eagle3", chain(1)),
    StudySetting("eagle3", chain(3)),
    StudySetting("eagle3", TREE),
    StudySetting("eagle3", chain(3), temperature=1.0),
    StudySetting("eagle", chain(3)),
    StudySetting("ngram", chain(3), prompt_set="edits"),
)


def pair_with(drafter: str) -> Pair:
    """The same target with a drafter of any kind."""
    if drafter == "ngram":
        return synthetic_pair().with_drafter(NgramConfig())
    return synthetic_pair(drafter)


def measured(*settings: StudySetting, new_tokens: int = NEW_TOKENS, prompts=PROMPTS, jobs: int = 1) -> Study:
    return measure(pair_with, {"prompts": prompts, "edits": EDITS}, new_tokens, settings, jobs)


@pytest.fixture(scope="module")
def study() -> Study:
    return measured(*SHORT)


def test_figures_are_those_of_the_runs(study):
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    double = EngineOptions(dtype=torch.float64)
    fresh = {}
    for name, prompts in (("prompts", PROMPTS), ("edits", EDITS)):
        greedy = generate(pair_with("eagle"), prompts, SpecConfig.plain(), params, engine=double).outputs
        fresh[name] = [distinct_share(output.token_ids) >= 0.5 for output in greedy]
        assert 0 < sum(fresh[name]) < len(prompts)
    assert (study.num_prompts, study.num_fresh) == (len(PROMPTS), sum(fresh["prompts"]))
    assert (study.num_edits, study.num_fresh_edits) == (len(EDITS), sum(fresh["edits"]))
    assert [row.setting for row in study.measurements] == list(SHORT)
    for row in study.measurements:
        sampling = replace(params, temperature=row.setting.temperature)
        prompts = EDITS if row.setting.prompt_set == "edits" else PROMPTS
        run = generate(pair_with(row.setting.drafter), prompts, row.setting.config, sampling, engine=double)
        assert row.everything == run.acceptance
        both = zip(run.outputs, fresh[row.setting.prompt_set], strict=True)
        kept = [output for output, is_fresh in both if is_fresh]
        drafts = [count - 1 for output in kept for count in output.num_accepted_tokens_per_round]
        depths = [depth for output in kept for depth in output.proposed_depth_per_round] or None
        assert row.fresh == acceptance(
            drafts, row.setting.config.num_steps, row.setting.config.num_draft_tokens, depths
        )


def test_several_processes_measure_the_same(study):
    assert measured(*SHORT, jobs=2) == study


def test_greedy_outputs_equal_plain_decoding(study):
    assert [row.num_equal for row in study.measurements] == [4, 4, 4, None, 4, 3]
    assert study.is_lossless


def test_a_greedy_output_that_differs_is_counted(study):
    first, *others = study.measurements
    lossy = replace(study, measurements=(replace(first, num_equal=3), *others))
    assert not lossy.is_lossless
    *_, check = accept._checks(lossy)
    assert (check.measured, check.target, check.reached) == (18, "all 19", False)


def checks_by_claim(study: Study) -> dict[str, TargetCheck]:
    return {check.claim: check for check in study.checks}


def test_checks_follow_from_the_figures(study):
    checks = checks_by_claim(study)
    one, three, tree, sampled, eagle, _ = (row.everything.accept_length for row in study.measurements)
    figures = {
        "EAGLE-3 chain of 3, T=0: accept length": (three, 3.2),
        "EAGLE-3 chain of 3, T=1: accept length": (sampled, 1.7),
        "EAGLE chain of 3, T=0: accept length": (eagle, 2.5),
        "EAGLE-3 chain of 3, T=0, no loop: accept length": (study.measurements[1].fresh.accept_length, 2.3),
        "prompts": (4, 40),
        "new tokens a prompt": (24, 64),
        "prompts whose greedy continuation does not loop": (study.num_fresh, 2),
    }
    for claim, (measured, least) in figures.items():
        assert checks[claim] == TargetCheck(claim, measured, f"at least {least:g}", measured >= least)
    best = max(one, three)
    found = checks["EAGLE-3 tree 4/4/16, T=0: accept length"]
    assert (found.measured, found.reached) == (tree, tree > best)
    assert f"{best:.2f}" in found.target
    equal = "greedy outputs equal to plain decoding's"
    assert checks[equal] == TargetCheck(equal, 19, "all 19", True)
    assert len(checks) == len(figures) + 2


def test_a_tree_equal_to_the_best_chain_is_not_above_it():
    """Only the more probable of its two drafts is verified, which is the chain's."""
    tree = StudySetting("eagle3", SpecConfig(topk=2, num_steps=1, num_draft_tokens=2))
    study = measured(StudySetting("eagle3", chain(1)), tree)
    check = checks_by_claim(study)["EAGLE-3 tree 2/1/2, T=0: accept length"]
    assert check.measured == study.measurements[0].everything.accept_length
    assert not check.reached


def rows_of(lengths: dict[StudySetting, float]) -> Study:
    """Settings of these accept lengths."""
    figures = {setting: Acceptance(10, length, 0.5, 0.5, (0.5,)) for setting, length in lengths.items()}
    return Study(4, 4, 64, tuple(Measurement(setting, each, each, None) for setting, each in figures.items()), ())


def test_a_tree_is_compared_with_chains_that_are_not_deeper():
    tree = StudySetting("eagle3", SpecConfig(topk=2, num_steps=2, num_draft_tokens=5), 1.0)
    others = {
        StudySetting("eagle3", chain(3), 1.0): 1.7,
        StudySetting("eagle3", chain(2)): 1.8,
        replace(tree, config=TREE): 1.9,
    }
    others[StudySetting("eagle3", replace(tree.config, num_draft_tokens=4), 1.0)] = 2.0
    peers = {StudySetting("eagle3", chain(1), 1.0): 1.4, StudySetting("eagle3", chain(2), 1.0): 1.5}
    claim = "EAGLE-3 tree 2/2/5, T=1: accept length"
    (check,) = [each for each in accept._checks(rows_of({tree: 1.6} | others | peers)) if each.claim == claim]
    assert check == TargetCheck(claim, 1.6, "above 1.50, the best chain's", True)
    assert claim not in {
        each.claim for each in accept._checks(rows_of({tree: 1.6, StudySetting("eagle3", chain(3), 1.0): 1}))
    }


def test_a_tree_is_compared_with_its_own_drafter():
    """Nor are chains on other prompts among those that it should exceed."""
    tree = StudySetting("ngram", TREE, prompt_set="edits")
    others = {StudySetting("ngram", chain(3)): 1.9, StudySetting("suffix", chain(3), prompt_set="edits"): 2.0}
    study = rows_of({tree: 1.6, replace(tree, config=chain(3)): 1.5} | others)
    claim = "n-gram tree 4/4/16, T=0, edits: accept length"
    (check,) = [each for each in accept._checks(study) if each.claim == claim]
    assert check == TargetCheck(claim, 1.6, "above 1.50, the best chain's", True)


@pytest.mark.parametrize(
    ("drafter", "least"),
    [
        ("p-eagle", 2.7),
        ("mtp", 2.85),
        ("frozen-kv", 2.4),
        ("dflash", 2.4),
        ("dspark", 2.5),
        ("standalone", 2.3),
    ],
)
def test_a_drafter_has_a_target(drafter, least):
    claim = f"{KINDS[drafter].title} chain of 3, T=0: accept length"
    for length in (least, least - 0.01):
        setting = StudySetting(drafter, chain(3))
        (check,) = [each for each in accept._checks(rows_of({setting: length})) if each.claim == claim]
        assert check == TargetCheck(claim, length, f"at least {least}", length == least)


def test_an_end_token_ends_no_request():
    ending = partial(synthetic_pair, eos_token_ids=tuple(range(48)))
    assert measure(ending, {"prompts": PROMPTS}, 8, SHORT[:1]) == measured(SHORT[0], new_tokens=8)


def test_a_target_that_is_just_reached_is_reached():
    check = checks_by_claim(measured(SHORT[0], new_tokens=64, prompts=PROMPTS[:1]))["new tokens a prompt"]
    assert (check.target, check.reached) == ("at least 64", True)


def test_a_figure_that_is_not_defined_does_not_hold():
    looping = measured(StudySetting("eagle3", chain(3)), new_tokens=40, prompts=PROMPTS[:1])
    check = checks_by_claim(looping)["EAGLE-3 chain of 3, T=0, no loop: accept length"]
    assert looping.num_fresh == 0
    assert not check.reached


def chains_of(drafter: str) -> set[tuple[int, float]]:
    """Lengths and temperatures of a drafter's chains."""
    return {(each.config.num_steps, each.temperature) for each in settings_of(drafter) if each.is_chain}


@pytest.mark.parametrize("drafter", ["dflash", "dspark"])
def test_a_block_tree_is_compared_with_the_whole_block(drafter):
    """A shorter chain that accepts less is not what the tree has to exceed."""
    tree = StudySetting(drafter, SpecConfig(topk=4, num_steps=7, num_draft_tokens=16))
    assert tree in SETTINGS
    rows = rows_of({tree: 3.5, StudySetting(drafter, chain(7)): 3.4, StudySetting(drafter, chain(3)): 2.9})
    claim = f"{KINDS[drafter].title} tree 4/7/16, T=0: accept length"
    (check,) = [each for each in accept._checks(rows) if each.claim == claim]
    assert check == TargetCheck(claim, 3.5, "above 3.40, the best chain's", True)


def test_settings_of_the_shipped_drafters():
    """Each has a chain of 3 and a tree at both temperatures; without weights, on the edits too."""
    assert len(set(SETTINGS)) == len(SETTINGS)
    depths = {"mtp": 3, "dflash": 7, "dspark": 7}
    for drafter in DRAFTERS:
        tree = (4, depths.get(drafter, 4), 16)
        for prompt_set in ("prompts", "edits") if not KINDS[drafter].has_weights else ("prompts",):
            for temperature in (0.0, 1.0):
                assert StudySetting(drafter, chain(3), temperature, prompt_set) in SETTINGS
                assert StudySetting(drafter, SpecConfig(*tree), temperature, prompt_set) in SETTINGS
    assert chains_of("eagle3") == {(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (3, 1), (4, 1)}
    for drafter in ("dflash", "dspark"):
        assert chains_of(drafter) == {(3, 0), (7, 0), (3, 1), (7, 1)}


def test_a_drafter_of_ones_own_runs_on_both_sets():
    own = list(settings_of("my_drafter.py:Mine"))
    assert [replace(each, drafter="ngram") for each in own] == list(settings_of("ngram"))
    assert str(own[0]) == "Mine chain of 3"


@pytest.mark.parametrize("name", ["none", "medusa"])
def test_an_unknown_drafter_has_no_settings(name):
    with pytest.raises(InputError, check=lambda error: error.name == "drafter"):
        list(settings_of(name))


def test_table(study, capsys):
    show(study, stdout_console())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    named = (("EAGLE-3 chain of 3 ", "held-out", study.measurements[1]), ("n-gram", "edits", study.measurements[5]))
    for name, prompts, row in named:
        (cells, *_) = [line.split()[-9:] for line in lines if line.startswith(name)]
        figures = row.everything
        lengths = (figures.accept_length, row.fresh.accept_length, figures.accept_rate, *figures.accepted_by_position)
        assert cells == ["0", prompts, str(figures.rounds), *(f"{each:.2f}" for each in lengths)]
    answers = [line.split()[-1] for line in lines if line.split()[-1:] in (["yes"], ["NO"])]
    assert answers == ["yes" if check.reached else "NO" for check in study.checks]
    assert set(answers) == {"yes", "NO"}
    assert any(line.split() == ["prompts", "4", "at", "least", "40", "NO"] for line in lines)


@pytest.mark.parametrize(
    ("name", "given"), [("max_new_tokens", {"new_tokens": 0}), ("jobs", {"jobs": 0}), ("settings", {})]
)
def test_bad_setting_is_refused(name, given):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        measured(*(SHORT if given else ()), **given)


@pytest.mark.parametrize(
    ("drafter", "title"),
    [("eagle3+suffix", "EAGLE-3+suffix"), ("a+b.py:Same", "Same"), ("mtp+a+b.py:Same", "MTP+Same")],
)
def test_a_setting_names_a_lookup_and_a_file_with_a_plus(drafter, title):
    assert str(StudySetting(drafter, chain(3))) == f"{title} chain of 3"
