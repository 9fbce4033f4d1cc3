"""Sources of the documentation site: links, docstrings, pages of the API, commands and schemas."""

import json
import os
import re
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import pytest

from notebooks.guide.pages.api import api_pages, describe, restructured
from notebooks.guide.pages.commands import command_pages
from notebooks.guide.pages.course import Head, course_pages, notebook_head
from notebooks.guide.pages.docstrings import cell, code_cell, markdown
from notebooks.guide.pages.gallery import EXAMPLES, gallery_pages
from notebooks.guide.pages.links import Linker
from notebooks.guide.pages.schemas import schema_pages
from notebooks.guide.pages.sources import source_html
from notebooks.guide.pages.stage import page_paths, stage, write_changed
from specsim import plots
from specsim.course import exercise, names

ROOT = Path(__file__).parents[2]


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


def test_api_has_a_page_for_every_operation_and_folder():
    pages = api_pages(ROOT)
    names = ("index", "core", "core/policies", "operations/index", "operations/verify", "fast/runtime", "reference")
    assert {f"api/{name}.rst" for name in names} <= pages.keys()
    verify = pages["api/operations/verify.rst"]
    assert verify.index("automodule:: specsim.reference.verify") < verify.index("automodule:: specsim.fast.verify")
    assert ".. automodule:: specsim.core.config\n" in pages["api/core.rst"]
    assert "   ~specsim.serving.generation.generate\n" in pages["api/index.rst"]
    assert "specsim.fast.verify" not in pages["api/fast.rst"]
    assert "api/operations/drafters.rst" not in pages


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a * b, c_ and |d|", ["a \\* b, c\\_ and \\|d\\|"]),
        ("`a * b` of [B, K]", ["``a * b`` of [B, K]"]),
        ("Text\n    x * y\nmore", ["Text", "", "::", "", "    x * y", "", "more"]),
        (
            "Text\n- first\n  goes * on\n- second\nmore",
            ["Text", "", "- first", "  goes \\* on", "- second", "", "more"],
        ),
    ],
)
def test_docstrings_become_restructured_text(text, lines):
    assert restructured(text) == [*lines, ""]


@pytest.mark.parametrize(
    ("what", "name", "text"),
    [
        ("attribute", "specsim.core.config.SpecConfig.page_size", "Tokens in a KV page."),
        ("data", "specsim.explorer.document.MOST_BYTES", "Of a document; a page with its program stays below 2 MB."),
        ("data", "specsim.core.json_schema.VERSIONS", ""),
    ],
)
def test_fields_and_constants_show_their_comments(what, name, text):
    import_module("specsim.explorer.document")
    lines = ["Documentation of a type."]
    describe(None, what, name, 16, None, lines)
    assert "\n".join(lines).strip() == text


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
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")}
    assert {"index.md", "README.md", "papers/eagle2/notes.md", "cli/diff.md", "api/core.rst"} <= written
    assert "old.md" not in written


def test_pages_that_stay_the_same_are_not_written_again(tmp_path):
    page = tmp_path / "folder" / "page.md"
    write_changed(page, "text")
    os.utime(page, ns=(1, 1))
    write_changed(page, "text")
    assert page.stat().st_mtime_ns == 1
    write_changed(page, "other")
    assert page.read_text() == "other"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return gallery_pages()


def test_every_function_that_draws_has_an_example():
    assert set(EXAMPLES) == set(plots.__all__) - {"Slot", "slots"}


def test_the_page_links_every_picture_with_an_alternative_text(pages):
    linked = re.findall(r"!\[(.+)\]\((generated/pictures/\w+\.svg)\)", pages["pictures.md"])
    assert {path for _, path in linked} == set(pages) - {"pictures.md"}
    assert all(len(text) > 20 for text, _ in linked)
    for path in set(pages) - {"pictures.md"}:
        ElementTree.fromstring(pages[path])


SOURCE = """# %% [markdown]
# # A title
#
# * **Goal:** You can read
#   two lines.
# * **Before:** Nothing.
# * **Time:** 20 minutes to work through, 3 seconds to run.
#
# Text.

# %%
1
"""


def test_head_is_read_from_the_first_cell():
    time = "20 minutes to work through, 3 seconds to run."
    head = notebook_head(SOURCE)
    assert head == Head("A title", "You can read two lines.", "Nothing.", time)
    assert head.minutes == 20


@pytest.mark.parametrize("line", ["# # A title\n", "# * **Before:** Nothing.\n", "20 minutes"])
def test_head_without_a_part_is_refused(line):
    with pytest.raises(ValueError, match="first cell"):
        notebook_head(SOURCE.replace(line, ""))


def test_pages_list_every_notebook_and_every_mistake():
    pages = course_pages(ROOT)
    for path in (ROOT / "notebooks").glob("[0-9]*.py"):
        assert f"(notebooks/{path.stem}.ipynb)" in pages["generated/course.md"]
    for name in names():
        assert f"**Exercise {name}**" in pages["generated/teaching.md"]
        assert all(each.reason in pages["generated/teaching.md"] for each in exercise(name).mistakes)
    assert "Of 1000 drafts, how many can the best rule keep?" in pages["generated/teaching.md"]
