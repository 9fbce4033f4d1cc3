"""Files of commands: the options that name them, and the pages and pictures that are written.

Every output of a command can be written, and is none of its other files.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from specsim.core.errors import InputError
from specsim.core.files import check_writable, is_same_file

if TYPE_CHECKING:
    from specsim.core.pair import Pair
    from specsim.explorer.recorder import Recorder
    from specsim.explorer.rounds import Rounds
    from specsim.serving.serve import Served


class _NamedFile(NamedTuple):
    """A file, the option or argument that names it, and whether the command writes it."""

    path: Path
    parameter: typer.CallbackParam
    is_output: bool


def reads(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """Protect the files that the value of an option or argument may name: the callback of every input."""
    for text in value if isinstance(value, (list, tuple)) else (value,):
        for path in () if text is None else _paths(str(text)):
            _add(context, _NamedFile(path, parameter, is_output=False))
    return value


def writes(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """Check that a file can be written and is no other file of the command: the callback of every output."""
    if value is not None:
        _add(context, _NamedFile(Path(value), parameter, is_output=True))
        check_writable(Path(value), _name(parameter))
    return value


def writes_folder(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """Check that a new folder is no other file of the command."""
    _add(context, _NamedFile(Path(value), parameter, is_output=True))
    return value


def _add(context: typer.Context, new: _NamedFile) -> None:
    """Compare a file with those of the parameters before it; InputError if one of two equal ones is an output."""
    files: list[_NamedFile] = context.meta.setdefault(__name__, [])
    for file in files:
        output, other = (new, file) if new.is_output else (file, new)
        if output.parameter is other.parameter or not output.is_output:
            continue
        label = other.parameter.opts[0] if other.parameter.param_type_name == "option" else other.parameter.metavar
        if is_same_file(output.path, other.path):
            raise InputError(_name(output.parameter), str(output.path), f"another file than that of {label}")
        if not other.is_output and _is_part(output.path, other.path):
            raise InputError(_name(output.parameter), str(output.path), f"a file outside the folder of {label}")
    files.append(new)


def _is_part(file: Path, folder: Path) -> bool:
    """Check whether an existing file is in a folder, or is another name of a file in it."""
    if not (file.exists() and folder.is_dir()):
        return False
    with suppress(OSError):
        return folder.resolve() in file.resolve().parents or any(
            is_same_file(file, entry) for entry in folder.iterdir()
        )
    return False


def _name(parameter: typer.CallbackParam) -> str:
    return parameter.opts[0].removeprefix("--").replace("-", "_")


def _paths(text: str) -> Iterator[Path]:
    """List the existing files and folders that a value may name: FILE, FILE#N, FILE:NAME, MODULE:NAME, NAME=FILE,FILE.

    A module is searched as Python does.
    """
    for part in (text, *text.partition("=")[2].split(",")):
        for name in {part, part.rpartition("#")[0], part.rpartition(":")[0]} - {""}:
            paths = [Path(os.path.expanduser(name))]  # noqa: PTH111 - Path's raises where there is no such user
            if all(map(str.isidentifier, name.split("."))):
                module = name.replace(".", "/")
                paths += [Path(root, module + end) for root in ("", *sys.path) for end in (".py", "/__init__.py")]
            yield from filter(os.path.exists, paths)


MOST_ROUNDS = 64  # of a file


def write_rounds(path: Path, rounds: "Rounds") -> None:
    """Write recorded rounds as a page, completely or not at all."""
    from specsim.explorer.document import document
    from specsim.explorer.explore import TITLE, write_page

    write_page(path, document(rounds), TITLE)


def served_rounds(pair: "Pair", recorder: "Recorder", served: "Served") -> "Rounds":
    """Join the recorded rounds of a server with its requests."""
    from specsim.explorer.rounds import recorded_rounds
    from specsim.serving.outputs import Generation, output_of

    outputs = tuple(map(output_of, served.requests))
    generation = Generation(outputs, served.config, served.seconds, served.synthetic, served.rule)
    return recorded_rounds(pair, generation, [request.request_id for request in served.requests], recorder)


def check_png(path: Path | None) -> None:
    """Raise InputError for a file whose name is that of another kind of picture, or of none, and without matplotlib."""
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise InputError("plot", str(path), "a file whose name ends in .png")
    try:
        from specsim import plots  # noqa: F401 - to see that it can be imported
    except ImportError as error:
        raise InputError(
            "plot", "a picture", f"nothing without matplotlib; install it: pip install 'specsim[notebooks]' ({error})"
        ) from error


def png(name: str, data: Any) -> bytes:
    """Draw with the function of this name in specsim.plots."""
    from specsim import plots

    drawn, _ = getattr(plots, name)(data)._repr_png_()
    return drawn
