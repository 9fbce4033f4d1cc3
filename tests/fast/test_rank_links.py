"""Choice of the way between GPUs by measured times."""

import torch

from specsim.core.phase_board import PhaseBoard
from specsim.core.rank_group import RankGroup
from specsim.fast.model.rank_links import Links, LinkTime, linked, slowest

TIMES = (LinkTime(8, 5.0, 3.0, True), LinkTime(16, 6.0, 6.0, True), LinkTime(32, 7.0, 9.0, True))


def test_the_slowest_rank_decides():
    other = (TIMES[0], TIMES[1]._replace(peers=6.5), TIMES[2]._replace(library=20.0))
    assert Links("", TIMES).most_bytes == 16
    assert Links("", slowest([TIMES, other])).most_bytes == 8


def test_nothing_is_linked_where_a_sum_differs():
    wrong = (*TIMES[:2], TIMES[2]._replace(is_equal=False))
    assert Links("", slowest([TIMES, wrong])).most_bytes == 0


def test_ranks_of_a_cpu_stay_as_they_are():
    ranks = RankGroup(0, 2, PhaseBoard())
    assert linked(ranks, torch.device("cpu")) is ranks
    assert linked(None, torch.device("cpu")) is None
