"""Exploration on the front page: rounds of the shipped pair, recorded when the site is built."""

from pathlib import Path

from specsim.core.config import SamplingParams, SpecConfig
from specsim.explorer.explore import explore
from specsim.explorer.rounds import trace
from specsim.models.shipped import load_prompts

PAGE = "exploration.html"
PROMPTS = 2  # the first of the shipped ones


def write_exploration(folder: Path) -> Path:
    """Write the page of the shipped pair's rounds to a folder, the same at every build."""
    prompts = [prompt["text"] for prompt in load_prompts()[:PROMPTS]]
    config = SpecConfig(topk=4, num_steps=3, num_draft_tokens=8, page_size=4)
    rounds = trace("tiny", prompts, config, SamplingParams(max_new_tokens=32))
    path = folder / PAGE
    explore(rounds).write_html(path)
    return path
