"""The file of the goodput policy: settings to choose among, and seconds of their rounds by batch size."""

from typing import Any

import numpy as np

from specsim.core.config import SpecConfig
from specsim.core.errors import require
from specsim.core.policies.fields import TREE
from specsim.core.policies.named import default_steps, named_policy
from specsim.core.settings import Settings
from specsim.simulator.plan import Plan
from specsim.simulator.steady import SteadyBatch

DIGITS = 4  # of the seconds, which no cost model knows better


def goodput_file(found: Plan) -> dict[str, Any]:
    """Make the goodput policy of a plan's server, for requests in the middle of their mean output.

    Its settings are the best tree, or a chain where that or plain decoding is best, with several numbers of steps.
    """
    config = deepest(found)
    settings = Settings.of_steps(config, default_steps(config.num_steps))
    option = found.cell.option(config)
    scenario = found.cell.serving(option)
    steady = SteadyBatch.of(scenario)
    context = steady.prompt_tokens + steady.output_tokens // 2
    most = steady.most_requests(option)
    sizes = sorted({*(2**power for power in range(most.bit_length())), most})
    cost = scenario.cost(option)  # with the drafter, whatever the setting
    seconds = {
        str(each.num_steps): [float(f"{cost.round(np.full(size, context), each):.{DIGITS}g}") for size in sizes]
        for each in settings
    }
    trees = [{name: getattr(each, name) for name in TREE} for each in settings]
    value = {"policy": "goodput", "settings": trees, "batch_sizes": sizes, "seconds": seconds}
    named_policy(value, config)  # which checks it
    return value


def deepest(found: Plan) -> SpecConfig:
    """Choose the setting of most steps as wide and as large as the best one; chains have any size."""
    drafting = [each.config for each in found.candidates if not each.config.is_plain]
    chains = [each for each in drafting if each.topk == 1]
    best = found.best.config
    if best.topk == 1 and chains:
        return max(chains, key=lambda each: each.num_steps)
    same = [each for each in drafting if (each.topk, each.num_draft_tokens) == (best.topk, best.num_draft_tokens)]
    require(same, "num_steps", 0, "a plan with settings that draft")
    return max(same, key=lambda each: each.num_steps)
