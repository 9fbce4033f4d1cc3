"""Readers of logs and metrics take linear time: texts that took minutes to hours are read within a timeout."""

import subprocess
import sys

TIMEOUT = 600  # seconds; all texts take about three
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
import json
from specsim.acceptance.files import read_records
from specsim.core.errors import InputError
for name, text in TEXTS.items():
    print(name, flush=True)
    with open("text", "w") as file:
        file.write(eval(text))
    try:
        read_records("text")
    except InputError:
        pass
"""


def test_long_texts_are_read_in_linear_time(tmp_path):
    """The last name in the output is that of a text that takes too long."""
    program = f"TEXTS = {TEXTS!r}{PROGRAM}"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=TIMEOUT, check=True)
