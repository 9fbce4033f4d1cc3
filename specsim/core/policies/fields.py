"""Fields of a policy's JSON object, with the JSON schema of each."""

from collections.abc import Mapping
from typing import Any

from specsim.core.limits import MOST_TOKENS

TABLE = "num_speculative_tokens_per_batch_size"
TREE = ("topk", "num_steps", "num_draft_tokens")
_COUNT = {"type": "integer", "minimum": 0, "maximum": MOST_TOKENS}
_NUMBER = {"type": "number"}
_STEPS = {"type": "array", "minItems": 1, "items": _COUNT}
_ENTRY = {"type": "array", "minItems": 3, "maxItems": 3, "items": _COUNT}
RULE_FIELDS: Mapping[str, Any] = {
    "ema_alpha": _NUMBER,
    "update_interval": _COUNT,
    "warmup_batches": _COUNT,
    "down_hysteresis": _NUMBER,
    "up_hysteresis": _NUMBER,
    "ceiling_coeff": _NUMBER,
}
_RULE = {
    "type": "object",
    "required": ["candidate_steps"],
    "additionalProperties": False,
    "properties": {"candidate_steps": _STEPS, **RULE_FIELDS},
}
_RULES = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": False,
    "patternProperties": {"^[1-9][0-9]{0,8}$": _RULE},
}
_SECONDS = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": False,
    "patternProperties": {"^[0-9]{1,9}$": {"type": "array", "items": _NUMBER}},
}
_STEPS_OR_PAIRS = {
    "type": "array",
    "minItems": 1,
    "items": {"oneOf": [_COUNT, {"type": "array", "minItems": 2, "maxItems": 2, "items": _COUNT}]},
}
PER_REQUEST = "per_request"
_EITHER = {PER_REQUEST: {"type": "boolean"}}
# By policy.
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "moving-average": {"rules": _RULES, "first": _COUNT, **RULE_FIELDS, **_EITHER},
    "table": {TABLE: {"type": "array", "minItems": 1, "items": _ENTRY}},
    "goodput": {
        "batch_sizes": {"type": "array", "items": _COUNT},
        "seconds": _SECONDS,
        "weight": _NUMBER,
        "row_seconds": _NUMBER,
        **_EITHER,
    },
    "throughput": {"weight": _NUMBER, "explore": _COUNT},
    "off-switch": {"limit": _COUNT},
    "scripted": {"script": _STEPS_OR_PAIRS, **_EITHER},
}
COST = ("batch_sizes", "seconds")  # of goodput, both or, where a cost model gives them, neither
NEEDED: Mapping[str, tuple[str, ...]] = {
    "table": (TABLE,),
    "off-switch": ("limit",),
    "scripted": ("script",),
}
# The settings to choose among, by their numbers of steps or as trees.
CHOICE: Mapping[str, Any] = {
    "steps": _STEPS,
    "settings": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["num_steps"],
            "additionalProperties": False,
            "properties": dict.fromkeys(TREE, _COUNT),
        },
    },
}
