"""Write papers/ledger.md and the tables of notes; input that cannot be read is one sentence and exit status 2."""

import sys
from functools import partial
from pathlib import Path

from papers.reproduction.ledger import page, rows, with_figures
from papers.reproduction.published import papers
from specsim.core.errors import InputError
from specsim.maintain.page import ROOT, rewrite


def main(root: Path = ROOT) -> None:
    """Compute every figure, and write pages only after all of them."""
    try:
        rows_by_paper = [(paper, rows(paper, root)) for paper in papers(root)]
    except InputError as error:
        print(f"specsim: {error}", file=sys.stderr)
        sys.exit(2)
    (root / "papers" / "ledger.md").write_text(page(rows_by_paper), encoding="utf-8")
    for paper, paper_rows in rows_by_paper:
        rewrite([root / "papers" / paper.folder / "notes.md"], partial(with_figures, paper_rows=paper_rows))


if __name__ == "__main__":
    main()
