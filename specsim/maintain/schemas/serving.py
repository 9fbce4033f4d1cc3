"""Schemas of the outputs of generate and run."""

from specsim.core.config import ServingConfig
from specsim.core.metrics import Latency
from specsim.maintain.schemas.dataclass_fields import described
from specsim.maintain.schemas.document import (
    Schema,
    anything,
    array,
    choice,
    flag,
    nullable,
    number,
    record,
    table,
    text,
    whole,
)
from specsim.maintain.schemas.settings import (
    COMMAND,
    DATE,
    DEVICE,
    SYNTHETIC,
    VERSIONS,
    acceptance,
    config,
)
from specsim.serving.outputs import Output
from specsim.serving.serve import Audit
from specsim.serving.trace import Chunk, Preemption, Result, StepRecord

_IMPL = choice("Implementation that ran.", "reference", "fast")
_DTYPE = text("Data type of weights and KV.")
_PAIR = text("Name of the target and drafter.")
_ID = whole("A request's id.")
_TOKEN = whole("A token id.")
_TEXTS = {
    "text": text("Generated text, without a stop string."),
    "token_ids": array("Generated tokens: [T].", _TOKEN),
    "logprobs": array(
        "Log-probability of each generated token under penalties, bias and temperature, natural logarithm: [T].",
        nullable(number("A log-probability.")),
    ),
    "num_accepted_tokens_per_round": array(
        "Tokens that each round accepted, bonus token included; the last round may exceed the output: [rounds].",
        whole("1 to num_steps + 1."),
    ),
    "prompt_token_ids": array("Tokens of the prompt.", _TOKEN),
    "temperature": number("Sampling temperature; 0 is greedy."),
}
_SPEED = {
    "tokens": whole("New tokens of all requests."),
    "seconds": number("Wall-clock time without loading, in seconds."),
    "tokens_per_s": number("New tokens per second, over all requests."),
}


_BY_SETTING = "for each setting of the policy, in their order."
_ADAPTIVE = nullable(
    record(
        "Settings of a run whose policy switched them between rounds; null for one setting.",
        {
            "policy": anything("The policy as an object that --adaptive reads from a file: its settings and fields."),
            "rounds_by_setting": array(f"Rounds of requests, {_BY_SETTING}", whole("Rounds.")),
            "accepted_by_setting": array(f"Accepted tokens, bonus included, {_BY_SETTING}", whole("Tokens.")),
            "switches": whole("Rounds of the batch under another setting than the one before."),
            "rounds_by_steps": nullable(
                array("Rounds of requests by their own draft steps, from 0 on; null without any.", whole("Rounds."))
            ),
        },
    )
)


def generate() -> Schema:
    """Describe the output of generate."""
    output = described(
        Output, "One output.", leave_out=("side_outputs",), finish_reason=text("stop or length."), **_TEXTS
    )
    return record(
        "Output of specsim generate --json.",
        {
            "command": COMMAND,
            "date": DATE,
            "impl": _IMPL,
            "dtype": _DTYPE,
            "pair": _PAIR,
            "outputs": array("Outputs in the order of the prompts.", output),
            "metrics": record("Acceptance and speed over all outputs.", acceptance("")["properties"] | _SPEED),
            "config": config("Setting of speculation; with an adaptive policy the one of most steps."),
            "acceptance": SYNTHETIC,
            "adaptive": _ADAPTIVE,
        },
    )


_MADE = {
    "command": COMMAND,
    "file": text("File of the requests."),
    "date": DATE,
    "versions": VERSIONS,
    "pair": _PAIR,
    "impl": _IMPL,
    "dtype": _DTYPE,
    "kv_dtype": text("Number format of the target's KV: model or fp8_e4m3."),
    "draft_kv_dtype": text("Number format of the drafter's KV: model or fp8_e4m3."),
    "bucket": nullable(whole("Batch size that the fast implementation's buffers hold; null: not given.")),
    "batch_invariant": flag("Whether results do not depend on the batch."),
    "device": DEVICE,
    "graph": nullable(text("Part of a round that one CUDA graph covers; null for the reference.")),
}


def run() -> Schema:
    """Describe the output of run."""
    return record("Output of specsim run --json.", _MADE | _served())


def run_compare() -> Schema:
    """Describe the output of run --compare."""
    compared = {
        "mode": text("Name of the mode: schedule and prefix cache."),
        "num_compared": whole("Requests that were compared with their solo runs."),
        "num_equal": whole("Requests that equal their solo runs."),
        "within_rounding_error": array("Ids of requests that differ where a decision is within rounding error.", _ID),
        "differences": array("A sentence for each other request that differs.", text("A sentence.")),
    }
    return record(
        "Output of specsim run --compare --json.",
        _MADE
        | {
            "is_equal": flag("Whether no request differs beyond rounding error."),
            "is_replayed": flag("Whether solo runs repeat the drafts of each mode, which depend on other requests."),
            "num_solo": whole("Number of solo runs."),
            "modes": array(
                "Both schedules, without and with the prefix cache.", record("A mode.", compared | _served())
            ),
        },
    )


def _served() -> dict[str, Schema]:
    """Give the keys of one serving run."""
    return {
        "outputs": array("Outputs in the order of the requests.", _output()),
        "totals": _totals(),
        "audit": described(
            Audit,
            "Audits of the KV pool, one after every step and one at the end.",
            num_audits="Number of audits.",
            audited_slots="Slots accounted for, over all audits.",
            at_end="Slots by state after the last request; all are free.",
        ),
        "config": config("Setting of speculation; with an adaptive policy the one of most steps."),
        "acceptance": SYNTHETIC,
        "adaptive": _ADAPTIVE,
        "serving": described(
            ServingConfig,
            "Settings of the scheduler.",
            schedule="sync: a step's results are read before the next is planned; overlap: one step later.",
            max_running="Largest number of running requests.",
            num_slots="Size of the KV pool in tokens.",
            chunk_tokens="Largest number of prompt tokens in a step, over all requests; null: no limit.",
            prefix_cache="Whether KV of equal prefixes is reused.",
            preemption="Request that is preempted when the pool is full.",
        ),
        "skipped": array(
            "Lines of the file that are no requests.",
            record("A line.", {"line": whole("Its number."), "reason": text("What a request would have had there.")}),
        ),
        "trace": record(
            "Steps of the scheduler.",
            {
                "records": array("Steps in their order.", _step()),
                "acceptance": text("target, or the rule or schedule that decided the acceptance."),
            },
        ),
    }


def _output() -> Schema:
    return record(
        "One request and its output.",
        {
            "id": _ID,
            "arrival": whole("Step in which the request arrives."),
            "priority": whole("Priority; larger ones are admitted first."),
            "continues": nullable(whole("Id of the request whose conversation it continues.")),
            **{name: _TEXTS[name] for name in ("text", "token_ids", "logprobs")},
            "finish_reason": nullable(text("stop, length, abort or rejected.")),
            "stop_reason": {
                "type": ["string", "integer", "null"],
                "description": "Stop string or token id that ended the output.",
            },
            "error": nullable(text("Reason for a rejection.")),
            "num_accepted_tokens_per_round": _TEXTS["num_accepted_tokens_per_round"],
            "prompt_tokens": whole("Number of prompt tokens."),
            "prompt_token_ids": _TEXTS["prompt_token_ids"],
            "temperature": _TEXTS["temperature"],
            "num_reused": whole("Prompt tokens whose KV the prefix cache had."),
            "num_preemptions": whole("Number of preemptions."),
            "emissions": array(
                "Deliveries of tokens to the client.",
                array(
                    "Step, seconds since the start of the scheduler, and number of new tokens.",
                    number("One of the three."),
                    3,
                ),
            ),
            "latency": described(Latency, "Latency; null where the output is too short for it.", **_latency_texts()),
        },
    )


def _latency_texts() -> dict[str, Schema]:
    meanings = {
        "ttft": "Time from arrival to the first delivery",
        "tpot": "Time per output token after the first delivery",
        "itl": "Mean time between deliveries",
        "e2e": "Time from arrival to the last delivery",
    }
    return {
        f"{name}_{unit}": nullable(number(f"{meaning}, in {unit}."))
        for name, meaning in meanings.items()
        for unit in ("steps", "seconds")
    }


def _totals() -> Schema:
    counts = {
        "requests": whole("Number of requests."),
        "finish_reasons": table("Number of requests by finish reason.", whole("A number of requests.")),
        "steps": whole("Steps of the scheduler that did something."),
        "prefill_steps": whole("Steps with prefill."),
        "num_prefilled": whole("Prompt tokens prefilled, those of preempted requests again each time."),
        "num_reused": whole("Prompt tokens whose KV the prefix cache had."),
        "num_preemptions": whole("Number of preemptions."),
        "num_aborts": whole("Number of aborted requests."),
        "evicted_pages": whole("KV pages that the prefix cache evicted."),
    }
    return record("Totals over all requests.", counts | _SPEED | acceptance("")["properties"])


def _step() -> Schema:
    def ids(meaning: str) -> Schema:
        return array(f"Ids of requests {meaning} in this step.", _ID)

    chunk = described(
        Chunk, "A chunk of a prompt.", request_id=_ID, start="First position of the chunk.", end="Position after it."
    )
    result = described(
        Result,
        "A result.",
        request_id=_ID,
        launched="Step in which the round ran.",
        num_accepted_tokens="Tokens that the round accepted, bonus token included.",
        num_kept="Accepted tokens that the output keeps; fewer where the request ended inside the round.",
    )
    preemption = described(
        Preemption,
        "A preemption.",
        request_id=_ID,
        seq_len="Committed tokens.",
        in_page="Whether they end inside a KV page.",
        is_prefilling="Whether the prefill was incomplete.",
    )
    slots = {
        "free": "that are free, withheld ones included",
        "reserved": "that are held, but not committed",
        "committed": "with committed tokens",
        "cached": "that are committed and kept for the prefix cache",
        "withheld": "beyond the limit of the pool",
    }
    return described(
        StepRecord,
        "A step.",
        step="Number of the step.",
        seconds="Seconds from the start of the scheduler to the end of the step.",
        arrived=ids("that arrive"),
        admitted=ids("that are admitted"),
        resumed=ids("that are admitted again after a preemption"),
        decoded=ids("that run a round"),
        aborted=ids("that are aborted"),
        rejected=ids("that are rejected"),
        prefilled=array("Chunks of prompts that are prefilled.", chunk),
        reused=array(
            "Prompt tokens found in the prefix cache.", array("Request id and number of tokens.", whole("Either."), 2)
        ),
        results=array("Rounds whose results are read.", result),
        finished=array(
            "Requests that end.",
            array("Request id and finish reason.", {"type": ["integer", "string"], "description": "Either."}, 2),
        ),
        preempted=array("Requests that are preempted.", preemption),
        evicted_pages="KV pages that the prefix cache evicts.",
        **{f"{name}_slots": whole(f"KV slots {meaning}, at the end of the step.") for name, meaning in slots.items()},
    )
