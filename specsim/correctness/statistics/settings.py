"""What is run: a tree for every verifier, and the sampling that each test has a law for."""

from dataclasses import dataclass, field

from specsim.core.config import SamplingParams, SpecConfig

CHAIN = {"topk": 1, "num_steps": 2, "num_draft_tokens": 3, "page_size": 4}
TREE = {"topk": 2, "num_steps": 2, "num_draft_tokens": 5, "page_size": 4}
CONFIGS = {
    "target_only": SpecConfig(**TREE),
    "rejection": SpecConfig(**CHAIN, verifier="rejection"),
    "block": SpecConfig(**CHAIN, verifier="block"),
    "multi_round": SpecConfig(**TREE, verifier="multi_round"),
    "gumbel": SpecConfig(**CHAIN, verifier="gumbel"),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Sampling by name. num_tokens: new tokens of a request. prompts: which of them requests start from, in turn."""

    name: str
    params: dict[str, float] = field(default_factory=dict)
    num_tokens: int = 24
    prompts: tuple[tuple[int, ...], ...] = tuple((token, 5 * token % 16) for token in range(16))

    def sampling(self, seed: int) -> SamplingParams:
        """Of a request."""
        return SamplingParams(**({"temperature": 1.0} | self.params), max_new_tokens=self.num_tokens, seed=seed)


PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.4}
PLAIN = Setting("T 1")
# With penalties a law is that of a whole text; few tokens after one prompt make texts that are met again.
SETTINGS = (
    Setting("T 0.7", {"temperature": 0.7}),
    PLAIN,
    Setting("T 1.5, top-k 6", {"temperature": 1.5, "top_k": 6}),
    Setting("T 1, top-p 0.8", {"top_p": 0.8}),
    Setting("T 1.5, min-p 0.2", {"temperature": 1.5, "min_p": 0.2}),
    Setting("T 1, penalties", PENALTIES, num_tokens=6, prompts=((3, 9),)),
)
