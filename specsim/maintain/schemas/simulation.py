"""Schemas of the outputs of commands that simulate: simulate, plan, sweep, lint-report."""

from typing import Any

from specsim.maintain.schemas.dataclass_fields import described
from specsim.maintain.schemas.document import (
    Schema,
    anything,
    array,
    nullable,
    number,
    record,
    table,
    text,
    whole,
)
from specsim.maintain.schemas.settings import config
from specsim.simulator.cell import Cell
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.lint import Finding
from specsim.simulator.measurement import METRICS
from specsim.simulator.plan import BatchChoice, Candidate
from specsim.simulator.reproduce.reproduction import Figure, Fitted, Target
from specsim.simulator.schedule import Range
from specsim.simulator.show import Took
from specsim.simulator.slo import ATTAINMENT, GOODPUT, HighestRate

_METRIC_TEXTS = {
    "Throughput": "Tokens or requests per second, over the whole run.",
    "TTFT": "Time to first token, in milliseconds.",
    "TPOT": "Time per output token after the first, in milliseconds.",
    "ITL": "Inter-token latency: time between deliveries, in milliseconds.",
    "E2E": "Time from arrival to the last token, in milliseconds.",
    "Accept Length": "Mean tokens per round, bonus token included.",
    "Accept Rate": "Accepted drafts over proposed drafts, in percent.",
}
_METRICS = {
    name: nullable(number(next(meaning for word, meaning in _METRIC_TEXTS.items() if word in name))) for name in METRICS
}
_LENGTH = {
    "type": ["integer", "array", "string"],
    "description": "",
    "items": whole("Least or most."),
    "minItems": 2,
    "maxItems": 2,
}
_LENGTHS = "length in tokens, the least and the most, or lognormal:MEAN:CV."
_CELL_TEXTS: dict[str, Any] = {
    "model": "Name of the model, or its config.json.",
    "hardware": "Name of the GPU, or the file that describes it.",
    "tensor_parallel": "GPUs that share the model.",
    "drafter": "Drafter architecture.",
    "draft_vocab": "Vocabulary of an eagle3 drafter, in tokens.",
    "topk": "Draft tokens kept at each step; 1 is a chain.",
    "num_steps": "Draft steps; 0 is plain decoding.",
    "num_draft_tokens": "Nodes of the tree that the target verifies, root included; null: num_steps + 1.",
    "page_size": "Tokens in a KV page.",
    "shares": array(
        "Probability of acceptance by depth and rank: [depths, ranks].",
        array("Probabilities at one depth.", number("A probability.")),
    ),
    "requests": "Number of requests.",
    "concurrency": "Clients in a closed loop, unless there is a rate.",
    "rate": "Arrivals per second; null: clients in a closed loop, or the times of the trace.",
    "trace": "File of requests; null: random ones.",
    "tokenizer": "Tokenizer for the texts of the trace; null: characters_per_token.",
    "characters_per_token": "Characters of a token in the texts of the trace, without a tokenizer.",
    "prefix_cache": "Whether turns of a conversation find the KV of the turns before them.",
    "burstiness": "Shape of the gamma distribution of the gaps between arrivals; 1 is Poisson.",
    "swing": "Amplitude of the rate over a period, relative to its mean.",
    "period": "Period of the swing, in seconds.",
    "prompt_tokens": _LENGTH | {"description": f"Prompt {_LENGTHS}"},
    "output_tokens": _LENGTH | {"description": f"Output {_LENGTHS}"},
    "schedule": "sync: a step's results are read before the next is planned; overlap: one step later.",
    "plain_schedule": "Schedule of plain decoding; null: the same.",
    "prefill": "Place of prompts: mixed, beside or first.",
    "chunk_tokens": "Largest number of prompt tokens in a step; null: no limit.",
    "max_running": "Largest number of running requests.",
    "memory_share": "Fraction of GPU memory for weights and KV.",
    "kv_cache_dtype": "Numbers in the KV cache; auto: as the checkpoint says.",
    "kept": "Parameters of efficiency that keep their defaults whatever the profile says.",
    "profile": "Profile of the parameters: a shipped name or a file; null: uncalibrated.",
    "seed": "Seed of all random draws.",
}


def _efficiency() -> Schema:
    return described(
        Efficiency,
        "Parameters of the cost model.",
        bandwidth="Fraction of the peak bandwidth that long reads reach.",
        compute="Fraction of the peak compute that large products reach.",
        overlap="Fraction of the shorter of reading and computing that hides behind the longer.",
        experts="Speed of the products of experts over that of other products.",
        mxfp4_experts="Speed of the products of experts in mxfp4 over that of other products.",
        gap="Seconds between two kernels of a CUDA graph.",
        launch="Seconds in which the host launches a kernel without a graph.",
        host="Seconds of the host per step.",
        host_request="Seconds of the host per request of a step.",
        host_drafts="Seconds of the host per round with drafts, in addition to host.",
        draft_step="Seconds of a forward of the drafter in addition to its kernels.",
        collective="Seconds that an exchange between GPUs waits.",
        filters="Seconds per step in which the device applies top-k and top-p.",
    )


def simulate() -> Schema:
    """Describe the output of simulate."""
    seconds = {"seconds": number("Simulated time of the run, in seconds.")}
    ratio = record(
        "A ratio, drafts over no drafts.",
        {
            "value": number("The ratio."),
            "lowest": number("Lower end of the ratio's 90 % band."),
            "highest": number("Upper end of the ratio's 90 % band."),
        },
    )
    return record(
        "Output of specsim simulate --json.",
        {
            "model": text("Name of the model."),
            "hardware": text("Name of the GPU."),
            "tensor_parallel": whole("GPUs that share the model."),
            "config": config("Setting of speculation."),
            "efficiency": _efficiency(),
            "calibration": text("Origin of the parameters, in words."),
            "simulation_took": table(
                "Time of the simulation itself by run.",
                described(Took, "A time.", seconds="Wall-clock seconds.", core_seconds="Seconds of a CPU core."),
            ),
            "runs": table(
                "Metrics by run: no drafts and, with a drafter, drafts.", record("A run.", _METRICS | seconds)
            ),
            "ratios": table("Ratios by metric; empty without a drafter.", ratio),
            "profile": nullable(text("Profile whose parameters are used; null: uncalibrated.")),
            "adaptive": nullable(
                record(
                    "Settings that a policy chose among; null for one setting.",
                    {
                        "policy": anything("The policy as an object that --adaptive reads from a file."),
                        "rounds_by_setting": array("Rounds of requests under each setting.", whole("Rounds.")),
                    },
                )
            ),
        },
    )


def simulate_table() -> Schema:
    """Describe the output of simulate --table."""
    figure = described(
        Figure,
        "A published figure and the simulated one.",
        setting="Setting of the figure.",
        quantity="Name and unit of the figure.",
        published="Published value.",
        simulated="Simulated value.",
        role="fitted: the fit saw it; held out: it did not; computed: nothing was fitted.",
        digits="Published decimal places.",
    )
    figure["properties"]["error"] = number("Simulated over published, minus 1.")
    figure["required"].append("error")
    parameter = described(
        Fitted,
        "A fitted parameter.",
        name="Name of the parameter.",
        value="Fitted value, in the unit.",
        low="Lower end of the 95 % interval, or of the fit's bounds.",
        high="Upper end of the 95 % interval, or of the fit's bounds.",
        unit="Unit; empty for a ratio.",
    )
    target = described(
        Target,
        "An accuracy to reach.",
        name="The accuracy, in words.",
        value="Value, and the least or most allowed.",
        is_reached="Whether it is reached.",
    )
    return record(
        "Output of specsim simulate --table NAME --json.",
        {
            "table": text("Name of the table."),
            "source": text("Publication of the table."),
            "method": text("Method of the reproduction."),
            "figures": array("Figures side by side.", figure),
            "parameters": array("Fitted parameters.", parameter),
            "targets": array("Targets.", target),
            "notes": array("Conclusions.", text("A note.")),
        },
    )


def plan() -> Schema:
    """Describe the output of plan."""
    metrics = record("Simulated metrics.", _METRICS)
    means = record("Simulated metrics, means over the replicates; the last two with objectives.", _METRICS)
    means["properties"] |= {
        GOODPUT: number("Requests per second within all objectives."),
        ATTAINMENT: number("Requests within all objectives, in percent."),
    }
    candidate = described(
        Candidate,
        "A setting.",
        config=config("Setting of speculation."),
        accept_length="Accept length in closed form, in tokens per round.",
        metrics=means,
        regret="Additional time (throughput, goodput) or latency over the best setting; 0.05 is 5 %.",
        spread="Half the width of the regret's 95 % confidence interval; null with one replicate.",
        is_equal="Whether it is as good as the best within spread and tolerance.",
    )
    candidate["properties"] |= {
        "over_plain": number("Speed-up over plain decoding; absent if that was not tried or has no goodput."),
        "band": array("Ends of its 90 % band.", number("A speed-up."), 2),
    }
    choice = described(
        BatchChoice,
        "The best setting for one batch size.",
        batch="Running requests.",
        config=config("Setting of speculation."),
        tokens_per_s="Tokens per second, with prefill of prompts.",
        plain_tokens_per_s="Tokens per second of plain decoding.",
        computed_band=array("Ends of the 90 % band of the computed speed-up.", number("A speed-up."), 2),
        is_simulated="Whether it is the load of the plan, which was simulated; others are computed.",
    )
    choice["properties"] |= {
        "speedup": number("Speed-up over plain decoding."),
        "span": array("Ends of the speed-up's 90 % band.", number("A speed-up."), 2),
    }
    choice["required"] += ["speedup", "span"]
    chain = described(
        Range,
        "A setting and the batch sizes at which it is the best.",
        low="Least running requests.",
        high="Most running requests.",
        config=config("Setting of speculation."),
        speedup="Speed-up over plain decoding with the most running requests.",
    )
    bounds = record(
        "Largest latencies of a request.",
        {name: nullable(number(f"{name.upper()} in seconds; null: no bound.")) for name in ("ttft", "tpot", "e2e")},
    )
    highest = described(
        HighestRate,
        "The setting of the highest rate.",
        config=config("Setting of speculation."),
        rate="Requests per second; null: all requests may come at once.",
    )
    highest["properties"]["rate"] = nullable(highest["properties"]["rate"])
    rates = record(
        "Highest rates within the objectives.",
        {
            "attainment": number("Share of requests that stay within the objectives."),
            "best": nullable(highest),
            "plain": nullable(number("Requests per second of plain decoding; null: all may come at once.")),
        },
    )
    cell = described(Cell, "Server and load.", efficiency=_efficiency(), **_CELL_TEXTS)
    return record(
        "Output of specsim plan --json.",
        {
            "cell": cell,
            "objective": text("throughput, latency or goodput."),
            "replicates": whole("Simulated runs of each setting."),
            "candidates": array("Settings, the best first.", candidate),
            "by_batch": array("Best setting by batch size.", choice),
            "chains": array("Best chain by ranges of batch sizes, as in the files for engines.", chain),
            "schedule": array("Best setting by ranges of batch sizes, trees included.", chain),
            "slo": nullable(bounds),
            "highest_rates": nullable(rates),
            "crossover": nullable(whole("Smallest batch size from which plain decoding is best; null for none.")),
            "limits": table("Fields of the best setting at the edge of what was tried.", whole("Largest value tried.")),
            "sglang": nullable(text("Flags of SGLang's server; null where it has no such drafter.")),
            "vllm": nullable(text("Flags of vLLM's server; null where no chain was tried.")),
            "policies": table("Metrics by policy; empty without --policies.", metrics),
        },
    )


def sweep() -> Schema:
    """Describe the output of sweep."""
    known = described(Cell, "", efficiency=_efficiency(), **_CELL_TEXTS)["properties"]
    as_json = {
        name: text(f"{known[name]['description']} Written as JSON text.") for name in ("shares", "efficiency", "kept")
    }
    lengths = {
        name: {"type": ["integer", "string"], "description": f"{known[name]['description']} Two as JSON text."}
        for name in ("prompt_tokens", "output_tokens")
    }
    as_json |= {
        name: whole(f"{known[name]['description']} 1 or 0.") for name in ("prefix_cache", "adaptive_per_request")
    }
    seed = {"seed": {"type": ["integer", "string"], "description": "Random seed; as JSON text from 2^63 on."}}
    row = record(
        "A cell.",
        {"key": text("Digest of the cell.")}
        | known
        | as_json
        | lengths
        | seed
        | _METRICS
        | {
            "error": nullable(text("Reason why the cell is impossible; null for none.")),
            "seconds": number("Wall-clock time of the simulation, in seconds."),
            "worker": text("Host and process that simulated it."),
        },
    )
    return record(
        "Output of specsim sweep --json.",
        {
            "cells": array("Cells in their order.", row),
            "best": array("Best cell of each load, with metrics that are means over seeds.", row),
        },
    )


def lint_report() -> Schema:
    """Describe the output of lint-report."""
    finding = described(
        Finding,
        "The verdict of one identity on one run.",
        report="Label of the run.",
        identity="Name of the identity.",
        verdict="holds, cannot be true, or follows: a figure that follows from others.",
        says="Reason, with figures.",
    )
    return record(
        "Output of specsim lint-report --json.",
        {"file": text("File of the report."), "findings": array("Verdicts.", finding)},
    )
