"""specsim: understand, prove and plan speculative decoding."""

from importlib import import_module

_HOMES = {
    **dict.fromkeys(("SamplingParams", "ServingConfig", "SpecConfig"), "specsim.core.config"),
    "InputError": "specsim.core.errors",
    **dict.fromkeys(("Pair", "load"), "specsim.models.checkpoint"),
    **dict.fromkeys(("Generation", "Output", "generate", "load_engine"), "specsim.serving.generation"),
    "make_request": "specsim.serving.requests",
    "Scheduler": "specsim.serving.scheduler",
}
__all__ = sorted(_HOMES)
__dir__ = __all__.copy


def __getattr__(name: str):
    """Import a public name when it is first used, so that `import specsim` loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'specsim' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
