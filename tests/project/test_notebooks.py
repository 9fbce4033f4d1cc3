"""Notebooks run from top to bottom, and the .ipynb next to each source is the result of running it."""

import ast
import re
import runpy
from pathlib import Path

import pytest

from notebooks.guide.pages.course import notebook_head
from specsim import SpecConfig, generate
from specsim.course import exercise, names, starter

jupytext = pytest.importorskip("jupytext")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SOURCES = sorted(NOTEBOOKS.glob("[0-9]*.py"))
FIRST = "01_first_round"
CHECK = re.compile(r'^specsim\.course\.check\("([^"]*)"', re.MULTILINE)
SECONDS = re.compile(r"(\d+) seconds? to run")
# Functions that only arrange what a notebook shows; algorithms belong to the package.
OWN_FUNCTIONS = {"01_first_round": {"start", "tensors", "play"}}
SCRIPT = runpy.run_path(str(NOTEBOOKS / "execute.py"))
EXECUTE = SCRIPT["execute"]


def cells(notebook) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source.rstrip()) for cell in notebook.cells]


def faults(notebook) -> list[str]:
    """List signs that a notebook was not run whole, in order and without an error."""
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
    """Outputs of every code cell, without pixels, rounding errors and seconds, which differ between machines."""

    def shows(output) -> str:
        data = output.get("data", {"text/plain": output.get("text")})
        text = "" if "image/png" in data else re.sub(r"\d+e[+-]\d+|[\d.]+(?= s\b)", "#", data["text/plain"])
        return f"{' '.join(sorted(data))}: {text}"

    return [[shows(output) for output in cell.outputs] for cell in notebook.cells if cell.cell_type == "code"]


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


def stated_seconds(source: Path) -> int:
    """Read how long a notebook says it runs."""
    return max(map(int, SECONDS.findall(notebook_head(source.read_text(encoding="utf-8")).time)), default=0)


def _runs() -> list:
    """Notebooks to run: the one that a reader begins with, the others with --whole alone; the longest first."""
    longest = sorted(SOURCES, key=stated_seconds, reverse=True)
    return [
        pytest.param(source, id=source.stem, marks=() if source.stem == FIRST else pytest.mark.whole)
        for source in longest
    ]


@pytest.mark.parametrize("source", _runs())
def test_notebook_runs_again_and_shows_the_same(source):
    again = EXECUTE(source)
    assert faults(again) == []
    assert shown(again) == shown(nbformat.read(source.with_suffix(".ipynb"), as_version=4))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_notebook_says_what_it_takes_at_its_top(source):
    head = notebook_head(source.read_text(encoding="utf-8"))
    assert 0 < len(head.title.split()) <= 8
    assert len(head.goal) > 40
    assert head.before
    assert 5 <= head.minutes <= 120
    assert SECONDS.search(head.time)


def defined(text: str) -> set[str]:
    """Names of the functions and classes of a notebook's source."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_notebook_defines_only_its_exercises(source):
    exercises = {exercise(name).solution.__name__ for name in names() if name.startswith(source.stem[:2])}
    assert defined(source.read_text(encoding="utf-8")) == exercises | OWN_FUNCTIONS.get(source.stem, set())


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_notebook_has_its_exercises_with_starter_and_check(source):
    text = source.read_text(encoding="utf-8")
    assert CHECK.findall(text) == [name for name in names() if name.startswith(source.stem[:2])]
    for name in CHECK.findall(text):
        starting = exercise(name)
        cells = f'# %%\n{starter(starting)}\n\n# %%\nspecsim.course.check("{name}", {starting.solution.__name__})\n'
        assert cells in text.partition(f"# %% [markdown]\n# ### Exercise {name}\n#\n# ")[2]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_notebook_shows_no_solution(source):
    checks = [cell for cell in nbformat.read(source.with_suffix(".ipynb"), as_version=4).cells
              if cell.cell_type == "code" and cell.source.startswith("specsim.course.check(")]  # fmt: skip
    texts = [output["data"]["text/plain"] for cell in checks for output in cell.outputs]
    assert len(texts) == len(checks)
    assert all("not solved yet" in text for text in texts)


def test_definitions_are_found():
    assert defined("class A:\n    def f(self): pass\nif 1:\n    async def g(): pass\nx = 1") == {"A", "f", "g"}


def test_the_first_round_is_as_its_text_says():
    notebook, names = jupytext.read(NOTEBOOKS / "01_first_round.py"), {}
    text = " ".join(" ".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown").split())
    for cell in notebook.cells:
        if cell.cell_type == "code" and "verdict" not in names:
            exec(cell.source, names)
    scores, tokens = names["verify_input"].scores[0], names["verify_input"].draft_tokens[0].tolist()
    parents, path = names["verify_input"].parents[0].tolist(), names["verdict"].accept_index[0].tolist()
    assert f"Node 5 has a score of {scores[5]:.3f}, and its parent, node 2, has {scores[2]:.3f}." in text
    assert parents[5] == 2
    assert f"give to `{names['decode'](tokens[5:6])}` after `{names['decode'](tokens[2:3])}`?" in text
    assert [names["decode"]([token]) for token in tokens].count(":") == 2
    assert "The accepted path is not the one with the best scores." in text
    assert scores[path[1]] < scores[1]
    moves = "nodes {}, {} and {} were moved one after the other, starting with {}.".format(*path[1:], path[3])
    assert moves in text
    assert path[1] == 2  # where the KV of the second goes
    chain = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, page_size=4)
    assert generate(names["pair"], names["prompts"][:1], chain).outputs[0].num_accepted_tokens_per_round[0] == 1


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


def test_outputs_are_compared_but_for_rounding_and_seconds():
    def told(text):
        value = nbformat.v4.new_output("execute_result", {"text/plain": text, "text/html": "made once"})
        (outputs,) = shown(made_up(outputs=[nbformat.v4.new_output("stream", text=text), value]))
        return outputs

    line = "slots [20, 22] see ' 1', length 3.69, 0.13 s, within 4e-06 of values up to 7.1"
    assert told(line) == told(line.replace("0.13", "12.5").replace("4e-06", "0e+00"))
    for old, new in (("22", "23"), ("3.69", "3.70"), ("see", "sse"), ("' 1'", "' 0'"), ("7.1", "7.2")):
        assert all(one != other for one, other in zip(told(line), told(line.replace(old, new)), strict=True))


def test_pieces_of_a_print_are_joined():
    pieces = [nbformat.v4.new_output("stream", text=text) for text in "ab"]
    value = nbformat.v4.new_output("execute_result", {"text/plain": "c"})
    warning = nbformat.v4.new_output("stream", name="stderr", text="d")
    joined = SCRIPT["merged"]([*pieces, value, nbformat.v4.new_output("stream", text="e"), warning])
    assert [output.get("text") for output in joined] == ["ab", None, "e", "d"]


def test_limits_of_time_decide_the_exit_status(monkeypatch, capsys):
    main = SCRIPT["main"]
    seconds = iter((0, 59, 60, 130))
    monkeypatch.setitem(main.__globals__, "execute", lambda source: None)
    monkeypatch.setattr(main.__globals__["time"], "perf_counter", lambda: next(seconds))
    assert main(["--limits", "01_first_round"]) == 0
    assert main(["--limits", "01_first_round"]) == 1
    assert "01_first_round: 70.0 s" in capsys.readouterr().out


def test_cells_that_differ_are_told_apart():
    assert cells(made_up()) == [("markdown", "text"), ("code", "1 / 0")]
    assert cells(made_up()) != cells(nbformat.v4.new_notebook(cells=made_up().cells[1:]))
