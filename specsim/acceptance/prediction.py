"""Accept lengths predicted from one recording, compared with measured ones."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
from rich.console import Console
from tqdm.auto import tqdm

from specsim.acceptance.record_prediction import RECORDED, SETTINGS
from specsim.acceptance.recording import most_positions, record
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.display import figure, heading, paragraph, print_table, setting
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import require
from specsim.core.pair import Pair
from specsim.serving.generation import generate
from specsim.simulator.acceptance import accept_length

TARGET_ERROR = 0.03


@dataclass(frozen=True, slots=True)
class LengthPrediction:
    """Accept lengths of one setting, bonus included."""

    config: SpecConfig
    predicted: float  # predicted accept length, in tokens per round, bonus token included
    measured: float  # measured accept length
    rounds: int  # rounds of the measured run

    @property
    def error(self) -> float:
        """Error of the prediction, relative to the run."""
        return self.predicted / self.measured - 1


class Seconds(NamedTuple):
    """Wall-clock seconds of the parts of a prediction; an array in JSON."""

    recording: float
    replaying: float
    running: float


@dataclass(frozen=True, slots=True)
class LengthPredictions:
    """Predictions of many settings from one recording, and their measured accept lengths."""

    recorded: SpecConfig
    num_prompts: int  # number of prompts
    max_new_tokens: int  # new tokens of each prompt
    rows: tuple[LengthPrediction, ...]
    shares: tuple[tuple[float, ...], ...]  # by depth and rank (simulator.Candidates.shares), for plans and simulations
    seconds: Seconds  # seconds of the recording, the predictions and the runs

    @property
    def mean_error(self) -> float:
        """Mean of the absolute errors."""
        return sum(abs(row.error) for row in self.rows) / len(self.rows)

    @property
    def worst(self) -> LengthPrediction:
        return max(self.rows, key=lambda row: abs(row.error))

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write."""
        rows = [asdict(row) | {"error": row.error} for row in self.rows]
        return asdict(self) | {"rows": rows, "mean_error": self.mean_error, "target_error": TARGET_ERROR}


def predict(
    pair: Pair,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    max_new_tokens: int = 64,
    settings: Sequence[SpecConfig] = SETTINGS,
    recorded: SpecConfig = RECORDED,
    progress: bool = False,
) -> LengthPredictions:
    """Record once, replay every setting, then run each on the reference, greedily and in float64.

    A setting has to lie within the recorded one. End tokens are ignored, so that every prompt weighs the same.
    max_new_tokens: at least 2.
    """
    require(max_new_tokens >= 2, "max_new_tokens", max_new_tokens, "at least 2: the first token needs no round")
    require(settings, "settings", settings, "at least one setting")
    most = most_positions(pair, prompts, recorded) + 1
    allowed = f"at most {most}, for which the longest prompt leaves room"
    require(max_new_tokens <= most, "max_new_tokens", max_new_tokens, allowed)
    sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    with tqdm(total=len(settings) + 1, unit="run", disable=None if progress else True) as bar:
        start = perf_counter()
        candidates = record(pair, prompts, recorded, max_new_tokens - 1)
        bar.update()
        replaying = perf_counter()
        lengths = [accept_length(candidates.acceptance(config)) for config in settings]
        running = perf_counter()
        rows: list[LengthPrediction] = []
        for config, predicted in zip(settings, lengths, strict=True):
            figures = generate(pair, prompts, config, sampling, engine=EngineOptions(dtype=torch.float64)).acceptance
            rows.append(LengthPrediction(config, predicted, figures.accept_length, figures.rounds))
            bar.update()
    seconds = Seconds(replaying - start, running - replaying, perf_counter() - running)
    shares = tuple(map(tuple, candidates.shares().tolist()))
    return LengthPredictions(recorded, len(candidates.texts), max_new_tokens, tuple(rows), shares, seconds)


def show(predictions: LengthPredictions, console: Console) -> None:
    """Print a row per setting, and the errors."""
    heading(console, f"Accept lengths predicted from one recording ({setting(predictions.recorded)})")
    seconds = predictions.seconds
    paragraph(
        console,
        f"{predictions.num_prompts} prompts, {predictions.max_new_tokens} new tokens each, greedy. Recording took "
        f"{seconds.recording:.0f} s, all predictions {seconds.replaying:.1f} s, the runs {seconds.running:.0f} s.",
    )
    console.print()
    rows = [
        (
            *map(str, (row.config.topk, row.config.num_steps, row.config.num_draft_tokens)),
            figure(row.predicted, 3),
            figure(row.measured, 3),
            f"{row.error:+.2%}",
        )
        for row in predictions.rows
    ]
    print_table(console, ("topk", "steps", "draft tokens", "predicted", "run", "error"), rows)
    console.print()
    worst = predictions.worst
    paragraph(
        console,
        f"Mean error {predictions.mean_error:.2%} (target {TARGET_ERROR:.0%}), the largest {worst.error:+.2%} "
        f"({setting(worst.config)}).",
    )
