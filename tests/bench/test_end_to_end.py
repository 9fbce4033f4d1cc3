"""Generation end to end on Triton's interpreter: equal tokens are timed, injected differences are found."""

from functools import partial

import pytest
import torch

from specsim.bench import end_to_end
from specsim.bench.baselines import Ours
from specsim.bench.roofline import Peaks
from specsim.bench.row import OURS
from specsim.correctness.differential.pairs import rounded
from specsim.models.synthetic_pair import synthetic_pair

# Their tensors are on the CPU, where kernels run only if they are interpreted.
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of this machine run on its GPU")
PEAKS = Peaks(read=1e12, copy=1e12, dense=1e12)
PROMPT = [5, 9, 2, 11]


class Wrong:
    """Transformers with another last token in one mode."""

    def __init__(self, pair, prompt, count, dtype, device) -> None:
        self._ours = Ours(pair, end_to_end.PLAIN, prompt, count, dtype, device)
        self.first_layer = self.model = None

    def __call__(self, assistant=None, **options) -> list[int]:
        tokens = self._ours()
        return [*tokens[:-1], (tokens[-1] + 1) % 48] if options else tokens


@interpreted
def test_both_rows_have_the_times_of_equal_baselines(monkeypatch):
    monkeypatch.setattr(end_to_end, "SAMPLES", 1)
    monkeypatch.setattr(end_to_end, "TransformersModel", Wrong)
    pair = rounded(synthetic_pair("eagle3", "llama"), torch.bfloat16)
    early, plain, drafting = end_to_end.end_to_end_rows("tiny", pair, PROMPT, 6, PEAKS)
    static = "transformers, static cache, compiled"
    assert static not in early.checks
    assert not early.targets
    assert early.timings == plain.timings
    assert plain.checks[OURS].passed
    assert not plain.checks[static].passed
    assert static not in plain.timings
    assert any(f"{static}: the first 5 of 6 tokens are ours" in note for note in plain.notes)
    assert drafting.checks[OURS].passed
    theirs = {who: timing for who, timing in plain.timings.items() if who != OURS}
    assert theirs == {who: timing for who, timing in drafting.timings.items() if who != OURS}
    least = min(timing.median_us for timing in theirs.values())
    assert plain.targets[0].value == plain.ours_us / least
    assert plain.targets[0].limit == 1 / 1.8
    assert drafting.targets[0].value == drafting.ours_us / least


@pytest.mark.parametrize(
    ("accepted", "tokens", "passes"), [((4, 2, 3), 9, True), ((4, 2, 3), 8, False), ((1,) * 9, 9, False)]
)
def test_a_synthetic_run_accepts_what_its_rates_say(accepted, tokens, passes):
    ours = Ours.__new__(Ours)
    ours.count, ours.accepted = 9, list(accepted)
    assert end_to_end._has_accepted(ours, [0] * tokens).passed is passes


def test_no_target_without_a_baseline():
    targets = partial(end_to_end._gain(2.0), bound=None, peaks=PEAKS)
    assert targets({OURS: 1.0}) == []
    assert targets({OURS: 1.0, "transformers, eager": 4.0})[0].value == 0.25
