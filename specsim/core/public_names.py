"""The names that specsim exports, each with the module that defines it."""

HOMES = {
    **dict(course="course", plots="plots", simulator="simulator", training="training"),
    **dict(explore="explorer.explore", trace="explorer.rounds"),
    **dict.fromkeys(("SamplingParams", "ServingConfig", "SpecConfig"), "core.config"),
    **dict.fromkeys(("AcceptanceRule", "Accepted"), "core.rule"),
    **dict.fromkeys(("NgramConfig", "Proposal", "SuffixConfig", "TokenDrafter", "TreeLimits"), "core.token_drafter"),
    **dict(generate="serving.generation", load_engine="serving.generation"),
    **dict(Generation="serving.outputs", Output="serving.outputs"),
    **dict(Pair="core.pair", load="models.load", EngineOptions="core.engine_options", InputError="core.errors"),
    **dict(DraftVocabulary="models.draft_vocabulary", DraftWindow="models.draft_limits"),
    **dict(Scheduler="serving.scheduler", make_request="serving.requests"),
}
