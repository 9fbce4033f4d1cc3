"""Recorded rounds of every drafter and verifier, by name, for the tests of the explorer."""

from functools import cache

import specsim
from specsim import AcceptanceRule, Accepted, EngineOptions, NgramConfig, SamplingParams, SpecConfig, SuffixConfig
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.core.verifiers import KIND_OF, VERIFIERS
from specsim.models.synthetic_pair import synthetic_pair

TREE = SpecConfig(topk=3, num_steps=3, num_draft_tokens=7, page_size=4)
CHAIN = SpecConfig(topk=1, num_steps=3, page_size=4)
PROMPTS = [[5, 17, 3, 40, 5, 17], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
WEIGHTS = ("eagle", "eagle3", "eagle3.1", "p-eagle", "mtp", "standalone", "frozen-kv", "dflash", "dspark")
LOOKUPS = {"ngram": NgramConfig(), "suffix": SuffixConfig(shared=False)}
ALWAYS = AcceptanceRule("root only", "best", lambda tree, p, q, uniforms, final: Accepted([0], 1), lossless=False)


def setting(verifier: str) -> SpecConfig:
    """Give a setting with the drafts that a verifier needs."""
    if KIND_OF[verifier].has_lanes:
        return SpecConfig(topk=2, num_steps=2, verifier=verifier, page_size=4)
    tree = dict(topk=3, num_steps=3, num_draft_tokens=7, page_size=4)
    chain = dict(topk=1, num_steps=3, page_size=4)
    return SpecConfig(**(tree if verifier in ("target_only", "typical") else chain), verifier=verifier)


GREEDY = SamplingParams(max_new_tokens=10)
SAMPLED = SamplingParams(max_new_tokens=10, temperature=0.9)
# By name: (drafter, setting, sampling, more arguments of trace)
KINDS = {
    **{kind: (kind, TREE, GREEDY, {}) for kind in WEIGHTS},
    **{f"{kind} chain": (kind, CHAIN, GREEDY, {}) for kind in ("eagle3", "mtp", "standalone")},
    **{kind: ("eagle3", TREE, GREEDY, {"drafter": drafter}) for kind, drafter in LOOKUPS.items()},
    "ngram chain": ("eagle3", CHAIN, GREEDY, {"drafter": LOOKUPS["ngram"]}),
    "no drafter": ("eagle3", SpecConfig.plain(page_size=4), GREEDY, {}),
    **{verifier: ("eagle3", setting(verifier), SAMPLED, {}) for verifier in VERIFIERS},
    "mtp rejection": ("mtp", setting("rejection"), SAMPLED, {}),
    "dspark rejection": ("dspark", setting("rejection"), SAMPLED, {}),
    "rule": ("eagle3", TREE, SAMPLED, {"verifier": ALWAYS}),
    "schedule": ("eagle3", TREE, GREEDY, {"acceptance": SyntheticAcceptance((0.9, 0.5, 0.2))}),
    "logprob": ("eagle3", SpecConfig(topk=3, num_steps=3, num_draft_tokens=7, score="logprob"), GREEDY, {}),
    "release round": ("eagle3", SpecConfig(topk=2, num_steps=2, page_size=4, release="round"), GREEDY, {}),
    "ragged extend": ("eagle3", SpecConfig(topk=2, num_steps=2, page_size=1, extend="ragged"), GREEDY, {}),
}
FAST = ("eagle3", "mtp", "ngram", "ngram chain", "rejection", "no drafter")


@cache
def recorded(name: str, impl: str = "reference"):
    """Record two requests of a kind."""
    kind, config, sampling, more = KINDS[name]
    sampling = SamplingParams(max_new_tokens=6, temperature=sampling.temperature) if impl == "fast" else sampling
    pair = synthetic_pair(kind)
    return specsim.trace(pair, PROMPTS, config, sampling, request_ids=[7, 4], engine=EngineOptions(impl), **more)
