"""Leaderboard of acceptance rules, written to papers/leaderboard.md: distance, acceptance against the optimum, cost.

python -m papers.reproduction.leaderboard [FILE.py[:NAME] ...] writes the package's own rules, those of every file
notebooks/examples/*_rule.py, and those of other modules that are named.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import Any

from specsim.core.errors import InputError, require
from specsim.core.rule import AcceptanceRule
from specsim.correctness import exact
from specsim.correctness.exact.cases import CASES, ExactCase, draws
from specsim.correctness.exact.certificates import VERIFIERS
from specsim.correctness.exact.report import Certificate
from specsim.correctness.exact.report import exact as as_text
from specsim.correctness.exact.verifier import DraftedTree, Verifier
from specsim.maintain.page import ROOT, markdown

PAGE = ROOT / "papers" / "leaderboard.md"
EXAMPLES = "notebooks/examples"
RULE_FILES = "*_rule.py"
PROBES = (1 / 16, 5 / 16, 1 / 2, 11 / 16, 15 / 16)  # uniforms for which it is probed what a rule reads
RULES = ("rule", "lossless", "largest distance", "accepted / optimum", "reads besides the target's distributions")
CASE = ("rule", "distance", "accepted", "optimum", "accepted / optimum")
KINDS = {"best": "any", "sampled": "chain", "siblings": "tree", "distinct": "distinct"}
TITLES = {
    "any": "any drafts",
    "chain": "sampled chains",
    "tree": "sampled trees",
    "distinct": "trees sampled without replacement",
}
HEAD = """# Leaderboard of acceptance rules

An acceptance rule looks at a drafted tree, the target's distributions and, if it wants, the drafter's. It chooses a
path and one more token. Three figures describe a rule, all of them exact (fractions, no sampling):

* **Distance**: total variation of the output from the target's distribution. 0 means lossless.
* **Accepted / optimum**: expected accepted drafts, over the most that any lossless rule can accept on the same case.
  The optimum is the value of a linear program. The table has the mean over the cases, for lossless rules only.
* **Reads**: what the rule costs besides the target's distributions, which all rules read. The drafter's distributions
  take memory and bandwidth, V numbers for each node, and exist only where drafts are sampled.

The cases are small on purpose, 2 to 4 tokens, so that everything can be enumerated. They are listed in
[`cases.py`](../specsim/correctness/exact/cases.py). `python -m papers.reproduction.leaderboard` writes this page.
"""
FOOT = """## Add your rule

1. Write a function in a file `notebooks/examples/<NAME>_rule.py`, as [my_rule.py](../notebooks/examples/my_rule.py)
   does, and an `AcceptanceRule` with a name of its own. [How to bring your own](../notebooks/guide/own-drafter.md)
   explains the arguments, which operations a proof can follow, and the kinds of drafts.
2. `specsim certify --module notebooks/examples/<NAME>_rule.py` proves that the rule is lossless, or shows the smallest
   case where it is not. A rule that is meant to change the distribution has `lossless=False`; its distance is reported.
3. `python -m papers.reproduction.leaderboard` writes this page with the rules of all these files, and with a rule of a
   file elsewhere that you name: `python -m papers.reproduction.leaderboard my_rule.py:rule`.
4. Open a pull request with the file and the page. Its tests certify the rule again, and compare the page with what is
   computed.

A rule that cannot be certified is refused in one sentence, and the page stays as it was.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A rule with its certificates."""

    name: str
    drafts: str  # a value of KINDS
    lossless: bool
    rows: tuple[Certificate, ...]  # one for each case
    reads: str

    @property
    def distance(self) -> Fraction:
        """Largest total variation over the cases."""
        return max(row.total_variation for row in self.rows)

    @property
    def share(self) -> float:
        """Mean of accepted drafts over the optimum, of cases where something can be accepted."""
        return fmean(float(row.accepted / row.optimum) for row in self.rows if row.optimum)


class _Counted(Sequence):
    """Uniforms that remember which of them were read."""

    def __init__(self, size: int, value: float) -> None:
        self.size = size
        self.value = value
        self.read: set[int] = set()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self.size))]
        self.read.add(index)
        return self.value


def reads(accept: Any, cases: Sequence[ExactCase]) -> str:
    """Probe what a rule reads of the trees of its cases: accept uniforms, and the drafter's distributions."""
    most = 0
    needs_draft = False
    for draw in (draw for case in cases for draw in draws(case)):
        tree = DraftedTree.of(draw)
        other = DraftedTree(tree.tree, tree.prob_NV, tree.draft_prob_NV.flip(-1).roll(1, 0))
        for value in PROBES:
            uniforms = _Counted(len(draw.tokens), value)
            outcome = accept(tree, uniforms, 0.5)
            most = max(most, len(uniforms.read))
            needs_draft = needs_draft or accept(other, _Counted(len(draw.tokens), value), 0.5) != outcome
    names = ["the drafter's distributions"] if needs_draft else []
    names += ["a uniform for each draft"] if most > 0 else []
    return " and ".join(names) or "nothing more"


def built_in() -> Iterator[Entry]:
    """Certify the verifiers of the package."""
    rows = [row for row in exact.certify().rows if row.promise != "wrong"]
    for verifier in VERIFIERS:
        certificates = tuple(row for row in rows if row.verifier == verifier.name)
        is_lossless = verifier.promise == "lossless"
        yield Entry(verifier.name, KINDS[verifier.drafts], is_lossless, certificates, _built_in_reads(verifier))


def _built_in_reads(verifier: Verifier) -> str:
    if verifier.is_coupled:
        return "the noise that drew the drafts"
    return reads(verifier.accept, CASES[verifier.drafts])


def of_users(modules: Sequence[str]) -> Iterator[Entry]:
    """Certify rules of modules; InputError for one that cannot be certified."""
    for module in modules:
        for rule in exact.load_rules(module):
            report = exact.certify_rules([rule])
            unknown = (*report.inconsistent, *report.not_certified)
            require(
                not unknown, "rule", rule.name, f"one that `specsim certify` proves or refutes: {'; '.join(unknown)}"
            )
            names = {case.name for cases in CASES.values() for case in cases}
            rows = tuple(row for row in report.rows if row.case in names)
            if rows:
                yield Entry(rule.name, KINDS[rule.drafts], rule.lossless, rows, _own_reads(rule))


def _own_reads(rule: AcceptanceRule) -> str:
    def accept(draw: DraftedTree, uniforms: Any, final: float) -> Any:
        accepted = rule.accept(draw.tree, draw.prob_NV, draw.draft_prob_NV, uniforms, final)
        return list(accepted.path), int(accepted.bonus)

    return reads(accept, CASES[rule.drafts])


def page(entries: Sequence[Entry]) -> str:
    """Write the page: the rules of each kind of drafts in order, then a table for each case."""
    order = sorted(entries, key=_rank)
    parts = [HEAD]
    for drafts in dict.fromkeys(KINDS.values()):
        rows = [_cells(entry) for entry in order if entry.drafts == drafts]
        parts += [f"## Rules for {TITLES[drafts]}\n", *markdown(RULES, rows), ""]
    for case in dict.fromkeys(case.name for cases in CASES.values() for case in cases):
        rows = [_case_cells(entry, row) for entry in order for row in entry.rows if row.case == case]
        if rows:
            parts += [f"## {case}\n", *markdown(CASE, rows), ""]
    return "\n".join([*parts, FOOT])


def _rank(entry: Entry) -> tuple[bool, float | Fraction]:
    """Rank lossless rules by what they accept, then others by their distance."""
    return entry.distance > 0, entry.distance or -entry.share


def _cells(entry: Entry) -> tuple[str, ...]:
    is_lossless = entry.distance == 0
    share = f"{entry.share:.1%}" if is_lossless else "-"
    return (entry.name, "yes" if is_lossless else "no", as_text(entry.distance), share, entry.reads)


def _case_cells(entry: Entry, row: Certificate) -> tuple[str, ...]:
    share = f"{float(row.accepted / row.optimum):.1%}" if row.optimum and row.total_variation == 0 else "-"
    accepted = (f"{float(row.accepted):.4f}", f"{float(row.optimum):.4f}")
    return (entry.name, as_text(row.total_variation), *accepted, share)


def submitted(root: Path = ROOT) -> list[str]:
    """List the files of rules that the page always has."""
    return [str(path) for path in sorted((root / EXAMPLES).glob(RULE_FILES))]


def main(arguments: Sequence[str], root: Path = ROOT) -> None:
    """Write the page; a rule that cannot be certified is one sentence and exit status 2."""
    try:
        text = page([*built_in(), *of_users([*submitted(root), *arguments])])
    except InputError as error:
        print(f"specsim: {error}", file=sys.stderr)
        sys.exit(2)
    (root / "papers" / PAGE.name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
