"""Pictures as PNG files of commands."""

from pathlib import Path
from typing import Any

from specsim.core.errors import InputError


def check_png(path: Path | None) -> None:
    """Raise InputError for a file whose name is that of another kind of picture, or of none, and without matplotlib."""
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise InputError("plot", str(path), "a file whose name ends in .png")
    try:
        from specsim import plots  # noqa: F401 - to see that it can be imported
    except ImportError as error:
        raise InputError(
            "plot", "a picture", f"nothing without matplotlib; install it: pip install 'specsim[notebooks]' ({error})"
        ) from error


def png(name: str, shown: Any) -> bytes:
    """Draw with the function of this name in specsim.plots."""
    from specsim import plots

    drawn, _ = getattr(plots, name)(shown)._repr_png_()
    return drawn
