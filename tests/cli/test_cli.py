"""The commands on a small pair that stands where the shipped one does; bad input ends in one sentence and status 2."""

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from safetensors.torch import save_file

import specsim.core.provenance
import specsim.models.shipped
from specsim import load
from specsim.acceptance.study import Check, Measurement, Setting, Study, chain
from specsim.cli.main import main
from specsim.core.errors import InputError
from specsim.core.metrics import acceptance
from specsim.core.pair import Pair
from specsim.core.target import ModelConfig
from specsim.correctness.invariance.solo import SoloResult
from specsim.maintain.training.tokenizer import save_tokenizer, train_tokenizer
from specsim.models.synthetic_pair import synthetic_pair

VOCAB_SIZE, MAX_LEN = 257, 512
PROMPTS = ("def add(a, b):", "import os\n", "class Tree:\n    pass\n")
FEW = ("generate", "--max-new-tokens", "5")


def config_fields(config: ModelConfig) -> dict:
    return {
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
    }


def write_checkpoint(folder: Path, fields: dict, tensors: dict) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    stored = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")


def write_head(folder: Path, pair: Pair) -> None:
    config, fields = pair.drafter.config, config_fields(pair.drafter.config.model)
    if config.kind == "eagle3":
        fields |= {"draft_vocab_size": config.draft_vocab_size, "eagle_aux_hidden_state_convention": "entering"}
        fields |= {"eagle_aux_hidden_state_layer_ids": list(config.feature_layers)}
    write_checkpoint(folder, fields, pair.drafter.tensors)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A folder like the shipped pair's: a target with its tokenizer, two heads, prompts."""
    folder = tmp_path_factory.mktemp("zoo") / "tiny"
    heads = {kind: synthetic_pair(kind, num_layers=4, vocab_size=VOCAB_SIZE) for kind in ("eagle", "eagle3")}
    target = heads["eagle3"].target
    write_checkpoint(folder / "target", config_fields(target.config), target.tensors)
    save_tokenizer(train_tokenizer(["def"], VOCAB_SIZE), folder / "target", MAX_LEN)
    for kind, pair in heads.items():
        write_head(folder / kind, pair)
    lines = [json.dumps({"id": str(index), "text": text}) + "\n" for index, text in enumerate(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(autouse=True)
def _shipped(tiny, monkeypatch):
    monkeypatch.setattr(specsim.models.shipped, "TINY", tiny)


@pytest.fixture
def call(capsys):
    """Run the command line in this process: (exit status, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        return exit_info.value.code, *capsys.readouterr()

    return call


def run(tiny: Path, *arguments: str, **options) -> tuple[int, str]:
    """Run the command line in a process of its own: (exit status, stderr)."""
    code = "import sys, pathlib, specsim.models.shipped\nspecsim.models.shipped.TINY = pathlib.Path(sys.argv.pop(1))\n"
    command = [sys.executable, "-c", f"{code}from specsim.cli.main import main\nmain()", str(tiny), *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **options)
    return done.returncode, done.stderr


def test_version(call):
    assert call("--version") == (0, "specsim 0.1.0\n", "")


@pytest.mark.parametrize(
    "arguments", [(), ("--help",), *((name, "--help") for name in ("certify", "generate", "run", "soak", "demo"))]
)
def test_help_is_plain_text(call, arguments):
    status, out, err = call(*arguments)
    assert (status, err) == (0, "")
    assert out.startswith("Usage: specsim")
    assert out.isascii()
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("drafter", ["eagle", "eagle3", "none"])
def test_generate_prints_text_and_figures(call, drafter):
    status, out, err = call(*FEW, "--drafter", drafter, "--prompt", "def f", "--seed", "3", "--temperature", "1")
    assert (status, err) == (0, "")
    expected = specsim.generate(
        load(drafter=drafter), "def f", None, specsim.SamplingParams(temperature=1, max_new_tokens=5, seed=3)
    )
    assert out.startswith(expected.outputs[0].text)
    figures = [line.split("  ")[0] for line in out.splitlines()]
    assert {"pair", "setting", "finish reason", "tokens", "rounds", "tokens a second"} <= set(figures)
    assert ({"accept length", "accept rate", "accepted by position"} <= set(figures)) == (drafter != "none")
    assert "\x1b" not in out


def test_generate_takes_every_option(call, tmp_path):
    file = tmp_path / "out.json"
    numbers = (
        "--topk 2 --num-steps 4 --num-draft-tokens 7 --page-size 4 --max-len 64 --top-k 20 --top-p 0.9 --min-p 0.01"
    )
    penalties = (
        "--repetition-penalty 1.1 --presence-penalty 0.5 --frequency-penalty -0.5 --dtype float64 --impl reference"
    )
    modes = "--draft-kv ancestor --extend ragged --release round"
    status, _, err = call(*FEW, *numbers.split(), *penalties.split(), *modes.split(), "--json", str(file))
    assert (status, err) == (0, "")
    config = json.loads(file.read_text())["config"]
    assert {name: config[name] for name in ("topk", "draft_kv", "extend", "release", "max_len", "page_size")} == {
        "topk": 2, "draft_kv": "ancestor", "extend": "ragged", "release": "round", "max_len": 64, "page_size": 4
    }  # fmt: skip


def test_json_of_generate(call, tmp_path):
    file = tmp_path / "out.json"
    assert call(*FEW, "--json", str(file))[0] == 0
    result = json.loads(file.read_text(), parse_constant=pytest.fail)
    (output,) = result["outputs"]
    keys = {"text", "token_ids", "logprobs", "finish_reason", "num_accepted_tokens_per_round", "prompt_token_ids"}
    assert set(output) == keys
    assert len(output["token_ids"]) == len(output["logprobs"]) == result["metrics"]["tokens"] == 5
    assert {"accept_length", "accept_rate", "accepted_by_position", "rounds", "tokens_per_s"} <= set(result["metrics"])
    assert os.listdir(tmp_path) == ["out.json"]


def test_json_holds_null_where_a_figure_is_not_defined(call, tmp_path):
    file = tmp_path / "out.json"
    assert call(*FEW, "--drafter", "none", "--json", str(file))[0] == 0
    assert json.loads(file.read_text(), parse_constant=pytest.fail)["metrics"]["accept_rate"] is None


def test_json_replaces_what_a_link_points_to(call, tmp_path):
    file, link = tmp_path / "out.json", tmp_path / "link.json"
    file.write_text("old")
    link.symlink_to(file)
    assert call(*FEW, "--json", str(link))[0] == 0
    assert link.is_symlink()
    assert json.loads(file.read_text())["outputs"]


def test_prompt_file_is_one_text(call, tmp_path):
    text = "def f():\r\n    x = 'é'\n"
    file = tmp_path / "prompt.py"
    file.write_bytes(text.encode())
    from_file, given = call(*FEW, "--prompt-file", str(file)), call(*FEW, "--prompt", text)
    assert from_file[0] == given[0] == 0
    assert from_file[1].split("\n\n")[0] == given[1].split("\n\n")[0]


def test_first_shipped_prompt_is_the_default(call):
    assert call(*FEW)[1].split("\npair")[0] == call(*FEW, "--prompt", PROMPTS[0])[1].split("\npair")[0]


SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 96,
}
CHAIN = ("--topk", "1", "--num-draft-tokens", "4")
RATES = ("--accept-rates", "1,0.5,0.5")
SYNTHETIC = {"synthetic": True, "rates": [1.0, 0.5, 0.5], "schedule": "minimum-variance", "seed": 0}


@pytest.fixture
def shape(tmp_path) -> Path:
    (tmp_path / "shapes").mkdir()
    (file := tmp_path / "shapes" / "small.json").write_text(json.dumps(SHAPE))
    return file


@pytest.mark.parametrize("impl", ["reference", "fast"])
def test_generate_times_a_shape_at_synthetic_acceptance(call, shape, tmp_path, impl):
    pytest.importorskip("triton")
    options = ("--shape", f"{shape}-tp2-slice", *CHAIN, *RATES, "--impl", impl, "--prompt-length", "5")
    status, out, err = call("generate", *options, "--max-new-tokens", "7", "--json", str(tmp_path / "out.json"))
    assert (status, err) == (0, "")
    assert "random weights of" in out
    assert "synthetic, minimum-variance at rates 1, 0.5, 0.5: not the target's" in out
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["acceptance"] == SYNTHETIC
    assert result["pair"].startswith("random weights of")
    assert result["command"].startswith("specsim generate --")
    (output,) = result["outputs"]
    assert out.startswith(" ".join(map(str, output["token_ids"])))
    assert set(output["num_accepted_tokens_per_round"]) <= {2, 4}


def test_run_serves_a_shape_from_token_ids(serve, shape, tmp_path):
    file, trace = tmp_path / "out.json", tmp_path / "trace.parquet"
    lines = [json.dumps({"prompt_ids": [1, 2, 3, request], "max_new_tokens": 9}) for request in range(3)]
    options = ("--shape", str(shape), *CHAIN, *RATES, "--accept-schedule", "independent", "--json", str(file))
    status, out, err = serve(*options, "--trace", str(trace), lines=lines)
    assert (status, err) == (0, "")
    assert "synthetic, independent at rates 1, 0.5, 0.5: not the target's" in out
    result = json.loads(file.read_text())
    assert result["acceptance"] == SYNTHETIC | {"schedule": "independent"}
    assert result["pair"] == f"random weights of {shape}, eagle3"
    assert "--accept-rates 1,0.5,0.5 --accept-schedule independent" in result["command"]
    events = pytest.importorskip("pandas").read_parquet(trace)
    assert set(events.acceptance.dropna()) == {"synthetic, independent at rates 1, 0.5, 0.5"}


def test_acceptance_of_trained_weights_can_be_synthetic_too(call):
    status, out, _ = call(*FEW, "--accept-rates", "1,1,1", *CHAIN)
    assert status == 0
    assert "accepted by position  1.00 1.00 1.00 of the rounds" in out


def test_a_shape_reads_no_text(call, serve, shape):
    assert_one_sentence(serve("--shape", str(shape)), "requests", "line 1", "token ids: the target has no tokenizer")
    assert_one_sentence(call("run", "--shape", str(shape)), "requests", "the shipped texts", "prompt_ids")


def test_accept(call, tmp_path):
    file = tmp_path / "accept.json"
    status, out, err = call("accept", "--prompts", "2", "--max-new-tokens", "6", "--json", str(file))
    assert (status, err) == (0, "")
    assert "Acceptance on 2 held-out prompts, 6 new tokens each" in out
    study = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert (study["num_prompts"], len(study["measurements"])) == (2, 11)


LINES = (
    '{"id": 3, "prompt": "def f(x):", "max_new_tokens": 6}',
    '{"id": 5, "prompt": "def f(x):\\n    return", "arrival": 1, "max_new_tokens": 4, "temperature": 1, "seed": 2}',
    '{"id": 6, "prompt": "x", "continues": 3, "max_new_tokens": 3}',
    '{"id": 7, "prompt": "def g():", "abort_at": 2, "max_new_tokens": 50}',
)


@pytest.fixture
def serve(call, tmp_path):
    """Run a file of these lines from a folder of its own: (exit status, stdout, stderr)."""

    def serve(*arguments: str, lines=LINES) -> tuple[int, str, str]:
        file = tmp_path / "requests" / "lines.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(lines))
        return call("run", "--requests", str(file), *arguments)

    return serve


def test_run_serves_the_shipped_requests(call):
    status, out, err = call("run", "--slots", "1600", "--prefix-cache", "--schedule", "overlap")
    assert (status, err) == (0, "")
    assert "requests              14: " in out
    assert "overlap, with prefix cache" in out
    assert "after the last request 1,600 are free." in out
    assert max(map(len, out.splitlines())) <= 100


def test_json_of_run(serve, tmp_path):
    file = tmp_path / "out.json"
    assert serve("--json", str(file))[::2] == (0, "")
    result = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert [output["id"] for output in result["outputs"]] == [3, 5, 6, 7]
    assert [output["finish_reason"] for output in result["outputs"]][3] == "abort"
    keys = {"text", "token_ids", "logprobs", "stop_reason", "error", "latency", "num_accepted_tokens_per_round"}
    assert keys <= set(result["outputs"][0])
    assert {"steps", "prefill_steps", "num_prefilled", "num_reused", "tokens"} <= set(result["totals"])
    assert result["audit"]["at_end"]["free"] == result["audit"]["at_end"]["slots"] == 4096
    assert (result["serving"]["schedule"], result["config"]["topk"], result["skipped"]) == ("sync", 4, [])
    assert [result[name] for name in ("impl", "dtype", "device", "graph", "bucket")] == [
        "reference",
        "float32",
        "cpu",
        None,
        None,
    ]
    assert sorted(os.listdir(tmp_path)) == ["out.json", "requests"]


def test_json_of_run_says_where_it_comes_from(tiny, call, serve, tmp_path):
    file, lines = tmp_path / "out.json", tmp_path / "requests" / "lines.jsonl"
    head = json.loads((tiny / "eagle3" / "config.json").read_text())
    fields = [f"{name}={head[name]}" for name in ("eagle_aux_hidden_state_layer_ids", "draft_vocab_size")]
    given = ("--slots", "700", "--prefix-cache", "--topk", "2", "--draft-field", fields[0], "--draft-field", fields[1])
    assert serve(*given, "--max-running", "8", "--json", str(file))[::2] == (0, "")
    first = json.loads(file.read_text())
    assert first["file"] == str(lines)
    command = f"specsim run --requests {lines} --slots 700 --prefix-cache --topk 2 --draft-field"
    assert first["command"] == f"{command} '{fields[0]}' --draft-field {fields[1]}"
    assert first["versions"] == specsim.core.provenance.versions("cpu")
    assert datetime.fromisoformat(first["date"]) <= datetime.now(UTC)
    assert call(*shlex.split(first["command"])[1:], "--json", str(file))[0] == 0
    second = json.loads(file.read_text())
    assert second["command"] == first["command"]
    assert [each["token_ids"] for each in second["outputs"]] == [each["token_ids"] for each in first["outputs"]]


def test_json_of_run_says_what_fast_ran_on(serve, tmp_path, device):
    pytest.importorskip("triton")
    file, few = tmp_path / "out.json", ('{"prompt": "x", "max_new_tokens": 2}',)
    assert serve("--impl", "fast", "--release", "round", "--json", str(file), lines=few)[::2] == (0, "")
    result = json.loads(file.read_text())
    assert [result[name] for name in ("impl", "device", "graph", "bucket")] == ["fast", device, "phase", None]


def test_run_gives_what_generate_gives(call, serve, tmp_path):
    tree = "--topk 2 --num-steps 4 --num-draft-tokens 7 --page-size 4 --draft-kv ancestor --extend ragged".split()
    serving = "--max-running 2 --slots 128 --chunk-tokens 5 --preemption shortest --no-prefix-cache".split()
    same = (*tree, "--release", "round", "--dtype", "float64", "--drafter", "eagle", "--max-len", "64")
    assert serve(*same, *serving, "--json", str(tmp_path / "run.json"))[0] == 0
    texts = ("--prompt", "def f(x):", "--max-new-tokens", "6")
    assert call("generate", *same, *texts, "--json", str(tmp_path / "generate.json"))[0] == 0
    served, alone = (json.loads((tmp_path / name).read_text()) for name in ("run.json", "generate.json"))
    assert served["outputs"][0]["token_ids"] == alone["outputs"][0]["token_ids"]
    assert served["config"] == alone["config"]
    expected = dict(max_running=2, num_slots=128, chunk_tokens=5, preemption="shortest", prefix_cache=False)
    assert served["serving"] == {"schedule": "sync", **expected}


def test_trace_of_run(serve, tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    file = tmp_path / "trace.parquet"
    assert serve("--trace", str(file))[::2] == (0, "")
    events = pandas.read_parquet(file)
    assert set(events.request_id) == {3, 5, 6, 7}
    assert {"arrive", "admit", "prefill", "decode", "result", "finish", "abort"} <= set(events.event)
    assert sorted(os.listdir(tmp_path)) == ["requests", "trace.parquet"]


def test_run_compares_four_ways(serve, tmp_path, monkeypatch):
    file = tmp_path / "out.json"
    status, out, err = serve("--compare", "--slots", "700", "--chunk-tokens", "8", "--json", str(file))
    assert (status, err) == (0, "")
    assert out.count("4 of 4") == 4
    result = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert result["is_equal"] is True
    assert [way["serving"]["num_slots"] for way in result["ways"]] == [700] * 4
    different = SoloResult("different", "request 3: not what it was")
    monkeypatch.setattr("specsim.correctness.invariance.solo.check_request", lambda *_: different)
    status, out, err = serve("--compare", "--json", str(file))
    assert (status, err) == (1, "")
    assert "NOT equal" in out
    assert json.loads(file.read_text())["is_equal"] is False


def test_bad_lines_of_a_request_file(serve, tmp_path):
    lines = (*LINES, '{"prompt": 5}', '{"id": 3, "prompt": "x"}')
    stopped = serve("--json", str(tmp_path / "out.json"), lines=lines)
    assert_one_sentence(stopped, "requests", "lines.jsonl, line 5", "a text")
    assert os.listdir(tmp_path) == ["requests"]
    assert_one_sentence(serve(lines=(LINES[0], LINES[0])), "requests", "line 2", "no earlier line has, not 3")
    status, out, err = serve("--skip-bad-lines", "--json", str(tmp_path / "out.json"), lines=lines)
    assert (status, err) == (0, "")
    assert "Line 5 is skipped: not a line whose prompt is a text (token ids: prompt_ids), not 5." in out
    assert [each["line"] for each in json.loads((tmp_path / "out.json").read_text())["skipped"]] == [5, 6]


@pytest.mark.parametrize(
    ("arguments", "name", "value", "allowed"),
    [
        ("--schedule later", "schedule", "'later'", "sync or overlap"),
        ("--schedule overlap --release round", "schedule", "'overlap'", "sync with release 'round'"),
        ("--slots 15", "slots", "15", "at least a page, 16"),
        ("--max-running 0", "max_running", "0", "from 1"),
        ("--chunk-tokens 0", "chunk_tokens", "0", "at least 1"),
        ("--preemption oldest", "preemption", "'oldest'", "latest or shortest or longest"),
        ("--topk 0", "topk", "0", "at least 1"),
        ("--drafter none --topk 2", "topk", "2", "only 4, the default, with drafter none"),
        ("--dtype int8", "dtype", "'int8'", "float32 or float64"),
        ("--impl quick", "impl", "'quick'", "reference"),
        ("--max-len 513", "max_len", "513", "at most the target's max_position_embeddings, 512"),
        ("--requests {tmp}/missing", "requests", "{tmp}/missing", "UTF-8 file that can be read"),
        ("--requests {tmp}", "requests", "{tmp}", "UTF-8 file that can be read"),
        ("--requests {tmp}/empty", "requests", "{tmp}/empty", "at least one request"),
        ("--compare --release round", "release", "'round'", "finish"),
        ("--compare --dtype bfloat16", "dtype", "bfloat16", "float32"),
        ("--compare --schedule overlap", "schedule", "overlap", "only sync, the default, with --compare"),
        ("--compare --prefix-cache", "prefix_cache", "True", "only False, the default, with --compare"),
        ("--compare --accept-rates 1,1,1", "accept_rates", "1,1,1", "only None, the default, with --compare"),
        ("--compare --trace {tmp}/x", "trace", "{tmp}/x", "only None, the default, with --compare"),
        ("--json {tmp}", "json", "{tmp}", "a file, not a folder"),
        ("--trace {tmp}", "trace", "{tmp}", "a file, not a folder"),
        ("--trace {tmp}/missing/x", "trace", "{tmp}/missing/x", "a folder that exists"),
        ("--trace {tmp}/x --json {tmp}/x", "trace", "{tmp}/x", "another file than that of json"),
    ],
)
def test_bad_input_of_run(call, bad_files, arguments, name, value, allowed):
    if "--trace" in arguments and "--compare" not in arguments:
        pytest.importorskip("pyarrow")
    before = sorted(bad_files.rglob("*"))
    result = call("run", *arguments.format(tmp=bad_files).split(" "))
    assert_one_sentence(result, name, value.format(tmp=bad_files), allowed)
    assert sorted(bad_files.rglob("*")) == before


def test_a_trace_without_pandas_is_refused_before_the_run(serve, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    result = serve("--trace", str(tmp_path / "trace.parquet"))
    assert_one_sentence(result, "trace", "", "pandas and pyarrow are installed")
    assert os.listdir(tmp_path) == ["requests"]


def test_buffers_of_fewer_requests_than_may_run(serve):
    pytest.importorskip("triton")
    result = serve("--impl", "fast", "--bucket", "2")
    assert_one_sentence(result, "bucket", "2", "at least max_running, 8")


@pytest.mark.parametrize("error", [KeyboardInterrupt, InputError("num_slots", 1, "more")])
def test_a_run_that_is_cut_short_leaves_no_files(serve, tmp_path, monkeypatch, error):
    def stop(*_):
        raise error

    monkeypatch.setattr("specsim.serving.scheduler.Scheduler.end_step", stop)
    status, out, _ = serve("--json", str(tmp_path / "out.json"))
    assert (status, out) == (130 if error is KeyboardInterrupt else 2, "")
    assert os.listdir(tmp_path) == ["requests"]


def test_a_trace_that_cannot_be_written_costs_nothing_else(serve, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    write = Path.write_bytes

    def fill(path: Path, data: bytes) -> int:
        if path.suffix == ".parquet":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", fill)
    result = serve("--trace", str(tmp_path / "out.parquet"), "--json", str(tmp_path / "out.json"))
    assert "audits accounted for" in result[1]
    assert_one_sentence((result[0], "", result[2]), "trace", "out.parquet", "No space left on device")
    assert json.loads((tmp_path / "out.json").read_text())["outputs"]
    assert sorted(os.listdir(tmp_path)) == ["out.json", "requests"]


@pytest.mark.parametrize("is_ok", [True, False])
def test_soak(call, tmp_path, monkeypatch, is_ok):
    asked = []

    class Result:
        def __init__(self, *arguments, **options):
            asked.append((arguments, options))
            self.is_ok = is_ok

        def show(self, console):
            console.print("shown")

        def to_json(self):
            return {"is_ok": is_ok}

    monkeypatch.setattr("specsim.correctness.soak.soak", Result)
    file = tmp_path / "soak.json"
    given = "--impl fast --device cpu --graph eager --jobs 1".split()
    options = {"impl": "fast", "device": "cpu", "graph": "eager", "jobs": 1, "progress": True}
    drawn = {"--requests 7 --seed 3": {"num_requests": 7, "seed": 3, "program": None}, "--program x": {"program": "x"}}
    for words, expected in drawn.items():
        assert call("soak", *given, *words.split(), "--json", str(file)) == (0 if is_ok else 1, "shown\n", "")
        assert asked.pop() == ((), options | expected)
        assert json.loads(file.read_text()) == {"is_ok": is_ok}
    call("soak")
    assert asked == [
        ((), {"impl": "reference", "device": None, "graph": None, "jobs": 2, "program": None, "progress": True})
    ]


def test_bad_input_of_soak(call):
    assert_one_sentence(call("soak", "--requests", "0"), "requests", "0", "at least 1")
    assert_one_sentence(call("soak", "--json", "/"), "json", "/", "a file, not a folder")
    assert_one_sentence(call("soak", "--program", ""), "program", "''", "SEED-INDEX-REQUESTS")
    for given in (("--requests", "10000"), ("--seed", "0")):
        alone = "alone, without --requests and --seed"
        assert_one_sentence(call("soak", "--program", "0-0-1", *given), "program", "'0-0-1'", alone)


@pytest.mark.parametrize(
    ("command", "given", "used"), [("demo", None, "1"), ("sampling-test", "3", "3"), ("generate", None, None)]
)
def test_small_models_get_one_thread_unless_told_otherwise(call, monkeypatch, command, given, used):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "0")  # which is put back in the end
        monkeypatch.delenv(name) if given is None else monkeypatch.setenv(name, given)
    assert call(command, "--help")[0] == 0
    assert os.environ.get("OMP_NUM_THREADS") == os.environ.get("MKL_NUM_THREADS") == used


def test_demo(call):
    status, out, err = call("demo")
    assert (status, err) == (0, "")
    assert "plain decoding's: yes" in out


def test_demo_exits_1_where_outputs_differ(call, monkeypatch):
    monkeypatch.setattr("specsim.cli.walkthrough.run", lambda *_: False)
    assert call("demo") == (1, "", "")


def test_accept_exits_1_where_outputs_differ(call, monkeypatch):
    measured = Measurement(Setting("eagle3", chain(1)), acceptance([1, 0], 1), acceptance([0], 1), num_equal=1)
    monkeypatch.setattr(
        "specsim.acceptance.study.measure",
        lambda *_, **__: Study(2, 1, 64, (measured,), (Check("equal", 1, "all 2", False),)),
    )
    assert call("accept")[0] == 1


BAD = [
    ("--topk 0", "topk", "0", "at least 1"),
    ("--topk 1", "num_draft_tokens", "8", "4: a chain"),
    ("--topk 240 --num-steps 1", "topk", "240", "at most the draft vocabulary, 224"),
    ("--num-steps -1", "num_steps", "-1", "at least 0"),
    ("--num-draft-tokens 99", "num_draft_tokens", "99", "2 to 37"),
    ("--page-size 0", "page_size", "0", "from 1"),
    ("--verifier multi_round", "num_draft_tokens", "8", "13: verifier multi_round verifies"),
    ("--drafter none --verifier block", "verifier", "block", "only target_only"),
    ("--draft-kv own", "draft_kv", "'own'", "lane or ancestor"),
    ("--extend none", "extend", "'none'", "fixed or ragged"),
    ("--release never", "release", "'never'", "finish or round"),
    ("--max-len 1", "max_len", "1", "at least 2"),
    ("--max-len 513", "max_len", "513", "at most the target's max_position_embeddings, 512"),
    ("--max-len 8", "prompt", "'14 tokens'", "at most 7"),
    ("--impl quick", "impl", "'quick'", "reference"),
    ("--dtype int8", "dtype", "'int8'", "float32 or float64"),
    ("--drafter medusa", "drafter", "'medusa'", "eagle or eagle3 or none"),
    ("--drafter none --topk 2", "topk", "2", "only 4, the default, with drafter none"),
    ("--drafter none --release round", "release", "'round'", "only finish"),
    ("--temperature -1", "temperature", "-1.0", "0 (greedy) or a positive number"),
    ("--page-size 65537", "page_size", "65537", "an integer from 1 to 65536"),
    ("--topk 1 --num-steps 3000 --num-draft-tokens 3001", "num_steps", "3000", "less than the most tokens"),
    ("--target ~nosuchuser --draft x", "target", "~nosuchuser", "an existing folder"),
    ("--draft-field norm=1", "draft_fields", "norm", "norm_before_residual"),
    ("--drafter none --draft-field norm=1", "draft_fields", "norm", "none without a drafter"),
    ("--temperature nan", "temperature", "nan", "0 (greedy) or a positive number"),
    ("--top-k -1", "top_k", "-1", "at least 0"),
    ("--top-p 0", "top_p", "0.0", "above 0 and at most 1"),
    ("--min-p 2", "min_p", "2.0", "from 0 to 1"),
    ("--repetition-penalty 0", "repetition_penalty", "0.0", "a number from 0.001 to 1000"),
    ("--presence-penalty 3", "presence_penalty", "3.0", "from -2 to 2"),
    ("--frequency-penalty -3", "frequency_penalty", "-3.0", "from -2 to 2"),
    ("--max-new-tokens 0", "max_new_tokens", "0", "at least 1"),
    ("--seed -1", "seed", "-1", "0 to 2^64 - 1"),
    ("--prompt=", "prompt", "''", "UTF-8 text of at least one character"),
    ("--prompt \udcff", "prompt", r"'\udcff'", "UTF-8 text of at least one character"),
    ("--prompt-file {tmp}/missing", "prompt_file", "{tmp}/missing", "UTF-8 text file"),
    ("--prompt-file {tmp}", "prompt_file", "{tmp}", "UTF-8 text file"),
    ("--prompt-file {tmp}/empty", "prompt_file", "{tmp}/empty", "not empty"),
    ("--prompt-file {tmp}/latin1", "prompt_file", "{tmp}/latin1", "UTF-8 text file"),
    ("--prompt x --prompt-file {tmp}/empty", "prompt_file", "{tmp}/empty", "one of --prompt and --prompt-file"),
    ("--target {tmp}/missing --drafter none", "target", "{tmp}/missing", "an existing folder, or a hub id"),
    ("--target {tiny}/target", "draft", "None", "a drafter of the given target"),
    ("--draft {tiny}/eagle3", "target", "None", "the target that the given drafter was trained for"),
    ("--target {tiny}/target --draft {tmp}/wider", "hidden_size in", "64", "32, the target's"),
    ("--target {tmp}/cut --drafter none", "{tmp}/cut/model.safetensors", "", "safetensors"),
    ("--shape llama-9", "shape", "'llama-9'", "qwen3-8b"),
    ("--shape llama-3-8b-tp3-slice", "shape", "'llama-3-8b-tp3-slice'", "num_heads 32"),
    ("--shape {tmp}/latin1", "{tmp}/latin1", "", "valid JSON"),
    ("--shape llama-3-8b --target {tmp}/cut", "target", "{tmp}/cut", "none with --shape"),
    ("--shape llama-3-8b --draft-field a=1", "draft_field", "a=1", "none with --shape"),
    ("--shape llama-3-8b --drafter medusa", "drafter", "medusa", "eagle3 or eagle"),
    ("--shape llama-3-8b --prompt x", "prompt", "x", "none with --shape"),
    ("--prompt-length 5", "prompt_length", "5", "none without --shape"),
    ("--accept-rates 0.5,x,0", "accept_rates", "0.5,x,0", "such as 0.8,0.6,0.4"),
    ("--accept-rates 0.5,0.6,0", "accept_rates", "(0.5, 0.6, 0.0)", "none larger than the one before"),
    ("--accept-rates 0.5,0.4", "accept_rates", "(0.5, 0.4)", "num_steps rates, 3"),
    ("--accept-rates 1,1,1 --drafter none", "accept_rates", "1,1,1", "none with drafter none"),
    ("--accept-rates 1,1,1 --regex a", "regex", "a", "none with --accept-rates"),
    ("--json-schema {tmp}/deep", "json_schema", "{tmp}/deep", "a file with a JSON schema"),
    ("--prompt-file {tmp}/text --json {tmp}/text", "json", "{tmp}/text", "another file than that of prompt_file"),
    ("--temperature warm", "temperature", "'warm'", "a number"),
    ("--seed=1.5", "seed", "'1.5'", "an integer"),
    ("--accept-rates 1,1,1 --accept-schedule often", "accept_schedule", "often", "minimum-variance or independent"),
    ("--accept-schedule independent", "accept_schedule", "independent", "without --accept-rates"),
    ("--json {tmp}", "json", "{tmp}", "a file, not a folder"),
    ("--json {tmp}/missing/out.json", "json", "{tmp}/missing/out.json", "a folder that exists"),
]  # fmt: skip


@pytest.fixture
def bad_files(tiny, tmp_path) -> Path:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("a text")
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "latin1").write_bytes("é".encode("latin1"))
    write_head(tmp_path / "wider", synthetic_pair("eagle", vocab_size=VOCAB_SIZE, hidden_size=64))
    shutil.copytree(tiny / "target", tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model.safetensors", 1000)
    return tmp_path


def assert_one_sentence(result: tuple[int, str, str], name: str, value: str, allowed: str) -> None:
    status, out, err = result
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    start, _, end = err.partition("; allowed: ")
    assert start.startswith(f"specsim: {name}")
    assert value in start
    assert allowed in end


@pytest.mark.parametrize(("arguments", "name", "value", "allowed"), BAD, ids=[repr(case[0]) for case in BAD])
def test_bad_input_is_one_sentence(call, tiny, bad_files, arguments, name, value, allowed):
    before = sorted(bad_files.rglob("*"))
    filled = [word.format(tmp=bad_files, tiny=tiny) for word in arguments.split(" ")]
    result = call("generate", *filled)
    assert_one_sentence(result, name.format(tmp=bad_files), value.format(tmp=bad_files), allowed)
    assert sorted(bad_files.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "name", "value", "allowed"),
    [
        ("accept --prompts 0", "prompts", "0", "1 to 3"),
        ("accept --prompts 4", "prompts", "4", "1 to 3"),
        ("accept --max-new-tokens 0", "max_new_tokens", "0", "at least 1"),
        ("accept --json /", "json", "/", "a file, not a folder"),
        ("diff --family gpt", "family", "'gpt'", "llama or qwen3"),
        ("diff --drafter mtp", "drafter", "'mtp'", "eagle or eagle3"),
        ("diff --impl reference --graph round", "graph", "'round'", "eager with impl reference"),
    ],
)
def test_bad_input_of_accept_and_diff(call, arguments, name, value, allowed):
    assert_one_sentence(call(*arguments.split()), name, value, allowed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate --topk many", "topk is 'many'; allowed: an integer"),
        ("generate --no-such", "No such option: --no-such"),
        ("generate more", "Got unexpected extra argument"),
        ("nothing", "No such command 'nothing'."),
        ("accept --prompts", "Option '--prompts' requires an argument."),
        ("sweep --vary seed=1", "Missing option '--out'."),
    ],
)
def test_usage_errors_are_one_sentence(call, arguments, message):
    status, out, err = call(*arguments.split())
    assert (status, out) == (2, "")
    assert err.startswith(f"specsim: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        "lint-report {tmp}/text --json {tmp}/text",
        "explain --a {tmp}/text --b {tmp}/empty --json {tmp}/text",
        "plan --accept {tmp}/text --json {tmp}/text",
        "simulate --workload {tmp}/text --json {tmp}/text",
        "simulate --plot {tmp}/new --json {tmp}/new",
        "sweep --out {tmp}/new --json {tmp}/new --vary seed=1",
        "run --requests {tmp}/text --json {tmp}/text",
    ],
)
def test_no_result_takes_the_place_of_another_file_of_the_command(call, bad_files, arguments):
    before = sorted(bad_files.rglob("*"))
    result = call(*arguments.format(tmp=bad_files).split())
    assert_one_sentence(result, "", str(bad_files), "another file than that of")
    assert sorted(bad_files.rglob("*")) == before
    assert (bad_files / "text").read_text() == "a text"


def test_missing_prompts_are_told(call, tmp_path, monkeypatch):
    monkeypatch.setattr(specsim.models.shipped, "TINY", tmp_path)
    assert_one_sentence(call("demo"), str(tmp_path / "prompts.jsonl"), "No such file", "what can be read")


@pytest.mark.parametrize("existing", [None, "old"])
def test_full_disk_leaves_nothing_behind(call, tmp_path, monkeypatch, existing):
    file = tmp_path / "out.json"
    if existing:
        file.write_text(existing)

    def fill(path: Path, data: bytes) -> None:
        with path.open("wb") as begun:
            begun.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", fill)
    status, out, err = call(*FEW, "--json", str(file))
    assert "accept length" in out, "the result is shown all the same"
    assert_one_sentence((status, "", err), "json", str(file), "No space left on device")
    assert os.listdir(tmp_path) == (["out.json"] if existing else [])
    assert not existing or file.read_text() == existing


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_full_device(tiny):
    with open("/dev/full", "w") as full:
        status, err = run(tiny, "--version", stdout=full)
    assert_one_sentence((status, "", err), "standard output", "No space left on device", "")


def test_fields_of_a_drafter_are_said_on_the_command_line(call, tiny, tmp_path):
    shutil.copytree(tiny / "eagle3", tmp_path / "head")
    fields = json.loads((tiny / "eagle3" / "config.json").read_text())
    del fields["eagle_aux_hidden_state_convention"]
    (tmp_path / "head" / "config.json").write_text(json.dumps(fields))
    own = (*FEW, "--target", str(tiny / "target"), "--draft", str(tmp_path / "head"))
    assert_one_sentence(call(*own), "eagle_aux_hidden_state_convention", "missing", "entering")
    assert call(*own, "--draft-field", "eagle_aux_hidden_state_convention=entering")[0] == 0
    assert_one_sentence(call(*own, "--draft-field", "entering"), "draft_field", "entering", "NAME=JSON")


def test_closed_standard_output_does_not_cost_the_json(tiny, tmp_path):
    command = f"{sys.executable} -c 'from specsim.cli.main import main; main()' --version >&-"
    assert subprocess.run(command, shell=True, capture_output=True, text=True).returncode == 0


def test_closed_pipe_is_quiet(tiny):
    reader, writer = os.pipe()
    os.close(reader)
    status, err = run(tiny, *FEW, stdout=writer)
    os.close(writer)
    assert (status, err) == (1, "")


def test_closed_pipe_does_not_cost_the_json(tiny, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    run(tiny, *FEW, "--json", str(tmp_path / "out.json"), stdout=writer)
    os.close(writer)
    assert json.loads((tmp_path / "out.json").read_text())["outputs"]


def test_interrupt_is_quiet(call, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["specsim.serving.generation"], "generate", interrupt)
    assert call(*FEW) == (130, "", "")


def test_too_little_memory_is_told(call, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 10 bytes")

    monkeypatch.setattr(sys.modules["specsim.serving.generation"], "generate", fail)
    assert_one_sentence(call(*FEW), "the memory of this setting", "more than there is", "smaller pages")


def test_errors_of_the_program_itself_are_not_hidden(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr(sys.modules["specsim.serving.generation"], "generate", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(FEW)
