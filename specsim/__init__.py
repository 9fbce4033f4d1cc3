"""specsim: understand, prove and plan speculative decoding."""

from importlib import import_module

_HOMES = {
    **dict.fromkeys(("SamplingParams", "ServingConfig", "SpecConfig"), "core.config"),
    **dict(Pair="core.pair", load="models.load"),
    **dict.fromkeys(("Generation", "Output", "generate", "load_engine"), "serving.generation"),
    **dict(EngineOptions="core.engine_options", InputError="core.errors"),
    **dict(Scheduler="serving.scheduler", make_request="serving.requests"),
}
__all__ = sorted(_HOMES)
__dir__ = __all__.copy


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that `import specsim` loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'specsim' has no attribute {name!r}")
    return getattr(import_module(f"specsim.{_HOMES[name]}"), name)
