"""Pictures of one round: its token tree, its mask, and where its KV lies. Needs matplotlib.

Every artist that stands for something carries it in its gid (`node:3`, `edge:0-3`, `slot:17:tree`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import groupby

from specsim.config import SpecConfig
from specsim.phases import Batch, Verdict, VerifyInput
from specsim.pool import KVPool, lane_columns, tail_columns

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties, findfont, get_font
    from matplotlib.patches import FancyBboxPatch, Rectangle
except ImportError as error:
    raise ImportError("specsim.plots needs matplotlib: pip install 'specsim[notebooks]'") from error

FONT = "DejaVu Sans Mono"
EM = 0.602 / 72  # width of a character, in inches a point of size
WIDTH = 10.0
INK, FAINT = "#1A1A1A", "#6E6E6E"

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Look:
    """How a kind of thing is drawn; told apart without colour by its border."""

    meaning: str
    face: str
    edge: str
    width: float = 0.8
    dashed: bool = False


# Hues of Okabe and Ito: told apart with any colour vision.
ACCEPTED = Look("accepted", "#BFE5D8", "#00664B", 2.0)
DRAFT = Look("draft", "#FFFFFF", "#8A8A8A")
BONUS = Look("bonus: the target's own next token", "#FBE0B0", "#A35F00", 2.0, dashed=True)
PREFIX = Look("committed prefix", "#CBE3F3", "#0072B2")
ANCESTOR = Look("ancestor", "#0072B2", "#0072B2")
ITSELF = Look("itself", "#F0C24B", "#7A4F00", 1.4)
TREE = Look("tree node", "#FFFFFF", "#8A8A8A")
LANE = Look("draft lane k, step s", "#F3D9E7", "#A2487D")
TAIL = Look("copy of the prefix's tail", "#FBF1F6", "#A2487D", dashed=True)
SPARE = Look("owned, not in use", "#F1F1F1", "#C4C4C4")
FREE = Look("free", "#FFFFFF", "#DDDDDD")
KINDS = {
    "committed": PREFIX,
    "accepted": ACCEPTED,
    "tree": TREE,
    "lane": LANE,
    "tail": TAIL,
    "spare": SPARE,
    "free": FREE,
}


class Picture(Figure):
    """A figure that a notebook shows by itself, without pyplot."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png", dpi=100, pil_kwargs={"optimize": True})
        return file.getvalue()


def _sheet(width: float, height: float) -> tuple[Picture, Axes]:
    """Axes over the whole figure in inches, y downwards."""
    figure = Picture(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def _text(axes: Axes, x: float, y: float, text: str, size: float = 8, color: str = INK, **options) -> None:
    """Text as it is: a dollar sign starts no formula."""
    options = {"va": "center", "family": FONT, "parse_math": False} | options
    axes.text(x, y, text, fontsize=size, color=color, **options)


def _box(axes: Axes, x: float, y: float, width: float, height: float, look: Look, gid: str) -> None:
    shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.05")
    axes.add_patch(_dress(shape, look, gid))


def _cell(axes: Axes, x: float, y: float, width: float, height: float, look: Look, gid: str) -> None:
    axes.add_patch(_dress(Rectangle((x, y), width, height), look, gid))


def _dress(shape, look: Look, gid: str):
    style = (0, (2.5, 1.5)) if look.dashed else "solid"
    shape.set(facecolor=look.face, edgecolor=look.edge, linewidth=look.width, linestyle=style, gid=gid)
    shape.set_zorder(1 + look.width / 10)  # a thin border never covers a thick one
    return shape


def _legend(axes: Axes, y: float, looks: Sequence[Look], left: float = 0.2, room: float = WIDTH) -> None:
    """Swatches and what they mean; goes on in a next line where the room ends."""
    x = left
    for look in looks:
        length = 0.32 + len(look.meaning) * 7 * EM
        if x > left and x + length > room:
            x, y = left, y + 0.22
        _cell(axes, x, y - 0.06, 0.2, 0.12, look, "legend")
        _text(axes, x + 0.27, y, look.meaning, 7, FAINT)
        x += length + 0.2


def shown(text: str, most: int = 14) -> str:
    """A token as a picture shows it: blanks visible, no longer than `most`, only characters that the font has."""
    font = get_font(findfont(FontProperties(family=FONT)))
    pieces = []
    for character, run in groupby(text):
        count = len(list(run))
        if character == " ":
            pieces.append("␣" * count if count < 4 else f"␣×{count}")
        elif character.isprintable() and font.get_char_index(ord(character)):
            pieces.append(character * count)
        else:
            pieces.append(ascii(character)[1:-1] * count)
    whole = "".join(pieces)
    return whole if len(whole) <= most else whole[: most - 1] + "…"


def _depths(parents: Sequence[int]) -> list[int]:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def _places(parents: Sequence[int]) -> list[float]:
    """Row of every node: leaves one below the other in the order of a walk, a parent midway between its children."""
    children = [[node for node, parent in enumerate(parents) if parent == this] for this in range(len(parents))]
    rows, ahead, leaves = [0.0] * len(parents), [0], 0
    while ahead:
        node = ahead.pop()
        ahead.extend(reversed(children[node]))
        if not children[node]:
            rows[node], leaves = leaves, leaves + 1
    for node in reversed(range(len(parents))):
        if children[node]:
            rows[node] = (rows[children[node][0]] + rows[children[node][-1]]) / 2
    return rows


def path_of(verdict: Verdict | None, request: int, num_nodes: int) -> list[int]:
    """Accepted nodes of a request, root first; none without a verdict."""
    if verdict is None:
        return []
    count = int(verdict.num_accepted_tokens[request])
    return [node - request * num_nodes for node in verdict.accept_index[request, :count].tolist()]


def tree(verify_input: VerifyInput, verdict: Verdict | None, decode: Decode, request: int = 0) -> Picture:
    """The token tree, root on the left: node number, token and score in a box, the accepted path and its bonus marked.

    decode: token ids to text. The score is the drafter's, of the whole path down to the node.
    """
    parents, scores = verify_input.parents[request].tolist(), verify_input.scores[request].tolist()
    tokens, num_nodes = verify_input.draft_tokens[request].tolist(), len(parents)
    path = path_of(verdict, request, num_nodes)
    if path:  # the bonus token as one more node
        tokens.append(int(verdict.predict[request * num_nodes + path[-1]]))
        parents, scores, path = [*parents, path[-1]], [*scores, None], [*path, num_nodes]
    depths, rows = _depths(parents), _places(parents)
    texts = [shown(decode([token]), 14 if max(depths) <= 6 else 9) for token in tokens]
    lefts, rights = _levels(depths, texts)
    top, pitch, width = 1.0, 0.34, max(rights[-1] + 0.2, 6.4)
    bottom = top + (max(rows) + 1) * pitch
    figure, axes = _sheet(width, bottom + 0.5)
    _tree_head(axes, verify_input, verdict, request, lefts)
    for node, (parent, depth) in enumerate(zip(parents, depths, strict=True)):
        look = BONUS if node == num_nodes else ACCEPTED if node in path else DRAFT
        x, y = lefts[depth], top + rows[node] * pitch + 0.14
        if parent >= 0:
            start = rights[depth - 1], top + rows[parent] * pitch + 0.14
            _edge(axes, start, (x, y), look, f"edge:{parent}-{node}")
        _box(axes, x, y - 0.13, rights[depth] - x, 0.26, look, "bonus" if look is BONUS else f"node:{node}")
        _text(axes, x + 0.32, y, texts[node], 9, weight="bold" if node in path else "normal")
        if look is not BONUS:
            _text(axes, x + 0.06, y, str(node), 6.5, FAINT)
            _text(axes, rights[depth] - 0.06, y, f"{max(scores[node], -99):.3f}", 6.5, FAINT, ha="right")
    _legend(axes, bottom + 0.22, [ACCEPTED, DRAFT, BONUS] if path else [DRAFT], room=width)
    return figure


def _levels(depths: list[int], texts: list[str]) -> tuple[list[float], list[float]]:
    """Left and right edge of the boxes of every depth, wide enough for its longest text."""
    lefts, rights = [], []
    for depth in range(max(depths) + 1):
        length = max(len(text) for text, own in zip(texts, depths, strict=True) if own == depth)
        lefts.append(rights[-1] + 0.34 if rights else 0.2)
        rights.append(lefts[-1] + max(length * 9 * EM + 0.88, 0.95))
    return lefts, rights


def _tree_head(axes: Axes, verify_input: VerifyInput, verdict: Verdict | None, request: int, lefts) -> None:
    num_nodes = verify_input.draft_tokens.shape[1]
    title = f"request {request}: a tree of {num_nodes} nodes"
    if verdict is not None:
        drafts, tokens = int(verdict.num_accepted_drafts[request]), int(verdict.num_accepted_tokens[request])
        title += f", num_accepted_drafts {drafts}, num_accepted_tokens {tokens}"
    _text(axes, 0.2, 0.22, title, 9.5, weight="bold")
    _text(axes, 0.2, 0.46, "in a box: node, token, score (the drafter's, of the path from the root)", 7, FAINT)
    root = int(verify_input.positions[request * num_nodes])
    for depth, x in enumerate(lefts):
        _text(axes, x, 0.78, f"position {root + depth}", 6.5, FAINT)


def _edge(axes: Axes, start: tuple[float, float], end: tuple[float, float], look: Look, gid: str) -> None:
    middle, style = end[0] - 0.2, (0, (2.5, 1.5)) if look.dashed else "solid"
    line = {"color": look.edge, "linewidth": look.width, "linestyle": style, "zorder": 0.5 + look.width / 10}
    axes.plot((start[0], middle, middle, end[0]), (start[1], start[1], end[1], end[1]), gid=gid, **line)


def mask(verify_input: VerifyInput, request: int = 0, decode: Decode | None = None) -> Picture:
    """Who sees whom in verify: a row for each node, a column for each key; the prefix is drawn as one."""
    mask_NN, tokens = verify_input.mask[request].tolist(), verify_input.draft_tokens[request].tolist()
    num_nodes = len(tokens)
    positions = verify_input.positions.view(-1, num_nodes)[request].tolist()
    length, cell = positions[0], min(0.32, max(0.17, 7.0 / num_nodes))
    texts = [shown(decode([token])) for token in tokens] if decode else [""] * num_nodes
    label = max(map(len, texts)) * 8 * EM
    left, top, prefix = 0.55 + label, 0.95, 1.25
    first, side = left + prefix + 0.1, num_nodes * cell
    width = max(first + side + 0.8, 6.4)
    figure, axes = _sheet(width, top + side + 0.5)
    _text(axes, 0.2, 0.22, f"request {request}: what each of {num_nodes} rows sees", 9.5, weight="bold")
    nodes = f"the nodes in columns {length}…{length + num_nodes - 1}"
    _text(axes, 0.2, 0.46, f"down: nodes; across: the prefix as one, then {nodes}", 7, FAINT)
    _text(axes, left + prefix / 2, top - 0.12, f"columns 0…{length - 1}", 6.5, FAINT, ha="center")
    _text(axes, first + side + 0.06, top - 0.12, "position", 6.5, FAINT)
    for row, (sees, text) in enumerate(zip(mask_NN, texts, strict=True)):
        y = top + row * cell
        _text(axes, 0.2, y + cell / 2, text, 8)
        _text(axes, left - 0.06, y + cell / 2, str(row), 6.5, FAINT, ha="right")
        _text(axes, first + row * cell + cell / 2, top - 0.12, str(row), 6.5, FAINT, ha="center")
        _text(axes, first + side + 0.1, y + cell / 2, str(positions[row]), 6.5, FAINT)
        _cell(axes, left, y, prefix, cell, PREFIX, f"prefix:{row}")
        for column, visible in enumerate(sees):
            look, gid = (ITSELF if row == column else ANCESTOR, "sees") if visible else (FREE, "hidden")
            _cell(axes, first + column * cell, y, cell, cell, look, f"{gid}:{row}-{column}")
    _legend(axes, top + side + 0.25, [PREFIX, ANCESTOR, ITSELF], room=width)
    return figure


@dataclass(frozen=True, slots=True)
class Slot:
    """What a slot of the pools holds: the table row that owns it (-1: free), its logical column, and a short label."""

    kind: str
    row: int = -1
    column: int = -1
    label: str = ""


def slots(
    pools: KVPool,
    batch: Batch,
    config: SpecConfig,
    verify_input: VerifyInput | None = None,
    verdict: Verdict | None = None,
    committed: bool = True,
) -> list[Slot]:
    """Every slot of the pools in a round of `batch`, whose seq_lens are those before the round.

    Without a tree: the draft lanes. With a tree: its nodes. With a verdict: the accepted nodes where the commit puts
    them, or (committed=False) where verify wrote them.
    """
    found, table = [Slot("free")] * pools.target.keys.shape[1], pools.req_to_token.tolist()
    for row, columns in enumerate(table):
        for column, slot in enumerate(columns):
            if slot >= 0:
                found[slot] = Slot("spare", row, column)
    for request, (row, length) in enumerate(batch.rows_and_lens):
        kinds = dict.fromkeys(range(length), ("committed", ""))
        if verify_input is None:
            kinds = _lanes(length, config) | kinds
        else:
            kinds |= _nodes(verify_input, verdict, request, length, committed)
        for column, (kind, label) in kinds.items():
            if table[row][column] >= 0:
                found[table[row][column]] = Slot(kind, row, column, label)
    return found


def _lanes(length: int, config: SpecConfig) -> dict[int, tuple[str, str]]:
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
    path = path_of(verdict, request, len(locations))
    if verdict is not None and committed:
        return {length + depth: ("accepted", str(node)) for depth, node in enumerate(path)}
    live = [node for node, slot in enumerate(locations) if slot >= 0]
    return {length + node: ("accepted" if node in path else "tree", str(node)) for node in live}


def kv_pages(
    pools: KVPool,
    batch: Batch,
    config: SpecConfig,
    verify_input: VerifyInput | None = None,
    verdict: Verdict | None = None,
    committed: bool = True,
) -> Picture:
    """Map of the pools, slot after slot, pages apart: owner above, logical column in the cell, and under it the node
    or the lane that the slot serves. The arguments are those of `slots`.
    """
    found, page, cell, gap = slots(pools, batch, config, verify_input, verdict, committed), pools.page_size, 0.26, 0.06
    per_line = min(page, 32) if page > 16 else 32 // page * page
    lines = [list(range(start, min(start + per_line, len(found)))) for start in range(0, len(found), per_line)]
    names = dict(zip(batch.req_pool_indices.tolist(), batch.request_ids.tolist(), strict=True))
    pieces = list(_elided(lines, found, names))
    heights = [0.28 if isinstance(piece, str) else 0.62 for piece in pieces]
    figure, axes = _sheet(WIDTH, 0.95 + sum(heights) + 0.42)
    title = "the draft lanes" if verify_input is None else "the tree, before the commit"
    if verdict is not None and committed:
        title = "after the commit"
    _text(axes, 0.2, 0.22, f"page_size {page}: {title}", 9.5, weight="bold")
    scratch = "lane.step" if verify_input is None else "tree node"
    _text(axes, 0.2, 0.46, f"in a cell: logical column, and below it the {scratch} that the slot serves", 7, FAINT)
    _text(axes, 0.2, 0.72, "slot", 6.5, FAINT)
    y = 0.75
    for piece, height in zip(pieces, heights, strict=True):
        if isinstance(piece, str):
            _text(axes, 0.7, y + 0.1, piece, 7, FAINT)
        else:
            _text(axes, 0.2, y + 0.35, str(piece[0]), 7, FAINT)
            _pages_line(axes, [(slot, found[slot]) for slot in piece], y, names, (cell, gap, page))
        y += height
    present = {slot.kind for slot in found}
    _legend(axes, y + 0.2, [look for kind, look in KINDS.items() if kind in present])
    return figure


def _owner(row: int, names: dict[int, int]) -> str:
    return f"request {names[row]}" if row in names else f"row {row}"


def _elided(lines: list[list[int]], found: list[Slot], names: dict[int, int]) -> Iterator[list[int] | str]:
    """The lines; those in which nothing is in use, and three and more of one prefix, become a sentence."""

    def same(line: list[int]) -> object:
        kinds = {(found[slot].kind, found[slot].row) for slot in line}
        quiet = len(kinds) == 1 and next(iter(kinds))[0] in ("free", "committed", "spare")
        return next(iter(kinds)) if quiet else line[0]

    for key, run in groupby(lines, same):
        run = list(run)
        if not isinstance(key, tuple) or (key[0] == "committed" and len(run) < 3):
            yield from run
        else:
            owner = "" if key[1] < 0 else f"{_owner(key[1], names)}, "
            yield f"slots {run[0][0]}…{run[-1][-1]}: {owner}{KINDS[key[0]].meaning}"


def _pages_line(axes: Axes, line, y: float, names: dict[int, int], sizes: tuple[float, float, int]) -> None:
    cell, gap, page = sizes
    first = line[0][0]
    gap = gap if page > 1 else 0
    lefts = {slot: 0.7 + (slot - first) * cell + (slot // page - first // page) * gap for slot, _ in line}
    for row, run in groupby(line, lambda each: each[1].row):
        run = [slot for slot, _ in run]
        if row >= 0:
            name, right = _owner(row, names), lefts[run[-1]] + cell
            axes.plot((lefts[run[0]], right - 0.05), (y + 0.14, y + 0.14), color=INK, linewidth=1.2, gid=f"owner:{row}")
            if len(name) * 6.5 * EM <= right - lefts[run[0]]:
                _text(axes, lefts[run[0]], y + 0.06, name, 6.5)
    for slot, held in line:
        _cell(axes, lefts[slot], y + 0.18, cell, 0.34, KINDS[held.kind], f"slot:{slot}:{held.kind}")
        middle = lefts[slot] + cell / 2
        if held.kind != "free":
            _text(axes, middle, y + 0.265, str(held.column), 5.5, FAINT, ha="center")
            weight = "bold" if held.kind == "accepted" else "normal"
            _text(axes, middle, y + 0.42, held.label, 7 if len(held.label) < 4 else 5.5, ha="center", weight=weight)


def kv_move(verify_input: VerifyInput, verdict: Verdict, decode: Decode, request: int = 0) -> Picture:
    """The commit of one request: above, the tree's nodes in columns L…L+N-1; below, the accepted path in L…L+n."""
    tokens, num_nodes = verify_input.draft_tokens[request].tolist(), verify_input.draft_tokens.shape[1]
    length = int(verify_input.positions[request * num_nodes])
    locations = verify_input.cache_locations.view(-1, num_nodes)[request].tolist()
    path, cell, left = path_of(verdict, request, num_nodes), min(0.6, max(0.27, 8.2 / num_nodes)), 1.35
    texts = [shown(decode([token])) for token in tokens]
    above = 0.62 + max(map(len, texts)) * 7.5 * EM
    below, width = above + 1.15, max(left + num_nodes * cell + 0.3, 6.4)
    figure, axes = _sheet(width, below + 1.15)
    title = f"request {request}: the accepted path moves to columns {length}…{length + len(path) - 1}"
    _text(axes, 0.2, 0.22, title, 9.5, weight="bold")
    for y, name in ((above + 0.2, "verify wrote"), (below + 0.2, "after commit"), (below + 0.5, "column")):
        _text(axes, 0.2, y, name, 7, FAINT)
    _text(axes, 0.2, below + 0.66, "slot", 7, FAINT)
    for node, (text, slot) in enumerate(zip(texts, locations, strict=True)):
        x, middle = left + node * cell, left + (node + 0.5) * cell
        _cell(axes, x, above, cell, 0.4, ACCEPTED if node in path else TREE, f"before:{node}")
        _text(axes, middle, above + 0.2, str(node), 8, ha="center", weight="bold" if node in path else "normal")
        _text(axes, middle, above - 0.06, text, 7.5, ha="center", va="bottom", rotation=90)
        moved = path[node : node + 1]
        _cell(axes, x, below, cell, 0.4, ACCEPTED if moved else SPARE, f"after:{node}")
        _text(axes, middle, below + 0.2, "".join(map(str, moved)), 8, ha="center", weight="bold")
        _text(axes, middle, below + 0.5, str(length + node), 6, FAINT, ha="center")
        _text(axes, middle, below + 0.66, str(slot), 6, FAINT, ha="center")
    for depth, node in enumerate(path):
        ends = {"xy": (left + (depth + 0.5) * cell, below - 0.02), "xytext": (left + (node + 0.5) * cell, above + 0.42)}
        arrow = {"arrowstyle": "-|>", "color": ACCEPTED.edge, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", **ends, arrowprops=arrow, gid=f"move:{node}-{depth}")
    _legend(axes, below + 0.95, [ACCEPTED, TREE, SPARE], room=width)
    return figure
