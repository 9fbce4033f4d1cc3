"""Sources of the documentation site: links, members of modules, docstrings, commands and schemas."""

import json
import os
from pathlib import Path

import pytest

from specsim.maintain.site.api import api_pages, full_names
from specsim.maintain.site.commands import command_pages
from specsim.maintain.site.docstrings import cell, code_cell, markdown
from specsim.maintain.site.links import Linker
from specsim.maintain.site.members import Class, Function, read_module
from specsim.maintain.site.schemas import schema_pages
from specsim.maintain.site.sources import source_html
from specsim.maintain.site.stage import page_paths, stage, write_changed

ROOT = Path(__file__).parents[2]
MODULE = '''
"""First line.

    formula(x)
"""
from typing import TypeVar
from other.place import Thing

LIMIT = 3  # most of them
_HIDDEN = 4
Alias = dict[str, "Thing"]  # by name
Kind = TypeVar("Kind")


class Shape(Thing):
    """One shape."""

    # above the field
    width: int = 2
    height: "Thing | None"  # of the shape

    @property
    def area(self) -> "Thing": ...

    @classmethod
    def of(cls, *things: Thing, deep: bool = True) -> "Shape":
        """Make one."""

    def _hidden(self): ...


def grow(shape: Shape, by: int = LIMIT) -> Thing:
    """Grow it."""
'''


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    return read_module(path, {"Thing": "other.place.Thing", "Shape": "module.Shape"})


def test_public_members_of_a_module(module):
    assert module.docstring == "First line.\n\n    formula(x)"
    assert [(each.name, each.value, each.comment) for each in module.constants] == [("LIMIT", "3", "most of them")]
    assert [(each.name, each.value) for each in module.aliases] == [("Alias", "dict[str, other.place.Thing]")]
    assert module.type_variables == ("Kind",)
    assert module.imported["Thing"] == "other.place"
    shape, grow = module.members
    assert isinstance(shape, Class)
    assert isinstance(grow, Function)
    assert grow.signature == "(shape: module.Shape, by: int=LIMIT) -> other.place.Thing"


def test_members_of_a_class_with_their_comments(module):
    shape = module.members[0]
    assert shape.bases == ("Thing",)
    assert [(each.name, each.annotation, each.value, each.comment) for each in shape.fields] == [
        ("width", "int", "2", "above the field"),
        ("height", "Thing | None", "", "of the shape"),
    ]
    assert [(each.kind, each.name, each.signature) for each in shape.methods] == [
        ("property", "area", "other.place.Thing"),
        ("classmethod", "of", "(*things: other.place.Thing, deep: bool=True) -> module.Shape"),
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a * b, c_ and |d|", "a \\* b, c\\_ and \\|d\\|"),
        ("`a * b` of [B, K]", "`a * b` of \\[B, K\\]"),
        ("a lone ` tick", "a lone \\` tick"),
        ("Text\n    x * y", "Text\n\n    x * y"),
        ("- first\n  goes * on\n- second", "- first\n  goes \\* on\n- second"),
    ],
)
def test_docstrings_show_as_they_are(text, shown):
    assert markdown(text) == shown


def test_cells_stay_in_their_row():
    assert cell("a |\n b") == "a \\| b"
    assert code_cell("int |\n None") == "`int \\| None`"
    assert code_cell("") == ""


@pytest.mark.parametrize(
    ("link", "becomes"),
    [
        ("[x](../../reference/tree.py#build)", "[x](source:reference/tree.py#build)"),
        ("[x](../../fast/measurements/bench-round.json)", "[x](source:fast/measurements/bench-round.json)"),
        ("[x](../../papers/eagle2/notes.md#the-idea)", "[x](papers/eagle2/notes.md#the-idea)"),
        ("[x](../../README.md)", "[x](README.md)"),
        ("[x](concepts.md)", "[x](concepts.md)"),
        ("[x](#here), [y](https://arxiv.org/abs/2401.15077)", "[x](#here), [y](https://arxiv.org/abs/2401.15077)"),
        ("```` ```python ````, [x](../../LICENSE)\n`a`", "```` ```python ````, [x](source:LICENSE)\n`a`"),
        ("`[x](../../reference/tree.py)`", "`[x](../../reference/tree.py)`"),
        ("```\n[x](../../reference/tree.py)\n```", "```\n[x](../../reference/tree.py)\n```"),
        ("\n    [x](../../reference/tree.py)", "\n    [x](../../reference/tree.py)"),
    ],
)
def test_links_of_a_page(link, becomes):
    linker = Linker(ROOT, page_paths(ROOT))
    assert linker.linked(link, "notebooks/guide/explain.md") == (becomes, [])


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("../../reference/nothing.py", "no such file"),
        ("../../../elsewhere.md", "no such file"),
        ("../../reference/tree.py#nothing", "no such function"),
        ("../../LICENSE#nothing", "no such function"),
        ("nothing.md", "no such file"),
    ],
)
def test_links_that_lead_nowhere_are_found(target, fault):
    linker = Linker(ROOT, page_paths(ROOT))
    _, (found,) = linker.linked(f"[x]({target})", "notebooks/guide/explain.md")
    assert fault in found


def test_links_of_a_notebook_are_in_its_markdown():
    source = ["See [the guide](guide/serving.md).\n", "And [this](guide/nothing.md)."]
    cells = [{"cell_type": "markdown", "source": source}, {"cell_type": "code", "source": ["rows[0](guide)"]}]
    linker = Linker(ROOT, page_paths(ROOT))
    text, faults = linker.linked_notebook(json.dumps({"cells": cells}), "notebooks/01_first_round.ipynb")
    linked = json.loads(text)["cells"]
    assert linked[0]["source"][0] == "See [the guide](../serving.md).\n"
    assert linked[1] == cells[1]
    assert faults == ["guide/nothing.md: no such file"]


def test_source_pages_have_an_anchor_at_every_definition():
    page = source_html(ROOT, "reference/tree.py", "https://example.org/specsim")
    assert page.count('<span id="build"></span>') == 1
    assert 'href="https://example.org/specsim/blob/HEAD/reference/tree.py"' in page
    assert 'href="../../_static/site.css"' in page


def test_a_class_of_another_library_keeps_its_full_name(tmp_path):
    core = tmp_path / "specsim" / "core"
    core.mkdir(parents=True)
    (core / "tree.py").write_text('class Path:\n    """Path of a tree."""\n')
    (core / "files.py").write_text("from pathlib import Path\ndef read(file: Path) -> str: ...\n")
    files = {"specsim.core.tree": core / "tree.py", "specsim.core.files": core / "files.py"}
    modules = {name: read_module(path) for name, path in files.items()}
    names = full_names("specsim.core.files", modules)
    assert names["Path"] == "pathlib.Path"


def test_api_has_a_page_for_every_operation_and_folder():
    pages = api_pages(ROOT)
    assert {"api/index.md", "api/specsim.md", "api/core.md", "api/operations/verify.md"} <= pages.keys()
    verify = pages["api/operations/verify.md"]
    assert verify.index("## Reference") < verify.index("{py:module} specsim.fast.verify")
    assert "{py:class} SpecConfig" in pages["api/core.md"]
    assert "| `topk` | `int` | `4` | K |" in pages["api/core.md"]
    assert "{py:obj}`generate <specsim.serving.generation.generate>`" in pages["api/specsim.md"]
    assert not [name for name in pages if (ROOT / "fast" / Path(name).stem).is_dir() and "/operations/" in name]


def test_a_property_with_the_name_of_a_type_takes_no_links():
    page = api_pages(ROOT)["api/simulator.md"]
    assert "{py:property} bytes\n:type: float\n:no-index:\n" in page


def test_every_option_of_every_command_is_listed():
    pages = command_pages()
    assert "[`diff`](cli/diff.md)" in pages["generated/commands.md"]
    assert {"cli/generate.md", "cli/lint-report.md", "cli/sweep.md"} <= pages.keys()
    row = next(line for line in pages["cli/generate.md"].splitlines() if line.startswith("| `--topk`"))
    assert "integer" in row
    assert "4" in row
    assert "| `--batch-invariant`" in pages["cli/generate.md"]


def test_schemas_are_tables_of_keys():
    pages = schema_pages()
    assert "| `outputs` | array of object | Outputs in the order of the prompts. |" in pages["json/generate.md"]
    assert "| `outputs[].text` | string | Ends before a stop string. |" in pages["json/generate.md"]
    assert "| `versions.triton` | string, optional |" in pages["json/diff.md"]
    assert "| `outcomes[].status` | string |" in pages["json/conformance.md"]
    assert "| `functions.*` | string | One entry. |" in pages["json/conformance.md"]
    assert "json/generate.md" in pages["generated/schemas.md"]


def test_stage_writes_pages_and_drops_old_ones(tmp_path):
    (tmp_path / "old.md").write_text("# Old")
    assert list(stage(ROOT, tmp_path)) == []
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")}
    assert {"index.md", "README.md", "papers/eagle2/notes.md", "cli/diff.md", "api/core.md"} <= written
    assert "old.md" not in written


def test_pages_that_stay_the_same_are_not_written_again(tmp_path):
    page = tmp_path / "folder" / "page.md"
    write_changed(page, "text")
    os.utime(page, ns=(1, 1))
    write_changed(page, "text")
    assert page.stat().st_mtime_ns == 1
    write_changed(page, "other")
    assert page.read_text() == "other"
