"""Ordered settings between which an engine switches, for serving, the simulator and the checks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from specsim.core.arguments import check_arguments
from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require
from specsim.core.verifiers import DEFAULT_VERIFIER

SWITCHED = ("topk", "num_steps", "num_draft_tokens")  # fields in which settings may differ
OFF = (*SWITCHED, "verifier", "threshold_single", "threshold_acc")  # those in which plain decoding may differ, too


@check_arguments
@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one engine, which may use another one in every round; plain decoding may be one of them.

    They differ in the shape of the tree only, so a draft state, a pool and a request's random draws serve them all.
    """

    configs: tuple[SpecConfig, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "configs", tuple(self.configs))
        require(self.configs, "settings", "none", "at least one setting")
        distinct = f"{len(self.configs)} different ones"
        require(len(set(self.configs)) == len(self.configs), "settings", "the same setting twice", distinct)
        first = self.widest
        for config in self.configs:
            free = OFF if config.is_plain else SWITCHED
            for field in fields(SpecConfig):
                value = getattr(config, field.name)
                if field.name not in free and value != getattr(first, field.name):
                    raise InputError(field.name, value, f"{getattr(first, field.name)}, as in the other settings")

    @classmethod
    @check_arguments
    def of_steps(cls, config: SpecConfig, steps: Sequence[int]) -> "Settings":
        """Make a setting of each number of steps, 0 for plain decoding, with the other fields of `config`.

        A tree of other steps has the number of nodes that follows from them, but at most that of `config`.
        """
        return cls(tuple(with_steps(config, count) for count in steps))

    def __iter__(self) -> Iterator[SpecConfig]:
        return iter(self.configs)

    def __len__(self) -> int:
        return len(self.configs)

    def __getitem__(self, number: int) -> SpecConfig:
        return self.configs[number]

    @property
    def widest(self) -> SpecConfig:
        """The setting of the state between rounds: the most lanes and the most steps of all."""
        drafting = [config for config in self.configs if not config.is_plain]
        if not drafting:
            return self.configs[0]
        topk = max(config.topk for config in drafting)
        num_steps = max(config.num_steps for config in drafting)
        nodes: Any = None  # the number of nodes of a chain or a static tree follows
        if topk > 1 and not drafting[0].is_sampled:
            nodes = max(config.num_draft_tokens for config in drafting)
        return replace(drafting[0], topk=topk, num_steps=num_steps, num_draft_tokens=nodes)


def with_steps(config: SpecConfig, num_steps: int) -> SpecConfig:
    """Make the setting with another number of steps, 0 for plain decoding."""
    if num_steps == config.num_steps:
        return config
    if num_steps == 0:
        verifier = DEFAULT_VERIFIER if config.has_draft_prob else config.verifier
        return replace(config, topk=1, num_steps=0, num_draft_tokens=1, verifier=verifier)
    nodes: Any = None  # the number of nodes of a chain or a static tree follows
    if config.topk > 1 and not config.is_sampled:
        nodes = min(config.num_draft_tokens, 1 + config.topk + (num_steps - 1) * config.topk**2)
    return replace(config, num_steps=num_steps, num_draft_tokens=nodes)
