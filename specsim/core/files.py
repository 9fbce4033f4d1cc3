"""Files: texts are read, and results written, completely or not at all."""

import errno
import json
import math
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from specsim.core.errors import InputError

MOST_BYTES = 2**32  # of a file that is read
MOST_STREAM = 2**28  # of a pipe or a device
_STREAM_END = "[DONE]"


def read_text(path: Path, name: str, allowed: str) -> str:
    """Read a UTF-8 file, with or without a byte order mark, or raise InputError with that name."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno())
            most = MOST_BYTES if stat.S_ISREG(size.st_mode) else MOST_STREAM
            data = file.read(most + 1) if size.st_size <= most else b""
        if len(data) > most or size.st_size > most:
            raise InputError(name, str(path), f"{allowed}, of at most {most:,} bytes")
        return data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.reason
        raise InputError(name, str(path), f"{allowed} ({reason})") from error


def parse_json(text: str, name: str, source: str, allowed: str) -> Any:
    """Parse JSON, or raise InputError with that name."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(name, source, f"{allowed} (no JSON: {error})") from error


def is_event_stream(text: str) -> bool:
    """Whether a text is a stream of server-sent events, as of an answer that comes token by token."""
    return text.lstrip().startswith("data:")


def parse_json_lines(text: str, name: str, source: str, allowed: str) -> list[Any]:
    """Parse a text as one JSON value, one a line, or those of an event stream."""
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        lines = [line.strip() for line in text.split("\n")]
        if is_event_stream(text):
            lines = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
            lines = [line for line in lines if line != _STREAM_END]
        return [parse_json(line, name, source, allowed) for line in lines if line]


def read_json(path: Path, name: str, allowed: str) -> Any:
    """Read a UTF-8 file of JSON, or raise InputError with that name."""
    return parse_json(read_text(path, name, allowed), name, str(path), allowed)


class Unwritten(InputError):
    """The error of a result that could not be written, with the result."""

    def __init__(self, name: str, value: object, allowed: str, data: bytes = b"") -> None:
        super().__init__(name, value, allowed)
        self.data = data


def is_same_file(path: Path, other: Path) -> bool:
    """Check whether two paths name one file, also by links or where there is none yet."""
    with suppress(OSError):
        return _real(path) == _real(other) or path.samefile(other)
    return False


def check_writable(path: Path | None, name: str = "json") -> None:
    """Raise InputError with that name, before a long run, if its result cannot be written."""
    if path is None:
        return
    real = _real(path)
    try:
        if _exists(real):
            if not real.is_file():
                raise InputError(name, str(path), "a file, not a folder or a device")
            if any(os.path.samestat(real.stat(), stream) for stream in _streams()):
                raise InputError(name, str(path), "another file than standard output, which the result would replace")
            if not os.access(real, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with _temporary(real) as trial:
            trial.write_bytes(bytes(4096))
    except OSError as error:
        allowed = f"a file that can be written, in a folder that exists and has space ({error.strerror})"
        raise InputError(name, str(path), allowed) from error


def _exists(path: Path) -> bool:
    """Check whether there is a file; OSError for a path that no file can have."""
    with suppress(FileNotFoundError):
        path.stat()
        return True
    return False


def _streams() -> Iterator[os.stat_result]:
    """List the files of standard output and standard error, if they are open."""
    for number in (1, 2):
        with suppress(OSError):
            yield os.fstat(number)


def write_json(path: Path | None, value: dict[str, Any], name: str = "json") -> None:
    """Write a result as JSON, completely or not at all, unless the path is None."""
    if path is not None:
        text = json.dumps(without_nan(value), ensure_ascii=False, allow_nan=False) + "\n"
        write_whole(path, text.encode(errors="backslashreplace"), name)  # half a surrogate pair is one in JSON too


def write_whole(path: Path, data: bytes, name: str) -> None:
    """Write to a temporary file in the same folder and rename it to `path` or to its link target.

    Raises Unwritten with that name and the data where the file cannot be written.
    """
    try:
        _replace(_real(path), data)
    except OSError as error:
        raise Unwritten(name, str(path), f"a file that can be written ({error.strerror})", data) from error


def _replace(path: Path, data: bytes) -> None:
    is_new = not _exists(path)
    if not (is_new or path.is_file()):
        raise OSError(errno.EINVAL, "not a file", str(path))
    with _temporary(path) as temporary:
        temporary.write_bytes(data)
        if not is_new:
            shutil.copymode(path, temporary)
        temporary.replace(path)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Name a temporary file in the folder of `path`, and remove it if it is there in the end."""
    temporary = path.with_name(f".specsim-{token_hex(8)}")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def without_nan(value: Any) -> Any:
    """Replace every non-finite number by null, as JSON has no nan or infinity."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
