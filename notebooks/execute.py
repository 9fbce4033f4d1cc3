"""Run every notebook of this folder from its .py source and write the .ipynb next to it: make notebooks.

`jupytext --execute` and `jupyter execute` do the same, but also write random cell ids and times of day into the file.
"""

from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def execute(source: Path) -> nbformat.NotebookNode:
    """Run a source in a fresh kernel; cell ids and metadata are the same in every run."""
    notebook = jupytext.read(source)
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index}"
        cell.metadata = nbformat.NotebookNode()
    NotebookClient(notebook, timeout=600, record_timing=False, resources={"metadata": {"path": FOLDER}}).execute()
    return notebook


if __name__ == "__main__":
    for source in sorted(FOLDER.glob("[0-9]*.py")):
        nbformat.write(execute(source), source.with_suffix(".ipynb"))
        print("wrote", source.with_suffix(".ipynb"))
