"""Run SGLang's server test kits against `specsim serve`: python -m tests.engines.kits_cases PYTHON [--keep].

PYTHON is the interpreter of the engines' environment. Prints the table of notebooks/guide/engines.md; --keep writes it
there. Exit status 1 where a test ends otherwise than listed here.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from specsim.maintain.page import GUIDE, Column, filled, rewrite, table
from specsim.models.shipped import TINY

SPECSIM = Path(sys.executable).with_name("specsim")
PAGE = GUIDE / "engines.md"
REGION = "SGLang's server test kits"
CHAIN = ("--num-steps", "5", "--topk", "1", "--num-draft-tokens", "6")  # the kits' own EAGLE-3 settings
UNFINISHED = "An output of the tiny model was unfinished."


@dataclass(frozen=True, slots=True)
class Kit:
    """A kit of tests. A test that is not named here passes."""

    module: str
    kit: str
    left_out: dict[str, str] = field(default_factory=dict)  # tests that do not apply, and why
    failing: dict[str, str] = field(default_factory=dict)  # tests that fail, and why
    attributes: dict[str, Any] = field(default_factory=dict)  # settings that a kit leaves to its user
    options: tuple[str, ...] = CHAIN  # of the server


KITS = (
    Kit("basic_api_contract_kit", "BasicAPIContractMixin"),
    Kit("spec_server_kits", "SpecCorrectnessKit"),
    Kit("spec_server_kits", "SpecParityKit"),
    Kit("spec_server_kits", "SpecLogprobKit"),
    Kit("spec_server_kits", "SpecPenaltyKit"),
    Kit(
        "spec_server_kits",
        "SpecFeatureKit",
        {"test_radix_attention": "Its prompts have ids up to 31,999."},
        {"test_constrained_decoding": UNFINISHED},
    ),
    Kit(
        "spec_server_kits",
        "SpecGrammarKit",
        {},
        dict.fromkeys(
            (
                "test_grammar_logprob_count_matches_completion_tokens",
                "test_grammar_structured_output_no_trailing_tokens",
            ),
            UNFINISHED,
        ),
    ),
    Kit(
        "streaming_session_kit",
        "StreamingSessionKitMixin",
        {"test_stress_concurrent_sessions": "Its sessions exceed the tiny model's 2,048 tokens."},
    ),
    Kit("abort_timeout_kit", "AbortAllMixin"),
    Kit("abort_timeout_kit", "RunningTimeoutTwoWaveMixin", options=(*CHAIN, "--request-timeout", "5")),
    Kit("abort_timeout_kit", "WaitingTimeoutMixin", options=(*CHAIN, "--max-running", "1", "--queue-timeout", "1")),
    Kit(
        "pause_generation_kit",
        "PauseResumeInPlaceMixin",
        attributes={"pause_max_new_tokens": 128},
        options=(*CHAIN, "--max-running", "32"),
    ),
    Kit(
        "matched_stop_kit",
        "MatchedStopMixin",
        {"test_finish_stop_eos": "It names the ending tokens of Llama."},
        {"test_finish_stop_regex_str": "The tiny model's answer to the chat has neither `and` nor `or`."},
    ),
    Kit("regex_constrained_kit", "RegexConstrainedMixin", {}, {"test_regex_generate_complex_json": UNFINISHED}),
    Kit("json_constrained_kit", "JSONConstrainedMixin"),
    Kit(
        "json_mode_kit",
        "JSONModeMixin",
        {},
        {"test_json_mode_response": UNFINISHED, "test_json_mode_with_streaming": UNFINISHED},
    ),
    Kit(
        "ebnf_constrained_kit",
        "EBNFConstrainedMixin",
        {},
        {"test_ebnf_generate_complex_json": 'Its grammar allows `{"age": 1}`, which the test does not expect.'},
    ),
)
# Kits whose tests do not apply to a tiny pair, and their needs.
OTHERS = {
    "SpecAccuracyKit, eval_accuracy, lm_eval, reasoning, unified_radix_cache": "a model that knows mathematics, "
    "or a vocabulary of 30,000",
    "BasicDecodeCorrectnessMixin, BasicSchedulerStressMixin": "a model that knows capitals; context of 8,000 tokens",
    "SpecPerfKit, spec_decoding, perf_bench, fwd_occupancy": "speeds of a GPU",
    "SpecHiddenStatesKit, SpecSamplingMaskKit": "hidden states and sampling masks, which answers do not have",
    "AbortLeakReproKitMixin": "a context limited to 512 tokens",
    "anthropic_messages, mmmu_vlm, vlm_perf, cache_hit, dsa_metadata, pd_parity, prefix_cache_branching": "other APIs, "
    "images, LoRA, other attention, or several servers",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The tests of a kit that ran, each with its status and error."""

    kit: Kit
    results: dict[str, dict[str, str]]

    @property
    def failed(self) -> dict[str, str]:
        """Errors by test."""
        return {test: result["why"] for test, result in self.results.items() if result["status"] == "failed"}

    @property
    def notes(self) -> str:
        """Reasons of the tests that did not pass."""
        failed = [f"`{test}` failed: {self.kit.failing.get(test, why)}" for test, why in self.failed.items()]
        left_out = [f"`{test}` does not apply: {why}" for test, why in self.kit.left_out.items()]
        return " ".join([*failed, *left_out, *(f"`{name}` is {value}." for name, value in self.kit.attributes.items())])


def run(python: Path, kits: Sequence[Kit] = KITS) -> tuple[str, list[Outcome]]:
    """Run kits, each with a server of its own; returns SGLang's version too."""
    script = Path(__file__).with_name("kits_run.py")
    with tempfile.TemporaryDirectory() as name:
        jobs, results = Path(name, "jobs.json"), Path(name, "results.json")
        jobs.write_text(json.dumps([asdict(kit) for kit in kits]))
        done = subprocess.run(
            [python, script, SPECSIM, TINY / "target", jobs, results],
            env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=subprocess.DEVNULL, check=False, cwd=name,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{python} {script} ended with {done.returncode}")
        answer = json.loads(results.read_text())
    return answer["sglang"], [Outcome(kit, answer["results"][kit.kit]) for kit in kits]


COLUMNS = [
    Column("kit", lambda outcome: outcome.kit.kit),
    Column("tests", lambda outcome: len(outcome.results)),
    Column("passed", lambda outcome: len(outcome.results) - len(outcome.failed)),
    Column("the others", lambda outcome: outcome.notes),
]


def print_region(name: str, lines: Sequence[str], is_kept: bool) -> None:
    """Print lines, and write them into a region of the page if they are kept."""
    text = "\n".join(lines)
    print(text)
    if is_kept:
        rewrite([PAGE], lambda page: filled(page, lambda region: text if region == name else None))


def main() -> None:
    """Run the kits, and print or keep the table."""
    python, *keep = sys.argv[1:]
    version, outcomes = run(Path(python).absolute())
    text = [
        f"SGLang {version}, {date.today()}: `make engines-table`. The shipped EAGLE-3 pair on a CPU, with 5 draft",
        "steps in a chain.",
        "",
        *table(COLUMNS, outcomes),
        "",
        "These kits do not apply. They need:",
        "",
        *(f"- {names}: {reason}." for names, reason in OTHERS.items()),
    ]
    print_region(REGION, text, bool(keep))
    sys.exit(any(set(outcome.failed) != set(outcome.kit.failing) for outcome in outcomes))


if __name__ == "__main__":
    main()
