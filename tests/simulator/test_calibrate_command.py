"""specsim calibrate: from a benchmark file to a profile, and from there to a plan."""

import json

import numpy as np
import pytest

from .client_files import VLLM


@pytest.fixture
def table(known_server, tmp_path):
    rng = np.random.default_rng(2)
    path = tmp_path / "table.csv"
    lines = ["batch,num_steps,accept_length,tokens_per_s"]
    for batch in (1, 16, 64):
        for steps in (0, 3):
            cell = known_server().cell(batch, steps, rng)
            lines.append(f"{batch},{steps},{cell.accept_length},{cell.figures['decode_tokens_per_s']:.1f}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_benchmark_file_becomes_a_plan(command, table, tmp_path):
    out, result, planned = (tmp_path / name for name in ("server.json", "fit.json", "plan.json"))
    lengths = ("--prompt-tokens", "512", "--output-tokens", "256")
    ended = command("calibrate", str(table), *lengths, "--name", "mine", "--out", str(out), "--json", str(result))
    assert ended.status == 0
    assert "These cells do not determine" in " ".join(ended.out.split())
    assert "each batch size predicted from the others" in ended.out
    value = json.loads(result.read_text())
    made_of = value["profile"]["provenance"]
    assert (made_of["model"], made_of["hardware"], made_of["cells"]) == ("llama-3.1-8b", "H100-SXM", 6)
    assert [each["path"] for each in made_of["files"]] == ["table.csv"]
    assert [each["batch"] for each in value["left_out"]] == [1, 16, 64]
    assert json.loads(out.read_text()) == value["profile"]
    load = ("--requests", "12", "--concurrency", "4", "--prompt-tokens", "20-40", "--output-tokens", "30")
    words = ("--replicates", "1", "--profile", str(out), "--json", str(planned))
    ended = command("plan", *load, *words)
    assert "Simulated with profile mine" in " ".join(ended.out.split())
    plan = json.loads(planned.read_text())
    assert plan["cell"]["profile"] == str(out)
    assert "of profile" in ended.out
    lengths = [1 + sum(np.cumprod([share for (share,) in plan["cell"]["shares"][:steps]])) for steps in (3,)]
    assert lengths == pytest.approx([2.5], rel=1e-3)  # as in the file
    best = plan["candidates"][0]
    assert best["band"][0] < best["over_plain"] < best["band"][1]


def test_files_and_published_exclude_each_other(command, table):
    assert command("calibrate").refuses("file", "none")
    assert command("calibrate", str(table), "--published").refuses("file", str(table))


def test_bad_files_and_settings_are_refused(command, table, tmp_path):
    assert command("calibrate", str(table)).refuses("prompt_tokens", "not given")
    assert command("calibrate", str(tmp_path / "no.json")).refuses("file", str(tmp_path / "no.json"))
    lengths = ("--prompt-tokens", "512", "--output-tokens", "256")
    assert command("calibrate", str(table), *lengths, "--drafter", "medusa").refuses("drafter", "medusa")
    missing = tmp_path / "missing" / "server.json"
    assert command("calibrate", str(table), *lengths, "--out", str(missing)).status == 2


def test_a_file_of_another_model_is_said_or_refused(command, tmp_path):
    path = tmp_path / "served.json"
    doubt = "served.json names the model org/other-moe, and the profile is of llama-3.1-8b"
    for name, status, says in (
        ("org/other-moe", 0, doubt),
        ("meta-llama/Llama-3.1-8B-Instruct", 0, ""),
        ("meta-llama/Llama-2-70b-chat-hf", 2, "so give --model llama-2-70b"),
    ):
        for value in (VLLM | {"model_id": name}, VLLM | {"server_info": {"decode": [{"model_path": name}]}}):
            path.write_text(json.dumps(value))
            ended = command("calibrate", str(path), "--num-steps", "0")
            assert ended.status == status
            assert says in " ".join((ended.out + ended.err).split())
            assert ("names the model" in ended.out) == (says == doubt)
