"""specsim generate: continue a text."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from specsim.cli.file_options import MOST_ROUNDS, write_rounds
from specsim.cli.option_fields import command_line, common, option, refuse_changes
from specsim.cli.options import (
    GREEDY,
    HtmlOptions,
    ImplementationOptions,
    JsonOptions,
    PairOptions,
    PolicyOptions,
    RuleOptions,
    exclusive,
    pick,
    report,
    shipped_texts,
)
from specsim.cli.ranks import RankOptions, in_ranks
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.errors import InputError, require
from specsim.core.limits import NonNegativeNumber, Penalty, Probability, RepetitionPenalty, SamplingTopK, Seed, Share

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.core.pair import Pair
    from specsim.core.rule import AcceptanceRule
    from specsim.serving.guidance import Guidance
    from specsim.serving.outputs import Generation


RANDOM_PROMPT = 128  # tokens of the prompt of random weights


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(
    PairOptions, ImplementationOptions, RankOptions, PolicyOptions, RuleOptions, HtmlOptions, JsonOptions
):
    """Options of specsim generate."""

    # Text to continue.
    prompt: Annotated[str | None, common("Requests", default="the first shipped prompt")] = None
    # UTF-8 text file to continue, instead of --prompt.
    prompt_file: Annotated[Path | None, common("Requests", file="reads")] = None
    # Largest number of new tokens.
    max_new_tokens: Annotated[int, common("Requests", at_least=1)] = GREEDY.max_new_tokens
    # Sampling temperature; 0 is greedy.
    temperature: Annotated[NonNegativeNumber, common("Sampling")] = GREEDY.temperature
    # Sample from this many most likely tokens; 0: from all. Trees have --topk.
    top_k: Annotated[SamplingTopK, option("Sampling")] = GREEDY.top_k
    # Sample from the most likely tokens up to this probability mass.
    top_p: Annotated[Share, option("Sampling")] = GREEDY.top_p
    # Drop tokens below this fraction of the highest probability.
    min_p: Annotated[Probability, option("Sampling")] = GREEDY.min_p
    # Penalty on tokens of prompt and output; 1: off.
    repetition_penalty: Annotated[RepetitionPenalty, option("Sampling")] = GREEDY.repetition_penalty
    # Penalty on tokens that the output has; 0: off.
    presence_penalty: Annotated[Penalty, option("Sampling")] = GREEDY.presence_penalty
    # Penalty per occurrence of a token in the output; 0: off.
    frequency_penalty: Annotated[Penalty, option("Sampling")] = GREEDY.frequency_penalty
    # Also report this many likeliest tokens at every place in --json, which specsim explain reads.
    top_logprobs: Annotated[int, option("Output", at_least=0)] = 0
    # Random seed.
    seed: Annotated[Seed, option("Sampling")] = GREEDY.seed
    # Regular expression that the output must match.
    regex: Annotated[str | None, option("Sampling", default="none")] = None
    # JSON Schema file that the output must match.
    json_schema: Annotated[Path | None, option("Sampling", default="none", file="reads")] = None

    def sampling(self) -> SamplingParams:
        """Make the sampling parameters; InputError for a filter that the greedy choice ignores."""
        sampling = pick(SamplingParams, self)
        for name in ("top_k", "top_p", "min_p") if self.temperature == 0 else ():
            value = getattr(self, name)
            default = getattr(GREEDY, name)
            if value != default:
                other = "; the tree's width is --topk" if name == "top_k" else ""
                raise InputError(name, value, f"only {default}, the default, at temperature 0, which is greedy{other}")
        return sampling

    def text(self) -> str | None:
        """Read the prompt, by default the first shipped one; None with random weights, which have random prompts."""
        if self.shape is not None:
            for name in ("prompt", "prompt_file"):
                if getattr(self, name) is not None:
                    raise exclusive(name, getattr(self, name), "--shape")
            return None
        text = self.prompt
        if self.prompt_file is not None:
            if text is not None:
                raise exclusive("prompt_file", self.prompt_file, "--prompt")
            text = _read_prompt_file(self.prompt_file)
        return shipped_texts(1)[0] if text is None else text

    def constraint(self) -> tuple[str, Any] | None:
        """Read what the output has to match, as a form of Guidance with its argument; None: it is free."""
        if self.regex is None and self.json_schema is None:
            return None
        if self.accept_rates is not None:
            name = "json_schema" if self.regex is None else "regex"
            raise exclusive(name, getattr(self, name), "--accept-rates")
        from specsim.core.files import read_json

        if self.json_schema is None:
            return "regex", self.regex
        if self.regex is not None:
            raise exclusive("json_schema", self.json_schema, "--regex")
        return "json_schema", read_json(self.json_schema, "json_schema", "a file with a JSON schema")


@in_ranks
def generate(options: GenerateOptions) -> None:
    """Continue a text with speculative decoding.

    Prints the text, accept lengths and speed. The shipped pair runs unless --target or --shape names another.

    Exit status: 0 when done, 2 for bad input, 3 if a rank fails.

    Examples:
      specsim generate --prompt "def add(a, b):" --max-new-tokens 32
      specsim generate --temperature 0.8 --verifier rejection --topk 1
      specsim generate --html rounds.html
    """
    config = options.config()
    sampling = options.sampling()
    options.without("rule", "html")
    if options.top_logprobs:
        require(options.json is not None, "top_logprobs", options.top_logprobs, "0 without --json")
        refuse_changes(options, ("accept_rates", "html"), "with --top-logprobs")
    policy = options.policy()
    verifier = None if options.rule is None else _load_rule(options.rule, config)
    has_grammar = options.regex is not None or options.json_schema is not None
    engine_options = options.engine_options(config, has_grammar, options.drafts_on_host(config), verifier is not None)
    acceptance = options.acceptance()
    text = options.text()
    from specsim.core.provenance import now
    from specsim.models.shapes import random_prompts

    header = {
        "command": command_line("generate", options),
        "date": now(),
        "impl": options.impl,
        "dtype": options.dtype,
    }
    constraint = options.constraint()
    loaded = options.load(config, engine_options)
    prompts = random_prompts(1, RANDOM_PROMPT, loaded.target.config.vocab_size) if text is None else text
    grammar = None if constraint is None else _grammar(*constraint, loaded)
    settings: dict[str, Any] = {
        "grammars": grammar,
        "engine": engine_options,
        "acceptance": acceptance,
        "verifier": verifier,
        "progress": True,
        **({} if policy is None else {"adaptive": policy}),
        **({"top_logprobs": options.top_logprobs} if options.top_logprobs else {}),
    }
    with ExitStack() as after:  # no output that fails costs the others their result
        generation = _run(after, options.html, (loaded, prompts, config, sampling), settings)
        _report(loaded.name, generation, options.json, header)


def _run(after: ExitStack, page: Path | None, request: tuple[Any, ...], settings: dict[str, Any]) -> "Generation":
    """Generate, and record the rounds where they go to a page, which is written after the other outputs."""
    if page is None:
        from specsim.serving.generation import generate as continue_texts

        return continue_texts(*request, **settings)
    from specsim.explorer.rounds import trace

    rounds = trace(*request, **settings, most_rounds=MOST_ROUNDS)
    after.callback(write_rounds, page, rounds)
    return rounds.generation


def _load_rule(rule_path: str, config: SpecConfig) -> "AcceptanceRule":
    """Load an acceptance rule for whose drafts the setting is."""
    from specsim.core.rule import load_rule

    rule = load_rule(rule_path)
    rule.check_config(config)
    return rule


def _report(name: str, generation: "Generation", file: Path | None, header: dict[str, Any]) -> None:
    from specsim.core.display import metrics_rows, output_text, print_table

    def show(console: "Console") -> None:
        console.out(output_text(generation.outputs[0]), highlight=False)
        console.print()
        print_table(console, (), [("pair", name), *metrics_rows(generation)])

    report("generate", show, header | {"pair": name} | generation.to_json(), file)


def _read_prompt_file(path: Path) -> str:
    from specsim.core.files import read_text

    allowed = "a UTF-8 text file that can be read and is not empty"
    text = read_text(path, "prompt_file", allowed)
    require(text, "prompt_file", str(path), f"{allowed} (it is empty)")
    return text


def _grammar(form: str, argument: Any, pair: "Pair") -> "Guidance":
    from specsim.serving.guidance import Guidance

    return getattr(Guidance, form)(pair, argument)
