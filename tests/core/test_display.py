"""Tables are plain text in a pipe and coloured on a terminal.

A notebook gets escaped HTML.
"""

import sys
from html.parser import HTMLParser
from io import StringIO

import pytest
from rich.console import Console
from rich.text import Text

from specsim import Generation, Output, SpecConfig
from specsim.core.display import (
    by_position,
    figure,
    generation_html,
    metrics_rows,
    near,
    print_table,
    setting,
    stdout_console,
)

ROWS = [("[bold]", "1.50"), (":smile:", "-"), ("x", "1,234")]
OUTPUT = Output("if a < b & c:\n    <b>", (1, 2, 3), (-0.5, -0.25, -0.125), "length", (2, 1))


def test_piped_table_is_plain_and_aligned(capsys):
    print_table(stdout_console(), ("name", "value"), ROWS)
    expected = ["name     value", "[bold]    1.50", ":smile:      -", "x        1,234"]
    assert capsys.readouterr().out.splitlines() == expected


def test_a_table_without_rows_is_its_headings(capsys):
    print_table(stdout_console(), ("name", "value"), [])
    assert capsys.readouterr().out == "name  value\n"


def test_piped_styles_are_left_out(capsys):
    print_table(stdout_console(), (), [(Text("a", style="bold red"), "b")])
    assert capsys.readouterr().out == "a  b\n"


def test_terminal_table_has_rules_and_colours():
    terminal = Console(file=StringIO(), force_terminal=True, color_system="standard", width=60, markup=False)
    print_table(terminal, ("name",), [(Text("a", style="green"),)])
    shown = terminal.file.getvalue()
    assert "─" in shown
    assert "\x1b[32m" in shown


@pytest.mark.parametrize(
    ("value", "shown"), [(1.005, "1.00"), (float("nan"), "-"), (None, "-"), (1234.5, "1,234.50"), (0, "0.00")]
)
def test_figure(value, shown):
    assert figure(value) == shown


@pytest.mark.parametrize(
    ("value", "limit", "shown"),
    [
        (1.2543, 1.25, "1.254"),
        (1.2, 1.25, "1.20"),
        (1.25, 1.25, "1.25"),
        (1.250001, 1.25, "1.2500"),
        (1500, 2, "1,500.00"),
    ],
)
def test_a_number_near_its_limit_has_more_decimals(value, limit, shown):
    assert near(value, limit) == shown


def test_by_position():
    assert by_position((0.5, 0.25)) == "0.50 0.25"
    assert by_position(()) == "-"


def test_metrics_rows():
    rows = dict(metrics_rows(Generation((OUTPUT, OUTPUT), SpecConfig(), seconds=4.0)))
    assert rows["setting"] == "topk 4, 3 steps, 8 draft tokens"
    assert rows["accept length"] == "1.50 tokens a round, bonus included"
    assert rows["accept rate"] == "0.17 of the proposed depth"
    assert rows["node rate"] == "0.07 of the drafts proposed"
    assert rows["accepted by position"] == "0.50 0.00 0.00 of the rounds"
    assert (rows["tokens"], rows["rounds"], rows["tokens a second"]) == ("6", "4", "1.5")
    assert rows["finish reason"] == "length"


def test_a_setting_names_what_is_not_lossless():
    assert setting(SpecConfig(penalties="relaxed")).endswith(", penalties relaxed")
    assert setting(SpecConfig(threshold_acc=0.5)).endswith(", not lossless")


def test_metrics_rows_of_plain_decoding():
    plain = Output("", (1, 2), (0.0, 0.0), "stop", (1,))
    rows = dict(metrics_rows(Generation((plain,), SpecConfig.plain(), seconds=1.0)))
    assert rows["setting"] == "plain decoding"
    assert not {"accept rate", "node rate", "accepted by position"} & set(rows)


class Cells(HTMLParser):
    """The text of every cell, with an error for a tag that is not a table's."""

    def __init__(self, html: str):
        super().__init__()
        self.cells: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        assert tag in ("table", "tr", "th", "td")
        if tag in ("th", "td"):
            self.cells.append("")

    def handle_data(self, data):
        self.cells[-1] += data


def test_generation_html_shows_texts_and_figures():
    generation = Generation((OUTPUT, OUTPUT), SpecConfig(), seconds=2.0)
    cells = Cells(generation._repr_html_()).cells
    assert cells[:4] == ["0", OUTPUT.text, "1", OUTPUT.text]
    assert cells[4:] == [cell for row in metrics_rows(generation) for cell in row]


def test_generation_html_shows_ids_without_a_tokenizer():
    nameless = Output("", (4, 5), (0.0, 0.0), "stop", (2,))
    assert Cells(generation_html(Generation((nameless,), SpecConfig(), 1.0))).cells[1] == "4 5"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (SpecConfig(verifier="typical"), "topk 4, 3 steps, 8 draft tokens, verifier typical, not lossless"),
        (SpecConfig(1, 3, 4, verifier="block"), "topk 1, 3 steps, 4 draft tokens, verifier block"),
        (SpecConfig(threshold_acc=0.5), "topk 4, 3 steps, 8 draft tokens, not lossless"),
        (SpecConfig.plain(), "plain decoding"),
    ],
)
def test_a_setting_names_its_verifier_if_it_is_not_lossless(config, words):
    assert setting(config) == words


@pytest.mark.parametrize(("modules", "is_terminal"), [({}, True), ({"ipykernel": None}, False)])
def test_notebooks_get_plain_text_whatever_the_kernel_sets(modules, is_terminal, monkeypatch):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = stdout_console()
    assert (console.is_terminal, console.is_jupyter) == (is_terminal, False)
