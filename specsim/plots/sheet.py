"""Parts of pictures: a sheet in inches, boxes and cells with a look, text, a legend, axes of charts.

Every artist that stands for something carries it in its gid (`node:3`, `edge:0-3`, `slot:17:tree`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties, findfont, get_font
    from matplotlib.patches import FancyBboxPatch, Patch, Rectangle
except ImportError as error:
    raise ImportError("specsim.plots needs matplotlib: pip install 'specsim[notebooks]'") from error

FONT = "DejaVu Sans Mono"
EM = 0.602 / 72  # width of a character, in inches a point of size
WIDTH = 10.0
INK = "#1A1A1A"
FAINT = "#6E6E6E"

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Look:
    """Fill and border of a kind of thing; borders differ, so colour is not needed."""

    meaning: str
    face: str
    edge: str
    width: float = 0.8
    dashed: bool = False


# Hues of Okabe and Ito, distinct with any colour vision.
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
    """A figure that notebooks show without pyplot, with an alternative text for those who do not see it."""

    description: str = ""  # set by a function that knows better than `alternative` what its picture says

    @property
    def alternative(self) -> str:
        """Alternative text: title, axes, and where each line begins and ends, or all that is written on a sheet."""
        if self.description:
            return self.description
        return " ".join(sentence for axes in self.axes for sentence in _sentences(axes))

    def _repr_png_(self) -> tuple[bytes, dict[str, str]]:
        file = BytesIO()
        self.savefig(file, format="png", dpi=100, pil_kwargs={"optimize": True})
        return file.getvalue(), {"alt": self.alternative}


def _sentences(axes: Axes) -> list[str]:
    """Say what the axes show."""
    title = axes.get_title(loc="left")
    if not title:
        return [f"{text.get_text()}." for text in axes.texts if text.get_text()]
    across, up = axes.get_xlabel(), axes.get_ylabel() or title
    lines = []
    for line in axes.lines:
        _, _, name = str(line.get_gid() or "").partition(":")
        values = np.asarray(line.get_ydata(), dtype=float)
        if name and len(values) > 1:
            lines.append(f"{name}: from {values[0]:.4g} to {values[-1]:.4g}.")
    return [f"{title}.", f"{up} against {across}.", *lines]


def new_sheet(width: float, height: float) -> tuple[Picture, Axes]:
    """Make axes over the whole figure in inches, y downwards."""
    figure = Picture(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def draw_text(axes: Axes, x: float, y: float, text: str, size: float = 8, color: str = INK, **options: Any) -> None:
    """Write a text literally: a dollar sign starts no formula."""
    options = {"va": "center", "family": FONT, "parse_math": False} | options
    axes.text(x, y, text, fontsize=size, color=color, **options)


def draw_box(axes: Axes, x: float, y: float, width: float, height: float, look: Look, gid: str) -> None:
    """Draw a box with round corners; x, y: its upper left corner, in inches."""
    shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.05")
    axes.add_patch(_dress(shape, look, gid))


def draw_cell(axes: Axes, x: float, y: float, width: float, height: float, look: Look, gid: str) -> None:
    """Draw a box of a table or a row, with square corners."""
    axes.add_patch(_dress(Rectangle((x, y), width, height), look, gid))


def _dress(shape: Patch, look: Look, gid: str) -> Patch:
    style = (0, (2.5, 1.5)) if look.dashed else "solid"
    shape.set(facecolor=look.face, edgecolor=look.edge, linewidth=look.width, linestyle=style, gid=gid)
    shape.set_zorder(1 + look.width / 10)  # a thin border never covers a thick one
    return shape


def draw_legend(axes: Axes, y: float, looks: Sequence[Look], x_left: float = 0.2, room: float = WIDTH) -> None:
    """Draw swatches with their meanings, in as many lines as the room needs."""
    x = x_left
    for look in looks:
        length = 0.32 + len(look.meaning) * 7 * EM
        if x > x_left and x + length > room:
            x = x_left
            y += 0.22
        draw_cell(axes, x, y - 0.06, 0.2, 0.12, look, "legend")
        draw_text(axes, x + 0.27, y, look.meaning, 7, FAINT)
        x += length + 0.2


def visible_token(text: str, most: int = 14) -> str:
    """Format a token for a picture: visible blanks, at most `most` characters, only those of the font."""
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
    joined = "".join(pieces)
    return joined if len(joined) <= most else joined[: most - 1] + "…"


SIZE = 8
CHART_WIDTH = 7.2
# Hues of Okabe and Ito, each with its own dashes.
LINES = (("#0072B2", "-"), ("#A35F00", "--"), ("#00664B", "-."), ("#A2487D", ":"), ("#1A1A1A", (0, (6, 1, 1, 1))))


class End(NamedTuple):
    """The last point of a line, with the line's name."""

    y: float
    x: float
    name: str
    color: str


def new_chart(title: str, x: str, y: str = "", height: float = 4.0, names: Iterable[str] = ()) -> tuple[Picture, Axes]:
    """Make a figure with labelled axes, and room on the right for the names of lines."""
    figure = Picture(figsize=(CHART_WIDTH, height), facecolor="white")
    FigureCanvasAgg(figure)
    longest = max(map(len, names), default=0)
    right = longest * SIZE * EM / CHART_WIDTH if longest else 0.04
    axes = figure.add_axes((0.11, 0.56 / height, 0.85 - right, 1 - 0.96 / height))
    label_axes(axes, title, x, y, 9.5)
    return figure, axes


def label_axes(axes: Axes, title: str, x: str, y: str, size: float) -> None:
    """Write a title of this size and the labels, and leave out the lines above and on the right."""
    axes.set_title(title, family=FONT, fontsize=size, weight="bold", loc="left", parse_math=False)
    axes.set_xlabel(x, family=FONT, fontsize=SIZE, color=INK)
    axes.set_ylabel(y, family=FONT, fontsize=SIZE, color=INK)
    axes.tick_params(labelsize=SIZE, labelfontfamily=FONT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def label_point(axes: Axes, x: float, y: float, text: str, color: str, offset: tuple[float, float]) -> None:
    """Write a text next to a point; a dollar sign starts no formula."""
    axes.annotate(text, (x, y), offset, textcoords="offset points", va="center", annotation_clip=False,
                  color=color, family=FONT, fontsize=SIZE, parse_math=False)  # fmt: skip


def label_ends(axes: Axes, ends: Iterable[End]) -> None:
    """Write the name of every line at its end, without overlap and below the axes' top."""
    pitch = 0.055 * axes.get_ylim()[1]
    low = -pitch / 2
    for end in sorted(ends):
        low = max(end.y, low + pitch)
        label_point(axes, end.x, low, end.name, end.color, (7, 0))
