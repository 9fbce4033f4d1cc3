"""Tokens of a running engine: requests in large batches, as specsim.generate serves anyone's, and the laws of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.correctness.statistics.distribution import draft_law, next_law
from specsim.correctness.statistics.e_value import Sample
from specsim.correctness.statistics.settings import Setting
from specsim.correctness.statistics.small_vocabulary import Narrow
from specsim.serving.generation import Output, generate

BATCH, GPU_BATCH = 96, 1024  # every batch captures its graphs anew, which a GPU does not do in less than seconds


@dataclass(frozen=True, slots=True)
class Column:
    """Which column runs, and where."""

    impl: str = "reference"
    device: str | None = None

    @property
    def batch(self) -> int:
        """Requests at once."""
        return GPU_BATCH if self.device == "cuda" else BATCH


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine is given: at least num_tokens new tokens of every setting; a seed for all requests."""

    config: SpecConfig
    settings: Sequence[Setting]
    num_tokens: int
    seed: int = 0
    column: Column = Column()

    @property
    def requests(self) -> tuple[int, ...]:
        """Of each setting."""
        return tuple(-(-self.num_tokens // setting.num_tokens) for setting in self.settings)

    @property
    def total(self) -> int:
        """New tokens of all requests."""
        return sum(count * each.num_tokens for count, each in zip(self.requests, self.settings, strict=True))


def outputs(narrow: Narrow, load: Load, tell: Callable[[int], Any]) -> dict[str, list[Output]]:
    """What comes of a load, by the names of settings. Requests of all settings share batches, and no two share an id.

    tell: is told how many new tokens there are.
    """
    pair, settings, batch = narrow.pair(), load.settings, load.column.batch
    turns = ((place, turn) for place, count in enumerate(load.requests) for turn in range(count))
    wanted = sorted((settings[place].num_tokens, turn, place) for place, turn in turns)
    found = {setting.name: [] for setting in settings}
    for start in range(0, len(wanted), batch):
        chosen = [settings[place] for *_, place in wanted[start : start + batch]]
        names = range(start, start + len(chosen))
        prompts = [each.prompts[name % len(each.prompts)] for each, name in zip(chosen, names, strict=True)]
        sampling = [each.sampling(load.seed) for each in chosen]
        options = EngineOptions(load.column.impl, device=load.column.device)
        results = generate(pair, prompts, load.config, sampling, request_ids=names, engine=options).outputs
        for each, output in zip(chosen, results, strict=True):
            found[each.name].append(output)
        tell(sum(len(output.token_ids) for output in results))
    return found


def sample(narrow: Narrow, setting: Setting, found: Sequence[Output]) -> Sample:
    """The tokens of a setting's outputs with their laws."""
    params, laws, numbers = setting.sampling(0), {}, {}
    tokens, pasts, is_first = [], [], []
    for output in found:
        prompt, firsts = output.prompt_token_ids, _firsts(output)
        text, prompt_len = prompt + output.token_ids, len(prompt)
        tokens += output.token_ids
        for place in range(len(output.token_ids)):
            past = prompt_len, *_relevant(text[: prompt_len + place], prompt_len, params)
            numbers.setdefault(past, len(numbers))
            pasts.append(past)
            is_first.append(place in firsts)
    law_of = {past: next_law(narrow, past[1:], past[0], params) for past in numbers}
    law_nV = np.stack([law_of[past] for past in pasts])
    for law_V in law_of.values():
        laws.setdefault(law_V.tobytes(), len(laws))
    equal = {past: laws[law_V.tobytes()] for past, law_V in law_of.items()}
    return Sample(
        token=np.array(tokens),
        law_nV=law_nV,
        laws=np.array([equal[past] for past in pasts]),
        pasts=np.array([numbers[past] for past in pasts]),
        is_first=np.array(is_first),
        marks=_marks(narrow, law_nV, pasts, params),
    )


def _relevant(text: tuple[int, ...], prompt_len: int, params: SamplingParams) -> tuple[int, ...]:
    """What of a text its law depends on: the last two tokens, with penalties the others too, in any order."""
    if params.repetition_penalty == 1 and not params.presence_penalty and not params.frequency_penalty:
        return text[-2:]
    prompt, written = text[:prompt_len], text[prompt_len:]
    return prompt + tuple(sorted(written[:-2])) + written[-2:]


def _firsts(output: Output) -> set[int]:
    """Places of the tokens that are the first of a round."""
    return set((1 + np.cumsum((0, *output.num_accepted_tokens_per_round[:-1]))).tolist())


def _marks(narrow: Narrow, law_nV: np.ndarray, pasts: Sequence[tuple[int, ...]], params: SamplingParams) -> np.ndarray:
    """Tokens that the drafter likes better than the target does, and tokens that the past holds: bool [2, n, V]."""
    draft_of = cache(lambda last: draft_law(narrow, last, params.temperature))
    liked = np.stack([draft_of(past[-1]) for past in pasts]) > law_nV
    held = np.zeros_like(liked)
    for row, past in enumerate(pasts):
        held[row, list(past[1:])] = True
    return np.stack([liked, held])
