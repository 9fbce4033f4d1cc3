"""specsim simulate: a server with speculation and without, or the reproduction of a published table."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from specsim.cli.acceptance_options import NAMES
from specsim.cli.file_options import check_png, png
from specsim.cli.option_fields import common, option_fields, refuse_changes, refuse_others
from specsim.cli.options import DraftTreeOptions, PolicyOptions, accepted_shares, pick, report
from specsim.cli.server_options import ServerOptions, show_workload
from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require
from specsim.core.kinds import DEFAULT, SERVED

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.simulator.acceptance import Option as ServedSetting
    from specsim.simulator.acceptance import PerPosition
    from specsim.simulator.cell import Cell

CLIENTS = 64
RATES = "0.73,0.52,0.35"  # vllm#32030, Llama-3.1-8B and its drafter
_DRAFTING = ("draft_vocab", *option_fields(DraftTreeOptions), *option_fields(PolicyOptions), *NAMES)


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(ServerOptions, DraftTreeOptions, PolicyOptions):
    """Options of specsim simulate."""

    # Reproduce a published table, without other options: fast_rounds, leviathan_table1, leviathan_table4, sglang_6995,
    # spec_bench, vllm_20780 or vllm_41162.
    table: Annotated[str | None, common("Published table", values="NAME")] = None
    # Drafter architecture; none is plain decoding.
    drafter: Annotated[str, common("Model", choices=(*SERVED, "none"))] = DEFAULT
    # Fraction of rounds that accept at least 1, 2, ... drafts, for each step.
    accept_rates: Annotated[
        str | None, common("Acceptance", limits="0 to 1, never rising", values="R1,R2,...", default=RATES)
    ] = None
    requests: int = 1000
    output_tokens: str = "64-192"
    # Clients in a closed loop, each with one request at a time.
    concurrency: Annotated[int | None, common("Load", at_least=1, default=str(CLIENTS))] = None
    # Draw speed-up against running requests to this PNG file.
    plot: Annotated[Path | None, common("Output", file="writes")] = None

    def served(self) -> tuple["Cell", "ServedSetting"]:
        """Make the server under its load, and the setting that it serves with."""
        from specsim.simulator.acceptance import Option as ServedSetting
        from specsim.simulator.request_formats import read_requests

        self.check_one_load()
        changes = {} if self.concurrency is not None else {"concurrency": CLIENTS}
        if self.workload is not None:
            refuse_changes(self, ("requests", "prompt_tokens", "output_tokens"), "with --workload")
            changes["requests"] = len(read_requests(self.workload, self.tokenizer, self.characters_per_token))
        self.check_load()
        if self.drafter == "none":
            refuse_changes(self, _DRAFTING, "with drafter none")
            cell = self.cell(**changes, drafter=DEFAULT)  # plain decoding ignores it
            setting = ServedSetting.plain(self.page_size)
        else:
            setting = ServedSetting(pick(SpecConfig, self), self.acceptance_by_position())
            cell = self.cell(**changes)
        self.check_times(cell)
        return cell, setting

    def acceptance_by_position(self) -> "PerPosition":
        """Make the acceptance of as many drafts as there are steps; rates beyond them are ignored."""
        from specsim.simulator.acceptance import PerPosition

        record = self.record()
        if record is not None:
            from specsim.simulator.record_shares import setting_acceptance

            return setting_acceptance(record, pick(SpecConfig, self))
        text = self.accept_rates or RATES
        steps = self.num_steps
        rates = accepted_shares(text)
        if self.accept_rates is None:
            allowed = f"at most {len(rates)} unless --acceptance, --accept-lengths or --accept-rates gives more"
            require(steps <= len(rates), "num_steps", steps, allowed)
        require(len(rates) >= steps, "accept_rates", text, f"{steps} rates, one for each of the num_steps")
        try:
            return PerPosition(rates[:steps])
        except InputError as error:
            raise InputError("accept_rates", text, error.allowed) from error

    def acceptance_source(self) -> str:
        """Say where the acceptance comes from; empty for rates and for plain decoding."""
        record = self.record()
        if record is None:
            return ""
        from specsim.simulator.record_shares import setting_source

        return setting_source(record, pick(SpecConfig, self))


def simulate(options: SimulateOptions) -> None:
    """Simulate a server with and without speculation.

    No model runs: a cost model gives the time of each step. With --table, the server is that of a published table.

    Exit status: 0 when done, 2 for bad input.

    Examples:
      specsim simulate --hardware H200 --concurrency 32 --num-steps 2
      specsim simulate --table vllm_20780
    """
    from specsim.core.display import paragraph
    from specsim.core.files import write_whole
    from specsim.simulator.reproduce import reproduction
    from specsim.simulator.show import compare, show, show_table

    plot = options.plot
    check_png(plot)
    if options.table is not None:
        refuse_others(options, ("table", "json"), "with --table")
        result = reproduction(options.table)()
        report("simulate-table", lambda console: show_table(result, console), result.to_json(), options.json)
        return
    served, setting = options.served()
    scenario = served.serving(setting)
    if plot and scenario.option.config.is_plain:
        raise InputError("plot", str(plot), "nothing with --drafter none, which has no speed-up to draw")
    picture = png("speedup", {scenario.hardware.name: scenario}) if plot else b""
    compared = compare(scenario)
    source = options.acceptance_source()

    def print_all(console: "Console") -> None:
        show(compared, console)
        show_workload(served, console)
        if source:
            console.print()
            paragraph(console, source)

    try:
        report("simulate", print_all, compared.to_json(), options.json)
    finally:
        if plot:
            write_whole(plot, picture, "plot")
