"""Compare shipped drafters in a real vLLM with this package: python tests/engines/vllm_cases.py PYTHON [--keep].

PYTHON is the interpreter of an environment with tests/engines/requirements.txt. Prints the table of
notebooks/guide/engines.md; --keep writes it there. Greedy decoding is compared by integers: token ids, rounds that
drafted, and accepted drafts by position. Exit status 1 where a case ends otherwise than listed here.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from specsim import NgramConfig, Pair, SamplingParams, SpecConfig, generate
from specsim.maintain.page import GUIDE, Column, filled, rewrite, table
from specsim.models.convert import convert
from specsim.models.load import load_shipped
from specsim.models.shipped import TINY, load_prompts

NUM_PROMPTS, NUM_STEPS, NUM_TOKENS = 16, 3, 48
PAGE = GUIDE / "engines.md"
REGION = "vLLM on a CPU"
Status = Literal["equal", "differs", "refused"]


@dataclass(frozen=True, slots=True)
class Case:
    """A shipped drafter in the engine."""

    drafter: str
    layout: str | None  # of `specsim convert`, None for the shipped folder or no folder at all
    method: dict[str, Any] | None  # of vLLM's speculative_config; None: the head's folder is the engine's model
    status: Status = "equal"
    note: str = ""

    @property
    def name(self) -> str:
        """Name the drafter and its folder."""
        folder = (
            f"layout {self.layout}" if self.layout else "shipped" if (TINY / self.drafter).is_dir() else "no weights"
        )
        return f"{self.drafter}, {folder}{', as the model' if self.method is None else ''}"

    def engine(self, folder: Path) -> dict[str, Any]:
        """Make the arguments of vllm.LLM. folder: for converted heads."""
        head = folder / f"{self.drafter}-{self.layout}" if self.layout else TINY / self.drafter
        if self.layout and not head.exists():
            convert(TINY / "target", TINY / self.drafter, head, self.layout)
        if self.method is None:
            return {"model": str(head), "tokenizer": str(TINY / "target")}
        weights = {"model": str(head)} if head.is_dir() else {}
        return {
            "model": str(TINY / "target"),
            "speculative_config": {"num_speculative_tokens": NUM_STEPS, **weights, **self.method},
        }


EAGLE3 = {"method": "eagle3"}
PARALLEL = {"method": "eagle3", "parallel_drafting": True}
KEY_NORM = "The engine's CPU backend drafts as if layer 0's key norm served the context keys of all layers."
CASES = (
    Case("eagle3", None, EAGLE3),
    Case("eagle3", "eagle", EAGLE3),
    Case("eagle3", "speculators", EAGLE3),
    Case("eagle3", "speculators", None),
    Case("p-eagle", None, PARALLEL),
    Case("p-eagle", "speculators", PARALLEL),
    Case("standalone", None, {"method": "draft_model"}),
    Case("ngram", None, {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}),
    Case("dflash", None, {"method": "dflash"}, "differs", KEY_NORM),
    Case("dflash", "speculators", {"method": "dflash"}, "differs", KEY_NORM),
    Case("dspark", None, {"method": "dspark"}, "refused", "The CPU backend's model runner has no DSpark."),
    Case("eagle", None, {"method": "eagle"}, "refused", "It reads neither this architecture name nor `fc.bias`."),
    Case("mtp", None, {"method": "mtp"}, "refused", "It has no MTP modules of Llama layers."),
    Case("suffix", None, {"method": "suffix"}, "refused", "It needs a package of its own, arctic-inference."),
)


class Counts(NamedTuple):
    """Decisions of a run."""

    token_ids: tuple[tuple[int, ...], ...]  # of each prompt
    num_rounds: int  # that drafted, as vLLM counts
    accepted: tuple[int, ...]  # rounds that accepted draft 1, 2, ...

    def __str__(self) -> str:
        return f"{self.num_rounds}: {', '.join(map(str, self.accepted))}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case, and both sides' counts."""

    case: Case
    ours: Counts
    theirs: Counts | str  # or the error

    @property
    def status(self) -> Status:
        """End of the engine's run."""
        return "refused" if isinstance(self.theirs, str) else "equal" if self.ours == self.theirs else "differs"


@cache
def prompts() -> list[list[int]]:
    """Read the held-out prompts as token ids."""
    tokenizer = load_shipped("eagle3").tokenizer
    return [tokenizer.encode(prompt["text"]) for prompt in load_prompts()[:NUM_PROMPTS]]


def _pair(drafter: str) -> Pair:
    pair = load_shipped(drafter)
    return pair.with_drafter(NgramConfig(max_ngram=3)) if drafter == "ngram" else pair


@cache
def reference(drafter: str) -> Counts:
    """Generate with the reference."""
    config = SpecConfig(topk=1, num_steps=NUM_STEPS, num_draft_tokens=NUM_STEPS + 1)
    outputs = generate(
        _pair(drafter), prompts(), config, SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    ).outputs
    counts = [
        count
        for output in outputs
        for count, depth in zip(
            output.num_accepted_tokens_per_round,
            output.proposed_depth_per_round or [NUM_STEPS] * len(output.num_accepted_tokens_per_round),
            strict=True,
        )
        if depth
    ]
    accepted = tuple(sum(count > draft for count in counts) for draft in range(1, NUM_STEPS + 1))
    return Counts(tuple(output.token_ids for output in outputs), len(counts), accepted)


def run(python: Path, cases: Sequence[Case] = CASES) -> tuple[str, list[Outcome]]:
    """Run all cases in one process of the engine; returns its version too."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engines = {case.name: case.engine(folder) for case in cases}
        jobs = {"prompts": prompts(), "max_new_tokens": NUM_TOKENS, "engines": engines}
        (folder / "jobs.json").write_text(json.dumps(jobs))
        script = Path(__file__).with_name("vllm_run.py")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))}
        done = subprocess.run(
            [python, script, folder / "jobs.json", folder / "results.json"],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{python} {script} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        answer = json.loads((folder / "results.json").read_text())
    results = answer["results"]
    return answer["vllm"], [Outcome(case, reference(case.drafter), _counts(results[case.name])) for case in cases]


def _counts(result: dict[str, Any]) -> Counts | str:
    if "error" in result:
        return result["error"]
    counters = result["counters"]
    tokens = tuple(tuple(ids) for ids in result["token_ids"])
    return Counts(tokens, counters["num_drafts"], tuple(counters["num_accepted_tokens_per_pos"]))


COLUMNS = [
    Column("drafter", lambda outcome: outcome.case.name),
    Column("specsim: rounds, accepted by position", lambda outcome: str(outcome.ours)),
    Column("vLLM", lambda outcome: "" if outcome.status == "refused" else str(outcome.theirs)),
    Column("result", lambda outcome: f"{outcome.status}. {outcome.case.note}".removesuffix(". ")),
]


def show(version: str, outcomes: Sequence[Outcome]) -> str:
    """Write the table, and what made it."""
    return "\n".join(
        [
            f"vLLM {version} on a CPU in float32, {date.today()}: `make engines-table`. {NUM_PROMPTS} prompts,",
            f"{NUM_TOKENS} tokens each, {NUM_STEPS} drafts a round, greedy. Equal: every token and every count.",
            "",
            *table(COLUMNS, outcomes),
        ]
    )


def main() -> None:
    """Run the cases, and print or keep the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", type=Path, help="interpreter of the engine's environment")
    parser.add_argument("--keep", action="store_true", help="write the table into the guide")
    options = parser.parse_args()
    version, outcomes = run(options.python)
    text = show(version, outcomes)
    print(text)
    if options.keep:
        rewrite([PAGE], lambda page: filled(page, lambda region: text if region == REGION else None))
    sys.exit(any(outcome.status != outcome.case.status for outcome in outcomes))


if __name__ == "__main__":
    main()
