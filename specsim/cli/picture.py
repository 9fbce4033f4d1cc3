"""Pictures as PNG files of commands."""

from typing import Any

from specsim.core.errors import InputError


def png(name: str, shown: Any) -> bytes:
    """Draw with the function of this name in specsim.plots; InputError without matplotlib."""
    try:
        from specsim import plots
    except ImportError as error:
        raise InputError("plot", "a picture", f"none without matplotlib ({error})") from error
    return getattr(plots, name)(shown)._repr_png_()
