"""The notebooks run from top to bottom, and what is beside each source is what running it left."""

import re
import runpy
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
SOURCES = sorted(NOTEBOOKS.glob("[0-9]*.py"))
EXECUTE = runpy.run_path(str(NOTEBOOKS / "execute.py"))["execute"]


def cells(notebook) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source.rstrip()) for cell in notebook.cells]


def faults(notebook) -> list[str]:
    """What shows that a notebook was not run whole, in order and without an error."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    found = [] if counts == list(range(1, len(code) + 1)) else [f"run as {counts}"]
    for cell in code:
        for output in cell.outputs:
            if output.output_type == "error":
                found.append(f"error {output.ename} of {cell.source[:30]!r}")
            if output.output_type == "stream" and output.name == "stderr":
                found.append(f"{output.text[:60]!r} of {cell.source[:30]!r}")
    return found


def shown(notebook) -> list[list[str]]:
    """What each code cell shows, without what differs from machine to machine: pixels, digits after rounding, times."""

    def kinds(output) -> str:
        return " ".join(sorted(output.data)) if "data" in output else re.sub(r"[\d.e+-]+", "#", output.text)

    return [[kinds(output) for output in cell.outputs] for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert {path.stem for path in SOURCES} == {path.stem for path in NOTEBOOKS.glob("*.ipynb")}
    assert SOURCES


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_notebook_is_in_step_with_its_source(source):
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(notebook)
    assert cells(notebook) == cells(jupytext.read(source))
    assert faults(notebook) == []
    assert any("image/png" in kinds for cell in shown(notebook) for kinds in cell)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_notebook_runs_again_and_shows_the_same(source):
    again = EXECUTE(source)
    assert faults(again) == []
    assert shown(again) == shown(nbformat.read(source.with_suffix(".ipynb"), as_version=4))


def made_up(**outputs):
    cell = nbformat.v4.new_code_cell("1 / 0", execution_count=1, **outputs)
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("text"), cell])


def test_faults_are_found():
    assert faults(made_up()) == []
    error = nbformat.v4.new_output("error", ename="ZeroDivisionError", evalue="", traceback=[])
    assert faults(made_up(outputs=[error])) == ["error ZeroDivisionError of '1 / 0'"]
    warning = nbformat.v4.new_output("stream", name="stderr", text="careful")
    assert faults(made_up(outputs=[warning])) == ["'careful' of '1 / 0'"]
    skipped = made_up()
    skipped.cells[1].execution_count = 2
    assert faults(skipped) == ["run as [2]"]
    skipped.cells[1].execution_count = None
    assert faults(skipped) == ["run as [None]"]


def test_cells_that_differ_are_told_apart():
    assert cells(made_up()) == [("markdown", "text"), ("code", "1 / 0")]
    assert cells(made_up()) != cells(nbformat.v4.new_notebook(cells=made_up().cells[1:]))
