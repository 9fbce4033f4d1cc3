"""A cell of a plan or a sweep: one server under one load in plain values, which a file can hold."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError
from specsim.core.files import read_text
from specsim.simulator.acceptance import check_number
from specsim.simulator.bounds import whole
from specsim.simulator.hardware import hardware
from specsim.simulator.model import drafter, model
from specsim.simulator.option import Option
from specsim.simulator.rank_by_depth import rank_by_depth
from specsim.simulator.results import Run
from specsim.simulator.scenario import Scenario
from specsim.simulator.workload import Length, Workload, check_count, closed_loop, poisson

Shares = tuple[tuple[float, ...], ...]
EVEN = ((0.7,),) * 6


@dataclass(frozen=True, slots=True)
class Cell:
    """model: a shipped name or a config.json; hardware: a name of hardware.csv, tensor_parallel of them. drafter:
    `eagle`, `eagle3` or `mtp`; draft_vocab: tokens that eagle3 knows. num_steps 0 is plain decoding; num_draft_tokens
    None is the whole chain. shares: what is accepted, by depth and rank (simulator.rank_by_depth). The load is a closed
    loop of `concurrency`, or with a rate so many requests a second. The rest: see Scenario.
    """

    model: str = "llama-3.1-8b"
    hardware: str = "H100-SXM"
    tensor_parallel: int = 1
    drafter: str = "eagle3"
    draft_vocab: int = 32000
    topk: int = 1
    num_steps: int = 3
    num_draft_tokens: int | None = None
    page_size: int = 16
    shares: Shares = EVEN
    requests: int = 256
    concurrency: int = 16
    rate: float | None = None
    prompt_tokens: Length = 512
    output_tokens: Length = 256
    schedule: str = "overlap"
    prefill: str = "mixed"
    chunk_tokens: int | None = 8192
    max_running: int = 256
    memory_share: float = 0.9
    seed: int = 0

    def __post_init__(self):
        for name, kinds in _KINDS.items():
            object.__setattr__(self, name, _checked(name, getattr(self, name), kinds))
        object.__setattr__(self, "shares", _shares(self.shares))

    @property
    def config(self) -> SpecConfig:
        if self.num_steps == 0:
            return SpecConfig.plain(self.page_size)
        nodes = self.num_draft_tokens
        if nodes is None and self.topk > 1:
            raise InputError("num_draft_tokens", None, "a number, for a tree")
        return SpecConfig(self.topk, self.num_steps, self.num_steps + 1 if nodes is None else nodes, self.page_size)

    @property
    def workload(self) -> Workload:
        check_count("requests", self.requests)
        lengths = self.prompt_tokens, self.output_tokens, self.seed
        if self.rate is None:
            return closed_loop(self.requests, self.concurrency, *lengths)
        return poisson(self.requests, self.rate, *lengths)

    @property
    def scenario(self) -> Scenario:
        return self.serving(self.option(self.config))

    def serving(self, option: Option) -> Scenario:
        """The server under its load, with this setting and law in place of its own."""
        whole("draft_vocab", self.draft_vocab)
        target = model(self.model)
        head = drafter(self.drafter, target, self.draft_vocab if self.drafter == "eagle3" else None)
        same = ("tensor_parallel", "schedule", "prefill", "max_running", "chunk_tokens", "memory_share", "seed")
        settings = {name: getattr(self, name) for name in same}
        return Scenario(target, hardware(self.hardware), head, option, self.workload, **settings)

    def option(self, config: SpecConfig) -> Option:
        """A setting and what the shares make of it."""
        if config.is_plain:
            return Option.plain(config.page_size)
        return Option(config, rank_by_depth(self.shares, config))

    def run(self) -> Run:
        scenario = self.scenario
        return scenario.run(scenario.option)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Cell":
        """The cell of which to_json, and then JSON, made this value."""
        lengths = {
            name: tuple(value[name]) if isinstance(value[name], list) else value[name]
            for name in ("prompt_tokens", "output_tokens")
        }
        return cls(**value | lengths)

    def with_values(self, **values: Any) -> "Cell":
        """The same but for some fields; InputError for a field that there is not."""
        for name in values:
            if name not in self.__dataclass_fields__:
                raise InputError("vary", name, ", ".join(self.__dataclass_fields__))
        return replace(self, **values)


def _kinds(kind: Any) -> tuple[type, ...]:
    """Types of a field; a whole number is a number, too."""
    kinds = get_args(kind) or (kind,)
    return (*kinds, int) if float in kinds else kinds


_KINDS = {
    each.name: _kinds(each.type)
    for each in fields(Cell)
    if each.name not in ("shares", "prompt_tokens", "output_tokens")  # which _shares and workloads look at
}


def _checked(name: str, value: object, kinds: tuple[type, ...]) -> Any:
    """A value of one of these types; where numbers are allowed a finite one, as float: 8 and 8.0 are one cell."""
    fits = isinstance(value, kinds) and not isinstance(value, bool)
    is_number = fits and float in kinds and value is not None
    if not fits or (is_number and not abs(value) <= sys.float_info.max):
        names = {str: "a text", int: "an integer", float: "a number", type(None): "null"}
        allowed = [names[kind] for kind in kinds if not (kind is int and float in kinds)]
        raise InputError(name, value, " or ".join(allowed))
    return float(value) if is_number else value


def _shares(rows: Any) -> Shares:
    try:
        return tuple(tuple(check_number("shares", share) for share in row) for row in rows)
    except TypeError as error:
        raise InputError("shares", rows, "rows of numbers") from error


def chain_shares(rates: Sequence[float]) -> Shares:
    """Shares of a chain from unconditional rates by position: they say nothing of second-best drafts."""
    for before, rate in pairwise((1.0, *rates)):
        if not 0 <= rate <= before:
            raise InputError("accept_rates", tuple(rates), "numbers from 0 to 1, none larger than the one before")
    return tuple((rate / before if before else 0.0,) for before, rate in pairwise((1.0, *rates)))


def read_shares(path: Path | str) -> Shares:
    """The `shares` of a JSON file, as `specsim predict --json` writes them: a row for each depth, a number a rank."""
    text = read_text(Path(path), "accept", "a UTF-8 file that can be read")
    try:
        rows: Any = json.loads(text)["shares"]
        return tuple(tuple(float(share) for share in row) for row in rows)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise InputError("accept", str(path), "a JSON object with `shares`, rows of numbers") from error
