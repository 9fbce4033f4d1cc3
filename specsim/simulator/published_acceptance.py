"""Default acceptance by depth and rank of plans and sweeps: published figures, with sources."""

from dataclasses import dataclass
from itertools import pairwise

from specsim.simulator.continuation import continued

DEPTH = 8  # depths of the shares; those beyond the published ones follow the smoothed rule of continuations
# Share of rounds in which the right token is among the 1, 2, ... best guesses of Medusa's first head, Vicuna-7B.
_AMONG_BEST = (0.56, 0.672, 0.727, 0.76, 0.78)
RANKS_SOURCE = "Medusa, arXiv 2401.10774"


@dataclass(frozen=True, slots=True)
class PublishedAcceptance:
    """Published unconditional rates of a chain's positions."""

    pair: str
    rates: tuple[float, ...]  # share of the rounds that accept at least 1, 2, ... drafts
    source: str

    @property
    def conditional(self) -> tuple[float, ...]:
        """Compute the probability of the best draft after d accepted ones, for each of DEPTH depths."""
        return tuple(rate / before for before, rate in pairwise((1.0, *continued(self.rates, DEPTH))))

    @property
    def shares(self) -> tuple[tuple[float, ...], ...]:
        """Compute the probability of acceptance by depth and rank.

        The second, third, ... best draft takes the share of the remaining probability that Medusa's second, third, ...
        guess takes. With these ranks a chain of 5 of accept length 3.0 becomes a tree of 25 drafts of 3.62, both as
        published for EAGLE and Llama-2-7B (https://github.com/SafeAILab/EAGLE/issues/132).
        """
        return tuple(ranks(best) for best in self.conditional)


_MT_BENCH = "vllm#32030, MT-Bench, T = 0"
_PUBLISHED = {
    ("eagle3", "llama-3.1-8b"): PublishedAcceptance("Llama-3.1-8B with EAGLE-3", (0.73, 0.52, 0.35), _MT_BENCH),
    ("eagle3", "qwen3-8b"): PublishedAcceptance("Qwen3-8B with EAGLE-3", (0.65, 0.40, 0.20), _MT_BENCH),
    ("eagle3", "gpt-oss-20b"): PublishedAcceptance("gpt-oss-20b with EAGLE-3", (0.72, 0.51, 0.32), _MT_BENCH),
    # Accept lengths 2.10, 2.29, 2.39 and 2.43 of 2 to 5 drafts; the first two drafts are assumed to be equal.
    ("eagle", "llama-3.1-8b"): PublishedAcceptance(
        "Llama-3.1-8B with EAGLE-1", (0.662, 0.438, 0.19, 0.10, 0.04), "vllm#20780"
    ),
    ("mtp", ""): PublishedAcceptance(
        "a target with MTP modules",
        (0.7617, 0.6158, 0.5125, 0.4243, 0.364, 0.3094, 0.2722, 0.2365),
        "vllm#48892, GSM8K, T = 0",
    ),
}
DEFAULT = _PUBLISHED["eagle3", "llama-3.1-8b"]


def published_acceptance(drafter: str, model: str) -> PublishedAcceptance:
    """Look up the figures of this pair, else those of the first pair with this drafter, else DEFAULT."""
    same_drafter = (each for (kind, _), each in _PUBLISHED.items() if kind == drafter)
    return _PUBLISHED.get((drafter, model)) or next(same_drafter, DEFAULT)


def ranks(best: float) -> tuple[float, ...]:
    """Split a probability into the shares of the best draft and those after it."""
    missed = [1 - among for among in _AMONG_BEST]
    left = [after / missed[0] * (1 - best) for after in missed]
    return (best, *(before - after for before, after in pairwise(left)))
