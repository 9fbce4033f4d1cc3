"""The command line. Some commands are functions here, the others modules of specsim.commands."""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer

from specsim import options
from specsim.commands.certify import certify
from specsim.commands.conformance import conformance
from specsim.commands.explain import explain
from specsim.commands.faults import faults
from specsim.commands.lint_report import lint_report
from specsim.commands.plan import plan
from specsim.commands.predict import predict
from specsim.commands.simulate import simulate
from specsim.commands.sweep import sweep
from specsim.config import InputError, SamplingParams, ServingConfig, SpecConfig
from specsim.synthetic import SCHEDULES

DEMO_PROMPTS = 6
_TREE, _GREEDY, _SERVING = SpecConfig(), SamplingParams(), ServingConfig()

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Exit status: 1 where an equality fails, 2 for bad input, 130 when interrupted."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - closed by whoever started this program
    sys.stdout.reconfigure(errors="replace")
    try:
        try:
            app(arguments, prog_name="specsim")
        finally:
            sys.stdout.flush()
    except InputError as error:
        _fail(error)
    except BrokenPipeError:
        _discard_stdout()
        sys.exit(1)
    except OSError as error:
        if error.filename is None:
            _discard_stdout()
        _fail(InputError(str(error.filename or "standard output"), error.strerror, "what can be read or written"))
    except RuntimeError as error:
        if not any(text in str(error) for text in ("allocate memory", "out of memory")):
            raise
        _fail(InputError("the memory of this setting", "more than there is", "smaller pages, trees or lengths"))


def _fail(error: InputError) -> None:
    print(f"specsim: {error}", file=sys.stderr)
    sys.exit(2)


def _discard_stdout() -> None:
    """What is still buffered goes nowhere, so that the interpreter's last flush does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print("specsim", version("specsim"))
        raise typer.Exit


@app.callback(invoke_without_command=True)
def specsim(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Speculative decoding with token trees (EAGLE-1, EAGLE-2, EAGLE-3)."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def demo() -> None:
    """Watch tree speculation on the shipped pair (under a minute)."""
    from specsim.checkpoint import load
    from specsim.demo import run
    from specsim.display import stdout_console
    from specsim.zoo import load_prompts

    texts = [prompt["text"] for prompt in load_prompts()[:DEMO_PROMPTS]]
    if not run(load(), texts, stdout_console()):
        raise typer.Exit(1)


@app.command()
def generate(
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
    prompt: Annotated[str | None, typer.Option(help="Text to continue.", show_default="a shipped one")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="UTF-8 file to continue, one text.")] = None,
    prompt_length: Annotated[
        int | None, typer.Option(help="Random tokens to continue, with --shape.", show_default="128")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to add.")] = _GREEDY.max_new_tokens,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = _GREEDY.temperature,
    top_k: Annotated[int, typer.Option(help="Most likely tokens kept; 0: all.")] = _GREEDY.top_k,
    top_p: Annotated[float, typer.Option(help="Probability mass kept, above 0 to 1.")] = _GREEDY.top_p,
    min_p: Annotated[float, typer.Option(help="Least share of the top probability, 0 to 1.")] = _GREEDY.min_p,
    repetition_penalty: Annotated[float, typer.Option(help="0.001 to 1000; 1: none.")] = _GREEDY.repetition_penalty,
    presence_penalty: Annotated[float, typer.Option(help="From -2 to 2.")] = _GREEDY.presence_penalty,
    frequency_penalty: Annotated[float, typer.Option(help="From -2 to 2.")] = _GREEDY.frequency_penalty,
    seed: Annotated[int, typer.Option(help="Names the random stream, 0 to 2^64 - 1.")] = _GREEDY.seed,
    regex: options.Regex = None,
    json_schema: options.JsonSchema = None,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    graph: options.Graph = None,
    bucket: options.Bucket = None,
    batch_invariant: options.BatchInvariant = False,
    json_file: options.JsonFile = None,
) -> None:
    """Continue a text, and show what speculation made of it."""
    given = locals()
    config, sampling = options.speculation(given), options.pick(SamplingParams, given)
    column, text = options.column(given), None if shape is not None else _read_prompt(prompt, prompt_file)
    _check_prompt(given)
    _generate(given, text, config, sampling, column)


def _generate(
    given: dict[str, Any], text: str | None, config: SpecConfig, sampling: SamplingParams, column: dict[str, Any]
) -> None:
    from specsim.display import metrics_rows, output_text, print_table, stdout_console
    from specsim.files import check_writable, write_json
    from specsim.generation import generate as continue_texts
    from specsim.provenance import now

    check_writable(given["json_file"])
    made = {
        "command": options.command("specsim generate", generate, given, without=("json_file",)),
        "date": now(),
        **{name: given[name] for name in ("impl", "dtype")},
    }
    pair = options.pair(given)
    prompts = [_random_prompt(pair, given["prompt_length"])] if text is None else text
    grammar = options.grammar(given, pair)
    generation = continue_texts(pair, prompts, config, sampling, grammars=grammar, progress=True, **column)
    console = stdout_console()
    try:
        console.out(output_text(generation.outputs[0]), highlight=False)
        console.print()
        print_table(console, (), [("pair", pair.name), *metrics_rows(generation)])
    finally:  # neither a closed terminal nor a full disk costs the other its result
        write_json(given["json_file"], made | {"pair": pair.name} | generation.to_json())


@app.command()
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
    retraction: Annotated[
        str, typer.Option(help="Who gives way when slots run out.", metavar="latest|shortest|longest")
    ] = _SERVING.retraction,
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
    serving = options.pick(ServingConfig, given | {"num_slots": slots})
    _run(given, config, serving, options.column(given))


def _run(given: dict[str, Any], config: SpecConfig, serving: ServingConfig, column: dict[str, Any]) -> None:
    from specsim.display import stdout_console
    from specsim.files import check_writable, write_json
    from specsim.generation import load_engine
    from specsim.provenance import now, versions
    from specsim.serving import serve
    from specsim.ways import compare
    from specsim.workload import parse_requests, read_file
    from specsim.zoo import REQUESTS

    check_writable(given["json_file"])
    _check_run(given)
    pair = options.pair(given)
    engine = load_engine(pair, config, **column)
    if given["bucket"] is not None and given["bucket"] < serving.max_running:
        raise InputError("bucket", given["bucket"], f"at least max_running, {serving.max_running}")
    file, date = given["requests"] or REQUESTS, now()
    read = partial(parse_requests, read_file(file), file, pair, given["skip_bad_lines"])
    if given["compare"]:
        result = compare(pair, engine, read, serving, progress=True, **column)
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
        "graph": getattr(engine, "graph", None),
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
    from specsim.files import check_writable
    from specsim.trace import Trace

    trace, source = given["trace"], given["requests"]
    if given["shape"] is not None and source is None:
        raise InputError("requests", "the shipped texts", "a file with prompt_ids: a --shape has no tokenizer")
    for name, file in (("json", given["json_file"]), ("trace", trace)):
        if source is not None and file is not None and os.path.realpath(file) == os.path.realpath(source):
            raise InputError(name, str(file), "another file than that of the requests")
    if given["compare"]:
        defaults = {"schedule": _SERVING.schedule, "prefix_cache": _SERVING.prefix_cache}
        for name, only in (defaults | {"trace": None, "accept_rates": None}).items():
            if given[name] != only:
                raise InputError(name, str(given[name]), f"only {only}, the default, with --compare")
    if trace is None:
        return
    if given["json_file"] is not None and os.path.realpath(trace) == os.path.realpath(given["json_file"]):
        raise InputError("trace", str(trace), "another file than --json's")
    Trace().write_parquet(os.devnull)
    check_writable(trace, "trace")


@app.command()
def soak(
    requests: Annotated[int | None, typer.Option(help="How many.", show_default="10000")] = None,
    seed: Annotated[int | None, typer.Option(help="Names the programs.", show_default="0")] = None,
    impl: options.Impl = "reference",
    device: options.Device = None,
    graph: Annotated[
        str | None,
        typer.Option(
            help="What the fast column replays.",
            metavar="eager|step|phase|round",
            show_default="another from program to program",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes that share the programs.")] = 2,
    program: Annotated[str | None, typer.Option(help="Only this one, as a failure names it.")] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Serve requests in random programs, each compared with itself alone (exit status 1: not equal)."""
    from specsim.display import stdout_console
    from specsim.files import check_writable, write_json
    from specsim.soak import soak

    check_writable(json_file)
    drawn = {"num_requests": requests, "seed": seed}
    drawn = {name: value for name, value in drawn.items() if value is not None}
    if program is not None and drawn:
        raise InputError("program", program, "alone, without --requests and --seed, which its name holds")
    arguments = {"impl": impl, "device": device, "graph": graph, "jobs": jobs, "program": program}
    result = soak(**drawn, progress=True, **arguments)
    try:
        result.show(stdout_console())
    finally:
        write_json(json_file, result.to_json())
    if not result.is_ok:
        raise typer.Exit(1)


@app.command()
def accept(
    prompts: Annotated[int | None, typer.Option(help="How many of the shipped prompts.", show_default="all")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens a prompt.")] = 64,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
) -> None:
    """Measure what the shipped drafters get accepted (some minutes)."""
    from specsim.accept import measure, show
    from specsim.checkpoint import load
    from specsim.display import stdout_console
    from specsim.files import check_writable, write_json
    from specsim.zoo import load_prompts

    SamplingParams(max_new_tokens=max_new_tokens)
    check_writable(json_file)
    texts = [prompt["text"] for prompt in load_prompts()]
    if prompts is not None and not 1 <= prompts <= len(texts):
        raise InputError("prompts", prompts, f"1 to {len(texts)}")
    pairs = {drafter: load(drafter=drafter) for drafter in ("eagle3", "eagle")}
    study = measure(pairs, texts[:prompts], max_new_tokens, progress=True)
    try:
        show(study, stdout_console())
    finally:
        write_json(json_file, study.to_json())
    if not study.is_lossless:
        raise typer.Exit(1)


@app.command()
def diff(
    grid: Annotated[
        str | None,
        typer.Option(
            help="Many settings, a cell each: 8 (half a minute), 89 (minutes), 1288 (hours; on a GPU minutes).",
            metavar="quick|pairwise|full",
            show_default="the one cell of the options below",
        ),
    ] = None,
    cell: Annotated[str | None, typer.Option(help="Only this cell of the grid, as a divergence names it.")] = None,
    drafter: Annotated[str, typer.Option(help="Who drafts.", metavar="eagle|eagle3")] = "eagle3",
    family: Annotated[
        str, typer.Option(help="Whose layers.", metavar="llama|qwen3|mistral|noisy|twins|shipped")
    ] = "llama",
    topk: options.Topk = _TREE.topk,
    num_steps: options.NumSteps = _TREE.num_steps,
    num_draft_tokens: options.NumDraftTokens = _TREE.num_draft_tokens,
    verifier: options.Verifier = _TREE.verifier,
    page_size: options.PageSize = _TREE.page_size,
    draft_kv: options.DraftKV = _TREE.draft_kv,
    extend: options.Extend = _TREE.extend,
    release: options.Release = _TREE.release,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = _GREEDY.temperature,
    batch: Annotated[int, typer.Option(help="Requests.")] = 3,
    graph: Annotated[str, typer.Option(help="What is replayed.", metavar="eager|step|phase|round")] = "eager",
    free: Annotated[
        bool, typer.Option("--free", help="Let columns keep their own states, not start each phase from one.")
    ] = False,
    impl: Annotated[str, typer.Option(help="Which column is checked.", metavar="fast|reference")] = "fast",
    device: Annotated[
        str | None, typer.Option(help="Where it runs.", metavar="cpu|cuda", show_default="a GPU if there is one")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and KV.", metavar="float32|bfloat16")] = "float32",
    shard: Annotated[str | None, typer.Option(help="Every n-th cell from the i-th.", metavar="i/n")] = None,
    jobs: Annotated[int, typer.Option(help="Processes that share the cells.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the cells that are in --json.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results here, cell by cell.")] = None,
) -> None:
    """Compare the fast column with the reference, phase by phase (exit status 1: not equal)."""
    _diff(locals())


def _diff(given: dict[str, Any]) -> None:
    """A grid brings its own settings: with it only what says what to run where may be given."""
    from specsim import differential
    from specsim.differential.grids import one_cell
    from specsim.differential.show import show
    from specsim.display import stdout_console
    from specsim.files import check_writable

    name, config = given["grid"], options.pick(SpecConfig, given)
    run = {key: given[key] for key in ("impl", "dtype", "device", "shard", "jobs", "resume", "json_file")}
    if name is not None:
        for key, parameter in signature(diff).parameters.items():
            if key not in (*run, "grid", "cell") and given[key] != parameter.default:
                raise InputError(key, given[key], f"{parameter.default}, the default, with a grid")
        cells = differential.grid(name)
        if given["cell"] is not None:
            name, cells = "one cell", tuple(each for each in cells if each.id == given["cell"])
            if not cells:
                raise InputError("cell", given["cell"], f"the name of a cell of the grid {given['grid']}")
    elif given["cell"] is not None:
        raise InputError("cell", given["cell"], "a name together with the grid that the cell is of")
    else:
        pair, mode = f"{given['drafter']}-{given['family']}", "free" if given["free"] else "lockstep"
        cells = (one_cell(config, given["temperature"], pair, given["batch"], mode, given["graph"]),)
    check_writable(given["json_file"])
    result = differential.run_grid(name or "one cell", cells, progress=True, **run)
    show(result, stdout_console())
    if result.failures():
        raise typer.Exit(1)


@app.command()
def bench(
    suite: Annotated[str, typer.Option(help="What is timed.", metavar="kernels|round|scale|peers")],
    shape: Annotated[str, typer.Option(help="Of the model, by name or config.json; weights random.")] = "llama-3-8b",
    only: Annotated[
        str, typer.Option(help="Groups of rows whose name holds this text.", show_default="all of the suite")
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Few points.")] = False,
    full: Annotated[bool, typer.Option("--full", help="All points of the grid (scale).")] = False,
    seconds: Annotated[
        float | None, typer.Option(help="Begin no further row after these.", show_default="the suite's own limit")
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Time the fast column on a GPU, each figure behind its equality check (exit status 1: one failed)."""
    _bench(locals())


def _bench(given: dict[str, Any]) -> None:
    from specsim.bench.run import bench as run_suite
    from specsim.bench.run import check_options
    from specsim.bench.show import show
    from specsim.bench.suites import Options
    from specsim.display import stdout_console
    from specsim.files import check_writable

    asked = Options(**{name: each for name, each in given.items() if name != "json_file"})
    check_options(asked)
    check_writable(given["json_file"])
    console, line = stdout_console(), options.command("specsim bench", bench, given, without=("json_file",))
    result = run_suite(asked, line, given["json_file"], console)
    show(result, console)
    if not result.passed:
        raise typer.Exit(1)


app.command()(certify)
app.command()(conformance)
app.command()(explain)
app.command()(faults)
app.command()(lint_report)
app.command()(simulate)
app.command()(predict)
app.command()(plan)
app.command()(sweep)


def _check_prompt(given: dict[str, Any]) -> None:
    """Weights with a tokenizer continue a text, random ones random tokens."""
    has_shape = given["shape"] is not None
    for name in ("prompt", "prompt_file") if has_shape else ("prompt_length",):
        if given[name] is not None:
            raise InputError(name, str(given[name]), f"none {'with' if has_shape else 'without'} --shape")


def _random_prompt(pair: Any, length: int | None) -> list[int]:
    from specsim.shapes import random_prompt

    return random_prompt(pair.target.config.vocab_size, 128 if length is None else length)


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The one text that was given, else the first shipped prompt."""
    if prompt_file is not None:
        if prompt is not None:
            raise InputError("prompt_file", str(prompt_file), "one of --prompt and --prompt-file")
        return _read_prompt_file(prompt_file)
    if prompt is None:
        from specsim.zoo import load_prompts

        return load_prompts()[0]["text"]
    return prompt


def _read_prompt_file(path: Path) -> str:
    from specsim.files import read_text

    allowed = "a UTF-8 text file that can be read and is not empty"
    text = read_text(path, "prompt_file", allowed)
    if not text:
        raise InputError("prompt_file", str(path), f"{allowed} (it is empty)")
    return text
