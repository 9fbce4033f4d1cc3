"""Loading of a target and its drafter, from folders, from the Hugging Face hub, or as shipped."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from specsim.core.arguments import check_arguments
from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require, require_choice, require_type
from specsim.core.kinds import DEFAULT, KINDS, OWN
from specsim.core.limits import TokenCount
from specsim.core.pair import AnyDrafter, DrafterCheckpoint, Pair, kind_of
from specsim.core.rank_part import DRAFTER_TABLES, TABLES, RankPart
from specsim.core.target import ModelConfig
from specsim.core.token_drafter import NEXT_TO_A_HEAD, UserDrafter
from specsim.core.user_module import UserFunction, load_object, user_code
from specsim.core.verifiers import resolve
from specsim.models import shipped
from specsim.models.checkpoint import load_drafter, load_target, local_folder, locate
from specsim.models.checkpoint.drafter_format import drafter_formats, format_of
from specsim.models.checkpoint.loading import Read
from specsim.models.checkpoint.model_config import read_target_config
from specsim.models.checkpoint.vocabulary import LazyTokenizer, check_vocabulary, has_tokenizer
from specsim.models.checkpoint.vocabulary import bridge_vocabularies as bridged
from specsim.models.checkpoint.weights import Slices, read_weights
from specsim.models.draft_limits import DraftWindow, VocabularySource, limit_drafts

SHIPPED = "tiny"  # name of the shipped target
_TOKEN_DRAFTERS = tuple(name for name, kind in KINDS.items() if not kind.has_weights)


class Parts(NamedTuple):
    """Ranks whose slices of a target and of its drafter are loaded; None: the whole."""

    target: RankPart | None = None
    drafter: RankPart | None = None


@check_arguments
def load(
    target: str | Path | None = None,
    draft: str | Path | None = None,
    drafter: str | None = None,
    draft_fields: Mapping[str, Any] | None = None,
    bridge_vocabularies: bool = False,
    parts: Parts | None = None,
    draft_vocab: VocabularySource | None = None,
    draft_window: DraftWindow | TokenCount | None = None,
) -> Pair:
    """Load a target and its drafter, each from a folder or a hub id.

    Without target and draft it loads the shipped pair with its default drafter.
    target: `tiny` is the shipped one, with its own drafters (a folder of that name is ./tiny).
    drafter: a kind in specsim.core.kinds, another of the shipped drafters or the required kind of the given one. A
    target without `draft` needs "none", or a kind without weights, or one whose modules are in the target's folder, or
    a token drafter of your own as "module:Name" or "file.py:Name".
    draft_fields: fields for the drafter's config.json that are missing there or wrong.
    bridge_vocabularies: a language model with another vocabulary drafts the tokens that its target has too.
    parts: of safetensors, only the slices of one rank are read; an engine of that rank can run the pair.
    "KIND+suffix", or a drafter of your own in place of suffix: where that one has drafts they are taken.
    draft_vocab, draft_window: tokens that the drafter drafts from and keys that it sees, see limit_drafts. A drafter
    with fewer tokens is read whole, as its head is that of all ranks.
    """
    drafter, lookup = split_lookup(drafter)
    if draft_fields is not None:
        require_type("draft_fields", draft_fields, Mapping, "a mapping of names to values")
    folders = _pair_folders(target, draft, drafter)
    if folders.draft is None and bridge_vocabularies:
        raise InputError("bridge_vocabularies", True, _bridged_kinds())
    if folders.draft is None and draft_fields:
        raise InputError("draft_fields", dict(draft_fields), "none without a drafter that has weights")
    parts = parts if parts and draft_vocab is None else Parts()
    # The drafter may be in the target's folder, which is read once.
    family = read_target_config(folders.target).family
    read = cache(partial(read_weights, slices=parts.target and Slices(parts.target, TABLES, family)))
    checkpoint = replace(load_target(folders.target, read), part=parts.target)
    loaded_drafter: Any = token_drafter(drafter) if drafter is not None and is_token_drafter(drafter) else None
    if folders.draft is not None:
        if parts != Parts() and (folders.draft != folders.target or parts.drafter != parts.target):
            of_drafter = parts.drafter and Slices(parts.drafter, DRAFTER_TABLES, family)
            read = partial(read_weights, slices=of_drafter)
        loaded_drafter = _load_drafter(folders, checkpoint.config, draft_fields, drafter, read)
        loaded_drafter = replace(loaded_drafter, part=parts.drafter)
        loaded_drafter = _speaking(loaded_drafter, folders, checkpoint.config, bridge_vocabularies)
    tokenizer = LazyTokenizer(folders.target) if has_tokenizer(folders.target) else None
    other: Any = NEXT_TO_A_HEAD if lookup in KINDS else lookup and token_drafter(lookup)
    name = folders.name if lookup is None else f"{folders.name}+{lookup}"
    return limit_drafts(Pair(checkpoint, loaded_drafter, tokenizer, name, other), draft_vocab, draft_window)


def split_lookup(drafter: str | None) -> tuple[str | None, str | None]:
    """Split KIND+LOOKUP into the kind of a drafter with weights and the drafter next to it, if any."""
    kind, plus, lookup = (drafter or "").partition("+")
    if not plus or kind not in KINDS:
        return drafter, None
    allowed = f"KIND+suffix or KIND+MODULE:NAME, KIND one of {', '.join(k for k in KINDS if KINDS[k].has_weights)}"
    is_possible = KINDS[kind].has_weights and (":" in lookup or lookup == NEXT_TO_A_HEAD.kind)
    require(is_possible, "drafter", drafter, allowed)
    return kind, lookup


def drafts_on_host(drafter: str | None, config: SpecConfig) -> bool:
    """Check whether a drafter of this name drafts on the host, between graphs of the fast implementation."""
    kind, lookup = split_lookup(drafter or DEFAULT)
    if kind is None or lookup is not None:
        return False
    return is_token_drafter(kind) and KINDS.get(kind, OWN).drafts_on_host(config.topk)


def load_shipped(drafter: str) -> Pair:
    """Load the shipped target with a drafter; a worker process can be given this function."""
    return load(drafter=drafter)


def load_config(
    target: str | Path | None = None,
    draft: str | Path | None = None,
    drafter: str | None = None,
) -> ModelConfig:
    """Read the shape of the target that `load` would load, without weights."""
    return read_target_config(_pair_folders(target, draft, split_lookup(drafter)[0]).target)


def is_token_drafter(drafter: str | None) -> bool:
    """Check whether a name is that of a drafter without weights: a kind, or one of your own."""
    return drafter is not None and (drafter in _TOKEN_DRAFTERS or ":" in drafter)


def token_drafter(drafter: str) -> AnyDrafter:
    """Make the drafter without weights of this name.

    Raises InputError for a drafter of your own that cannot be imported or has no propose, and when a method raises.
    """
    if drafter in _TOKEN_DRAFTERS:
        return resolve(KINDS[drafter].settings)()
    allowed = "MODULE:NAME or FILE.py:NAME of a drafter with the methods propose and finish"
    user_drafter = load_object(drafter, "drafter", allowed)
    with user_code("drafter", drafter, allowed):
        propose, finish = (getattr(user_drafter, name, None) for name in ("propose", "finish"))
        kind = str(kind_of(user_drafter))
    if not (callable(propose) and callable(finish)):
        raise InputError("drafter", drafter, allowed)
    allowed = "a drafter whose propose returns a Proposal, and whose finish ends"
    boundary = ("drafter", drafter, allowed)
    return UserDrafter(UserFunction(propose, *boundary), UserFunction(finish, *boundary), kind)


class _PairFolders(NamedTuple):
    """Folders and name of a pair."""

    target: Path
    draft: Path | None
    name: str


def _load_drafter(
    folders: _PairFolders, target: ModelConfig, draft_fields: Mapping[str, Any] | None, drafter: str | None, read: Read
) -> DrafterCheckpoint:
    """Load a drafter with weights, and check that it is of the named kind."""
    folder = folders.draft or folders.target
    loaded = load_drafter(folder, target, draft_fields, drafter, read)
    if drafter not in (None, loaded.config.kind):
        raise InputError("drafter", drafter, f"{loaded.config.kind}, the kind of the drafter in {folder}")
    return loaded


def _speaking(
    loaded: DrafterCheckpoint, folders: _PairFolders, target: ModelConfig, is_bridged: bool
) -> DrafterCheckpoint:
    """Check that a drafter speaks the target's tokens, or make it speak those that both have."""
    folder = folders.draft or folders.target
    is_language_model = format_of(loaded.config.kind).is_language_model
    if is_bridged:
        require(is_language_model, "bridge_vocabularies", True, _bridged_kinds())
        return bridged(loaded, folder, target, folders.target)
    if is_language_model:
        check_vocabulary(target, folders.target, loaded.config.model, folder)
    return loaded


def _bridged_kinds() -> str:
    """Say for which drafters bridge_vocabularies is allowed."""
    kinds = [kind for kind, drafter_format in drafter_formats().items() if drafter_format.is_language_model]
    return f"False, except for a drafter of kind {' or '.join(kinds)}, which has a vocabulary of its own"


def _pair_folders(target: str | Path | None, draft: str | Path | None, drafter: str | None) -> _PairFolders:
    """Find the folders for the arguments of `load`."""
    if drafter is not None and ":" not in drafter:
        require_choice("drafter", drafter, (*KINDS, "none", "MODULE:NAME"))
    shipped_target = shipped.TINY / "target"
    has_weights = drafter != "none" and not is_token_drafter(drafter)
    if target in (None, SHIPPED) and draft is None:
        kind = drafter or DEFAULT
        name = SHIPPED if drafter == "none" else f"{SHIPPED}, {kind}"
        return _PairFolders(shipped_target, _shipped_drafter(kind) if has_weights else None, name)
    target = _given_target(target, draft, drafter, has_weights)
    head = None if draft is None else locate("draft", draft)
    folder = shipped_target if target == SHIPPED else locate("target", target)
    if draft is None and _is_in_target_folder(drafter):
        head = folder
    parts = [target, draft or (drafter if drafter != "none" else None)]
    return _PairFolders(folder, head, ", ".join(str(part) for part in parts if part is not None))


def _shipped_drafter(kind: str) -> Path:
    """Find a shipped drafter of the shipped target."""
    if not (shipped.TINY / kind / "config.json").exists():
        shipped_kinds = [name for name in KINDS if (shipped.TINY / name / "config.json").exists()]
        allowed = (
            f"{' or '.join([*shipped_kinds, *_TOKEN_DRAFTERS, 'none'])}, or with draft, as no {kind} drafter is shipped"
        )
        raise InputError("drafter", kind, allowed)
    return shipped.TINY / kind


def _given_target(
    target: str | Path | None, draft: str | Path | None, drafter: str | None, has_weights: bool
) -> str | Path:
    """Return the target, after a check that the arguments name it, and a drafter where it needs one."""
    if target is None:
        raise InputError("target", None, "the target that the given drafter was trained for")
    if draft is not None and not has_weights:
        raise InputError("draft", str(draft), f"none where drafter is {drafter}")
    if target != SHIPPED:
        local_folder("target", target)
    if draft is None and has_weights and not _is_in_target_folder(drafter):
        raise InputError("draft", None, "a drafter of the given target (a folder or a hub id), or drafter none")
    return target


def _is_in_target_folder(drafter: str | None) -> bool:
    kind = KINDS.get(drafter or "none")
    return kind is not None and kind.in_target
