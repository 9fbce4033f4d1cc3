"""Heads in the layout of speculators: its classes read ours, and we read what they save."""

import json
import subprocess
from pathlib import Path

import pytest

from specsim.models.checkpoint import load_drafter
from specsim.models.checkpoint.drafter_format import drafter_layout
from specsim.models.convert import convert
from specsim.models.shipped import TINY
from specsim.models.synthetic_pair import synthetic_pair

CLASSES = {
    "eagle3": "Eagle3DraftModel",
    "p-eagle": "PEagleDraftModel",
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
}


def speculators(python: Path, action: str, folder: Path) -> dict:
    """Run speculators_run.py."""
    script = Path(__file__).with_name("speculators_run.py")
    done = subprocess.run([python, script, action, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def written(engine_python, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("written")
    for kind in CLASSES:
        convert(TINY / "target", TINY / kind, folder / kind, "speculators")
    return speculators(engine_python, "read", folder)


@pytest.mark.parametrize("kind", CLASSES)
def test_its_classes_read_converted_heads(kind, written):
    assert written[kind] == {"class": CLASSES[kind], "wrong": [], "unset": []}


@pytest.fixture(scope="module")
def saved(engine_python, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    speculators(engine_python, "save", folder)
    return folder


# speculators 0.9 trains blocks of several layers with a causal window, which are not read yet; one layer has none.
@pytest.mark.parametrize("kind", CLASSES)
def test_heads_that_it_saves_load_without_options(kind, saved):
    """Ids of features name inputs, as its own code reads them."""
    target = synthetic_pair("eagle3", num_layers=6).target.config
    head = load_drafter(saved / kind, target)
    assert head.config.feature_layers == (1, 3, 5)
    assert set(drafter_layout(head.config).required) <= set(head.tensors)
