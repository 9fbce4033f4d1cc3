"""Results as a JSON file: written whole or not at all."""

import json
import os
import sys
from pathlib import Path
from typing import TextIO

from specsim.config import InputError
from specsim.metrics import without_nan


def check_writable(path: Path | None) -> None:
    """Before a long run: what can be known of a file that is written after it."""
    if path is None or _stream(path):
        return
    if path.is_dir():
        raise InputError("json", str(path), "a file, not a folder")
    changed = [path] if path.exists() else []
    if not _is_device(path):
        changed.append(_real(path).parent)
    if not all(os.access(each, os.W_OK) for each in changed):
        raise InputError("json", str(path), "a file that can be written, in a folder that exists and can be written")


def write_json(path: Path | None, value: dict) -> None:
    """All of it or nothing: written beside `path` and renamed. Devices and this program's own output are written to."""
    if path is None:
        return
    text = json.dumps(without_nan(value), ensure_ascii=False, allow_nan=False) + "\n"
    try:
        if stream := _stream(path):
            stream.write(text)
        elif _is_device(path):
            path.write_text(text, encoding="utf-8")
        else:
            _replace(_real(path), text)
    except OSError as error:
        raise InputError("json", str(path), f"a file that can be written ({error.strerror})") from error


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".specsim-{os.getpid()}.json")
    try:
        beside.write_text(text, encoding="utf-8")
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
