"""The committed leaderboard is what the command writes, with lossless rules first."""

import pytest

from specsim.correctness.exact.cases import CASES
from specsim.correctness.exact.verifier import VERIFIERS
from specsim.maintain import leaderboard


@pytest.fixture(scope="module")
def entries():
    places = [str(leaderboard.ROOT / leaderboard.EXAMPLES)]
    return [*leaderboard.built_in(), *leaderboard.of_users(places)]


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
    ],
)
def test_what_a_rule_reads_is_found_by_probing(accept, said):
    assert leaderboard.reads(accept, CASES["chain"][0]) == said
