"""The persistent forward's schedule covers all work once, and no order of its steps ends in a deadlock."""

import itertools
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest

from specsim.bench.roofline import forward_bound
from specsim.fast.persistent import schedule as rules
from specsim.fast.persistent.forward import schedule_of
from specsim.fast.persistent.schedule import COLUMNS, HEAD_DIM, SUMS, TILE, WAKES, ForwardSchedule, WeightStage
from specsim.models.shapes import shape

NAMES = ("llama-3-8b", "llama-2-7b", "mistral-7b-v0.1", "qwen3-8b", "qwen3-4b", "llama-2-70b", "llama-2-70b-tp8-slice")
BATCHES = ((1, 1), (1, 8), (2, 3), (4, 4))
SMALL = ForwardSchedule(hidden=64, inner=192, heads=4, kv_heads=2, layers=3, requests=1, nodes=2, programs=5)
ODD = (
    SMALL,
    replace(SMALL, programs=2),
    replace(SMALL, programs=1, requests=1, kv_heads=1),
    replace(SMALL, programs=9, requests=2, inner=64),
    replace(SMALL, hidden=1088, inner=2048, programs=7, requests=3, nodes=1),
    replace(SMALL, requests=2, nodes=8, programs=16, heads=6, kv_heads=3),
    replace(SMALL, requests=3, programs=9, batch_invariant=True),
    # No tile of any product for one finisher of a program, and keys for every program.
    replace(SMALL, hidden=256, inner=128, heads=1, kv_heads=1, programs=16),
)


def schedules() -> list[ForwardSchedule]:
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
@pytest.mark.parametrize("window", [None, 65, 66, 100])
def test_visible_columns_are_read_once(schedule, window):
    for length in (0, 1, 48, 49, 1024):
        read: dict[tuple[int, int], list[int]] = defaultdict(list)
        for program, turn in itertools.product(range(schedule.programs), range(schedule.turns)):
            request, head, _ = schedule.unit(program, turn)
            read[request, head] += [stage.tile for stage in schedule.key_stages(program, length, window, turn)]
        assert len(read) == schedule.units
        first = 0 if window is None else max(0, length + 1 - window)
        for stages in read.values():
            assert all(first + stage * COLUMNS < length for stage in stages)
            columns = [first + stage * COLUMNS + place for stage in stages for place in range(COLUMNS)]
            assert sorted(column for column in columns if column < length) == list(range(first, length))


@pytest.mark.parametrize("schedule", schedules(), ids=str)
def test_counters_are_raised_as_often_as_expected(schedule):
    raised = Counter()
    for product in schedule.products.values():
        raised.update(schedule.signal(product.name, tile) for tile in range(product.tiles))
    for program in filter(schedule.attends, range(schedule.programs)):
        _, head, _ = schedule.unit(program)
        raised[schedule.at_attended + head] += schedule.turns
        raised[schedule.at_merged] += schedule.turns
    awaited = Counter()
    for program in range(schedule.programs):
        for counter, expected in schedule.dependencies(program):
            awaited[counter % schedule.layer_counters] = expected
    assert awaited == raised
    assert sorted(awaited) == list(range(schedule.layer_counters))


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_roofline(name):
    model, length = shape(name).config, 1024
    schedule = schedule_of(model, 1, 8)
    bound = forward_bound(model, 1, 8, length)
    weights = sum(part.bytes for part in bound.parts if "_proj" in part.tensor)
    assert schedule.weight_bytes == weights
    keys = sum(part.bytes for part in bound.parts if "KV" in part.tensor)
    columns = sum(
        min(length, stage.tile * COLUMNS + COLUMNS) - stage.tile * COLUMNS
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

    def __init__(self, schedule: ForwardSchedule, lengths: tuple[int, ...]) -> None:
        self.schedule = schedule
        self.lengths = lengths
        self.counters: Counter[int] = Counter()
        self.done: Counter[tuple[int, str]] = Counter()  # finished items by layer and kind
        self.roles = [role for program in range(schedule.programs) for role in Program(self, program).roles]

    def run(self, is_slow: Callable[[int], bool] = lambda number: False, seed: int = 0) -> None:
        """Run to the end in a random order, in which slow roles step only where no other role can."""
        choice = random.Random(seed)
        groups = [[], []]
        for number, role in enumerate(self.roles):
            groups[is_slow(number)].append((role, next(role, None)))
        while any(groups):
            for group in groups:
                start = choice.randrange(len(group)) if group else 0
                index = next((i for i in (*range(start, len(group)), *range(start)) if group[i][1]()), None)
                if index is not None:
                    break
            assert index is not None, "roles wait for each other"
            role, _ = group.pop(index)
            if (condition := next(role, None)) is not None:
                group.append((role, condition))

    def finish(self, layer: int, product: str, tile: int) -> None:
        """Count a finished tile, also among those that attention or the early stages of down await."""
        schedule = self.schedule
        self.done[layer, product] += 1
        head = tile // (HEAD_DIM // TILE)
        if product == "qkv" and head < schedule.heads:
            self.done[layer, f"queries {head // schedule.group}"] += 1
        elif product == "qkv":
            self.done[layer, f"own {(head - schedule.heads) % schedule.kv_heads}"] += 1
        elif product == "gate_up" and tile < schedule.first_inner_tiles:
            self.done[layer, "early gate_up"] += 1

    def total(self, kind: str) -> int:
        """Count the items of a kind in one layer."""
        schedule = self.schedule
        if kind in schedule.products:
            return schedule.products[kind].tiles
        first, _, rest = kind.partition(" ")
        if kind == "early gate_up":
            return schedule.inner_cut * rules.DEPTH * 2 // TILE
        if first == "queries":
            return schedule.group * 8
        if first == "own":
            return 16
        return schedule.splits if rest else schedule.parts

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
        self.ring: deque[WeightStage] = deque()
        self.filled, self.emptied = [0] * SUMS, [0] * SUMS  # uses of each place of sums, waited for by their parity
        self.wakes = [0] * WAKES
        self.seen = [0] * WAKES
        self.taken = [0, 0]  # sums that each finisher has passed
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
            for counter, expected in self.schedule.dependencies(self.number):
                yield lambda place=base + counter, expected=expected: self.device.counters[place] >= expected
                if self.schedule.is_sparse:
                    yield lambda turn=turn: self.seen[turn % WAKES] // 3 % 2 == turn // WAKES % 2
                self.wakes[turn % WAKES] += 1
                turn += 1

    def multiplier(self):
        schedule, device = self.schedule, self.device
        units = [schedule.unit(self.number, i) for i in range(schedule.turns)]
        turn = 0
        self.handed = 0
        before = {"qkv": "down", "o": "merge", "gate_up": "o", "down": "gate_up"}
        for layer in range(schedule.layers):
            base = 1 + layer * schedule.layer_counters
            for product in ("qkv", "attend", "merge", "o", "gate_up", "down"):
                yield from self.woken(turn)
                turn += 1
                if product in ("attend", "merge"):
                    for request, head, split in units:
                        if split >= schedule.splits:
                            continue
                        device.require(layer - 1, "merge" if product == "attend" else "o")
                        if product == "attend":
                            device.require(layer, f"queries {head}")
                            stages = schedule.num_key_stages(device.lengths[request])
                            for tile in schedule.part(stages, split):
                                yield from self.consume(WeightStage("keys", tile, 0))
                            device.counters[base + schedule.at_attended + head] += 1
                        else:
                            device.require(layer, f"own {head}", f"attend {request} {head}")
                            device.counters[base + schedule.at_merged] += 1
                        device.done[layer, product] += 1
                        device.done[layer, f"{product} {request} {head}"] += 1
                    continue
                stages = list(schedule.weight_stages(self.number, product))
                if product == "down":
                    device.require(layer, "early gate_up")
                    cut = 2 * schedule.inner_cut  # of a pair of tiles
                    for stage in stages[:cut]:
                        yield from self.consume(stage)
                    yield from self.woken(turn)
                    turn += 1
                    yield from self.multiply(stages, cut)
                else:
                    device.require(layer - (product == "qkv"), before[product])
                    yield from self.multiply(stages)

    def multiply(self, stages: list[WeightStage], first: int = 0):
        """Consume stages, from some on, and hand each tile over after its last one."""
        last = {stage.tile: stage.depth for stage in stages}
        for stage in stages[first:]:
            yield from self.consume(stage)
            if stage.depth == last[stage.tile]:
                at, use = self.handed % SUMS, self.handed // SUMS
                yield lambda at=at, use=use: self.emptied[at] % 2 == use % 2
                self.filled[at] += 1
                self.handed += 1

    def consume(self, expected: WeightStage):
        yield lambda: bool(self.ring)
        assert self.ring.popleft() == expected

    def finisher(self, side: int):
        schedule, device = self.schedule, self.device
        own = schedule.tiles_of(schedule.residual_tiles, self.number)
        for _ in own[side::2]:
            yield lambda: True
            device.counters[0] += 1
        turn = 0
        for layer in range(schedule.layers):
            base = 1 + layer * schedule.layer_counters
            for product in ("qkv", "o", "gate_up", "down"):
                skipped = {"o": 3, "down": 2}.get(product, 0)
                if skipped == 0:
                    yield from self.woken(turn)
                    turn += 1
                for _ in range(skipped):
                    if schedule.is_sparse:
                        yield from self.woken(turn)
                    turn += 1
                yield from self.finish(layer, base, product, side)

    def finish(self, layer, base, product, side):
        """Finish those of a product's tiles that are of this side."""
        schedule, device = self.schedule, self.device
        replaced = {"qkv": ("merge",), "o": ("qkv",), "gate_up": ("down",), "down": ("gate_up",)}
        for i, tile in enumerate(schedule.tiles_of(schedule.products[product].tiles, self.number)):
            at, use = self.taken[side] % SUMS, self.taken[side] // SUMS
            self.taken[side] += 1
            if i % 2 == side:
                yield lambda at=at, use=use: self.filled[at] % 2 != use % 2
                self.emptied[at] += 1
                device.require(layer - (product in ("qkv", "gate_up")), *replaced[product])
                device.finish(layer, product, tile)
                device.counters[base + schedule.signal(product, tile)] += 1


SIMULATED = [each for each in ODD if each.hidden < 1000]


def run_in_orders(schedule: ForwardSchedule) -> None:
    """Run with each role of the first and of the last program slow, then with slow roles by chance."""
    lengths = tuple(300 // (1 + request) for request in range(schedule.requests))
    roles = 5 * schedule.programs
    slow = [{role} for role in {*range(5), *range(roles - 5, roles)}]
    slow += [{*random.Random(seed).sample(range(roles), roles // 3)} for seed in range(6)]
    for seed, numbers in enumerate(slow):
        device = Device(schedule, lengths)
        device.run(numbers.__contains__, seed)
        for layer in range(schedule.layers):
            device.require(layer, "qkv", "attend", "merge", "o", "gate_up", "down")


@pytest.mark.parametrize("depth", [1024, 32], ids=["down in one part", "down in two parts"])
@pytest.mark.parametrize("schedule", SIMULATED, ids=str)
def test_every_order_of_steps_ends(schedule, depth):
    """Stages of 32 inputs make a product of several stages small."""
    with patch.object(rules, "DEPTH", depth):
        run_in_orders(schedule)


def test_a_missing_signal_is_a_deadlock():
    class Short(ForwardSchedule):
        def signal(self, product, tile):
            return self.at_down if product == "o" and tile == 0 else super().signal(product, tile)

    short = Short(**{name: getattr(SMALL, name) for name in SMALL.__slots__})
    with pytest.raises(AssertionError, match="wait for each other"):
        Device(short, (100,)).run()


@pytest.mark.parametrize("schedule", [ODD[3], ODD[-1]], ids=str)
def test_a_poller_that_does_not_wait_is_found(schedule):
    class Hasty(ForwardSchedule):
        is_sparse = False

    with pytest.raises(AssertionError):
        run_in_orders(Hasty(**{name: getattr(schedule, name) for name in SMALL.__slots__}))
