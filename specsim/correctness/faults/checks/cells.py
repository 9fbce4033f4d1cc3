"""Cells of the differential from settings that also name how requests end."""

from dataclasses import replace
from typing import Any

from specsim.correctness.differential import Cell
from specsim.correctness.differential.setting import cell_of

OWN = ("rounds", "stop_token_ids", "max_new_tokens", "temperature", "verifier")


def cell(setting: dict[str, Any]) -> Cell:
    """Make the cell of a setting.

    The setting has axes of the grids, rounds, the verifier (with the width that it needs), and of every request
    stop_token_ids, max_new_tokens and temperature.
    """
    axes = {name: value for name, value in setting.items() if name not in OWN}
    case = cell_of(axes)
    sampling = case.sampling
    for name in ("stop_token_ids", "max_new_tokens", "temperature"):
        if name in setting:
            value = tuple(setting[name]) if name == "stop_token_ids" else setting[name]
            sampling = tuple(replace(params, **{name: value}) for params in sampling)
    config = case.config
    if verifier := setting.get("verifier"):
        width = 1 + config.topk * config.num_steps
        config = replace(config, verifier=verifier, num_draft_tokens=width)
    return replace(case, sampling=sampling, config=config, rounds=setting.get("rounds", 2))
