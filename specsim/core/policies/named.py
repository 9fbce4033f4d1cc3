"""Policies by name or from a JSON value, with the settings that they choose among."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specsim.core.arguments import check_arguments
from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require, require_choice
from specsim.core.files import read_json
from specsim.core.policies.by_batch_size import BatchTable, OffSwitch
from specsim.core.policies.fields import CHOICE, COST, FIELDS, NEEDED, PER_REQUEST, RULE_FIELDS, TABLE, TREE
from specsim.core.policies.goodput import CostTable, Goodput, RoundCost
from specsim.core.policies.moving_average import AverageRule, MovingAverage
from specsim.core.policies.per_request import RequestAverages, RequestGoodput, RequestScript
from specsim.core.policies.policy import AnyPolicy, Policy, RequestPolicy, Scripted, number_of
from specsim.core.policies.throughput import Throughput
from specsim.core.settings import Settings
from specsim.core.verifiers import DEFAULT_VERIFIER

LONGEST = 200  # characters of a schema's message, which quotes the value


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy's name, its settings, and the fields that make a fresh one."""

    name: str
    settings: Settings
    parameters: Mapping[str, Any]  # as in JSON, without the settings

    @property
    def is_per_request(self) -> bool:
        """Check whether the policy chooses the steps of every request."""
        return bool(self.parameters.get(PER_REQUEST))

    def make(self, cost: RoundCost | None = None) -> AnyPolicy:
        """Make a policy that has observed nothing.

        cost: of rounds, for `goodput` without numbers of its own.
        """
        makers = REQUEST_MAKERS if self.is_per_request else MAKERS
        parameters = {name: value for name, value in self.parameters.items() if name != PER_REQUEST}
        if self.name != "goodput":
            return makers[self.name](self.settings.configs, parameters)
        if "seconds" in parameters:
            cost = _table(self.settings.configs, parameters)
        if cost is None:
            raise InputError("adaptive", self.name, f"a JSON file with the policy's {' and '.join(COST)}")
        others = {name: value for name, value in parameters.items() if name not in COST}
        if self.is_per_request:
            return RequestGoodput(cost, self.settings.configs, **others)
        require("row_seconds" not in others, "row_seconds", others.get("row_seconds"), f"given with {PER_REQUEST} only")
        return Goodput(cost, self.settings.configs, **others)

    def to_json(self) -> dict[str, Any]:
        """Convert to a JSON value of the policy and its settings, which named_policy reads."""
        trees = [{name: getattr(config, name) for name in TREE} for config in self.settings]
        return {"policy": self.name, "settings": trees, **self.parameters}


@check_arguments
def named_policy(value: str | Mapping[str, Any], config: SpecConfig, cost: RoundCost | None = None) -> NamedPolicy:
    """Read a policy from its name or from an object with its fields.

    config: the setting of most steps, from which the others are made. An object has `policy`, the
    fields of that policy, and `steps` (the numbers of steps to choose among) or `settings` (objects with topk,
    num_steps and num_draft_tokens). It may also be the file of an engine: SGLang's --speculative-adaptive-config, or
    vLLM's --speculative-config with a table. `per_request`: whether moving-average, goodput or scripted choose steps
    for every request, not for the batch. cost: as for NamedPolicy.make, which checks the values.
    """
    parameters: dict[str, Any] = {"policy": value} if isinstance(value, str) else dict(value)
    if "policy" not in parameters:
        parameters = _of_engine(parameters)
    name = parameters.pop("policy")
    require_choice("adaptive", name, tuple(FIELDS))
    _check(name, parameters)
    steps = parameters.pop("steps", None)
    trees = parameters.pop("settings", None)
    require(steps is None or trees is None, "steps", steps, "nothing beside settings, which have their own")
    if trees is None:
        settings = Settings.of_steps(config, steps or _named_steps(name, parameters) or default_steps(config.num_steps))
    else:
        settings = Settings(tuple(_tree(config, tree) for tree in trees))
    most = max(setting.num_steps for setting in settings)
    require(most <= config.num_steps, "num_steps", config.num_steps, f"at least {most}, the most steps of the policy")
    policy = NamedPolicy(name, settings, parameters)
    policy.make(cost)
    return policy


def policy_value(text: str, per_request: bool = False) -> str | dict[str, Any]:
    """Read a policy's name, or the object in a JSON file of that path.

    per_request: the policy chooses the steps of every request, whether its object says so or not.
    """
    value = _policy_value(text)
    if not per_request:
        return value
    return {**({"policy": value} if isinstance(value, str) else value), PER_REQUEST: True}


def _policy_value(text: str) -> str | dict[str, Any]:
    if text in FIELDS:
        return text
    allowed = f"{', '.join(FIELDS)}, or a JSON file with an object"
    require(text.endswith(".json"), "adaptive", text, allowed)
    value = read_json(Path(text), "adaptive", allowed)
    require(isinstance(value, dict), "adaptive", text, allowed)
    return value


def default_steps(most: int) -> tuple[int, ...]:
    """List the numbers of steps to choose among by default: none, 1, 3, 7, ... and the most."""
    return tuple(sorted({most, *(2**power - 1 for power in range((most + 1).bit_length()))}))


def _of_engine(parameters: dict[str, Any]) -> dict[str, Any]:
    """Convert an engine's file."""
    if TABLE in parameters:
        return {"policy": "table", **{name: parameters[name] for name in (TABLE, PER_REQUEST) if name in parameters}}
    rules = {key: entry for key, entry in parameters.items() if key.isdecimal()}
    require(rules, "adaptive", ", ".join(parameters), "an object with `policy`, or an engine's file of a schedule")
    strategy = parameters.get("strategy", "ema")
    allowed = "ema, the moving average, or no such key, which SGLang 0.5.23 has not any more"
    require(strategy == "ema", "strategy", strategy, allowed)
    others = {key: entry for key, entry in parameters.items() if key not in rules and key != "strategy"}
    return {"policy": "moving-average", "rules": rules, **others}


def _check(name: str, parameters: Mapping[str, Any]) -> None:
    """Check the fields of a policy's object by their JSON schemas."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    needed = COST if name == "goodput" and set(COST) & set(parameters) else NEEDED.get(name, ())
    if missing := [field for field in needed if field not in parameters]:
        raise InputError("adaptive", name, f"a JSON file with the policy's {' and '.join(missing)}")
    types = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)  # 1.0 is none
    schema = {"type": "object", "properties": {**FIELDS[name], **CHOICE}, "additionalProperties": False}
    validator = extend(Draft202012Validator, type_checker=types)(schema)
    error = next(iter(sorted(validator.iter_errors(parameters), key=str)), None)
    if error is not None:
        raise InputError("adaptive", error.json_path, f"the fields of policy {name}: {error.message[:LONGEST]}")


def _named_steps(name: str, parameters: Mapping[str, Any]) -> list[int]:
    """Find the numbers of steps that a policy's fields name."""
    if name == "table":
        return sorted({entry[2] for entry in parameters[TABLE]})
    if name == "moving-average":
        return sorted({steps for rule in parameters.get("rules", {}).values() for steps in rule["candidate_steps"]})
    if name == "goodput":
        return sorted(map(int, parameters.get("seconds", ())))
    script = parameters.get("script", ())
    return sorted({entry if isinstance(entry, int) else entry[0] for entry in script})


def _tree(config: SpecConfig, tree: Mapping[str, Any]) -> SpecConfig:
    changes: dict[str, Any] = {"topk": 1, "num_draft_tokens": None} | dict(tree)
    if changes["num_steps"] == 0 and config.has_draft_prob:
        changes["verifier"] = DEFAULT_VERIFIER
    return replace(config, **changes)


def _rules(settings: Sequence[SpecConfig], parameters: Mapping[str, Any]) -> Mapping[int, AverageRule]:
    common = {name: parameters[name] for name in RULE_FIELDS if name in parameters}
    all_steps = {"1": {"candidate_steps": [config.num_steps for config in settings]}}
    rules = {int(low): common | rule for low, rule in parameters.get("rules", all_steps).items()}
    return {
        low: AverageRule(**rule | {"candidate_steps": tuple(rule["candidate_steps"])}) for low, rule in rules.items()
    }


def _average(settings: Sequence[SpecConfig], parameters: Mapping[str, Any]) -> Policy:
    return MovingAverage(settings, _rules(settings, parameters), parameters.get("first"))


def _request_averages(settings: Sequence[SpecConfig], parameters: Mapping[str, Any]) -> RequestPolicy:
    return RequestAverages(settings, _rules(settings, parameters), parameters.get("first"))


def _table(settings: Sequence[SpecConfig], parameters: Mapping[str, Any]) -> CostTable:
    """Make the cost table of a policy's fields, which has seconds for every setting."""
    cost = CostTable(parameters["batch_sizes"], {int(steps): values for steps, values in parameters["seconds"].items()})
    for config in settings:
        cost.round(np.empty(0), config)
    return cost


def _scripted(settings: Sequence[SpecConfig], parameters: Mapping[str, Any]) -> Policy:
    script = parameters["script"]
    allowed = f"numbers of steps; pairs are for {PER_REQUEST}"
    require(all(isinstance(entry, int) for entry in script), "script", script, allowed)
    return Scripted([number_of(settings, steps) for steps in script])


def _off_switch(settings: Sequence[SpecConfig], parameters: Mapping[str, Any]) -> Policy:
    most = max(config.num_steps for config in settings)
    return OffSwitch(parameters["limit"], number_of(settings, most), number_of(settings, 0))


MAKERS: Mapping[str, Callable[[Sequence[SpecConfig], Mapping[str, Any]], Policy]] = {
    "moving-average": _average,
    "table": lambda settings, parameters: BatchTable(settings, parameters[TABLE]),
    "throughput": lambda settings, parameters: Throughput(settings, **parameters),
    "off-switch": _off_switch,
    "scripted": _scripted,
}
REQUEST_MAKERS: Mapping[str, Callable[[Sequence[SpecConfig], Mapping[str, Any]], RequestPolicy]] = {
    "moving-average": _request_averages,
    "scripted": lambda settings, parameters: RequestScript(settings, parameters["script"]),
}
