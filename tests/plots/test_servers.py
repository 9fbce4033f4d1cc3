"""Pictures of simulated servers show the figures of runs, distributions and sweeps."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from specsim import SpecConfig, plots
from specsim.core import metrics
from specsim.core.config import ServingConfig
from specsim.core.errors import InputError
from specsim.plots.servers import front, request_speed, server_speed
from specsim.simulator.acceptance import Option, PerPosition, accept_length, iid
from specsim.simulator.cell import Cell
from specsim.simulator.server import simulate
from specsim.simulator.sweep import Results, cells, sweep
from specsim.simulator.workload import closed_loop


class Seconds:
    """Every round takes one second, and a prefill none."""

    def prefill(self, new_tokens, contexts):
        return 0.0

    def round(self, contexts, config):
        return 1.0


def artists(figure, start: str) -> dict:
    found = {artist.get_gid(): artist for artist in figure.axes[0].get_children() if artist.get_gid()}
    return {gid: artist for gid, artist in found.items() if gid.startswith(start)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    results = Results(tmp_path_factory.mktemp("sweep") / "out.sqlite")
    base = Cell(requests=8, prompt_tokens=20, output_tokens=16)
    with ThreadPoolExecutor(1) as executor:
        sweep(cells(base, {"num_steps": [0, 2, 9], "concurrency": [1, 8]}), results, executor)
    return results.rows()


def test_pareto_draws_every_cell_and_rings_the_front(rows):
    figure = plots.pareto(rows)
    good = [row for row in rows if row["error"] is None]
    lines = artists(figure, "setting:")
    assert set(lines) == {"setting:no drafts", "setting:chain of 2"}
    drawn = {tuple(point) for line in lines.values() for point in np.transpose(line.get_data()).tolist()}
    assert drawn == {(request_speed(row), server_speed(row)) for row in good}
    ringed = {gid.split(":")[1] for gid in artists(figure, "front:")}
    beaten = {
        row["key"]
        for row in good
        if any(
            request_speed(other) >= request_speed(row) and server_speed(other) >= server_speed(row)
            for other in good
            if other is not row
        )
    }
    assert ringed == {row["key"] for row in good} - beaten == {row["key"] for row in front(good)}
    assert sorted(text.get_text() for text in figure.axes[0].texts) == sorted(str(row["concurrency"]) for row in good)
    trees = artists(plots.pareto([row | {"topk": 4, "num_draft_tokens": 8} for row in good]), "setting:")
    assert set(trees) == {"setting:no drafts", "setting:tree 4/2/8"}
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("settings", 0)):
        plots.pareto([row for row in rows if row["error"]])


def test_pareto_leaves_out_requests_without_a_tpot(rows):
    first, *others = [row for row in rows if row["error"] is None]
    one_token = first | {"Mean TPOT (ms)": None}
    assert artists(plots.pareto([one_token, *others]), "").keys() == artists(plots.pareto(others), "").keys()
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("settings", 0)):
        plots.pareto([one_token])


def test_positions_draw_rates_and_name_accept_lengths():
    distributions = {"even": iid(0.5, 3), "given": PerPosition((0.9, 0.1))}
    figure = plots.positions(distributions)
    for name, distribution in distributions.items():
        (line,) = artists(figure, f"distribution:{name}").values()
        assert line.get_ydata() == pytest.approx([1, *distribution.rates()])
        assert any(text.get_text() == f"{name}: {accept_length(distribution):.2f}" for text in figure.axes[0].texts)
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("distributions", 0)):
        plots.positions({})


def test_measured_acceptance_is_drawn_by_position():
    results = {"tree": metrics.acceptance([3, 0, 1, 3], 3, 8), "no drafts": metrics.acceptance([0, 0], 0, 1)}
    figure = plots.acceptance(results)
    (line,) = artists(figure, "distribution:tree").values()
    assert list(line.get_ydata()) == [1, 0.75, 0.5, 0.5]
    assert {text.get_text() for text in figure.axes[0].texts} == {"tree: 2.75", "no drafts: 1.00"}


def test_names_of_distributions_stand_apart():
    distributions = {name: iid(rate, 3) for name, rate in (("a", 0.5), ("b", 0.5), ("c", 0.51), ("d", 0.0))}
    heights = sorted(text.xy[1] for text in plots.positions(distributions).axes[0].texts)
    assert min(np.diff(heights)) > 0.05


def test_equal_throughput_and_more_per_request_wins():
    rows = [{"Mean TPOT (ms)": tpot, "Output Throughput (tok/s)": 100.0} for tpot in (20.0, 10.0)]
    assert front(rows) == rows[1:]


def run_of(count):
    """Requests that arrive together, for two places."""
    option, serving = Option(SpecConfig(1, 1, 2), iid(1.0, 1)), ServingConfig("sync", 2, 1000)
    return simulate(Seconds(), option, closed_loop(count, count, 5, 5), serving, prefill="beside")


def test_a_batch_of_more_than_200_requests_is_drawn_in_parts():
    run = run_of(201)
    assert len(artists(plots.batch(run, 0, 199), "decode:")) == 200
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("requests", 201)):
        plots.batch(run)


def test_a_preemption_is_a_cross():
    run = run_of(4)
    assert artists(plots.batch(run), "preempted:") == {}
    preempted = replace(run, preemptions=np.array([0, 0, 2, 0]))
    assert set(artists(plots.batch(preempted), "preempted:")) == {"preempted:2"}


def test_a_batch_is_drawn_in_seconds():
    run = run_of(4)
    figure = plots.batch(run, 1, 3)
    bars = {gid: (bar.get_x(), bar.get_x() + bar.get_width()) for gid, bar in artists(figure, "").items()}
    assert bars == {f"{kind}:{number}": span for number in (1, 2, 3) for kind, span in SPANS[number].items()}
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("requests", 0)):
        plots.batch(run, 9)


# Two places; a request takes two rounds of two tokens after its first.
SPANS = {
    1: {"wait": (0, 0), "decode": (0, 2)},
    2: {"wait": (0, 2), "decode": (2, 4)},
    3: {"wait": (0, 2), "decode": (2, 4)},
}


def test_a_chart_says_in_words_where_its_lines_lead():
    figure = plots.positions({"even": iid(0.5, 2)})
    text = "accepted by position, and tokens a round. share of the rounds against draft. even: from 1 to 0.25."
    assert figure.alternative == text
    assert figure._repr_png_()[1] == {"alt": text}


def test_a_roofline_lies_on_or_above_the_bound_of_the_gpu():
    scenario = Cell().scenario
    figure = plots.roofline(scenario, 512, {"batch of 16": 16, "trees of 8": 128})
    own, bound = (artists(figure, f"roofline:{name}")[f"roofline:{name}"] for name in ("forward pass", "bound"))
    rows, spent = own.get_data()
    least = bound.get_ydata()
    assert rows[0] == 1
    assert rows[-1] == 512
    assert (np.asarray(spent) >= np.asarray(least)).all()
    weights = scenario.model.bytes - 2 * scenario.model.embedding_weights
    assert least[0] == pytest.approx(1e3 * weights / scenario.hardware.bandwidth, rel=0.01)
    assert set(artists(figure, "mark:")) == {"mark:batch of 16", "mark:trees of 8"}


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: plots.roofline(None), "scenario"),
        (lambda: plots.roofline(Cell().scenario, 8, {"wide": 9}), "wide"),
        (lambda: plots.divergence("verify"), "difference"),
        (lambda: plots.batch(None), "run"),
        (lambda: plots.pareto(None), "rows"),
        (lambda: plots.pareto([{"model": "x"}]), "rows"),
        (lambda: plots.positions(None), "distributions"),
        (lambda: plots.positions({"a": 0.5}), "distributions"),
        (lambda: plots.acceptance({}), "results"),
        (lambda: plots.acceptance({"a": 0.5}), "results"),
        (lambda: plots.acceptance({"a": metrics.acceptance([], 3, 4)}), "a"),
        (lambda: plots.speedup(None), "scenarios"),
        (lambda: plots.speedup({"a": None}), "scenarios"),
    ],
)
def test_what_is_no_server_is_not_drawn(draw, name):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        draw()
