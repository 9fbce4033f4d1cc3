"""Pictures of a round and a server show the nodes, paths, slots and steps of states and traces, each once."""

import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import pytest
import torch

from specsim.core.engine_options import EngineOptions

pytest.importorskip("matplotlib")

from matplotlib.text import Text
from matplotlib.transforms import Bbox

from specsim import SamplingParams, SpecConfig, plots, trace
from specsim.core.columns import reserve_lanes
from specsim.core.config import ServingConfig
from specsim.core.errors import InputError
from specsim.core.phases import Batch, PrefillInput, Verdict, VerifyInput
from specsim.core.pool import KVPool, lane_columns, tail_columns
from specsim.models.synthetic_pair import synthetic_pair
from specsim.plots import sheet, token_tree
from specsim.reference.tree import depths_of
from specsim.serving.generation import load_engine
from specsim.serving.requests import make_request
from specsim.serving.scheduler import Scheduler
from specsim.serving.trace import EVENTS, SLOTS, Chunk, DeliveredRound, FinishEvent, Preemption, StepRecord, Trace
from specsim.simulator import Efficiency, drafter, hardware, model
from specsim.simulator.acceptance import Option, PerPosition
from specsim.simulator.scenario import Scenario, speedup_range
from specsim.simulator.workload import closed_loop

PROMPT = (5, 17, 3, 40, 8, 9, 30)
PROMPTS = [[5, 17, 3, 40, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]
SETTINGS = {
    "the demo's": SpecConfig(topk=4, num_steps=3, num_draft_tokens=8, page_size=4),
    "wide": SpecConfig(topk=16, num_steps=3, num_draft_tokens=32, page_size=16),
    "chain": SpecConfig(topk=1, num_steps=5, num_draft_tokens=6, page_size=1),
    "one step": SpecConfig(topk=16, num_steps=1, num_draft_tokens=17, page_size=2, release="round"),
    "deep": SpecConfig(topk=2, num_steps=8, num_draft_tokens=20, page_size=64),
    "plain": SpecConfig.plain(page_size=4),
    "logprob": SpecConfig(topk=3, num_steps=2, num_draft_tokens=5, page_size=3, score="logprob"),
    "at the limit": SpecConfig(topk=2, num_steps=4, num_draft_tokens=9, page_size=4, max_len=13),
}
TEXTS = [
    "$x_1$", "\n        ", " ", "漢字", "'", "\\n", "identifier_of_some_length", "", "\ufffd", "{", "a b", "    pass",
]  # fmt: skip


@dataclass(frozen=True)
class Round:
    """A round of two requests, with the pools as they stood for drafting, and after it."""

    config: SpecConfig
    batch: Batch
    tree: VerifyInput
    output: Verdict
    lanes: list[plots.Slot]
    pools: KVPool


def decode(token_ids) -> str:
    return "".join(TEXTS[token % len(TEXTS)] for token in token_ids)


def play(config: SpecConfig) -> Round:
    pair = synthetic_pair("eagle3", vocab_size=48)
    engine = load_engine(pair, config, EngineOptions("reference", torch.float64))
    pools = engine.make_pools(3, sum(config.reserved_columns(len(prompt)) for prompt in PROMPTS) + 3 * config.page_size)
    rows, lengths = [pools.open() for _ in PROMPTS], [len(prompt) for prompt in PROMPTS]
    for row, length in zip(rows, lengths, strict=True):
        pools.reserve(row, length)
    batch = Batch.of([70, 80], rows, lengths, [SamplingParams()] * len(PROMPTS), 48)
    draft_input = engine.prefill(batch, PrefillInput.of_prompts(PROMPTS), pools).draft_input
    reserve_lanes(pools, rows, lengths, config)
    lanes = plots.slots(pools, batch, config) if config.num_steps else []
    tree = engine.draft(batch, draft_input, pools)
    return Round(config, batch, tree, engine.verify(batch, tree, pools).verdict, lanes, pools)


@pytest.fixture(scope="module", params=SETTINGS)
def played(request) -> Round:
    return play(SETTINGS[request.param])


def marks(figure, kind: str) -> list[str]:
    """Names in the gids of a kind, `3` of `node:3`."""
    gids = [artist.get_gid() for artist in figure.findobj() if artist.get_gid()]
    return [gid.partition(":")[2] for gid in gids if gid.partition(":")[0] == kind]


def look(figure, gid: str) -> tuple:
    """Fill and border of the artist of a gid."""
    (artist,) = figure.findobj(lambda artist: artist.get_gid() == gid)
    return artist.get_facecolor(), artist.get_edgecolor(), artist.get_linewidth()


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def pictures(played: Round) -> dict:
    tree, output, states = played.tree, played.output, (played.pools, played.batch, played.config)
    each = {
        f"{name} {request}": draw
        for request in range(2)
        for name, draw in {
            "tree": plots.tree(tree, output, decode, request),
            "drafted": plots.tree(tree, None, decode, request),
            "mask": plots.mask(tree, request, decode),
            "bare mask": plots.mask(tree, request),
            "move": plots.kv_move(tree, output, decode, request),
        }.items()
    }
    maps = {
        "lanes": plots.kv_pages(*states),
        "written": plots.kv_pages(*states, tree),
        "judged": plots.kv_pages(*states, tree, output, committed=False),
        "committed": plots.kv_pages(*states, tree, output),
    }
    return each | (maps if played.config.num_steps else {name: maps[name] for name in ("written", "committed")})


def boxes(figure) -> list[tuple[Text, Bbox]]:
    """Every text that is not empty, and its position."""
    renderer = figure.canvas.get_renderer()
    return [(text, text.get_window_extent(renderer)) for text in figure.findobj(Text) if text.get_text()]


def overlaps(shown: list[tuple[Text, Bbox]]) -> list[tuple[str, str]]:
    """Pairs of texts that overlap."""
    pairs = combinations(shown, 2)
    return [(first.get_text(), second.get_text()) for (first, one), (second, two) in pairs if one.overlaps(two)]


@pytest.mark.by_default("wide", "at the limit", "plain")
def test_texts_are_legible_apart_and_inside_the_picture(played):
    for name, figure in pictures(played).items():
        assert figure.get_figwidth() <= 18, name
        shown = boxes(figure)
        assert overlaps(shown) == [], name
        for text, box in shown:
            assert text.get_fontsize() >= 5.5, (name, text)
            assert min(box.x0, box.y0, figure.bbox.x1 - box.x1, figure.bbox.y1 - box.y1) >= 0, (name, text)


def test_the_check_of_overlaps_finds_one():
    figure, axes = sheet.new_sheet(2, 1)
    sheet.draw_text(axes, 0.5, 0.5, "one")
    sheet.draw_text(axes, 0.6, 0.5, "two")
    sheet.draw_text(axes, 1.5, 0.5, "apart")
    assert overlaps(boxes(figure)) == [("one", "two")]


@pytest.mark.parametrize("request_index", [0, 1])
def test_tree_has_a_box_a_node_and_an_edge_a_parent(played, request_index):
    num_nodes = played.config.num_draft_tokens
    figure = plots.tree(played.tree, played.output, decode, request_index)
    path = played.output.accepted_path(request_index)
    parents = played.tree.parents[request_index].tolist()
    edges = {f"{parent}-{node}" for node, parent in enumerate(parents) if parent >= 0}
    assert sorted(marks(figure, "node"), key=int) == [str(node) for node in range(num_nodes)]
    assert set(marks(figure, "edge")) == edges | {f"{path[-1]}-{num_nodes}"}
    assert len(marks(figure, "edge")) == num_nodes
    assert len(marks(figure, "bonus")) == 1


def test_tree_marks_the_accepted_path_and_nothing_else(played):
    num_nodes = played.config.num_draft_tokens
    figure = plots.tree(played.tree, played.output, decode, 1)
    path = played.output.accepted_path(1)
    accepted = look(figure, f"node:{path[0]}")
    assert [node for node in range(num_nodes) if look(figure, f"node:{node}") == accepted] == path
    widths = {mark: artist.get_linewidth() for artist, mark in edge_artists(figure)}
    on_path = {f"{parent}-{node}" for parent, node in pairwise([*path, num_nodes])}
    assert {mark for mark, width in widths.items() if width == sheet.ACCEPTED.width} == on_path


def edge_artists(figure):
    found = figure.findobj(lambda artist: (artist.get_gid() or "").startswith("edge:"))
    return [(artist, artist.get_gid().removeprefix("edge:")) for artist in found]


def test_tree_shows_every_token_score_position_and_the_bonus(played):
    said = texts(plots.tree(played.tree, played.output, decode))
    length, drafts = len(PROMPTS[0]), int(played.output.num_accepted_drafts[0])
    deepest = max(int(played.tree.positions[: played.config.num_draft_tokens].max()) - length, drafts + 1)
    most = 14 if deepest <= 6 else 9
    for token, score in zip(played.tree.draft_tokens[0].tolist(), played.tree.scores[0].tolist(), strict=True):
        assert sheet.visible_token(decode([token]), most) in [*said, ""]
        assert f"{score:.3f}" in said
    bonus = played.output.accepted_tokens()[0][-1]
    assert sheet.visible_token(decode([bonus]), most) in [*said, ""]
    columns = [f"position {length + depth}" for depth in range(deepest + 1)]
    assert [text for text in said if text.startswith("position")] == columns
    assert any(f"num_accepted_drafts {drafts}, num_accepted_tokens {drafts + 1}" in text for text in said)


@pytest.mark.parametrize(("score", "kind"), [("prob", "probability"), ("logprob", "log probability")])
def test_tree_names_the_kind_of_its_scores(score, kind):
    played = play(replace(SETTINGS["the demo's"], score=score))
    expected = f"in a box: node, token, the drafter's {kind} of the path from the root"
    assert expected in texts(plots.tree(played.tree, played.output, decode))


def test_low_log_probabilities_are_shown_as_they_are():
    played = play(replace(SETTINGS["the demo's"], score="logprob"))
    scores_BN = played.tree.scores.clone()
    scores_BN[0, 1:] = torch.tensor([-0.5, -99.5, -101.25, -312.375, -12345.75, -torch.inf, -torch.inf])
    figure = plots.tree(replace(played.tree, scores=scores_BN), played.output, decode)
    assert {"0.000", "-0.500", "-99.500", "-101.2", "-312.4", "-12345.8", "-inf"} <= set(texts(figure))
    assert overlaps(boxes(figure)) == []


def test_tree_without_a_verdict_marks_nothing():
    played = play(SETTINGS["the demo's"])
    figure = plots.tree(played.tree, None, decode)
    assert len({look(figure, f"node:{node}") for node in range(8)}) == 1
    assert len(marks(figure, "edge")) == 7
    assert marks(figure, "bonus") == []


def test_boxes_of_a_depth_are_as_wide_as_its_longest_text():
    lefts, rights = token_tree._levels([0, 1, 1, 2], ["a", "b", "a long text", "c"])
    widths = [right - left for left, right in zip(lefts, rights, strict=True)]
    assert widths[0] == pytest.approx(widths[2])
    assert widths[1] > widths[0]


def test_parents_stand_between_their_children(played):
    rows = token_tree._places(played.tree.parents[0].tolist())
    parents = played.tree.parents[0].tolist()
    depths = depths_of(parents)
    for depth in set(depths):
        level = sorted(row for row, own in zip(rows, depths, strict=True) if own == depth)
        assert all(after - before >= 1 for before, after in pairwise(level))
    for node in set(parents[1:]):
        children = [rows[child] for child, parent in enumerate(parents) if parent == node]
        assert min(children) <= rows[node] <= max(children)


def test_mask_draws_every_entry_of_the_mask(played):
    mask_NN = played.tree.mask[1].tolist()
    figure, size = plots.mask(played.tree, 1), len(mask_NN)
    sees = {(row, column) for row in range(size) for column in range(size) if mask_NN[row][column]}
    assert {tuple(map(int, mark.split("-"))) for mark in marks(figure, "sees")} == sees
    assert len(marks(figure, "hidden")) == size**2 - len(sees)
    assert len(marks(figure, "prefix")) == size
    length = len(PROMPTS[1])
    said = texts(figure)
    assert f"columns 0…{length - 1}" in said
    positions = played.tree.positions.view(2, -1)[1].tolist()
    assert all(said.count(str(position)) >= positions.count(position) for position in positions)


def slot_kinds(figure) -> dict[int, str]:
    return {int(slot): kind for slot, kind in (mark.split(":") for mark in marks(figure, "slot"))}


def test_every_slot_has_the_owner_and_the_column_of_the_table(played):
    found = plots.slots(played.pools, played.batch, played.config, played.tree, played.output)
    owned = {(slot.row, slot.column): index for index, slot in enumerate(found) if slot.kind != "free"}
    table = played.pools.req_to_token
    assert owned == {tuple(place): int(table[tuple(place)]) for place in (table >= 0).nonzero().tolist()}
    assert sum(slot.kind == "free" for slot in found) == played.pools.audit()["free"]


def test_lanes_and_tails_are_drawn_in_their_slots(played):
    config = played.config
    for request, (row, length) in enumerate(played.batch.rows_and_lens if config.num_steps else []):
        held = {slot.column: slot for slot in played.lanes if slot.row == row}
        for lane, steps in enumerate(lane_columns(length, config).tolist()):
            assert [held[column].label for column in steps] == [f"{lane}.{s}" for s in range(config.num_steps)]
            assert {held[column].kind for column in steps} == {"lane"}
            tail = tail_columns(length, config)[lane].tolist()
            assert {held[column].kind for column in tail} <= ({"tail"} if lane else {"committed"})
        assert sum(slot.kind == "committed" for slot in held.values()) == len(PROMPTS[request])


@pytest.mark.parametrize("kind", ["eagle", "standalone"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_lanes_are_drawn_where_the_drafter_writes(kind, page_size):
    """Lanes of a language model begin one column further on, as its slot p holds token p."""
    config = SpecConfig(topk=2, num_steps=3, num_draft_tokens=6, page_size=page_size)
    pair = synthetic_pair(kind)
    engine = load_engine(pair, config, EngineOptions("reference", torch.float64))
    pools = engine.make_pools(1, 64)
    row = pools.open()
    pools.reserve(row, config.reserved_columns(8))
    batch = Batch.of([5], [row], [7], [SamplingParams()], 48)
    draft_input = engine.prefill(batch, PrefillInput.of_prompts([PROMPT]), pools).draft_input
    before = pools.draft.keys.nan_to_num()
    engine.draft(batch, draft_input, pools)
    written = (pools.draft.keys.nan_to_num() != before).any(dim=3).any(dim=2)[0].nonzero()[:, 0].tolist()
    found = plots.slots(pools, batch, config, bonus_columns=engine.drafter.bonus_columns)
    is_run = [slot.kind == "tail" or (slot.kind == "lane" and not slot.label.endswith(".2")) for slot in found]
    assert written == [index for index, each in enumerate(is_run) if each]
    first = trace(pair, [PROMPT], config, SamplingParams(max_new_tokens=4))[0]
    lanes = first.states.drafted_pools.slots(0, lane_columns(7 + engine.drafter.bonus_columns, config))
    drawn = slot_kinds(first.kv("draft"))
    assert sorted(slot for slot, kind in drawn.items() if kind == "lane") == sorted(lanes.flatten().tolist())


def test_the_commit_moves_the_path_behind_the_prefix(played):
    states = played.pools, played.batch, played.config, played.tree, played.output
    for request, (row, length) in enumerate(played.batch.rows_and_lens):
        path = played.output.accepted_path(request)
        after = [slot for slot in plots.slots(*states) if slot.row == row and slot.kind == "accepted"]
        assert [(slot.column, slot.label) for slot in sorted(after, key=lambda slot: slot.column)] == [
            (length + depth, str(node)) for depth, node in enumerate(path)
        ]
        if played.config.release == "finish":
            before = [slot for slot in plots.slots(*states, committed=False) if slot.row == row]
            assert {slot.column for slot in before if slot.kind == "accepted"} == {length + node for node in path}
            live = [slot for slot in before if slot.kind in ("accepted", "tree")]
            locations = played.tree.cache_locations.view(2, -1)[request].tolist()
            assert len(live) == sum(location >= 0 for location in locations)
    drawn = list(slot_kinds(plots.kv_pages(*states)).values())
    assert drawn.count("accepted") == int(played.output.num_accepted_tokens.sum())


def test_a_map_draws_every_slot_that_it_does_not_put_in_words(played):
    found = plots.slots(played.pools, played.batch, played.config, played.tree)
    figure = plots.kv_pages(played.pools, played.batch, played.config, played.tree)
    drawn = slot_kinds(figure)
    assert all(found[slot].kind == kind for slot, kind in drawn.items())
    ends = [text.removeprefix("slots ").split(":")[0].split("…") for text in texts(figure) if text.startswith("slots ")]
    told = {slot for first, last in ends for slot in range(int(first), int(last) + 1)}
    assert told | drawn.keys() == set(range(len(found)))
    assert not told & drawn.keys()
    assert {found[slot].kind for slot in told} <= {"free", "spare", "committed"}
    owners = {found[slot].row for slot in drawn} - {-1}
    assert owners == set(played.batch.req_pool_indices.tolist())
    assert set(marks(figure, "owner")) == set(map(str, owners))


def test_a_map_names_the_requests_and_rows_that_it_was_not_given():
    played = play(SETTINGS["the demo's"])
    alone = played.batch.filter(torch.tensor([1]))
    said = texts(plots.kv_pages(played.pools, alone, played.config))
    assert "request 80" in said
    assert "row 0" in said


@pytest.mark.parametrize(("length", "told"), [(300, 288), (108, 96), (76, 0)])
def test_three_or_more_lines_of_a_prefix_become_a_sentence(length, told):
    """A line of the picture has 32 slots."""
    config = SpecConfig(page_size=8)
    engine = load_engine(synthetic_pair("eagle3"), config)
    pools = engine.make_pools(1, 512)
    pools.reserve(pools.open(), length)
    batch = Batch.of([5], [0], [length], [SamplingParams()], 48)
    figure = plots.kv_pages(pools, batch, config)
    said = [text for text in texts(figure) if text.endswith("committed prefix") and text.startswith("slots")]
    assert said == ([f"slots 0…{told - 1}: request 5, committed prefix"] if told else [])
    assert [slot for slot, kind in slot_kinds(figure).items() if kind == "committed"] == list(range(told, length))


def test_arrows_go_from_node_to_depth_and_never_cross(played):
    for request in range(2):
        figure = plots.kv_move(played.tree, played.output, decode, request)
        path = played.output.accepted_path(request)
        assert marks(figure, "move") == [f"{node}-{depth}" for depth, node in enumerate(path)]
        assert path == sorted(path)
        accepted = look(figure, f"after:{0}")
        cells = range(played.config.num_draft_tokens)
        assert [cell for cell in cells if look(figure, f"after:{cell}") == accepted] == list(range(len(path)))
        assert [cell for cell in cells if look(figure, f"before:{cell}") == accepted] == path


def test_tokens_of_the_commit_are_upright_if_they_do_not_fit(played):
    for text, rotation in (("abc", 0), ("abcdefghij", 90)):
        figure = plots.kv_move(played.tree, played.output, lambda _, text=text: text)
        found = [each.get_rotation() for each in figure.axes[0].texts if each.get_text() == text]
        assert set(found) == {rotation}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("return", "return"),
        (" a", "␣a"),
        ("    pass", "␣×4pass"),
        ("\n        ", "\\n␣×8"),
        ("漢", "\\u6f22"),
        ("$x$", "$x$"),
        ("identifier_of_some_length", "identifier_of…"),
        ("", ""),
    ],
)
def test_a_token_is_shown_in_signs_that_the_font_has(text, expected):
    assert sheet.visible_token(text) == expected


def test_kinds_differ_in_more_than_colour():
    """Kinds differ in grey: by the lightness of the fill, or by the width or dashes of the border."""

    def signs(kind):
        red, green, blue = (int(kind.face[i : i + 2], 16) for i in (1, 3, 5))
        return round((0.299 * red + 0.587 * green + 0.114 * blue) / 12), kind.width, kind.dashed

    for kinds in ((sheet.ACCEPTED, sheet.DRAFT, sheet.BONUS), (sheet.PREFIX, sheet.ANCESTOR, sheet.ITSELF)):
        assert len({signs(kind) for kind in kinds}) == len(kinds)


def test_a_picture_shows_itself_in_a_notebook_without_pyplot():
    code = (
        "import sys, torch\nfrom specsim.plots import sheet\n"
        "figure, axes = sheet.new_sheet(2, 1)\n"
        "assert figure._repr_png_()[0][:4] == b'\\x89PNG'\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_matplotlib_the_error_names_the_install_command():
    code = "import sys\nsys.modules['matplotlib'] = None\nimport specsim.plots"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: specsim.plots needs matplotlib: pip install" in done.stderr


@pytest.fixture(scope="module", params=["sync", "overlap"])
def served(request) -> Scheduler:
    """Six requests for two places and few slots, so that requests wait, are preempted and are aborted."""
    pair = synthetic_pair()
    engine = load_engine(pair, SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, page_size=1))
    serving = ServingConfig(request.param, max_running=3, num_slots=60, chunk_tokens=6)
    scheduler = Scheduler(engine, serving)
    for name in range(6):
        params, abort_at = SamplingParams(max_new_tokens=12), 10 if name == 4 else None
        schedule = {"arrival": 2 * name, "abort_at": abort_at}
        scheduler.submit(make_request(pair.target.config, None, name, [name] * 11, params, **schedule))
    with torch.inference_mode():
        scheduler.run()
    assert scheduler.trace.counts()["preempted"] > 0
    return scheduler


def test_a_timeline_shows_every_chunk_round_and_end(served):
    figure, records = plots.timeline(served.trace), served.trace.records
    assert overlaps(boxes(figure)) == []
    both = {f"{name}:{each.step}" for each in records for name in each.decoded}
    chunks = {f"{chunk.request_id}:{each.step}" for each in records for chunk in each.prefilled}
    assert set(marks(figure, "round")) == both - chunks
    assert set(marks(figure, "both")) == both & chunks
    assert set(marks(figure, "prefill")) == chunks - both
    assert set(marks(figure, "preempt")) == {f"{each.request_id}:{r.step}" for r in records for each in r.preempted}
    assert marks(figure, "wait")
    said = texts(figure)
    assert sorted(word for word in said if word in ("length", "abort")) == ["abort", *["length"] * 5]
    assert any(f"{served.trace.counts()['num_kept']} tokens read from" in text for text in said)


def test_the_tokens_of_a_timeline_are_those_of_the_rounds(served):
    """Numbers are in the step in which the host read them."""
    figure = plots.timeline(served.trace)
    numbers = [text for text in figure.findobj(Text) if text.get_text().isdecimal() and text.get_fontsize() == 6.5]
    inside = [int(text.get_text()) for text in numbers if text.get_color() == sheet.INK]
    assert sum(inside) == served.trace.counts()["num_kept"]


def record(step: int, **events) -> StepRecord:
    rest = {name: events.pop(name, ()) for name in EVENTS}
    return StepRecord(step=step, seconds=0.0, evicted_pages=0, **rest, **dict.fromkeys(SLOTS, 0))


def test_a_timeline_by_hand():
    """Request 1 is prefilled, skipped, advanced, preempted and resumed; 2 waits and ends; 3 never runs."""
    records = [
        record(
            0,
            arrived=(1, 2, 3),
            rejected=(3,),
            admitted=(1,),
            prefilled=(Chunk(1, 0, 4),),
            finished=(FinishEvent(3, "rejected"),),
        ),
        record(1),
        record(2, admitted=(2,), prefilled=(Chunk(2, 0, 3),), decoded=(1, 2)),
        record(3, preempted=(Preemption(1, 6, True, False),), decoded=(2,), results=(DeliveredRound(2, 3, 3, 2),)),
        record(4, decoded=(2,), finished=(FinishEvent(2, "length"),)),
        record(5, admitted=(1,), resumed=(1,), prefilled=(Chunk(1, 0, 6),)),
        record(6),
    ]
    figure = plots.timeline(Trace(records))
    assert {kind: sorted(marks(figure, kind)) for kind in ("wait", "prefill", "both", "round", "place", "preempt")} == {
        "wait": ["1:4", "2:0", "2:1", "3:0"],
        "prefill": ["1:0", "1:5"],
        "both": ["2:2"],
        "round": ["1:2", "2:3", "2:4"],
        "place": ["1:1", "1:6"],
        "preempt": ["1:3"],
    }
    said = texts(figure)
    assert [said.count(text) for text in ("rejected", "length")] == [1, 1]
    assert "7 steps, 2 tokens read from 1 rounds, 13 prompt tokens prefilled" in said


def test_a_timeline_of_some_steps_shows_those_only(served):
    figure = plots.timeline(served.trace, first=2, last=4)
    shown = {int(mark.split(":")[1]) for kind in ("round", "both", "prefill", "wait") for mark in marks(figure, kind)}
    assert shown == {2, 3, 4}
    kept = sum(each.num_kept for record in served.trace.records[2:5] for each in record.results)
    assert any(f"3 steps, {kept} tokens read" in text for text in texts(figure))
    assert texts(plots.timeline(served.trace, first=10_000)) == ["no request in these steps"]


@pytest.fixture(scope="module")
def servers():
    """The same setting on two GPUs, one with little arithmetic throughput."""
    target = model("llama-3.1-8b")
    law = PerPosition((0.73, 0.52, 0.35))
    setting = Option(SpecConfig(1, 3, 4), law)
    head, work = drafter("eagle3", target, 32000), closed_loop(4, 1, 1024, 256)
    return {name: Scenario(target, hardware(name), head, setting, work) for name in ("H100-SXM", "H20")}


def test_speedup_draws_scenarios_and_their_crossovers(servers):
    figure = plots.speedup(servers, most=64)
    lines = {line.get_gid(): line for line in figure.axes[0].lines}
    for name, scenario in servers.items():
        drawn = dict(zip(*(values.tolist() for values in lines[f"speedup:{name}"].get_data()), strict=True))
        assert {1, 16, 64} <= set(drawn)
        for size in (1, 16, 64):
            plain, drafts = (scenario.phases(option, size).total for option in (scenario.plain, scenario.option))
            assert drawn[size] == pytest.approx(2.6 * plain / drafts)
    size = servers["H20"].crossover()
    assert servers["H20"].speedup(size) < 1 <= servers["H20"].speedup(size - 1)
    assert [gid for gid in lines if gid.startswith("crossover")] == [f"crossover:H20:{size}"]
    assert {"H20", "H100-SXM", str(size)} <= {text.get_text() for text in figure.findobj(Text)}


def test_speedup_names_its_parameters_and_draws_their_range(servers):
    figure = plots.speedup({"H20": servers["H20"]}, most=16)
    (band,) = [each for each in figure.axes[0].collections if each.get_gid() == "range:H20"]
    corners = {(x, round(y, 9)) for x, y in band.get_paths()[0].vertices.tolist()}
    for size in (1, 16):
        expected = speedup_range(servers["H20"], size)
        assert {(size, round(expected.lowest, 9)), (size, round(expected.highest, 9))} <= corners
    assert any(text.startswith("uncalibrated, simulated; bands: with the parameters") for text in texts(figure))
    given = {"H20": replace(servers["H20"], efficiency=Efficiency(gap=1e-6))}
    words = "simulated with gap 1e-06 as given, uncalibrated otherwise"
    assert any(text.startswith(f"{words}; bands:") for text in texts(plots.speedup(given, most=16)))


def test_speedup_refuses_what_has_none(servers):
    plain = replace(servers["H20"], option=Option.plain())
    six = dict.fromkeys("abcdef", servers["H20"])
    for scenarios, value in (({}, 0), (six, 6), ({"a": plain}, "a")):
        wrong = ("scenarios", value)
        with pytest.raises(InputError, check=lambda error, wrong=wrong: (error.name, error.value) == wrong):
            plots.speedup(scenarios)


def test_what_is_no_round_is_not_drawn():
    here = play(SETTINGS["the demo's"])
    none_of = {
        "verify_input": [
            lambda: plots.tree(None, None, decode),
            lambda: plots.mask(None),
            lambda: plots.kv_move(None, None, decode),
            lambda: plots.kv_pages(here.pools, here.batch, here.config, here.output),
        ],
        "verdict": [lambda: plots.tree(here.tree, 3, decode), lambda: plots.kv_move(here.tree, None, decode)],
        "decode": [lambda: plots.tree(here.tree, None, None), lambda: plots.mask(here.tree, decode="text")],
        "request": [lambda: plots.tree(here.tree, None, decode, 2), lambda: plots.mask(here.tree, -1)],
        "pools": [lambda: plots.kv_pages(None, None, None), lambda: plots.slots(None, here.batch, here.config)],
        "batch": [lambda: plots.kv_pages(here.pools, None, here.config)],
        "config": [lambda: plots.slots(here.pools, here.batch, None)],
        "trace": [lambda: plots.timeline(None)],
    }
    for name, draws in none_of.items():
        for draw in draws:
            with pytest.raises(InputError, check=lambda error, name=name: error.name == name):
                draw()
