"""The page of a user's own server shows what its commands print and write, run in their order."""

import csv
import json
import re
import shlex

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from specsim.maintain import outputs
from specsim.simulator.engine_files import schema

PAGE = outputs.GUIDE / "own-server.md"
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


@pytest.fixture(scope="module")
def ran(printed) -> tuple[str, list[str], dict[str, str]]:
    """The page with what its commands print now, the commands, and the files that they wrote."""
    commands: list[str] = []
    files: dict[str, str] = {}

    def print_of(command, folder):
        commands.append(command)
        text = printed(command, folder, allowed=(0,))
        files.update({each.name: each.read_text() for each in folder.glob("*.json")})
        return text

    return outputs.with_outputs(PAGE.read_text(encoding="utf-8"), print_of), commands, files


def numbers(text: str) -> list[float]:
    return [float(each.replace(",", "")) for each in NUMBER.findall(text)]


def test_the_page_shows_what_its_commands_print(ran):
    """Else: python -m specsim.maintain.outputs notebooks/guide/own-server.md."""
    page = PAGE.read_text(encoding="utf-8")
    assert NUMBER.sub("#", page) == NUMBER.sub("#", ran[0])
    assert numbers(page) == pytest.approx(numbers(ran[0]), rel=0.05, abs=2)


def test_the_path_leads_from_a_benchmark_to_an_engine(ran):
    _, commands, files = ran
    first, *_, last = [shlex.split(command) for command in commands]
    assert first[1:3] == ["calibrate", "cells.csv"]
    assert last[1] == "plan"
    assert "--accept-lengths" in last
    plans = [command for command in commands if command.startswith("specsim plan")]
    assert all("--profile mine.json" in command for command in plans)
    assert {"mine.json", "steps.json", "better.json"} <= set(files)
    for name in ("steps.json", "better.json"):
        Draft202012Validator(schema("sglang")).validate(json.loads(files[name]))


def test_the_schedule_is_nearly_the_best_measured_one(ran):
    """The losses at the batch sizes of the published table, whose other 36 cells no calibration has seen."""
    page, _, files = ran
    measured: dict[int, dict[int, float]] = {}
    with (outputs.ROOT / "specsim" / "simulator" / "tables" / "sglang_22246.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            measured.setdefault(int(row["batch"]), {})[int(row["num_steps"])] = float(row["tokens_per_s"])
    steps = {int(low): entry["candidate_steps"][0] for low, entry in json.loads(files["steps.json"]).items()}
    losses = []
    for batch, speeds in measured.items():
        chosen = steps[max(low for low in steps if low <= batch)]
        losses.append(max(speeds.values()) / speeds[chosen] - 1)
    said = re.search(
        r"lose ([\d.]+)% of\s+throughput on average to the best measured ones, and at most ([\d.]+)%", page
    )
    assert said is not None
    assert [float(each) for each in said.groups()] == [
        round(100 * float(each), 1) for each in (np.mean(losses), max(losses))
    ]
