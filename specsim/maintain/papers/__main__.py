"""Write papers/ledger.md; input that cannot be read is one sentence and exit status 2."""

import sys
from pathlib import Path

from specsim.core.errors import InputError
from specsim.maintain.papers.ledger import page, rows
from specsim.maintain.papers.published import papers

ROOT = Path(__file__).resolve().parents[3]


def main(root: Path = ROOT) -> None:
    """Compute every figure, and write the page only after all of them."""
    try:
        text = page([(paper, rows(paper, root)) for paper in papers(root)])
    except InputError as error:
        print(f"specsim: {error}", file=sys.stderr)
        sys.exit(2)
    (root / "papers" / "ledger.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
