"""Checks of values, the file that a value comes from, and text on a terminal: escaped, of limited length."""

import re
import sys
from dataclasses import dataclass
from io import StringIO
from typing import Literal

import pytest
from rich.text import Text

from specsim.core.display import heading, paragraph, print_table, stdout_console
from specsim.core.errors import MOST_MESSAGE, MOST_VALUE, InputError, printable, require_choices, shortened, tell


@dataclass(frozen=True)
class Choices:
    mode: Literal["a", "b"] = "a"
    other: Literal["c"] | None = None
    text: str = "any"


def test_every_field_of_a_few_texts_is_checked():
    for right in (Choices(), Choices("b", "c", "")):
        require_choices(right)
    for name, wrong in (("mode", Choices("c")), ("mode", Choices(None)), ("other", Choices(other="a"))):
        with pytest.raises(InputError, check=lambda error, name=name: error.name == name):
            require_choices(wrong)


def test_an_error_names_its_file_once():
    error = InputError("topk", 0, "an integer of at least 1").within("a.json")
    assert (error.name, error.value) == ("topk", 0)
    assert str(error.within("a.json")).count("a.json") == 1


RAW = "a\x1b]0;title\x07\x1b[31m\r\x9bb\u202e"
ESCAPED = r"a\x1b]0;title\x07\x1b[31m\r\x9bb\u202e"


def test_control_characters_are_escaped():
    assert printable(RAW) == ESCAPED
    assert printable("é 漢 👩\u200d💻\ttab\nline") == "é 漢 👩\u200d💻\ttab\nline"


def test_a_message_is_one_line(capsys):
    tell(InputError(f"{RAW}\nkey", f"{RAW}\n", "1 to 2\tor 3"))
    assert capsys.readouterr().err == f"specsim: {ESCAPED}\\nkey is '{ESCAPED}\\n'; allowed: 1 to 2\\tor 3\n"


@pytest.mark.parametrize("letters", ["A" * 100_000, "9" * 5000, "a b " * 5000])
def test_a_long_value_loses_its_middle(letters, capsys):
    tell(InputError("score", letters, "prob or logprob, up to 1.25"))
    err = capsys.readouterr().err
    assert err.startswith("specsim: score is '")
    assert err.endswith("; allowed: prob or logprob, up to 1.25\n")
    assert f"{letters[:10].rstrip()}" in err
    assert len(err) < MOST_VALUE + 200


def test_a_long_message_loses_words_in_its_middle(capsys):
    tell(f"first 0.125 {'word 1234.5 ' * 10_000}last 0.875")
    err = capsys.readouterr().err
    assert len(err) < MOST_MESSAGE + 100
    words = r"((word|1234\.5) )+"
    assert re.fullmatch(
        rf"specsim: first 0\.125 {words}\.\.\. \([\d,]+ more characters\) \.\.\. {words}last 0\.875\n", err
    )


def test_a_long_name_loses_its_middle(capsys):
    tell(InputError("x" * 100_000, 1, "2"))
    err = capsys.readouterr().err
    assert len(err) < MOST_MESSAGE + 100
    assert err.endswith(" is 1; allowed: 2\n")


def test_a_text_of_the_greatest_length_stays():
    assert shortened("x" * 10, 10) == "x" * 10
    assert shortened("x" * 11, 10) == "xxxxx... (1 more characters) ...xxxxx"
    assert shortened("12 345 678 9", 8) == "12 ... (7 more characters) ... 9"


def test_tables_and_headings_escape_their_texts(capsys):
    console = stdout_console()
    name, escaped = "a\x1b[31mb", r"a\x1b[31mb"
    heading(console, name)
    paragraph(console, name)
    print_table(console, ("name", "styled"), [(name, Text(name))])
    console.print(name)
    console.out(f"{name}\nline", highlight=False)
    lines = ["", escaped, escaped, "name        styled", f"{escaped}  {escaped}", escaped, escaped, "line", ""]
    assert capsys.readouterr().out.split("\n") == lines


def test_a_terminal_has_colours_but_not_those_of_a_name(monkeypatch):
    monkeypatch.setattr("sys.stdout", StringIO())
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)  # of another test, as in a notebook
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    console = stdout_console()
    print_table(console, ("name",), [(Text("a\x1b[31mb", style="green"),)])
    shown = console.file.getvalue()
    assert "\x1b[32m" in shown
    assert "\x1b[31m" not in shown
