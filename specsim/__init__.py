"""specsim: understand, prove and plan speculative decoding."""

from importlib import import_module

_HOMES = {
    **dict.fromkeys(("InputError", "SamplingParams", "ServingConfig", "SpecConfig"), "specsim.config"),
    **dict.fromkeys(("Pair", "load"), "specsim.checkpoint"),
    **dict.fromkeys(("Generation", "Output", "generate", "load_engine"), "specsim.generation"),
    "make_request": "specsim.requests",
    "Scheduler": "specsim.scheduler",
}
__all__ = sorted(_HOMES)
__dir__ = __all__.copy


def __getattr__(name: str):
    """Import what is asked for when it is asked for: `import specsim` alone loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'specsim' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
