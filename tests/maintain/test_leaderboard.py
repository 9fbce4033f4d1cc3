"""The committed leaderboard is what the command writes, with lossless rules first."""

from pathlib import Path

import pytest

from papers.reproduction import leaderboard
from specsim.correctness.exact.cases import CASES
from specsim.correctness.exact.certificates import VERIFIERS

BOTH = "the drafter's distributions and a uniform for each draft"
HALF = """
from specsim import AcceptanceRule, Accepted
from specsim.reference.sampling import inverse_cdf

def half(tree, prob_NV, draft_prob_NV, uniforms, final_uniform):
    path = [0]
    for node in tree.chain():
        target_V, draft_V = prob_NV[path[-1]], draft_prob_NV[path[-1]]
        token = tree.tokens[node]
        kept_V = target_V.minimum(draft_V) / 2
        if not uniforms[len(path) - 1] * draft_V[token] < kept_V[token]:
            return Accepted(path, inverse_cdf((target_V - kept_V) / (target_V - kept_V).sum(), final_uniform))
        path.append(node)
    return Accepted(path, inverse_cdf(prob_NV[path[-1]], final_uniform))

rule = AcceptanceRule("half", "sampled", half)
"""


@pytest.fixture(scope="module")
def entries():
    return [*leaderboard.built_in(), *leaderboard.of_users(leaderboard.submitted())]


def test_the_committed_page_is_the_one_that_is_written(entries):
    assert leaderboard.PAGE.read_text(encoding="utf-8") == leaderboard.page(entries)


def test_lossy_rules_have_a_distance_and_lossless_ones_none(entries):
    lossless = {each.name for each in entries if each.distance == 0}
    promised = {each.name for each in VERIFIERS if each.promise == "lossless"}
    assert lossless == promised | {"K-SEQ"}
    assert all(0 < each.share <= 1 for each in entries if each.name in lossless)


@pytest.mark.parametrize(
    ("accept", "said"),
    [
        (lambda given, uniforms, final: ([0], 0), "nothing more"),
        (lambda given, uniforms, final: ([0], int(uniforms[1] > final)), "a uniform for each draft"),
        (lambda given, uniforms, final: ([0], given.draft_prob_NV.tolist()), "the drafter's distributions"),
        (lambda given, uniforms, final: ([0], uniforms[0] < given.draft_prob_NV[0, 0] / 2), BOTH),
    ],
)
def test_what_a_rule_reads_is_found_by_probing(accept, said):
    assert leaderboard.reads(accept, CASES["sampled"][:1]) == said


def submit(root, text):
    """Follow the page: a file of a rule, next to a page that exists."""
    for folder in (leaderboard.EXAMPLES, "papers"):
        (root / folder).mkdir(parents=True)
    (root / leaderboard.EXAMPLES / "half_rule.py").write_text(text)
    (root / "papers" / "leaderboard.md").write_text("as it was")
    return root / "papers" / "leaderboard.md"


def test_a_submitted_rule_stands_on_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(leaderboard, "built_in", lambda: iter(()))
    page = submit(tmp_path, HALF)
    leaderboard.main([], tmp_path)
    text = page.read_text()
    assert f"| half | yes | 0 | 40.9% | {BOTH} |" in text
    assert "| half | 0 | 0.4444 | 1.2222 | 36.4% |" in text


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("path = [0]", "path = [0, 7]", "half"),
        ("uniforms[len(path) - 1] *", "uniforms[0] * uniforms[len(path) - 1] *", "half"),
        ("AcceptanceRule(", "print(", "rule"),
    ],
)
def test_a_rule_that_cannot_be_certified_leaves_the_page(tmp_path, monkeypatch, capsys, old, new, said):
    monkeypatch.setattr(leaderboard, "built_in", lambda: iter(()))
    page = submit(tmp_path, HALF.replace(old, new))
    with pytest.raises(SystemExit) as exit_info:
        leaderboard.main([], tmp_path)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("specsim: ")
    assert said in error
    assert page.read_text() == "as it was"


def test_the_steps_of_the_page_name_what_exists():
    text = leaderboard.FOOT
    assert f"{leaderboard.EXAMPLES}/<NAME>{leaderboard.RULE_FILES.removeprefix('*')}" in text
    assert "python -m papers.reproduction.leaderboard" in text
    assert [Path(place).name for place in leaderboard.submitted()] == ["fly_rule.py", "my_rule.py"]
