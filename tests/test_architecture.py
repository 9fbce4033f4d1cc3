"""Facts about the tree: who imports whom, what the wheel holds, what is called what.

The checker of imports is a function of a module's name and its source, so that it is itself tested on made-up modules.
"""

import ast
import graphlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
COLUMNS = [name for name in ("reference", "fast") if (ROOT / name).exists()]
PACKAGE_FOLDERS = {"specsim": ROOT / "specsim"} | {f"specsim.{name}": ROOT / name for name in COLUMNS}
TOP_FOLDERS = {"specsim", "reference", "fast", "notebooks", "tests", "papers"}
VAGUE_NAMES = {"utils", "common", "helpers", "base", "manager", "factory", "registry"}
# In two parts each, since this file is read as well.
FORBIDDEN_TEXT = re.compile(r"\bTO" + r"DO\b|\.\./sha" + "red")

# A module of a column imports only its own column's modules to the left of its own row.
ROWS = (
    "sampling",
    "drafting",
    "tree",
    "attention",
    "kv",
    "synthetic",
    "acceptance",
    "verify",
    "extend",
    "layers",
    "targets",
    "drafters",
    "engine",
)
ORACLE = ("oracle_forward", "oracle_laws", "oracle_verify", "oracle")  # stands alone: no twin, and no row knows it
VOCABULARY = ("penalties", "summaries", "filters", "sampling", "draw", "topk")  # passes over the logits
FAST_ROWS = (
    "interpreter",
    "launch",
    "uniforms",
    "rows",
    "linear",
    *VOCABULARY,
    "draft_law",
    "excess",
    *ROWS[1:3],
    "metadata",
    *ROWS[3:8],
    "rotary",
    *ROWS[8:-1],
    "graph",
    "frame",
    "engine",
)

SETTINGS = {"numpy", "specsim.config", "specsim.metrics"}
STATES = {
    "torch",
    "specsim.phases",
    "specsim.pool",
    "specsim.columns",
    "specsim.uniforms",
    "specsim.drafter",
    "specsim.target",
    "specsim.synthetic",
    "specsim.grammar",
} | SETTINGS
ROUNDS = (
    {f"specsim.{name}" for name in ("generation", "requests", "scheduler", "differential", "trace", "certify")}
    | {f"specsim.{name}" for name in ("prefix", "residents", "runner")}
    | {"tqdm"}
    | STATES
)
BOTH_COLUMNS = {"specsim.reference", "specsim.fast"}
TRAINING = {"torch", "numpy", "transformers", "tokenizers", "safetensors", "tqdm", "typer"}
# The agreeing pair is made in memory, as the loader would have returned it.
ZOO = TRAINING | {f"specsim.{name}" for name in ("zoo", "checkpoint", "drafter", "target", "metrics")}
CELLS = {f"specsim.{name}" for name in ("pairwise", "zoo", "checkpoint", "files", "provenance")}
SOAKED = {f"specsim.{name}" for name in ("invariance", "provenance", "ranks", "soak")}
ANYTHING = {"*"}  # but a column and specsim.contract, which a rule has to name
NEVER = {"reference", "fast"}  # a second copy of a column


@dataclass(frozen=True)
class Rule:
    """What a module may import when it is loaded, and what more inside its functions; the standard library always."""

    loading: set[str]
    inside: set[str]


RULES = {
    **dict.fromkeys(("config", "metrics", "pairwise", "synthetic"), Rule(SETTINGS, set())),
    **dict.fromkeys(("phases", "pool", "columns", "uniforms", "drafter", "target", "grammar"), Rule(STATES, set())),
    "guidance": Rule({"torch", "specsim.config"}, {"llguidance"}),
    "requests": Rule(STATES, set()),
    "workload": Rule({"specsim.config", "specsim.files", "specsim.requests"}, set()),
    "generation": Rule(ROUNDS, {"specsim.display"} | BOTH_COLUMNS),
    "prefix": Rule(STATES, set()),
    **dict.fromkeys(("residents", "runner"), Rule(STATES | {"specsim.prefix", "specsim.requests"}, set())),
    # What schedules knows no column: it is given an engine.
    **dict.fromkeys(("scheduler", "ranks"), Rule(ROUNDS, set())),
    "invariance": Rule(ROUNDS, set()),
    "provenance": Rule({"torch"}, set()),
    "measurements": Rule({"specsim.config", "specsim.files"}, set()),
    "proofs": Rule({"specsim.config", "specsim.measurements"}, set()),
    "soak": Rule(ROUNDS | SOAKED, {"specsim.display", "rich"}),
    "certify": Rule(ROUNDS | {"specsim.provenance"}, {"specsim.display", "rich", "scipy"} | BOTH_COLUMNS),
    "laws": Rule(
        ROUNDS | {"scipy", "specsim.checkpoint", "specsim.provenance", "specsim.laws"}, {"specsim.display", "rich"}
    ),
    "serving": Rule(ROUNDS, {"specsim.display", "rich"}),
    "ways": Rule(ROUNDS | {"specsim.invariance", "specsim.serving", "specsim.workload"}, {"specsim.display", "rich"}),
    "differential": Rule(ROUNDS | CELLS, {"specsim.display", "rich"} | BOTH_COLUMNS),
    "trace": Rule(ROUNDS | {"specsim.files"}, {"pandas"} | BOTH_COLUMNS),
    "contract": Rule(set(), set()),
    "explain": Rule({"torch", "specsim.config", "specsim.files", "specsim.explain"}, {"specsim.reference"}),
    "ledger": Rule({"specsim.config", "specsim.measurements", "specsim.simulator"}, set()),
    "simulated": Rule({"specsim.simulator"}, {"specsim.display", "rich"}),
    "simulator": Rule(SETTINGS | {"scipy", "pandas", "specsim.files", "specsim.simulator"}, set()),
    "recording": Rule(ROUNDS | {"specsim.simulator"}, set()),
    "prediction": Rule(ROUNDS | {"specsim.simulator", "specsim.recording", "specsim.display", "rich"}, set()),
    "zoo": Rule(ZOO, set()),
    "shapes": Rule(
        {"torch", "specsim.checkpoint", "specsim.config", "specsim.drafter", "specsim.target", "specsim.shapes"}, set()
    ),
    **dict.fromkeys(
        ("bench", "checkpoint", "display", "files", "plots", "cli", "commands", "options", "demo", "accept", "faults"),
        Rule(ANYTHING, BOTH_COLUMNS),
    ),
    "conformance": Rule(ANYTHING | {"specsim.contract"}, BOTH_COLUMNS),
    "__init__": Rule({"specsim.checkpoint"} | ROUNDS, {"specsim"}),
    "__main__": Rule({"specsim.cli"}, set()),
}


def rule(module: str) -> Rule:
    """The rule of a module, given by its full name."""
    name, row = [*module.split(".")[1:], "__init__", "__init__"][:2]
    column = f"specsim.{name}"
    if column not in BOTH_COLUMNS:
        if name not in RULES:
            raise LookupError(f"{module} has no rule: say in RULES what it may import")
        return RULES[name]
    if row == "__init__":
        return Rule({column}, set())
    if row in ORACLE:
        return Rule({"torch", "specsim.config"} | {f"{column}.{other}" for other in ORACLE}, set())
    order = ROWS if name == "reference" else FAST_ROWS
    if row not in order:
        raise LookupError(f"{module} is not a row: the rows are {', '.join(order)}")
    left = {f"{column}.{other}" for other in order[: order.index(row) + 1]}
    kernels = {"triton"} if name == "fast" else set()
    return Rule(STATES | left | kernels, set())


def python_modules() -> dict[str, Path]:
    modules = {}
    for package, folder in PACKAGE_FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            modules[".".join((package, *parts)).removesuffix(".__init__")] = path
    return modules


MODULES = python_modules()


def imported_names(node: ast.AST, package: str) -> set[str]:
    """The absolute names that one node of a module in `package` imports."""

    def absolute(name: str, dots: int) -> str:
        parts = package.split(".")
        return ".".join([*parts[: len(parts) - dots + 1], *filter(None, [name])]) if dots else name

    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        origin = absolute(node.module or "", node.level)
        submodules = [f"{origin}.{alias.name}" for alias in node.names]
        return {name if name in MODULES else origin for name in submodules}
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        first = node.args[0] if node.args else None
        first = first.values[0] if isinstance(first, ast.JoinedStr) else first
        start = first.value if isinstance(first, ast.Constant) else ""
        name = absolute(start.strip("."), len(start) - len(start.lstrip(".")))
        # A name that is put together at run time may be either column's.
        return BOTH_COLUMNS if name in ("", "specsim") else {name}
    return set()


def imports(package: str, source: str) -> Iterator[tuple[str, int, bool]]:
    """Every import of a module that lies in `package`: (absolute name, line, whether it waits inside a function)."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, int, bool]]:
        yield from ((name, node.lineno, inside) for name in sorted(imported_names(node, package)))
        waits = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or (
            isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        )
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside or waits)

    return walk(ast.parse(source), False)


def covers(allowed: set[str], name: str) -> bool:
    """Whether the name, or a package it lies in, is allowed."""
    parts = name.split(".")
    prefixes = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    if prefixes & NEVER:
        return False
    if parts[0] in sys.stdlib_module_names or prefixes & allowed:
        return True
    return "*" in allowed and not prefixes & (BOTH_COLUMNS | {"specsim.contract"})


def violations(module: str, source: str, package: str) -> list[str]:
    """The imports of a module that its rule does not allow."""
    allowed = rule(module)
    return [
        f"{module}, line {line}: may not import {name}" + ("" if inside else " when it is loaded")
        for name, line, inside in imports(package, source)
        if not covers(allowed.loading | allowed.inside if inside else allowed.loading, name)
    ]


def package_of(module: str) -> str:
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_what_its_place_allows(module):
    assert violations(module, MODULES[module].read_text(), package_of(module)) == []


def test_no_import_cycles():
    graph = {
        module: {name for name, _, inside in imports(package_of(module), path.read_text()) if not inside}
        for module, path in MODULES.items()
    }
    assert list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("specsim.config", "import torch"),
        ("specsim.config", "def f():\n    import torch"),
        ("specsim.config", "from specsim.phases import Batch"),
        ("specsim.config", "import specsim"),
        ("specsim.pool", "import pandas as pd"),
        ("specsim.pool", "import importlib\ndef f(impl): return importlib.import_module(f'specsim.{impl}')"),
        ("specsim.pool", "from importlib import import_module\ndef f(name): return import_module(name)"),
        ("specsim.phases", "from .reference import tree"),
        ("specsim.generation", "from specsim.reference.engine import Engine"),
        ("specsim.generation", "class Engines:\n    from specsim.fast import engine"),
        ("specsim.generation", "import importlib\nENGINE = importlib.import_module('specsim.fast.engine')"),
        ("specsim.generation", "from specsim.contract import OPERATIONS"),
        ("specsim.contract", "import torch"),
        ("specsim.cli", "from specsim.reference import engine"),
        ("specsim.cli", "def f():\n    import reference.engine"),
        ("specsim.cli", "from specsim.contract import OPERATIONS"),
        ("specsim.simulator.cost", "import torch"),
        ("specsim.zoo.train", "def f():\n    from specsim.reference import layers"),
        ("specsim.reference.tree", "from specsim.reference.verify import greedy"),
        ("specsim.reference.tree", "from .verify import greedy"),
        ("specsim.reference.tree", "from . import verify"),
        ("specsim.reference.tree", "def f():\n    from specsim.fast import tree"),
        ("specsim.reference.sampling", "import triton.language as tl"),
        ("specsim.reference.layers", "import transformers"),
        ("specsim.reference.targets.llama", "from ..drafters import eagle"),
        ("specsim.reference.oracle", "from specsim.phases import Batch"),
        ("specsim.reference.engine", "from specsim.reference.oracle import generate"),
        ("specsim.fast.verify", "import specsim.reference.verify"),
        ("specsim.fast.verify", "import specsim.contract"),
    ],
)
def test_checker_finds(module, source):
    assert violations(module, source, module.rpartition(".")[0])


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("specsim.config", "import math\nimport numpy as np"),
        ("specsim.pool", "import torch\nfrom specsim.phases import Batch"),
        ("specsim.generation", "import importlib as i\ndef f(impl): return i.import_module(f'specsim.{impl}.engine')"),
        ("specsim.cli", "import typer\ndef f():\n    from specsim.reference.engine import Engine"),
        ("specsim.conformance.tree", "from specsim.contract import OPERATIONS"),
        ("specsim.reference.verify", "import torch\nfrom specsim.phases import Batch\nfrom .tree import build"),
        (
            "specsim.reference.targets.qwen3",
            "from specsim.reference.targets.llama import Llama\nfrom ..layers import norm",
        ),
        ("specsim.reference.oracle", "import torch\nfrom specsim.config import SpecConfig"),
        ("specsim.fast.engine", "import triton\nfrom .graph import capture\nfrom specsim.phases import Batch"),
    ],
)
def test_checker_allows(module, source):
    assert violations(module, source, module.rpartition(".")[0]) == []


def run_python(code: str, folder: Path) -> dict:
    """Run code in a fresh interpreter; what it leaves in `answer` comes back."""
    code = f"import json, sys\n{code}\nprint(json.dumps(answer))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_specsim_is_light(tmp_path):
    loaded = run_python("import specsim\nanswer = dict(modules=sorted(sys.modules))", tmp_path)
    assert "specsim" in loaded["modules"]
    assert not {"torch", "triton", "transformers", "matplotlib", "pandas", *BOTH_COLUMNS} & set(loaded["modules"])


def test_every_public_name_of_specsim_is_found_where_it_lives():
    import specsim

    assert all(getattr(specsim, name).__module__.startswith("specsim.") for name in specsim.__all__)
    with pytest.raises(AttributeError, match="no attribute 'generator'"):
        _ = specsim.generator


@pytest.mark.parametrize("column", COLUMNS)
def test_column_is_loaded_from_its_folder_and_once(column):
    names = [name for name, path in MODULES.items() if ROOT / column in path.parents]
    loaded = run_python(
        f"import importlib\nmodules = [importlib.import_module(name) for name in {names}]\n"
        "answer = dict(files=[module.__file__ for module in modules], modules=sorted(sys.modules))",
        ROOT,
    )
    assert [Path(file).resolve() for file in loaded["files"]] == [MODULES[name].resolve() for name in names]
    assert not NEVER & set(loaded["modules"])


def test_every_package_is_in_the_wheel():
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages)
    assert SETUPTOOLS["package-dir"] == {name: folder.name for name, folder in PACKAGE_FOLDERS.items()}
    assert {path.parent for path in MODULES.values()} == {MODULES[name].parent for name in packages}


def test_every_data_file_is_in_the_wheel():
    data = SETUPTOOLS["package-data"]
    packed = {path for name, globs in data.items() for glob in globs for path in MODULES[name].parent.glob(glob)}
    files = {path for folder in PACKAGE_FOLDERS.values() for path in folder.rglob("*") if path.is_file()}
    assert {path for path in files - packed if path.suffix not in (".py", ".pyc")} == set()


def rows(column: str) -> set[str]:
    return {name.split(".")[2] for name in MODULES if name.startswith(f"specsim.{column}.")}


def test_columns_hold_rows():
    assert rows("reference") <= {*ORACLE, *ROWS}
    assert rows("fast") <= set(FAST_ROWS)
    assert rows("fast") & set(ROWS) <= rows("reference")


@pytest.mark.parametrize("row", sorted((rows("reference") | rows("fast")) - set(ORACLE[:-1])))
def test_row_has_its_test(row):
    assert (ROOT / "tests" / f"test_{row}.py").is_file()


def project_files() -> list[Path]:
    """The files that belong to the project; hidden and built ones do not."""
    folders = [*(ROOT / name for name in TOP_FOLDERS), ROOT / ".ci"]
    files = [*ROOT.glob("*"), *(path for folder in folders for path in folder.rglob("*"))]
    return [path for path in files if path.is_file() and "__pycache__" not in path.parts]


def test_names_say_what_a_file_defines():
    paths = [path.relative_to(ROOT).with_suffix("") for path in project_files() if path.suffix == ".py"]
    words = {word for path in paths for part in path.parts for word in part.split("_")}
    assert "architecture" in words
    assert words & VAGUE_NAMES == set()


def test_init_files_are_short():
    inits = [path for path in MODULES.values() if path.name == "__init__.py"]
    assert [path for path in inits if len(path.read_text().splitlines()) > 20] == []


def test_top_level_folders():
    made = re.compile(r"\..*|__pycache__|build|dist|.*\.egg-info")
    assert {path.name for path in ROOT.iterdir() if path.is_dir() and not made.fullmatch(path.name)} <= TOP_FOLDERS


def test_tests_are_flat():
    nested = [path for path in (ROOT / "tests").rglob("*.py") if path.parent != ROOT / "tests"]
    assert nested == []


def test_tests_name_a_column_in_full():
    names = {name for path in (ROOT / "tests").glob("*.py") for name, *_ in imports("tests", path.read_text())}
    assert "ast" in names
    assert {name for name in names if name.split(".")[0] in NEVER} == set()


def test_nothing_is_left_to_do_or_points_outside():
    assert FORBIDDEN_TEXT.search("# TO" + "DO: later")
    texts = [path for path in project_files() if path.suffix in ("", ".py", ".md", ".toml", ".txt")]
    assert ROOT / "Makefile" in texts
    assert [path for path in texts if FORBIDDEN_TEXT.search(path.read_text())] == []
