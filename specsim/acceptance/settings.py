"""Settings of the acceptance study by drafter, and the accept lengths that some of them should reach."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from specsim.core.config import SpecConfig
from specsim.core.display import short_setting
from specsim.core.errors import InputError, require_choices
from specsim.core.kinds import DEFAULT, KINDS, OWN
from specsim.models.load import is_token_drafter, split_lookup

PromptSet = Literal["prompts", "edits"]
# Shipped drafters, in the order of tables.
DRAFTERS = tuple(sorted(KINDS, key=lambda name: name != DEFAULT))


@dataclass(frozen=True, slots=True)
class StudySetting:
    """One run of the study."""

    drafter: str  # drafter: the name of a shipped one, or MODULE:NAME
    config: SpecConfig
    temperature: float = 0.0  # sampling temperature; 0 is greedy
    prompt_set: PromptSet = "prompts"  # held-out prompts, or edits: prompts that end within a copy of an excerpt

    def __post_init__(self) -> None:
        require_choices(self)

    @property
    def is_chain(self) -> bool:
        return self.config.topk == 1

    @property
    def conditions(self) -> str:
        """Temperature and prompt set, in a few words."""
        return f"T={self.temperature:g}" + (", edits" if self.prompt_set == "edits" else "")

    def __str__(self) -> str:
        titles = map(_title, filter(None, split_lookup(self.drafter)))
        return f"{'+'.join(titles)} {short_setting(self.config)}"


def _title(drafter: str) -> str:
    """Name a kind as tables do, and a drafter of your own by its class."""
    return KINDS[drafter].title if drafter in KINDS else drafter.rpartition(":")[2]


def chain(num_drafts: int) -> SpecConfig:
    """Make the setting of a chain of drafts, the root and all of them verified."""
    return SpecConfig(topk=1, num_steps=num_drafts, num_draft_tokens=num_drafts + 1)


TREE = SpecConfig(topk=4, num_steps=4, num_draft_tokens=16)


def settings_of(drafter: str) -> Iterator[StudySetting]:
    """Give the settings of a drafter: a chain of 3 and a tree, greedy and sampled; more chains for some.

    A block drafter also has the chain of a whole block, and its tree is as deep. A drafter without weights runs on both
    prompt sets, alone or next to another one, which then runs on the edits alone, too. InputError for a name that
    `specsim accept` does not know.
    """
    head, lookup = split_lookup(drafter)
    if head not in KINDS and ":" not in drafter:
        raise InputError("drafter", drafter, " or ".join([*DRAFTERS, "MODULE:NAME"]))
    if drafter == DEFAULT:
        yield from (StudySetting(drafter, chain(num_drafts)) for num_drafts in (1, 2, 4, 5))
        yield StudySetting(drafter, chain(4), temperature=1.0)
    looks_up = lookup is not None or is_token_drafter(drafter)
    sets: tuple[PromptSet, ...] = ("prompts", "edits") if looks_up else ("prompts",)
    for prompt_set in sets:
        for temperature in (0.0, 1.0):
            for config in _configs(head or drafter):
                yield StudySetting(drafter, config, temperature, prompt_set)
                if head and lookup and prompt_set == "edits":
                    yield StudySetting(head, config, temperature, prompt_set)


def _configs(drafter: str) -> Iterator[SpecConfig]:
    """Give the chains and the tree of a drafter."""
    kind = KINDS.get(drafter, OWN)
    yield chain(3)
    if kind.drafts == "block":
        yield chain(kind.tree_steps)
    yield replace(TREE, num_steps=kind.tree_steps)


SETTINGS = tuple(setting for drafter in DRAFTERS for setting in settings_of(drafter))


class LengthTarget(NamedTuple):
    """A setting and the least accept length that it should reach."""

    setting: StudySetting
    accept_length: float


def _targets() -> Iterator[LengthTarget]:
    """Give the targets of all drafters in the order of tables."""
    for name in DRAFTERS:
        if least := KINDS[name].accept_length:
            yield LengthTarget(StudySetting(name, chain(3)), least)
        if name == DEFAULT:
            yield LengthTarget(StudySetting(name, chain(3), temperature=1.0), 1.7)


TARGETS = tuple(_targets())
TARGETS_FRESH = (LengthTarget(StudySetting(DEFAULT, chain(3)), 2.3),)  # over prompts whose continuation does not loop
