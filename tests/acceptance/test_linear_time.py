"""Readers of logs and metrics take linear time: texts that took minutes to hours are read within a timeout."""

import subprocess
import sys

import pytest

TIMEOUT = 300  # seconds; each text takes about one
BLANK = '"\\n" * 1_000_000 + "x"'
HEADER = '"== Serving Benchmark Result ==\\n"'
TEXTS = {
    "blank lines": BLANK,
    "blank lines of a report": f"{HEADER} + {BLANK}",
    "spaces of a report": f'{HEADER} + "a: b" + " " * 1_000_000 + "c"',
    "line of SGLang": '"Decode batch#running-req: 1" * 100_000',
    "line of vLLM": '"SpecDecoding metrics: Mean acceptance length: 1.5, Accepted: 1 tokens, " * 50_000',
    "labels": '"vllm:spec_decode_num_drafts{" + "a" * 1_000_000 + "} 5"',
    "rounds": 'json.dumps({"acceptance_histogram": [1], "num_spec_steps": 1, "num_spec_tokens": 1024, '
    '"per_step_accepted": [1] * 500_000, "per_step_drafted": [1024] * 500_000})',
}
PROGRAM = """
import json, sys
from specsim.acceptance.files import read_records
from specsim.core.errors import InputError
with open("text", "w") as file:
    file.write({text})
try:
    read_records("text")
except InputError:
    pass
"""


@pytest.mark.parametrize("name", TEXTS)
def test_a_long_text_is_read_in_linear_time(name, tmp_path):
    program = PROGRAM.format(text=TEXTS[name])
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=TIMEOUT, check=True)
