"""The option that chooses a calibrated server for simulate, plan and sweep."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from specsim.cli.file_options import reads
from specsim.cli.options import option

if TYPE_CHECKING:
    from specsim.simulator.cell import Cell

Profile = Annotated[
    str | None,
    option(
        "Hardware",
        "Calibrated server: a shipped profile (specsim-fast, vllm-2025-dense, vllm-2026-dense, vllm-2026-experts, "
        "sglang-2026-experts, transformers-dense) or a file that calibrate wrote.",
        metavar="NAME|FILE",
        callback=reads,
        show_default="vllm-2026-dense; -experts for models with experts",
    ),
]


def profile_name(given: Mapping[str, Any]) -> str:
    """Name the profile of these options: the one that was given, or the default for the model."""
    from specsim.simulator.calibration.profile import default_name, profile
    from specsim.simulator.model import model

    name = given["profile"] or default_name(model(given["model"]))
    profile(name)
    return name


def sentence(cell: "Cell") -> str:
    """Say which profile a cell's simulated figures rest on."""
    from specsim.simulator.calibration.profile import profile

    name = cell.profile
    if name is None:
        return "Parameters are uncalibrated."
    made_of = profile(name).provenance
    return f"Parameters of profile {name}, fitted to {made_of['model']} on {made_of['hardware']}."
