"""Links in papers/ lead to existing code, tests and sources."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAPERS = ROOT / "papers"
LEAST_CODE_LINKS = 8
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]*)\)")
EXTERNAL = (
    re.compile(r"https://arxiv\.org/abs/\d{4}\.\d{5}"),
    re.compile(r"https://github\.com/[\w-]+/[\w.-]+(/(pull|issues)/\d+)?"),
)


@cache
def symbols(path: Path) -> frozenset[str]:
    """Functions, classes and constants of a Python file, and with dots the methods and fields of its classes."""

    def names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from names(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))

    return frozenset(names(ast.parse(path.read_text()).body))


def links(text: str) -> list[tuple[str, str]]:
    """(text, target) of every link outside code blocks."""
    outside = re.sub(r"^(```.*?^```|    .*?$)", "", text, flags=re.MULTILINE | re.DOTALL)
    return [(match["text"], match["target"]) for match in LINK.finditer(outside)]


def broken(page: Path, text: str) -> list[str]:
    """List the broken links of a page."""
    return [f"{target}: {fault}" for shown, target in links(text) if (fault := _fault(page, shown, target))]


def _fault(page: Path, shown: str, target: str) -> str | None:
    if "://" in target:
        return None if any(form.fullmatch(target) for form in EXTERNAL) else "neither an arXiv abstract nor GitHub"
    place, _, symbol = target.partition("#")
    path = (page.parent / place).resolve()
    if not place or not path.is_file():
        return "no such file"
    if not path.is_relative_to(ROOT):
        return "outside the project"
    if symbol and path.suffix != ".py":
        return "a symbol of what is no Python file"
    if symbol and symbol not in symbols(path):
        return "no such function, class or method"
    named = re.fullmatch(r"`([\w.]+)`", shown)
    return f"shown as {named[1]}" if symbol and named and named[1] != symbol else None


def code_links(text: str) -> list[str]:
    return [target for _, target in links(text) if re.search(r"\.py#\w", target)]


def folders() -> set[str]:
    """Folders of sources; decisions and the code of reproductions have none."""
    return {path.name for path in PAPERS.iterdir() if path.is_dir()} - {"decisions", "reproduction"}


def pages() -> list[Path]:
    return sorted(PAPERS.rglob("*.md"))


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(PAPERS)))
def test_links_lead_somewhere(page):
    assert broken(page, page.read_text()) == []


@pytest.mark.parametrize("folder", sorted(folders()))
def test_notes_link_their_claims_to_code_and_tests(folder):
    text = (PAPERS / folder / "notes.md").read_text()
    targets = code_links(text)
    assert len(targets) >= LEAST_CODE_LINKS
    assert any("/tests/" in target for target in targets)
    assert any("/tests/" not in target for target in targets)


@pytest.mark.parametrize("folder", sorted(folders()))
def test_notes_name_their_source_as_the_index_does(folder):
    (row,) = [line for line in (PAPERS / "index.md").read_text().splitlines() if f"({folder}/notes.md)" in line]
    page = PAPERS / folder / "notes.md"
    (source,) = [place(PAPERS, target) for _, target in links(row) if target != f"{folder}/notes.md"]
    assert source in [place(page.parent, target) for _, target in links(page.read_text())]
    number = folder.rpartition("-")[2]
    assert not number.isdecimal() or source.endswith(f"/{number}")


def place(folder: Path, target: str) -> str:
    """An address, or the file of the project that a link leads to."""
    return target if "://" in target else str((folder / target).resolve())


def test_index_lists_every_folder_and_no_other():
    targets = [target for _, target in links((PAPERS / "index.md").read_text())]
    listed = [target.removesuffix("/notes.md") for target in targets if target.endswith("/notes.md")]
    assert sorted(listed) == sorted(folders())
    assert len(folders()) >= 8


def test_places_that_the_index_names_are_there():
    places = re.findall(r"`([\w./]+)`", (PAPERS / "index.md").read_text())
    assert len(places) > len(folders())
    assert [place for place in places if not (ROOT / place).exists()] == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[x](../../reference/nowhere.py)", "no such file"),
        ("[x](../../reference)", "no such file"),
        ("[x]()", "no such file"),
        ("[x](#here)", "no such file"),
        ("[x](../../../elsewhere.py)", "no such file"),
        ("[x](/etc/passwd)", "outside the project"),
        ("[x](../../reference/drafting.py#child_score)", "no such function"),
        ("[x](../../reference/drafting.py#topk)", "no such function"),
        ("[x](../../reference/engine.py#round)", "no such function"),
        ("[x](../../reference/engine.py#Engine.rounds)", "no such function"),
        ("[x](../../README.md#topk)", "no Python file"),
        ("[`select`](../../reference/drafting.py#child_scores)", "shown as select"),
        ("[x](https://arxiv.org/abs/24011.5077)", "neither"),
        ("[x](https://arxiv.org/abs/2401.150777)", "neither"),
        ("[x](http://arxiv.org/abs/2401.15077)", "neither"),
        ("[x](https://github.com/sgl-project/sglang/pull/)", "neither"),
        ("[x](https://github.com/sgl-project)", "neither"),
        ("[x](https://example.org)", "neither"),
    ],
)
def test_checker_finds(text, fault):
    (found,) = broken(PAPERS / "eagle2" / "notes.md", f"A sentence, {text}, and its end.\n")
    assert fault in found


@pytest.mark.parametrize(
    "text",
    [
        "[`child_scores`](../../reference/drafting.py#child_scores)",
        "[the round](../../reference/engine.py#Engine.round)",
        "[`Verdict.predict`](../../specsim/core/phases.py#Verdict.predict)",
        "[test](../../tests/operations/test_tree.py#test_hand_made_tree)",
        "[phases](../../specsim/core/phases.py)",
        "[index](../index.md)",
        "[paper](https://arxiv.org/abs/2406.16858)",
        "[change](https://github.com/sgl-project/sglang/pull/26866)",
        "[repository](https://github.com/SafeAILab/EAGLE)",
        "no link",
        "    children[k, j](scores) is code",
        "```\n[x](nowhere)\n```",
    ],
)
def test_checker_allows(text):
    assert broken(PAPERS / "eagle2" / "notes.md", f"{text}\n") == []


def test_links_are_found_in_tables_and_sentences():
    text = "| [a](x.py#f) | [`b`](y.md), [c](https://z) |\n![picture](p.png)\n\n    [d](code)\n"
    assert links(text) == [("a", "x.py#f"), ("`b`", "y.md"), ("c", "https://z")]
    assert code_links(text) == ["x.py#f"]


def test_symbols_of_a_file(tmp_path):
    path = tmp_path / "made_up.py"
    path.write_text("A = 1\nb: int = 2\nasync def f(): x = 1\nclass C:\n    y: int\n    def m(self): ...\n")
    assert symbols(path) == {"A", "b", "f", "C", "C.y", "C.m"}
