"""Sections of a round that one graph captures."""

import pytest

from specsim.core.config import SpecConfig
from specsim.fast.runtime.sections import RECORDED, ROUND, Section, recorded

FINISH = SpecConfig(topk=2, num_steps=3, num_draft_tokens=5)
MOVING = SpecConfig(topk=2, num_steps=3, num_draft_tokens=5, release="round")


@pytest.mark.parametrize("graph", ["phase", "round"])
@pytest.mark.parametrize("config", [FINISH, MOVING])
def test_graphs_of_a_round_hold_its_sections_in_order(graph, config):
    assert sum(recorded(graph, config), ()) == ROUND


@pytest.mark.parametrize("graph", RECORDED)
def test_no_graph_continues_where_pages_move(graph):
    for sections in recorded(graph, MOVING):
        assert not {Section.DRAFT, Section.VERIFY} & set(sections[:-1])


def test_plain_decoding_records_no_graph_of_nothing():
    plain = SpecConfig.plain()
    assert recorded("step", plain)[0] == (Section.BUILD_TREE,)
