"""Identifiers of the package: `python tests/project/test_identifiers.py [-v] [FOLDER]` prints functions by folder."""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("reference", "fast", "specsim")
TWINS = {"reference", "fast"}
# Adjectives and participles, which name neither a type nor a role.
VAGUE = frozenset("own each found made given place known kept taken whole left apart moved shown".split())

# By folder, functions that still use one of these as a name. The number of a folder only falls.
MOST = {
    "specsim/cli": 2,
    "specsim/correctness": 2,
    "specsim/simulator": 3,
    "specsim/training": 1,
}
MOST_REPEATED_CLASSES = 3  # class names in several files that are no twins of reference and fast


def sources() -> Iterator[tuple[str, str, ast.Module]]:
    """Yield folder, path and syntax tree of every file."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            if folder == "specsim" and parts[1] in TWINS:
                continue  # links
            room = "/".join(parts[: 2 if folder == "specsim" and len(parts) > 2 else 1])
            yield room, "/".join(parts), ast.parse(path.read_text(encoding="utf-8"))


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method of a file."""
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def vague_names(function: ast.AST) -> set[str]:
    """Find the names in a function, its own and attributes included, that are one of the vague words."""
    names = set()
    for node in ast.walk(function):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
    return {name for name in names if name.strip("_") in VAGUE}


def repeated_classes() -> dict[str, list[str]]:
    """List the files of classes that share their name, twins in reference and fast counted once."""
    files = defaultdict(list)
    for _, path, tree in sources():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                files[node.name].append(path)
    return {name: paths for name, paths in sorted(files.items()) if len(paths) > 1 and not _are_twins(paths)}


def _are_twins(paths: list[str]) -> bool:
    return sorted(path.partition("/")[0] for path in paths) == sorted(TWINS)


def counts() -> tuple[Counter[str], Counter[str]]:
    """Count the functions of every folder, and those with a vague name."""
    total, vague = Counter(), Counter()
    for room, _, tree in sources():
        for function in functions(tree):
            total[room] += 1
            vague[room] += bool(vague_names(function))
    return total, vague


def test_functions_with_vague_names_only_fall():
    _, vague = counts()
    assert {room: count for room, count in vague.items() if count > MOST.get(room, 0)} == {}


def test_classes_of_one_name_only_fall():
    assert len(repeated_classes()) <= MOST_REPEATED_CLASSES


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f(given): pass", {"given"}),
        ("def f():\n    for _each in (): pass", {"_each"}),
        ("def kept(): pass", {"kept"}),
        ("def f(state): return state.known", {"known"}),
        ("def f(kept_tokens): return kept_tokens.places", set()),
    ],
)
def test_vague_names_are_found(text, names):
    assert vague_names(ast.parse(text)) == names


def main() -> None:
    """Print the counts by folder; with -v, every function of the folder and every class of a repeated name."""
    total, vague = counts()
    for room in total:
        print(f"{room:<22}{vague[room]:>5} of {total[room]:>5}")
    print(f"{'all':<22}{vague.total():>5} of {total.total():>5}, {vague.total() / total.total():.1%}")
    print(f"{len(repeated_classes())} class names in several files")
    if "-v" not in sys.argv:
        return
    wanted = sys.argv[-1] if sys.argv[-1] != "-v" else ""
    for _, path, tree in sources():
        for function in functions(tree) if path.startswith(wanted) else ():
            if names := vague_names(function):
                print(f"{path}:{function.lineno} {function.name}: {', '.join(sorted(names))}")
    for name, paths in repeated_classes().items():
        print(name, *paths)


if __name__ == "__main__":
    main()
