"""specsim generate: continue a text."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from specsim.cli import options
from specsim.cli.file_options import MOST_ROUNDS, reads, write_rounds
from specsim.cli.option_groups import EngineGroup, PairGroup, TreeGroup, flat, with_groups
from specsim.cli.options import option
from specsim.cli.ranks import RankOptions, in_ranks
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.errors import InputError, require, require_int

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.core.pair import Pair
    from specsim.core.rule import AcceptanceRule
    from specsim.serving.guidance import Guidance
    from specsim.serving.outputs import Generation

_GREEDY = SamplingParams()


@in_ranks
@with_groups
def generate(
    *,
    tree: TreeGroup,
    pair: PairGroup,
    prompt: Annotated[
        str | None, option("Requests", "Text to continue.", show_default="the first shipped prompt")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        option("Requests", "UTF-8 text file to continue, instead of --prompt.", metavar="FILE", callback=reads),
    ] = None,
    prompt_length: Annotated[
        int | None,
        option("Requests", "Random prompt tokens; needs --shape. [at least 1]", show_default="128"),
    ] = None,
    max_new_tokens: Annotated[
        int, option("Requests", "Largest number of new tokens. [at least 1]")
    ] = _GREEDY.max_new_tokens,
    temperature: Annotated[
        float, option("Sampling", "Sampling temperature; 0 is greedy. [at least 0]")
    ] = _GREEDY.temperature,
    top_k: Annotated[
        int,
        option("Sampling", "Sample from this many most likely tokens; 0: from all. Trees have --topk. [at least 0]"),
    ] = _GREEDY.top_k,
    top_p: Annotated[
        float,
        option("Sampling", "Sample from the most likely tokens up to this probability mass. [above 0, at most 1]"),
    ] = _GREEDY.top_p,
    min_p: Annotated[
        float,
        option("Sampling", "Drop tokens below this fraction of the highest probability. [0 to 1]"),
    ] = _GREEDY.min_p,
    repetition_penalty: Annotated[
        float, option("Sampling", "Penalty on tokens of prompt and output; 1: off. [0.001 to 1000]")
    ] = _GREEDY.repetition_penalty,
    presence_penalty: Annotated[
        float, option("Sampling", "Penalty on tokens that the output has; 0: off. [-2 to 2]")
    ] = _GREEDY.presence_penalty,
    frequency_penalty: Annotated[
        float, option("Sampling", "Penalty per occurrence of a token in the output; 0: off. [-2 to 2]")
    ] = _GREEDY.frequency_penalty,
    seed: Annotated[int, option("Sampling", "Random seed. [0 to 2^64 - 1]")] = _GREEDY.seed,
    regex: Annotated[
        str | None,
        option("Sampling", "Regular expression that the output must match.", show_default="none"),
    ] = None,
    json_schema: Annotated[
        Path | None,
        option(
            "Sampling",
            "JSON Schema file that the output must match.",
            metavar="FILE",
            show_default="none",
            callback=reads,
        ),
    ] = None,
    rule: options.Rule = None,
    adaptive: options.Adaptive = None,
    adaptive_per_request: options.AdaptivePerRequest = False,
    engine: EngineGroup,
    ranks: RankOptions,
    json_file: options.JsonFile = None,
    html_file: options.HtmlFile = None,
) -> None:
    """Continue a text with speculative decoding.

    Prints the text, accept lengths and speed. The shipped pair runs unless --target or --shape names another.

    Exit status: 0 when done, 2 for bad input, 3 if a rank fails.

    Examples:
      specsim generate --prompt "def add(a, b):" --max-new-tokens 32
      specsim generate --temperature 0.8 --verifier rejection --topk 1
      specsim generate --html rounds.html
    """
    arguments = flat(locals())
    config = pair.config(tree)
    sampling = options.pick(SamplingParams, arguments)
    _check_filters(sampling)
    for name, value in (("rule", rule), ("html", html_file)):
        options.without(name, adaptive, value)
    policy = options.policy(adaptive, adaptive_per_request)
    verifier = None if rule is None else _load_rule(rule, config)
    has_grammar = regex is not None or json_schema is not None
    engine_options = engine.options(config, has_grammar, pair.drafts_on_host(config), verifier is not None)
    engine_options = ranks.of(engine_options)
    acceptance = pair.acceptance(tree.num_steps)
    text = None if pair.shape is not None else _read_prompt(prompt, prompt_file)
    _check_prompt(arguments)
    from specsim.core.provenance import now
    from specsim.models.shapes import random_prompts

    header = {
        "command": options.command(generate, arguments),
        "date": now(),
        "impl": engine.impl,
        "dtype": engine.dtype,
    }
    constraint = _constraint(arguments)
    length = 128 if prompt_length is None else require_int("prompt_length", prompt_length)
    loaded = pair.load(config, engine_options)
    prompts = random_prompts(1, length, loaded.target.config.vocab_size) if text is None else text
    grammar = None if constraint is None else _grammar(*constraint, loaded)
    settings: dict[str, Any] = {
        "grammars": grammar,
        "engine": engine_options,
        "acceptance": acceptance,
        "verifier": verifier,
        "progress": True,
        **({} if policy is None else {"adaptive": policy}),
    }
    with ExitStack() as after:  # no output that fails costs the others their result
        generation = _run(after, html_file, (loaded, prompts, config, sampling), settings)
        _report(loaded.name, generation, json_file, header)


def _run(after: ExitStack, html_file: Path | None, request: tuple[Any, ...], settings: dict[str, Any]) -> "Generation":
    """Generate, and record the rounds where they go to a page, which is written after the other outputs."""
    if html_file is None:
        from specsim.serving.generation import generate as continue_texts

        return continue_texts(*request, **settings)
    from specsim.explorer.rounds import trace

    rounds = trace(*request, **settings, most_rounds=MOST_ROUNDS)
    after.callback(write_rounds, html_file, rounds)
    return rounds.generation


def _load_rule(rule_path: str, config: SpecConfig) -> "AcceptanceRule":
    """Load an acceptance rule for whose drafts the setting is."""
    from specsim.core.rule import load_rule

    rule = load_rule(rule_path)
    rule.check_config(config)
    return rule


def _report(name: str, generation: "Generation", json_file: Path | None, header: dict[str, Any]) -> None:
    from specsim.core.display import metrics_rows, output_text, print_table

    def show(console: "Console") -> None:
        console.out(output_text(generation.outputs[0]), highlight=False)
        console.print()
        print_table(console, (), [("pair", name), *metrics_rows(generation)])

    options.report("generate", show, header | {"pair": name} | generation.to_json(), json_file)


def _check_filters(sampling: SamplingParams) -> None:
    """Refuse a filter that the greedy choice ignores."""
    for name in ("top_k", "top_p", "min_p") if sampling.temperature == 0 else ():
        value = getattr(sampling, name)
        default = getattr(_GREEDY, name)
        if value != default:
            other = "; the tree's width is --topk" if name == "top_k" else ""
            raise InputError(name, value, f"only {default}, the default, at temperature 0, which is greedy{other}")


def _check_prompt(arguments: dict[str, Any]) -> None:
    """Refuse a text with random weights, and a length without them."""
    if arguments["shape"] is None:
        length = arguments["prompt_length"]
        require(length is None, "prompt_length", length, "nothing without --shape, which has random prompts")
        return
    for name in ("prompt", "prompt_file"):
        if arguments[name] is not None:
            raise options.exclusive(name, arguments[name], "--shape")


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Give the text of an option, or the first shipped prompt."""
    if prompt_file is not None:
        if prompt is not None:
            raise options.exclusive("prompt_file", prompt_file, "--prompt")
        return _read_prompt_file(prompt_file)
    if prompt is None:
        from specsim.models.shipped import load_prompts

        return load_prompts()[0]["text"]
    return prompt


def _read_prompt_file(path: Path) -> str:
    from specsim.core.files import read_text

    allowed = "a UTF-8 text file that can be read and is not empty"
    text = read_text(path, "prompt_file", allowed)
    require(text, "prompt_file", str(path), f"{allowed} (it is empty)")
    return text


def _constraint(arguments: dict[str, Any]) -> tuple[str, Any] | None:
    """Read what the output has to match, as a form of Guidance with its argument; None: it is free."""
    pattern: str | None = arguments["regex"]
    file: Path | None = arguments["json_schema"]
    if pattern is None and file is None:
        return None
    if arguments["accept_rates"] is not None:
        name = "json_schema" if pattern is None else "regex"
        raise options.exclusive(name, arguments[name], "--accept-rates")
    from specsim.core.files import read_json

    if file is None:
        return "regex", pattern
    if pattern is not None:
        raise options.exclusive("json_schema", file, "--regex")
    return "json_schema", read_json(file, "json_schema", "a file with a JSON schema")


def _grammar(form: str, argument: Any, pair: "Pair") -> "Guidance":
    from specsim.serving.guidance import Guidance

    return getattr(Guidance, form)(pair, argument)
