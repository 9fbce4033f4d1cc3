"""The differential itself: it passes what is right, names what is wrong, and takes no silence for an answer."""

import json
from collections import Counter
from dataclasses import fields, replace
from itertools import combinations

import pytest
import torch

import specsim.differential.run as running
from specsim import SpecConfig
from specsim.cli import main
from specsim.config import InputError
from specsim.differential import CellResult, GridResult, check, grid, run_grid
from specsim.differential.budget import FLOAT32_EPS, budget
from specsim.differential.comparison import Comparison, Tally, Trio
from specsim.differential.divergence import Divergence, Mismatch, Undecidable
from specsim.differential.exercised import required
from specsim.differential.grids import AXES, QUICK, SAMPLINGS, cell_of, is_valid
from specsim.differential.law import Law, rounding
from specsim.differential.pairs import make_pair
from specsim.differential.ranking import compare_ranking, log_scores
from specsim.phases import Candidates, DraftExtendInput, DraftInput, PrefillOutput, Sampling, VerifyInput, VerifyOutput
from specsim.pool import lane_columns, tail_columns

CELL = cell_of(dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3))
WARM = cell_of(dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3, sampling="warm", kind="eagle3"))
COVERING = grid("pairwise")


# What is right passes.


@pytest.mark.parametrize("cell", COVERING[::4], ids=lambda cell: cell.id)
def test_the_reference_equals_itself(cell):
    result = check(cell, "reference")
    assert (result.mismatches, result.undecidable, result.first_divergence) == (0, 0, None)
    assert not result.is_empty
    assert result.left_out == {}


@pytest.mark.parametrize("cell", [CELL, WARM, cell_of(QUICK[7]), cell_of(QUICK[2])], ids=lambda cell: cell.id)
def test_bfloat16_leaves_choices_undecidable_and_finds_no_mismatch(cell):
    """16 bits part the reference from its float64 self; whom they part is left out, and counted."""
    result = check(cell, "reference", "bfloat16")
    assert result.mismatches == 0
    assert result.undecidable > 0
    assert sum(result.left_out.values()) >= result.undecidable
    assert not result.is_empty


@pytest.mark.parametrize("cell", COVERING, ids=lambda cell: cell.id)
def test_fast_equals_reference(cell):
    """The pairwise grid; on a machine with a GPU it runs there."""
    result = check(cell)
    assert (result.mismatches, result.first_divergence) == (0, None)
    assert not result.is_empty
    assert result.undecidable <= 1


# What is wrong is found, and named.


class Faulty:
    """An engine whose output or pools are spoiled in one phase, in its first round."""

    def __init__(self, engine, phase, spoil):
        self._engine, self._phase, self._spoil = engine, phase, spoil

    def __getattr__(self, name):
        found = getattr(self._engine, name)
        if name != self._phase:
            return found

        def run(batch, state, pools):
            output = found(batch, state, pools)
            return self._spoil(output, batch, pools) or output

        return run


def result_of(cell, phase, spoil, dtype="float32"):
    wrap = lambda column: replace(column, engine=Faulty(column.engine, phase, spoil))  # noqa: E731
    return check(cell, "reference", dtype, wrap=wrap)


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


NOT_COMPARED = {"draft_logits"}  # the reference's alone
NESTED = {"candidates": Candidates, "draft_extend_input": DraftExtendInput, "draft_input": DraftInput}
STATES = {"prefill": PrefillOutput, "draft": VerifyInput, "verify": VerifyOutput, "draft_extend": DraftInput}


def paths(state) -> list[str]:
    """Every tensor of a state, from its definition: a field that is added later is planted too."""
    found = []
    for name in (field.name for field in fields(state)):
        below = paths(NESTED[name]) if name in NESTED else []
        found += [f"{name}.{path}" for path in below] or ([] if name in NOT_COMPARED else [name])
    return found


FAULTS = [(phase, path) for phase, state in STATES.items() for path in paths(state)]
# Entries that mean something: a row's last one may be padding.
PLACES = {"candidates.parent_list": (1, 6), "candidates.tokens": (1, 5), "candidates.scores": (1, 9)}
DIMENSIONS = {"mask": 3, "target_logits": 2, "predict": 1, "positions": 1, "cache_locations": 1, "next_tokens": 1}


def place_of(path: str, phase: str) -> tuple[int, ...]:
    return PLACES.get(path, (0,))


@pytest.mark.parametrize("cell", [CELL, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize(("phase", "path"), FAULTS)
def test_one_wrong_entry_of_any_field_is_named(cell, phase, path):
    result = result_of(cell, phase, first_entry(path))
    assert result.first_divergence is not None, f"{path} is not compared"
    assert result.first_divergence.field == path
    assert result.first_divergence.phase == phase
    assert result.mismatches >= 1


def first_entry(path: str):
    """Spoil the entry at PLACES, or the very first one."""

    def spoil(state, batch, pools):
        value = state
        for name in path.split("."):
            value = getattr(value, name)
        return spoiler(path, PLACES.get(path, (0,) * value.dim()))(state, batch, pools)

    return spoil
