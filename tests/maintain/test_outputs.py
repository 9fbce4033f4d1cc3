"""Outputs of commands in the guide are what the commands print."""

import re

import pytest

from specsim.maintain import outputs

# Quick commands whose output is the same on every machine.
SAME_EVERYWHERE = re.compile(r"specsim (certify|lint-report|sweep|conformance --module my_)")
PAGES = sorted(outputs.GUIDE.glob("*.md"))


def checked(page: str) -> str:
    """The page with the outputs that are the same everywhere, and other commands as they are."""
    return "\n".join(mark.group() for mark in outputs.BLOCK.finditer(page) if is_same_everywhere(mark))


def is_same_everywhere(mark: re.Match[str]) -> bool:
    return bool(SAME_EVERYWHERE.match(mark[3] or mark[5]))


@pytest.mark.parametrize(
    "path", [path for path in PAGES if checked(path.read_text("utf-8"))], ids=lambda path: path.stem
)
def test_the_guide_shows_what_commands_print(path, printed):
    """Else: python -m specsim.maintain.outputs."""
    page = path.read_text(encoding="utf-8")
    files = "\n".join(file.group() for file in outputs.FILE.finditer(page))
    shown = f"{files}\n{checked(page)}"
    assert outputs.with_outputs(shown, printed) == shown


def test_every_block_has_an_output():
    blocks = [mark for path in PAGES for mark in outputs.BLOCK.finditer(path.read_text(encoding="utf-8"))]
    assert len(blocks) > 10
    assert all(f"$ {mark[3]}\n" in mark[4] for mark in blocks if mark[3])


PAGE = """<!-- file a.txt -->
```text
content
```
<!-- run specsim first -->
<!-- output 2-3 specsim second --a x -->
old
<!-- /output -->
<!-- output specsim third -->
<!-- /output -->
"""


def test_commands_of_a_page_run_in_its_order_and_in_one_folder():
    ran = []

    def print_of(command, folder):
        ran.append(command)
        assert (folder / "a.txt").read_text() == "content\n"
        assert (folder / "tables" / "vllm_20780.csv").exists()
        return "1\n2\n3\n4"

    written = outputs.with_outputs(PAGE, print_of)
    assert ran == ["specsim first", "specsim second --a x", "specsim third"]
    assert "```console\n$ specsim second --a x\n…\n2\n3\n…\n```" in written
    assert "```console\n$ specsim third\n1\n2\n3\n4\n```" in written
    assert "old" not in written
    assert outputs.with_outputs(written, print_of) == written


def test_a_command_that_is_refused_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="exit status 2"):
        outputs.run("specsim certify --verifier none", tmp_path)
    assert "12" not in outputs.run("specsim --version", tmp_path).splitlines()


def test_a_file_of_an_earlier_command_is_shown():
    page = "<!-- run specsim write -->\n<!-- written b.json -->\n```json\nold\n```\n<!-- /written -->\n"

    def print_of(command, folder):
        (folder / "b.json").write_text('{"command": "' + command + '"}\n')
        return ""

    shown = outputs.with_outputs(page, print_of)
    assert shown == page.replace("old", '{"command": "specsim write"}')
    assert outputs.with_outputs(shown, print_of) == shown
