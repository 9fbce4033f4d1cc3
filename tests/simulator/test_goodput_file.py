"""The file of the goodput policy that a plan writes: its seconds, its settings, and its readers."""

import json

import numpy as np
import pytest

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError
from specsim.core.policies.named import named_policy
from specsim.simulator.candidates import candidates
from specsim.simulator.cell import Cell
from specsim.simulator.engine_files import deepest, goodput_file
from specsim.simulator.plan import plan

LOAD = ["--requests", "12", "--concurrency", "4", "--prompt-tokens", "20-40", "--output-tokens", "30"]
CELL = Cell(requests=12, concurrency=4, prompt_tokens=30, output_tokens=30, max_running=48)
CHAINS = tuple(((share,)) for share in (0.8, 0.7, 0.6, 0.5))


def planned(cell: Cell):
    return plan(cell, configs=candidates(cell), replicates=1)


def chain_cell() -> Cell:
    return Cell(requests=12, concurrency=4, prompt_tokens=30, output_tokens=30, max_running=48, shares=CHAINS)


def test_seconds_are_those_of_the_cost_model():
    cell = chain_cell()
    value = goodput_file(planned(cell))
    assert value["batch_sizes"] == [1, 2, 4, 8, 16, 32, 48]
    assert list(value["seconds"]) == ["0", "1", "3", "4"]
    option = cell.option(SpecConfig(1, 4))
    cost = cell.serving(option).cost(option)
    for place, size in enumerate(value["batch_sizes"]):
        for steps in (0, 3):
            config = SpecConfig(1, steps) if steps else SpecConfig.plain()
            exact = cost.round(np.full(size, 45), config)
            assert value["seconds"][f"{steps}"][place] == pytest.approx(exact, rel=1e-3)


def test_a_tree_keeps_its_size_with_other_steps():
    found = planned(CELL)
    best = found.best.config
    assert best.topk > 1
    config = deepest(found)
    assert (config.topk, config.num_draft_tokens) == (best.topk, best.num_draft_tokens)
    assert config.num_steps >= best.num_steps
    named = named_policy(goodput_file(found), config)
    assert {each.topk for each in named.settings if not each.is_plain} == {best.topk}
    assert named.settings.widest == config


def test_a_plan_without_drafts_has_no_file():
    found = plan(CELL, configs=[SpecConfig.plain()], replicates=1)
    with pytest.raises(InputError, check=lambda error: error.name == "num_steps"):
        goodput_file(found)


def test_the_commands_read_what_plan_writes(command, tmp_path):
    path = tmp_path / "goodput.json"
    words = ["--accept-rates", "0.8,0.7,0.6"]
    ended = command("plan", *LOAD, *words, "--replicates", "1", "--goodput-file", str(path))
    assert ended.status == 0
    assert f"specsim: --topk 1 --num-steps 3 --adaptive {path}" in ended.out
    out = tmp_path / "out.json"
    assert command("simulate", *LOAD, *words, "--adaptive", str(path), "--json", str(out)).status == 0
    assert json.loads(path.read_text())["policy"] == "goodput"
    assert command("simulate", *LOAD, *words, "--num-steps", "2", "--adaptive", str(path)).refuses("num_steps", 2)


def test_a_file_of_another_kind_is_refused(command, tmp_path):
    path = tmp_path / "goodput.yaml"
    ended = command("plan", *LOAD, "--replicates", "1", "--goodput-file", str(path))
    assert ended.refuses("goodput_file", str(path))
    assert list(tmp_path.iterdir()) == []
