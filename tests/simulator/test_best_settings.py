"""The best setting of every load: separate loads, averaged seeds, and the cheapest of equal settings."""

import json

import pytest

from specsim.simulator.cell import Cell
from specsim.simulator.results import METRICS
from specsim.simulator.sweep import CHOSEN, FIELDS, GIVEN, rank_by_load

THROUGHPUT, LATENCY = "Output Throughput (tok/s)", "Mean E2E Latency (ms)"


def row(throughput: float, latency: float = 1.0, error: str | None = None, **values) -> dict:
    figures = dict.fromkeys(METRICS, None if error else 5.0) | {THROUGHPUT: throughput, LATENCY: latency}
    written = {
        name: json.dumps(value) if isinstance(value, (dict, tuple)) else value
        for name, value in Cell(**values).to_json().items()
    }
    return {**written, **figures, "error": error}


def settings(ranking) -> list[int]:
    return [each["num_steps"] for each in ranking]


def test_every_field_is_chosen_given_or_the_seed():
    assert sorted((*CHOSEN, *GIVEN, "seed")) == sorted(FIELDS)


def test_every_load_has_a_ranking_of_its_own():
    rows = [
        row(100 * clients + 10 * steps * (3 - clients), concurrency=clients, num_steps=steps)
        for clients in (1, 5)
        for steps in (0, 2)
    ]
    quiet, busy = rank_by_load(rows)
    assert (settings(quiet), quiet[0]["concurrency"]) == ([2, 0], 1)
    assert (settings(busy), busy[0]["concurrency"]) == ([0, 2], 5)


def test_other_options_of_the_server_are_settings_too():
    rows = [row(100, schedule="sync"), row(200, prefill="first"), row(150, page_size=1)]
    (ranking,) = rank_by_load(rows)
    assert [each[THROUGHPUT] for each in ranking] == [200, 150, 100]


def test_seeds_are_averaged():
    rows = [
        row(speed, num_steps=steps, seed=seed)
        for steps, speeds in ((1, (100, 300)), (2, (150, 200)))
        for seed, speed in enumerate(speeds)
    ]
    (ranking,) = rank_by_load(rows)
    assert settings(ranking) == [1, 2]
    assert [each[THROUGHPUT] for each in ranking] == [200, 175]


def test_at_a_rate_the_lowest_latency_is_best():
    rows = [row(100.0, 9.0, rate=3.0, num_steps=1), row(101.0, 12.0, rate=3.0, num_steps=2)]
    assert settings(rank_by_load(rows)[0]) == [1, 2]


@pytest.mark.parametrize(
    ("rows", "order"),
    [
        ([row(100.0, num_steps=4), row(99.1, num_steps=2), row(98.9, num_steps=1)], [2, 4, 1]),
        ([row(100.0, num_steps=1), row(99.9, num_steps=0, num_draft_tokens=9)], [0, 1]),
        ([row(100.0, topk=2, num_steps=3, num_draft_tokens=8), row(99.9, num_steps=4)], [4, 3]),
        (
            [row(100.0, topk=2, num_steps=4, num_draft_tokens=8), row(99.9, topk=2, num_steps=3, num_draft_tokens=8)],
            [3, 4],
        ),
    ],
)
def test_within_one_percent_the_cheapest_is_best(rows, order):
    assert settings(rank_by_load(rows)[0]) == order


def test_impossible_cells_are_left_out():
    assert rank_by_load([row(0, error="num_steps is 9", num_steps=9)]) == []
    (ranking,) = rank_by_load([row(0, error="num_steps is 9", num_steps=9), row(5, num_steps=2)])
    assert settings(ranking) == [2]
