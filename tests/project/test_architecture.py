"""Structure that import-linter (`make lint`) cannot check: dynamic and lazy imports, the wheel, names."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from specsim.core.verifiers import VERIFIER_KINDS

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
IMPLEMENTATIONS = ("reference", "fast")
PACKAGE_FOLDERS = {"specsim": ROOT / "specsim"} | {f"specsim.{name}": ROOT / name for name in IMPLEMENTATIONS}
TOP_FOLDERS = {"specsim", "reference", "fast", "notebooks", "tests", "papers"}
TEST_FOLDERS = set(
    "acceptance bench cli core correctness course engines explorer fast maintain models operations plots project "
    "serving simulator training".split()
)
VAGUE_NAMES = {"utils", "common", "helpers", "base", "manager", "factory", "registry"}
# In two parts each, since this file is read as well.
FORBIDDEN_TEXT = re.compile(r"\bTO" + r"DO\b|\.\./sha" + "red")
# Modules that import by a name put together at run time, and the modules they can reach that way.
DYNAMIC_IMPORTS = {
    "specsim": {
        f"specsim.{name}" for name in ("core", "course", "models", "plots", "serving", "simulator", "training")
    },
    "specsim.course.exercises": {"specsim.course.exercises"},
    "specsim.correctness.faults.checks": {"specsim.correctness.faults.checks"},
    "specsim.correctness.faults.checks.trees": {"specsim.reference.tree", "specsim.fast.tree"},
    "specsim.core.verifiers": {
        *(
            f"specsim.{name}"
            for name in (
                "fast.drafters",
                "models.drafters",
                "models.synthetic",
                "reference.drafters",
                "reference.oracle",
                "simulator.drafter",
            )
        ),
        *(place.partition(":")[0] for kind in VERIFIER_KINDS for place in kind.places),
    },
    "specsim.core.user_module": {"the module of a user"},
    "specsim.correctness.invariance.replay": {"specsim.reference.drafters.suffix", "specsim.fast.drafters.suffix"},
    "specsim.serving.generation": {"specsim.reference.engine", "specsim.fast.engine", "specsim.fast.runtime.launch"},
}
# The oracle, which has no twin in fast/.
REFERENCE_ALONE = {path.stem for path in (ROOT / "reference").glob("oracle*.py")}
HEAVY = {"torch", "triton", "transformers", "matplotlib", "pandas", "specsim.reference", "specsim.fast"}


def python_modules() -> dict[str, Path]:
    modules = {}
    for package, folder in PACKAGE_FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                parts = path.relative_to(folder).with_suffix("").parts
                modules[".".join((package, *parts)).removesuffix(".__init__")] = path
    return modules


MODULES = python_modules()


def imports_by_name(source: str) -> bool:
    """Whether a module calls import_module or __import__."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return any(ast.unparse(call.func).split(".")[-1] in ("import_module", "__import__") for call in calls)


@pytest.mark.parametrize(
    "source",
    [
        "import importlib\ndef f(impl): return importlib.import_module(f'specsim.{impl}')",
        "from importlib import import_module\ndef f(name): return import_module(name)",
        "ENGINE = __import__('specsim.fast.engine')",
    ],
)
def test_dynamic_import_is_found(source):
    assert imports_by_name(source)
    assert not imports_by_name("import importlib\nfrom specsim.core import config")


def test_dynamic_imports_are_the_known_ones():
    found = {name for name, path in MODULES.items() if imports_by_name(path.read_text())}
    assert found == set(DYNAMIC_IMPORTS)


def test_dynamic_imports_name_their_targets():
    known = {target for targets in DYNAMIC_IMPORTS.values() for target in targets if target.startswith("specsim")}
    assert known <= set(MODULES)


def run_python(code: str, folder: Path) -> dict:
    """Run code in a new interpreter and return its variable `answer`."""
    code = f"import json, sys\n{code}\nprint(json.dumps(answer))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def loaded_by(modules: list[str], folder: Path) -> set[str]:
    """Names of all modules that are loaded after an import of these."""
    code = f"from importlib import import_module\nfor name in {modules}: import_module(name)"
    return set(run_python(f"{code}\nanswer = dict(modules=sorted(sys.modules))", folder)["modules"])


def test_import_specsim_and_the_command_line_are_light(tmp_path):
    loaded = loaded_by(["specsim", "specsim.cli.main"], tmp_path)
    assert "specsim.cli.generate" in loaded
    assert not HEAVY & loaded


def test_the_simulator_loads_no_torch(tmp_path):
    modules = [name for name in MODULES if name.startswith("specsim.simulator") and "reproduce" not in name]
    loaded = loaded_by(modules, tmp_path)
    assert "specsim.simulator.server" in loaded
    assert not HEAVY & loaded


def test_a_small_plan_loads_neither_torch_nor_scipy(tmp_path):
    words = ["plan", "--requests", "2", "--output-tokens", "4", "--replicates", "1", "--json", "plan.json"]
    code = f"import sys\nfrom specsim.cli.main import main\ntry: main({words})\nexcept SystemExit: pass"
    code = "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n  " + code.replace("\n", "\n  ")
    loaded = set(run_python(f"{code}\nanswer = sorted(sys.modules)", tmp_path))
    assert (tmp_path / "plan.json").exists()
    assert "specsim.simulator.server" in loaded
    assert not {*HEAVY, "scipy"} & loaded


def test_only_functions_reach_an_implementation(tmp_path):
    above = [name for name in MODULES if name.split(".")[1:2] not in (["reference"], ["fast"], ["__main__"])]
    loaded = loaded_by(above, tmp_path)
    assert "specsim.bench.rounds" in loaded
    assert not {"specsim.reference", "specsim.fast"} & loaded


def test_folders_are_attributes_of_specsim(tmp_path):
    pytest.importorskip("matplotlib")
    names = "specsim.plots.tree.__name__, specsim.simulator.model.__name__, specsim.__version__"
    code = f"import specsim\nanswer = [{names}]"
    assert run_python(code, tmp_path) == ["tree", "model", metadata.version("specsim")]


def test_every_public_name_of_specsim_is_found_where_it_lives():
    import specsim

    assert all(getattr(specsim, name).__module__.startswith("specsim.") for name in specsim.__all__)
    with pytest.raises(AttributeError):
        _ = specsim.generator


def test_type_checkers_see_every_public_name():
    import specsim

    stub = ast.parse((ROOT / "specsim" / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert [ast.unparse(node) for node in stub.body if node not in imports] == ["__version__: str"]
    folders = [alias.asname for node in imports for alias in node.names if node.module == "specsim"]
    assert all(getattr(specsim, name).__name__ == f"specsim.{name}" for name in folders)
    declared = {alias.asname: node.module for node in imports for alias in node.names if alias.asname not in folders}
    assert sorted(declared) == specsim.__all__
    assert all(getattr(specsim, name) is getattr(sys.modules[module], name) for name, module in declared.items())


def test_implementations_are_loaded_from_their_folders_and_once():
    folders = {ROOT / implementation for implementation in IMPLEMENTATIONS}
    names = [name for name, path in MODULES.items() if folders & {*path.parents}]
    loaded = run_python(
        f"import importlib\nmodules = [importlib.import_module(name) for name in {names}]\n"
        "answer = dict(files=[module.__file__ for module in modules], modules=sorted(sys.modules))",
        ROOT,
    )
    assert [Path(file).resolve() for file in loaded["files"]] == [MODULES[name].resolve() for name in names]
    assert not set(IMPLEMENTATIONS) & set(loaded["modules"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tools_find_the_implementation_through_a_link(implementation):
    assert (ROOT / "specsim" / implementation).readlink() == Path("..") / implementation


def test_every_package_is_in_the_wheel():
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages)
    assert SETUPTOOLS["package-dir"] == {name: folder.name for name, folder in PACKAGE_FOLDERS.items()}
    assert {path.parent for path in MODULES.values()} == {MODULES[name].parent for name in packages}


def test_every_data_file_is_in_the_wheel():
    data = SETUPTOOLS["package-data"]
    packed = {path for name, globs in data.items() for glob in globs for path in MODULES[name].parent.glob(glob)}
    files = {path for folder in PACKAGE_FOLDERS.values() for path in folder.rglob("*") if path.is_file()}
    assert {path for path in files - packed if path.suffix != ".py" and path.parent.name != "__pycache__"} == set()


def operations(implementation: str) -> set[str]:
    """An operation is a file, or in fast/ a folder of its kernels."""
    folder = ROOT / implementation
    names = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.name in ("drafting", "kv", "tree")}
    return names - {"__init__"}


def test_fast_has_twins_of_the_reference():
    twins = operations("reference") - REFERENCE_ALONE
    assert operations("fast") == twins | {"frame", "sections"}


def test_contracts_name_every_file_of_the_oracle():
    contracts = {each["name"]: each for each in PYPROJECT["tool"]["importlinter"]["contracts"]}
    alone = contracts["The oracle stands alone"]["source_modules"]
    assert set(alone) == {f"specsim.reference.{name}" for name in REFERENCE_ALONE}


def untested(implementation: str, tests: str) -> set[str]:
    """Modules of an implementation without a test file of their name; some folders have one file for all of theirs."""
    modules = (path for path in (ROOT / implementation).rglob("*.py") if path.stem != "__init__")
    folders = ("targets", "drafters", "verifiers", "drafting", "kv", "tree")
    names = {path.stem for path in modules if path.parent.name not in folders}
    return {name for name in names if not (ROOT / "tests" / tests / f"test_{name}.py").is_file()}


def test_every_module_of_an_implementation_has_its_test():
    assert untested("reference", "operations") == REFERENCE_ALONE - {"oracle"}
    # test_sampling.py reads every entry of a distribution; test_uniforms.py in tests/core compares with the kernels'.
    # Parts of one kernel are tested as a whole, in test_kernel.py, test_forward.py and test_many_rows_product.py.
    parts = {"finisher", "memory", "many_rows_epilogue"}
    assert untested("fast", "fast") - operations("reference") == {"distribution", "uniforms"} | parts


def unannotated(source: str) -> list[str]:
    """Host functions without the type of a parameter or of the result; kernels have no types."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or any("no_type_check" in ast.unparse(d) for d in node.decorator_list):
            continue
        names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        lacking = [each.arg for each in names if each.annotation is None and each.arg not in ("self", "cls")]
        if lacking or node.returns is None:
            found.append(node.name)
    return found


def test_host_functions_of_the_fast_implementation_have_types():
    assert unannotated("def f(a, b: int) -> int: pass\n@no_type_check\ndef g(a): pass\ndef h(): pass") == ["f", "h"]
    found = {name: unannotated(path.read_text()) for name, path in MODULES.items() if ROOT / "fast" in path.parents}
    assert {name: functions for name, functions in found.items() if functions} == {}


def project_files() -> list[Path]:
    """The project's files, without hidden and built files."""
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


def test_tests_lie_in_folders_of_what_they_test():
    tests = ROOT / "tests"
    assert {path.parent.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")} == TEST_FOLDERS


def test_tests_import_an_implementation_as_part_of_specsim():
    sources = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    assert any("from specsim.reference" in source for source in sources)
    bare = re.compile(rf"^\s*(from|import) ({'|'.join(IMPLEMENTATIONS)})\b", re.MULTILINE)
    assert not any(bare.search(source) for source in sources)


def test_nothing_is_left_to_do_or_points_outside():
    assert FORBIDDEN_TEXT.search("# TO" + "DO: later")
    texts = [path for path in project_files() if path.suffix in ("", ".py", ".md", ".toml", ".txt")]
    assert ROOT / "Makefile" in texts
    assert [path for path in texts if FORBIDDEN_TEXT.search(path.read_text())] == []
