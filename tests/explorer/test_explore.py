"""specsim.explore: a widget in Jupyter, a picture where there is none, and files that are written whole."""

import pytest

import specsim
from specsim import InputError
from specsim.explorer.explore import PROGRAM, STYLE

from .kinds import recorded

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def exploration():
    return specsim.explore(recorded("eagle3")[:2])


def test_a_notebook_shows_the_widget_and_otherwise_a_picture(exploration):
    pytest.importorskip("anywidget")
    pytest.importorskip("matplotlib")
    shown, described = exploration._repr_mimebundle_()
    assert {WIDGET, "image/png", "text/plain"} <= shown.keys()
    assert "oken tree" in str(described["image/png"])


def test_a_notebook_without_anywidget_shows_the_picture(exploration, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(__import__("sys").modules, "anywidget", None)
    shown, _ = exploration._repr_mimebundle_()
    assert shown.keys() == {"image/png", "text/plain"}
    assert shown["text/plain"].startswith("Exploration(2 rounds")


def test_the_widget_runs_the_program_of_the_page(exploration):
    pytest.importorskip("anywidget")
    from specsim.explorer.explore import make_widget

    widget = make_widget(exploration.document)
    assert widget.exploration == exploration.document
    assert str(widget._esm) == PROGRAM.read_text()
    assert str(widget._css) == STYLE.read_text()


def test_only_recorded_rounds_can_be_explored():
    for result in (recorded("eagle3").generation, recorded("eagle3")[:0], None):
        with pytest.raises(InputError, check=lambda error: error.name == "result"):
            specsim.explore(result)


def test_a_page_is_written_whole_or_not_at_all(exploration, tmp_path):
    path = tmp_path / "page.html"
    exploration.write_html(path)
    assert path.read_text() == exploration.html()
    with pytest.raises(InputError, check=lambda error: error.name == "path"):
        exploration.write_html(tmp_path / "missing" / "page.html")
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


def test_the_program_never_parses_text_as_markup():
    program = PROGRAM.read_text()
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert name not in program


def test_a_trace_takes_a_drafter_and_a_verifier():
    assert {each.verify(7).shape[0] for each in recorded("ngram").of(7)} != {7}
    rounds = recorded("rule")
    assert rounds.generation.rule.name == "root only"
    assert all(each.accepted_tokens() == [1] for each in rounds)
