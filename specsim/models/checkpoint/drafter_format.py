"""Format of a drafter's checkpoints: one value for each kind with weights, which the kind's record names."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from specsim.core.drafter import DrafterConfig
from specsim.core.errors import InputError
from specsim.core.kinds import KINDS
from specsim.core.pair import DrafterCheckpoint
from specsim.core.target import ModelConfig
from specsim.core.verifiers import resolve
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.layout import Layout
from specsim.models.checkpoint.weights import Stored

# Of config.json, the tensors' names without `model.`, and whether the caller names this kind.
Matches = Callable[[Fields, Collection[str], bool], bool]


class DrafterLayout(NamedTuple):
    """Required and optional tensors of a drafter."""

    required: Layout
    optional: Layout


@dataclass(frozen=True, slots=True)
class HeadWriter:
    """Layouts in which `convert` writes a head."""

    layouts: tuple[str, ...]
    config_json: Callable[[Any, str], dict[str, Any]]  # of the drafter's config and a layout
    tensors: Callable[[Mapping[str, torch.Tensor], str], Mapping[str, torch.Tensor]] = lambda tensors, layout: tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFormat:
    """Everything that the folder `models` needs to know of a kind's checkpoints."""

    # Formats are tried in this order: several have a field or a tensor by which a later one is recognised.
    precedence: int
    matches: Matches  # fields come before names, so that errors name a missing tensor
    load: Callable[[Fields, list[Stored], ModelConfig], DrafterCheckpoint]  # of config.json and the target's shape
    layout: Callable[[Any], DrafterLayout]  # of the drafter's config
    speculators: str | None = None  # speculators_model_type of vllm-project/speculators
    writer: HeadWriter | None = None
    is_language_model: bool = False  # it has a tokenizer of its own, and its vocabulary can be bridged to the target's
    draft_rows: tuple[str, ...] = ("lm_head.weight",)  # tensors with a row for each draft id


def format_of(kind: str) -> DrafterFormat:
    """Find the format of a kind with weights."""
    return resolve(KINDS[kind].format)


def drafter_formats() -> Mapping[str, DrafterFormat]:
    """List the format of every kind with weights."""
    return {name: format_of(name) for name, kind in KINDS.items() if kind.has_weights}


def drafter_kind(fields: Fields, keys: Collection[str], wanted: str | None = None) -> str:
    """Find the kind of the drafter in a folder.

    wanted: the kind that the caller names, which decides where a language model has modules of another kind.
    """
    formats = drafter_formats()
    if fields.get("speculators_model_type"):
        kinds = {
            drafter_format.speculators: kind for kind, drafter_format in formats.items() if drafter_format.speculators
        }
        return kinds[fields.choice("speculators_model_type", tuple(kinds))]
    names = [key.removeprefix("model.") for key in keys]
    for kind, drafter_format in sorted(formats.items(), key=lambda item: item[1].precedence):
        if drafter_format.matches(fields, names, kind == wanted):
            return kind
    titles = [KINDS[kind].title for kind, drafter_format in formats.items() if not drafter_format.is_language_model]
    allowed = f"a drafter: {', '.join(titles)}, or a language model"
    raise InputError(f"fc.weight in {fields.file.parent}", "missing", allowed)


def drafter_layout(config: DrafterConfig) -> DrafterLayout:
    """List the tensors of a drafter of any kind.

    One with a draft vocabulary has a head of its own, and d2t.
    """
    required, optional = format_of(config.kind).layout(config)
    size = config.draft_vocab_size
    if size != config.model.vocab_size:
        required = required | {"lm_head.weight": (size, config.model.hidden_size), "d2t": (size,)}
        optional = optional | {"t2d": (config.model.vocab_size,)}
    return DrafterLayout(required, optional)


def speculators_fields(
    model_type: str, class_name: str, num_drafts: int, fields: dict[str, Any], layer: dict[str, Any]
) -> dict[str, Any]:
    """Arrange fields as speculators 0.9 saves them and vLLM reads them, but for the verifier's name.

    model_type, class_name: of speculators. num_drafts: drafts of a round, for engines that take them from the head.
    layer: fields of the layers.
    """
    methods = [{"proposal_type": "greedy", "speculative_tokens": num_drafts}]
    return {
        "architectures": [class_name],
        "speculators_model_type": model_type,
        **fields,
        "speculators_config": {
            "algorithm": model_type,
            "proposal_methods": methods,
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": {"hidden_act": "silu", "attention_dropout": 0.0, **layer},
    }
