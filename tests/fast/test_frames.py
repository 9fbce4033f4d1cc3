"""Frames by bucket: their captured graphs, and the pools that they are over."""

import pytest
import torch

from specsim import SpecConfig
from specsim.bench.scene import prefilled
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.fast.runtime.sections import DRAFT_PHASE, EXTEND_PHASE, ROUND, VERIFY_PHASE
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.generation import load_engine

PROMPTS = [[5, 17, 3, 40, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [30] * 3]
TREE = SpecConfig(topk=3, num_steps=3, num_draft_tokens=7, page_size=4)


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
    [("eager", []), ("phase", [DRAFT_PHASE, VERIFY_PHASE, EXTEND_PHASE]), ("round", [ROUND])],
)
def test_a_new_frame_has_the_graphs_of_its_mode(graph, sections, device):
    scene = scene_of(device, graph)
    frame = scene.engine._frames.load(scene.batch, scene.pools)
    assert list(frame.recordings) == [(each, False) for each in sections]
    assert scene.engine._frames.load(scene.batch, scene.pools) is frame


def test_a_batch_above_the_bucket_is_refused(device):
    scene = scene_of(device, bucket=2)
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("bucket", 2)):
        scene.engine._frames.load(scene.batch, scene.pools)
    assert list(scene.engine._frames) == []
