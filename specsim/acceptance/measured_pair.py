"""Acceptance of any pair on given prompts, as an acceptance record."""

from collections.abc import Sequence

import torch
from tqdm.auto import tqdm

from specsim.acceptance.interval import with_interval
from specsim.acceptance.own_results import CONVENTION
from specsim.acceptance.prompts import Prompt, digest
from specsim.core.config import MOST_TOKENS, SamplingParams, ServingConfig, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError, require, require_int
from specsim.core.pair import Pair
from specsim.serving.generation import load_engine
from specsim.serving.requests import Request, make_requests
from specsim.serving.scheduler import Scheduler
from specsim.simulator.acceptance_record import AcceptanceRecord, Counts

BATCH = 16


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
    given: list[str] | list[list[int]] = list(prompts)  # pyright: ignore[reportAssignmentType] - all of one type
    requests = make_requests(pair, given, sampling, None, running.config.length_limit)
    longest = max(len(request.prompt_ids) + request.max_tokens for request in requests)
    slots = min(require_int("batch", batch), len(requests)) * running.config.reserved_columns(longest)
    if slots > MOST_TOKENS:
        raise InputError("batch", batch, f"fewer: the longest requests together need {slots:,} KV slots")
    scheduler = Scheduler(running, ServingConfig(max_running=min(batch, len(requests)), num_slots=slots))
    for request in requests:
        scheduler.submit(request)
    total = sum(request.max_tokens for request in requests)
    with torch.inference_mode(), tqdm(total=total, unit="token", disable=None if progress else True) as bar:
        scheduler.run(lambda: bar.update(sum(len(request.token_ids) for request in requests) - bar.n))
        scheduler.close()
    record = AcceptanceRecord.of_counts(
        [_counts(request, config.num_steps) for request in requests],
        "measured",
        f"specsim ({running.options.impl})",
        CONVENTION,
        topk=config.topk,
        num_steps=config.num_steps,
        num_draft_tokens=config.num_draft_tokens,
        is_by_request=True,
        pair=pair.name,
        prompts=digest([request.prompt_ids for request in requests], sampling.max_new_tokens),
        temperature=sampling.temperature,
    )
    return with_interval(record)


def _counts(request: Request, num_steps: int) -> Counts:
    return Counts.of_rounds([tokens - 1 for tokens in request.accepted], num_steps, request.proposed)
