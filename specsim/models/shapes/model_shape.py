"""Shape of a model, by name or from a config.json, whole or as one GPU's tensor-parallel slice."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from specsim.core.errors import InputError
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.fields import read_json
from specsim.models.checkpoint.model_config import model_config

_CONFIGS = Path(__file__).parent / "configs"
NAMES = tuple(sorted(path.stem for path in _CONFIGS.glob("*.json")))
_SLICE = re.compile(r"(.+)-tp([1-9][0-9]*)-slice")
_ALLOWED = f"{', '.join(NAMES)}, a config.json or a folder with one, each perhaps with the suffix -tpK-slice"


@dataclass(frozen=True, slots=True)
class Shape:
    """A target's shape, whole or one GPU's slice of it."""

    name: str
    config: ModelConfig  # without end tokens, which random weights do not learn
    tensor_parallel: int = 1  # number of GPUs that share the model


def shape(name_or_path: str | Path) -> Shape:
    """Find the shape of a name, of a config.json or of a folder with one.

    The suffix `-tpK-slice` gives one GPU's slice, as one of K GPUs computes it under tensor parallelism. Heads,
    intermediate size and vocabulary are divided by K, and so are KV heads, down to one (GPUs beyond their number hold
    copies). Layers and hidden size are those of the model. No collective is run or timed, and the tokens are those of a
    small model of that shape. The embedding is cut like the head, as a forward reads only its own rows. Raises
    InputError where K does not divide a size.
    """
    text = str(name_or_path)
    if whole := _whole(text):
        return whole
    sliced = _SLICE.fullmatch(text)
    if sliced and (whole := _whole(sliced[1])):
        return _slice(whole, int(sliced[2]), text)
    raise InputError("shape", text, _ALLOWED)


def _whole(text: str) -> Shape | None:
    """Find a shape that is not a slice, None where no such name or file exists."""
    path = _CONFIGS / f"{text}.json" if text in NAMES else Path(text).expanduser()
    try:
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file() and path.name != "config.json":
            return None
    except (OSError, ValueError):  # not a path: too long, or with a zero byte
        return None
    return Shape(text, replace(model_config(read_json(path)), eos_token_ids=()))


def _slice(whole: Shape, count: int, name: str) -> Shape:
    model = whole.config
    divided = {field: getattr(model, field) for field in ("num_heads", "intermediate_size", "vocab_size")}
    fewer, more = sorted((model.num_kv_heads, count))
    if any(size % count for size in divided.values()) or more % fewer:
        sizes = ", ".join(f"{field} {size}" for field, size in divided.items())
        allowed = f"tpK with a K that divides {sizes}, and divides num_kv_heads {model.num_kv_heads} or is a multiple"
        raise InputError("shape", name, allowed)
    sizes = {field: size // count for field, size in divided.items()}
    heads = {"num_heads": sizes["num_heads"], "num_kv_heads": max(1, model.num_kv_heads // count)}
    mlp = replace(model.mlp, size=sizes["intermediate_size"])
    layers = tuple(replace(layer, mlp=mlp) for layer in model.with_heads(**heads).layers)
    return Shape(name, replace(model, layers=layers, vocab_size=sizes["vocab_size"]), count)
