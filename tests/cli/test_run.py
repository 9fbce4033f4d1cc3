"""specsim run: files of requests, results, traces, comparisons and interrupted runs."""

import errno
import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

import specsim.core.provenance
import specsim.models.shipped
from specsim.core.errors import InputError
from specsim.correctness.invariance.solo import SoloResult

pytestmark = pytest.mark.usefixtures("shipped")
LINES = (
    '{"id": 3, "prompt": "def f(x):", "max_new_tokens": 6}',
    '{"id": 5, "prompt": "def f(x):\\n    return", "arrival": 1, "max_new_tokens": 4, "temperature": 1, "seed": 2}',
    '{"id": 6, "prompt": "x", "continues": 3, "max_new_tokens": 3}',
    '{"id": 7, "prompt": "def g():", "abort_at": 2, "max_new_tokens": 50}',
)
CHAIN = ("--topk", "1", "--num-draft-tokens", "4")
RATES = ("--accept-rates", "1,0.5,0.5")
SYNTHETIC = {"synthetic": True, "rates": [1.0, 0.5, 0.5], "schedule": "minimum-variance", "seed": 0}


@pytest.fixture
def serve(call, tmp_path):
    """Run a file of these lines from a folder of its own: (exit status, stdout, stderr)."""

    def serve(*arguments: str, lines=LINES) -> tuple[int, str, str]:
        file = tmp_path / "requests" / "lines.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(lines))
        return call("run", "--requests", str(file), *arguments)

    return serve


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "requests"]


def test_json_of_run_says_where_it_comes_from(tiny, call, serve, tmp_path):
    file, lines = tmp_path / "out.json", tmp_path / "requests" / "lines.jsonl"
    head = json.loads((tiny / "eagle3" / "config.json").read_text())
    fields = [f"{name}={head[name]}" for name in ("eagle_aux_hidden_state_layer_ids", "draft_vocab_size")]
    given = ("--slots", "700", "--prefix-cache", "--topk", "2", "--draft-field", fields[0], "--draft-field", fields[1])
    assert serve(*given, "--max-running", "8", "--json", str(file))[::2] == (0, "")
    first = json.loads(file.read_text())
    assert first["file"] == str(lines)
    command = f"specsim run --requests {lines} --slots 700 --prefix-cache --draft-field"
    assert first["command"] == f"{command} '{fields[0]}' --draft-field {fields[1]} --topk 2"
    assert first["versions"] == specsim.core.provenance.versions("cpu")
    assert datetime.fromisoformat(first["date"]) <= datetime.now(UTC)
    assert call(*shlex.split(first["command"])[1:], "--json", str(file))[0] == 0
    second = json.loads(file.read_text())
    assert second["command"] == first["command"]
    assert [each["token_ids"] for each in second["outputs"]] == [each["token_ids"] for each in first["outputs"]]


def test_json_of_run_says_what_fast_ran_on(serve, tmp_path, device):
    pytest.importorskip("triton")
    file, few = tmp_path / "out.json", ('{"prompt": "x", "max_new_tokens": 2}',)
    two = ("--max-running", "2", "--bucket", "2")  # the fewest that the buffers may hold
    assert serve("--impl", "fast", "--release", "round", *two, "--json", str(file), lines=few)[::2] == (0, "")
    result = json.loads(file.read_text())
    assert [result[name] for name in ("impl", "device", "graph", "bucket")] == ["fast", device, "phase", 2]


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requests", "trace.parquet"]


def test_run_compares_four_ways(serve, tmp_path, monkeypatch):
    file = tmp_path / "out.json"
    status, out, err = serve("--compare", "--slots", "700", "--chunk-tokens", "8", "--json", str(file))
    assert (status, err) == (0, "")
    assert out.count("4 of 4") == 4
    result = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert result["is_equal"] is True
    assert [mode["serving"]["num_slots"] for mode in result["modes"]] == [700] * 4
    different = SoloResult("different", "request 3: not what it was")
    monkeypatch.setattr("specsim.correctness.invariance.solo.check_request", lambda *_: different)
    status, out, err = serve("--compare", "--json", str(file))
    assert (status, err) == (1, "")
    assert "NOT equal" in out
    assert json.loads(file.read_text())["is_equal"] is False


def test_a_comparison_of_no_request_fails(serve, tmp_path):
    """Every request is rejected, as it never fits into the pool."""
    file = tmp_path / "out.json"
    status, out, err = serve("--compare", "--slots", "16", "--page-size", "1", "--json", str(file))
    assert (status, err) == (1, "")
    assert "NOT compared" in out
    assert json.loads(file.read_text())["is_equal"] is False


def test_a_shape_reads_no_text(call, serve, shape, assert_one_sentence):
    assert_one_sentence(serve("--shape", str(shape)), "requests")
    assert_one_sentence(call("run", "--shape", str(shape)), "requests")


def test_bad_lines_of_a_request_file(serve, tmp_path, assert_one_sentence):
    lines = (*LINES, '{"prompt": 5}', '{"id": 3, "prompt": "x"}')
    stopped = serve("--json", str(tmp_path / "out.json"), lines=lines)
    assert_one_sentence(stopped, "requests")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requests"]
    assert_one_sentence(serve(lines=(LINES[0], LINES[0])), "requests")
    status, out, err = serve("--skip-bad-lines", "--json", str(tmp_path / "out.json"), lines=lines)
    assert (status, err) == (0, "")
    assert "Line 5 is skipped: not a line whose prompt is a text (token ids: prompt_ids), not 5." in out
    assert [each["line"] for each in json.loads((tmp_path / "out.json").read_text())["skipped"]] == [5, 6]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("--schedule later", "schedule"),
        ("--schedule overlap --release round", "schedule"),
        ("--slots 15", "slots"),
        ("--max-running 0", "max_running"),
        ("--chunk-tokens 0", "chunk_tokens"),
        ("--preemption oldest", "preemption"),
        ("--topk 0", "topk"),
        ("--drafter none --topk 2", "topk"),
        ("--dtype int8", "dtype"),
        ("--impl quick", "impl"),
        ("--max-len 513", "max_len"),
        ("--requests {tmp}/missing", "requests"),
        ("--requests {tmp}", "requests"),
        ("--requests {tmp}/empty", "requests"),
        ("--compare --release round", "release"),
        ("--compare --dtype bfloat16", "dtype"),
        ("--compare --schedule overlap", "schedule"),
        ("--compare --prefix-cache", "prefix_cache"),
        ("--compare --accept-rates 1,1,1", "accept_rates"),
        ("--compare --trace {tmp}/x", "trace"),
        ("--json {tmp}", "json"),
        ("--trace {tmp}", "trace"),
        ("--trace {tmp}/missing/x", "trace"),
        ("--json {tmp}/x --trace {tmp}/x", "json"),
    ],
)
def test_bad_input_of_run(call, bad_files, arguments, name, assert_one_sentence):
    if "--trace" in arguments and "--compare" not in arguments:
        pytest.importorskip("pyarrow")
    before = sorted(bad_files.rglob("*"))
    result = call("run", *arguments.format(tmp=bad_files).split(" "))
    assert_one_sentence(result, name)
    assert sorted(bad_files.rglob("*")) == before


def test_a_trace_without_pandas_is_refused_before_the_run(serve, tmp_path, monkeypatch, assert_one_sentence):
    monkeypatch.setitem(sys.modules, "pandas", None)
    result = serve("--trace", str(tmp_path / "trace.parquet"))
    assert_one_sentence(result, "trace")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requests"]


def test_buffers_of_fewer_requests_than_may_run(serve, assert_one_sentence):
    pytest.importorskip("triton")
    result = serve("--impl", "fast", "--bucket", "2")
    assert_one_sentence(result, "bucket")


@pytest.mark.parametrize("error", [KeyboardInterrupt, InputError("num_slots", 1, "more")])
def test_a_run_that_is_cut_short_leaves_no_files(serve, tmp_path, monkeypatch, error):
    def stop(*_):
        raise error

    monkeypatch.setattr("specsim.serving.scheduler.Scheduler.end_step", stop)
    status, out, _ = serve("--json", str(tmp_path / "out.json"))
    assert (status, out) == (130 if error is KeyboardInterrupt else 2, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requests"]


def test_a_trace_that_cannot_be_written_costs_nothing_else(serve, tmp_path, monkeypatch, assert_one_sentence):
    pytest.importorskip("pyarrow")
    write = Path.write_bytes

    def fill(path: Path, data: bytes) -> int:
        if path.parent == tmp_path and data.startswith(b"PAR1"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", fill)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    result = serve("--trace", str(tmp_path / "out.parquet"), "--json", str(tmp_path / "out.json"))
    assert "audits accounted for" in result[1]
    assert_one_sentence((result[0], "", result[2]), "trace")
    assert json.loads((tmp_path / "out.json").read_text())["outputs"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "requests", "temporary"]
    assert [path.suffix for path in (tmp_path / "temporary").iterdir()] == [".parquet"]


@pytest.mark.parametrize("changes", [pytest.param("", marks=pytest.mark.whole), "--num-steps 3 --page-size 16"])
def test_a_preset_and_the_options_that_change_it(serve, tmp_path, changes):
    """Both schedules and both implementations give the same tokens."""
    outputs = []
    for mode in ("", "--schedule overlap", "--impl fast --graph round"):
        file = tmp_path / "out.json"
        options = ("--preset", "naive-eagle", *changes.split(), *mode.split(), "--json", str(file))
        assert serve(*options)[::2] == (0, "")
        result = json.loads(file.read_text())
        config = [result["config"][name] for name in ("topk", "num_steps", "num_draft_tokens", "page_size")]
        assert config == ([1, 3, 4, 16] if changes else [1, 1, 2, 1])
        outputs.append([output["token_ids"] for output in result["outputs"][:3]])
    assert outputs == outputs[:1] * 3


def test_a_command_with_a_preset_is_written_without_it(serve, tmp_path):
    """The options stand for themselves, also those that set a default again."""
    written = []
    for options in (("--preset", "naive-eagle", "--num-steps", "3"), ("--topk", "1", "--page-size", "1")):
        assert serve(*options, "--json", str(tmp_path / "out.json"))[::2] == (0, "")
        written.append(json.loads((tmp_path / "out.json").read_text())["command"])
    assert shlex.split(written[0])[4:] == shlex.split(written[1])[4:] == ["--page-size", "1", "--topk", "1"]


def test_an_adaptive_server_counts_rounds_by_setting(serve, tmp_path):
    file = tmp_path / "policy.json"
    file.write_text(json.dumps({"1": {"candidate_steps": [2, 0]}, "update_interval": 1, "warmup_batches": 0}))
    outs = []
    for options in (("--adaptive", str(file)), ("--drafter", "none")):
        outs.append(tmp_path / f"{len(outs)}.json")
        status, _, err = serve(*options, "--json", str(outs[-1]), lines=LINES[:1])
        assert (status, err) == (0, "")
    switching, plain = (json.loads(out.read_text()) for out in outs)
    assert [each["token_ids"] for each in switching["outputs"]] == [each["token_ids"] for each in plain["outputs"]]
    adaptive = switching["adaptive"]
    assert sum(adaptive["rounds_by_setting"]) == switching["totals"]["rounds"]
    steps = [each["num_steps"] for each in adaptive["policy"]["settings"]]
    assert steps == [0, 2]
    assert {record["setting"] for record in switching["trace"]["records"] if record["decoded"]} <= {0, 1}
    assert plain["adaptive"] is None
    assert serve("--adaptive", str(file), "--compare")[0] == 2
