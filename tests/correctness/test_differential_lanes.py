"""KV of draft lanes is compared slot by slot, even if draft-extend overwrites it within a round."""

from dataclasses import replace

import pytest
import torch

from specsim.core.pool import KVBuffer, lane_columns, tail_columns
from specsim.correctness.differential import check
from specsim.correctness.differential.cell import cell_of
from specsim.correctness.differential.pairs import make_pair
from specsim.fast.drafters.autoregressive import AutoregressiveDrafter
from specsim.fast.drafting.lanes import lane_metadata
from specsim.fast.kv import slots

pytestmark = pytest.mark.usefixtures("budgets_once")
DEEP = replace(cell_of(dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3)), id="two draft layers")
# A tree of one step runs no draft forward, so the copied tails are not read.
FLAT = replace(cell_of(dict(topk=2, num_steps=1, page_size=4, batch=1)), id="two draft layers, one step")


def two_layers():
    """An EAGLE pair whose drafter has its layer twice."""
    pair = make_pair("eagle-llama", torch.float32)
    drafter = pair.drafter
    tensors = {name.replace("layers.0.", "layers.1."): tensor for name, tensor in drafter.tensors.items()}
    tensors["layers.1.input_layernorm.weight"] = tensors["layers.1.post_attention_layernorm.weight"]
    model = replace(drafter.config.model, layers=2 * drafter.config.model.layers)
    config = replace(drafter.config, model=model)
    return replace(pair, drafter=replace(drafter, config=config, tensors=tensors | dict(drafter.tensors)))


def first_divergence(cell, impl, **options):
    return check(cell, impl, pair=two_layers(), **options).first_divergence


# Defects in the reference, after the last draft forward: no score can show them.


def lane_slots(batch, pools, config, request=1):
    """Slots [K, S-1] that draft forwards write for a request."""
    row = int(batch.req_pool_indices[request])
    return pools.slots(row, lane_columns(int(batch.seq_lens[request]), config)[:, : config.num_steps - 1])


def tail_slots(batch, pools, config, request=2):
    """Slots [K, T] of a request's copies of the prefix's tail."""
    row = int(batch.req_pool_indices[request])
    return pools.slots(row, tail_columns(int(batch.seq_lens[request]), config))


def undo_a_tail(batch, pools, config, before):
    slots = tail_slots(batch, pools, config)[1]
    pools.draft.values[:, slots] = before.values[:, slots]


def write_a_neighbours_slot(batch, pools, config, before):
    slots = lane_slots(batch, pools, config)
    pools.draft.move(slots[2, -1:], slots[3, -1:])


def keep_the_step_before(batch, pools, config, before):
    slots = lane_slots(batch, pools, config)
    pools.draft.move(slots[2, :1], slots[2, 1:])


def copy_another_layer(batch, pools, config, before):
    slots = tail_slots(batch, pools, config)[1]
    pools.draft.keys[1, slots] = pools.draft.keys[0, slots]


def write_behind_a_lane(batch, pools, config, before):
    """Write to lane 0's column of the last step, which only draft-extend writes."""
    columns = lane_columns(int(batch.seq_lens[0]), config)[0, -1:]
    pools.draft.keys[0, pools.slots(int(batch.req_pool_indices[0]), columns)] = 7.0


DEFECTS = {
    "a tail not copied": (undo_a_tail, "draft values", 2),
    "a neighbour's slot": (write_a_neighbours_slot, "draft keys", 1),
    "the step before": (keep_the_step_before, "draft keys", 1),
    "another layer": (copy_another_layer, "draft keys", 2),
    "behind a lane": (write_behind_a_lane, "stray write, draft pool", None),
}


class Spoiled:
    """A drafter that spoils KV after its proposal."""

    def __init__(self, drafter, config, spoil):
        self._drafter = drafter
        self._config = config
        self._spoil = spoil

    def __getattr__(self, name):
        return getattr(self._drafter, name)

    def propose(self, batch, draft_input, pools):
        before = KVBuffer(self._drafter.kv_layout, pools.num_slots, pools.draft.keys.dtype)
        before.copy_(pools.draft)
        candidates = self._drafter.propose(batch, draft_input, pools)
        self._spoil(batch, pools, self._config, before)
        return candidates


@pytest.mark.every_value
@pytest.mark.parametrize("mode", ["lockstep", "free"])
@pytest.mark.parametrize("graph", ["phase", "round"])
@pytest.mark.parametrize(("spoil", "field", "place"), DEFECTS.values(), ids=DEFECTS)
def test_lane_kv_that_no_score_shows_is_named(graph, mode, spoil, field, place):
    def wrap(implementation):
        engine = implementation.engine
        engine._setting_drafter = Spoiled(engine._setting_drafter, engine.config, spoil)
        return implementation

    first = first_divergence(replace(DEEP, graph=graph, mode=mode), "reference", wrap=wrap)
    assert first is not None
    assert (first.round, first.phase, first.field, first.request) == (1, "draft", field, place)


@pytest.mark.parametrize("mode", ["lockstep", "free"])
def test_a_round_that_shows_no_lane_kv_is_a_divergence(check_changed, mode):
    """It is reported even if an earlier round has shown some."""
    rounds = 0

    def run(own, batch, state, pools):
        nonlocal rounds
        rounds += 1
        kept = pools.draft.snapshot
        pools.draft.snapshot = kept if rounds == 1 else None
        output = own(batch, state, pools)
        pools.draft.snapshot = kept
        return output

    cell = cell_of(dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3, graph="round", mode=mode))
    first = check_changed(cell, round=run).first_divergence
    assert (first.round, first.phase, first.field, first.request) == (2, "draft", "draft keys", 0)


# Defects in what the fast implementation records.


class Relaunched:
    """A kernel that is launched with some arguments changed."""

    def __init__(self, kernel, **changes):
        self._kernel = kernel
        self._changes = changes

    def __getitem__(self, grid):
        return lambda **arguments: self._kernel[grid](**arguments | self._changes)


@pytest.mark.every_value
@pytest.mark.parametrize("mode", ["lockstep", "free"])
@pytest.mark.parametrize("graph", ["phase", "round"])
@pytest.mark.parametrize(
    "changes", [dict(num_lanes=1), dict(num_slots=0)], ids=["lane 1's tail not copied", "no stride of a layer"]
)
def test_a_wrong_copy_of_tails_is_named(monkeypatch, graph, mode, changes):
    cell = replace(FLAT, graph=graph, mode=mode)
    assert first_divergence(cell, "fast") is None
    monkeypatch.setattr(slots, "_tails_kernel", Relaunched(slots._tails_kernel, **changes))
    first = first_divergence(cell, "fast")
    assert first is not None
    assert (first.round, first.phase, first.field, first.request) == (1, "draft", "draft keys", 0)


LATE = {
    "a neighbour's slot": lambda slots: (slots[-1].flatten(), slots[-1].roll(1, 1).flatten()),
    "the step before": lambda slots: (slots[-2].flatten(), slots[-1].flatten()),
}


@pytest.mark.parametrize("graph", ["phase", "round"])
@pytest.mark.parametrize("moved", LATE.values(), ids=LATE)
def test_a_late_write_to_a_lane_is_named(monkeypatch, graph, moved):
    """The write comes after the last draft forward, so it changes no score."""
    own_start = AutoregressiveDrafter.start
    own_step = AutoregressiveDrafter.step
    slots = []

    def start(self, *states):
        slots.clear()
        own_start(self, *states)

    def step(self, batch, lanes, pools):
        slots.append(lane_metadata(batch, lanes, self._config, pools).slots.view(lanes.tokens.shape))
        own_step(self, batch, lanes, pools)
        if len(slots) == self._config.num_steps - 1:
            source, destination = moved(slots)
            pools.draft.move(source, destination)

    monkeypatch.setattr(AutoregressiveDrafter, "start", start)
    monkeypatch.setattr(AutoregressiveDrafter, "step", step)
    cell = cell_of(dict(topk=2, num_steps=3, num_draft_tokens=5, page_size=4, batch=1, graph=graph))
    first = check(cell).first_divergence
    assert first is not None
    assert (first.round, first.phase, first.field, first.request) == (1, "draft", "draft keys", 0)
