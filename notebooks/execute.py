"""Run notebooks from their .py sources and write the .ipynb next to each: make notebooks.

python notebooks/execute.py [STEM ...] runs all of this folder, or those named, such as 03_speculative_sampling. With
--limits nothing is written, and the exit status is 1 where one takes more than 60 s, or all of them more than 360 s.

`jupytext --execute` and `jupyter execute` do the same, but also write random cell ids and times of day into the file.
"""

import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
MOST_SECONDS = 60
MOST_SECONDS_OF_ALL = 360


def execute(source: Path) -> nbformat.NotebookNode:
    """Run a source in a fresh kernel; cell ids and metadata are the same in every run."""
    notebook = jupytext.read(source)
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index}"
        cell.metadata = nbformat.NotebookNode()
    NotebookClient(notebook, timeout=600, record_timing=False, resources={"metadata": {"path": FOLDER}}).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = merged(cell.outputs)
    return notebook


def merged(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Join what was printed in several pieces, whose number depends on the machine's speed."""
    joined = []
    for output in outputs:
        if joined and output.output_type == joined[-1].output_type == "stream" and output.name == joined[-1].name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def main(arguments: list[str]) -> int:
    """Run the named notebooks, or all; returns the exit status."""
    only_timed = "--limits" in arguments
    stems = [each for each in arguments if each != "--limits"]
    sources = sorted(FOLDER.glob("[0-9]*.py"))
    seconds = {}
    for source in sources if not stems else [FOLDER / f"{stem}.py" for stem in stems]:
        start = time.perf_counter()
        notebook = execute(source)
        seconds[source.stem] = time.perf_counter() - start
        print(f"{source.stem}: {seconds[source.stem]:.1f} s", flush=True)
        if not only_timed:
            nbformat.write(notebook, source.with_suffix(".ipynb"))
    print(f"all: {sum(seconds.values()):.1f} s")
    is_slow = max(seconds.values()) > MOST_SECONDS or sum(seconds.values()) > MOST_SECONDS_OF_ALL
    return int(only_timed and is_slow)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
