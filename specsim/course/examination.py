"""Examination of the package with an injected fault: its outputs from outside, and its phases from inside.

Each fault is injected into a copy of the package, and a process imports the copy; see `forks`.

request.json in the folder of a copy: {"prompt_ids": …, "config": …, "settings": {name: setting}}.
result.json there: {"output": …, "accept_length": …, "differences": …}.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.errors import require
from specsim.correctness.differential.result import Divergence
from specsim.correctness.explain.answers import Answer
from specsim.correctness.faults.fault import FaultFinding, changed, copied_package, environment, require_copy
from specsim.models.load import load
from specsim.models.shipped import TINY

JOBS = 2  # processes at a time
NEW_TOKENS = 8


@dataclass(frozen=True, slots=True)
class PhaseDifferences:
    """Differences between the reference and a fast implementation with a fault, in one setting."""

    first: Divergence | None  # first field of a state or pool that is wrong, None where all are equal
    inside: tuple[FaultFinding, ...]  # wrong fields, the first cause first, forwards of the drafter included


@dataclass(frozen=True, slots=True)
class Examination:
    """Results of one copy of the package."""

    text: str  # of the fast implementation
    answer: Answer  # the same output by token ids, with log probabilities
    accept_length: float
    differences: Mapping[str, PhaseDifferences]  # by the setting's name


def examine(
    names: Sequence[str | None], prompt: str, config: SpecConfig, settings: Mapping[str, Mapping[str, Any]]
) -> list[Examination]:
    """Examine the package with each of these faults, on the CPU; None stands for the package as it is.

    The shipped pair continues the prompt greedily. settings: of the differential, as in the catalogue.
    InputError for the name of no fault.
    """
    from tokenizers import Tokenizer  # transformers is slow to import, and not needed here

    from specsim.correctness.faults.catalogue import FAULTS

    faults_by_name = {fault.name: fault for fault in FAULTS}
    for name in names:
        require(name is None or name in faults_by_name, "names", name, ", ".join(faults_by_name))
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    prompt_ids = tokenizer.encode(prompt).ids
    request = {"prompt_ids": prompt_ids, "config": asdict(config)}
    request |= {"settings": {name: dict(setting) for name, setting in settings.items()}}
    texts = [changed(faults_by_name[name].edits) if name else {} for name in names]
    with ExitStack() as stack:
        roots = [stack.enter_context(copied_package(text)) for text in texts]
        _run(roots, request)
        return [_read(root, partial(tokenizer.decode, skip_special_tokens=False)) for root in roots]


def _run(roots: Sequence[Path], request: Mapping[str, Any]) -> None:
    """Answer the request in every folder, by a process that imports the copy there."""
    for root in roots:
        (root / "request.json").write_text(json.dumps(request), encoding="utf-8")
    script = Path(__file__).with_name("forks.py")
    done = subprocess.run(
        [sys.executable, str(script), str(JOBS), *map(str, roots)],
        env=environment(roots[0], "cpu"), cwd=roots[0], capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"a copy of the package ended with exit status {done.returncode}: {done.stderr[-500:]}")


def _read(root: Path, decode: Callable[[Sequence[int]], str]) -> Examination:
    result = json.loads((root / "result.json").read_text(encoding="utf-8"))
    output = result["output"]
    answer = Answer.of(
        list(zip(output["token_ids"], output["logprobs"], strict=True)), prompt=output["prompt_token_ids"]
    )
    differences = {
        name: PhaseDifferences(
            difference["first"] and Divergence(**difference["first"]),
            tuple(FaultFinding(**fields) for fields in difference["inside"]),
        )
        for name, difference in result["differences"].items()
    }
    return Examination(decode(output["token_ids"]), answer, result["accept_length"], differences)


def _outside(request: Mapping[str, Any]) -> dict[str, Any]:
    """Generate with the fast implementation."""
    from specsim.core.engine_options import EngineOptions
    from specsim.serving.generation import generate

    sampling = SamplingParams(max_new_tokens=NEW_TOKENS)
    engine = EngineOptions("fast", device="cpu", graph="eager")
    pair = replace(load(), tokenizer=None)
    generation = generate(pair, [request["prompt_ids"]], SpecConfig(**request["config"]), sampling, engine=engine)
    return {"output": asdict(generation.outputs[0]), "accept_length": generation.acceptance.accept_length}


def _inside(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the fast implementation with the reference, inside of the drafter too."""
    from specsim.correctness.faults.checks.differential import compared

    findings, divergences = compared(dict(setting), "cpu")
    return {"first": asdict(divergences[0]) if divergences else None, "inside": list(map(asdict, findings))}


def main(root: Path) -> None:
    """Read the request of a folder, examine the package, which must be imported from there, and write the result."""
    import torch

    torch.set_num_threads(1)
    request = json.loads((root / "request.json").read_text(encoding="utf-8"))
    result = _outside(request)
    result["differences"] = {name: _inside(setting) for name, setting in request["settings"].items()}
    require_copy(root)
    (root / "result.json").write_text(json.dumps(result), encoding="utf-8")
