"""The suite serving on Triton's interpreter: structure, equality checks, predictions, lengths, busy shares."""

import itertools
from contextlib import contextmanager
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from specsim.bench import closed_loop, throughput
from specsim.bench.clock import covered
from specsim.bench.closed_loop import Builds, ClosedLoop, Figures, check_schedules, check_served, figures_of, noted
from specsim.bench.predicted import FREE, Predictions, ServedLoad, costs_of
from specsim.bench.request_lengths import FILE, Lengths, drawn, kept_lengths, text_of
from specsim.bench.row import OURS
from specsim.bench.scene import tree_of
from specsim.core.config import ServingConfig, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.generation import load_engine
from specsim.simulator.calibration.posterior import most_informative
from specsim.simulator.hardware import hardware, reported_hardware
from specsim.simulator.model import model

# Their tensors are on the CPU, where kernels run only if they are interpreted.
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of this machine run on its GPU")
TREE = SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, page_size=4, max_len=48)
LENGTHS = Lengths(np.array([5, 3, 9, 4]), np.array([6, 4, 3, 5]))
OPTIONS = EngineOptions("fast", torch.float32, "cpu", "round")


@pytest.fixture
def pair(monkeypatch):
    for name, value in {"PROMPT": 5, "CHECKED": 2, "CHUNK": 8, "RATES": (0.75, 0.5)}.items():
        monkeypatch.setattr(throughput, name, value)
    return synthetic_pair("eagle3", "qwen3", num_layers=1)


@pytest.fixture
def loop(pair):
    engine = load_engine(pair, TREE, EngineOptions(), acceptance=SyntheticAcceptance((0.75, 0.5)))
    return ClosedLoop.of(engine, LENGTHS, 2, 8)


@pytest.fixture
def fast_loop(pair):
    engine = load_engine(pair, TREE, OPTIONS, acceptance=SyntheticAcceptance((0.75, 0.5)))
    return ClosedLoop.of(engine, LENGTHS, 2, 8)


def test_the_request_file_is_drawn_from_its_header():
    assert FILE.read_text(encoding="utf-8") == text_of(drawn())
    kept = kept_lengths()
    assert len(kept) == 512
    assert kept.prompt_tokens.max() <= 1024
    assert kept.output_tokens.max() <= 256
    assert abs(kept.prompt_tokens.mean() / 161 - 1) < 0.1
    assert abs(kept.output_tokens.mean() / 84 - 1) < 0.1


def test_overlapping_spans_count_once():
    assert covered([(0, 10), (5, 8), (20, 30), (25, 35)]) == (25, 35)
    assert covered([(20, 30), (0, 10)]) == (20, 30)
    assert covered([]) == (0, 0)


def test_figures_by_hand():
    found = Figures.of(np.array([5, 1]), np.array([0.0, 1.0]), np.array([1.0, 3.0]), np.array([3.0, 3.0]))
    assert asdict(found) == {"tokens_per_s": 2.0, "tpot_s": 0.5, "ttft_s": 1.5}


def test_clients_wait_for_their_last_request(loop):
    requests = loop.run("sync", 2, 4)
    assert [len(request.token_ids) for request in requests] == LENGTHS.output_tokens.tolist()
    ends = [request.emissions[-1].seconds for request in requests]
    assert requests[2].arrived.seconds > min(ends[:2])
    assert loop.pools.free_slots == loop.pools.num_slots
    figures = figures_of(requests)
    assert figures.tokens_per_s > 0
    assert figures.ttft_s > 0


def test_other_tokens_or_drafts_fail_the_check(loop):
    found, same = loop.run("sync", 2, 4), loop.run("overlap", 2, 4)
    assert check_served("requests", found, same, with_tokens=True).passed
    same[1].token_ids[2] += 1
    assert "tokens, entry" in check_served("requests", found, same, with_tokens=True).difference
    assert check_served("requests", found, same, with_tokens=False).passed
    same[1].accepted[0] += 1
    assert "accepted" in check_served("requests", found, same, with_tokens=False).difference


def test_rounds_of_both_schedules_are_compared(loop, monkeypatch):
    assert check_schedules(loop, 2, 2, 5).passed
    runs = iter([5, 6])  # other prompts in the second schedule
    decoding = ClosedLoop.decoding
    monkeypatch.setattr(
        ClosedLoop,
        "decoding",
        lambda self, schedule, count, steps, _: decoding(self, schedule, count, steps, next(runs)),
    )
    assert not check_schedules(loop, 2, 2, 5).passed


@interpreted
def test_only_a_run_that_builds_nothing_counts(loop, fast_loop, monkeypatch):
    assert "round of 2" in _built(fast_loop)
    assert _built(fast_loop) == []
    left = [3]

    @contextmanager
    def noted(engine):
        builds = Builds()
        yield builds
        left[0] -= 1
        builds.kernels += ["_a_kernel"] * max(0, left[0])

    monkeypatch.setattr(closed_loop, "noted", noted)
    run = closed_loop.warmed_run(loop, "sync", 2, 3)
    assert run.check.passed
    assert len(run.requests) == 3
    assert "run 2: 0 graphs, 1 kernels" in run.note
    left[0] = 9
    run = closed_loop.warmed_run(loop, "sync", 2, 3)
    assert not run.check.passed
    assert "_a_kernel" in run.check.difference


def test_a_run_that_obtains_memory_counts_only_as_the_last(loop, monkeypatch):
    def obtained(*blocks):
        left = iter(blocks)

        @contextmanager
        def noted(engine):
            builds = Builds()
            yield builds
            builds.blocks = next(left)

        monkeypatch.setattr(closed_loop, "noted", noted)
        run = closed_loop.warmed_run(loop, "sync", 2, 3)
        assert run.check.passed
        return run.note

    assert obtained(5, 2, 0).startswith("0 blocks")
    assert "run 2: 0 graphs, 0 kernels, 2 blocks" in obtained(5, 2, 0)
    assert obtained(*[1] * closed_loop.MOST_RUNS).startswith("1 blocks")


def _built(loop) -> list[str]:
    with noted(loop.engine) as builds:
        loop.run("sync", 2, 3)
    return builds.delays


@interpreted
def test_kernels_are_noted_when_they_are_loaded(fast_loop):
    from triton import knobs

    with noted(fast_loop.engine) as builds:
        knobs.runtime.kernel_load_end_hook(None, None, "_a_kernel", None, "digest")
    assert builds.kernels == ["_a_kernel"]
    knobs.runtime.kernel_load_end_hook(None, None, "_another", None, "digest")
    assert builds.kernels == ["_a_kernel"]


@interpreted
def test_rows_have_figures_after_their_checks(pair):
    measured = list(throughput.measured_loads(pair, TREE, OPTIONS, {1: 2, 2: 3}, LENGTHS))
    assert [each.load.label for each in measured] == [
        f"(2, 2, 4), {count}, {schedule}" for count in (2, 1) for schedule in ("sync", "overlap")
    ]
    rows = list(throughput.rows_of(measured, None))
    assert all(row.passed for row in rows)
    assert rows[0].setting == {"tree": "(2, 2, 4)", "concurrency": 2, "schedule": "sync", "requests": 3}
    assert {"tokens_per_s", "tpot_ms", "ttft_ms"} == rows[0].figures.keys()
    gain = rows[1].figures["tokens_per_s"] / rows[0].figures["tokens_per_s"]
    assert rows[1].figures["gain_over_sync"] == pytest.approx(gain)
    assert rows[0].timings[OURS].median_us == pytest.approx(1e6 / rows[0].figures["tokens_per_s"])
    failed = [replace(each, check=replace(each.check, error=1.0)) for each in measured]
    assert not any(row.timings or row.figures for row in throughput.rows_of(failed, None))


def _loads(costs, values, sizes=(1, 16, 64)) -> list[ServedLoad]:
    """Simulate loads under known parameters, in place of measurements."""
    loads = []
    for config, size, schedule in itertools.product(
        (throughput.PLAIN, throughput.SPECULATIVE), sizes, throughput.SCHEDULES
    ):
        serving = ServingConfig(schedule, size, 10**6, throughput.CHUNK)
        rates = (0.85, 0.65, 0.5)[: config.num_steps]
        label = f"{tree_of(config)}, {size}, {schedule}"
        own = ServedLoad.of(label, Figures(1.0, 1.0, 1.0), config, serving, kept_lengths().first(2 * size), rates)
        efficiency = replace(costs[schedule].efficiency, **values)
        figures = own.predict(replace(costs[schedule], efficiency=efficiency), None, None)
        loads.append(ServedLoad.of(label, Figures(**figures), config, serving, own.lengths, rates))
    return loads


def test_a_profile_fitted_to_three_loads_predicts_others():
    costs = costs_of(hardware("H200"), model("llama-3-8b"), 32000)
    known = {"bandwidth": 0.85, "compute": 0.7, "gap": 4e-6, "launch": 4e-5, "host": 3e-4}
    loads = _loads(costs, known)
    predicted = Predictions.of(costs, loads, most_informative(costs, loads, throughput.FITTED, FREE))
    assert predicted.posterior.names == FREE
    held_out = [load for load in loads if load.label not in predicted.fitted]
    assert len(held_out) == len(loads) - 3
    errors = predicted.errors(held_out)
    assert np.abs(errors["tokens_per_s"]).max() < 0.05
    assert np.abs(errors["tpot_s"]).max() < 0.05


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB-SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB-SXM"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA H100 PCIe", None),  # of another bandwidth
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("none of these", None),
    ],
)
def test_gpus_are_found_by_the_name_that_a_driver_reports(reported, name):
    found = reported_hardware(reported)
    assert (None if found is None else found.name) == name
