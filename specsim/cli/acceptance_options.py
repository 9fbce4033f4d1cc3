"""Options of assumed acceptance: a record or an engine's metrics, rates, or accept lengths."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

from specsim.cli.option_fields import common, option
from specsim.cli.options import accepted_shares, exclusive
from specsim.core.errors import InputError, require
from specsim.core.kinds import DEFAULT, SERVED

if TYPE_CHECKING:
    from specsim.simulator.acceptance_record import AcceptanceRecord
    from specsim.simulator.rank_by_depth import Shares

NAMES = ("acceptance", "accept_lengths", "accept_rates")


class Assumed(NamedTuple):
    """Probabilities of acceptance, and their source in words."""

    shares: "Shares"
    source: str


@dataclass(frozen=True, kw_only=True)
class MeasuredAcceptance:
    """Acceptance that was measured."""

    # Acceptance that was measured: a file of specsim accept, predict, generate or run, or the metrics of vLLM, SGLang
    # or AIPerf. FILE#N is its record number N.
    acceptance: Annotated[str | None, common("Acceptance", values="FILE", default="published ones", file="reads")] = (
        None
    )
    # Accept lengths of chains of 1, 2, ... steps, bonus included; more steps follow from them.
    accept_lengths: Annotated[str | None, option("Acceptance", limits="1 to steps + 1", values="L1,L2,...")] = None

    def record(self) -> "AcceptanceRecord | None":
        """Read the record of --acceptance, or make that of --accept-lengths; None for neither.

        Draft steps that the record does not say are those of --num-steps, where a command has it.
        """
        first, *others = [name for name in NAMES if getattr(self, name, None) is not None] or [""]
        if others:
            raise exclusive(others[0], getattr(self, others[0]), f"--{first.replace('_', '-')}")
        if self.acceptance is not None:
            from specsim.acceptance.files import read_record

            record = read_record(self.acceptance)
            steps = getattr(self, "num_steps", None)
            if record.num_steps is None and type(steps) is int and steps > 0:
                most = 1 + steps
                allowed = f"at most {most} at the {steps} steps of --num-steps, which the file does not say"
                require(record.accept_length <= most, "acceptance", record.accept_length, allowed)
                return replace(record, num_steps=steps)
            return record
        if self.accept_lengths is None:
            return None
        from specsim.simulator.acceptance_record import AcceptanceRecord
        from specsim.simulator.continuation import lengths_in_order, rates_of_lengths

        lengths = _numbers(self.accept_lengths)
        rates = rates_of_lengths(lengths_in_order(lengths))
        convention = "accept lengths include the bonus token; a longer chain accepts what a shorter one does."
        return AcceptanceRecord("--accept-lengths", "command line", convention, lengths[-1], 1, len(rates), rates=rates)


@dataclass(frozen=True, kw_only=True)
class AcceptanceOptions(MeasuredAcceptance):
    """The acceptance that plan, simulate and sweep assume of a model and a drafter."""

    # Shipped name, hub id of a shipped shape, or a config.json.
    model: Annotated[str, common("Model", file="reads")] = "llama-3.1-8b"
    # Drafter architecture.
    drafter: Annotated[str, common("Model", choices=tuple(SERVED))] = DEFAULT
    # Calibrated server: a shipped profile (specsim-fast, vllm-2025-dense, vllm-2026-dense, vllm-2026-experts,
    # sglang-2026-experts, transformers-dense) or a file that calibrate wrote.
    profile: Annotated[
        str | None,
        option(
            "Hardware", values="NAME|FILE", default="vllm-2026-dense; -experts for models with experts", file="reads"
        ),
    ] = None
    # Fraction of rounds that accept draft 1, 2, ... of a chain.
    accept_rates: Annotated[
        str | None,
        common("Acceptance", limits="0 to 1, never rising", values="R1,R2,...", default="published ones"),
    ] = None

    def record(self) -> "AcceptanceRecord | None":
        """Read the measured record, or that of the profile's chains, if they are of the same model and drafter."""
        record = super().record()
        if record is not None or self.accept_rates is not None or self.profile is None:
            return record
        from specsim.simulator.calibration.profile import profile
        from specsim.simulator.model import read_config

        chains = profile(self.profile).acceptance
        if chains is None or (chains.model, chains.drafter) != (read_config(self.model)[0], self.drafter):
            return None
        return chains.record(self.profile)

    def assumed(self) -> Assumed:
        """Read the acceptance that these options give, or look up the published one of model and drafter."""
        from specsim.simulator.model import read_config
        from specsim.simulator.rank_by_depth import chain_shares
        from specsim.simulator.record_shares import DEPTH, RANKS_SOURCE, further, published_acceptance, record_shares

        record = self.record()
        if self.accept_rates is not None:
            source = "given by --accept-rates, which say nothing of second-best drafts: trees need --acceptance"
            return Assumed(chain_shares(accepted_shares(self.accept_rates)), source)
        if record is not None:
            shares_of_record = record_shares(record)
            clauses = "".join(f"; {clause}" for clause in shares_of_record.assumed)
            band = "" if record.interval is None else f" ({record.interval.low:.2f} to {record.interval.high:.2f})"
            length = f"accept length {record.accept_length:.2f}{band} at {record.num_steps} steps"
            return Assumed(shares_of_record.shares, f"{self._origin(record)}, {length}{clauses}")
        published = published_acceptance(self.drafter, read_config(self.model)[0])
        beyond = f"; {further(published.rates, DEPTH)}" if len(published.rates) < DEPTH else ""
        source = (
            f"assumed, as published for {published.pair} ({published.source}{beyond}; second-best drafts as in "
            f"{RANKS_SOURCE}); for another pair give --acceptance, --accept-lengths or --accept-rates"
        )
        return Assumed(published.shares, source)

    def _origin(self, record: "AcceptanceRecord") -> str:
        """Say in a few words where a record comes from."""
        if self.acceptance is not None:
            return f"measured, from {record.source} ({record.tool})"
        if self.accept_lengths is not None:
            return "measured, from --accept-lengths"
        return f"of {record.source}: {record.convention.partition(';')[0]}"


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        allowed = "accept lengths with commas between them, such as 1.8,2.4,2.8"
        raise InputError("accept_lengths", text, allowed) from None
