"""specsim explain: the first token at which two engines differ, and whether rounding explains it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from specsim.cli.option_fields import common
from specsim.cli.options import JsonOptions, report
from specsim.core.errors import InputError, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from specsim.acceptance.draft_difference import DraftDifference
    from specsim.correctness.explain import Answer, AnswerComparison
    from specsim.correctness.explain.finding import ComparedWeights


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(JsonOptions):
    """Options of specsim explain."""

    # One engine's answers, with log probabilities if it gives them, as written by generate --json, run --json, vLLM,
    # SGLang or the OpenAI API.
    a: Annotated[Path, common("Answers", file="reads")]
    # The other engine's answers to the same prompts.
    b: Annotated[Path, common("Answers", file="reads")]
    # Data type of both engines.
    dtype: Annotated[Literal["float32", "float64", "bfloat16", "float16"], common("Answers")] = "bfloat16"
    # Target that measures the rounding error: a folder, a hub id, or tiny.
    target: Annotated[str | None, common("Answers", default="assume a rounding error from --dtype", file="reads")] = (
        None
    )
    # Acceptance of drafts behind the answers of --a: a file of specsim, or metrics of an engine.
    accepted_a: Annotated[Path | None, common("Answers", default="those of --a, if it has any", file="reads")] = None
    # Acceptance of drafts behind the answers of --b.
    accepted_b: Annotated[Path | None, common("Answers", default="those of --b, if it has any", file="reads")] = None

    def drafts(self, texts_are_equal: bool) -> "DraftDifference | None":
        """Compare the accepted drafts of both sides; None unless both are known, or asked for where texts differ."""
        from specsim.acceptance.draft_difference import compare_drafts
        from specsim.acceptance.files import read_record

        is_given = self.accepted_a is not None or self.accepted_b is not None
        if not (is_given or texts_are_equal):
            return None
        try:
            record_a = read_record(self.accepted_a or self.a, "accepted_a")
            record_b = read_record(self.accepted_b or self.b, "accepted_b")
        except InputError:
            if is_given:
                raise
            return None
        return compare_drafts(record_a, record_b, texts_are_equal)


def explain(options: ExplainOptions) -> None:
    """Tell rounding from faults where two engines differ.

    For each request, the verdict depends on the margin between the two tokens at the first difference. Where both sides
    count accepted drafts, these are compared too: a drafter's fault changes no text.

    Exit status: 0 if rounding explains every difference, 1 if one is a fault, 2 for bad input and if no answer can be
    compared.

    Examples:
      specsim explain --a vllm.json --b sglang.json
      specsim explain --a vllm.json --b sglang.json --target ./Llama-3.1-8B
    """
    from specsim.core.display import heading, print_table
    from specsim.correctness.explain import Noise, read_answers
    from specsim.correctness.explain import explain as compare

    answers_a = read_answers(options.a, "a")
    noise = Noise.of(options.dtype)
    findings = list(compare(answers_a, read_answers(options.b, "b"), noise))
    if options.target is not None:
        weights = _weights(options.target, options.dtype)
        findings = [_measured(finding, answers_a[finding.request], weights) for finding in findings]

    drafts = options.drafts(all(finding.verdict == "equal" for finding in findings))

    def show(console: "Console") -> None:
        if options.target is None:
            heading(console, f"assumed: a logit is off by {noise.error:.3g} at most ({noise.source})")
        columns = ("request", "verdict", "place", "tokens", "margins", "drift", "")
        print_table(console, columns, [_row(finding) for finding in findings])
        if drafts is not None:
            heading(console, f"drafts: {drafts.says}")
            rows = [
                (name, f"{rounds:,}", ", ".join(map("{:,}".format, accepted)))
                for name, (rounds, *accepted) in (("a", drafts.a), ("b", drafts.b))
            ]
            print_table(console, ("", "rounds with drafts", "of them accepted 1, 2, ..."), rows)

    files = {"a": str(options.a), "b": str(options.b)}
    value = files | {"dtype": options.dtype, "findings": [asdict(finding) for finding in findings]}
    value["drafts"] = drafts and asdict(drafts)
    report("explain", show, value, options.json, all(finding.verdict != "fault" for finding in findings))
    is_decided = any(finding.verdict != "undecided" for finding in findings)
    require(is_decided, "b", str(options.b), "answers that can be compared; the table has the reasons why none can")


def _row(finding: "AnswerComparison") -> tuple[str, ...]:
    def cell_text(values: tuple | None, form: "Callable[[Any], str]") -> str:
        return "" if values is None else " | ".join("-" if value is None else form(value) for value in values)

    position = "" if finding.place is None else str(finding.place)
    drift = f"{finding.drift:.2g}" if finding.drift_place is not None else "-"
    cells = (
        finding.verdict,
        position,
        cell_text(finding.tokens, repr),
        cell_text(finding.margins, "{:.3g}".format),
        drift,
        finding.says,
    )
    return (str(finding.request), *cells)


def _weights(target: str, dtype: str) -> "ComparedWeights":
    import torch

    from specsim.correctness.explain.finding import ComparedWeights
    from specsim.models.load import load

    pair = load(target, None, "none")
    return ComparedWeights.of(pair.target, getattr(torch, dtype))


def _measured(finding: "AnswerComparison", answer: "Answer", weights: "ComparedWeights") -> "AnswerComparison":
    """Decide a finding by the weights, where both tokens are given by their ids."""
    from specsim.correctness.explain.finding import decide

    a, b = finding.tokens or (None, None)
    if finding.verdict == "equal" or finding.is_drawn or not isinstance(a, int) or not isinstance(b, int):
        return finding
    if not (isinstance(answer.prompt, tuple) and answer.prompt):
        raise InputError("a", "answers without prompt_token_ids", "answers with prompt_token_ids, which --target needs")
    vocab_size = weights.exact.config.vocab_size

    def checked(name: str, token: int | str) -> int:
        if type(token) is not int or not 0 <= token < vocab_size:
            value = f"an answer with token id {token} (request {finding.request})"
            raise InputError(name, value, f"ids from 0 to {vocab_size - 1}, which the target has")
        return token

    context = [checked("a", token) for token in (*answer.prompt, *answer.tokens[: finding.place])]
    return decide(finding, *weights.measure(context, (checked("a", a), checked("b", b))))
