"""Fixtures of the differential tests: budgets computed once, and engines with one fault."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

import specsim.correctness.differential.grid_run as running
from specsim.correctness.differential import Cell, CellResult, check
from specsim.correctness.differential.cell import cell_of
from specsim.correctness.differential.pairs import make_pair


@pytest.fixture(scope="session")
def known_budgets() -> dict[tuple, dict[str, float]]:
    return {}


@pytest.fixture
def budgets_once(monkeypatch, known_budgets) -> None:
    """Reuse a cell's budgets, which do not depend on the implementation under test."""
    original = running.perturbation_budgets

    def budgets(cell, pair, dtype):
        head_sum = float(pair.target.tensors["lm_head.weight"].double().sum())
        name = (repr(cell), head_sum, dtype)
        if name not in known_budgets:
            known_budgets[name] = original(cell, pair, dtype)
        return dict(known_budgets[name])

    monkeypatch.setattr(running, "perturbation_budgets", budgets)


class Changed:
    """An engine with some phases replaced by functions of the phase, batch, state and pools."""

    def __init__(self, engine, phases):
        self._engine = engine
        self._phases = phases

    def __getattr__(self, name):
        found = getattr(self._engine, name)
        return partial(self._phases[name], found) if name in self._phases else found


@pytest.fixture
def check_changed(budgets_once) -> Callable[..., CellResult]:
    """Compare the reference, with some phases changed, with itself."""

    def run(cell, **phases):
        return check(cell, "reference", wrap=lambda each: replace(each, engine=Changed(each.engine, phases)))

    return run


@pytest.fixture
def check_spoiled(check_changed) -> Callable[..., CellResult]:
    """Compare the reference with itself, one phase changed by spoil(output, batch, pools) or its return value."""

    def run(cell, phase, spoil):
        def spoiled(own, batch, state, pools):
            output = own(batch, state, pools)
            return spoil(output, batch, pools) or output

        return check_changed(cell, **{phase: spoiled})

    return run


@pytest.fixture
def near_twins(monkeypatch) -> Cell:
    """A cell in which some pairs of adjacent ids have logits that differ by less than float32's precision."""

    def make(name, dtype):
        pair = make_pair(name, dtype)
        head = pair.target.tensors["lm_head.weight"].clone()
        head[[9, 17, 33]] = head[[8, 16, 32]] * (1 + 2e-7)
        return replace(pair, target=replace(pair.target, tensors={**pair.target.tensors, "lm_head.weight": head}))

    monkeypatch.setattr(running, "make_pair", make)
    return cell_of(dict(topk=8, num_steps=3, num_draft_tokens=16, page_size=4, batch=3))


@pytest.fixture
def peaked(monkeypatch) -> Cell:
    """A cell with score logprob and a wide range of draft logits, so that most probabilities underflow."""

    def make(name, dtype):
        pair = make_pair(name, dtype)
        head = 32 * pair.drafter.tensors["lm_head.weight"]
        return replace(pair, drafter=replace(pair.drafter, tensors={**pair.drafter.tensors, "lm_head.weight": head}))

    monkeypatch.setattr(running, "make_pair", make)
    setting = dict(topk=4, num_steps=3, num_draft_tokens=24, page_size=4, batch=3, kind="eagle3", score="logprob")
    return cell_of(setting)
