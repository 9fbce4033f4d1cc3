"""Files: texts are read, and results written, whole or not at all."""

import json
import math
import os
import shutil
import sys
from pathlib import Path
from secrets import token_hex
from typing import Any, TextIO

from specsim.core.errors import InputError


def read_text(path: Path, name: str, allowed: str) -> str:
    """A UTF-8 file as it is, with or without a byte order mark; InputError, under that name, if it cannot be read."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.reason
        raise InputError(name, str(path), f"{allowed} ({reason})") from error


def check_writable(path: Path | None, name: str = "json") -> None:
    """Before a long run: what can be known of a file that is written after it; InputError under that name."""
    if path is None or _stream(path):
        return
    if path.is_dir():
        raise InputError(name, str(path), "a file, not a folder")
    changed = [path] if path.exists() else []
    if not _is_device(path):
        changed.append(_real(path).parent)
    if not all(os.access(each, os.W_OK) for each in changed):
        raise InputError(name, str(path), "a file that can be written, in a folder that exists and can be written")


def check_apart(**files: Path | None) -> None:
    """Before anything is written: that none of a command's files is another of them; inputs first, by their names."""
    known: dict[Path, str] = {}
    for name, path in files.items():
        if path is None or _stream(path) or _is_device(path):
            continue
        if (other := known.setdefault(_real(path), name)) != name:
            raise InputError(name, str(path), f"another file than that of {other}")


def write_json(path: Path | None, value: dict) -> None:
    """All of it or nothing: written beside `path` and renamed. Devices and this program's own output are written to."""
    if path is None:
        return
    text = json.dumps(without_nan(value), ensure_ascii=False, allow_nan=False) + "\n"
    try:
        if stream := _stream(path):
            stream.write(text)
        else:
            write_whole(path, text.encode(errors="backslashreplace"))  # half a surrogate pair is one in JSON too
    except OSError as error:
        raise InputError("json", str(path), f"a file that can be written ({error.strerror})") from error


def write_whole(path: Path, data: bytes) -> None:
    """Write beside a file, or what it links to, and rename: all of it or nothing. A device is written to; OSError if
    that fails.
    """
    if _is_device(path):
        path.write_bytes(data)
        return
    path = _real(path)
    beside = path.with_name(f".specsim-{token_hex(8)}{path.suffix}")
    try:
        beside.write_bytes(data)
        if path.exists():
            shutil.copymode(path, beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _stream(path: Path) -> TextIO | None:
    """Standard output or error where `path` is another name for it, also when it is redirected to a file."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if os.path.samestat(path.stat(), os.fstat(stream.fileno())):
                return stream
        except (OSError, ValueError):
            continue
    return None


def _is_device(path: Path) -> bool:
    """Also a pipe: what is written to and cannot be replaced."""
    return path.exists() and not path.is_file()


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def without_nan(value: Any) -> Any:
    """A JSON value in which null stands for every number that is not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
