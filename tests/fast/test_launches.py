"""Launches of a round's sections: what they leave to torch, and what a snapshot adds."""

from dataclasses import replace

import pytest
import torch

from specsim import SpecConfig
from specsim.bench.scene import prefilled
from specsim.core.engine_options import EngineOptions
from specsim.fast.runtime.graph import Tape
from specsim.fast.runtime.sections import ROUND
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.generation import load_engine

PROMPTS = [[5, 17, 3, 40, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
CHAIN = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, page_size=4)
TREE = SpecConfig(topk=3, num_steps=3, num_draft_tokens=7, page_size=4)
LANES = SpecConfig(topk=3, num_steps=3, num_draft_tokens=10, page_size=4, verifier="multi_round")


def frame_of(kind, config, device):
    """Load two requests into a frame: (launches, frame, pools)."""
    pair = synthetic_pair(kind)
    engine = load_engine(pair, config, EngineOptions("fast", torch.float32, device, "eager"))
    scene = prefilled(pair, engine, PROMPTS)
    frames = engine._frames
    return frames.launches, frames.load(scene.batch, scene.pools), scene.pools


@torch.inference_mode()
def steps_of(launches, frame):
    return Tape.of(lambda: launches.run(frame, ROUND))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("eagle", TREE),
        ("eagle3", TREE),
        ("eagle3", SpecConfig.plain(page_size=4)),
        ("eagle3", LANES),
        ("eagle", replace(CHAIN, verifier="gumbel")),
    ],
)
def test_inside_a_round_torch_runs_linear_layers_and_copies_only(kind, config, device):
    launches, frame, _ = frame_of(kind, config, device)
    tape = steps_of(launches, frame)
    assert set(tape.framework_operations) <= {"aten.linear.default", "aten.copy_.default"}
    assert len([step for step in tape.steps if step.is_kernel]) > 20


@pytest.mark.parametrize("config", [TREE, LANES])
def test_a_snapshot_of_lanes_adds_two_copies_to_a_round(config, device):
    """The copies are at the end of the draft phase.

    Without a snapshot none is captured.
    """
    launches, frame, pools = frame_of("eagle3", config, device)
    recorded = []
    for _ in range(2):
        recorded.append([step.name for step in steps_of(launches, frame).steps])
        pools.draft.keep_snapshot()
    without, kept = recorded
    end = without.index("_locations_kernel") - 1
    assert without[end].startswith("aten.new_empty")  # what that kernel writes
    assert kept == [*without[:end], "aten.copy_.default", "aten.copy_.default", *without[end:]]
