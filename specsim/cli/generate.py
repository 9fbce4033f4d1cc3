"""specsim generate: a text continued, and what speculation made of it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from specsim.cli import options
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.errors import InputError
from specsim.core.synthetic_acceptance import SCHEDULES

_TREE, _GREEDY = SpecConfig(), SamplingParams()


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
    engine = options.engine_options(given)
    acceptance = options.acceptance(given)
    text = None if shape is not None else _read_prompt(prompt, prompt_file)
    _check_prompt(given)
    _generate(given, text, config, sampling, engine=engine, acceptance=acceptance)


def _generate(
    given: dict[str, Any], text: str | None, config: SpecConfig, sampling: SamplingParams, **how: Any
) -> None:
    from specsim.core.display import metrics_rows, output_text, print_table, stdout_console
    from specsim.core.files import check_files, write_json
    from specsim.core.provenance import now
    from specsim.serving.generation import generate as continue_texts

    check_files({name: given[name] for name in ("prompt_file", "json_schema")}, json=given["json_file"])
    made = {
        "command": options.command("specsim generate", generate, given, without=("json_file",)),
        "date": now(),
        **{name: given[name] for name in ("impl", "dtype")},
    }
    pair = options.pair(given)
    prompts = [_random_prompt(pair, given["prompt_length"])] if text is None else text
    grammar = options.grammar(given, pair)
    generation = continue_texts(pair, prompts, config, sampling, grammars=grammar, progress=True, **how)
    console = stdout_console()
    try:
        console.out(output_text(generation.outputs[0]), highlight=False)
        console.print()
        print_table(console, (), [("pair", pair.name), *metrics_rows(generation)])
    finally:  # neither a closed terminal nor a full disk costs the other its result
        write_json(given["json_file"], made | {"pair": pair.name} | generation.to_json())


def _check_prompt(given: dict[str, Any]) -> None:
    """Weights with a tokenizer continue a text, random ones random tokens."""
    has_shape = given["shape"] is not None
    for name in ("prompt", "prompt_file") if has_shape else ("prompt_length",):
        if given[name] is not None:
            raise InputError(name, str(given[name]), f"none {'with' if has_shape else 'without'} --shape")


def _random_prompt(pair: Any, length: int | None) -> list[int]:
    from specsim.models.shapes import random_prompt

    return random_prompt(pair.target.config.vocab_size, 128 if length is None else length)


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The one text that was given, else the first shipped prompt."""
    if prompt_file is not None:
        if prompt is not None:
            raise InputError("prompt_file", str(prompt_file), "one of --prompt and --prompt-file")
        return _read_prompt_file(prompt_file)
    if prompt is None:
        from specsim.models.shipped import load_prompts

        return load_prompts()[0]["text"]
    return prompt


def _read_prompt_file(path: Path) -> str:
    from specsim.core.files import read_text

    allowed = "a UTF-8 text file that can be read and is not empty"
    text = read_text(path, "prompt_file", allowed)
    if not text:
        raise InputError("prompt_file", str(path), f"{allowed} (it is empty)")
    return text
