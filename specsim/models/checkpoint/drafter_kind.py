"""Kinds of drafters, told apart by fields and keys that only one of them has."""

import re
from collections.abc import Collection

from specsim.core.drafter import BLOCK_KINDS
from specsim.core.errors import InputError
from specsim.models.checkpoint.fields import Fields

_MTP = r"modules\.\d+\.|mtp\.|mtp_layers\.\d+\.|layers\.\d+\.(enorm|hnorm|eh_proj)\."
_EAGLE3 = r"midlayer\.|layers\.0\.hidden_norm\.|d2t$"
_SPECULATORS = {"eagle3": "eagle3", "peagle": "p-eagle", "mtp": "mtp", **{kind: kind for kind in BLOCK_KINDS}}
_MODEL = ("embed_tokens.weight", "layers.0.input_layernorm.weight", "norm.weight")


def drafter_kind(fields: Fields, keys: Collection[str], wanted: str | None = None) -> str:
    """Find the kind of the drafter in a folder.

    Fields come before keys, so that errors name a missing key. wanted: the kind to read of a language model with MTP
    modules, which is a standalone drafter otherwise.
    """
    names = [key.removeprefix("model.") for key in keys]
    if fields.get("speculators_model_type"):
        return _SPECULATORS[fields.choice("speculators_model_type", tuple(_SPECULATORS))]
    if fields.get("dflash_config") or fields.get("markov_rank") is not None:
        return "dspark" if fields.get("markov_rank") is not None else "dflash"
    if fields.flag("parallel_drafting") or "mask_hidden" in names:
        return "p-eagle"
    if fields.get("draft_vocab_size"):
        return "eagle3"
    if fields.get("backbone_hidden_size") or "pre_projection.weight" in names:
        return "frozen-kv"
    if "fc.weight" in names:
        return "eagle3" if any(re.match(_EAGLE3, name) for name in names) else "eagle"
    is_model = all(name in names for name in _MODEL)
    if wanted == "mtp" and is_model:
        return "mtp"
    if not is_model and (fields.get("num_nextn_predict_layers") or any(re.match(_MTP, name) for name in names)):
        return "mtp"
    if is_model:
        return "standalone"
    allowed = "a drafter: EAGLE-1, EAGLE-2, EAGLE-3, P-EAGLE, MTP, frozen KV, DFlash, DSpark, or a language model"
    raise InputError(f"fc.weight in {fields.file.parent}", "missing", allowed)
