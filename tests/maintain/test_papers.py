"""Ledger of papers: the committed page is what the command computes, and wrong data are refused."""

import re
from pathlib import Path

import pytest

from papers.inferencex.reproduce import RULES, coverage, show
from papers.reproduction import __main__ as command
from papers.reproduction import ledger, rounds, trees
from papers.reproduction.published import Published, papers, read
from specsim.core.display import stdout_console
from specsim.core.errors import InputError
from specsim.simulator.continuation import margin, misses, published_series
from specsim.simulator.reproduce import TABLES

PAGE = command.ROOT / "papers" / "ledger.md"
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
MARKED = [path.parent.name for path in PAGE.parent.glob("*/notes.md") if "<!-- reproduced -->" in path.read_text()]
FIGURE = """[[figure]]
claim = "a chain that never ends"
where = "section 1"
published = "1.00"
by = "trees.endless_chain"
"""


@pytest.fixture(scope="module")
def all_rows():
    return [(paper, ledger.rows(paper, command.ROOT)) for paper in papers(command.ROOT)]


def words_and_numbers(line):
    return NUMBER.sub("#", line), [float(number) for number in NUMBER.findall(line)]


def folder(path: Path, text: str) -> Path:
    (path / "papers" / "one").mkdir(parents=True)
    (path / "papers" / "one" / "published.toml").write_text(text)
    return path / "papers" / "one"


def test_the_committed_ledger_is_what_is_computed(all_rows):
    """Words are equal, and numbers up to what a fit or another processor may change in the last digit."""
    kept = PAGE.read_text(encoding="utf-8").splitlines()
    made = ledger.page(all_rows).splitlines()
    assert [NUMBER.sub("#", line) for line in kept] == [NUMBER.sub("#", line) for line in made]
    for old, new in zip(kept, made, strict=True):
        assert words_and_numbers(old)[1] == pytest.approx(words_and_numbers(new)[1], rel=0.02, abs=0.15), old


def test_figures_that_need_no_fit_are_written_as_computed(all_rows):
    kept = set(PAGE.read_text(encoding="utf-8").splitlines())
    exact = [row for paper, rows in all_rows if not paper.tables for row in rows if "pairs.py" not in row.by]
    written = [row.cells() for row in exact]
    assert len(written) > 90
    assert [cells[0] for cells in written if "| " + " | ".join(cells) + " |" not in kept] == []


def test_every_table_of_the_simulator_belongs_to_a_paper():
    named = [table for paper in papers(command.ROOT) for table in paper.tables]
    assert sorted(named) == sorted(TABLES)


def test_every_limit_of_a_paper_is_kept(all_rows):
    limits = {row.claim: row.is_kept for _, rows in all_rows for row in rows if row.is_kept is not None}
    assert len(limits) > 15
    assert [claim for claim, is_kept in limits.items() if not is_kept] == []


def test_every_paper_has_a_figure_or_says_why_it_has_none(all_rows):
    assert [paper.folder for paper, rows in all_rows if not rows] == []
    for _, rows in all_rows:
        assert all(row.by and row.where for row in rows)


def test_long_results_are_read_from_the_notes(all_rows):
    (rows,) = [rows for paper, rows in all_rows if paper.folder == "vllm-41162"]
    assert len(rows) == 180
    assert all(row.by.startswith("kept in the [notes]") for row in rows)


def test_another_published_figure_changes_its_error(tmp_path):
    for printed, error in (("1.00", "0.0%"), ("0.50", "+100.0%")):
        place = folder(tmp_path / printed, FIGURE.replace("1.00", printed))
        (row,) = ledger.rows(read(place), tmp_path)
        assert row.cells()[1:4] == (printed, "1.00", error)


@pytest.mark.parametrize(("bound", "printed", "said"), [("at least", "0.9", "kept"), ("at most", "0.9", "broken")])
def test_a_limit_is_kept_or_broken(tmp_path, bound, printed, said):
    place = folder(tmp_path, FIGURE.replace('"1.00"', f'"{printed}"\nbound = "{bound}"'))
    (row,) = ledger.rows(read(place), tmp_path)
    assert row.cells()[1:4] == (f"{bound} {printed}", "1.00", said)


def test_rows_of_a_table_become_figures(tmp_path):
    text = FIGURE.replace("[[figure]]", '[[rows]]\nfile = "t.csv"\nrole = "role"\nonly = { kind = ["a"] }\n')
    text = text.replace('"1.00"', '"printed"').replace("a chain that never ends", "{count} sequences")
    text = text.replace("trees.endless_chain", "trees.endless_sequences") + 'columns = { count = "count" }\n'
    place = folder(tmp_path, text)
    (place / "t.csv").write_text("kind,count,printed,role\na,2,0.30,held out\nb,9,1,fitted\na,1,0.5,chosen on\n")
    first, second = read(place).figures
    assert (first.claim, first.printed, first.role, first.arguments) == (
        "2 sequences",
        "0.30",
        "held out",
        {"count": 2},
    )
    assert (second.role, second.arguments) == ("fitted", {"count": 1})
    assert ledger.rows(read(place), tmp_path)[0].reproduced == f"{trees.endless_sequences(2):.2f}"


def test_a_fraction_is_published_as_printed():
    figure = Published("x", "y", "10/9", "trees.endless_chain", {})
    assert (figure.value, figure.digits) == (pytest.approx(10 / 9), 4)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (('by = "trees.endless_chain"', 'by = "trees.endless_branch"'), "by"),
        (('by = "trees.endless_chain"', 'by = "trees._tokens"'), "by"),
        (('by = "trees.endless_chain"', 'by = "trees.best_static_tree"'), "by"),
        (('by = "trees.endless_chain"', 'by = "os.system"'), "by"),
        (("claim =", "calim ="), "one figure"),
        (("[[figure]]", "[[figures]]"), "one entry"),
        (("where =", 'role = "guessed"\nwhere ='), "role"),
        (("where =", 'bound = "about"\nwhere ='), "bound"),
        (("where =", "values ="), "one figure"),
        (('where = "section 1"\n', ""), "where"),
    ],
)
def test_wrong_data_are_refused_by_their_field(tmp_path, change, name):
    place = folder(tmp_path, FIGURE.replace(*change))
    with pytest.raises(InputError, check=lambda error: error.name == name):
        ledger.rows(read(place), tmp_path)


def test_a_folder_without_published_figures_is_one_sentence(tmp_path, capsys):
    (tmp_path / "papers" / "one").mkdir(parents=True)
    with pytest.raises(SystemExit) as exit_info:
        command.main(tmp_path)
    assert exit_info.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("specsim: file")
    assert said.count("\n") == 1
    assert not (tmp_path / "papers" / "ledger.md").exists()


def errors_of(all_rows, folder, by):
    (rows,) = [rows for paper, rows in all_rows if paper.folder == folder]
    return [round(100 * row.error) for row in rows if row.error is not None and f"`{by}`" in row.by]


def extremes(values):
    return min(values), max(values)


def test_errors_quoted_in_notes_are_those_of_the_ledger(all_rows):
    """Percent, as the notes of magicdec, dflash, sequoia, opt-tree and chen2023 say."""
    found = {by: errors_of(all_rows, "magicdec", by) for by in ("round_speedup", "sparse_draft_ms", "sparse_speedup")}
    steps = errors_of(all_rows, "magicdec", "plain_ms") + errors_of(all_rows, "magicdec", "verify_ms")
    assert extremes(steps) == (-5, 12)
    assert extremes(found["round_speedup"]) == (1, 3)
    assert extremes(found["sparse_draft_ms"]) == (-28, -8)
    assert extremes(found["sparse_speedup"]) == (12, 27)
    assert extremes(errors_of(all_rows, "dflash", "block_speedup")) == (28, 37)
    assert extremes(errors_of(all_rows, "dflash", "plain_tokens_per_s")) == (2, 8)
    assert 8.01 / rounds.block_speedup("qwen3-8b", "B200", 5, 15, 8.01, 1) == pytest.approx(1.2, abs=0.05)
    assert max(map(abs, errors_of(all_rows, "sequoia", "tree_speedup"))) <= 2
    assert errors_of(all_rows, "opt-tree", "matching_speedups") == [-3, 0]
    assert errors_of(all_rows, "chen2023", "ratio") == [-2, 0, 0]


def test_times_quoted_in_notes_are_those_of_the_cost_model():
    server = ("llama-3.1-8b", 8, "H100-SXM", 64000, 64)
    assert rounds.verify_ms(*server, 6) / rounds.plain_ms(*server) == pytest.approx(1.11, abs=0.005)


@pytest.mark.parametrize("folder", MARKED)
def test_notes_hold_the_rows_of_the_ledger(all_rows, folder):
    (rows,) = [rows for paper, rows in all_rows if paper.folder == folder]
    notes = (command.ROOT / "papers" / folder / "notes.md").read_text(encoding="utf-8")
    kept = notes.split("<!-- reproduced -->")[1].split("<!-- /reproduced -->")[0].splitlines()
    made = ledger.with_figures("<!-- reproduced -->\n<!-- /reproduced -->", rows).splitlines()[1:-1]
    assert [words_and_numbers(line) for line in kept if line] == [words_and_numbers(line) for line in made if line]


def test_notes_without_marks_stay_as_they_are():
    assert ledger.with_figures("# Notes\n", []) == "# Notes\n"


def test_errors_are_printed_by_rule_and_series(capsys):
    show(stdout_console())
    lines = capsys.readouterr().out.splitlines()
    words = " ".join(" ".join(lines).split())
    for name in RULES:
        assert sum(line.startswith(f"{name}  ") for line in lines) == 2
    for series in published_series():
        (line,) = [line for line in lines if line.startswith(f"{series.name}  ") and series.source in line]
        found = [abs(miss.error) for miss in misses(series, least_given=2)]
        assert line.split()[-2:] == [f"{max(found):.2%}", str(len(found))]
    assert f"hold {coverage():.1%} of the lengths" in words
    assert f"{margin(3, 1):.1%}" in words


@pytest.mark.parametrize("given", [1, 2, 3])
def test_margins_without_a_series_are_those_of_the_others(given):
    everything = {margin(given, 2, str(series)) for series in published_series()}
    assert len(everything) > 1
    assert min(everything) <= margin(given, 2) <= max(everything)
