"""Options of assumed acceptance: a record or an engine's metrics, rates, or accept lengths."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from specsim.cli import options
from specsim.cli.file_options import reads
from specsim.cli.options import option
from specsim.core.errors import InputError

if TYPE_CHECKING:
    from specsim.simulator.acceptance_record import AcceptanceRecord
    from specsim.simulator.calibration.profile import ChainAcceptance
    from specsim.simulator.rank_by_depth import Shares
    from specsim.simulator.record_shares import PublishedAcceptance

NAMES = ("acceptance", "accept_lengths", "accept_rates")
AcceptanceFile = Annotated[
    str | None,
    option(
        "Acceptance",
        "Acceptance that was measured: a file of specsim accept, predict, generate or run, or the metrics of vLLM, "
        "SGLang or AIPerf. FILE#N is its record number N.",
        metavar="FILE",
        show_default="published ones",
        callback=reads,
    ),
]
AcceptLengths = Annotated[
    str | None,
    option(
        "Acceptance",
        "Accept lengths of chains of 1, 2, ... steps, bonus included; more steps follow from them. [1 to steps + 1]",
        metavar="L1,L2,...",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class AcceptanceGroup:
    """The acceptance that plan and sweep assume."""

    acceptance: AcceptanceFile = None
    accept_lengths: AcceptLengths = None
    accept_rates: Annotated[
        str | None,
        option(
            "Acceptance",
            "Fraction of rounds that accept draft 1, 2, ... of a chain. [0 to 1, never rising]",
            metavar="R1,R2,...",
            show_default="published ones",
        ),
    ] = None


class Assumed(NamedTuple):
    """Probabilities of acceptance, and their source in words."""

    shares: "Shares"
    source: str


def check_one(arguments: Mapping[str, Any]) -> None:
    """InputError for more than one option of acceptance."""
    first, *others = [name for name in NAMES if arguments[name] is not None] or [""]
    if others:
        raise options.exclusive(others[0], arguments[others[0]], f"--{first.replace('_', '-')}")


def assumed(arguments: Mapping[str, Any]) -> Assumed:
    """Read the acceptance that these options give, or look up the published one."""
    from specsim.simulator.rank_by_depth import chain_shares
    from specsim.simulator.record_shares import DEPTH, RANKS_SOURCE, further, record_shares

    check_one(arguments)
    if arguments["accept_rates"] is not None:
        source = "given by --accept-rates, which say nothing of second-best drafts: trees need --acceptance"
        return Assumed(chain_shares(options.accepted_shares(arguments["accept_rates"])), source)
    record = given_record(arguments)
    if record is not None:
        shares_of_record = record_shares(record)
        clauses = "".join(f"; {clause}" for clause in shares_of_record.assumed)
        band = "" if record.interval is None else f" ({record.interval.low:.2f} to {record.interval.high:.2f})"
        length = f"accept length {record.accept_length:.2f}{band} at {record.num_steps} steps"
        return Assumed(shares_of_record.shares, f"{_origin(arguments, record)}, {length}{clauses}")
    published = _published(arguments)
    beyond = f"; {further(published.rates, DEPTH)}" if len(published.rates) < DEPTH else ""
    source = (
        f"assumed, as published for {published.pair} ({published.source}{beyond}; second-best drafts as in "
        f"{RANKS_SOURCE}); for another pair give --acceptance, --accept-lengths or --accept-rates"
    )
    return Assumed(published.shares, source)


def given_record(arguments: Mapping[str, Any]) -> "AcceptanceRecord | None":
    """Read the record of --acceptance, or make that of --accept-lengths; else that of the profile's chains, if any."""
    if arguments["acceptance"] is not None:
        from specsim.acceptance.files import read_record

        return read_record(arguments["acceptance"])
    if arguments["accept_lengths"] is None:
        chain_acceptance = None if arguments["accept_rates"] is not None else _of_profile(arguments)
        return chain_acceptance and chain_acceptance.record(arguments["profile"])
    from specsim.simulator.acceptance_record import AcceptanceRecord
    from specsim.simulator.continuation import lengths_in_order, rates_of_lengths

    lengths = _numbers(arguments["accept_lengths"])
    rates = rates_of_lengths(lengths_in_order(lengths))
    convention = "accept lengths include the bonus token; a longer chain accepts what a shorter one does."
    return AcceptanceRecord("--accept-lengths", "command line", convention, lengths[-1], 1, len(rates), rates=rates)


def _of_profile(arguments: Mapping[str, Any]) -> "ChainAcceptance | None":
    """Give the acceptance of the profile's chains, if they are of the same model and drafter."""
    if arguments.get("profile") is None:
        return None
    from specsim.simulator.calibration.profile import profile
    from specsim.simulator.model import read_config

    chain_acceptance = profile(arguments["profile"]).acceptance
    same = chain_acceptance and (chain_acceptance.model, chain_acceptance.drafter) == (
        read_config(arguments["model"])[0],
        arguments["drafter"],
    )
    return chain_acceptance if same else None


def _origin(arguments: Mapping[str, Any], record: "AcceptanceRecord") -> str:
    """Say in a few words where a record comes from."""
    if arguments["acceptance"] is not None:
        return f"measured, from {record.source} ({record.tool})"
    if arguments["accept_lengths"] is not None:
        return "measured, from --accept-lengths"
    return f"of {record.source}: {record.convention.partition(';')[0]}"


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        allowed = "accept lengths with commas between them, such as 1.8,2.4,2.8"
        raise InputError("accept_lengths", text, allowed) from None


def _published(arguments: Mapping[str, Any]) -> "PublishedAcceptance":
    """Give the acceptance that is assumed of the model, by whatever name it goes, and the drafter."""
    from specsim.simulator.model import read_config
    from specsim.simulator.record_shares import published_acceptance

    return published_acceptance(arguments["drafter"], read_config(arguments["model"])[0])
