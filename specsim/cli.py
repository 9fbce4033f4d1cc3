"""The command line: specsim demo, generate, accept, diff."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from specsim.config import InputError, SamplingParams, SpecConfig

DEMO_PROMPTS = 6
_TREE, _GREEDY = SpecConfig(), SamplingParams()
_SPECULATION = ("topk", "num_steps", "num_draft_tokens", "draft_kv", "extend", "release")
_DTYPES = ("float32", "float64", "bfloat16", "float16")
_Settings = TypeVar("_Settings", SpecConfig, SamplingParams)

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
    impl: Annotated[str, typer.Option(help="Which column runs.", metavar="reference|fast")] = "reference",
    drafter: Annotated[
        str | None,
        typer.Option(help="Who drafts.", metavar="eagle|eagle3|none", show_default="eagle3, or --draft's kind"),
    ] = None,
    topk: Annotated[int, typer.Option(help="Drafts kept at each step; 1 is a chain.")] = _TREE.topk,
    num_steps: Annotated[int, typer.Option(help="Depth of the tree.")] = _TREE.num_steps,
    num_draft_tokens: Annotated[int, typer.Option(help="Nodes of the tree, root too.")] = _TREE.num_draft_tokens,
    page_size: Annotated[int, typer.Option(help="Slots of a KV page.")] = _TREE.page_size,
    draft_kv: Annotated[str, typer.Option(help="Whose KV a draft sees.", metavar="lane|ancestor")] = _TREE.draft_kv,
    extend: Annotated[str, typer.Option(help="Rows of draft-extend.", metavar="fixed|ragged")] = _TREE.extend,
    release: Annotated[str, typer.Option(help="When slots are freed.", metavar="finish|round")] = _TREE.release,
    max_len: Annotated[int | None, typer.Option(help="Most tokens with prompt.", show_default="the target's")] = None,
    target: Annotated[str | None, typer.Option(help="Folder or hub id.", show_default="the shipped one")] = None,
    draft: Annotated[str | None, typer.Option(help="Folder or hub id.", show_default="the shipped one")] = None,
    draft_field: Annotated[
        list[str] | None,
        typer.Option(help="A field of the drafter's config.json, which it lacks or has wrong.", metavar="NAME=JSON"),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.", show_default="a shipped one")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="UTF-8 file to continue, one text.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to add.")] = _GREEDY.max_new_tokens,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = _GREEDY.temperature,
    top_k: Annotated[int, typer.Option(help="Most likely tokens kept; 0: all.")] = _GREEDY.top_k,
    top_p: Annotated[float, typer.Option(help="Probability mass kept, above 0 to 1.")] = _GREEDY.top_p,
    min_p: Annotated[float, typer.Option(help="Least share of the top probability, 0 to 1.")] = _GREEDY.min_p,
    repetition_penalty: Annotated[float, typer.Option(help="0.001 to 1000; 1: none.")] = _GREEDY.repetition_penalty,
    presence_penalty: Annotated[float, typer.Option(help="From -2 to 2.")] = _GREEDY.presence_penalty,
    frequency_penalty: Annotated[float, typer.Option(help="From -2 to 2.")] = _GREEDY.frequency_penalty,
    seed: Annotated[int, typer.Option(help="Names the random stream, 0 to 2^64 - 1.")] = _GREEDY.seed,
    dtype: Annotated[str, typer.Option(help="Of weights and KV.", metavar="|".join(_DTYPES))] = "float32",
    device: Annotated[
        str | None, typer.Option(help="Of the fast column.", metavar="cpu|cuda", show_default="a GPU if there is one")
    ] = None,
    graph: Annotated[
        str | None,
        typer.Option(
            help="What the fast column replays.",
            metavar="eager|step|phase|round",
            show_default="round, or phase with --release round",
        ),
    ] = None,
    bucket: Annotated[
        int | None, typer.Option(help="Requests its buffers hold.", show_default="the next power of two")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
) -> None:
    """Continue a text, and show what speculation made of it."""
    options = locals()
    config, sampling = _speculation(options), _pick(SamplingParams, options)
    if dtype not in _DTYPES:
        raise InputError("dtype", dtype, " or ".join(_DTYPES))
    text = _read_prompt(prompt, prompt_file)
    _generate(options, text, config, sampling)


def _generate(options: dict[str, Any], text: str, config: SpecConfig, sampling: SamplingParams) -> None:
    import torch

    from specsim.checkpoint import load
    from specsim.display import metrics_rows, print_table, stdout_console
    from specsim.generation import generate
    from specsim.json_file import check_writable, write_json

    check_writable(options["json_file"])
    draft_fields = dict(map(_field, options["draft_field"] or ()))
    pair = load(options["target"], options["draft"], options["drafter"], draft_fields)
    dtype = getattr(torch, options["dtype"])
    column = {name: options[name] for name in ("impl", "device", "graph", "bucket")}
    generation = generate(pair, text, config, sampling, dtype=dtype, progress=True, **column)
    console = stdout_console()
    try:
        console.out(generation.outputs[0].text, highlight=False)
        console.print()
        print_table(console, (), [("pair", pair.name), *metrics_rows(generation)])
    finally:  # neither a closed terminal nor a full disk costs the other its result
        write_json(options["json_file"], generation.to_json())


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
    from specsim.json_file import check_writable, write_json
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
            help="Many settings, a cell each: 8 (half a minute), 84 (minutes), 1283 (hours; on a GPU minutes).",
            metavar="quick|pairwise|full",
            show_default="the one cell of the options below",
        ),
    ] = None,
    cell: Annotated[str | None, typer.Option(help="Only this cell of the grid, as a divergence names it.")] = None,
    drafter: Annotated[str, typer.Option(help="Who drafts.", metavar="eagle|eagle3")] = "eagle3",
    family: Annotated[
        str, typer.Option(help="Whose layers.", metavar="llama|qwen3|mistral|noisy|twins|shipped")
    ] = "llama",
    topk: Annotated[int, typer.Option(help="Drafts kept at each step; 1 is a chain.")] = _TREE.topk,
    num_steps: Annotated[int, typer.Option(help="Depth of the tree.")] = _TREE.num_steps,
    num_draft_tokens: Annotated[int, typer.Option(help="Nodes of the tree, root too.")] = _TREE.num_draft_tokens,
    page_size: Annotated[int, typer.Option(help="Slots of a KV page.")] = _TREE.page_size,
    draft_kv: Annotated[str, typer.Option(help="Whose KV a draft sees.", metavar="lane|ancestor")] = _TREE.draft_kv,
    extend: Annotated[str, typer.Option(help="Rows of draft-extend.", metavar="fixed|ragged")] = _TREE.extend,
    release: Annotated[str, typer.Option(help="When slots are freed.", metavar="finish|round")] = _TREE.release,
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


def _diff(options: dict[str, Any]) -> None:
    """A grid brings its own settings: with it only what says what to run where may be given."""
    from specsim import differential
    from specsim.differential.grids import one_cell
    from specsim.differential.show import show
    from specsim.display import stdout_console
    from specsim.json_file import check_writable

    name, config = options["grid"], _pick(SpecConfig, options)
    run = {key: options[key] for key in ("impl", "dtype", "device", "shard", "jobs", "resume", "json_file")}
    if name is not None:
        for key, parameter in signature(diff).parameters.items():
            if key not in (*run, "grid", "cell") and options[key] != parameter.default:
                raise InputError(key, options[key], f"{parameter.default}, the default, with a grid")
        cells = differential.grid(name)
        if options["cell"] is not None:
            name, cells = "one cell", tuple(each for each in cells if each.id == options["cell"])
            if not cells:
                raise InputError("cell", options["cell"], f"the name of a cell of the grid {options['grid']}")
    elif options["cell"] is not None:
        raise InputError("cell", options["cell"], "a name together with the grid that the cell is of")
    else:
        pair, mode = f"{options['drafter']}-{options['family']}", "free" if options["free"] else "lockstep"
        cells = (one_cell(config, options["temperature"], pair, options["batch"], mode, options["graph"]),)
    check_writable(options["json_file"])
    result = differential.run_grid(name or "one cell", cells, progress=True, **run)
    show(result, stdout_console())
    if result.failures():
        raise typer.Exit(1)


def _pick(settings: type[_Settings], options: dict[str, Any]) -> _Settings:
    """Settings from the options of the same names."""
    return settings(**{field.name: options[field.name] for field in fields(settings) if field.name in options})


def _speculation(options: dict[str, Any]) -> SpecConfig:
    if options["drafter"] != "none":
        return _pick(SpecConfig, options)
    for name in _SPECULATION:
        if options[name] != getattr(_TREE, name):
            raise InputError(name, options[name], f"only {getattr(_TREE, name)}, the default, with drafter none")
    return SpecConfig.plain(options["page_size"], options["max_len"])


def _field(assignment: str) -> tuple[str, Any]:
    """NAME=JSON; a value that is no JSON stands for itself, so that words need no quotes."""
    name, equals, value = assignment.partition("=")
    if not name or not equals:
        raise InputError("draft_field", assignment, "NAME=JSON, such as norm_before_residual=true")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


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
    allowed = "a UTF-8 text file that can be read and is not empty"
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.reason
        raise InputError("prompt_file", str(path), f"{allowed} ({reason})") from error
    if not text:
        raise InputError("prompt_file", str(path), f"{allowed} (it is empty)")
    return text
