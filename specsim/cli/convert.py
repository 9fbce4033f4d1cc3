"""specsim convert: write a drafter's head in another layout."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from specsim.cli.option_fields import common
from specsim.cli.options import DraftFieldOptions
from specsim.core.errors import printable


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(DraftFieldOptions):
    """Options of specsim convert."""

    # Target's folder or hub id, for its config.json.
    target: Annotated[str, common("Model", values="FOLDER", file="reads")]
    # EAGLE-3, P-EAGLE, DFlash or DSpark head: a folder or a hub id.
    draft: Annotated[str, common("Model", values="FOLDER", file="reads")]
    # New folder for the head.
    to: Annotated[Path, common("Output", values="FOLDER", file="folder")]
    # Layout of its files.
    layout: Annotated[str, common("Output", values="eagle|z-lab|deepspec|speculators")]


def convert(options: ConvertOptions) -> None:
    """Write a head in another layout, and read it back.

    Tensors are copied bit for bit; the folder appears only if it reads back equal. Layout eagle is for EAGLE-3 and
    P-EAGLE, z-lab for DFlash, deepspec for DSpark, and speculators for all of them.

    Exit status: 0 when written, 2 for bad input.

    Example:
      specsim convert --target target --draft head --to new --layout speculators
    """
    from specsim.models.convert import convert as write

    done = write(options.target, options.draft, options.to, options.layout, options.draft_fields())
    folder = printable(str(done.folder))
    print(f"{folder}: {done.config.kind} head of {done.num_parameters:,} parameters in {done.num_tensors} tensors,")
    print(f"in the layout {done.layout}; read back equal, every tensor bit for bit")
