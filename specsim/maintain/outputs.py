"""Outputs of commands in the guide, each between its marks: <!-- output [FIRST-LAST] specsim ... -->.

python -m specsim.maintain.outputs [PAGE ...] runs the commands of these pages (all of the guide unless given) in the
order of the page, in one temporary folder per page, and writes what they print. FIRST-LAST: only these lines. A
command of <!-- run specsim ... --> is run but not shown; a code block below <!-- file NAME --> is written to that file;
one between <!-- written NAME --> and <!-- /written --> shows a file that a command before it has written.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from specsim.maintain.page import GUIDE, ROOT, rewrite

BLOCK = re.compile(
    r"<!-- output (?:(\d+)-(\d+) )?(specsim .+?) -->\n(.*?)<!-- /output -->|<!-- run (specsim .+?) -->", re.DOTALL
)

WRITTEN = re.compile(r"<!-- written (\S+) -->\n```(\w+)\n(.*?)```\n<!-- /written -->", re.DOTALL)
FILE = re.compile(r"<!-- file (\S+) -->\n```[^\n]*\n(.*?)```", re.DOTALL)


def run(command: str, folder: Path) -> str:
    """Print of a command, run in a folder; lines without blanks at their ends."""
    words = [sys.executable, "-m", *shlex.split(command)]
    environment = {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{command}: exit status {done.returncode}: {done.stderr}")
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())


def block(mark: re.Match[str], printed: str) -> str:
    """A marked block with the command and what it printed."""
    first, last, command, _, silent = mark.groups()
    if silent is not None:
        return mark.group()
    lines = printed.splitlines()
    start = int(first or 1) - 1
    end = int(last or len(lines))
    excerpt = ["…"] * (start > 0) + lines[start:end] + ["…"] * (end < len(lines))
    opening, _, _ = mark.group().partition("\n")
    text = "\n".join([f"$ {command}", *excerpt])
    return f"{opening}\n```console\n{text}\n```\n<!-- /output -->"


def written(mark: re.Match[str], folder: Path) -> str:
    """A marked block with the text of a file."""
    name, language, _ = mark.groups()
    text = (folder / name).read_text(encoding="utf-8")
    return f"<!-- written {name} -->\n```{language}\n{text.rstrip()}\n```\n<!-- /written -->"


def with_outputs(page: str, print_of: Callable[[str, Path], str] = run) -> str:
    """Run the commands of a page in its order, and put what each prints between its marks."""
    with TemporaryDirectory(prefix="specsim-") as name:
        folder = Path(name)
        (folder / "tables").symlink_to(ROOT / "specsim" / "simulator" / "tables")
        for file in FILE.finditer(page):
            (folder / file[1]).write_text(file[2], encoding="utf-8")
        replaced = BLOCK.sub(lambda mark: block(mark, print_of(mark[3] or mark[5], folder)), page)
        return WRITTEN.sub(lambda mark: written(mark, folder), replaced)


def main(arguments: Sequence[str]) -> None:
    """Write the outputs of these pages, or of all pages of the guide."""
    rewrite(map(Path, arguments) if arguments else sorted(GUIDE.glob("*.md")), with_outputs)


if __name__ == "__main__":
    main(sys.argv[1:])
