"""Results of runs on GPUs: kept as JSON beside the kernels, and README's tables of them."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specsim.core.errors import InputError
from specsim.core.files import read_text

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "fast" / "measurements"
README = ROOT / "README.md"


def read(path: Path, *names: str) -> dict[str, Any]:
    """A result as it was written, with fields of these names; InputError for any other file."""
    allowed = "a result that a command of specsim wrote with --json"
    text = read_text(path, "file", allowed)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InputError("file", str(path), f"{allowed} (it is no JSON)") from error
    for name in names:
        if not isinstance(value, dict) or name not in value:
            raise InputError("file", str(path), f"{allowed} (it has no {name})")
    return value


def as_command(run: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> None:
    """Run a module's command; bad input is one sentence and exit status 2."""
    try:
        run(arguments)
    except InputError as error:
        print(f"specsim: {error}", file=sys.stderr)
        sys.exit(2)


def keep(path: Path, value: Mapping[str, Any]) -> Path:
    """Write a result where the package finds it."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    return path


def markdown(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a table."""
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    return lines + ["| " + " | ".join(map(str, cells)) + " |" for cells in rows]


def measured_on(values: Iterable[Mapping[str, Any]]) -> str:
    """What ran them, and when."""
    runs = sorted({_run(value) for value in values})
    return f"Measured on {'; '.join(runs)} (`fast/measurements/`)."


def _run(value: Mapping[str, Any]) -> str:
    versions = value["versions"]
    return f"one {versions['gpu']}, torch {versions['torch']}, triton {versions['triton']}, {value['date'][:10]}"


def placed(readme: str, mark: str, text: str) -> str:
    """The README with this text between <!-- mark --> and <!-- /mark -->."""
    start, end = f"<!-- {mark} -->\n", f"<!-- /{mark} -->"
    before, _, rest = readme.partition(start)
    return before + start + text + end + rest.partition(end)[2]


def rewrite(mark: str, text: str) -> None:
    """Put a text into its place in README.md."""
    README.write_text(placed(README.read_text(encoding="utf-8"), mark, text), encoding="utf-8")
