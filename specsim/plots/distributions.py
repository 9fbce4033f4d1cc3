"""Pictures of distributions over a few tokens: bars of each, and the tokens that speculative sampling gives."""

from collections.abc import Mapping, Sequence

import numpy as np

from specsim.core.arguments import check_arguments
from specsim.core.errors import require
from specsim.plots.sheet import FONT, INK, LINES, SIZE, Axes, Patch, Picture, Rectangle, new_chart, visible_token

HATCHES = ("", "///", "...", "\\\\\\", "xx")
FACES = ("#CBE3F3", "#FBE0B0", "#BFE5D8", "#F3D9E7", "#E4E4E4")  # of tokens, tints of the hues of LINES
MOST_TOKENS = 12
_LEAST_SIDE = 0.055  # of a rectangle with a text, as a share of the square
_SUM = 1e-6


@check_arguments
def distributions(probs: Mapping[str, Sequence[float]], tokens: Sequence[str], kind: str = "token") -> Picture:
    """Draw the probability of every token under each distribution, as bars next to each other.

    probs: probabilities by the distribution's name, in the order of the tokens. They need not sum to 1, so that a part
    of a distribution can be drawn too. kind: the noun for what is drawn, such as text. InputError for more than five
    distributions or twelve tokens.
    """
    require(1 <= len(probs) <= len(LINES), "probs", len(probs), f"1 to {len(LINES)} distributions")
    values = {name: _checked(name, row, tokens) for name, row in probs.items()}
    figure, axes = new_chart(f"probability of each {kind}", kind, "probability", height=3.2)
    width = 0.8 / len(values)
    for index, (name, row) in enumerate(values.items()):
        x_left = np.arange(len(tokens)) - 0.4 + width * index
        color, hatch = LINES[index][0], HATCHES[index]
        bars = axes.bar(x_left, row, width * 0.92, align="edge", facecolor=FACES[index], edgecolor=color, hatch=hatch,
                        label=name, linewidth=1.2)  # fmt: skip
        for bar, token, prob in zip(bars, tokens, row, strict=True):
            bar.set_gid(f"bar:{name}:{token}")
            if prob and len(values) * len(tokens) <= 20:
                axes.annotate(f"{prob:.3g}", (bar.get_x() + bar.get_width() / 2, prob), (0, 2), ha="center",
                              textcoords="offset points", color=INK, family=FONT, fontsize=SIZE - 1)  # fmt: skip
    axes.set_xticks(range(len(tokens)), [visible_token(token) for token in tokens])
    axes.set_ylim(0, 1.12 * max(max(row) for row in values.values()) or 1)
    axes.legend(frameon=False, prop={"family": FONT, "size": SIZE})
    figure.description = f"Probability of each {kind}. " + " ".join(
        f"{name}: {', '.join(f'{token} {prob:.3g}' for token, prob in zip(tokens, row, strict=True))}."
        for name, row in values.items()
    )
    return figure


@check_arguments
def rejection(target_prob: Sequence[float], draft_prob: Sequence[float], tokens: Sequence[str]) -> Picture:
    """Draw speculative sampling of one token as a unit square, whose areas are probabilities.

    A column is a draft x, as wide as the drafter's q(x). Below min(1, p(x) / q(x)) the uniform keeps it. The rest of
    the column is divided like the residual distribution. The area of each token's colour is the target's p.
    """
    target, draft = (
        _checked(name, row, tokens) for name, row in (("target_prob", target_prob), ("draft_prob", draft_prob))
    )
    for name, row in (("target_prob", target), ("draft_prob", draft)):
        require(abs(sum(row) - 1) < _SUM, name, sum(row), "probabilities whose sum is 1")
    require(len(tokens) <= len(FACES), "tokens", len(tokens), f"at most {len(FACES)}")
    weights = [max(p - q, 0.0) for p, q in zip(target, draft, strict=True)]
    rejected = sum(weights)
    figure, axes = new_chart("draft and uniform, and the token that they give", "draft", "uniform", height=4.6)
    axes.set_position((0.11, 0.12, 0.58, 0.80))
    x = 0.0
    for token, (p, q) in enumerate(zip(target, draft, strict=True)):
        height = min(1.0, p / q) if q else 1.0
        _area(axes, (x, 0.0, q, height), tokens, token, is_kept=True)
        at = x
        for other, weight in enumerate(weights):
            share = q * weight / rejected if rejected else 0.0
            _area(axes, (at, height, share, 1 - height), tokens, other, is_kept=False)
            at += share
        x += q
    edges = np.cumsum([0.0, *draft])
    drawn = [at for at, q in enumerate(draft) if q > 0]
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.set_xticks([(edges[at] + edges[at + 1]) / 2 for at in drawn], [visible_token(tokens[at]) for at in drawn])
    _legend(axes, target, tokens)
    acceptance = sum(map(min, target, draft))
    figure.description = (
        f"Unit square of draft and uniform. The draft is kept on {acceptance:.4g} of the area. "
        + " ".join(
            f"{token}: drafted {q:.3g}, kept {min(p, q):.3g}, area in all {p:.3g}."
            for token, p, q in zip(tokens, target, draft, strict=True)
        )
    )
    return figure


def _checked(name: str, row: Sequence[float], tokens: Sequence[str]) -> list[float]:
    """Return probabilities as floats, one for each token."""
    require(1 <= len(tokens) <= MOST_TOKENS, "tokens", len(tokens), f"1 to {MOST_TOKENS} tokens")
    values = [float(prob) for prob in row]
    require(len(values) == len(tokens), name, len(values), f"{len(tokens)} probabilities, one for each token")
    require(all(0 <= prob <= 1 for prob in values), name, values, "probabilities from 0 to 1")
    return values


def _area(axes: Axes, box: tuple[float, float, float, float], tokens: Sequence[str], token: int, is_kept: bool) -> None:
    """Draw the part of the square in which a round gives this token; hatched where it replaces the draft."""
    x, y, width, height = box
    if width * height <= _SUM:
        return
    kind = "kept" if is_kept else "replaced"
    hatch = None if is_kept else "///"
    axes.add_patch(Rectangle((x, y), width, height, facecolor=FACES[token], edgecolor=LINES[token][0], linewidth=1.2,
                             hatch=hatch, gid=f"{kind}:{tokens[token]}:{x:.4f}"))  # fmt: skip
    if min(width, height) > _LEAST_SIDE:
        axes.text(x + width / 2, y + height / 2, f"{visible_token(tokens[token])}\n{width * height:.3g}", ha="center",
                  va="center", family=FONT, fontsize=SIZE, color=INK, parse_math=False,
                  bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.5})  # fmt: skip


def _legend(axes: Axes, target: Sequence[float], tokens: Sequence[str]) -> None:
    handles = [
        Patch(facecolor=FACES[at], edgecolor=LINES[at][0], label=f"{visible_token(token)}: {prob:.3g} in all")
        for at, (token, prob) in enumerate(zip(tokens, target, strict=True))
    ]
    handles.append(Patch(facecolor="white", edgecolor=INK, label="draft is kept"))
    handles.append(Patch(facecolor="white", edgecolor=INK, hatch="///", label="draft is replaced"))
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False,
                prop={"family": FONT, "size": SIZE})  # fmt: skip
