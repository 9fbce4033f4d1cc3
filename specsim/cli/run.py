"""specsim run: serve a file of requests."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from specsim.cli.file_options import MOST_ROUNDS, served_rounds, write_rounds
from specsim.cli.option_fields import command_line, common, option, refuse_changes
from specsim.cli.options import (
    HtmlOptions,
    ImplementationOptions,
    JsonOptions,
    PairOptions,
    PolicyOptions,
    pick,
    told_as,
)
from specsim.cli.ranks import RankOptions, in_ranks
from specsim.core.config import ServingConfig
from specsim.core.errors import InputError
from specsim.core.json_schema import schema_name
from specsim.core.limits import BatchSize
from specsim.models.shipped import REQUESTS

if TYPE_CHECKING:
    from specsim.core.engine import Engine
    from specsim.core.pair import Pair
    from specsim.core.policies.named import NamedPolicy

_SERVING = ServingConfig()


@dataclass(frozen=True, kw_only=True)
class RunOptions(PairOptions, ImplementationOptions, RankOptions, PolicyOptions, HtmlOptions, JsonOptions):
    """Options of specsim run."""

    # JSON Lines file, one request per line.
    requests: Annotated[Path | None, common("Requests", default="the shipped requests", file="reads")] = None
    # List bad lines and run the others.
    skip_bad_lines: Annotated[bool, option("Requests")] = False
    # The host reads a step's results before it plans the next step (sync), or one step later (overlap).
    schedule: Annotated[Literal["sync", "overlap"], option("Server")] = _SERVING.schedule
    # Largest number of running requests.
    max_running: Annotated[BatchSize, common("Server")] = _SERVING.max_running
    # Size of the KV pool in tokens.
    slots: Annotated[int, common("KV cache", limits="at least --page-size")] = _SERVING.num_slots
    # Largest number of prompt tokens in a step.
    chunk_tokens: Annotated[int | None, option("Server", at_least=1, default="no limit")] = _SERVING.chunk_tokens
    # Reuse the KV of equal prefixes.
    prefix_cache: Annotated[bool, common("KV cache", is_negatable=True)] = _SERVING.prefix_cache
    # Request that is preempted when the pool is full.
    preemption: Annotated[Literal["latest", "shortest", "longest"], option("Server")] = _SERVING.preemption
    # Batch size that the fast implementation's buffers hold.
    bucket: Annotated[
        int | None, option("Execution", at_least=1, default="the batch size, rounded up to a power of two")
    ] = None
    # Run both schedules with and without the prefix cache, and compare each output with that of a solo run.
    compare: Annotated[bool, common("Server")] = False
    # Write the scheduler's steps to this Parquet file.
    trace: Annotated[Path | None, option("Output", file="writes")] = None

    def check(self) -> None:
        """Refuse before a long run options that exclude each other, and a trace that cannot be written."""
        from specsim.serving.trace import Trace

        self.without("compare", "html")
        if self.shape is not None and self.requests is None:
            raise InputError("requests", "the shipped texts", "a file with prompt_ids, as --shape has no tokenizer")
        if self.compare:
            names = ("schedule", "prefix_cache", "trace", "html", "accept_rates")
            refuse_changes(self, names, "with --compare")
        if self.trace is not None:
            with told_as(table="trace"):
                Trace().to_parquet()


@in_ranks
def run(options: RunOptions) -> None:
    """Serve a file of requests with continuous batching.

    Exit status: 0 when done, 1 if --compare finds a difference or nothing to compare, 2 for
    bad input, 3 if a rank fails.

    Examples:
      specsim run --requests requests.jsonl --json results.json
      specsim run --slots 896 --chunk-tokens 24 --compare
    """
    config = options.config()
    with told_as(num_slots="slots"):
        serving = pick(ServingConfig, options, num_slots=options.slots)
        if options.bucket is not None and options.bucket < serving.max_running:
            raise InputError("bucket", options.bucket, f"at least max_running, {serving.max_running}")
        drafts_on_host = options.drafts_on_host(config)
        engine_options = options.engine_options(config, drafts_on_host=drafts_on_host)
        acceptance = options.acceptance()
        options.check()
        chosen = options.policy()
        from specsim.core.policies.named import named_policy
        from specsim.serving.generation import load_adaptive_engine, load_engine
        from specsim.serving.scheduler import check_serving
        from specsim.serving.workload import read_file

        check_serving(serving, config)
        text = read_file(options.requests or REQUESTS)
        loaded = options.load(config, engine_options, is_whole=options.compare)
        policy = None if chosen is None else named_policy(chosen, config)
        if policy is None:
            running = load_engine(loaded, config, engine_options, acceptance=acceptance)
        else:
            running = load_adaptive_engine(loaded, policy.settings, engine_options, acceptance=acceptance)
        is_equal = _serve(options, text, loaded, running, serving, policy)
    if not is_equal:
        raise click.exceptions.Exit(1)


def _serve(
    options: RunOptions,
    text: str,
    pair: "Pair",
    engine: "Engine",
    serving: ServingConfig,
    policy: "NamedPolicy | None" = None,
) -> bool:
    """Serve the requests, and write and show the result; False if a comparison found a difference."""
    from specsim.core.display import stdout_console
    from specsim.core.files import write_json
    from specsim.core.provenance import now, versions
    from specsim.correctness.invariance.modes import compare
    from specsim.explorer.recorder import Recorder
    from specsim.serving.serve import serve
    from specsim.serving.workload import parse_requests

    file = options.requests or REQUESTS
    output = "run-compare" if options.compare else "run"
    header = {
        "schema": schema_name(output),
        "command": command_line("run", options),
        "file": str(file),
        "date": now(),
        "versions": versions(engine.device.type),
        "pair": pair.name,
        **{
            name: getattr(options, name)
            for name in ("impl", "dtype", "kv_dtype", "draft_kv_dtype", "bucket", "batch_invariant")
        },
        "device": engine.device.type,
        "graph": engine.options.graph if options.impl == "fast" else None,
    }
    read = partial(parse_requests, text, file, pair, options.skip_bad_lines)
    with ExitStack() as after:  # no output that fails costs the others their result
        if options.compare:
            result = compare(pair, engine, read, serving, progress=True)
            is_equal = result.is_equal
        else:
            workload = read()
            page = options.html
            recorder = None if page is None else Recorder(engine, MOST_ROUNDS)
            watched: Any = recorder or engine  # a recorder forwards to its engine
            result = serve(watched, workload.requests, serving, policy=policy, skipped=workload.skipped, progress=True)
            is_equal = True
            if options.trace is not None:
                after.callback(result.trace.write_parquet, options.trace)
            if page is not None and recorder is not None:
                after.callback(write_rounds, page, served_rounds(pair, recorder, result))
        after.callback(write_json, options.json, header | result.to_json())
        result.show(stdout_console())
    return is_equal
