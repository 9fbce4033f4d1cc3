import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specsim.core.errors import InputError
from specsim.simulator import hardware, model
from specsim.simulator.model import names
from specsim.simulator.reproduce import (
    TABLES,
    fast_rounds,
    leviathan,
    reproduction,
    spec_bench,
    vllm_20780,
    vllm_41162,
)
from specsim.simulator.reproduce.reproduction import Calibration, rows
from specsim.simulator.reproduce.served import REQUESTS, Bench, read

APART = ("fast_rounds", "vllm_41162")  # one needs a measurement that may not be kept, one takes a minute
SHIPPED = [name for name in TABLES if name not in APART]
HELD_OUT = {"vllm_20780": (13, 6), "spec_bench": (24, 18)}


@pytest.fixture(scope="module")
def made():
    return {name: reproduction(name)() for name in SHIPPED}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_target_of_a_table_is_reached(made, name):
    assert made[name].targets
    assert [each.name for each in made[name].targets if not each.is_reached] == []


@pytest.mark.parametrize("name", SHIPPED)
def test_a_reproduction_survives_json(made, name):
    value = made[name].to_json()
    assert json.loads(json.dumps(value, allow_nan=False)) == value


@pytest.mark.parametrize("name", HELD_OUT)
def test_numbers_of_cells_and_parameters_match_the_method(made, name):
    result = made[name]
    figures, held_out = HELD_OUT[name]
    assert (len(result.figures), len(result.errors("held out"))) == (figures, held_out)
    assert f"{len(result.parameters)} parameters" in result.method
    assert f"itted to {figures - held_out} cells" in result.method
    assert f"{held_out} held out" in result.method


def test_leviathan_is_exact_where_it_can_be(made):
    assert all(figure.is_as_printed for figure in made["leviathan_table1"].figures)
    expected = [figure for figure in made["leviathan_table4"].figures if figure.quantity == "expected"]
    assert sum(figure.is_as_printed for figure in expected) == 9


def test_a_table_with_a_wrong_figure_is_not_reproduced(monkeypatch):
    true = rows

    def wrong(name):
        table = true(name)
        table[0] |= {"speedup": "2.00"} if name == "leviathan_table1" else {}
        for row in table if name == "vllm_20780" else ():
            row["tpot_ms"] = str(float(row["tpot_ms"]) * (1.05 if row["num_drafts"] == "5" else 1))
        return table

    for module in (leviathan, vllm_20780):
        monkeypatch.setattr(module, "rows", wrong)
    assert not leviathan.table1().targets[0].is_reached
    assert not vllm_20780.reproduce().targets[0].is_reached


def kept(folder, rng):
    """A result of `specsim bench --suite scale` from a GPU with known parameters and 2 % noise."""
    runs = [{"versions": {"gpu": "NVIDIA H200"}}]
    cost = fast_rounds.cost_of({"shape": "llama-3-8b", "runs": runs})
    cost = replace(cost, efficiency=replace(cost.efficiency, bandwidth=0.9, compute=0.6, overlap=0.7, gap=2e-6))
    rows = []
    for tree, config in fast_rounds.TREES.items():
        for requests, length in ((1, 1024), (1, 65536), (4, 4096), (16, 1024), (64, 1024), (64, 4096), (256, 2048)):
            seconds = cost.round(np.full(requests, length), config) * np.exp(0.02 * rng.standard_normal())
            setting = {"requests": requests, "L": length, "tree": tree}
            timings = {"ours": {"median_us": 1e6 * seconds}}
            rows.append({"name": "growth", "setting": setting, "timings": timings})
    path = folder / "bench-scale.json"
    path.write_text(json.dumps({"shape": "llama-3-8b", "runs": runs, "rows": rows}))
    return path


def test_measured_rounds_are_predicted_from_corners_of_the_grid(tmp_path, monkeypatch):
    path = kept(tmp_path, np.random.default_rng(0))
    monkeypatch.setattr(fast_rounds, "kept_file", lambda: path)
    result = fast_rounds.reproduce()
    assert (len(result.errors("fitted")), len(result.errors("held out"))) == (6, 8)
    assert "fitted to 6 cells" in result.method
    assert result.targets[0].is_reached
    assert result.errors("held out").max() < 0.08
    assert result.parameters[0].value == pytest.approx(0.9, rel=0.05)


def test_rounds_on_a_gpu_that_has_no_figures_are_refused(tmp_path, monkeypatch):
    path = kept(tmp_path, np.random.default_rng(0))
    path.write_text(path.read_text().replace("NVIDIA H200", "Radeon"))
    monkeypatch.setattr(fast_rounds, "kept_file", lambda: path)
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("gpu", "Radeon")):
        fast_rounds.reproduce()


def test_sglang_accept_lengths_are_what_their_rows_allow(made):
    _, two, four = made["sglang_6995"].parameters
    assert 1 < two.low <= two.value <= two.high < 2
    assert 1 < four.low <= four.value <= four.high < 5


def test_assisted_generation_has_the_means_of_its_markov_chain():
    drafts, tokens = spec_bench._chain(0.6)
    rng, length, counts, given = np.random.default_rng(0), 5, [], []
    for _ in range(40000):
        accepted = int(np.argmin(np.append(rng.random(length) < 0.6, False)))
        counts.append(length)
        given.append(accepted + 1)
        length = length + 2 if accepted == length else max(1, length - 1)
    assert drafts == pytest.approx(np.mean(counts), rel=0.03)  # 6 standard errors
    assert tokens == pytest.approx(np.mean(given), rel=0.03)


def test_figures_quoted_in_notes_are_those_of_the_commands(made):
    """Figures in papers/ equal those that each command prints below its table."""
    said = {name: " ".join(made[name].notes) for name in ("sglang_6995", "spec_bench")}
    assert re.findall(r"not one graph (\d+) ms longer", said["sglang_6995"]) == ["33"]
    (verifying,) = re.findall(r"(\d+) rows already .* each of (\d+) requests costs (.*?) plain", said["sglang_6995"])
    assert verifying == ("32", "47", "2.8")
    (placed,) = re.findall(r"average: EAGLE (.*?)%, EAGLE-2 (.*?)%, Medusa (.*?)%", said["spec_bench"])
    (alone,) = re.findall(r"tried first, EAGLE (.*?)%, EAGLE-2 (.*?)%", said["spec_bench"])
    assert [round(float(each)) for each in placed] == [3, 6, 10]
    assert [round(float(each)) for each in alone] == [13, 14]


def test_the_best_times_per_token_differ_as_quoted_in_notes(made):
    best = {
        name: min(each.published for each in made["vllm_20780"].figures if each.setting.startswith(name))
        for name in ("eagle1", "eagle3")
    }
    assert round(100 * (1 - best["eagle3"] / best["eagle1"])) == 6


def test_trees_take_the_work_of_methods_that_were_fitted():
    values = {name: free.start for name, free in spec_bench.FREE.items()}
    more = values | {"SpS's own work": 1000.0}
    row = {"gpu": "A100", "model": "Vicuna-7B", "mean_accepted_tokens": "3"}
    slower = {}
    for method in ("EAGLE", "EAGLE-2", "Medusa", "Token Recycling"):
        one, other = (spec_bench.speedup(row | {"method": method}, each) for each in (values, more))
        slower[method] = other / one
    assert slower["EAGLE"] < 0.6
    assert slower["EAGLE-2"] < 0.6
    assert slower["Medusa"] == slower["Token Recycling"] == 1


def test_medusas_heads_are_read_in_rounds_and_in_no_plain_step():
    """Without launch time, four heads of the 33B model take the time of their bytes, 3 % more."""
    values = {name: free.start for name, free in spec_bench.FREE.items()} | {"Token Recycling's own work": 1e-9}
    values |= {"launch, A100's host": 1e-12, "overlap": 1.0}
    row = {"gpu": "A100", "model": "Vicuna-33B", "mean_accepted_tokens": "1", "method": "Medusa"}
    target = model("vicuna-33b-v1.3")
    heads = 4 * (target.hidden_size**2 + target.head_weights) / (target.parameters - target.embedding_weights)
    assert 1 / spec_bench.speedup(row, values) == pytest.approx(1 + heads, rel=0.01)


@pytest.fixture(scope="module")
def served():
    return {(cell.model, cell.temperature, cell.clients): cell for cell in read()}


def test_a_served_cell_has_the_accept_length_of_its_runs(served):
    for key in (("Qwen3 8B", 0, 16), ("GPT-OSS 20B", 0, 16), ("GPT-OSS 20B", 1, 1)):
        bench = Bench.of(served[key])
        metrics = bench.metrics({"gap": 1e-5, "compute": 0.3, "intake": 1e-3, "latency": 1e-3})
        runs = served[key].runs.values()
        assert len(bench.workload) == REQUESTS * key[2]
        assert bench.workload.output_tokens.mean() == pytest.approx(served[key].output_tokens, abs=0.02)
        length = np.mean([run["Spec Decode Accept Length"] for run in runs])
        assert metrics["Spec Decode Accept Length"] == pytest.approx(length, abs=0.01)


def test_one_output_of_one_client_ends_at_39_tokens(served):
    outputs = Bench.of(served["GPT-OSS 20B", 0, 1]).workload.output_tokens
    assert sorted(outputs) == [39] + [128] * 9


def test_a_fit_sees_neither_16_clients_nor_temperature_1(served, monkeypatch):
    seen = []
    monkeypatch.setattr(vllm_41162, "fit", lambda _, measured, *__, **___: seen.append(measured) or Calibration((), ()))
    benches = [Bench(cell, None, None) for key, cell in served.items() if key[0] == "Qwen3 8B"]
    vllm_41162._fit(benches, {})
    cells = {label.rsplit(", ", 2)[0] for label in seen[0]}
    assert cells == {"Qwen3 8B, T 0, 1 client", "Qwen3 8B, T 0, 64 clients"}
    assert len(seen[0]) == 2 * 2 * len(vllm_41162.QUANTITIES)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [  # as published with the models
        ("llama-3-8b", 8.03, None),
        ("llama-2-70b", 68.98, None),
        ("llama-3-70b", 70.55, None),
        ("qwen3-8b", 8.19, None),
        ("gpt-oss-20b", 20.9, 3.6),
        ("glm-4.7-flash", 29.9, None),
        ("vicuna-33b-v1.3", 32.5, None),
        ("vicuna-68m", 0.068, None),
    ],
)
def test_models_weigh_what_was_published(name, billions, active):
    assert model(name).parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert active is None or model(name).active_parameters / 1e9 == pytest.approx(active, rel=0.01)


def test_gpt_oss_in_four_bits_is_as_large_as_its_checkpoint():
    assert model("gpt-oss-20b").bytes == pytest.approx(13.76e9, rel=0.005)
    windows = [group.window for group in model("gpt-oss-20b").layers]
    assert windows == [128, None] * 12


def test_latent_attention_keeps_one_vector_a_token():
    assert model("glm-4.7-flash").kv_bytes_per_token == 47 * 576 * 2


def test_every_figure_and_every_model_has_its_source():
    folder = Path(fast_rounds.__file__).parents[1]
    with (folder / "hardware.csv").open() as file:
        assert all(row["source"].startswith("https://") for row in csv.DictReader(file))
    for name in names():
        assert model(name).parameters > 0
    assert all("https://huggingface.co/" in path.read_text() for path in (folder / "models").glob("*.json"))
    assert [hardware(name).name for name in ("h20", "A100-80gb-sxm")] == ["H20", "A100-80GB-SXM"]


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
        ({"hidden_size": None}, "hidden_size", None),
        ({"num_hidden_layers": -1}, "num_hidden_layers", -1),
        ({"num_key_value_heads": 3}, "num_key_value_heads", 3),
        ({"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 8}, "num_experts_per_tok", 8),
        ({"sliding_window": "wide"}, "sliding_window", "wide"),
        ({"sliding_window": 4, "layer_types": ["full_attention"]}, "layer_types", "1 layers"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config", "hqq"),
    ],
)
def test_an_impossible_config_is_refused_by_its_field(change, name, value):
    shape = {"hidden_size": 4096, "vocab_size": 100, "num_hidden_layers": 2, "num_attention_heads": 32}
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == (name, value)):
        model(shape | {"model_type": "mistral", "intermediate_size": 11008} | change)


@pytest.mark.parametrize(
    ("name", "counts"),
    [("llama-2-70b", (1, 2, 4, 8, 16, 32, 64)), ("glm-4.7-flash", (1, 2, 4)), ("vicuna-68m", (1, 2, 3, 4, 6, 12))],
)
def test_a_model_divides_among_gpus_by_heads_and_feed_forwards(name, counts):
    assert model(name).splits == counts


def test_kv_heads_are_split_or_copied_evenly():
    shape = {"hidden_size": 1536, "vocab_size": 100, "num_hidden_layers": 2, "intermediate_size": 8960}
    shape["model_type"] = "llama"
    assert model(shape | {"num_attention_heads": 12, "num_key_value_heads": 2}).splits == (1, 2, 4)
    assert model(shape | {"num_attention_heads": 12, "num_key_value_heads": 3}).splits == (1,)
    assert model(shape | {"num_attention_heads": 12, "intermediate_size": 36}).splits == (1, 2, 3, 4, 6, 12)


def test_an_unknown_model_table_or_file_is_refused(tmp_path):
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("model", "gpt-9")):
        model("gpt-9")
    for text in ("[]", "[" * 100_000):
        (path := tmp_path / "config.json").write_text(text)
        with pytest.raises(
            InputError, check=lambda error, path=path: (error.name, error.value) == ("model", str(path))
        ):
            model(tmp_path)
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("table", "x")):
        reproduction("x")
