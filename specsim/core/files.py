"""Files: texts are read, and results written, completely or not at all."""

import errno
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

from specsim.core.errors import InputError


def read_text(path: Path, name: str, allowed: str) -> str:
    """Read a UTF-8 file, with or without a byte order mark, or raise InputError with that name."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.reason
        raise InputError(name, str(path), f"{allowed} ({reason})") from error


def parse_json(text: str, name: str, source: str, allowed: str) -> Any:
    """Parse JSON, or raise InputError with that name."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(name, source, f"{allowed} (no JSON: {error})") from error


def parse_json_lines(text: str, name: str, source: str, allowed: str) -> list[Any]:
    """Parse a text as one JSON value, or as one value a line."""
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        return [parse_json(line, name, source, allowed) for line in text.split("\n") if line.strip()]


def read_json(path: Path, name: str, allowed: str) -> Any:
    """Read a UTF-8 file of JSON, or raise InputError with that name."""
    return parse_json(read_text(path, name, allowed), name, str(path), allowed)


def check_writable(path: Path | None, name: str = "json") -> None:
    """Raise InputError with that name, before a long run, if its result cannot be written."""
    if path is None:
        return
    # /dev/stdout may be a file, and a rename over it would lose what the program has printed.
    is_stream = path.absolute().parts[1:2] in (("dev",), ("proc",))
    if is_stream or (path.exists() and not path.is_file()):
        raise InputError(name, str(path), "a file, not a folder or a device")
    changed = [_real(path).parent, *([path] if path.exists() else [])]
    if not all(os.access(each, os.W_OK) for each in changed):
        raise InputError(name, str(path), "a file that can be written, in a folder that exists and can be written")


def check_files(inputs: Mapping[str, Path | None], **outputs: Path | None) -> None:
    """Check that a command can write its outputs, and that no two of its files are the same."""
    known: dict[Path, str] = {}
    for name, path in (*inputs.items(), *outputs.items()):
        if path is not None and (other := known.setdefault(_real(path), name)) != name:
            raise InputError(name, str(path), f"another file than that of {other}")
    for name, path in outputs.items():
        check_writable(path, name)


def write_json(path: Path | None, value: dict[str, Any]) -> None:
    """Write a result as JSON, completely or not at all, unless the path is None."""
    if path is None:
        return
    text = json.dumps(without_nan(value), ensure_ascii=False, allow_nan=False) + "\n"
    try:
        write_whole(path, text.encode(errors="backslashreplace"))  # half a surrogate pair is one in JSON too
    except OSError as error:
        raise InputError("json", str(path), f"a file that can be written ({error.strerror})") from error


def write_whole(path: Path, data: bytes) -> None:
    """Write to a temporary file in the same folder and rename it to `path` or to its link target.

    Every OSError names `path`; that of a full disk would name no file.
    """
    try:
        _write_whole(_real(path), data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write_whole(path: Path, data: bytes) -> None:
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a file", str(path))
    temporary = path.with_name(f".specsim-{token_hex(8)}{path.suffix}")
    try:
        temporary.write_bytes(data)
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
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
