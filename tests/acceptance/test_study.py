"""Figures of the study equal those of its runs, and its conclusions follow from them."""

from dataclasses import replace

import pytest
import torch

from specsim import SamplingParams, SpecConfig, generate
from specsim.acceptance import study as accept
from specsim.acceptance.study import SETTINGS, TREE, Check, Measurement, Setting, Study, chain, measure, show
from specsim.core.display import stdout_console
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.metrics import Acceptance, acceptance, distinct_share
from specsim.models.synthetic_pair import synthetic_pair

PROMPTS = [[1, 2, 3], [7, 8, 9, 10], [11], [40, 3, 22]]
NEW_TOKENS = 24
SHORT = (
    Setting("eagle3", chain(1)),
    Setting("eagle3", chain(3)),
    Setting("eagle3", TREE),
    Setting("eagle3", chain(3), temperature=1.0),
    Setting("eagle", chain(3)),
)


@pytest.fixture(scope="module")
def pairs():
    return {kind: synthetic_pair(kind) for kind in ("eagle3", "eagle")}


@pytest.fixture(scope="module")
def study(pairs) -> Study:
    return measure(pairs, PROMPTS, NEW_TOKENS, SHORT)


def test_figures_are_those_of_the_runs(pairs, study):
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    greedy = generate(
        pairs["eagle"], PROMPTS, SpecConfig.plain(), params, engine=EngineOptions(dtype=torch.float64)
    ).outputs
    fresh = [distinct_share(output.token_ids) >= 0.5 for output in greedy]
    assert 0 < sum(fresh) < len(PROMPTS)
    assert (study.num_prompts, study.num_fresh) == (len(PROMPTS), sum(fresh))
    assert [row.setting for row in study.measurements] == list(SHORT)
    for row in study.measurements:
        sampling = replace(params, temperature=row.setting.temperature)
        run = generate(
            pairs[row.setting.drafter], PROMPTS, row.setting.config, sampling, engine=EngineOptions(dtype=torch.float64)
        )
        drafts = [[count - 1 for count in output.num_accepted_tokens_per_round] for output in run.outputs]
        assert row.everything == run.acceptance
        kept = [count for own, is_fresh in zip(drafts, fresh, strict=True) if is_fresh for count in own]
        assert row.fresh == acceptance(kept, row.setting.config.num_steps, row.setting.config.num_draft_tokens)


def test_greedy_outputs_equal_plain_decoding(study):
    assert [row.num_equal for row in study.measurements] == [4, 4, 4, None, 4]
    assert study.is_lossless


def test_a_greedy_output_that_differs_is_counted(study):
    first, *others = study.measurements
    lossy = replace(study, measurements=(replace(first, num_equal=3), *others))
    assert not lossy.is_lossless
    *_, check = accept._checks(lossy)
    assert (check.measured, check.target, check.reached) == (15, "all 16", False)


def checks_by_claim(study: Study) -> dict[str, Check]:
    return {check.claim: check for check in study.checks}


def test_checks_follow_from_the_figures(study):
    checks = checks_by_claim(study)
    one, three, tree, sampled, eagle = (row.everything.accept_length for row in study.measurements)
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
        assert checks[claim] == Check(claim, measured, f"at least {least:g}", measured >= least)
    best = max(one, three, eagle)
    found = checks["EAGLE-3 tree 4/4/16, T=0: accept length"]
    assert (found.measured, found.reached) == (tree, tree > best)
    assert f"{best:.2f}" in found.target
    equal = "greedy outputs equal to plain decoding's"
    assert checks[equal] == Check(equal, 16, "all 16", True)
    assert len(checks) == len(figures) + 2


def test_a_tree_equal_to_the_best_chain_is_not_above_it(pairs):
    """Only the more probable of its two drafts is verified, which is the chain's."""
    tree = Setting("eagle3", SpecConfig(topk=2, num_steps=1, num_draft_tokens=2))
    study = measure(pairs, PROMPTS, NEW_TOKENS, (Setting("eagle3", chain(1)), tree))
    check = checks_by_claim(study)["EAGLE-3 tree 2/1/2, T=0: accept length"]
    assert check.measured == study.measurements[0].everything.accept_length
    assert not check.reached


def rows_of(lengths: dict[Setting, float]) -> Study:
    """Settings of these accept lengths."""
    figures = {setting: Acceptance(10, length, 0.5, 0.5, (0.5,)) for setting, length in lengths.items()}
    return Study(4, 4, 64, tuple(Measurement(setting, each, each, None) for setting, each in figures.items()), ())


def test_a_tree_is_compared_with_chains_that_are_not_deeper():
    tree = Setting("eagle3", SpecConfig(topk=2, num_steps=2, num_draft_tokens=5), 1.0)
    others = {Setting("eagle3", chain(3), 1.0): 1.7, Setting("eagle3", chain(2)): 1.8, replace(tree, config=TREE): 1.9}
    others[Setting("eagle3", replace(tree.config, num_draft_tokens=4), 1.0)] = 2.0
    peers = {Setting("eagle3", chain(1), 1.0): 1.4, Setting("eagle3", chain(2), 1.0): 1.5}
    claim = "EAGLE-3 tree 2/2/5, T=1: accept length"
    (check,) = [each for each in accept._checks(rows_of({tree: 1.6} | others | peers)) if each.claim == claim]
    assert check == Check(claim, 1.6, "above 1.50, the best chain's", True)
    assert claim not in {
        each.claim for each in accept._checks(rows_of({tree: 1.6, Setting("eagle3", chain(3), 1.0): 1}))
    }


def test_an_end_token_ends_no_request(pairs):
    ending = {"eagle3": synthetic_pair("eagle3", eos_token_ids=tuple(range(48)))}
    assert measure(ending, PROMPTS, 8, SHORT[:1]) == measure(pairs, PROMPTS, 8, SHORT[:1])


def test_a_target_that_is_just_reached_is_reached(pairs):
    check = checks_by_claim(measure(pairs, PROMPTS[:1], 64, ()))["new tokens a prompt"]
    assert (check.target, check.reached) == ("at least 64", True)


def test_a_figure_that_is_not_defined_does_not_hold(pairs):
    looping = measure(pairs, PROMPTS[:1], 40, (Setting("eagle3", chain(3)),))
    check = checks_by_claim(looping)["EAGLE-3 chain of 3, T=0, no loop: accept length"]
    assert looping.num_fresh == 0
    assert not check.reached


def test_the_shipped_settings_reach_their_targets():
    chains = [each.config.num_steps for each in SETTINGS if each.is_chain and each.drafter == "eagle3"]
    assert chains == [1, 2, 3, 4, 5, 3, 4]
    assert {(each.drafter, each.temperature) for each in SETTINGS} == {
        (drafter, temperature) for drafter in ("eagle", "eagle3") for temperature in (0.0, 1.0)
    }
    assert (TREE.topk, TREE.num_steps, TREE.num_draft_tokens) == (4, 4, 16)


def test_table(study, capsys):
    show(study, stdout_console())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    place = next(place for place, line in enumerate(lines) if line.startswith("EAGLE-3 chain of 3 "))
    measured = study.measurements[1]
    cells = [*lines[place].split()[4:], *lines[place + 1].split()]
    assert cells == [
        cell
        for name, figures in (("0 all", measured.everything), ("- no loop", measured.fresh))
        for cell in (
            *name.split(),
            str(figures.rounds),
            f"{figures.accept_length:.2f}",
            f"{figures.accept_rate:.2f}",
            *(f"{rate:.2f}" for rate in figures.accepted_by_position),
        )
    ]
    answers = [line.split()[-1] for line in lines if line.split()[-1:] in (["yes"], ["NO"])]
    assert answers == ["yes" if check.reached else "NO" for check in study.checks]
    assert set(answers) == {"yes", "NO"}
    assert any(line.split() == ["prompts", "4", "at", "least", "40", "NO"] for line in lines)


def test_bad_setting_is_refused(pairs):
    with pytest.raises(InputError, check=lambda error: error.name == "max_new_tokens"):
        measure(pairs, PROMPTS, 0, SHORT)
