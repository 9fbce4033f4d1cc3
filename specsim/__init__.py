"""specsim: understand, prove and plan speculative decoding. A name is imported when first used: no torch until then."""

from importlib import import_module

from specsim.core.public_names import HOMES

__version__ = "0.1.0"
__all__ = sorted(name for name, home in HOMES.items() if name != home)  # pyright: ignore[reportUnsupportedDunderAll] - __init__.pyi lists them; no folder, as plots needs matplotlib
__dir__ = __all__.copy


def __getattr__(name: str) -> object:
    if name not in HOMES:
        raise AttributeError(f"module 'specsim' has no attribute {name!r}")
    return getattr(home := import_module(f"specsim.{HOMES[name]}"), name, home)
