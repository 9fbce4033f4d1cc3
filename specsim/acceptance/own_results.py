"""Reader of our own results: acceptance records, and the outputs of accept, generate, run and predict."""

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from operator import mul
from typing import Any

from specsim.acceptance.content import Content
from specsim.core.errors import InputError, incompleteness
from specsim.simulator.acceptance_record import AcceptanceRecord, Counts, Interval
from specsim.simulator.measurement import Rounded
from specsim.simulator.rank_by_depth import checked_shares
from specsim.simulator.tool_figures import ToolFigures

CONVENTION = (
    "rounds with drafts are counted for each request, accept lengths include the bonus token, rates by position are "
    "unconditional."
)
FORMAT = "our own --json files (accept, predict, generate, run)"
_SETTING = ("topk", "num_steps", "num_draft_tokens")


def read(content: Content) -> list[AcceptanceRecord]:
    """Read the records of a file; [] for another file."""
    if len(content.values) != 1 or not isinstance(value := content.values[0], Mapping):
        return []
    name = str(value.get("schema", "")).split("/")
    reader = _READERS.get(name[1]) if name[0] == "specsim" and len(name) > 1 else None
    if reader is None and "shares" in value:
        reader = _shares
    try:
        return [] if reader is None else list(reader(content, value))
    except InputError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        allowed = f"a complete file of {FORMAT} ({incompleteness(error)})"
        raise InputError("acceptance", content.source, allowed) from error


def _record(content: Content, value: Mapping[str, Any]) -> Iterator[AcceptanceRecord]:
    """Read what AcceptanceRecord.to_json wrote."""
    interval = value["interval"]
    counts = [content.mapping("counts", entry) for entry in content.items("counts", value["counts"])]
    rows = [content.mapping("positions", entry) for entry in content.items("positions", value["positions"])]
    record = AcceptanceRecord(
        content.source,
        value["tool"],
        value["convention"],
        value["accept_length"],
        **{name: value["setting"][name] for name in _SETTING},
        counts=tuple(Counts(**{key: _plain(field) for key, field in fields.items()}) for fields in counts),
        is_by_request=value["is_by_request"],
        rates=tuple(row["unconditional"] for row in rows),
        shares=checked_shares(value["shares"]) if value["shares"] else (),
        interval=_interval(content, content.mapping("interval", interval)) if interval else None,
        **{name: value[name] for name in ("reported_length", "reported_rounding", "proposed_drafts")},
        pair=value["pair"],
        prompts=value["prompts"],
        temperature=value["temperature"],
        stated=(_figures(content, value, counts, rows),),
    )
    yield record.with_drafts()


def _figures(content: Content, value: Mapping[str, Any], counts: list, rows: list) -> ToolFigures:
    """Collect what a record states of its accept length."""

    def rounded(name: str, figure: object) -> Rounded | None:
        return None if figure is None else Rounded.of(content.number(name, figure))

    interval = value["interval"] and _interval(content, content.mapping("interval", value["interval"]))
    totals = {
        name: Rounded.of(sum(content.integer(name, entry[name]) for entry in counts)) if counts else None
        for name in ("rounds", "accepted_drafts")
    }
    return ToolFigures(
        "the record",
        rounds=totals["rounds"],
        accepted=totals["accepted_drafts"],
        accept_length=rounded("accept_length", value["accept_length"]),
        rates=tuple(Rounded.of(content.number("unconditional", row["unconditional"])) for row in rows),
        interval=(Rounded.of(interval.low), Rounded.of(interval.high)) if interval else None,
    )


def _interval(content: Content, value: Mapping[str, Any]) -> Interval:
    low, high, confidence = (content.number(name, value[name]) for name in ("low", "high", "confidence"))
    return Interval(low, high, confidence, str(value["method"]))


def _plain(field: Any) -> Any:
    return tuple(field) if isinstance(field, list) else field


def _study(content: Content, value: Mapping[str, Any]) -> Iterator[AcceptanceRecord]:
    """Read a record of each setting of a study."""
    for row in value["measurements"]:
        figures = row["everything"]
        rounds = content.integer("rounds", figures["rounds"])
        rates = content.items("accepted_by_position", figures["accepted_by_position"])
        counts = tuple(round(content.number("accepted_by_position", rate) * rounds) for rate in rates)
        setting = row["setting"]
        yield AcceptanceRecord.of_counts(
            [Counts(rounds, sum(counts), counts)],
            content.source,
            "specsim",
            CONVENTION,
            **{name: setting["config"][name] for name in _SETTING},
            pair=setting["drafter"],
            temperature=setting["temperature"],
        )


def _outputs(content: Content, value: Mapping[str, Any]) -> Iterator[AcceptanceRecord]:
    """Read the rounds of every output of generate or run."""
    config = value["config"]
    outputs = value["outputs"]
    counts = [_request(output, config["num_steps"]) for output in outputs]
    depths = [depth for output in outputs for depth in output.get("proposed_depth_per_round") or ()]
    temperatures = {output["temperature"] for output in outputs if output.get("temperature") is not None}
    yield AcceptanceRecord.of_counts(
        counts,
        content.source,
        "specsim",
        CONVENTION,
        **{name: config[name] for name in _SETTING},
        is_by_request=True,
        proposed_drafts=sum(depths) if value.get("adaptive") else None,  # else a drafter itself proposes fewer
        pair=value["pair"],
        temperature=temperatures.pop() if len(temperatures) == 1 else None,
    )


def _modes(content: Content, value: Mapping[str, Any]) -> Iterator[AcceptanceRecord]:
    """Read the first mode of a comparison, whose outputs are those of the others."""
    yield from _outputs(content, {"pair": value["pair"]} | value["modes"][0])


def _request(output: Mapping[str, Any], num_steps: int) -> Counts:
    drafts = [tokens - 1 for tokens in output["num_accepted_tokens_per_round"]]
    return Counts.of_rounds(drafts, num_steps, output.get("proposed_depth_per_round") or ())


def _shares(content: Content, value: Mapping[str, Any]) -> Iterator[AcceptanceRecord]:
    """Read probabilities by depth and rank, whose best drafts are a chain."""
    shares = checked_shares(value["shares"])
    rates = tuple(accumulate((row[0] for row in shares), mul))
    length = 1 + sum(rates)
    yield AcceptanceRecord(
        content.source, "specsim", CONVENTION, length, 1, len(rates), len(rates) + 1, rates=rates, shares=shares
    )


_READERS: dict[str, Callable[[Content, Mapping[str, Any]], Iterator[AcceptanceRecord]]] = {
    "acceptance": _record,
    "accept": _study,
    "generate": _outputs,
    "run": _outputs,
    "run-compare": _modes,
    "predict": _shares,
}
