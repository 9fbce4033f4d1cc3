"""Sections of a round: those that one graph captures, and the frames that they run in."""

from dataclasses import replace

import pytest
import torch

from specsim import SpecConfig
from specsim.bench.scene import prefilled
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.fast.runtime.graph import Tape
from specsim.fast.sections import RoundPhases, build_tree, extend, forward, gather, start, step, verify
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.generation import load_engine

PROMPTS = [[5, 17, 3, 40, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [30] * 3]
CHAIN = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, page_size=4)
TREE = SpecConfig(topk=3, num_steps=3, num_draft_tokens=7, page_size=4)
LANES = SpecConfig(topk=3, num_steps=3, num_draft_tokens=10, page_size=4, verifier="multi_round")
MOVING = replace(TREE, release="round")
DRAFT = (start, step, step, build_tree)
VERIFY = (forward, verify, gather)
EXTEND = (extend,)


@pytest.mark.parametrize("graph", ["phase", "round"])
@pytest.mark.parametrize("config", [TREE, MOVING])
def test_graphs_of_a_round_hold_its_sections_in_order(graph, config):
    assert sum(RoundPhases.of(graph, config).captured, ()) == DRAFT + VERIFY + EXTEND


@pytest.mark.parametrize("graph", ["step", "phase", "round"])
def test_no_graph_continues_where_pages_move(graph):
    runs = RoundPhases.of(graph, MOVING).captured
    assert len(runs) >= 3
    for run in runs:
        assert build_tree not in run[1:]
        assert gather not in run[1:]


def test_plain_decoding_records_no_graph_of_nothing():
    assert RoundPhases.of("step", SpecConfig.plain()).captured[0] == (build_tree,)


def scene_of(device, graph="eager", bucket=None):
    pair = synthetic_pair("eagle3")
    options = EngineOptions("fast", torch.float32, device, graph, bucket)
    return prefilled(pair, load_engine(pair, TREE, options), PROMPTS)


def test_buffers_of_a_replaced_pool_are_freed(device):
    scene = scene_of(device)
    frames = scene.engine._frames
    frames.load(scene.batch, scene.pools)
    frames.load(scene.batch.filter(torch.zeros(1, dtype=torch.int64, device=device)), scene.pools)
    assert sorted(frame.bucket for frame in frames) == [1, 4]
    others = scene_of(device)
    frames.load(others.batch, others.pools)
    assert [frame.pools for frame in frames] == [others.pools]


@pytest.mark.parametrize(
    ("graph", "sections"),
    [("eager", []), ("phase", [DRAFT, VERIFY, EXTEND]), ("round", [DRAFT + VERIFY + EXTEND])],
)
def test_a_new_frame_has_the_graphs_of_its_mode(graph, sections, device):
    scene = scene_of(device, graph)
    frame = scene.engine._frames.load(scene.batch, scene.pools)
    assert list(frame.recordings) == [(run, False) for run in sections]
    assert scene.engine._frames.load(scene.batch, scene.pools) is frame


def test_a_batch_above_the_bucket_is_refused(device):
    scene = scene_of(device, bucket=2)
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("bucket", 2)):
        scene.engine._frames.load(scene.batch, scene.pools)
    assert list(scene.engine._frames) == []


def frame_of(kind, config, device):
    """Load two requests into a frame: (frames, frame, pools)."""
    pair = synthetic_pair(kind)
    engine = load_engine(pair, config, EngineOptions("fast", torch.float32, device, "eager"))
    scene = prefilled(pair, engine, PROMPTS[:2])
    frames = engine._frames
    return frames, frames.load(scene.batch, scene.pools), scene.pools


@torch.inference_mode()
def steps_of(frames, frame):
    return Tape.of(lambda: [section(frames.models, frame) for section in DRAFT + VERIFY + EXTEND])


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
    frames, frame, _ = frame_of(kind, config, device)
    tape = steps_of(frames, frame)
    assert set(tape.framework_operations) <= {"aten.linear.default", "aten.copy_.default"}
    assert len([step for step in tape.steps if step.is_kernel]) > 20


@pytest.mark.parametrize("config", [TREE, LANES])
def test_a_snapshot_of_lanes_adds_two_copies_to_a_round(config, device):
    """The copies are at the end of the draft phase.

    Without a snapshot none is captured.
    """
    frames, frame, pools = frame_of("eagle3", config, device)
    recorded = []
    for _ in range(2):
        recorded.append([step.name for step in steps_of(frames, frame).steps])
        pools.draft.keep_snapshot()
    without, with_snapshot = recorded
    end = without.index("_locations_kernel") - 1
    assert without[end].startswith("aten.new_empty")  # what that kernel writes
    assert with_snapshot == [*without[:end], "aten.copy_.default", "aten.copy_.default", *without[end:]]
