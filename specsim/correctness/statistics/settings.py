"""Settings of the tests: a tree for every verifier, and sampling parameters with a known distribution."""

from dataclasses import dataclass, field, replace
from typing import Any

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.kinds import TESTED
from specsim.core.verifiers import VERIFIER_KINDS

_CHAIN = SpecConfig(topk=1, num_steps=2, num_draft_tokens=3, page_size=4)
_TREE = SpecConfig(topk=2, num_steps=2, num_draft_tokens=5, page_size=4)
CONFIGS = {
    kind.name: replace(_CHAIN if kind.drafts == "sampled" else _TREE, verifier=kind.name)
    for kind in VERIFIER_KINDS
    if kind.is_lossless
}
# Other drafters than EAGLE heads, by the names of their tests. Token drafters leave nodes of their trees dead.
DRAFTERS = {
    f"{verifier}, {name}": (name, CONFIGS[verifier])
    for name, kind in TESTED.items()
    for verifier in kind.variant(name).sampling_tests
}


@dataclass(frozen=True, slots=True)
class SamplingSetting:
    """Sampling parameters with a name."""

    name: str
    params: dict[str, Any] = field(default_factory=dict)  # of SamplingParams, at temperature 1 unless given
    num_tokens: int = 24  # new tokens of a request
    prompts: tuple[tuple[int, ...], ...] = tuple((token, 5 * token % 16) for token in range(16))  # used in turn

    def sampling(self, seed: int) -> SamplingParams:
        """Make the sampling parameters of a request."""
        params: dict[str, Any] = {"temperature": 1.0} | self.params
        return SamplingParams(**params, max_new_tokens=self.num_tokens, seed=seed)


PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.4}
PLAIN = SamplingSetting("T 1")
# With penalties a distribution depends on the whole text: few tokens after one prompt make texts that recur.
SETTINGS = (
    SamplingSetting("T 0.7", {"temperature": 0.7}),
    PLAIN,
    SamplingSetting("T 1.5, top-k 6", {"temperature": 1.5, "top_k": 6}),
    SamplingSetting("T 1, top-p 0.8", {"top_p": 0.8}),
    SamplingSetting("T 1.5, min-p 0.2", {"temperature": 1.5, "min_p": 0.2}),
    SamplingSetting("T 1, penalties", PENALTIES, num_tokens=6, prompts=((3, 9),)),
)
DRAFTER_SETTINGS = (PLAIN, SETTINGS[2])  # of tests of other drafters
