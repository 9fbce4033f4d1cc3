"""The mechanical part of the language rules: what a docstring begins with, the field's terms, lengths of test names."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COVERED = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "fast",
    "notebooks",
    "papers",
    "reference",
    "specsim",
    "tests",
)
GLOSSARY = "notebooks/guide/concepts.md"  # it may name the words that are avoided
MOST_WORDS = 20  # of the first sentence of a docstring
MOST_LETTERS = 60  # of a test's name
HEADLESS = frozenset("what who whose whom where how which of that when why".split())

# Phrases in which a word below has its usual sense.
ALLOWED = re.compile(
    r"Little's\s+law|laws?\s+of\s+large\s+numbers|(one|each|some|all|none|both|any|most|last|first)\s+of\s+which"
    r"|\(beside\)|\|beside\||mixed, beside or first|told\s+apart",  # a mode of prefill
    re.I,
)

# Expressions that find words in the sense that is avoided, and what to write instead. Case does not matter, and a space
# stands for any white space. Code is not searched.
WORDS = {
    r"\blaws?\b": "distribution",
    r"\bcoins?\b": "uniform, random draw",
    r"\b(fast|reference|slow|both|either) columns?\b(?! of)": "implementation (a column is a position of KV)",
    r"\bthe excess\b|\bexcess (distribution|mass|of)\b": "residual distribution",
    r"\bretract(s|ed|ing|ions?)?\b": "preempt, preemption",
    r"\bg[ia]ven? way\b|\bgives? way\b": "is preempted",
    r"\bcompany\b": "batched, or: with other requests",
    r"\bfloors?\b(?!:)": "roofline bound, lower bound",
    r"\b(ceilings?)\b(?!:)": "measured peak, upper bound",
    r"\basked\b(?! (for|to)\b)|\bis asked\b|\bare asked\b": "target, required, given",
    r"\btargets? (is|are|was|were) (not )?met\b|, (not )?met\b": "within target, above target",
    r"\b(peers?|rivals?)\b": "baseline",
    r"\bjudg(e|es|ed|ing|ement|ment)s?\b": "check, compare, verify",
    r"\bgates? (on|of|for|that|which|against|is|are)\b|\b(equality|quality|accuracy) gates?\b": "check",
    r"\bwitness(es|ed)?\b": "check, hook, example",
    r"\beyes?\b": "check, detector, reader",
    r"\b(museums?|exhibits?)\b": "fault catalogue, entry",
    r"\bplant(s|ed|ing)?\b": "inject",
    r"\bnarrow (pairs?|models?|vocabular\w+)\b": "small-vocabulary test model",
    r"\bagreeing pairs?\b": "synthetic pair",
    r"\brehears\w*\b": "one-ulp perturbation run",
    r"\bsituations?\b": "coverage, case",
    r"\bexercised\b": "covered",
    r"\bevidence\b": "e-value",
    r"\bwhat is left\b": "residual distribution, remainder",
    r"\bundecidable\b": "within rounding error",
    r"\btold\b": "receives, is given, reported",
    r"\bwhat [^.,;:]{0,40}\bc[ao]mes? to\b|^[^.]{0,60}\| came to \|": "result",
    r"\banew\b": "again",
    r"\bbeside\b": "next to, with, besides",
    r"\bso many\b": "the number",
    r"\bof which\b": "a relative clause with a head: whose, that",
    r"\bheld against\b|\bholds? [^.,;:]{1,30} against\b": "compared with",
    r"\b(request|run|served?|decoded) alone\b|\balone and in\b": "solo",
    r"\bof (the |each |a |its )?(reference|target|drafter|oracle|paper|model|request)'s[.,;:)]": "repeat the noun",
}
FORBIDDEN = {re.compile(form.replace(" ", r"\s+"), re.IGNORECASE | re.MULTILINE): use for form, use in WORDS.items()}

CODE_BLOCK = re.compile(r"^ *```(?s:.*?)^ *```|(?<=\n\n)(?:(?:    |\t).*\n)+", re.MULTILINE)
INLINE_CODE = re.compile(r"``.*?``|`[^`\n·]*(?:\n[^`\n·]+)?`|(?<=\])\([^()\s]*\)|https?://\S+")
BRACED = re.compile(r"\{[^{}]*\}")  # an expression of an f-string
SEVERAL_WORDS = re.compile(r"[A-Za-z]{2,}[,;:]? [A-Za-z]{2,}")

FILE = re.compile(
    r"(?<![\w/.<-])(?:specsim|reference|fast|tests|papers|notebooks)/[\w./-]+\.(?:py|md|json|csv|ipynb)\b"
)
NAME = re.compile(r"(?<![\w./-])specsim(?:\.(?!md\b)[a-z]\w*)+")

# Folders whose lines of code are part of the digest in kept measurements, with their strings and the comments behind
# them: only docstrings and lines of comment are searched.
DIGESTED = ("fast/", "specsim/core/")


def blank(text: str) -> str:
    """A text of the same length and lines, with dots for everything else."""
    return re.sub(r"\S", "·", text)


def blank_match(match: re.Match[str]) -> str:
    return blank(match[0])


def prose_of_markdown(text: str) -> str:
    """A page with code, addresses and targets of links blanked."""
    return INLINE_CODE.sub(blank_match, CODE_BLOCK.sub(blank_match, text))


def prose_of_python(text: str, nodes: list[ast.AST], *, strings: bool, behind_code: bool = True) -> str:
    """A source with everything but docstrings, comments and, where wanted, strings of several words blanked.

    behind_code: whether comments at the end of a line of code are shown too.
    """
    docstrings = {node.lineno for node in _docstrings(nodes)}
    quoted = {line for node in nodes if _quotes_source(node) for line in range(node.lineno, node.end_lineno + 1)}
    lines = text.splitlines(keepends=True)
    shown = [blank(line) for line in lines]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row, start = token.start[0] - 1, token.start[1]
        if token.type == tokenize.COMMENT:
            is_prose = behind_code or not lines[row][:start].strip()
            is_prose = is_prose and not re.match(r"#\s*(noqa|ruff|type:|pyright|%%)", token.string)
            pieces = [" " + token.string[1:]] if is_prose else []
        elif "STRING" in tokenize.tok_name[token.type]:
            is_prose = row + 1 in docstrings or (
                strings and row + 1 not in quoted and SEVERAL_WORDS.search(token.string)
            )
            pieces = BRACED.sub(blank_match, token.string).splitlines(keepends=True) if is_prose else []
        else:
            continue
        for place, piece in enumerate(pieces, row):
            first = start if place == row else 0
            shown[place] = shown[place][:first] + piece + shown[place][first + len(piece) :]
    return INLINE_CODE.sub(blank_match, "".join(shown))


def _quotes_source(node: ast.AST) -> bool:
    """Whether a node quotes other text: an injected fault, a mutant, or a text of earlier results."""
    if isinstance(node, ast.keyword):
        return node.arg == "edits"
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return any(isinstance(target, ast.Name) and target.id in ("EQUIVALENT", "RENAMED") for target in targets)


def _docstrings(nodes: list[ast.AST]) -> Iterator[ast.Constant]:
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield first.value


def docstring_findings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Docstrings and helps that begin with a headless clause, and docstrings that begin with a long sentence."""
    for node in _docstrings(nodes):
        sentence = re.split(r"(?<=\.) |\n", node.value.strip(), maxsplit=1)[0]
        words = [word for word in sentence.split() if re.search(r"\w", word)]
        if words and re.sub(r"\W.*", "", words[0]).lower() in HEADLESS:
            yield node.lineno, f"a docstring begins with {words[0]}: write a verb, or a noun phrase with its head"
        if len(words) > MOST_WORDS:
            yield node.lineno, f"a docstring begins with {len(words)} words: write at most {MOST_WORDS}, in one clause"
    for node in nodes:
        if isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
            word = str(node.value.value).partition(" ")[0]
            if word.lower() in HEADLESS:
                yield node.value.lineno, f"a help begins with {word}: write the thing that it sets"


def name_findings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > MOST_LETTERS:
            yield node.lineno, f"{node.name} has {len(node.name)} letters: write at most {MOST_LETTERS}"


def stale_findings(text: str) -> Iterator[tuple[int, str]]:
    """Names of files, modules and their contents that are not there."""
    for form, is_there in ((FILE, lambda name: (ROOT / name).exists()), (NAME, _is_defined)):
        for match in form.finditer(text):
            if not is_there(match[0]):
                yield text.count("\n", 0, match.start()) + 1, f"{match[0]}: write a name that exists"


@cache
def _is_defined(name: str) -> bool:
    """Whether a dotted name is a module, or a word in the source of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:length])
        sources = [place.with_suffix(".py")] if place.with_suffix(".py").is_file() else [*place.glob("__init__.py*")]
        if sources:
            words = re.findall(r"\w+", "".join(source.read_text() for source in sources))
            return length == len(parts) or parts[length] in words
    return False


def word_findings(prose: str) -> Iterator[tuple[int, str]]:
    prose = ALLOWED.sub(blank_match, re.sub(r"·[· ]*", "· ", prose))
    for form, use in FORBIDDEN.items():
        for match in form.finditer(prose):
            yield prose.count("\n", 0, match.start()) + 1, f"{' '.join(match[0].split())!r}: write {use}"


def findings(path: str, text: str) -> list[str]:
    """Breaches of the rules in a file, in the order of its lines."""
    if path == GLOSSARY:
        return []
    if not path.endswith(".py"):
        if path == "CHANGELOG.md":
            text = unreleased(text)
        found = [*word_findings(prose_of_markdown(text)), *stale_findings(text)]
    else:
        is_digested = path.startswith(DIGESTED)
        strings = not is_digested and not path.startswith("tests/")
        nodes = list(ast.walk(ast.parse(text)))
        prose = prose_of_python(text, nodes, strings=strings, behind_code=not is_digested)
        found = [*docstring_findings(nodes), *word_findings(prose)]
        found += name_findings(nodes) if path.startswith("tests/") else stale_findings(text)
    return [f"{path}:{line}: {fault}" for line, fault in sorted(found)]


def unreleased(text: str) -> str:
    """Sentences of the Unreleased section of a changelog; tables of renames name what was."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    kept = [part if part.startswith("## [Unreleased]") else blank(part) for part in parts]
    return re.sub(r"^\|.*$", blank_match, "".join(kept), flags=re.MULTILINE)


def files(root: Path, covered: tuple[str, ...]) -> list[Path]:
    places = [root / name for name in covered]
    pages = [path for place in places if place.is_dir() for form in ("*.py", "*.md") for path in place.rglob(form)]
    return sorted({*pages, *(place for place in places if place.is_file())} - {Path(__file__)})


@pytest.mark.parametrize("covered", COVERED)
def test_language(covered):
    paths = files(ROOT, (covered,))
    found = [each for path in paths for each in findings(str(path.relative_to(ROOT)), path.read_text())]
    assert paths
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "text", "line", "fault"),
    [
        ("reference/x.py", '"""What a round returns."""\n', 1, "a docstring begins with What"),
        ("reference/x.py", 'def f():\n    """Of a request, its seed."""\n', 2, "a docstring begins with Of"),
        ("specsim/x.py", 'class C:\n    """Values.\n\n    The target law.\n    """\n', 4, "'law'"),
        ("reference/x.py", f'"""A sentence{" of words" * 10}."""\n', 1, "a docstring begins with 22 words"),
        ("reference/x.py", "class C:\n    rows: int\n    law: int  # the law\n", 3, "'law': write distribution"),
        ("fast/x.py", "x = 1\n# the fast\n# column\n", 2, "'fast column'"),
        ("specsim/x.py", "def f():\n    raise ValueError(f'{law} is no law of tokens')\n", 2, "'law'"),
        ("specsim/x.py", 'x = (\n    "two words"\n    " beside them"\n)\n', 3, "'beside'"),
        ("specsim/x.py", 'option(help="Where results are kept.")\n', 1, "a help begins with Where"),
        ("specsim/x.py", 'text = """first line,\nthen the floor"""\n', 2, "'floor'"),
        ("tests/x.py", f"def test_{'a' * 56}():\n    pass\n", 1, "61 letters"),
        ("papers/x/notes.md", "The target's\nlaw.\n", 2, "'law'"),
        ("README.md", "| operation | floor, us |\n", 1, "'floor'"),
        ("README.md", "It does as\nit is\nasked.\n", 2, "'is asked'"),
        ("CHANGELOG.md", "# Changelog\n\n## [Unreleased]\n\n- The fast column.\n", 5, "'fast column'"),
        ("README.md", "Read `specsim.serving.serve`,\n`specsim.gone` too.\n", 2, "specsim.gone: write a name"),
        ("README.md", "`specsim.serving.serve.gone`\n", 1, "specsim.serving.serve.gone"),
        ("specsim/x.py", "# as in reference/gone.py\n", 1, "reference/gone.py"),
        ("CONTRIBUTING.md", "- One:\n  - point\n    of a law\n", 3, "'law'"),
    ],
)
def test_checker_finds(path, text, line, fault):
    (found,) = findings(path, text)
    assert found.startswith(f"{path}:{line}: ")
    assert fault in found


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("reference/x.py", '"""Distribution of the next token, by Little\'s law."""\n'),
        ("reference/x.py", '"""A list, one\nof which is whole. Read `law`: see `x.floor`."""\n'),
        ("reference/x.py", f'"""First sentence. Second{" of words" * 20}."""\n'),
        ("fast/x.py", "def f(law, floor):\n    raise ValueError('no law of tokens')\n"),
        ("specsim/core/x.py", "x = 1  # the law of tokens\n"),
        ("specsim/x.py", "law = floor['law'] + columns.floor  # noqa: E501 law\n"),
        ("specsim/x.py", "raise ValueError(f'{law} is no distribution')\n"),
        ("specsim/x.py", 'x = Fault(edits={"specsim.load": "# {+no+} law of tokens"})\n'),
        ("tests/x.py", "text = 'a string of a law'\n"),
        ("papers/x/notes.md", "See [the draw](../../fast/law.py#law).\n\n    law = floor(1)\n\n```\nthe law\n```\n"),
        ("CHANGELOG.md", "## [Unreleased]\n\n| `law` of a law | distribution |\n\n## [0.1.0]\n\n- The law.\n"),
        (
            "README.md",
            "`specsim.load`, `specsim.serving.serve.serve`, `reference/verify.py`, `reference/<operation>.py`\n",
        ),
        (GLOSSARY, "Never write law.\n"),
    ],
)
def test_checker_allows(path, text):
    assert findings(path, text) == []
