"""specsim run: a file of requests, served."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from specsim.cli import options
from specsim.core.config import ServingConfig, SpecConfig
from specsim.core.errors import InputError
from specsim.core.synthetic_acceptance import SCHEDULES

_TREE, _SERVING = SpecConfig(), ServingConfig()


def run(
    requests: Annotated[
        Path | None, typer.Option(help="JSON lines, a request a line.", show_default="the shipped ones")
    ] = None,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Tell bad lines, and run the others.")
    ] = False,
    schedule: Annotated[
        str, typer.Option(help="Results are read in their step, or one later.", metavar="sync|overlap")
    ] = _SERVING.schedule,
    max_running: Annotated[int, typer.Option(help="Most requests at a time.")] = _SERVING.max_running,
    slots: Annotated[int, typer.Option(help="KV slots of the pool.")] = _SERVING.num_slots,
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Most prompt tokens a step prefills.", show_default="no limit")
    ] = _SERVING.chunk_tokens,
    prefix_cache: Annotated[bool, typer.Option(help="Keep KV for equal prefixes.")] = _SERVING.prefix_cache,
    preemption: Annotated[
        str, typer.Option(help="Who gives way when slots run out.", metavar="latest|shortest|longest")
    ] = _SERVING.preemption,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Both schedules, prefix cache off and on: exit status 1 unless each request is as alone."
        ),
    ] = False,
    impl: options.Impl = "reference",
    drafter: options.Drafter = None,
    topk: options.Topk = _TREE.topk,
    num_steps: options.NumSteps = _TREE.num_steps,
    num_draft_tokens: options.NumDraftTokens = _TREE.num_draft_tokens,
    verifier: options.Verifier = _TREE.verifier,
    page_size: options.PageSize = _TREE.page_size,
    draft_kv: options.DraftKV = _TREE.draft_kv,
    extend: options.Extend = _TREE.extend,
    release: options.Release = _TREE.release,
    max_len: options.MaxLen = None,
    target: options.Target = None,
    draft: options.Draft = None,
    draft_field: options.DraftField = None,
    shape: options.Shape = None,
    accept_rates: options.AcceptRates = None,
    accept_schedule: options.AcceptSchedule = SCHEDULES[0],
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    graph: options.Graph = None,
    bucket: options.Bucket = None,
    batch_invariant: options.BatchInvariant = False,
    json_file: options.JsonFile = None,
    trace: Annotated[Path | None, typer.Option(help="Write what happened, step by step, as Parquet.")] = None,
) -> None:
    """Serve a file of requests that come and go, and show what came of each.

    Try: specsim run --slots 896 --chunk-tokens 24 --compare
    """
    given = locals()
    config = options.speculation(given)
    with options.told_as(num_slots="slots"):
        serving = options.pick(ServingConfig, given | {"num_slots": slots})
        _run(given, config, serving)


def _run(given: dict[str, Any], config: SpecConfig, serving: ServingConfig) -> None:
    from specsim.core.display import stdout_console
    from specsim.core.files import write_json
    from specsim.core.provenance import now, versions
    from specsim.correctness.invariance.modes import compare
    from specsim.models.shipped import REQUESTS
    from specsim.serving.generation import load_engine
    from specsim.serving.serve import serve
    from specsim.serving.workload import parse_requests, read_file

    engine_options, acceptance = options.engine_options(given), options.acceptance(given)
    _check_run(given)
    pair = options.pair(given)
    engine = load_engine(pair, config, engine_options, acceptance=acceptance)
    if given["bucket"] is not None and given["bucket"] < serving.max_running:
        raise InputError("bucket", given["bucket"], f"at least max_running, {serving.max_running}")
    file, date = given["requests"] or REQUESTS, now()
    read = partial(parse_requests, read_file(file), file, pair, given["skip_bad_lines"])
    if given["compare"]:
        result = compare(pair, engine, read, serving, progress=True)
    else:
        workload = read()
        result = serve(engine, workload.requests, serving, skipped=workload.skipped, progress=True)
    made = {
        "command": options.command("specsim run", run, given, without=("json_file", "trace")),
        "file": str(file),
        "date": date,
        "versions": versions(engine.device.type),
        "pair": pair.name,
        **{name: given[name] for name in ("impl", "dtype", "bucket", "batch_invariant")},
        "device": engine.device.type,
        "graph": engine.options.graph if given["impl"] == "fast" else None,
    }
    with ExitStack() as after:  # no output that fails costs the others their result
        after.callback(write_json, given["json_file"], made | result.to_json())
        if given["trace"] is not None:
            after.callback(result.trace.write_parquet, given["trace"])
        result.show(stdout_console())
    if given["compare"] and not result.is_equal:
        raise typer.Exit(1)


def _check_run(given: dict[str, Any]) -> None:
    """What can be known before a long run: options that exclude each other, and whether a trace can be written."""
    from specsim.core.files import check_files
    from specsim.serving.trace import Trace

    trace, source = given["trace"], given["requests"]
    check_files({"requests": source}, json=given["json_file"], trace=trace)
    if given["shape"] is not None and source is None:
        raise InputError("requests", "the shipped texts", "a file with prompt_ids: a --shape has no tokenizer")
    if given["compare"]:
        defaults = {"schedule": _SERVING.schedule, "prefix_cache": _SERVING.prefix_cache}
        for name, only in (defaults | {"trace": None, "accept_rates": None}).items():
            if given[name] != only:
                raise InputError(name, str(given[name]), f"only {only}, the default, with --compare")
    if trace is not None:
        Trace().to_parquet()
