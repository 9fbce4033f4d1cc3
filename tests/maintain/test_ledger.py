import re
from dataclasses import fields

import numpy as np
import pytest

from specsim.maintain.page import ROOT, regions
from specsim.maintain.tables import ledger
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.reproduce import TABLES, reproduction, vllm_41162
from specsim.simulator.reproduce.served import Bench, read

NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e-?\d+)?")
SLOW = "vllm_41162"  # its fit takes a minute
FITTED = ("fast_rounds", "spec_bench", "vllm_20780", SLOW)
UNITS = {"µs": 1e-6} | dict.fromkeys(("of the peak", "of the shorter", "of other products", "launches a round"), 1.0)
PAGES = {
    mark.removeprefix("ledger "): path
    for path in ROOT.glob("papers/*/notes.md")
    for mark in regions(path.read_text(encoding="utf-8"))
    if mark.startswith("ledger ")
}


def differences(kept: str, made: str) -> list[tuple[str, str]]:
    """Lines with different words, or with numbers that differ by more than 2 % and 0.15."""
    pairs = zip(kept.splitlines(), made.splitlines(), strict=True)
    return [(old, new) for old, new in pairs if NUMBER.sub("#", old) != NUMBER.sub("#", new) or not _close(old, new)]


def _close(old: str, new: str) -> bool:
    values = [[float(number) for number in NUMBER.findall(line)] for line in (old, new)]
    return values[0] == pytest.approx(values[1], rel=0.02, abs=0.15)


def kept(name: str) -> str:
    page = PAGES[name].read_text(encoding="utf-8")
    return page.split(f"<!-- ledger {name} -->\n")[1].split(f"<!-- /ledger {name} -->")[0].strip()


def cells(name: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in kept(name).splitlines() if line.startswith("| ")]


def parameters(name: str) -> dict[str, float]:
    """Fitted parameters of a ledger, in seconds or as shares."""
    return {line[0]: float(line[1]) * UNITS[line[4]] for line in cells(name) if len(line) == 5 and line[4] in UNITS}


@pytest.mark.parametrize("name", [name for name in PAGES if name != SLOW])
def test_a_ledger_is_that_of_its_reproduction(name):
    assert differences(kept(name), ledger(reproduction(name)())) == []


def test_groups_of_trees_err_as_quoted_in_notes():
    errors = {line[0]: float(line[4].rstrip("%")) for line in cells("fast_rounds") if line[0].startswith("(4, 3, 8), ")}
    some = [errors[f"(4, 3, 8), {requests} requests, L {length}"] for requests in (4, 16) for length in (1024, 4096)]
    assert all(3.5 <= error < 8.5 for error in some)
    assert -8.5 < errors["(4, 3, 8), 256 requests, L 1024"] <= -7.5
    assert all(abs(error) < 4.5 for name, error in errors.items() if "L 65536" in name or "L 131072" in name)


@pytest.fixture(scope="module")
def slow_ledger():
    """Rows of figures, and parameters by name, in seconds."""
    figures = [line for line in cells(SLOW) if len(line) == 6 and line[-1] in ("fitted", "held out")]
    return figures, parameters(SLOW)


def test_the_servers_of_a_ledger_reproduce_its_figures(slow_ledger):
    """Every figure of one model follows from its parameters, which are kept with three digits."""
    figures, parameters = slow_ledger
    model = "Qwen3 8B"
    values = {name.split(", ")[0]: value for name, value in parameters.items() if name.endswith(model)}
    made = [
        each.cells()
        for cell in read()
        if cell.model == model
        for each in vllm_41162.side_by_side(Bench.of(cell), values)
    ]
    rows = ["\n".join(" | ".join(each) for each in lines) for lines in (figures, made)]
    assert differences("\n".join(line for line in rows[0].splitlines() if line.startswith(model)), rows[1]) == []


def values_of(field: str, table: str) -> list[float]:
    return [value for name, value in parameters(table).items() if name.split(", ")[0] == field]


@pytest.mark.parametrize(
    ("field", "tables"),
    [
        ("bandwidth", ("fast_rounds", "vllm_20780")),
        ("compute", ("fast_rounds",)),
        ("overlap", ("fast_rounds", "spec_bench")),
        ("experts", (SLOW,)),
        ("mxfp4_experts", (SLOW,)),
        ("gap", ("fast_rounds", SLOW)),
        ("host", ("vllm_20780",)),
    ],
)
def test_defaults_are_what_the_fits_found_in_two_digits(field, tables):
    """Each default is the mean on a logarithmic scale over tables, of the mean over each one's servers."""
    mean = np.exp(np.mean([np.mean(np.log(values_of(field, table))) for table in tables]))
    assert getattr(Efficiency(), field) == float(f"{mean:.2g}")


def test_every_field_of_efficiency_names_its_source():
    """Every default comes from a kept fit, or a comment says that it does not."""
    others = {field.name for field in fields(Efficiency) if not any(values_of(field.name, table) for table in FITTED)}
    assert others == {"host_request", "host_drafts", "draft_step", "collective", "filters"}


def test_a_ledger_states_mean_and_worst_error(slow_ledger):
    figures, parameters = slow_ledger
    assert (len(figures), len(parameters)) == (180, 16)
    for model in vllm_41162.PAIRS:
        held_out = [each for each in figures if each[0].startswith(model) and each[5] == "held out"]
        errors = [abs(float(each[4].rstrip("%"))) for each in held_out if not each[1].startswith("TTFT")]
        waits = [abs(float(each[4].rstrip("%"))) for each in held_out if each[1].startswith("TTFT")]
        said = next(line for line in kept(SLOW).splitlines() if line.startswith(f"{model}: throughput"))
        assert [float(each) for each in re.findall(r"([\d.]+)% (?:off|at worst)", said)] == pytest.approx(
            [sum(errors) / len(errors), max(errors)], abs=0.1
        )
        assert said.endswith(", reached.") == (sum(errors) / len(errors) <= 6 and max(errors) <= 15)
        assert sum(waits) / len(waits) <= 25


def test_every_table_that_is_not_exact_has_its_ledger():
    assert set(TABLES) - {"leviathan_table1"} == set(PAGES)


@pytest.mark.parametrize("made", ["| a | 2.30 |", "| b | 2.00 |", "| a | 2.00 | 1 |"])
def test_another_figure_or_word_is_a_difference(made):
    assert differences("| a | 2.00 |", made)
    assert differences(made, made) == []
