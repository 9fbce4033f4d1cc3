"""Modules of a user, which models and correctness load: kernels, acceptance rules, drafters."""

import importlib
import importlib.util
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from specsim.core.errors import InputError


def load_module(name: str) -> ModuleType:
    """Load a module by its dotted name, as Python finds it from the current folder, or by its file.

    A file is executed once, and again when it has changed. InputError for a module that cannot be imported.
    """
    allowed = "a module that Python can import, or a .py file"
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if name.endswith(".py") and not Path(name).is_file():
        raise InputError("module", name, f"{allowed} (there is no such file)")
    try:
        if name.endswith(".py"):
            path = Path(name).resolve()
            return _load_file(path, sha256(path.read_bytes()).digest())
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise InputError("module", name, f"{allowed} ({one_line(error)})") from error


@cache
def _load_file(path: Path, _digest: bytes) -> ModuleType:
    """Execute a file, known to Python by its stem, as Triton and pickle look modules up."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python source file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def one_line(error: BaseException) -> str:
    """Describe an error in one line, with its type."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def load_object(place: str, field: str, allowed: str) -> Any:
    """Load an object of a module or file from its place, MODULE:NAME or FILE.py:NAME.

    A class is instantiated without arguments. Raises InputError, which names the field, where that fails.
    """
    before, _, name = place.rpartition(":")
    module = load_module(before)
    if not hasattr(module, name):
        raise InputError(field, place, f"{allowed} ({before} has no {name})")
    found = getattr(module, name)
    if not isinstance(found, type):
        return found
    try:
        return found()
    except Exception as error:
        raise InputError(field, place, f"{allowed} ({one_line(error)})") from error
