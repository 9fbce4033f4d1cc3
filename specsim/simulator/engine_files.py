"""Files that engines read for a schedule of chains by batch size, each checked against its documented schema.

The schemas of engine_schemas name the documentation and the version that they were read from.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require
from specsim.core.kinds import KINDS, SERVED
from specsim.core.policies.fields import TREE
from specsim.core.policies.named import default_steps, named_policy
from specsim.core.settings import Settings
from specsim.simulator.plan import SettingPlan
from specsim.simulator.schedule import Range, SteadyBatch

_SCHEMAS = Path(__file__).parent / "engine_schemas"
_DECODING_TYPES = {name: kind.tensorrt_llm for name, kind in SERVED.items() if kind.tensorrt_llm}


def sglang_file(ranges: Sequence[Range], drafter: str, draft: str) -> dict[str, Any]:
    """Make SGLang's adaptive config: one candidate per range, so that its average of accepted drafts changes nothing.

    A key is the lowest batch size of its range.
    """
    _check_ranges(ranges, drafter)
    value = {str(entry.low): {"candidate_steps": [entry.config.num_steps]} for entry in ranges}
    return check("sglang", value)


def vllm_file(ranges: Sequence[Range], drafter: str, draft: str) -> dict[str, Any]:
    """Make vLLM's speculative config, whose entries are [lowest batch size, highest, draft tokens]."""
    most = _check_ranges(ranges, drafter)
    value: dict[str, Any] = {"method": drafter, "num_speculative_tokens": most}
    if not KINDS[drafter].in_target:
        value["model"] = draft
    entries = [[entry.low, entry.high, entry.config.num_steps] for entry in ranges]
    return check("vllm", value | {"num_speculative_tokens_per_batch_size": entries})


def tensorrt_llm_file(ranges: Sequence[Range], drafter: str, draft: str) -> dict[str, Any]:
    """Make TensorRT-LLM's options, whose keys are the highest batch sizes of ranges.

    The smallest batches have to have the most drafts: further ranges get no more than these. Plain decoding at the end
    follows from the lack of a key, and plain decoding for the smallest batches cannot be said.
    """
    _check_ranges(ranges, drafter)
    most = ranges[0].config.num_steps
    allowed = "a schedule that drafts at batch size 1: TensorRT-LLM takes the most drafts there"
    require(most, "tensorrt_llm_file", "plain decoding at batch size 1", allowed)
    schedule = {entry.high: min(entry.config.num_steps, most) for entry in ranges}
    while not schedule[last := max(schedule)]:
        del schedule[last]
    settings: dict[str, Any] = {"decoding_type": _DECODING_TYPES[drafter], "max_draft_len": most}
    settings |= {"num_nextn_predict_layers": most} if KINDS[drafter].in_target else {"speculative_model": draft}
    return check("tensorrt_llm", {"speculative_config": settings | {"draft_len_schedule": schedule}})


FILES: Mapping[str, Callable[[Sequence[Range], str, str], dict[str, Any]]] = {
    "sglang": sglang_file,
    "vllm": vllm_file,
    "tensorrt_llm": tensorrt_llm_file,
}


def _check_ranges(ranges: Sequence[Range], drafter: str) -> int:
    """Check the drafter, that ranges are of chains and that one of them drafts; returns the most drafts."""
    allowed = f"{', '.join(_DECODING_TYPES)}: engines document schedules by batch size for no other drafter"
    require(drafter in _DECODING_TYPES, "drafter", drafter, allowed)
    for entry in ranges:
        require(entry.config.topk == 1, "topk", entry.config.topk, "1: engines' schedules are of chains")
    most = max(entry.config.num_steps for entry in ranges)
    allowed = "a load where drafts pay at some batch size: plain decoding is best at all of them, leave drafting off"
    require(most, "num_steps", 0, allowed)
    return most


def check(engine: str, value: dict[str, Any]) -> dict[str, Any]:
    """Return a file's value if it is as the engine's documentation says, or raise InputError."""
    from jsonschema import Draft202012Validator

    read = json.loads(json.dumps(value))  # keys as a file has them
    error = next(iter(sorted(Draft202012Validator(schema(engine)).iter_errors(read), key=str)), None)
    if error is not None:
        raise InputError(f"{engine}_file", error.json_path, f"the documented schema of {engine}: {error.message}")
    problem = {"vllm": _vllm_problem, "tensorrt_llm": _tensorrt_llm_problem}.get(engine, lambda _: None)(value)
    if problem is not None:
        raise InputError(f"{engine}_file", "schedule", problem)
    return value


@cache
def schema(engine: str) -> dict[str, Any]:
    """Read the documented schema of an engine's file."""
    return json.loads((_SCHEMAS / f"{engine}.json").read_text(encoding="utf-8"))


def _vllm_problem(value: Mapping[str, Any]) -> str | None:
    """Find the rule between entries that a schedule breaks."""
    entries = value["num_speculative_tokens_per_batch_size"]
    if entries[0][0] != 1:
        return "a first entry that starts at batch size 1"
    if any(low > high for low, high, _ in entries):
        return "entries whose lowest batch size is at most the highest"
    if any(after[0] <= before[1] for before, after in pairwise(entries)):
        return "entries in order that do not overlap"
    if any(drafts > value["num_speculative_tokens"] for _, _, drafts in entries):
        return "at most num_speculative_tokens drafts in every entry"
    return None


def _tensorrt_llm_problem(value: Mapping[str, Any]) -> str | None:
    settings = value["speculative_config"]
    schedule = {int(size): drafts for size, drafts in settings["draft_len_schedule"].items()}
    if schedule[min(schedule)] != settings["max_draft_len"]:
        return "max_draft_len drafts at the lowest key"
    if max(schedule.values()) > settings["max_draft_len"]:
        return "at most max_draft_len drafts at every key"
    return None


def text(value: Mapping[str, Any], path: Path) -> str:
    """Write a file's text: YAML for .yaml and .yml, else JSON with a line for each key."""
    if path.suffix.lower() in (".yaml", ".yml"):
        return "".join(_yaml(value, ""))
    lines = [f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _yaml(value: Mapping[Any, Any], indent: str) -> list[str]:
    """Write an object line by line; a value that is no object is JSON, which YAML includes."""
    lines = []
    for key, item in value.items():
        name = json.dumps(key) if isinstance(key, str) and not key.isidentifier() else key
        if isinstance(item, Mapping):
            lines += [f"{indent}{name}:\n", *_yaml(item, indent + "  ")]
        else:
            lines.append(f"{indent}{name}: {json.dumps(item)}\n")
    return lines


DIGITS = 4  # of the seconds, which no cost model knows better


def goodput_file(plan: SettingPlan) -> dict[str, Any]:
    """Make the goodput policy of a plan's server, for requests in the middle of their mean output.

    Its settings are the best tree, or a chain where that or plain decoding is best, with several numbers of steps.
    """
    config = deepest(plan)
    settings = Settings.of_steps(config, default_steps(config.num_steps))
    option = plan.cell.option(config)
    scenario = plan.cell.serving(option)
    steady = SteadyBatch.of(scenario)
    context = steady.prompt_tokens + steady.output_tokens // 2
    most = steady.most_requests(option)
    sizes = sorted({*(2**power for power in range(most.bit_length())), most})
    cost = scenario.cost(option)  # with the drafter, whatever the setting
    seconds = {
        str(setting.num_steps): [float(f"{cost.round(np.full(size, context), setting):.{DIGITS}g}") for size in sizes]
        for setting in settings
    }
    trees = [{name: getattr(setting, name) for name in TREE} for setting in settings]
    value = {"policy": "goodput", "settings": trees, "batch_sizes": sizes, "seconds": seconds}
    named_policy(value, config)  # which checks it
    return value


def deepest(plan: SettingPlan) -> SpecConfig:
    """Choose the setting of most steps as wide and as large as the best one; chains have any size."""
    drafting = [config.config for config in plan.candidates if not config.config.is_plain]
    chains = [config for config in drafting if config.topk == 1]
    best = plan.best.config
    if best.topk == 1 and chains:
        return max(chains, key=lambda config: config.num_steps)
    same = [
        config for config in drafting if (config.topk, config.num_draft_tokens) == (best.topk, best.num_draft_tokens)
    ]
    require(same, "num_steps", 0, "a plan with settings that draft")
    return max(same, key=lambda config: config.num_steps)
