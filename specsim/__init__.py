"""specsim: understand, prove and plan speculative decoding."""

from importlib import import_module

_HOMES = {
    "config": ("InputError", "SamplingParams", "SpecConfig"),
    "checkpoint": ("Pair", "load"),
    "generation": ("Generation", "Output", "generate"),
}
__all__ = ["Generation", "InputError", "Output", "Pair", "SamplingParams", "SpecConfig", "generate", "load"]


def __getattr__(name: str):
    """Import what is asked for, when it is asked for: `import specsim` alone loads no torch."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"specsim.{home}"), name)
    raise AttributeError(f"module 'specsim' has no attribute {name!r}")
