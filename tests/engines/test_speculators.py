"""Heads in the layout of speculators: its classes read ours, we read what they save, and both draft alike."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specsim.core.pair import Pair
from specsim.correctness.parity import PrefillScene, Tokens
from specsim.models.checkpoint import load_drafter
from specsim.models.checkpoint.drafter_format import drafter_layout
from specsim.models.convert import convert
from specsim.models.shipped import TINY
from specsim.models.synthetic_pair import synthetic_pair

TARGET = synthetic_pair("eagle3", num_layers=6).target
TABLES = {"embed_tokens": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
TOKENS = Tokens((5, 9, 31, 7, 9, 22, 3), 11)
# Phases whose rows make the first drafts; of P-EAGLE all of them, each in a call of its own.
DRAFTING = {"eagle3": "extend", "p-eagle": "extend", "dflash": "draft1", "dspark": "draft1"}
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


@pytest.mark.parametrize("kind", CLASSES)
def test_heads_that_it_saves_load_without_options(kind, saved):
    """Ids of features name inputs, as its own code reads them, and blocks are causal in layers with a window."""
    head = load_drafter(saved / kind, TARGET.config)
    assert (head.config.feature_layers, head.config.model.num_layers) == ((1, 3, 5), 2)
    assert head.config.model.sliding_windows == ((None, None) if kind == "p-eagle" else (16, None))
    assert getattr(head.config, "causal_layers", (0,)) == (0,)
    assert set(drafter_layout(head.config).required) <= set(head.tensors)


@pytest.fixture(scope="module")
def logits(engine_python, saved) -> dict[str, torch.Tensor]:
    """Logits of the first drafts after a prompt, by kind, as speculators computes them."""
    features = scene("eagle3", saved).trace()["target/features"].contiguous()
    tables = {name: TARGET.tensors[key].double() for name, key in TABLES.items()}
    tokens = {"token_ids": torch.tensor(TOKENS.ids), "next_token": torch.tensor([TOKENS.next_id])}
    save_file({"features": features, **tables, **tokens}, saved / "scene.safetensors")
    speculators(engine_python, "run", saved)
    return {kind: load_file(saved / f"{kind}.safetensors")["logits"] for kind in CLASSES}


def scene(kind: str, saved: Path) -> PrefillScene:
    """Run the reference over the prompt, with a head that speculators saved."""
    pair = Pair(TARGET, load_drafter(saved / kind, TARGET.config), None, kind)
    return PrefillScene(pair, TOKENS, torch.float64)


@pytest.mark.parametrize("kind", CLASSES)
def test_the_reference_drafts_with_its_logits(kind, saved, logits):
    """Norms and angles of speculators are float32, so that the logits differ by some 1e-7 of their size."""
    ours = [
        tensor
        for name, tensor in scene(kind, saved).trace().items()
        if name.endswith("/lm_head") and name.startswith(DRAFTING[kind])
    ]
    theirs = logits[kind]
    assert torch.cat(ours).shape == theirs.shape
    assert float((torch.cat(ours) - theirs).abs().max()) < 1e-6 * float(theirs.abs().max())
