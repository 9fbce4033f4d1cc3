"""specsim explain: the first token that two engines disagree about, and whether rounding explains it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim.cli import options
from specsim.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from specsim.correctness.explain import Answer, Finding
    from specsim.correctness.explain.weights import Weights


def explain(
    a: Annotated[Path, typer.Option(help="Answers of one engine, with logprobs.", show_default=False)],
    b: Annotated[Path, typer.Option(help="Another's, to the same prompts.", show_default=False)],
    dtype: Annotated[
        str, typer.Option(help="Of both engines' arithmetic.", metavar="|".join(options.DTYPES))
    ] = "bfloat16",
    target: Annotated[
        str | None, typer.Option(help="Folder or hub id of the weights, or tiny: measure.", show_default="assume")
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Tell rounding from faults where two engines differ.

    Exit status 1: fault.
    """
    from specsim.core.display import heading, print_table, stdout_console
    from specsim.core.files import check_apart, check_writable, write_json
    from specsim.correctness.explain import Noise, read_answers
    from specsim.correctness.explain import explain as compare

    for name, answers in (("a", a), ("b", b)):
        check_apart(**{name: answers}, json=json_file)
    check_writable(json_file)
    answers, noise = (read_answers(a, "a"), read_answers(b, "b")), Noise.of(dtype)
    findings = list(compare(*answers, noise))
    if target is not None:
        weights = _weights(target, dtype)
        findings = [_measured(each, answers[0][each.request], weights) for each in findings]
    else:
        heading(stdout_console(), f"assumed: a logit is off by {noise.error:.3g} at most ({noise.source})")
    rows = [_row(each) for each in findings]
    print_table(stdout_console(), ("request", "verdict", "place", "tokens", "margins", "drift", ""), rows)
    write_json(json_file, {"a": str(a), "b": str(b), "dtype": dtype, "findings": [asdict(each) for each in findings]})
    if any(each.verdict == "fault" for each in findings):
        raise typer.Exit(1)


def _row(finding: "Finding") -> tuple[str, ...]:
    def shown(values: tuple | None, form: "Callable[[Any], str]") -> str:
        return "" if values is None else " | ".join("-" if each is None else form(each) for each in values)

    place = "" if finding.place is None else str(finding.place)
    drift = f"{finding.drift:.2g}" if finding.drift_place is not None else "-"
    cells = (
        finding.verdict,
        place,
        shown(finding.tokens, repr),
        shown(finding.margins, "{:.3g}".format),
        drift,
        finding.says,
    )
    return (str(finding.request), *cells)


def _weights(target: str, dtype: str) -> "Weights":
    import torch

    from specsim.correctness.explain.weights import Weights
    from specsim.models.load import load

    pair = load(None if target == "tiny" else target, None, "none")
    return Weights.of(pair.target, getattr(torch, dtype))


def _measured(finding: "Finding", answer: "Answer", weights: "Weights") -> "Finding":
    """The finding by the weights: what the two tokens' logits are, and how far rounding takes them."""
    from specsim.correctness.explain.weights import judged

    has_ids = all(isinstance(token, int) for token in finding.tokens or (None,))
    if finding.verdict == "equal" or finding.is_drawn or not has_ids:
        return finding
    if not (isinstance(answer.prompt, tuple) and answer.prompt):
        raise InputError("a", "answers without prompt_token_ids", "answers with them, where the target is given")
    context = (*answer.prompt, *answer.tokens[: finding.place])
    vocab_size = weights.exact.config.vocab_size
    for name, ids in (("a", (*context, finding.tokens[0])), ("b", finding.tokens[1:])):
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                value = f"an answer with token id {token} (request {finding.request})"
                raise InputError(name, value, f"ids from 0 to {vocab_size - 1}, which the target has")
    return judged(finding, *weights.measure(context, finding.tokens))
