"""The persistent forward's schedule covers all work once, and no order of its steps ends in a deadlock."""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.bench.roofline import forward_bound
from specsim.fast.persistent.forward import schedule_of
from specsim.fast.persistent.schedule import COLUMNS, HEAD_DIM, OWN, SUMS, TILE, WAKES, Schedule, Stage
from specsim.models.shapes import shape

NAMES = ("llama-3-8b", "llama-2-7b", "mistral-7b-v0.1", "qwen3-8b", "qwen3-4b", "llama-2-70b", "llama-2-70b-tp8-slice")
BATCHES = ((1, 1), (1, 8), (2, 3), (4, 4))
SMALL = Schedule(hidden=64, inner=192, heads=4, kv_heads=2, layers=3, requests=1, nodes=2, programs=5)
ODD = (
    SMALL,
    replace(SMALL, programs=2),
    replace(SMALL, programs=1, requests=1, kv_heads=1),
    replace(SMALL, programs=9, requests=2, inner=64),
    replace(SMALL, hidden=1088, inner=2048, programs=7, requests=3, nodes=1),
    replace(SMALL, requests=2, nodes=8, programs=16, heads=6, kv_heads=3),
)


def schedules() -> list[Schedule]:
    """Collect schedules of published shapes in several batches, and small odd ones."""
    made = [schedule_of(shape(name).config, *batch) for name, batch in zip(NAMES, BATCHES * 2, strict=False)]
    return made + list(ODD)


@pytest.mark.parametrize("schedule", schedules(), ids=str)
def test_tiles_are_covered_once(schedule):
    for product in schedule.products.values():
        stages = [stage for p in range(schedule.programs) for stage in schedule.weight_stages(p, product.name)]
        expected = {(tile, depth) for tile in range(product.tiles) for depth in range(product.stages)}
        assert len(stages) == len(expected)
        assert {(stage.tile, stage.depth) for stage in stages} == expected


@pytest.mark.parametrize("schedule", schedules(), ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_visible_columns_are_read_once(schedule, window):
    for length in (0, 1, 48, 49, 1024):
        read: dict[tuple[int, int], list[int]] = defaultdict(list)
        for program in range(schedule.programs):
            request, head, _ = schedule.unit(program)
            read[request, head] += [stage.tile for stage in schedule.key_stages(program, length, window)]
        assert len(read) == schedule.units
        first = 0 if window is None else max(0, length + 1 - window)
        for stages in read.values():
            places = [stage * COLUMNS + place for stage in stages for place in range(COLUMNS)]
            columns = [first - OWN + place for place in places if place >= OWN]
            assert sorted(column for column in columns if column < length) == list(range(first, length))
            assert places.count(0) == 1  # the rows' own


@pytest.mark.parametrize("schedule", schedules(), ids=str)
def test_counters_are_raised_as_often_as_expected(schedule):
    raised = Counter()
    for product in schedule.products.values():
        raised.update(schedule.signal(product.name, tile) for tile in range(product.tiles))
    for program in filter(schedule.attends, range(schedule.programs)):
        request, head, _ = schedule.unit(program)
        raised[schedule.at_attended + request * schedule.kv_heads + head] += 1
        raised[schedule.at_merged] += 1
    awaited = {}
    for program in range(schedule.programs):
        for first, number, expected in schedule.dependencies(program):
            awaited |= {(first + i) % schedule.layer_counters: expected for i in range(number)}
    assert awaited == raised
    assert sorted(raised) == list(range(schedule.layer_counters))


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_roofline(name):
    model, length = shape(name).config, 1024
    schedule = schedule_of(model, 1, 8)
    bound = forward_bound(model, 1, 8, length)
    weights = sum(part.bytes for part in bound.parts if "_proj" in part.tensor)
    assert schedule.weight_bytes == weights
    keys = sum(part.bytes for part in bound.parts if "KV" in part.tensor)
    columns = sum(
        min(length, stage.tile * COLUMNS + COLUMNS - OWN) - max(0, stage.tile * COLUMNS - OWN)
        for program in range(schedule.programs)
        for stage in schedule.key_stages(program, length)
    )
    assert columns * HEAD_DIM * 2 * 2 * schedule.layers == keys


def test_outputs_of_head_tiles_are_the_heads_outputs():
    firsts = [tile // 8 * HEAD_DIM + tile % 8 * 8 for tile in range(SMALL.qkv_tiles)]
    outputs = [first + half + i for first in firsts for half in (0, 64) for i in range(8)]
    assert sorted(outputs) == list(range(SMALL.qkv_tiles * TILE))


class Device:
    """Programs whose roles take one step at a time in any order."""

    def __init__(self, schedule: Schedule, lengths: tuple[int, ...]) -> None:
        self.schedule = schedule
        self.lengths = lengths
        self.counters: Counter[int] = Counter()
        self.done: Counter[tuple[int, str]] = Counter()  # finished items by layer and kind
        self.roles = [role for program in range(schedule.programs) for role in Program(self, program).roles]

    def run(self, choose: Callable[[list], Iterator]) -> None:
        """Run to the end, with the next role to try given by `choose`."""
        waiting = {id(role): next(role, None) for role in self.roles}
        alive = [role for role in self.roles if waiting[id(role)] is not None]
        while alive:
            ready = [role for role in alive if waiting[id(role)]()]
            assert ready, f"{len(alive)} roles wait for each other"
            role = choose(ready)
            waiting[id(role)] = next(role, None)
            if waiting[id(role)] is None:
                alive.remove(role)

    def total(self, kind: str) -> int:
        """Count the items of a kind in one layer."""
        products = self.schedule.products
        return products[kind].tiles if kind in products else self.schedule.parts

    def require(self, layer: int, *kinds: str) -> None:
        """Require that all items of these kinds are finished in a layer, as their result is read or replaced."""
        for kind in kinds:
            assert layer < 0 or self.done[layer, kind] == self.total(kind), (layer, kind)


class Program:
    """One program: every role is a generator of conditions that it awaits."""

    def __init__(self, device: Device, number: int) -> None:
        self.device = device
        self.schedule = device.schedule
        self.number = number
        self.ring: deque[Stage] = deque()
        self.sums: list[bool] = [False] * SUMS
        self.wakes = [0] * WAKES
        self.seen = [0] * WAKES
        self.roles = [self.producer(), self.multiplier(), self.poller(), self.finisher(0), self.finisher(1)]

    def woken(self, turn: int):
        """Wait as on an mbarrier's parity, which a role that is a whole turn behind or ahead misreads."""
        yield lambda: self.wakes[turn % WAKES] % 2 != turn // WAKES % 2
        self.seen[turn % WAKES] += 1

    def producer(self):
        for _ in range(self.schedule.layers):
            for stage in self.schedule.layer_stages(self.number, self.device.lengths):
                yield lambda: len(self.ring) < self.schedule.ring
                self.ring.append(stage)

    def poller(self):
        turn = 0
        for layer in range(self.schedule.layers):
            base = 1 + layer * self.schedule.layer_counters
            for first, number, expected in self.schedule.dependencies(self.number):
                places = [base + first + i for i in range(number)]
                yield lambda places=places, expected=expected: all(
                    self.device.counters[place] >= expected for place in places
                )
                if self.schedule.is_sparse:
                    yield lambda turn=turn: self.seen[turn % WAKES] // 3 % 2 == turn // WAKES % 2
                self.wakes[turn % WAKES] += 1
                turn += 1

    def multiplier(self):
        schedule, device = self.schedule, self.device
        request, head, split = schedule.unit(self.number)
        turn = handed = 0
        before = {"qkv": "down", "o": "merge", "gate_up": "o", "down": "gate_up"}
        for layer in range(schedule.layers):
            base = 1 + layer * schedule.layer_counters
            for product in ("qkv", "attend", "merge", "o", "gate_up", "down"):
                if product in ("attend", "merge"):
                    yield from self.woken(turn)
                    if split < schedule.splits:
                        device.require(layer - 1, "merge" if product == "attend" else "o")
                        if product == "attend":
                            stages = schedule.num_key_stages(device.lengths[request])
                            for tile in schedule.part(stages, split):
                                yield from self.consume(Stage("keys", tile, 0))
                            device.counters[base + schedule.at_attended + request * schedule.kv_heads + head] += 1
                        else:
                            device.counters[base + schedule.at_merged] += 1
                        device.done[layer, product] += 1
                    turn += 1
                    continue
                tiles = list(schedule.own(schedule.products[product].tiles, self.number))
                yield from self.woken(turn)
                device.require(layer - (product == "qkv"), before[product])
                turn += 1
                together = 1 if schedule.is_held(product) else 2
                for pair in (tiles[i : i + together] for i in range(0, len(tiles), together)):
                    for depth in range(schedule.products[product].stages):
                        for tile in pair:
                            yield from self.consume(Stage(product, tile, depth))
                    for _ in pair:
                        at = handed % SUMS
                        yield lambda at=at: not self.sums[at]
                        self.sums[at] = True
                        handed += 1

    def consume(self, expected: Stage):
        yield lambda: bool(self.ring)
        assert self.ring.popleft() == expected

    def finisher(self, side: int):
        schedule, device = self.schedule, self.device
        own = schedule.own(schedule.residual_tiles, self.number)
        for _ in own[side::2]:
            yield lambda: True
            device.counters[0] += 1
        handed = turn = 0
        replaced = {"qkv": ("attend",), "o": ("qkv",), "gate_up": ("down",), "down": ("gate_up",)}
        for layer in range(schedule.layers):
            base = 1 + layer * schedule.layer_counters
            for product in ("qkv", "o", "gate_up", "down"):
                tiles = schedule.own(schedule.products[product].tiles, self.number)
                if product == "o":
                    if schedule.is_sparse:
                        yield from self.woken(turn)
                        yield from self.woken(turn + 1)
                    turn += 2
                yield from self.woken(turn)
                turn += 1
                for i, tile in enumerate(tiles):
                    at = handed % SUMS
                    handed += 1
                    if i % 2 == side:
                        yield lambda at=at: self.sums[at]
                        self.sums[at] = False
                        device.require(layer - (product in ("qkv", "gate_up")), *replaced[product])
                        device.done[layer, product] += 1
                        device.counters[base + schedule.signal(product, tile)] += 1


@settings(max_examples=60)
@given(
    schedule=st.sampled_from([replace(each, layers=3) for each in ODD if each.hidden == 64]),
    seed=st.integers(0, 2**32),
    length=st.integers(0, 400),
)
def test_every_order_of_steps_ends(schedule, seed, length):
    choice = random.Random(seed)
    favourite = [choice.random() for _ in range(5 * schedule.programs)]  # some roles are much slower than others

    def choose(ready):
        return min(ready, key=lambda role: choice.random() * favourite[order[id(role)]])

    device = Device(schedule, tuple(length // (1 + request) for request in range(schedule.requests)))
    order = {id(role): number for number, role in enumerate(device.roles)}
    device.run(choose)
    for layer in range(3):
        device.require(layer, "qkv", "attend", "merge", "o", "gate_up", "down")


def test_a_missing_signal_is_a_deadlock():
    class Short(Schedule):
        def signal(self, product, tile):
            return self.at_down if product == "o" and tile == 0 else super().signal(product, tile)

    short = Short(**{name: getattr(SMALL, name) for name in SMALL.__slots__})
    with pytest.raises(AssertionError, match="wait for each other"):
        Device(short, (100,)).run(random.Random(0).choice)


def test_a_poller_that_does_not_wait_is_found():
    class Hasty(Schedule):
        is_sparse = False

    hasty = Hasty(**{name: getattr(ODD[3], name) for name in SMALL.__slots__})

    def run_all():
        for slow in range(5 * hasty.programs):
            device = Device(hasty, (100, 7))
            device.run(lambda ready, slow=device.roles[slow]: next((each for each in ready if each is not slow), slow))

    with pytest.raises(AssertionError):
        run_all()
