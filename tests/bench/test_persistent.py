"""Rows that compare the persistent forward with the kernels: both are checked, and a wrong one has no time."""

from dataclasses import replace

import pytest
import torch

from specsim.bench import persistent, rounds, scale
from specsim.bench.persistent import KERNELS, PLAIN, SPECULATIVE, TimedRounds, _rows_of
from specsim.bench.roofline import Peaks
from specsim.bench.row import OURS, Timing
from specsim.correctness.differential.pairs import rounded
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving import generation

PEAKS = Peaks(1e12, 1e12, 1e14)
# Their tensors are on the CPU, where kernels run only if they are interpreted.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of this machine run on its GPU")


@pytest.fixture
def engines(monkeypatch):
    """Collect the engines that are made; all of them run kernels, as a CPU has no persistent forward."""
    made = {}

    def load_engine(pair, config, options):
        made[options.forward] = generation.load_engine(pair, config, replace(options, device="cpu", forward="kernels"))
        return made[options.forward]

    monkeypatch.setattr(persistent, "load_engine", load_engine)
    monkeypatch.setattr(scale, "replayed", lambda *_: Timing(100.0, 1.0, 9))
    monkeypatch.setattr(rounds, "launched", lambda *_: Timing(90.0, 1.0, 9))
    return made


def pair():
    return rounded(synthetic_pair("eagle3", "llama"), torch.bfloat16)


def test_rounds_and_forwards_are_checked_and_timed(engines):
    rows = list(_rows_of(TimedRounds("EAGLE-3 round", SPECULATIVE, ((1, 20), (1, 37)), 1.28), pair(), PEAKS))
    assert engines.keys() == {"persistent", "kernels"}
    assert [(row.name, row.setting["L"]) for row in rows] == [
        (name, length) for length in (20, 37) for name in ("EAGLE-3 round", "verify forward")
    ]
    for row in rows:
        assert row.passed, row.checks
        assert row.timings.keys() == {OURS, KERNELS}
        assert [target.limit for target in row.targets] == [1.28 if row.name == "EAGLE-3 round" else 1.25]


def test_plain_decoding_has_rounds_only(engines):
    plain = replace(pair(), drafter=None)
    rows = list(_rows_of(TimedRounds("plain decode", PLAIN, ((1, 20),), 1.17), plain, PEAKS))
    assert [(row.name, row.passed) for row in rows] == [("plain decode", True)]


def test_batches_are_timed_without_a_target(engines):
    (row,) = _rows_of(TimedRounds("EAGLE-3 round", SPECULATIVE, ((2, 20),)), pair(), PEAKS)
    assert (row.setting["requests"], row.passed, row.targets) == (2, True, ())


def test_a_wrong_forward_has_no_time(engines, monkeypatch):
    load_engine = persistent.load_engine

    def with_another_norm(pair, config, options):
        if options.forward == "persistent":
            tensors = dict(pair.target.tensors) | {"model.norm.weight": pair.target.tensors["model.norm.weight"] * 1.5}
            pair = replace(pair, target=replace(pair.target, tensors=tensors))
        return load_engine(pair, config, options)

    monkeypatch.setattr(persistent, "load_engine", with_another_norm)
    row = next(_rows_of(TimedRounds("plain decode", PLAIN, ((1, 20),), 1.17), replace(pair(), drafter=None), PEAKS))
    assert not row.checks[OURS].passed
    assert row.timings.keys() == {KERNELS}
