"""Acceptance of any pair on given prompts, as an acceptance record."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from specsim.acceptance.interval import with_interval
from specsim.acceptance.own_results import CONVENTION
from specsim.core.columns import two_rounds
from specsim.core.config import MOST_TOKENS, SamplingParams, ServingConfig, SpecConfig
from specsim.core.engine import Engine
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError, require, require_int
from specsim.core.files import read_text
from specsim.core.pair import Pair
from specsim.core.phases import Advance, DraftInput, check_drafts
from specsim.core.pool import KVPool
from specsim.core.state import Batch
from specsim.serving.generation import load_engine
from specsim.serving.outputs import Generation
from specsim.serving.requests import make_requests
from specsim.serving.scheduler import Scheduler
from specsim.simulator.acceptance_record import AcceptanceRecord, Counts

_KEYS = ("prompt", "text", "prompt_ids", "turns", "question")
ALLOWED = (
    "a UTF-8 file with a prompt per line: a text, or in a .jsonl file a JSON string, a list of token ids, or an object "
    f"with {', '.join(_KEYS[:-1])} or {_KEYS[-1]}"
)

Prompt = str | list[int]
BATCH = 16


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts of a file; of a conversation the first turn. InputError for a line that is none."""
    text = read_text(path, "prompts", ALLOWED)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    require(lines, "prompts", str(path), f"{ALLOWED} (it is empty)")
    if path.suffix.lower() != ".jsonl":
        return [line.rstrip("\r") for _, line in lines]
    prompts = [_prompt(line, f"{path}, line {number}") for number, line in lines]
    if len({type(prompt) for prompt in prompts}) > 1:
        raise InputError("prompts", str(path), "texts in all lines, or token ids in all of them")
    return prompts


def digest(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> str:
    """Name a list of prompts and the length of their outputs, so that equal ones are recognised."""
    value = json.dumps([list(map(list, prompts)), max_new_tokens])
    return hashlib.sha256(value.encode()).hexdigest()[:16]


def _prompt(line: str, location: str) -> Prompt:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError("prompts", location, ALLOWED) from error
    if isinstance(value, Mapping):
        value = next((value[key] for key in _KEYS if value.get(key)), None)
    if isinstance(value, list) and value and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    raise InputError("prompts", location, ALLOWED)


class CheckedEngine:
    """A wrapper of an engine that checks the scores of every round's drafts, for which the host waits."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def advance(self, batch: Batch, draft_input: DraftInput, pools: KVPool, reserved: bool = False) -> Advance:
        """Run a round, and raise NotFinite where its drafts come from NaN."""
        output = self._engine.round(batch, draft_input, pools, reserved)
        check_drafts(batch, output.verify_input, self._engine.dtype)
        return output.advance(batch)


def measure_pair(
    pair: Pair,
    prompts: Sequence[Prompt],
    config: SpecConfig,
    sampling: SamplingParams,
    engine: EngineOptions | None = None,
    batch: int = BATCH,
    progress: bool = False,
) -> AcceptanceRecord:
    """Continue every prompt, at most `batch` at a time, and record the accepted drafts of its rounds.

    InputError for plain decoding, and for prompts that leave no room for a round.
    """
    require(not config.is_plain, "num_steps", config.num_steps, "at least 1: plain decoding has no drafts")
    running = load_engine(pair, config, engine)
    prompt_list: list[str] | list[list[int]] = list(prompts)  # pyright: ignore[reportAssignmentType] - all of one type
    requests = make_requests(pair, prompt_list, sampling, None, running.config.length_limit)
    longest = max(len(request.prompt_ids) + request.max_tokens for request in requests)
    columns = two_rounds(longest, running.config, running.drafter.num_mask_rows)
    slots = min(require_int("batch", batch), len(requests)) * columns
    if slots > MOST_TOKENS:
        raise InputError("batch", batch, f"fewer: the longest requests together need {slots:,} KV slots")
    engine_of_rounds: Any = CheckedEngine(running)  # forwards all other attributes to the engine
    scheduler = Scheduler(engine_of_rounds, ServingConfig(max_running=min(batch, len(requests)), num_slots=slots))
    for request in requests:
        scheduler.submit(request)
    total = sum(request.max_tokens for request in requests)
    with torch.inference_mode(), tqdm(total=total, unit="token", disable=None if progress else True) as bar:
        scheduler.run(lambda: bar.update(sum(len(request.token_ids) for request in requests) - bar.n))
        scheduler.close()
    counts = [_counts(request.accepted, request.proposed, config) for request in requests]
    return _record(
        counts,
        config,
        tool=f"specsim ({running.options.impl})",
        pair=pair.name,
        prompts=digest([request.prompt_ids for request in requests], sampling.max_new_tokens),
        temperature=sampling.temperature,
    )


def record_of(generation: Generation) -> AcceptanceRecord:
    """Make the record of the rounds that specsim.generate ran."""
    counts = [
        _counts(output.num_accepted_tokens_per_round, output.proposed_depth_per_round, generation.config)
        for output in generation.outputs
    ]
    temperatures = {output.temperature for output in generation.outputs}
    return _record(counts, generation.config, temperature=temperatures.pop() if len(temperatures) == 1 else None)


def _record(counts: list[Counts], config: SpecConfig, tool: str = "specsim", **others: Any) -> AcceptanceRecord:
    setting = {name: getattr(config, name) for name in ("topk", "num_steps", "num_draft_tokens")}
    record = AcceptanceRecord.of_counts(
        counts, "specsim.generate", tool, CONVENTION, is_by_request=True, **setting, **others
    )
    return with_interval(record)


def _counts(accepted_tokens: Sequence[int], proposed: Sequence[int], config: SpecConfig) -> Counts:
    return Counts.of_rounds([tokens - 1 for tokens in accepted_tokens], config.num_steps, proposed)
