"""Display of results: tables in a terminal, plain text in a pipe, HTML in a notebook."""

import math
import sys
from collections.abc import Callable, Sequence
from html import escape
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specsim.core.errors import printable, round_name
from specsim.core.verifiers import DEFAULT_VERIFIER

WIDTH = 100
NAME_WIDTH = 24  # of names in the first column that are never wrapped
LEGEND = "A background is one round; its bonus token is underlined."
_TINTS = ("rgba(0,114,178,.20)", "rgba(230,159,0,.28)")  # rounds in turn; told apart also without colour vision


class _Output(Console):
    """A console that escapes control characters in what it is given, such as names from files."""

    def print(self, *objects: Any, **settings: Any) -> None:
        """Print texts, escaped, and other objects of rich."""
        super().print(*map(_escaped, objects), **settings)

    def out(self, *objects: Any, **settings: Any) -> None:
        """Print texts as they are, but escaped."""
        super().out(*map(_escaped, objects), **settings)


def _escaped(value: Any) -> Any:
    if isinstance(value, Text):
        value.plain = printable(value.plain)
    return printable(value) if isinstance(value, str) else value


def stdout_console() -> Console:
    """Make a console for standard output, at most `WIDTH` characters wide, with colours on a terminal only.

    In a notebook it prints plain text.
    """
    width = min(WIDTH, get_terminal_size().columns) if sys.stdout.isatty() else WIDTH
    is_terminal = False if "ipykernel" in sys.modules else None  # ipykernel sets FORCE_COLOR; None: as rich finds out
    return _Output(
        width=width, markup=False, emoji=False, highlight=False, force_jupyter=False, force_terminal=is_terminal
    )


def heading(console: Console, text: str) -> None:
    """Print the heading of a section."""
    console.print()
    console.print(Text(text, style="bold cyan"))


def paragraph(console: Console, text: str) -> None:
    """Print text wrapped at the console's width."""
    console.print(fill(text, console.width))


def print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print a table, with right-aligned columns of numbers and headings if there are any."""
    rule = box.SIMPLE_HEAD if console.is_terminal and columns else None
    padding = (0, 2 if rule is None else 1, 0, 0)
    table = Table(box=rule, show_edge=False, pad_edge=False, padding=padding, show_header=bool(columns))
    for index in range(len(columns) or max(map(len, rows), default=0)):
        cells = [str(row[index]) for row in rows]
        justify = "right" if all(map(is_number, cells)) else "left"
        is_whole = index == 0 and max(map(len, cells), default=0) <= NAME_WIDTH
        name = columns[index] if columns else ""
        table.add_column(name, justify=justify, overflow="fold", no_wrap=is_whole)
    for row in rows:
        table.add_row(*map(_escaped, row))
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as capture:
        console.print(table)
    console.out("\n".join(map(str.rstrip, capture.get().splitlines())), highlight=False)


def is_number(cell: str) -> bool:
    """Check whether a cell holds a number, or the mark of an undefined one."""
    return cell == "-" or cell.lstrip("-").replace(",", "").replace(".", "", 1).isdecimal()


def figure(value: float | None, digits: int = 2) -> str:
    """Format a number for a table, `-` where it is undefined."""
    return "-" if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def near(value: float, limit: float) -> str:
    """Format a number with two decimals, or up to four that tell it from a limit."""
    telling = (digits for digits in (2, 3, 4) if value == limit or round(value, digits) != round(limit, digits))
    return figure(value, next(telling, 4))


def by_position(rates: Sequence[float]) -> str:
    """Format shares of rounds, one for each draft position."""
    return " ".join(map(figure, rates)) or "-"


def setting(config: Any, rule: Any = None) -> str:
    """Describe a specsim.SpecConfig, and the specsim.AcceptanceRule in place of its verifier."""
    tree = f"topk {config.topk}, {config.num_steps} steps, {config.num_draft_tokens} draft tokens"
    verifier = "" if config.verifier == DEFAULT_VERIFIER else f", verifier {config.verifier}"
    verifier = verifier if rule is None else f", acceptance rule {rule.name}"
    is_lossless = config.is_lossless and (rule is None or rule.lossless)
    if config.is_plain:
        return "plain decoding" + ("" if rule is None else verifier)
    relaxed = "" if config.penalties == "exact" else ", penalties relaxed"
    return tree + verifier + relaxed + ("" if is_lossless else ", not lossless")


def short_setting(config: Any) -> str:
    """Describe a specsim.SpecConfig in a few words: a tree by topk, num_steps and num_draft_tokens."""
    if config.is_plain:
        return "no drafts"
    if config.topk == 1:
        return f"chain of {config.num_steps}"
    return f"tree {config.topk}/{config.num_steps}/{config.num_draft_tokens}"


def engine_text(engine: Any) -> str:
    """Describe a specsim.core.engine.Engine in a line: its implementation, setting, models, graph and device."""
    graph = f", graph {engine.options.graph}" if engine.options.impl == "fast" else ""
    models = f"target {type(engine.target).__name__}, drafter {type(engine.drafter).__name__}"
    dtype = str(engine.dtype).removeprefix("torch.")
    setting_text = setting(engine.config, engine.rule)
    return f"{engine.options.impl} Engine: {setting_text}; {models}; {dtype} on {engine.device}{graph}"


def acceptance_rows(acceptance: Any, synthetic: Any = None) -> list[tuple[str, str]]:
    """List (name, value) pairs of a specsim.core.metrics.Acceptance, none for plain decoding.

    synthetic: the specsim.SyntheticAcceptance of the run, listed first.
    """
    if not (acceptance.rounds and acceptance.accepted_by_position):
        return []
    left_out = " with drafts" if acceptance.undrafted_rounds else ""
    return [
        *([("acceptance", f"{synthetic}: not the target's, nor are the tokens")] if synthetic else []),
        ("accept length", f"{figure(acceptance.accept_length)} tokens a round{left_out}, bonus included"),
        ("accept rate", f"{figure(acceptance.accept_rate)} of the proposed depth"),
        ("node rate", f"{figure(acceptance.node_rate)} of the drafts proposed"),
        ("accepted by position", f"{by_position(acceptance.accepted_by_position)} of the rounds"),
    ]


def rounds_text(rounds: int, undrafted: int) -> str:
    """Format a number of rounds with drafts, and of others, which accept lengths leave out."""
    return f"{rounds:,}" + (f" with drafts, {undrafted:,} without" if undrafted else "")


def acceptance_html(acceptance: Any) -> str:
    """Render a specsim.core.metrics.Acceptance for a notebook."""
    rows = [("rounds", rounds_text(acceptance.rounds, acceptance.undrafted_rounds)), *acceptance_rows(acceptance)]
    return f"<table>{''.join(_html_row(*row) for row in rows)}</table>"


def metrics_rows(generation: Any) -> list[tuple[str, str]]:
    """List (name, value) pairs of the metrics of a specsim.serving.outputs.Generation."""
    metrics = generation.metrics
    return [
        ("setting", setting(generation.config, generation.rule)),
        ("finish reason", ", ".join(sorted({output.finish_reason for output in generation.outputs}))),
        ("tokens", figure(metrics["tokens"], 0)),
        ("rounds", rounds_text(metrics["rounds"], metrics["undrafted_rounds"])),
        *acceptance_rows(generation.acceptance, generation.synthetic),
        *(generation.switching.rows() if generation.switching else ()),
        ("seconds", figure(metrics["seconds"])),
        ("tokens a second", figure(metrics["tokens_per_s"], 1)),
    ]


def generation_html(generation: Any) -> str:
    """Render a specsim.serving.outputs.Generation for a notebook: all outputs by round, then the metrics."""
    figures = "".join(_html_row(*row) for row in metrics_rows(generation))
    decode = generation.decode
    texts = "".join(
        _html_cell(index, escape(output_text(output)) if decode is None else coloured(output, decode))
        for index, output in enumerate(generation.outputs)
    )
    legend = "" if decode is None else f"<caption style='text-align:left'>{LEGEND}</caption>"
    return f"<table>{legend}{texts}</table><table>{figures}</table>"


def coloured(output: Any, decode: Callable[[Sequence[int]], str]) -> str:
    """Render prompt and output of a specsim.serving.outputs.Output, every round on a background of its own."""
    texts = token_texts(decode, output.prompt_token_ids, output.token_ids)
    parts = [f"<span style='opacity:.6'>{escape(decode(output.prompt_token_ids))}</span>"]
    counts = (1, *output.num_accepted_tokens_per_round)  # the first token is the prefill's
    first = 0
    for number, count in enumerate(counts):
        tokens = texts[first : first + count]
        first += count
        name = round_name(number)
        style = f"background:{_TINTS[number % 2]}" if number else "text-decoration:underline"
        body = "".join(f"<u>{escape(text)}</u>" if at == count - 1 else escape(text) for at, text in enumerate(tokens))
        if tokens:
            parts.append(f"<span title='{name}: {count} tokens' style='{style}'>{body}</span>")
    return "".join(parts)


def token_texts(decode: Callable[[Sequence[int]], str], prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """List the text that each token adds to those before it, empty inside a character of several tokens."""
    context = list(prompt)
    before = decode(context)
    texts = []
    for token in tokens:
        context.append(token)
        text = decode(context)
        is_whole = not text.endswith("\N{REPLACEMENT CHARACTER}")
        texts.append(text[len(before) :] if is_whole else "")
        before = text if is_whole else before
    return texts


def output_text(output: Any) -> str:
    """Return the text of a specsim.serving.outputs.Output, or its token ids where the target has no tokenizer."""
    return output.text or " ".join(map(str, output.token_ids))


def _html_row(name: object, text: str) -> str:
    return _html_cell(name, escape(text))


def _html_cell(name: object, content: str) -> str:
    style = "text-align:left;white-space:pre-wrap;font-family:monospace"
    return f"<tr><th style='text-align:left'>{escape(str(name))}</th><td style='{style}'>{content}</td></tr>"
