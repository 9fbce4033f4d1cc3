"""The differential test reports every wrong field of a state."""

from collections import Counter
from dataclasses import fields, replace

import pytest
import torch

from specsim.core.phases import (
    AutoregressiveInput,
    Candidates,
    DraftExtendInput,
    PrefillOutput,
    Verdict,
    VerifyInput,
    VerifyOutput,
)
from specsim.correctness.differential import check, grid
from specsim.correctness.differential.cell import cell_of

pytestmark = pytest.mark.usefixtures("budgets_once")
CELL = cell_of(dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3))
WARM = cell_of(dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3, sampling="warm", kind="eagle3"))


def changed(value: torch.Tensor, place: tuple[int, ...]) -> torch.Tensor:
    value = value.clone()
    if value.dtype == torch.bool:
        value[place] = ~value[place]
    elif value.is_floating_point():
        value[place] = value[place] * 1.001 + 1e-3
    else:
        value[place] += 1
    return value


def spoiler(path: str, place: tuple[int, ...]):
    """Change one entry of a field, given by its path from the state."""

    def spoil(state, batch, pools):
        name, _, rest = path.partition(".")
        value = getattr(state, name)
        new = spoiler(rest, place)(value, batch, pools) if rest else changed(value, place)
        return replace(state, **{name: new})

    return spoil


# The reference's only, absent for deterministic drafts, and absent without a drafter that looks up.
NOT_COMPARED = {"draft_logits", "draft_prob", "looked_up"}
NESTED = {
    "candidates": Candidates,
    "verdict": Verdict,
    "draft_extend_input": DraftExtendInput,
    "draft_input": AutoregressiveInput,
}
STATES = {"prefill": PrefillOutput, "draft": VerifyInput, "verify": VerifyOutput, "draft_extend": AutoregressiveInput}


def paths(state) -> list[str]:
    """Paths of every tensor of a state, from its definition, so that new fields are included."""
    found = []
    for name in (field.name for field in fields(state)):
        below = paths(NESTED[name]) if name in NESTED else []
        found += [f"{name}.{path}" for path in below] or ([] if name in NOT_COMPARED else [name])
    return found


FAULTS = [(phase, path) for phase, state in STATES.items() for path in paths(state)]
# Elsewhere than at a state's very first entry.
PLACES = {"candidates.parent_list": (1, 6), "candidates.tokens": (1, 5), "candidates.scores": (1, 9)}


def first_entry(path: str):
    """Spoil the entry at PLACES, or the first one."""

    def spoil(state, batch, pools):
        value = state
        for name in path.split("."):
            value = getattr(value, name)
        return spoiler(path, PLACES.get(path, (0,) * value.dim()))(state, batch, pools)

    return spoil


@pytest.mark.every_value
@pytest.mark.parametrize("cell", [CELL, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize(("phase", "path"), FAULTS)
def test_one_wrong_entry_of_any_field_is_named(check_spoiled, cell, phase, path):
    result = check_spoiled(cell, phase, first_entry(path))
    assert result.first_divergence is not None, f"{path} is not compared"
    assert result.first_divergence.field == path.removeprefix("verdict.")
    assert result.first_divergence.phase == phase
    assert result.mismatches >= 1


@pytest.mark.parametrize("path", ["looked_up.num_alive", "candidates.scores"])
def test_what_is_looked_up_and_what_is_drafted_is_compared(check_spoiled, path):
    cell = cell_of({"kind": "eagle3+suffix", "topk": 1, "num_steps": 2})
    first = check_spoiled(
        cell, "draft", spoiler(path, (0,) * (2 if path.startswith("candidates") else 1))
    ).first_divergence
    assert (first.phase, first.field) == ("draft", path)


def in_round(phase, spoil):
    """Apply the same fault when the three phases are one step."""

    def spoil_round(outputs, batch, pools):
        name = {"draft": "verify_input", "verify": "verify_output", "draft_extend": "draft_input"}[phase]
        return outputs._replace(**{name: spoil(getattr(outputs, name), batch, pools)})

    return spoil_round


@pytest.mark.every_value
@pytest.mark.parametrize("mode", ["lockstep", "free"])
@pytest.mark.parametrize(("phase", "path"), [fault for fault in FAULTS if fault[0] != "prefill"])
def test_one_wrong_entry_is_named_after_a_whole_round(check_spoiled, mode, phase, path):
    cell = replace(WARM, graph="round", mode=mode)
    first = check_spoiled(cell, "round", in_round(phase, first_entry(path))).first_divergence
    assert first is not None
    assert (first.phase, first.field) == (phase, path.removeprefix("verdict."))


def swapped(name, one, other, dim=1):
    def spoil(state, batch, pools):
        order = list(range(getattr(state, name).shape[dim]))
        order[one], order[other] = order[other], order[one]
        return replace(state, **{name: getattr(state, name).index_select(dim, torch.tensor(order))})

    return spoil


def leak_padding(state, batch, pools):
    return replace(state, topk_scores=torch.cat([state.topk_scores, state.topk_scores[:1]]))


def narrow(state, batch, pools):
    return replace(state, draft_tokens=state.draft_tokens.int())


def lose(state, batch, pools):
    return replace(state, hidden=None)


def not_a_number(state, batch, pools):
    return replace(state, target_logits=state.target_logits.index_fill(0, torch.tensor([3]), torch.nan))


def accept_less(state, batch, pools):
    """End request 0's path at its root, with all fields consistent."""
    if int(state.verdict.num_accepted_drafts[0]) == 0:
        return None
    accept_index = state.verdict.accept_index.clone()
    predict = state.verdict.predict.clone()
    predict[accept_index[0, 1:][accept_index[0, 1:] >= 0].long()] = -1
    accept_index[0, 1:] = -1
    drafts = state.verdict.num_accepted_drafts.index_fill(0, torch.tensor([0]), 0)
    counts = {"num_accepted_drafts": drafts, "num_accepted_tokens": drafts + 1}
    verdict = replace(state.verdict, accept_index=accept_index, predict=predict, **counts)
    return replace(state, verdict=verdict)


def raise_error(state, batch, pools):
    raise IndexError("row 1 of the request table owns no slot")


SEMANTIC = {
    "two drafts change places": ("draft_extend", swapped("topk_index", 0, 1), "topk_index"),
    "two nodes change places": ("draft", swapped("draft_tokens", 1, 2), "draft_tokens"),
    "a padded row leaks": ("draft_extend", leak_padding, "topk_scores (shape)"),
    "a narrower type": ("draft", narrow, "draft_tokens (dtype)"),
    "a lost field": ("draft_extend", lose, "hidden (type)"),
    "not a number": ("verify", not_a_number, "target_logits"),
    "a path cut short": ("verify", accept_less, "accept_index"),
    "an error": ("draft", raise_error, "error"),
}


@pytest.mark.parametrize(("phase", "spoil", "field"), SEMANTIC.values(), ids=SEMANTIC)
@pytest.mark.parametrize("cell", [CELL, WARM], ids=["greedy", "warm"])
def test_faults_of_meaning_are_named(check_spoiled, cell, phase, spoil, field):
    first = check_spoiled(cell, phase, spoil).first_divergence
    assert (first.phase, first.field) == (phase, field)


def test_a_divergence_is_printed_in_full(check_spoiled):
    first = check_spoiled(CELL, "draft", first_entry("positions")).first_divergence
    assert (first.round, first.request, first.node) == (1, 0, 0)
    assert str(first) == f"{CELL.id}: round 0, draft, request 0, entry 0: positions is 8, the reference has 7"


@pytest.mark.parametrize(
    ("phase", "path"),
    [("prefill", "draft_input.topk_scores"), ("draft", "candidates.scores"), ("draft_extend", "topk_scores")],
)
def test_log_scores_that_underflow_are_found(check_spoiled, peaked, phase, path):
    def underflow(state, batch, pools):
        name, _, rest = path.rpartition(".")
        owner = getattr(state, name) if name else state
        changed = replace(owner, **{rest: getattr(owner, rest).exp().log()})
        return replace(state, **{name: changed}) if name else changed

    first = check_spoiled(peaked, phase, underflow).first_divergence
    assert (first.phase, first.field) == (phase, path)
    assert first.fast < -87


@pytest.mark.parametrize("path", ["positions", "mask", "draft_tokens", "scores"])
def test_choices_that_rounding_decides_hide_no_fault(check_spoiled, near_twins, path):
    assert check_spoiled(near_twins, "draft", first_entry(path)).first_divergence.field == path


def test_quick_grid_compares_every_field_of_every_state():
    counts = Counter()
    for cell in grid("quick"):
        counts.update(check(cell, "reference").fields)
    expected = {path.removeprefix("verdict.") for _, path in FAULTS}
    assert expected <= {name for name, count in counts.items() if count}
