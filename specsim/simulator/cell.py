"""Cells of plans and sweeps: one server under one load, in plain values that a file can hold."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, get_args

from specsim.core.arguments import check_arguments
from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require, require_choice, require_int
from specsim.core.kinds import DEFAULT as DEFAULT_DRAFTER
from specsim.core.kinds import SERVED
from specsim.simulator.acceptance import Option
from specsim.simulator.bounds import count, is_number
from specsim.simulator.calibration.profile import profile
from specsim.simulator.drafter import drafter, trained_vocabulary
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.hardware import hardware
from specsim.simulator.model import model
from specsim.simulator.quantization import KV_BYTES
from specsim.simulator.rank_by_depth import Shares, checked_shares, rank_by_depth
from specsim.simulator.record_shares import DEFAULT
from specsim.simulator.results import SimulatedRun
from specsim.simulator.runner import Prefill
from specsim.simulator.scenario import Scenario, with_profile
from specsim.simulator.workload import CHARACTERS, DAY, Arrivals, Length, SimulatedWorkload, closed_loop, open_loop

SCHEDULES = ("sync", "overlap")
_CHOICES = {
    "drafter": tuple(SERVED),
    "schedule": SCHEDULES,
    "plain_schedule": SCHEDULES,
    "prefill": get_args(Prefill),
    "kv_cache_dtype": ("auto", *KV_BYTES),
}
_AXES = {"num_steps": "depth", "topk": "rank"}


@check_arguments
@dataclass(frozen=True, slots=True)
class Cell:
    """One server under one load; fields without a comment are those of Scenario."""

    model: str = "llama-3.1-8b"  # name of the model, or its config.json
    hardware: str = "H100-SXM"  # name of the GPU, or the file that describes it
    tensor_parallel: int = 1  # GPUs that share the model
    drafter: str = DEFAULT_DRAFTER  # drafter architecture, one of core.kinds.SERVED
    draft_vocab: int = 32000  # vocabulary of a drafter that has a smaller one, in tokens
    topk: int = 1  # draft tokens kept at each step; 1 is a chain
    num_steps: int = 3  # 0: plain decoding
    num_draft_tokens: int | None = None  # None: the whole chain
    page_size: int = 16  # tokens in a KV page
    shares: Shares = DEFAULT.shares  # probability of acceptance by depth and rank (simulator.rank_by_depth)
    requests: int = 256  # number of requests
    concurrency: int = 16  # clients of a closed loop, unused with a rate
    rate: float | None = None  # arrivals per second; None: clients in a closed loop, or the times of the trace
    trace: str | None = None  # file of requests, in place of random ones; its times count unless there is a rate
    tokenizer: str | None = None  # tokenizer for the texts of the trace; None: characters_per_token
    characters_per_token: float = CHARACTERS  # characters of a token in the texts of the trace, without a tokenizer
    prefix_cache: bool = True  # a turn of a conversation finds the KV of the turns before it
    burstiness: float = 1.0  # shape of the gamma distribution of the gaps between arrivals; 1 is Poisson
    swing: float = 0.0  # amplitude of the rate over a period, relative to its mean
    period: float = DAY  # period of the swing, in seconds
    # Requests of equal length stay synchronised: their prompts arrive together again and again.
    prompt_tokens: Length = (256, 768)
    output_tokens: Length = (128, 384)  # output length in tokens, the least and the most, or lognormal:MEAN:CV
    schedule: str = "overlap"  # sync: a step's results are read before the next is planned; overlap: one step later
    plain_schedule: str | None = None  # schedule of plain decoding; None: the same
    prefill: str = "mixed"  # place of prompts: mixed, beside or first
    chunk_tokens: int | None = 8192  # largest number of prompt tokens in a step; None: no limit
    max_running: int = 256  # largest number of running requests
    memory_share: float = 0.9  # fraction of GPU memory for weights and KV
    kv_cache_dtype: str = "auto"  # auto: as the checkpoint says
    efficiency: Efficiency = field(default_factory=Efficiency)
    kept: tuple[str, ...] = ()  # parameters of efficiency that keep their defaults whatever the profile says
    profile: str | None = None  # profile of the parameters: a shipped name or a file; None: uncalibrated
    seed: int = 0  # seed of all random draws
    adaptive: str | None = None  # policy that chooses the steps of every round (core.policies.named); None: num_steps
    adaptive_per_request: bool = False  # whether it chooses them for every request

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            object.__setattr__(self, name, _checked(name, getattr(self, name), kinds))
        for name, choices in _CHOICES.items():
            if getattr(self, name) is not None:
                require_choice(name, getattr(self, name), choices)
        for name in self.kept:
            require_choice("kept", name, [parameter.name for parameter in fields(Efficiency)])
        object.__setattr__(self, "shares", checked_shares(self.shares))

    @property
    def config(self) -> SpecConfig:
        if self.num_steps == 0:
            return SpecConfig.plain(self.page_size)
        nodes = self.num_draft_tokens
        if nodes is None and self.topk > 1:
            raise InputError("num_draft_tokens", None, "a number, for a tree")
        return SpecConfig(self.topk, self.num_steps, self.num_steps + 1 if nodes is None else nodes, self.page_size)

    @property
    def workload(self) -> SimulatedWorkload:
        count("requests", self.requests)
        arrivals = Arrivals(self.burstiness, self.swing, self.period)
        if self.trace is not None:
            return self._replayed(self.trace, arrivals, None)
        if self.rate is None:
            return closed_loop(self.requests, self.concurrency, self.prompt_tokens, self.output_tokens, self.seed)
        lengths = (self.prompt_tokens, self.output_tokens)
        return open_loop(self.requests, self.rate, *lengths, self.seed, arrivals)

    def _replayed(self, trace: str, arrivals: Arrivals, slots: int | None) -> SimulatedWorkload:
        """Make the workload of a file of requests for a server with this number of KV slots."""
        from specsim.simulator.request_file import Replay, replay
        from specsim.simulator.request_formats import read_requests

        page = self.page_size if self.prefix_cache else None
        choice = Replay(self.requests, self.rate, self.concurrency, arrivals, page, slots, self.seed)
        return replay(read_requests(trace, self.tokenizer, self.characters_per_token), choice)

    @property
    def has_times(self) -> bool:
        """Whether requests arrive at times that do not depend on the server."""
        return self.rate is not None or self.workload.arrivals_s is not None

    @property
    def scenario(self) -> Scenario:
        return self.serving(self.option(self.config))

    def serving(self, option: Option) -> Scenario:
        """Describe the server under its load with this setting and its acceptance."""
        require_int("draft_vocab", self.draft_vocab)
        target = model(self.model)
        if self.kv_cache_dtype != "auto":
            target = replace(target, kv_bytes=KV_BYTES[self.kv_cache_dtype])
        head = drafter(self.drafter, target, trained_vocabulary(self.drafter, self.draft_vocab))
        names = ("tensor_parallel", "prefill", "max_running", "chunk_tokens", "memory_share", "seed", "efficiency")
        settings: dict[str, Any] = {name: getattr(self, name) for name in (*names, "schedule", "plain_schedule")}
        settings["default_parameters"] = self.kept
        uncalibrated = Scenario(target, hardware(self.hardware), head, option, self.workload, **settings)
        scenario = uncalibrated if self.profile is None else with_profile(uncalibrated, profile(self.profile))
        if self.adaptive is not None and not option.config.is_plain:
            from specsim.core.policies.named import named_policy, policy_value

            policy = named_policy(
                policy_value(self.adaptive, self.adaptive_per_request), option.config, scenario.cost(option)
            )
            scenario = replace(scenario, policy=policy)
        if self.trace is None or not scenario.workload.cached_columns.any():
            return scenario
        arrivals = Arrivals(self.burstiness, self.swing, self.period)
        return replace(scenario, workload=self._replayed(self.trace, arrivals, scenario.slots(option)))

    def scenarios(self, options: Sequence[Option]) -> list[Scenario]:
        """Describe the server under its load with each of these settings."""
        if self.adaptive is not None or self.trace is not None:  # a policy, or what a cache holds, depends on a setting
            return [self.serving(option) for option in options]
        scenario = self.serving(options[0])
        return [replace(scenario, option=option) for option in options]

    def option(self, config: SpecConfig) -> Option:
        """Combine a setting with the acceptance that follows from the shares."""
        if config.is_plain:
            return Option.plain(config.page_size)
        for name, most in (("num_steps", len(self.shares)), ("topk", min(map(len, self.shares)))):
            allowed = f"at most {most}: the shares give no acceptance beyond this {_AXES[name]}"
            require(getattr(config, name) <= most, name, getattr(config, name), allowed)
        return Option(config, rank_by_depth(self.shares, config))

    def run(self) -> SimulatedRun:
        scenario = self.scenario
        return scenario.run(scenario.option)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Cell":
        """Read the cell of a value that to_json made."""
        parsed: dict[str, Any] = {
            name: tuple(value[name]) if isinstance(value[name], list) else value[name]
            for name in ("prompt_tokens", "output_tokens")
        }
        parsed["efficiency"] = Efficiency(**value["efficiency"])
        parsed["kept"] = tuple(value.get("kept", ()))
        for name, default in (("prefix_cache", True), ("adaptive_per_request", False)):
            is_on = value.get(name, default)
            parsed[name] = bool(is_on) if is_on in (0, 1) else is_on  # SQLite has 1 for true
        return cls(**value | parsed)

    def with_values(self, **values: Any) -> "Cell":
        """Replace some fields; InputError for an unknown one."""
        for name in values:
            require(name in self.__dataclass_fields__, "vary", name, ", ".join(self.__dataclass_fields__))
        return replace(self, **values)


_KINDS: dict[str, Any] = {
    column.name: get_args(column.type) or (column.type,)
    for column in fields(Cell)
    # These are checked by checked_shares, workloads and Efficiency itself.
    if column.name not in ("shares", "prompt_tokens", "output_tokens", "efficiency", "kept")
}


def _checked(name: str, value: object, kinds: tuple[type, ...]) -> Any:
    """Check a value's type; numbers become finite floats where allowed, so that 8 and 8.0 are one cell."""
    if float in kinds and is_number(value):
        return float(value)
    if isinstance(value, kinds) and (not isinstance(value, (float, bool)) or bool in kinds):
        return value
    names = {str: "a text", int: "an integer", float: "a number", bool: "true or false", type(None): "null"}
    raise InputError(name, value, " or ".join(names[kind] for kind in kinds))
