"""Lengths of the requests that the suite serving sends: a small file drawn once from ShareGPT-like distributions."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specsim.core.errors import require
from specsim.simulator.uniforms import UniformStream, keys, named_uniforms
from specsim.simulator.workload import SimulatedWorkload, draw

FILE = Path(__file__).parent / "sharegpt_like.csv"
COUNT = 512
SEED = 24
PROMPTS = "lognormal:161:1.2"  # mean and coefficient of variation
OUTPUTS = "lognormal:84:0.9"
LONGEST = {"prompt_tokens": 1024, "output_tokens": 256}
HEADER = f"""\
# Lengths of {COUNT} requests like those of ShareGPT, seed {SEED}; written by specsim.bench.request_lengths.
# prompt_tokens: {PROMPTS}, at most {LONGEST["prompt_tokens"]}; the vLLM paper (arXiv 2309.06180) has this mean.
# output_tokens: {OUTPUTS}, at most {LONGEST["output_tokens"]}; a quarter of its 338, so that runs take seconds.
# lognormal:MEAN:CV is a lognormal distribution of this mean and this standard deviation over the mean.
prompt_tokens,output_tokens
"""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of each request's prompt and output."""

    prompt_tokens: np.ndarray  # int64 [R]
    output_tokens: np.ndarray  # int64 [R]

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def first(self, count: int) -> "Lengths":
        """Take the first requests."""
        require(0 < count <= len(self), "count", count, f"1 to {len(self)} requests")
        return Lengths(self.prompt_tokens[:count], self.output_tokens[:count])

    def closed_loop(self, concurrency: int) -> SimulatedWorkload:
        """Make the simulator's workload of clients that send the next request when one ends."""
        return SimulatedWorkload(self.prompt_tokens, self.output_tokens, concurrency=concurrency)


def drawn() -> Lengths:
    """Draw the lengths that the file holds."""
    texts = {"prompt_tokens": PROMPTS, "output_tokens": OUTPUTS}
    lengths = {}
    for index, (name, text) in enumerate(texts.items()):
        uniforms = named_uniforms(keys(SEED, UniformStream.LENGTH, np.arange(COUNT)), index)
        lengths[name] = np.clip(draw(name, text, uniforms), 4, LONGEST[name])
    return Lengths(**lengths)


def text_of(lengths: Lengths) -> str:
    """Write the file's text."""
    rows = zip(lengths.prompt_tokens.tolist(), lengths.output_tokens.tolist(), strict=True)
    return HEADER + "".join(f"{prompt},{output}\n" for prompt, output in rows)


def kept_lengths() -> Lengths:
    """Read the file."""
    lines = [line for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    rows = np.array([list(map(int, line.split(","))) for line in lines[1:]], dtype=np.int64)
    return Lengths(rows[:, 0], rows[:, 1])
