"""Loading of a target and its drafter, from folders, from the Hugging Face hub, or as shipped."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from specsim.core.errors import InputError, require, require_type
from specsim.core.pair import Pair
from specsim.core.target import ModelConfig
from specsim.models import shipped
from specsim.models.checkpoint import load_drafter, load_target, local_folder, locate
from specsim.models.checkpoint.model_config import read_target_config
from specsim.models.checkpoint.tokenizer import LazyTokenizer

SHIPPED = "tiny"  # name of the shipped target
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load(
    target: str | Path | None = None,
    draft: str | Path | None = None,
    drafter: Literal["eagle", "eagle3", "none"] | None = None,
    draft_fields: Mapping[str, Any] | None = None,
) -> Pair:
    """Load a target and its drafter, each from a folder or a hub id.

    Without target and draft it loads the shipped pair with its EAGLE-3 head.
    target: `tiny` is the shipped one, with its own heads (a folder of that name is ./tiny).
    drafter: another of the shipped heads, or the required kind of the given one. A target without `draft` needs "none".
    draft_fields: fields for the drafter's config.json that are missing there or wrong.
    """
    if draft_fields is not None:
        require_type("draft_fields", draft_fields, Mapping, "a mapping of names to values")
    places = _places(target, draft, drafter)
    if places.draft is None and draft_fields:
        raise InputError("draft_fields", dict(draft_fields), "none without a drafter")
    checkpoint = load_target(places.target)
    head = None if places.draft is None else load_drafter(places.draft, checkpoint.config, draft_fields)
    if head and drafter not in (None, head.config.kind):
        raise InputError("drafter", drafter, f"{head.config.kind}, the kind of the head in {draft}")
    has_tokenizer = any((places.target / file).exists() for file in _TOKENIZERS)
    return Pair(checkpoint, head, LazyTokenizer(places.target) if has_tokenizer else None, places.name)


def load_config(
    target: str | Path | None = None,
    draft: str | Path | None = None,
    drafter: Literal["eagle", "eagle3", "none"] | None = None,
) -> ModelConfig:
    """Read the shape of the target that `load` would load, without weights."""
    return read_target_config(_places(target, draft, drafter).target)


class _Places(NamedTuple):
    """Folders and name of a pair."""

    target: Path
    draft: Path | None
    name: str


def _places(target: str | Path | None, draft: str | Path | None, drafter: str | None) -> _Places:
    """Find the folders for the arguments of `load`."""
    require(drafter in (None, "eagle", "eagle3", "none"), "drafter", drafter, "eagle or eagle3 or none")
    own = shipped.TINY / "target"
    if target in (None, SHIPPED) and draft is None:
        if drafter == "none":
            return _Places(own, None, SHIPPED)
        kind = drafter or "eagle3"
        return _Places(own, shipped.TINY / kind, f"{SHIPPED}, {kind}")
    target = _given_target(target, draft, drafter)
    head = None if draft is None else locate("draft", draft)
    folder = own if target == SHIPPED else locate("target", target)
    return _Places(folder, head, str(target) if draft is None else f"{target}, {draft}")


def _given_target(target: str | Path | None, draft: str | Path | None, drafter: str | None) -> str | Path:
    """Return the target, after a check that the arguments name it, and a drafter unless it is `none`."""
    if target is None:
        raise InputError("target", None, "the target that the given drafter was trained for")
    if draft is not None and drafter == "none":
        raise InputError("draft", str(draft), "none where drafter is none")
    if target != SHIPPED:
        local_folder("target", target)
    if draft is None and drafter != "none":
        raise InputError("draft", None, "a drafter of the given target (a folder or a hub id), or drafter none")
    return target
