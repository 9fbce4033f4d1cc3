"""A copy of the package with one change: where faults are planted, and mutants too.

A change is text for text in the source of one module, and never in the package that is running: a copy of all sources
is written to a folder of its own, and another process imports it from there. So kernels are read from changed files
too, and nothing in the package can turn a fault on.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from specsim.core.errors import InputError

COLUMNS = ("reference", "fast")


class StalePlant(ValueError):
    """A change whose place is not to be found, or not just once: the module has moved on."""


@dataclass(frozen=True, slots=True)
class Edit:
    """In `module`, given by its full name, `old` becomes `new`; `old` stands there exactly once."""

    module: str
    old: str
    new: str

    def apply(self, source: str) -> str:
        """The changed source of the module; StalePlant if it has no such place, or several."""
        count = source.count(self.old)
        if count != 1:
            raise StalePlant(f"{self.module} has {count} places, not one, with {self.old!r}")
        return source.replace(self.old, self.new)


def sources() -> dict[str, Path]:
    """The folders of the running package, by the name that each is imported under."""
    names = ["specsim", *(f"specsim.{column}" for column in COLUMNS)]
    return {name: Path(find_spec(name).submodule_search_locations[0]) for name in names}


def package_of(module: str) -> str:
    """The name among `sources` of the folder that a module lies in."""
    return max((name for name in sources() if f"{module}.".startswith(f"{name}.")), key=len, default="specsim")


def path_of(module: str, folder: Path | None = None) -> Path:
    """The file of a module below the folder of its package, the running one's unless another is given."""
    package = package_of(module)
    folder = folder or sources()[package]
    path = folder.joinpath(*filter(None, module.removeprefix(package).split(".")))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def read(module: str) -> str:
    """The source of a module of the running package."""
    path = path_of(module)
    if not path.is_file():
        raise StalePlant(f"{module} is no module of this package")
    return path.read_text(encoding="utf-8")


def changed(edits: Sequence[Edit]) -> dict[str, str]:
    """The sources of the modules that the edits change, one edit after the other."""
    texts: dict[str, str] = {}
    for edit in edits:
        texts[edit.module] = edit.apply(texts.get(edit.module) or read(edit.module))
    return texts


@contextmanager
def planted(texts: Mapping[str, str]) -> Iterator[Path]:
    """A folder from which the package is imported with these modules' sources instead of its own."""
    with TemporaryDirectory(prefix="specsim-") as folder:
        root = Path(folder)
        for name, source in sources().items():
            _copy(source, root.joinpath(*name.split(".")))
        for module, text in texts.items():
            _replace(path_of(module, root.joinpath(*package_of(module).split("."))), text)
        yield root


def _copy(source: Path, target: Path) -> None:
    """Sources, and what Python has made of them, are copied; data is linked."""
    for folder, _, names in os.walk(source):
        here = target / Path(folder).relative_to(source)
        here.mkdir(parents=True, exist_ok=True)
        for name in names:
            keep = shutil.copy2 if name.endswith((".py", ".pyc")) else os.symlink
            keep(Path(folder, name).resolve(), here / name)


def _replace(path: Path, text: str) -> None:
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()
    path.write_text(text, encoding="utf-8")


def environment(root: Path, device: str | None = None) -> dict[str, str]:
    """Of a process that imports the package from a copy; one thread, so that processes can share the cores.

    device: on `cpu` kernels are interpreted, also where there is a GPU; None leaves that as it is.
    """
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    interpreted = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {**os.environ, **threads, **interpreted, "PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}


def require_copy(root: Path) -> None:
    """In such a process: that every module of the package was loaded from the copy."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.split(".")[0] == "specsim" and file and not Path(file).is_relative_to(root):
            raise InputError("the package", file, f"only modules from the copy in {root}")
