"""specsim run: serve a file of requests."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim.cli import options
from specsim.cli.file_options import MOST_ROUNDS, reads, served_rounds, write_rounds, writes
from specsim.cli.option_groups import EngineGroup, PairGroup, TreeGroup, flat, with_groups
from specsim.cli.options import option
from specsim.cli.ranks import RankOptions, in_ranks
from specsim.core.config import ServingConfig
from specsim.core.errors import InputError, require
from specsim.core.json_schema import schema_name
from specsim.models.shipped import REQUESTS

if TYPE_CHECKING:
    from specsim.core.engine import Engine
    from specsim.core.pair import Pair
    from specsim.core.policies.named import NamedPolicy

_SERVING = ServingConfig()


@in_ranks
@with_groups
def run(
    *,
    requests: Annotated[
        Path | None,
        option(
            "Requests",
            "JSON Lines file, one request per line.",
            metavar="FILE",
            show_default="the shipped requests",
            callback=reads,
        ),
    ] = None,
    skip_bad_lines: Annotated[
        bool, option("Requests", "List bad lines and run the others.", "--skip-bad-lines")
    ] = False,
    schedule: Annotated[
        str,
        option(
            "Server",
            "The host reads a step's results before it plans the next step (sync), or one step later (overlap).",
            metavar="sync|overlap",
        ),
    ] = _SERVING.schedule,
    max_running: Annotated[
        int, option("Server", "Largest number of running requests. [1 to 65536]")
    ] = _SERVING.max_running,
    slots: Annotated[
        int, option("KV cache", "Size of the KV pool in tokens. [at least --page-size]")
    ] = _SERVING.num_slots,
    chunk_tokens: Annotated[
        int | None,
        option("Server", "Largest number of prompt tokens in a step. [at least 1]", show_default="no limit"),
    ] = _SERVING.chunk_tokens,
    prefix_cache: Annotated[bool, option("KV cache", "Reuse the KV of equal prefixes.")] = _SERVING.prefix_cache,
    preemption: Annotated[
        str,
        option("Server", "Request that is preempted when the pool is full.", metavar="latest|shortest|longest"),
    ] = _SERVING.preemption,
    compare: Annotated[
        bool,
        option(
            "Server",
            "Run both schedules with and without the prefix cache, and compare each output with that of a solo run.",
            "--compare",
        ),
    ] = False,
    adaptive: options.Adaptive = None,
    adaptive_per_request: options.AdaptivePerRequest = False,
    tree: TreeGroup,
    pair: PairGroup,
    engine: EngineGroup,
    ranks: RankOptions,
    json_file: options.JsonFile = None,
    trace: Annotated[
        Path | None,
        option("Output", "Write the scheduler's steps to this Parquet file.", metavar="FILE", callback=writes),
    ] = None,
    html_file: options.HtmlFile = None,
) -> None:
    """Serve a file of requests with continuous batching.

    Exit status: 0 when done, 1 if --compare finds a difference or nothing to compare, 2 for
    bad input, 3 if a rank fails.

    Examples:
      specsim run --requests requests.jsonl --json results.json
      specsim run --slots 896 --chunk-tokens 24 --compare
    """
    arguments = flat(locals())
    config = pair.config(tree)
    with options.told_as(num_slots="slots", html_file="html"):
        serving = options.pick(ServingConfig, arguments | {"num_slots": slots})
        if engine.bucket is not None and engine.bucket < serving.max_running:
            raise InputError("bucket", engine.bucket, f"at least max_running, {serving.max_running}")
        engine_options = ranks.of(engine.options(config, drafts_on_host=pair.drafts_on_host(config)))
        acceptance = pair.acceptance(tree.num_steps)
        _check_run(arguments)
        chosen = options.policy(adaptive, adaptive_per_request)
        from specsim.core.policies.named import named_policy
        from specsim.serving.generation import load_adaptive_engine, load_engine
        from specsim.serving.scheduler import check_serving
        from specsim.serving.workload import read_file

        check_serving(serving, config)
        text = read_file(requests or REQUESTS)
        loaded = pair.load(config, engine_options, is_whole=compare)
        policy = None if chosen is None else named_policy(chosen, config)
        if policy is None:
            running = load_engine(loaded, config, engine_options, acceptance=acceptance)
        else:
            running = load_adaptive_engine(loaded, policy.settings, engine_options, acceptance=acceptance)
        is_equal = _serve(arguments, text, loaded, running, serving, policy)
    if not is_equal:
        raise typer.Exit(1)


def _serve(
    arguments: dict[str, Any],
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

    file = arguments["requests"] or REQUESTS
    output = "run-compare" if arguments["compare"] else "run"
    header = {
        "schema": schema_name(output),
        "command": options.command(run, arguments, ("json_file", "trace", "html_file", "preset")),
        "file": str(file),
        "date": now(),
        "versions": versions(engine.device.type),
        "pair": pair.name,
        **{
            name: arguments[name]
            for name in ("impl", "dtype", "kv_dtype", "draft_kv_dtype", "bucket", "batch_invariant")
        },
        "device": engine.device.type,
        "graph": engine.options.graph if arguments["impl"] == "fast" else None,
    }
    read = partial(parse_requests, text, file, pair, arguments["skip_bad_lines"])
    with ExitStack() as after:  # no output that fails costs the others their result
        if arguments["compare"]:
            result = compare(pair, engine, read, serving, progress=True)
            is_equal = result.is_equal
        else:
            workload = read()
            page: Path | None = arguments["html_file"]
            recorder = None if page is None else Recorder(engine, MOST_ROUNDS)
            watched: Any = recorder or engine  # a recorder forwards to its engine
            result = serve(watched, workload.requests, serving, policy=policy, skipped=workload.skipped, progress=True)
            is_equal = True
            if arguments["trace"] is not None:
                after.callback(result.trace.write_parquet, arguments["trace"])
            if page is not None and recorder is not None:
                after.callback(write_rounds, page, served_rounds(pair, recorder, result))
        after.callback(write_json, arguments["json_file"], header | result.to_json())
        result.show(stdout_console())
    return is_equal


def _check_run(arguments: dict[str, Any]) -> None:
    """Refuse before a long run options that exclude each other, and a trace that cannot be written."""
    from specsim.serving.trace import Trace

    trace = arguments["trace"]
    source = arguments["requests"]
    for name in ("compare", "html_file"):
        options.without(name.removesuffix("_file"), arguments["adaptive"], arguments[name])
    if arguments["shape"] is not None and source is None:
        raise InputError("requests", "the shipped texts", "a file with prompt_ids, as --shape has no tokenizer")
    if arguments["compare"]:
        defaults = {"schedule": _SERVING.schedule, "prefix_cache": _SERVING.prefix_cache}
        for name, only in (defaults | {"trace": None, "html_file": None, "accept_rates": None}).items():
            require(arguments[name] == only, name, str(arguments[name]), f"only {only}, the default, with --compare")
    if trace is not None:
        with options.told_as(table="trace"):
            Trace().to_parquet()
