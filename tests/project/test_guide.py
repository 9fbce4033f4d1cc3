"""Code of README and of the guide: Python blocks run, commands parse, and blocks that do not run say why."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from specsim.cli.main import FUNCTIONS, app, command

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "notebooks" / "guide").glob("*.md"))]
NOT_RUN = re.compile(r'no-run reason="(needs [^"]+)"')
MOST_NOT_RUN = 6  # blocks of all pages together
SHELL = ("bash", "shell", "sh", "console")
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
# Programs that are not ours; their arguments are not checked.
OTHERS = {"cd", "curl", "git", "jupyter", "pip", "pytest", "source"}


@dataclass(frozen=True)
class Block:
    language: str
    info: str  # rest of the info string
    text: str
    line: int  # of its first line in the page


def blocks(text: str) -> Iterator[Block]:
    """Code of a page: fenced blocks, and indented ones, which have no language."""
    for token in MarkdownIt().parse(text):
        if token.type in ("fence", "code_block"):
            language, _, info = token.info.strip().partition(" ")
            yield Block(language, info.strip(), token.content, token.map[0] + (token.type == "fence"))


def commands(text: str) -> list[str]:
    """Command lines of a page, lines that end in a backslash joined with the next."""
    lines = []
    for block in blocks(text):
        joined = block.text.replace("\\\n", " ").splitlines()
        if block.language == "console":
            lines += [line[2:] for line in joined if line.startswith("$ ")]
        elif block.language in SHELL:
            lines += joined
        elif not block.language:
            lines += [line for line in joined if line.startswith(("specsim ", "make "))]
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def inline_commands(text: str) -> list[str]:
    """Commands within sentences and tables."""
    inline = [token for token in MarkdownIt().enable("table").parse(text) if token.type == "inline"]
    code = [child.content for token in inline for child in token.children if child.type == "code_inline"]
    return [text for text in code if text.startswith("specsim ")]


def programs(line: str) -> list[list[str]]:
    """Words of each program of a command line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words, found = [], [[]]
    for word in lexer:
        if set(word) <= set("|&;"):
            found.append([])
        else:
            found[-1].append(word)
    for words in found:
        while words and re.match(r"[A-Z_]+=", words[0]):
            del words[0]
    return [words[: words.index(">")] if ">" in words else words for words in found if words]


def fault(words: list[str]) -> str | None:
    """The reason for which a program would not start, None if it would."""
    program, *arguments = words
    if program == "specsim":
        return unparsed(arguments)
    if program == "make":
        unknown = [each for each in arguments if "=" not in each and each not in MAKE_TARGETS]
        return f"no target {unknown}" if unknown else None
    if program == "python":
        if (ROOT / arguments[0]).is_file():
            return None
        module = arguments[1] if arguments[:1] == ["-m"] else None
        return None if module and find_spec(module) else f"no module {module}"
    return None if program in OTHERS or (ROOT / program).is_file() else f"no program {program}"


def unparsed(arguments: list[str]) -> str | None:
    """The complaint of the command line about its arguments; nothing is run."""
    try:
        context = app.make_context("specsim", list(arguments))
        if words := [*context._protected_args, *context.args]:
            name, program, rest = app.resolve_command(context, words)
            program.make_context(name, rest, parent=context)
    except Exception as error:
        name = type(error).__name__  # --help and --version end by an exception
        is_reader_file = getattr(error, "name", "") == "config"
        return None if name == "Exit" or is_reader_file else f"{name}: {getattr(error, 'message', error)}"
    return None


def unknown_parts(line: str) -> list[str]:
    """Options of a command within a sentence that it does not have; its values may be left open."""
    _, name, *words = line.split()
    if name.startswith("-") or name.isupper():  # specsim --help, specsim COMMAND
        return []
    if name not in FUNCTIONS:
        return [name]
    known = {option for param in command(name).params for option in (*param.opts, *param.secondary_opts)}
    used = {word.partition("=")[0] for word in words if word.startswith("--")}
    return sorted(used - known - {"--help"})


def run_blocks(page: Path, text: str) -> None:
    """Run the Python blocks of a page one after another, in one namespace."""
    namespace = {"__name__": page.stem}
    for block in blocks(text):
        if block.language == "python" and not block.info:
            code = "\n" * block.line + block.text  # so that an error names the line of the page
            exec(compile(code, page, "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    try:
        run_blocks(page, page.read_text())
    finally:
        plt.close("all")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_parse(page):
    found = {line: [why for words in programs(line) if (why := fault(words))] for line in commands(page.read_text())}
    assert {line: faults for line, faults in found.items() if faults} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_in_sentences_exist(page):
    found = {line: unknown_parts(line) for line in inline_commands(page.read_text())}
    assert {line: parts for line, parts in found.items() if parts} == {}


def test_blocks_that_do_not_run_say_what_they_need():
    found = [(page.name, block) for page in PAGES for block in blocks(page.read_text())]
    marked = [(page, block) for page, block in found if block.info and not block.language.startswith("{")]
    assert [(page, block.info) for page, block in marked if not NOT_RUN.fullmatch(block.info)] == []
    assert [block.language for _, block in marked] == ["python"] * len(marked)
    assert len(marked) <= MOST_NOT_RUN
    for _, block in marked:
        ast.parse(block.text)


def test_a_failing_block_is_found(tmp_path):
    page = tmp_path / "page.md"
    with pytest.raises(ZeroDivisionError) as caught:
        run_blocks(page, "# Title\n\n```python\na = 1\n```\n\ntext\n\n```python\n\na / 0\n```\n")
    assert caught.traceback[-1].lineno + 1 == 11
    run_blocks(page, '```python no-run reason="needs a GPU"\n1 / 0\n```\n\n```text\n1 / 0\n```\n')


def test_commands_of_a_page():
    text = "```bash\nmake demo\n# text\nspecsim diff \\\n  --grid quick\n```\n"
    text += "```console\n$ specsim plan\nits output\n```\n"
    text += "\n    specsim run  # text\n    other\n\nText with `specsim plan --hardware H200`.\n"
    assert [line.split() for line in commands(text)] == [
        ["make", "demo"],
        ["specsim", "diff", "--grid", "quick"],
        ["specsim", "plan"],
        ["specsim", "run", "#", "text"],
    ]
    assert inline_commands(text) == ["specsim plan --hardware H200"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("specsim diff --grid quick  # text", None),
        ("specsim --version", None),
        ("specsim plan --help | head -3", "no program head"),
        ("A=1 specsim soak --requests 10 > file.txt", None),
        ("specsim soak --requests ten", "an integer"),
        ("specsim soak --request 10", "No such option"),
        ("specsim soaks", "No such command"),
        ("make docs PYTHON=python3", None),
        ("make nothing", "no target"),
        ("python -m specsim.maintain.tables FILE", None),
        ("python -m specsim.maintain.nothing", "no module"),
        ("nothing", "no program"),
    ],
)
def test_commands_are_checked(line, found):
    faults = [why for words in programs(line) if (why := fault(words))]
    assert faults == [] if found is None else found in faults[0]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("specsim bench --suite kernels|round", []),
        ("specsim COMMAND --help", []),
        ("specsim --help", []),
        ("specsim bench --suites round", ["--suites"]),
        ("specsim nothing", ["nothing"]),
    ],
)
def test_commands_in_sentences_are_checked(line, parts):
    assert unknown_parts(line) == parts


def test_pages_are_found():
    assert {"README", "index", "getting-started"} <= {page.stem for page in PAGES}
