"""Maps of a round's KV in the pools, and of the commit."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from specsim.core.arguments import check_arguments
from specsim.core.config import SpecConfig
from specsim.core.errors import require
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.core.pool import KVPool, lane_columns, tail_columns
from specsim.plots.sheet import (
    ACCEPTED,
    EM,
    FAINT,
    INK,
    KINDS,
    SPARE,
    TREE,
    WIDTH,
    Axes,
    Decode,
    Picture,
    draw_cell,
    draw_legend,
    draw_text,
    new_sheet,
    visible_token,
)
from specsim.plots.token_tree import check_round


@dataclass(frozen=True, slots=True)
class Slot:
    """The content of a slot of the pools."""

    kind: str
    row: int = -1  # of the table, -1: free
    column: int = -1  # logical column
    label: str = ""


@check_arguments
def slots(
    pools: KVPool,
    batch: Batch,
    config: SpecConfig,
    verify_input: VerifyInput | None = None,
    verdict: Verdict | None = None,
    committed: bool = True,
    bonus_columns: int = 0,
) -> list[Slot]:
    """Find the content of every slot of the pools in a round of `batch`, given its seq_lens before the round.

    Without a tree: the draft lanes, which begin `bonus_columns` columns of the drafter after the prefix. With a tree:
    its nodes. With a verdict: the accepted nodes where the commit puts them, or (committed=False)
    where verify wrote them.
    """
    if verify_input is not None:
        check_round(verify_input, verdict, 0)
    pool_slots = [Slot("free")] * pools.target.keys.shape[1]
    table = pools.req_to_token.tolist()
    for row, columns in enumerate(table):
        for column, slot in enumerate(columns):
            if slot >= 0:
                pool_slots[slot] = Slot("spare", row, column)
    for request, (row, length) in enumerate(batch.rows_and_lens):
        kinds = dict.fromkeys(range(length), ("committed", ""))
        if verify_input is None:
            kinds = _lanes(length + bonus_columns, config) | kinds
        else:
            kinds |= _nodes(verify_input, verdict, request, length, committed)
        allowed = f"draft lanes within the {len(table[row])} columns of a request"
        require(max(kinds, default=0) < len(table[row]), "bonus_columns", bonus_columns, allowed)
        for column, (kind, label) in kinds.items():
            if table[row][column] >= 0:
                pool_slots[table[row][column]] = Slot(kind, row, column, label)
    return pool_slots


def _lanes(length: int, config: SpecConfig) -> dict[int, tuple[str, str]]:
    """Name the columns of the lanes of a drafter whose prefix has that many columns."""
    kinds = {}
    for lane, (tail, steps) in enumerate(
        zip(tail_columns(length, config).tolist(), lane_columns(length, config).tolist(), strict=True)
    ):
        kinds |= {column: ("tail", str(lane)) for column in tail}
        kinds |= {column: ("lane", f"{lane}.{step}") for step, column in enumerate(steps)}
    return kinds


def _nodes(
    verify_input: VerifyInput, verdict: Verdict | None, request: int, length: int, committed: bool
) -> dict[int, tuple[str, str]]:
    locations = verify_input.cache_locations.view_as(verify_input.draft_tokens)[request].tolist()
    path = [] if verdict is None else verdict.accepted_path(request)
    if verdict is not None and committed:
        return {length + depth: ("accepted", str(node)) for depth, node in enumerate(path)}
    live = [node for node, slot in enumerate(locations) if slot >= 0]
    return {length + node: ("accepted" if node in path else "tree", str(node)) for node in live}


@check_arguments
def kv_pages(
    pools: KVPool,
    batch: Batch,
    config: SpecConfig,
    verify_input: VerifyInput | None = None,
    verdict: Verdict | None = None,
    committed: bool = True,
    bonus_columns: int = 0,
) -> Picture:
    """Draw a map of the pools, slot by slot in pages.

    The owner stands above, the logical column in the cell, and below it the node or the lane that the slot serves. The
    arguments are those of `slots`.
    """
    pool_slots = slots(pools, batch, config, verify_input, verdict, committed, bonus_columns)
    page = pools.page_size
    per_line = min(page, 32) if page > 16 else 32 // page * page
    lines = [
        list(range(start, min(start + per_line, len(pool_slots)))) for start in range(0, len(pool_slots), per_line)
    ]
    names = dict(zip(batch.req_pool_indices.tolist(), batch.request_ids.tolist(), strict=True))
    pieces = list(_elided(lines, pool_slots, names))
    heights = [0.28 if isinstance(piece, str) else 0.62 for piece in pieces]
    figure, axes = new_sheet(WIDTH, 0.95 + sum(heights) + 0.42)
    title = "the draft lanes" if verify_input is None else "the tree, before the commit"
    if verdict is not None and committed:
        title = "after the commit"
    draw_text(axes, 0.2, 0.22, f"page_size {page}: {title}", 9.5, weight="bold")
    scratch = "lane.step" if verify_input is None else "tree node"
    draw_text(axes, 0.2, 0.46, f"in a cell: logical column, and below it the {scratch} that the slot serves", 7, FAINT)
    draw_text(axes, 0.2, 0.72, "slot", 6.5, FAINT)
    y = 0.75
    for piece, height in zip(pieces, heights, strict=True):
        if isinstance(piece, str):
            draw_text(axes, 0.7, y + 0.1, piece, 7, FAINT)
        else:
            draw_text(axes, 0.2, y + 0.35, str(piece[0]), 7, FAINT)
            _pages_line(axes, {slot: pool_slots[slot] for slot in piece}, y, names, page)
        y += height
    present = {slot.kind for slot in pool_slots}
    draw_legend(axes, y + 0.2, [look for kind, look in KINDS.items() if kind in present])
    figure.description = _in_words(f"KV slots in pages of {page}: {title}", pool_slots, names)
    return figure


def _in_words(title: str, pool_slots: list[Slot], names: dict[int, int]) -> str:
    """Count the slots of each owner by what they hold."""
    counts: dict[str, dict[str, int]] = {}
    for slot in pool_slots:
        owner = "nobody" if slot.row < 0 else _owner(slot.row, names)
        kinds = counts.setdefault(owner, {})
        meaning = KINDS[slot.kind].meaning
        kinds[meaning] = kinds.get(meaning, 0) + 1
    owners = (
        f"{owner}: {', '.join(f'{count} {meaning}' for meaning, count in kinds.items())}"
        for owner, kinds in counts.items()
    )
    return f"{title}. {'; '.join(owners)}."


def _owner(row: int, names: dict[int, int]) -> str:
    return f"request {names[row]}" if row in names else f"row {row}"


def _elided(lines: list[list[int]], pool_slots: list[Slot], names: dict[int, int]) -> Iterator[list[int] | str]:
    """Yield the lines; runs of unused slots, and three or more lines of one prefix, become a sentence."""

    def same(line: list[int]) -> object:
        kinds = {(pool_slots[slot].kind, pool_slots[slot].row) for slot in line}
        quiet = len(kinds) == 1 and next(iter(kinds))[0] in ("free", "committed", "spare")
        return next(iter(kinds)) if quiet else line[0]

    for key, run in groupby(lines, same):
        run = list(run)
        if not isinstance(key, tuple) or (key[0] == "committed" and len(run) < 3):
            yield from run
        else:
            owner = "" if key[1] < 0 else f"{_owner(key[1], names)}, "
            yield f"slots {run[0][0]}…{run[-1][-1]}: {owner}{KINDS[key[0]].meaning}"


def _pages_line(axes: Axes, line: dict[int, Slot], y: float, names: dict[int, int], page: int) -> None:
    cell = 0.26
    gap = 0.06 if page > 1 else 0
    first = min(line)
    lefts = {slot: 0.7 + (slot - first) * cell + (slot // page - first // page) * gap for slot in line}
    for row, run in groupby(line, lambda slot: line[slot].row):
        run = list(run)
        if row >= 0:
            name = _owner(row, names)
            right = lefts[run[-1]] + cell
            axes.plot((lefts[run[0]], right - 0.05), (y + 0.14, y + 0.14), color=INK, linewidth=1.2, gid=f"owner:{row}")
            if len(name) * 6.5 * EM <= right - lefts[run[0]]:
                draw_text(axes, lefts[run[0]], y + 0.06, name, 6.5)
    for slot, held in line.items():
        draw_cell(axes, lefts[slot], y + 0.18, cell, 0.34, KINDS[held.kind], f"slot:{slot}:{held.kind}")
        middle = lefts[slot] + cell / 2
        if held.kind != "free":
            draw_text(axes, middle, y + 0.265, str(held.column), 5.5, FAINT, ha="center")
            weight = "bold" if held.kind == "accepted" else "normal"
            draw_text(axes, middle, y + 0.42, held.label, 7 if len(held.label) < 4 else 5.5, ha="center", weight=weight)


@check_arguments
def kv_move(verify_input: VerifyInput, verdict: Verdict, decode: Decode, request: int = 0) -> Picture:
    """Draw one request's commit: the tree's nodes in columns L…L+N-1, and the accepted path in L…L+n."""
    check_round(verify_input, verdict, request, decode)
    tokens = verify_input.draft_tokens[request].tolist()
    num_nodes = verify_input.draft_tokens.shape[1]
    length = int(verify_input.positions[request * num_nodes])
    locations = verify_input.cache_locations.view(-1, num_nodes)[request].tolist()
    path = verdict.accepted_path(request)
    cell = min(0.6, max(0.27, 8.2 / num_nodes))
    x_left = 1.35
    texts = [visible_token(decode([token])) for token in tokens]
    longest = max(map(len, texts)) * 7.5 * EM
    is_upright = longest > cell - 0.06
    above = 0.62 + (longest if is_upright else 0.1)
    below = above + 1.15
    width = max(x_left + num_nodes * cell + 0.3, 6.4)
    figure, axes = new_sheet(width, below + 1.15)
    title = f"request {request}: the accepted path moves to columns {length}…{length + len(path) - 1}"
    draw_text(axes, 0.2, 0.22, title, 9.5, weight="bold")
    for y, name in ((above + 0.2, "verify wrote"), (below + 0.2, "after commit"), (below + 0.5, "column")):
        draw_text(axes, 0.2, y, name, 7, FAINT)
    draw_text(axes, 0.2, below + 0.66, "slot", 7, FAINT)
    for node, (text, slot) in enumerate(zip(texts, locations, strict=True)):
        x = x_left + node * cell
        middle = x_left + (node + 0.5) * cell
        draw_cell(axes, x, above, cell, 0.4, ACCEPTED if node in path else TREE, f"before:{node}")
        draw_text(axes, middle, above + 0.2, str(node), 8, ha="center", weight="bold" if node in path else "normal")
        draw_text(axes, middle, above - 0.06, text, 7.5, ha="center", va="bottom", rotation=90 if is_upright else 0)
        accepted_depth = path[node : node + 1]
        draw_cell(axes, x, below, cell, 0.4, ACCEPTED if accepted_depth else SPARE, f"after:{node}")
        draw_text(axes, middle, below + 0.2, "".join(map(str, accepted_depth)), 8, ha="center", weight="bold")
        draw_text(axes, middle, below + 0.5, str(length + node), 6, FAINT, ha="center")
        draw_text(axes, middle, below + 0.66, str(slot), 6, FAINT, ha="center")
    for depth, node in enumerate(path):
        start = (x_left + (node + 0.5) * cell, above + 0.42)
        end = (x_left + (depth + 0.5) * cell, below - 0.02)
        arrow = {"arrowstyle": "-|>", "color": ACCEPTED.edge, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", end, start, arrowprops=arrow, gid=f"move:{node}-{depth}")
    draw_legend(axes, below + 0.95, [ACCEPTED, TREE, SPARE], room=width)
    moves = ", ".join(f"node {node} to column {length + depth}" for depth, node in enumerate(path))
    figure.description = f"The commit of request {request}: {moves}."
    return figure
