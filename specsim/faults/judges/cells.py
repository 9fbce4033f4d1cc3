"""The differential's cells, by settings that also say how requests end."""

from dataclasses import replace
from typing import Any

from specsim.config import SpecConfig
from specsim.differential import Cell
from specsim.differential.grids import cell_of

OWN = ("rounds", "stop_token_ids", "max_new_tokens", "prompt_lengths", "temperature", "draft_tokens")


def cell(setting: dict[str, Any]) -> Cell:
    """Axes of the grids, and: rounds; of every request stop_token_ids, max_new_tokens, temperature; prompt_lengths."""
    axes = {name: value for name, value in setting.items() if name not in OWN}
    case = cell_of(axes)
    sampling = case.sampling
    for name in ("stop_token_ids", "max_new_tokens", "temperature"):
        if name in setting:
            value = tuple(setting[name]) if name == "stop_token_ids" else setting[name]
            sampling = tuple(replace(each, **{name: value}) for each in sampling)
    prompts = case.prompts
    if "prompt_lengths" in setting:
        lengths = setting["prompt_lengths"]
        prompts = tuple(tuple((7 * i + 3 * i * i + 11 * b) % 48 for i in range(n)) for b, n in enumerate(lengths))
    return replace(case, sampling=sampling, prompts=prompts, rounds=setting.get("rounds", 2))


def config(setting: dict[str, Any]) -> SpecConfig:
    """The SpecConfig of a setting."""
    return cell(setting).config
