"""Fields that the forms of OpenAI and of SGLang share, read from JSON."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from specsim.core.config import SamplingParams
from specsim.core.errors import InputError, require, require_int, require_type
from specsim.core.grammar import Grammar
from specsim.serving.http.service import Service

Body = Mapping[str, Any]
_OURS = [field.name for field in fields(SamplingParams)]
# Other names of fields of SamplingParams, in the forms of vLLM, SGLang and OpenAI.
_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "sampling_seed": "seed",
}
_NO_TOP_K = -1  # in both forms
_SPACELESS = {"x-guidance": {"whitespace_flexible": False}}  # so that a JSON text ends as soon as it can


def read_body(text: bytes) -> dict[str, Any]:
    """Read the JSON object of a request."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError("body", "no JSON", "a JSON object") from None
    require_type("body", body, dict, "a JSON object")
    return body


def sampling_params(body: Body, **defaults: Any) -> SamplingParams:
    """Read sampling parameters; null is the default. InputError names the field as the body does."""
    values, names = dict(defaults), {}
    for name in (*_OURS, *_NAMES):
        if (value := body.get(name)) is not None:
            ours = _NAMES.get(name, name)
            values[ours], names[ours] = _converted(name, value), name
    values["max_new_tokens"] = max(1, values["max_new_tokens"])  # 0 generates nothing: Ask.scores_only
    try:
        return SamplingParams(**values)
    except InputError as error:
        raise InputError(names.get(error.name, error.name), error.value, error.allowed) from None


def _converted(name: str, value: Any) -> Any:
    """Convert a value of JSON to the type of its field."""
    if name in ("stop", "stop_regex"):
        texts = [value] if isinstance(value, str) else value
        require_type(name, texts, list, "a text or a list of texts")
        return tuple(texts)
    if name == "stop_token_ids":
        require_type(name, value, list, "a list of token ids")
        return tuple(value)
    if name == "logit_bias":
        return _biases(value)
    if name == "top_k":
        return 0 if value == _NO_TOP_K else value
    if _NAMES.get(name) == "max_new_tokens":
        return require_int(name, value, 0, 2**31 - 1)
    if _NAMES.get(name, name) == "seed":
        return require_int(name, value, -(2**63), 2**64 - 1) % 2**64
    return float(value) if type(value) is int and name not in ("max_new_tokens", "top_k") else value


def _biases(value: Any) -> dict[int, float]:
    require_type("logit_bias", value, dict, "an object of numbers by token id")
    require(all(key.isdecimal() for key in value), "logit_bias", list(value), "an object whose keys are token ids")
    return {int(key): bias for key, bias in value.items()}


def num_steps(body: Body) -> int | None:
    """Read the draft steps of a request's rounds, 0 for plain decoding; None: the server's."""
    value = body.get("speculative")
    if value is None:
        return None
    allowed = 'an object such as {"num_steps": 0}'
    require_type("speculative", value, dict, allowed)
    require(set(value) <= {"num_steps"}, "speculative", value, allowed)
    return value.get("num_steps")


def min_tokens(body: Body) -> int:
    """Read the number of tokens before which no stop token ends an output."""
    return count(body, "min_new_tokens" if "min_new_tokens" in body else "min_tokens", 0, 0, 2**31 - 1)


def refuse(body: Body, names: Collection[str]) -> None:
    """Refuse fields that would change the answer, where they ask for something."""
    for name in names:
        require(not body.get(name), name, body.get(name), "nothing on this server")


def flag(body: Body, name: str, default: bool = False) -> bool:
    """Read a boolean; null is the default."""
    value = body.get(name)
    require(value is None or isinstance(value, bool), name, value, "true or false")
    return default if value is None else value


def count(body: Body, name: str, default: int, least: int, most: int) -> int:
    """Read an integer; null is the default."""
    value = body.get(name)
    return default if value is None else require_int(name, value, least, most)


def json_grammar(service: Service, name: str, schema: Any) -> Grammar:
    """Make the grammar of JSON texts that are valid under a schema."""
    require_type(name, schema, dict, "a JSON schema, an object")
    return service.grammar("json_schema", json.dumps({**_SPACELESS, **schema}))


def text_grammar(service: Service, form: str, text: Any) -> Grammar | None:
    """Make the grammar that a text states as a regex or ebnf; None for null."""
    if text is None:
        return None
    require_type(form, text, str, "a text")
    return service.grammar(form, text)


def token_text(service: Service, token: int) -> str:
    """Decode one token."""
    return "" if service.tokenizer is None else service.tokenizer.decode([token])


def prompts_of(value: Any, name: str) -> Sequence[str | list[int]]:
    """Read one prompt or a list of them: texts, or lists of token ids."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(item) is int for item in value)):
        return [value]
    allowed = "a text or token ids, or a list of them"
    require(isinstance(value, list) and value, name, value if isinstance(value, list) else type(value), allowed)
    require(all(isinstance(item, (str, list)) for item in value), name, type(value), allowed)
    return value
