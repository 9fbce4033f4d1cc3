"""specsim convert: write a drafter's head in another layout."""

from pathlib import Path
from typing import Annotated

from specsim.cli import options
from specsim.cli.file_options import reads, writes_folder
from specsim.cli.options import option
from specsim.core.errors import printable


def convert(
    target: Annotated[
        str, option("Model", "Target's folder or hub id, for its config.json.", metavar="FOLDER", callback=reads)
    ],
    draft: Annotated[
        str,
        option(
            "Model",
            "EAGLE-3, P-EAGLE, DFlash or DSpark head: a folder or a hub id.",
            metavar="FOLDER",
            callback=reads,
        ),
    ],
    to: Annotated[Path, option("Output", "New folder for the head.", metavar="FOLDER", callback=writes_folder)],
    layout: Annotated[str, option("Output", "Layout of its files.", metavar="eagle|z-lab|deepspec|speculators")],
    draft_field: options.DraftField = None,
) -> None:
    """Write a head in another layout, and read it back.

    Tensors are copied bit for bit; the folder appears only if it reads back equal. Layout eagle is for EAGLE-3 and
    P-EAGLE, z-lab for DFlash, deepspec for DSpark, and speculators for all of them.

    Exit status: 0 when written, 2 for bad input.

    Example:
      specsim convert --target target --draft head --to new --layout speculators
    """
    from specsim.models.convert import convert as write

    done = write(target, draft, to, layout, dict(map(options.draft_field, draft_field or ())))
    folder = printable(str(done.folder))
    print(f"{folder}: {done.config.kind} head of {done.num_parameters:,} parameters in {done.num_tensors} tensors,")
    print(f"in the layout {done.layout}; read back equal, every tensor bit for bit")
