"""Equal tokens of the shipped pair: GPU and CPU, two runs, solo and batched."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from specsim.bench.checks import all_of, equal
from specsim.bench.row import OURS, Check, Row
from specsim.bench.scene import EAGLE3
from specsim.core.config import SamplingParams
from specsim.core.engine_options import EngineOptions
from specsim.core.pair import Pair
from specsim.models.load import load
from specsim.models.shipped import load_prompts
from specsim.serving.generation import generate
from specsim.serving.outputs import Generation

TOGETHER = 64
ALONE = 4
NEW_TOKENS = 32


def sameness_rows(quick: bool) -> Iterator[Row]:
    """Compare tokens of GPU and CPU, of two runs, solo and batched; no times."""
    pair = load()
    count = 8 if quick else TOGETHER
    texts = (TOGETHER * [each["text"] for each in load_prompts()])[:count]
    run = partial(_generate, pair)
    batched = run(texts)
    again = run(texts)
    yield _row("two runs", {"requests": count}, _equal("tokens and logprobs, bit for bit", batched, again))
    places = range(min(ALONE, count))
    on_cpu = generate(pair, [texts[place] for place in places], EAGLE3, _PARAMS, request_ids=list(places))
    yield _row(
        "GPU and CPU", {"requests": len(places)}, _same_tokens("tokens of the reference, float32", batched, on_cpu)
    )
    solo = [run([texts[place]], [place]) for place in places]
    found = [_same_tokens(f"request {place}", batched, each, place) for place, each in enumerate(solo)]
    bits = sum(_equal("", batched, each, place).passed for place, each in enumerate(solo))
    note = f"logprobs are equal bit for bit, too, in {bits} of {len(solo)}"
    yield _row("solo and batched", {"requests": count}, all_of("tokens", *found), (note,))
    yield from _invariant_rows(pair, texts, places)


_PARAMS = SamplingParams(max_new_tokens=NEW_TOKENS)


def _generate(
    pair: Pair, texts: Sequence[str], ids: Sequence[int] | None = None, batch_invariant: bool = False
) -> Generation:
    ids = list(range(len(texts)) if ids is None else ids)
    options = EngineOptions("fast", device="cuda", batch_invariant=batch_invariant)
    return generate(pair, texts, EAGLE3, _PARAMS, request_ids=ids, engine=options)


def _row(name: str, setting: dict[str, Any], check: Check, notes: tuple[str, ...] = ()) -> Row:
    return Row(f"shipped pair, {name}", setting | {"dtype": "float32"}, {OURS: check}, notes=notes)


def _tensors(generation: Generation, place: int) -> dict[str, torch.Tensor]:
    output = generation.outputs[place]
    logprobs = torch.tensor(output.logprobs, dtype=torch.float64)
    return {"tokens": torch.tensor(output.token_ids), "logprobs": logprobs}


def _equal(compared: str, found: Generation, expected: Generation, first: int = 0) -> Check:
    """Compare outputs bit for bit; place 0 of `expected` is place `first` of `found`."""
    places = range(len(expected.outputs))
    return all_of(compared, *(equal(compared, _tensors(found, first + i), _tensors(expected, i)) for i in places))


def _same_tokens(compared: str, found: Generation, expected: Generation, first: int = 0) -> Check:
    pairs = [(found.outputs[first + i].token_ids, each.token_ids) for i, each in enumerate(expected.outputs)]
    wrong = [place for place, (ours, theirs) in enumerate(pairs) if ours != theirs]
    return Check(compared, float(len(wrong)), 0, f"requests {wrong}" if wrong else "")


def _invariant_rows(pair: Pair, texts: Sequence[str], places: Sequence[int]) -> Iterator[Row]:
    """Compare solo and batched outputs under `batch_invariant`, bit for bit."""
    run = partial(_generate, pair, batch_invariant=True)
    batched = run(texts)
    found = [_equal(f"request {place}", batched, run([texts[place]], [place]), place) for place in places]
    compared = "tokens and logprobs solo and batched, bit for bit"
    yield _row("batch-invariant", {"requests": len(texts)}, all_of(compared, *found))
