"""specsim convert: write a drafter's head in another layout, or a copy of a target."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from specsim.cli.option_fields import common, refuse_changes
from specsim.cli.options import DraftFieldOptions
from specsim.core.errors import printable, require


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(DraftFieldOptions):
    """Options of specsim convert."""

    # Target: a folder, a hub id, or tiny, the shipped one. Of a head's target only config.json is read.
    target: Annotated[str, common("Model", values="FOLDER", file="reads")]
    # EAGLE-3, P-EAGLE, DFlash or DSpark head: a folder or a hub id. Without it the target itself is written.
    draft: Annotated[str | None, common("Model", values="FOLDER", default="none", file="reads")] = None
    # New folder for the head or the target.
    to: Annotated[Path, common("Output", values="FOLDER", file="folder")]
    # Layout of a head's files.
    layout: Annotated[
        str | None, common("Output", values="eagle|z-lab|deepspec|speculators", default="needed with --draft")
    ] = None


def convert(options: ConvertOptions) -> None:
    """Write a head in another layout, and read it back.

    Tensors are copied bit for bit; the folder appears only if it reads back equal. Layout eagle is for EAGLE-3 and
    P-EAGLE, z-lab for DFlash, deepspec for DSpark, and speculators for all of them. Without --draft it writes the
    target, weights and tokenizer, as transformers and engines read it.

    Exit status: 0 when written, 2 for bad input.

    Examples:
      specsim convert --target target --draft head --to new --layout speculators
      specsim convert --target tiny --to target
    """
    from specsim.models.convert import convert as write
    from specsim.models.convert import copy_target

    if options.draft is None:
        refuse_changes(options, ("layout", "draft_field"), "without --draft")
        copy_target(options.target, options.to)
        print(f"{printable(str(options.to))}: the target, for transformers and engines")
        return
    require(options.layout, "layout", options.layout, "a layout with --draft: eagle, z-lab, deepspec or speculators")
    assert options.layout is not None
    done = write(options.target, options.draft, options.to, options.layout, options.draft_fields())
    folder = printable(str(done.folder))
    print(f"{folder}: {done.config.kind} head of {done.num_parameters:,} parameters in {done.num_tensors} tensors,")
    print(f"in the layout {done.layout}; read back equal, every tensor bit for bit")
