"""Code of a user, which models and correctness load and call: kernels, acceptance rules, drafters, tokenizers."""

import importlib
import importlib.util
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from importlib.abc import SourceLoader
from importlib.machinery import PathFinder
from os import _exit as end_process
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any, NoReturn

from specsim.core.errors import InputError, require, text_of

CALL_SECONDS = 60  # limit of one call, and of an import
_LOADERS = ("specsim", "importlib", "transformers")  # packages whose frames lie between a boundary and the user's code


@contextmanager
def user_code(field: str, value: str, allowed: str) -> Iterator[None]:
    """Turn whatever code of a user raises, an exit included, into an InputError with the place in that code.

    A user's functions, methods and attributes are only loaded, called and read within this.
    """
    try:
        yield
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except BaseException as error:
        if isinstance(error, InputError) and error.name == field:  # of an inner boundary
            raise
        raise InputError(field, value, f"{allowed} ({one_line(error)}{_location(error)})") from error


class CallTimeout(BaseException):
    """The error in code of a user that has not returned in time, which `except Exception` does not catch."""


@contextmanager
def time_limit(seconds: float | None = None) -> Iterator[None]:
    """Raise CallTimeout in code that has not returned in time; without signals, as in a thread, there is no limit.

    seconds: CALL_SECONDS if None.
    """
    limit = CALL_SECONDS if seconds is None else seconds
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise CallTimeout(f"no result within {limit:g} seconds")

    handler = signal.signal(signal.SIGALRM, stop)
    remaining, _ = signal.setitimer(signal.ITIMER_REAL, limit, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, remaining)
        signal.signal(signal.SIGALRM, handler)


def _raise_exit(process: int, status: int) -> NoReturn:
    """Raise an error in place of os._exit, which ends a command as if it were done; end a fork."""
    if os.getpid() != process:
        end_process(status)
    raise SystemExit(status)


def one_line(error: BaseException) -> str:
    """Describe an error in one line, with its type."""
    return " ".join(f"{type(error).__name__}: {text_of(str, error)}".split())


def _location(error: BaseException) -> str:
    """Name the user's file where an error arose, with the line; empty where no such code ran."""
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _LOADERS
    ]
    if not frames:
        return ""
    file = frames[0][0]
    return f", {Path(file).name}, line {[line for name, line in frames if name == file][-1]}"


def load_module(name: str) -> ModuleType:
    """Load a module by its dotted name, as Python finds it or in the current folder, or by its file.

    A file is executed once, and again when it has changed. InputError for a module that cannot be imported.
    """
    os._exit = partial(_raise_exit, os.getpid())
    allowed = "a module that Python can import, or a .py file"
    if name.endswith(".py") and not Path(name).is_file():
        raise InputError("module", name, f"{allowed} (there is no such file)")
    with user_code("module", name, allowed), time_limit():
        here = str(Path.cwd())
        if not name.endswith(".py"):
            _require_one(name.partition(".")[0], here)
        if here not in sys.path:
            sys.path.append(here)  # last, so that no file there hides a module of a library
        if name.endswith(".py"):
            path = Path(name).resolve()
            return _load_file(path, path.read_bytes())
        return importlib.import_module(name)


def _require_one(name: str, folder: str) -> None:
    """Raise ImportError for a name that a module of the folder and another one have."""
    local, other = PathFinder.find_spec(name, [folder]), importlib.util.find_spec(name)
    if local and local.origin and other and not _is_same(local.origin, other.origin):
        raise ImportError(f"{local.origin} and {other.origin} have this name; name the file, or rename it")


def _is_same(path: str, other: str | None) -> bool:
    return other is not None and Path(path).resolve() == Path(other).resolve()


@cache
def _load_file(path: Path, source: bytes) -> ModuleType:
    """Execute the source of a file, known to Python by a name that no other module has.

    Triton and pickle look modules up by their names. Bytecode is not kept, as a file may change within the same second.
    """
    digest = sha256(str(path).encode(errors="surrogateescape")).hexdigest()
    name = re.sub(r"\W", "_", f"{path.stem}_{digest[:8]}")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or not isinstance(spec.loader, SourceLoader):
        raise ImportError(f"{path} is no Python source file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    exec(spec.loader.source_to_code(source, str(path)), vars(module))
    return module


def load_object(path: str, field: str, allowed: str) -> Any:
    """Load an object of a module or file from its path, MODULE:NAME or FILE.py:NAME.

    A class is instantiated without arguments. Raises InputError, which names the field, where that fails.
    """
    before, _, name = path.rpartition(":")
    module = load_module(before)
    with user_code(field, path, allowed), time_limit():
        loaded = getattr(module, name, module)
        loaded = loaded() if isinstance(loaded, type) else loaded
    require(loaded is not module, field, path, f"{allowed} ({before} has no {name})")
    return loaded


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function of a user, whose exceptions, exits and endless loops become an InputError."""

    function: Callable[..., Any]
    field: str
    path: str  # MODULE:NAME or FILE.py:NAME of the object that it belongs to
    allowed: str

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with user_code(self.field, self.path, self.allowed), time_limit():
            return self.function(*arguments, **named)
