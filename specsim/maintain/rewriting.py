"""Files of a checkout that a command writes again, such as pages with outputs and notebooks with exercises."""

from collections.abc import Callable, Iterable
from pathlib import Path


def rewrite(paths: Iterable[Path], change: Callable[[str], str]) -> None:
    """Write what `change` makes of each file's text, and print the paths of those that it altered."""
    for path in paths:
        text = path.read_text(encoding="utf-8")
        changed = change(text)
        if changed != text:
            path.write_text(changed, encoding="utf-8")
            print(path)
