"""Workloads of request files: windows, times, rotation of conversations, and prefixes as the server reuses them."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from specsim import SamplingParams, SpecConfig
from specsim.core.config import ServingConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.correctness.differential.pairs import make_pair
from specsim.serving.generation import load_engine
from specsim.serving.requests import make_request
from specsim.serving.scheduler import Scheduler
from specsim.simulator.cell import Cell
from specsim.simulator.request_file import Replay, RequestFile, Turn, in_order, replay

SINGLES = RequestFile("test", tuple((Turn(10 + number, 5),) for number in range(100)), np.arange(100.0) ** 1.5)
CHATS = RequestFile(
    "test", (((Turn(4, 3), Turn(9, 2, 7), Turn(20, 1, 11))), (Turn(5, 5),), (Turn(6, 2), Turn(9, 9, 8)))
)


def test_a_window_has_neighbours_and_starts_at_0():
    windows = [replay(SINGLES, Replay(12, seed=seed)) for seed in range(8)]
    for work in windows:
        first = int(work.prompt_tokens[0]) - 10
        assert work.prompt_tokens.tolist() == list(range(10 + first, 22 + first))
        assert work.arrivals_s == pytest.approx(SINGLES.arrivals_s[first : first + 12] - SINGLES.arrivals_s[first])
    assert len({int(work.prompt_tokens[0]) for work in windows}) > 4
    assert (replay(SINGLES, Replay(500, seed=3)).prompt_tokens == np.arange(10, 110)).all()


def test_a_rate_scales_the_times_of_the_file():
    own, scaled = replay(SINGLES, Replay(100)), replay(SINGLES, Replay(100, rate=7.0))
    assert scaled.arrivals_s == pytest.approx(own.arrivals_s * (99 / 7 / own.arrivals_s[-1]))


def test_without_times_there_are_clients_or_a_rate():
    assert replay(CHATS, Replay(9, concurrency=2)).concurrency == 2
    at_rate = replay(CHATS, Replay(9, rate=2.0))
    assert at_rate.arrivals_s.shape == (6,)
    assert at_rate.concurrency is None
    with pytest.raises(InputError, check=lambda error: error.name == "concurrency"):
        replay(CHATS, Replay(9))


def test_conversations_take_turns_in_rotation():
    first, second, third = CHATS.conversations
    assert list(in_order(CHATS, 2).turns) == [first[0], second[0], first[1], third[0], first[2], third[1]]
    assert list(in_order(CHATS, 1).turns) == [*first, *second, *third]
    assert list(in_order(CHATS, 64).turns) == [first[0], second[0], third[0], first[1], third[1], first[2]]


def test_requests_without_turns_stay_in_order():
    assert [turn.prompt_tokens for turn in in_order(SINGLES, 7).turns] == list(range(10, 110))


def test_turns_know_the_place_of_the_turn_before():
    assert in_order(CHATS, 2).before.tolist() == [-1, -1, 0, -1, 2, 3]
    assert in_order(CHATS, 1).before.tolist() == [-1, 0, 1, -1, -1, 4]
    assert in_order(SINGLES, 7).before.max() == -1


def test_what_was_used_longest_ago_is_evicted():
    """Each of the conversations has 40 tokens at its second turn, and the two others come in between."""
    chats = RequestFile("test", ((Turn(10, 10), Turn(30, 10, 20)),) * 3)
    for slots, expected in ((None, 16), (1000, 16), (60, 16), (53, 12), (47, 4), (20, 0)):
        cached = replay(chats, Replay(6, concurrency=1, page_size=4, slots=slots)).cached_columns
        assert cached.tolist() == [0, 0, 0, expected, *cached[4:]]
    cached = replay(chats, Replay(6, concurrency=1, page_size=4, slots=70)).cached_columns
    assert cached.tolist() == [0, 0, 0, 16, 8, 0]


def test_a_cell_with_little_memory_finds_fewer_prefixes(tmp_path):
    path = tmp_path / "chats.json"
    messages = [{"from": ("human", "gpt")[turn % 2], "value": "x" * 16000} for turn in range(6)]
    path.write_text(json.dumps([messages] * 40))
    found = []
    for memory_share in (0.9, 0.25):
        cell = Cell(trace=str(path), requests=120, concurrency=1, memory_share=memory_share)
        scenario = cell.serving(cell.option(cell.config))
        found.append(int(scenario.workload.cached_columns.sum()))
        assert (scenario.workload.prompt_tokens == cell.workload.prompt_tokens).all()
    assert found[0] > found[1]


def test_nothing_is_cached_without_a_prefix_cache():
    cached = replay(CHATS, Replay(9, concurrency=2, page_size=1)).cached_columns
    assert cached.tolist() == [0, 0, 0, 6, 7, 10]
    assert not replay(CHATS, Replay(9, concurrency=2)).cached_columns.any()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("schedule", ["sync", "overlap"])
@pytest.mark.parametrize(("prompt", "new", "more"), [(9, 12, 5), (16, 16, 1), (3, 1, 1), (20, 13, 14)])
def test_cached_columns_are_those_the_server_reuses(page_size, schedule, prompt, new, more):
    pair = make_pair("eagle-noisy")
    config = SpecConfig(1, 2, 3, page_size=page_size, max_len=128)
    serving = ServingConfig(schedule, 4, 1024, prefix_cache=True)
    scheduler = Scheduler(load_engine(pair, config, EngineOptions("reference", torch.float64)), serving)
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    with torch.inference_mode():
        scheduler.submit(
            first := make_request(pair.target.config, None, 0, [7 * i % 47 for i in range(prompt)], params)
        )
        scheduler.run()
        ids = [*first.prompt_ids, *first.token_ids, *range(1, more + 1)]
        scheduler.submit(second := make_request(pair.target.config, None, 1, ids, replace(params, max_new_tokens=2)))
        scheduler.run()
    chat = RequestFile("test", ((Turn(prompt, new), Turn(prompt + new + more, 2, prompt + new)),))
    work = replay(chat, Replay(2, concurrency=1, page_size=page_size))
    assert work.cached_columns.tolist() == [0, second.num_reused]
