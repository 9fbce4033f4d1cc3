"""specsim: understand, prove and plan speculative decoding. A name is imported when first used: no torch until then."""

from importlib import import_module

__version__ = "0.1.0"
_HOMES = {
    **dict(plots="plots", simulator="simulator", trace="explorer.rounds", Accepted="core.rule"),
    **dict.fromkeys(("SamplingParams", "ServingConfig", "SpecConfig"), "core.config"),
    **dict.fromkeys(("Generation", "Output", "generate", "load_engine"), "serving.generation"),
    **dict(Pair="core.pair", load="models.load", EngineOptions="core.engine_options", InputError="core.errors"),
    **dict(Scheduler="serving.scheduler", make_request="serving.requests", AcceptanceRule="core.rule"),
}
__all__ = sorted(_HOMES.keys() - {"plots", "simulator"})  # what a star imports: plots needs matplotlib
__dir__ = __all__.copy


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'specsim' has no attribute {name!r}")
    return getattr(home := import_module(f"specsim.{_HOMES[name]}"), name, home)
