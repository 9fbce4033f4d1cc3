"""A target and its drafter: shapes and tensors, as every engine reads them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Generic, TypeVar

import torch

from specsim.core.arguments import check_arguments
from specsim.core.config import SpecConfig
from specsim.core.drafter import DrafterConfig
from specsim.core.errors import InputError, require
from specsim.core.kinds import KINDS, OWN, DrafterKind
from specsim.core.rank_group import RankGroup
from specsim.core.rank_part import DRAFTER_TABLES, TABLES, RankPart
from specsim.core.target import Attention, HeadAttention, ModelConfig
from specsim.core.token_drafter import LookupConfig, TokenDrafter
from specsim.core.verifiers import VERIFIER_KINDS, one_of


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TargetCheckpoint:
    """A target's shape and its tensors."""

    config: ModelConfig
    tensors: Mapping[str, torch.Tensor]  # as stored, under Hugging Face names; a tied lm_head.weight is the embedding
    part: RankPart | None = None  # rank whose slices the tensors are; None: they are whole

    def tensors_of(self, part: RankPart) -> dict[str, torch.Tensor]:
        """Take a rank's slices of the tensors, which are whole or those slices already."""
        return _slices(self, part, TABLES)

    def facts(self) -> dict[str, str]:
        """Names and values that repr and Jupyter show."""
        return {"kind": self.config.family} | _facts(self.config, self.tensors)

    def __repr__(self) -> str:
        return _one_line(self)


Shape = TypeVar("Shape", bound=DrafterConfig)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DrafterCheckpoint(Generic[Shape]):
    """A drafter's shape, of its kind's config, and its tensors."""

    config: Shape
    tensors: Mapping[str, torch.Tensor]  # as stored, under the names of the kind's file in models/drafters
    part: RankPart | None = None  # rank whose slices the tensors are; None: they are whole

    def tensors_of(self, part: RankPart) -> dict[str, torch.Tensor]:
        """Take a rank's slices of the tensors, which are whole or those slices already."""
        return _slices(self, part, DRAFTER_TABLES)

    def tensors_on(self, ranks: RankGroup | None) -> Mapping[str, torch.Tensor]:
        """Take the tensors that this rank of a group runs with, all of them without a group."""
        return self.tensors if ranks is None else self.tensors_of(ranks.part)

    def facts(self) -> dict[str, str]:
        """Names and values that repr and Jupyter show."""
        inputs = {"drafts from": f"{self.config.draft_vocab_size:,} tokens", "reads": self.config.reads}
        return {"kind": self.config.kind} | _facts(self.config.model, self.tensors) | inputs

    def __repr__(self) -> str:
        return _one_line(self)


def _slices(
    checkpoint: TargetCheckpoint | DrafterCheckpoint, part: RankPart, tables: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    if checkpoint.part is None:
        return part.tensors(checkpoint.tensors, tables)
    allowed = f"the slices of rank {part.rank} of {part.size}, as this engine's"
    require(checkpoint.part == part, "pair", repr(checkpoint.part), allowed)
    return {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.numel() or name in tables}


AnyDrafter = DrafterCheckpoint | LookupConfig | TokenDrafter


def runs_on_host(drafter: AnyDrafter | None, config: SpecConfig) -> bool:
    """Check whether the fast implementation's draft phase is host code, which no graph captures."""
    if config.is_plain or drafter is None:
        return False
    return record_of(drafter).drafts_on_host(config.topk)


def kind_of(drafter: AnyDrafter | None) -> str:
    """Name a drafter's kind: `none` without one, the class name of a user's own."""
    if isinstance(drafter, DrafterCheckpoint):
        return drafter.config.kind
    return "none" if drafter is None else getattr(drafter, "kind", type(drafter).__name__)


def record_of(drafter: AnyDrafter) -> DrafterKind:
    """Find the record of a drafter's kind, that of all users' own ones for one without a name."""
    return KINDS.get(kind_of(drafter), OWN)


def check_drafter(drafter: AnyDrafter | None, config: SpecConfig) -> AnyDrafter:
    """Return the drafter of a setting with drafts.

    Raises InputError where there is none, or where the verifier needs sampled drafts, which it does not make.
    """
    if drafter is None:
        raise InputError("num_steps", config.num_steps, "0 (SpecConfig.plain()) for a pair without a drafter")
    if config.is_sampled and not record_of(drafter).can_sample:
        possible = one_of(kind for kind in VERIFIER_KINDS if kind.drafts == "best")
        allowed = f"{possible} with drafter {kind_of(drafter)}, whose drafts are not sampled"
        raise InputError("verifier", config.verifier, allowed)
    return drafter


@check_arguments
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Pair:
    """A target and a drafter that fits it."""

    target: TargetCheckpoint
    drafter: AnyDrafter | None  # None: plain decoding
    tokenizer: Any  # of the target, None where there is none
    name: str
    # A drafter of tokens on the host, whose drafts take the place of the drafter's where it has some.
    lookup: LookupConfig | TokenDrafter | None = None

    def __post_init__(self) -> None:
        if self.lookup is not None:
            allowed = "a drafter that runs on the host, such as suffix, next to a drafter with weights"
            is_possible = self.checkpoint is not None and record_of(self.lookup).on_host == "always"
            require(is_possible, "lookup", kind_of(self.lookup), allowed)

    def with_drafter(self, drafter: AnyDrafter | None) -> "Pair":
        """Make the same target's pair with another drafter, such as a token drafter of your own."""
        return replace(self, drafter=drafter, name=f"{self.name.partition(',')[0]}, {kind_of(drafter)}", lookup=None)

    @property
    def checkpoint(self) -> DrafterCheckpoint | None:
        """The drafter if it has weights, else None."""
        return self.drafter if isinstance(self.drafter, DrafterCheckpoint) else None

    @property
    def kind(self) -> str:
        """Kind of the drafter: `none` without one, the class name of a user's own; with the lookup's after a plus."""
        return kind_of(self.drafter) if self.lookup is None else f"{kind_of(self.drafter)}+{kind_of(self.lookup)}"

    @property
    def drafts(self) -> str:
        """Name the way in which the drafter makes drafts, as its record does: `none` without one."""
        return "none" if self.drafter is None else record_of(self.drafter).drafts

    def __repr__(self) -> str:
        return f"Pair {self.name}\n  target:  {self.target!r}\n  drafter: {self.drafter!r}"

    def _repr_html_(self) -> str:
        parts = {
            "target": self.target.facts(),
            "drafter": self.checkpoint.facts() if self.checkpoint else {"kind": self.kind},
        }
        names = list(parts["target"] | parts["drafter"])
        rows = [["", *names], *([part, *(facts.get(name, "") for name in names)] for part, facts in parts.items())]
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        return f"<table><caption>{escape(self.name)}</caption>{body}</table>"


def _facts(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Describe a model, counting the parameters of a tied head once."""
    unique = {id(tensor): tensor for tensor in tensors.values() if tensor.is_floating_point()}.values()
    return {
        "layers": str(config.num_layers),
        "hidden": str(config.hidden_size),
        "heads": _heads(config.layers[0].attention),
        "KV heads": str(config.kv_layout.num_kv_heads),
        "vocabulary": f"{config.vocab_size:,}",
        "parameters": f"{sum(tensor.numel() for tensor in unique):,}",
        "dtype": ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in unique})),
    }


def _heads(attention: Attention) -> str:
    """Describe the query heads, and the latent vector that their keys and values are made of."""
    if isinstance(attention, HeadAttention):
        return f"{attention.num_heads} of {attention.head_dim}"
    return f"{attention.num_heads} of {attention.nope_dim + attention.rope_dim}, latent {attention.latent_rank}"


def _one_line(checkpoint: TargetCheckpoint | DrafterCheckpoint) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in checkpoint.facts().items())
    return f"{type(checkpoint).__name__}({facts})"
