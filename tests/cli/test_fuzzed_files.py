"""Readers of files, each given changed copies of its good files: a value or one sentence, never a traceback.

A change puts another number, field or value into a file, or removes, repeats or replaces some of its characters.
"""

import json
import random
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from specsim.acceptance.files import read_records
from specsim.acceptance.measured_pair import read_prompts
from specsim.core.config import SpecConfig
from specsim.core.errors import InputError
from specsim.core.policies.named import named_policy, policy_value
from specsim.correctness.explain import Noise, explain, read_answers
from specsim.simulator.acceptance_record import AcceptanceRecord
from specsim.simulator.calibration.benchmark_file import Context, read
from specsim.simulator.calibration.profile import SHIPPED, profile
from specsim.simulator.hardware import read_hardware
from specsim.simulator.lint import Stated, lint, report_of, stated_of
from specsim.simulator.model import model
from specsim.simulator.report import read_reports
from specsim.simulator.request_formats import read_requests

from ..simulator.client_files import BATCH, CLIENTS, LATENCY, SGLANG, SGLANG_DRAFTS, SPEC, VLLM

CHANGES = 200  # of each file
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
TEXTS = (
    "+", "-", ".", "e", "1.2.3", "inf", "-inf", "nan", "NaN", "Infinity", "=1+1", "null", "[]", "{}", '"x"', "true",
    "-1", "0", "1e308", "1e999", "9" * 30, "0.5", "1_0", " 3", "", '"', "\N{FULLWIDTH DIGIT ONE}", "1e-320", "[1,2]",
    '{"a":1}', "-0", "\0", "é", "0x10", "4.9", "1,5", "2147483648",
)  # fmt: skip
VALUES = (
    None, [], {}, "", "x", -1, 0, 1e308, 10**30, 0.5, True, [1], [None], {"a": 1}, "inf", float("inf"), float("nan"),
    "1", -0.5, [[1]], {"0": 1}, {"-1": 2}, {"1000000000000": 1}, ["a"], 2**63,
)  # fmt: skip
WORDS_OF_PYTHON = re.compile(r"Error:|NoneType|object has no|not subscriptable|unsupported operand|argument of type")


class Reader(NamedTuple):
    """A reader, its good files by name, and what a command does with what it reads."""

    use: Callable[[Path], object]
    files: dict[str, str]


def lines(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


HISTOGRAM = {"num_spec_tokens": 3, "num_spec_steps": 20, "acceptance_histogram": [8, 0, 6, 6], "num_draft_tokens": 60}
META = {
    "id": "r", "completion_tokens": 55, "spec_verify_ct": 20, "spec_num_correct_drafts": 30, "spec_accept_length": 2.7,
    "spec_num_proposed_drafts": 60, "spec_correct_drafts_histogram": [8, 0, 6, 6],
}  # fmt: skip
PRINTED = f"""
{" Serving Benchmark Result ":=^50}
Successful requests:                     200
Benchmark duration (s):                  50.00
Total input tokens:                      102400
Total generated tokens:                  25600
Request throughput (req/s):              4.00
Output token throughput (tok/s):         512.00
Mean TTFT (ms):                          180.00
P99 TTFT (ms):                           420.00
Acceptance length:                       2.26
Drafts:                                  11250
Draft tokens:                            33750
Accepted tokens:                         14175
  Position 0:                            66.00
{"=" * 50}
"""
RECORDS = {
    "own.json": json.dumps(
        AcceptanceRecord("a file", "specsim", "drafts", 2.5, 1, 3, 4, rates=(0.7, 0.5, 0.3)).to_json()
        | {"schema": "specsim/acceptance/1"}
    ),
    "generate.json": json.dumps(
        {
            "schema": "specsim/generate/1",
            "pair": "tiny",
            "config": {"topk": 1, "num_steps": 3, "num_draft_tokens": 4},
            "outputs": [{"num_accepted_tokens_per_round": [1, 4, 2], "temperature": 0.0}],
        }
    ),
    "shares.json": json.dumps({"shares": [[0.7, 0.1], [0.6, 0.1]]}),
    "aiperf.jsonl": lines({"spec_decode_acceptance": HISTOGRAM | {"engine": "vllm", "mean_acceptance_length": 2.5}}),
    "aiperf.json": json.dumps({"pooled_spec_decode_acceptance_histogram": {"histogram": {"0": 8, "2": 6, "3": 6}}}),
    "vllm.jsonl": lines(HISTOGRAM | {"acceptance_histogram_by_draft_length": {"2": [3, 1, 1], "3": [5, 0, 4, 6]}}),
    "vllm.txt": "\n".join(
        f'vllm:spec_decode_{name}_total{{engine="0",model_name="m"{labels}}} {value}'
        for name, labels, value in (
            ("num_drafts", "", "20.0"),
            ("num_draft_tokens", "", "6e1"),
            ("num_accepted_tokens", "", "30"),
            *(("num_accepted_tokens_per_pos", f',position="{at}"', value) for at, value in enumerate((12, 12, 6))),
        )
    ),
    "vllm.log": "INFO SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: 9.00 tokens/s, Drafted "
    "throughput: 18.00 tokens/s, Accepted: 30 tokens, Drafted: 60 tokens, Per-position acceptance rate: 0.600, 0.600, "
    "0.300, Avg Draft acceptance rate: 50.0%\n",
    "sglang.jsonl": lines({"text": "x", "meta_info": META}, {"meta_info": META | {"id": "s"}}),
    "ragged.jsonl": lines({"meta_info": META | {"spec_cap_lens_histogram": [0, 6, 4, 2, 8], "spec_cap_length": 2.6}}),
    "tensorrt-llm.jsonl": lines(
        HISTOGRAM | {"total_draft_tokens": 60, "total_accepted_draft_tokens": 30, "acceptance_rate": 0.5}
    ),
    "llamacpp.log": "slot print_timing: id  0 | draft acceptance = 0.62500 (  150 accepted /   240 generated), "
    "mean acceptance length =  2.88, acceptance rate per position = (0.800, 0.625, 0.450)\n",
    "profile.json": json.dumps(
        {
            "method": "eagle3",
            "num_speculative_tokens": 3,
            "marginal_accept_rates": [0.6, 0.6, 0.3],
            "mean_accept_length": 2.5,
            "acceptance_length_histogram": {"1": 8, "3": 6, "4": 6},
        }
    ),
    "sglang.json": json.dumps({"internal_states": [{"avg_spec_accept_length": 2.6}], "speculative_num_steps": 3}),
    "sglang.txt": 'sglang:spec_accept_length{tp_rank="0"} 3.2\nsglang:spec_num_steps{tp_rank="0"} 3.0\n'
    'sglang:spec_cap_length{tp_rank="0"} 3.6\nsglang:spec_block_accept_length{tp_rank="0"} 3.4\n',
    "sglang.log": "[TP0] Decode batch, #running-req: 8, accept len: 2.53, accept rate: 0.51, #queue-req: 0,\n",
}
SERVED_JSON = {"served.json": json.dumps(VLLM | SPEC), "sglang.jsonl": lines(SGLANG | {"server_info": SGLANG_DRAFTS})}
REPORTS = SERVED_JSON | CLIENTS | {"printed.txt": PRINTED}
METRICS = "metric,value\nOutput Throughput (tok/s),512\nMean TTFT (ms),180.5\n"
CHAT = [{"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": [{"token": "b", "logprob": -1.5}]}]
ANSWERS = {
    "chat.json": json.dumps({"choices": [{"index": 0, "logprobs": {"content": CHAT}}]}),
    "text.json": json.dumps({"choices": [{"message": {"content": "a b"}, "logprobs": None}]}),
    "completion.json": json.dumps(
        {
            "choices": [
                {"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"b": -1.0}]}}
            ]
        }
    ),
    "stream.txt": f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': 'a'}}]})}\n\ndata: [DONE]\n",
    "vllm.json": json.dumps(
        {"prompt_token_ids": [1], "outputs": [{"token_ids": [11], "logprobs": [{"11": {"logprob": -0.5, "rank": 1}}]}]}
    ),
    "sglang.json": json.dumps([{"text": "a", "meta_info": {"output_token_logprobs": [[-0.5, 11, None]]}}]),
    "own.jsonl": lines(
        {"token_ids": [11], "logprobs": [-0.5], "top_logprobs": [{"13": -2.5}], "prompt_token_ids": [1]}
    ),
}
TABLE = (
    "batch,num_steps,tokens_per_s,accept_length,prompt_tokens,output_tokens\n4,0,900,,512,128\n4,3,1500,2.4,512,128\n"
)
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:46.68,374,44\n"
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
)
SHAREGPT = [{"id": "a", "conversations": [{"from": "human", "value": "x" * 8}, {"from": "gpt", "value": "y" * 5}]}]
REQUESTS = {
    "azure.csv": AZURE,
    "burstgpt.csv": BURSTGPT,
    "sharegpt.json": json.dumps(SHAREGPT),
    "own.jsonl": lines(
        {"arrival_s": 0.5, "prompt_tokens": 7, "output_tokens": 3},
        {"arrival_s": 2, "prompt_tokens": 9, "output_tokens": 1},
    ),
    "run.jsonl": lines({"prompt": "a b", "max_new_tokens": 4, "temperature": 0.5}),
}
GPU = {"name": "G", "bandwidth": 3.3e12, "memory": 8e10, "interconnect": 4.5e11, "peak_flops": {"bfloat16": 9.9e14}}
FIGURES = {"bandwidth": 3.3e12, "memory": 8e10, "interconnect": 4.5e11, "peak_flops_bfloat16": 9.9e14}
GPUS = "name,figure,value\n" + "".join(f"G,{figure},{value}\n" for figure, value in FIGURES.items())
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "tie_word_embeddings": False,
}  # fmt: skip
POLICIES = {
    "own.json": json.dumps({"policy": "moving-average", "rules": {"1": {"candidate_steps": [1, 3]}}}),
    "sglang.json": json.dumps({"1": {"candidate_steps": [1, 3]}, "32": {"candidate_steps": [0, 1], "ema_alpha": 0.2}}),
    "table.json": json.dumps({"num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 64, 1]]}),
}


def check_records(path: Path) -> None:
    for record in read_records(path):
        lint(report_of(record), stated_of(record, Stated()))


def check_reports(path: Path) -> None:
    for report in read_reports(path):
        lint(report, Stated(128, 3))


def compare_answers(path: Path) -> None:
    answers = read_answers(path, "a")
    list(explain(answers, answers, Noise.of("bfloat16")))


READERS = {
    "records": Reader(check_records, RECORDS | SERVED_JSON | {"printed.txt": PRINTED, "vllm.csv": CLIENTS["vllm.csv"]}),
    "reports": Reader(check_reports, REPORTS | {"metrics.csv": METRICS}),
    "answers": Reader(compare_answers, ANSWERS),
    "benchmarks": Reader(
        lambda path: read(path, Context(3, batch=4, prompt_tokens=512, output_tokens=128)),
        SERVED_JSON | CLIENTS | {"table.csv": TABLE, "latency.json": json.dumps(LATENCY), "batch.jsonl": lines(BATCH)},
    ),
    "requests": Reader(read_requests, REQUESTS),
    "prompts": Reader(read_prompts, {"texts.jsonl": lines("a text", "b"), "ids.jsonl": lines([1, 2], {"prompt": [3]})}),
    "hardware": Reader(read_hardware, {"gpus.csv": GPUS, "gpu.json": json.dumps(GPU)}),
    "model": Reader(model, {"config.json": json.dumps(CONFIG)}),
    "profile": Reader(lambda path: profile(str(path)), {"p.json": (SHIPPED / "vllm-2025-dense.json").read_text()}),
    "policy": Reader(lambda path: named_policy(policy_value(str(path)), SpecConfig(1, 3, 4), None), POLICIES),
}  # fmt: skip


def changed(text: str, draw: random.Random) -> str:
    """Change a text in one place: a number, a JSON value or key, or some characters."""
    kind = draw.random()
    numbers = [match.span() for match in NUMBER.finditer(text)]
    if kind < 0.4 and numbers:
        first, end = draw.choice(numbers)
        return text[:first] + draw.choice(TEXTS) + text[end:]
    if kind < 0.7 and (value := _json_changed(text, draw)) is not None:
        return value
    first = draw.randrange(len(text))
    end = min(len(text), first + draw.randrange(1, 30))
    return draw.choice(
        (
            text[:first] + text[end:],
            text[:end] + text[first:],
            text[:first] + chr(draw.randrange(256)) + text[first + 1 :],
            text[:first] + draw.choice(TEXTS) + text[first:],
        )
    )


def _json_changed(text: str, draw: random.Random) -> str | None:
    """Replace or remove a key or an entry in a line of JSON; None for a line that is none."""
    rows = text.split("\n")
    at = draw.choice([index for index, row in enumerate(rows) if row.strip()])
    head = "data: " if rows[at].startswith("data:") else ""
    try:
        value = json.loads(rows[at].removeprefix(head))
    except ValueError:
        return None
    if not (slots := list(_slots(value))):
        return None
    parent, key = draw.choice(slots)
    if draw.random() < 0.25:
        del parent[key]
    else:
        parent[key] = draw.choice(VALUES)
    rows[at] = head + json.dumps(value)
    return "\n".join(rows)


def _slots(value: Any):
    """List every container with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return chain([(value, key) for key in keys], *(_slots(value[key]) for key in keys))


CASES = [(name, file) for name, reader in READERS.items() for file in reader.files]


@pytest.mark.parametrize(("name", "file"), CASES, ids=["-".join(case) for case in CASES])
def test_a_changed_file_is_read_or_refused_in_one_sentence(name, file, tmp_path):
    use, files = READERS[name]
    path = tmp_path / file
    path.write_text(files[file])
    use(path)
    draw = random.Random(f"{name} {file}")
    refused = 0
    for _ in range(CHANGES):
        path.write_text(text := changed(files[file], draw))
        said = _refusal(use, path)
        refused += bool(said)
        assert not WORDS_OF_PYTHON.search(said), (text, said)
    assert 0 < refused < CHANGES


def _refusal(use: Callable[[Path], object], path: Path) -> str:
    try:
        use(path)
    except InputError as error:
        return str(error)
    return ""
