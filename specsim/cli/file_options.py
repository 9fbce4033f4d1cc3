"""Files of commands: the options that name them, and the pages and pictures that are written.

Every output of a command can be written, and is none of its other files.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specsim.cli.option_fields import OptionField
from specsim.core.errors import InputError
from specsim.core.files import is_same_file

if TYPE_CHECKING:
    from specsim.core.pair import Pair
    from specsim.explorer.recorder import Recorder
    from specsim.explorer.rounds import Rounds
    from specsim.serving.serve import Served


class NamedFile(NamedTuple):
    """A file of a command, the option or argument that names it, and whether the command writes it."""

    path: Path
    name: str  # of the field
    label: str  # of the option in the command line
    is_output: bool


def named_files(field: OptionField, value: Any) -> list[NamedFile]:
    """List the files that the value of a field names."""
    role = field.option.file
    if value is None or not role:
        return []
    texts = value if isinstance(value, list) else [value]
    if role != "reads":
        return [NamedFile(Path(text), field.name, field.label, is_output=True) for text in texts]
    paths = [path for text in texts for path in _paths(str(text))]
    return [NamedFile(path, field.name, field.label, is_output=False) for path in paths]


def check_files(files: Sequence[NamedFile]) -> None:
    """Raise InputError if an output is another file of the command."""
    for first, second in combinations(files, 2):
        output, other = (second, first) if second.is_output else (first, second)
        if output.name == other.name or not output.is_output:
            continue
        if is_same_file(output.path, other.path):
            raise InputError(output.name, str(output.path), f"another file than that of {other.label}")
        if not other.is_output and _is_part(output.path, other.path):
            raise InputError(output.name, str(output.path), f"a file outside the folder of {other.label}")


def _is_part(file: Path, folder: Path) -> bool:
    """Check whether an existing file is in a folder, or is another name of a file in it."""
    if not (file.exists() and folder.is_dir()):
        return False
    with suppress(OSError):
        return folder.resolve() in file.resolve().parents or any(
            is_same_file(file, entry) for entry in folder.iterdir()
        )
    return False


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
