"""Tokens of a running engine, served in large batches, and the distribution of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.kinds import TESTED
from specsim.core.rule import AcceptanceRule
from specsim.core.verifiers import VERIFIER_KINDS
from specsim.correctness.statistics.e_value import Sample
from specsim.correctness.statistics.small_vocabulary import KIND, SmallVocabulary, draft_distribution, next_distribution
from specsim.serving.generation import generate
from specsim.serving.outputs import Output

_CHAIN = SpecConfig(topk=1, num_steps=2, num_draft_tokens=3, page_size=4)
_TREE = SpecConfig(topk=2, num_steps=2, num_draft_tokens=5, page_size=4)
CONFIGS = {
    kind.name: replace(_CHAIN if kind.drafts == "sampled" else _TREE, verifier=kind.name)
    for kind in VERIFIER_KINDS
    if kind.is_lossless
}
# Other drafters than EAGLE heads, by the names of their tests. Token drafters leave nodes of their trees dead.
DRAFTERS = {
    f"{verifier}, {name}": (name, CONFIGS[verifier])
    for name, kind in TESTED.items()
    for verifier in kind.variant(name).sampling_tests
}
BATCH = 96
GPU_BATCH = 1024  # each batch captures its own graphs, which takes a GPU seconds


@dataclass(frozen=True, slots=True)
class SamplingSetting:
    """Sampling parameters with a name."""

    name: str
    params: dict[str, Any] = field(default_factory=dict)  # of SamplingParams, at temperature 1 unless given
    num_tokens: int = 24  # new tokens of a request
    prompts: tuple[tuple[int, ...], ...] = tuple((token, 5 * token % 16) for token in range(16))  # used in turn

    def sampling(self, seed: int) -> SamplingParams:
        """Make the sampling parameters of a request."""
        params: dict[str, Any] = {"temperature": 1.0} | self.params
        return SamplingParams(**params, max_new_tokens=self.num_tokens, seed=seed)


PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.4}
PLAIN = SamplingSetting("T 1")
# With penalties a distribution depends on the whole text: few tokens after one prompt make texts that recur.
SETTINGS = (
    SamplingSetting("T 0.7", {"temperature": 0.7}),
    PLAIN,
    SamplingSetting("T 1.5, top-k 6", {"temperature": 1.5, "top_k": 6}),
    SamplingSetting("T 1, top-p 0.8", {"top_p": 0.8}),
    SamplingSetting("T 1.5, min-p 0.2", {"temperature": 1.5, "min_p": 0.2}),
    SamplingSetting("T 1, penalties", PENALTIES, num_tokens=6, prompts=((3, 9),)),
)
DRAFTER_SETTINGS = (PLAIN, SETTINGS[2])  # of tests of other drafters


@dataclass(frozen=True, slots=True)
class Load:
    """Requests for an engine."""

    config: SpecConfig
    settings: Sequence[SamplingSetting]
    num_tokens: int  # least number of new tokens of every setting
    seed: int = 0  # of all requests
    engine: EngineOptions = field(default_factory=EngineOptions)
    rule: AcceptanceRule | None = None  # in place of the setting's verifier
    kind: str = KIND  # of drafter

    @property
    def batch(self) -> int:
        """Number of requests that run at once."""
        return GPU_BATCH if self.engine.device == "cuda" else BATCH

    @property
    def requests(self) -> tuple[int, ...]:
        """Number of requests of each setting."""
        return tuple(-(-self.num_tokens // setting.num_tokens) for setting in self.settings)

    @property
    def total(self) -> int:
        """Number of new tokens of all requests."""
        return sum(count * setting.num_tokens for count, setting in zip(self.requests, self.settings, strict=True))


def outputs(model: SmallVocabulary, load: Load, progress: Callable[[int], Any]) -> dict[str, list[Output]]:
    """Run a load; outputs by the names of settings.

    Requests of all settings share batches, and no two share an id. progress: called with numbers of new tokens.
    """
    pair = model.pair(load.kind)
    turns = ((index, turn) for index, count in enumerate(load.requests) for turn in range(count))
    wanted = sorted((load.settings[index].num_tokens, turn, index) for index, turn in turns)
    outputs_by_name = {setting.name: [] for setting in load.settings}
    for start in range(0, len(wanted), load.batch):
        chosen = [load.settings[index] for *_, index in wanted[start : start + load.batch]]
        ids = range(start, start + len(chosen))
        prompts = [setting.prompts[i % len(setting.prompts)] for i, setting in zip(ids, chosen, strict=True)]
        sampling = [setting.sampling(load.seed) for setting in chosen]
        results = generate(
            pair, prompts, load.config, sampling, request_ids=ids, engine=load.engine, verifier=load.rule
        ).outputs
        for setting, output in zip(chosen, results, strict=True):
            outputs_by_name[setting.name].append(output)
        progress(sum(len(output.token_ids) for output in results))
    return outputs_by_name


def sample(model: SmallVocabulary, setting: SamplingSetting, outputs: Sequence[Output]) -> Sample:
    """Collect the tokens of a setting's outputs with their distributions."""
    params = setting.sampling(0)
    tokens = []
    pasts = []
    is_first = []
    for output in outputs:
        prompt_len = len(output.prompt_token_ids)
        text = output.prompt_token_ids + output.token_ids
        firsts = _firsts(output)
        tokens += output.token_ids
        for index in range(len(output.token_ids)):
            pasts.append((prompt_len, *_relevant(text[: prompt_len + index], prompt_len, params)))
            is_first.append(index in firsts)
    distributions = {past: next_distribution(model, past[1:], past[0], params) for past in dict.fromkeys(pasts)}
    prob_nV = np.stack([distributions[past] for past in pasts])
    return Sample(
        token=np.array(tokens),
        prob_nV=prob_nV,
        distribution_ids=_numbered([distributions[past].tobytes() for past in pasts]),
        past_ids=_numbered(pasts),
        is_first=np.array(is_first),
        marks=_marks(model, prob_nV, pasts, params),
    )


def _numbered(values: Sequence[Any]) -> np.ndarray:
    """Number the values in the order of their first occurrence, equal values equally."""
    numbers = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values])


def _relevant(text: tuple[int, ...], prompt_len: int, params: SamplingParams) -> tuple[int, ...]:
    """Select the tokens that decide a distribution: the last two, and with penalties all others in any order."""
    if params.repetition_penalty == 1 and not params.presence_penalty and not params.frequency_penalty:
        return text[-2:]
    prompt = text[:prompt_len]
    written = text[prompt_len:]
    return prompt + tuple(sorted(written[:-2])) + written[-2:]


def _firsts(output: Output) -> set[int]:
    """Find the places of the tokens that begin a round."""
    return set((1 + np.cumsum((0, *output.num_accepted_tokens_per_round[:-1]))).tolist())


def _marks(
    model: SmallVocabulary, prob_nV: np.ndarray, pasts: Sequence[tuple[int, ...]], params: SamplingParams
) -> np.ndarray:
    """Mark tokens that the drafter rates higher than the target, and tokens of the past: bool [2, n, V]."""
    draft_of = cache(lambda last: draft_distribution(model, last, params.temperature))
    overrated = np.stack([draft_of(past[-1]) for past in pasts]) > prob_nV
    held = np.zeros_like(overrated)
    for row, past in enumerate(pasts):
        held[row, list(past[1:])] = True
    return np.stack([overrated, held])
