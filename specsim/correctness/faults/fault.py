"""Faults: entries of the catalogue, and their injection into a copy of the package, imported by another process.

A change replaces text in the source of one module of the copy, never in the running package. So kernels are compiled
from changed files too, and nothing in the package can turn a fault on."""

import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specsim.core.children import temporary_folder
from specsim.core.engine_options import IMPLEMENTATIONS
from specsim.core.errors import InputError


class StaleFault(ValueError):
    """A change whose old text is not in the module exactly once, because the module has changed."""


def sources() -> dict[str, Path]:
    """Find the folders of the running package, by the name that each is imported under."""
    folders = {}
    for name in ("specsim", *(f"specsim.{impl}" for impl in IMPLEMENTATIONS)):
        spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise InputError("package", name, "an importable package")
        folders[name] = Path(spec.submodule_search_locations[0])
    return folders


def package_of(module: str) -> str:
    """Find the name, among `sources`, of the folder that holds a module."""
    return max((name for name in sources() if f"{module}.".startswith(f"{name}.")), key=len, default="specsim")


def path_of(module: str, folder: Path | None = None) -> Path:
    """Find the file of a module below the folder of its package; folder None: the running package's."""
    package = package_of(module)
    folder = folder or sources()[package]
    path = folder.joinpath(*filter(None, module.removeprefix(package).split(".")))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def read(module: str) -> str:
    """Read the source of a module of the running package."""
    path = path_of(module)
    if not path.is_file():
        raise StaleFault(f"{module} is no module of this package")
    return path.read_text(encoding="utf-8")


_WORDS = re.compile(r"\[-((?:(?!\[-).)*?)-\]|\{\+((?:(?!\{\+).)*?)\+\}", re.DOTALL)


def changed(edits: Mapping[str, str]) -> dict[str, str]:
    """Change the sources of modules; edits: of a Fault."""
    texts: dict[str, str] = {}
    for module, diff in edits.items():
        texts[module] = read(module)
        for hunk in diff.split("@@"):
            texts[module] = apply(hunk, module, texts[module])
    return texts


def apply(hunk: str, module: str, source: str) -> str:
    """Change one text of a module's source; StaleFault if its old text does not occur exactly once."""
    old = _WORDS.sub(lambda word: word[1] or "", hunk)
    count = source.count(old)
    if count != 1:
        raise StaleFault(f"{module} has {count} places, not one, with {old!r}")
    return source.replace(old, _WORDS.sub(lambda word: word[2] or "", hunk))


@contextmanager
def copied_package(texts: Mapping[str, str]) -> Iterator[Path]:
    """Make a folder from which the package is imported with these modules' sources instead of its own."""
    with temporary_folder() as root:
        folders = sources()
        for name, source in folders.items():
            _copy(source, root.joinpath(*name.split(".")), {*folders.values()} - {source})
        for module, text in texts.items():
            _replace(path_of(module, root.joinpath(*package_of(module).split("."))), text)
        yield root


def _copy(source: Path, target: Path, left_out: Collection[Path]) -> None:
    """Copy sources and compiled sources; link data. In an installed package the implementations are inside.

    A copy of a source is a hard link where the file system allows it, as writing thousands of files can take seconds.
    """
    for folder, inner, names in os.walk(source):
        inner[:] = [name for name in inner if Path(folder, name) not in left_out]
        here = target / Path(folder).relative_to(source)
        here.mkdir(parents=True, exist_ok=True)
        for name in names:
            keep = _link if name.endswith((".py", ".pyc")) else os.symlink
            keep(Path(folder, name).resolve(), here / name)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or a file of another user
        shutil.copy2(source, target)


def _replace(path: Path, text: str) -> None:
    """Write a new file in place of a copy, which may be a link to the original."""
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()
    path.unlink()
    path.write_text(text, encoding="utf-8")


def environment(root: Path, device: str | None = None) -> dict[str, str]:
    """Make the environment of a process that imports the package from a copy, in one thread.

    It finds other packages where this process does, by PYTHONPATH too. device: `cpu` has kernels interpreted, even with
    a GPU; None leaves that as it is.
    """
    # Bytecode of a process that is still starting would make the folder again after its removal.
    settings = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONDONTWRITEBYTECODE"), "1")
    interpreted = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    inherited = os.environ.get("PYTHONPATH")
    folders = [str(Path(folder).absolute()) for folder in inherited.split(os.pathsep)] if inherited else []
    path = os.pathsep.join([str(root), *folders])  # absolute, since the process may start in another folder
    return {**os.environ, **settings, **interpreted, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def require_copy(root: Path) -> None:
    """Raise InputError in such a process unless every module of the package comes from the copy."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.split(".")[0] == "specsim" and file and not Path(file).is_relative_to(root):
            raise InputError("the package", file, f"only modules from the copy in {root}")


@dataclass(frozen=True, slots=True)
class Trial:
    """A check and its setting."""

    check: str  # its name
    setting: Mapping[str, Any] = field(default_factory=dict)  # values that JSON has


@dataclass(frozen=True, slots=True)
class FaultFinding:
    """One wrong field."""

    field: str  # name of the wrong field
    place: str  # place of the first wrong value
    expected: Any  # right value
    found: Any  # wrong value

    def __str__(self) -> str:
        return f"{self.place}: {self.field} is {self.found}, not {self.expected}"


@dataclass(frozen=True, slots=True)
class Fault:
    """A defect that speculative decoding has had."""

    name: str  # name of the fault
    source: str  # report or fix, owner#number of a public repository, or another account of it
    operation: str  # of the round
    cause: str  # one sentence
    symptom: str  # symptom, in a sentence
    fields: tuple[str, ...]  # a finding of the check has to name one of them
    # The injection, by the module's full name; the package itself holds no switch for it. A text of the module is
    # written as `git diff --word-diff` shows its change, with [-old-] and {+new+} words; @@ divides two such hunks.
    edits: Mapping[str, str]
    trial: Trial  # the smallest setting known to show it

    @property
    def code(self) -> str:
        """Owner of the changed code: `fast`, `reference`, or `shared` by both implementations."""
        folders = {module.split(".")[1] for module in self.edits}
        return next((impl for impl in ("fast", "reference") if impl in folders), "shared")
