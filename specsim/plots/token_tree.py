"""Pictures of a round's token tree and of its mask."""

from collections.abc import Sequence

from specsim.core.arguments import check_arguments
from specsim.core.errors import require, require_int, require_type
from specsim.core.phases import Verdict, VerifyInput
from specsim.plots.sheet import (
    ACCEPTED,
    ANCESTOR,
    BONUS,
    DRAFT,
    EM,
    FAINT,
    FREE,
    ITSELF,
    PREFIX,
    Axes,
    Decode,
    Look,
    Picture,
    draw_box,
    draw_cell,
    draw_legend,
    draw_text,
    new_sheet,
    visible_token,
)


def _places(parents: Sequence[int]) -> list[float]:
    """Place every node in a row: leaves in walk order, a parent midway between its children."""
    children = [[node for node, parent in enumerate(parents) if parent == this] for this in range(len(parents))]
    rows = [0.0] * len(parents)
    ahead = [0]
    leaves = 0
    while ahead:
        node = ahead.pop()
        ahead.extend(reversed(children[node]))
        if not children[node]:
            rows[node] = leaves
            leaves += 1
    for node in reversed(range(len(parents))):
        if children[node]:
            rows[node] = (rows[children[node][0]] + rows[children[node][-1]]) / 2
    return rows


def check_round(verify_input: VerifyInput, verdict: Verdict | None, request: int, *decoders: Decode) -> None:
    """Raise InputError for missing states of a round, an unknown request, and plain decoding."""
    if verdict is not None:
        require_type("verdict", verdict, Verdict, "the verdict of a round's VerifyOutput, or None")
    require_int("request", request, 0, verify_input.draft_tokens.shape[0] - 1)
    for decode in decoders:
        require(callable(decode), "decode", decode, "a function that makes text of token ids")


@check_arguments
def tree(verify_input: VerifyInput, verdict: Verdict | None, decode: Decode, request: int = 0) -> Picture:
    """Draw the token tree from left to right, with the accepted path and its bonus marked, without dead nodes.

    decode: token ids to text. The score is the drafter's probability, or its logarithm, of the path down to the node.
    """
    from specsim.reference.tree import depths_of

    check_round(verify_input, verdict, request, decode)
    parents = verify_input.live_parents(request)
    num_nodes = len(parents)
    scores = verify_input.scores[request].tolist()
    tokens = verify_input.draft_tokens[request, :num_nodes].tolist()
    path = [] if verdict is None else verdict.accepted_path(request)
    if verdict is not None and path:  # the bonus token as one more node
        tokens.append(verdict.accepted_tokens()[request][-1])
        parents.append(path[-1])
        path.append(num_nodes)
    depths = depths_of(parents)
    rows = _places(parents)
    texts = [visible_token(decode([token]), 14 if max(depths) <= 6 else 9) for token in tokens]
    lefts, rights = _levels(depths, texts)
    top = 1.0
    pitch = 0.34
    width = max(rights[-1] + 0.2, 6.4)
    bottom = top + (max(rows) + 1) * pitch
    figure, axes = new_sheet(width, bottom + 0.5)
    _tree_head(axes, verify_input, verdict, request, lefts)
    for node, (parent, depth) in enumerate(zip(parents, depths, strict=True)):
        look = BONUS if node == num_nodes else ACCEPTED if node in path else DRAFT
        x = lefts[depth]
        y = top + rows[node] * pitch + 0.14
        if parent >= 0:
            start = rights[depth - 1], top + rows[parent] * pitch + 0.14
            _edge(axes, start, (x, y), look, f"edge:{parent}-{node}")
        draw_box(axes, x, y - 0.13, rights[depth] - x, 0.26, look, "bonus" if look is BONUS else f"node:{node}")
        draw_text(axes, x + 0.32, y, texts[node], 9, weight="bold" if node in path else "normal")
        if look is not BONUS:
            draw_text(axes, x + 0.06, y, str(node), 6.5, FAINT)
            draw_text(axes, rights[depth] - 0.06, y, _score(scores[node]), 6.5, FAINT, ha="right")
    draw_legend(axes, bottom + 0.22, [ACCEPTED, DRAFT, BONUS] if path else [DRAFT], room=width)
    figure.description = _in_words(request, texts, parents, path)
    return figure


def _in_words(request: int, texts: list[str], parents: list[int], path: list[int]) -> str:
    """Say the tree in words: every node with its parent, then the accepted path."""
    drafts = len(texts) - bool(path)
    nodes = "; ".join(f"node {node} {texts[node]!r} below {parents[node]}" for node in range(1, drafts))
    accepted = " ".join(repr(texts[node]) for node in path[1:-1]) or "no draft"
    end = f" Accepted: {accepted}; bonus token {texts[path[-1]]!r}." if path else ""
    return f"Token tree of request {request}, root {texts[0]!r}; {nodes or 'no drafts'}.{end}"


def _score(score: float) -> str:
    """Format a probability or its logarithm, in at most 8 characters down to -99999."""
    return f"{score:.3f}" if score > -100 else f"{score:.1f}"


def _levels(depths: list[int], texts: list[str]) -> tuple[list[float], list[float]]:
    """Compute the left and right edge of the boxes of every depth, wide enough for its longest text."""
    lefts = []
    rights = []
    for depth in range(max(depths) + 1):
        length = max(len(text) for text, level in zip(texts, depths, strict=True) if level == depth)
        lefts.append(rights[-1] + 0.34 if rights else 0.2)
        rights.append(lefts[-1] + max(length * 9 * EM + 0.88, 0.95))
    return lefts, rights


def _tree_head(
    axes: Axes, verify_input: VerifyInput, verdict: Verdict | None, request: int, lefts: list[float]
) -> None:
    num_nodes = verify_input.draft_tokens.shape[1]
    live = len(verify_input.live_parents(request))
    title = f"request {request}: a tree of {live} {'node' if live == 1 else 'nodes'}"
    if verdict is not None:
        drafts = int(verdict.num_accepted_drafts[request])
        tokens = int(verdict.num_accepted_tokens[request])
        title += f", num_accepted_drafts {drafts}, num_accepted_tokens {tokens}"
    draw_text(axes, 0.2, 0.22, title, 9.5, weight="bold")
    kind = "log probability" if verify_input.scores[request, 0] == 0 else "probability"  # of the root's empty path
    draw_text(axes, 0.2, 0.46, f"in a box: node, token, the drafter's {kind} of the path from the root", 7, FAINT)
    root = int(verify_input.positions[request * num_nodes])
    for depth, x in enumerate(lefts):
        draw_text(axes, x, 0.78, f"position {root + depth}", 6.5, FAINT)


def _edge(axes: Axes, start: tuple[float, float], end: tuple[float, float], look: Look, gid: str) -> None:
    x_left, above = start
    right, below = end
    style = (0, (2.5, 1.5)) if look.dashed else "solid"
    line = {"color": look.edge, "linewidth": look.width, "linestyle": style, "zorder": 0.5 + look.width / 10}
    axes.plot((x_left, right - 0.2, right - 0.2, right), (above, above, below, below), gid=gid, **line)


@check_arguments
def mask(verify_input: VerifyInput, request: int = 0, decode: Decode | None = None) -> Picture:
    """Draw the attention mask of verify: a row per node, a column per key, the prefix as one column."""
    check_round(verify_input, None, request, *([] if decode is None else [decode]))
    mask_NN = verify_input.mask[request].tolist()
    tokens = verify_input.draft_tokens[request].tolist()
    num_nodes = len(tokens)
    positions = verify_input.positions.view(-1, num_nodes)[request].tolist()
    length = positions[0]
    cell = min(0.32, max(0.17, 7.0 / num_nodes))
    texts = [visible_token(decode([token])) for token in tokens] if decode else [""] * num_nodes
    label = max(map(len, texts)) * 8 * EM
    x_left = 0.55 + label
    top = 0.95
    prefix = 1.25
    first = x_left + prefix + 0.1
    side = num_nodes * cell
    width = max(first + side + 0.8, 6.4)
    figure, axes = new_sheet(width, top + side + 0.5)
    draw_text(axes, 0.2, 0.22, f"request {request}: what each of {num_nodes} rows sees", 9.5, weight="bold")
    nodes = f"the nodes in columns {length}…{length + num_nodes - 1}"
    draw_text(axes, 0.2, 0.46, f"down: nodes; across: the prefix as one, then {nodes}", 7, FAINT)
    draw_text(axes, x_left + prefix / 2, top - 0.12, f"columns 0…{length - 1}", 6.5, FAINT, ha="center")
    draw_text(axes, first + side + 0.06, top - 0.12, "position", 6.5, FAINT)
    for row, (sees, text) in enumerate(zip(mask_NN, texts, strict=True)):
        y = top + row * cell
        draw_text(axes, 0.2, y + cell / 2, text, 8)
        draw_text(axes, x_left - 0.06, y + cell / 2, str(row), 6.5, FAINT, ha="right")
        draw_text(axes, first + row * cell + cell / 2, top - 0.12, str(row), 6.5, FAINT, ha="center")
        draw_text(axes, first + side + 0.1, y + cell / 2, str(positions[row]), 6.5, FAINT)
        draw_cell(axes, x_left, y, prefix, cell, PREFIX, f"prefix:{row}")
        for column, visible in enumerate(sees):
            look = FREE if not visible else ITSELF if row == column else ANCESTOR
            gid = f"{'sees' if visible else 'hidden'}:{row}-{column}"
            draw_cell(axes, first + column * cell, y, cell, cell, look, gid)
    draw_legend(axes, top + side + 0.25, [PREFIX, ANCESTOR, ITSELF], room=width)
    seen = "; ".join(
        f"{row}: {' '.join(str(column) for column, visible in enumerate(sees) if visible)}"
        for row, sees in enumerate(mask_NN)
    )
    figure.description = f"Attention mask of request {request}: the prefix and, by node, the nodes it sees. {seen}."
    return figure
