"""Axes of charts about servers, all of one style."""

from collections.abc import Iterable
from typing import NamedTuple

from specsim.plots.sheet import EM, FONT, INK, Axes, FigureCanvasAgg, Picture

SIZE = 8
WIDTH = 7.2
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
    figure = Picture(figsize=(WIDTH, height), facecolor="white")
    FigureCanvasAgg(figure)
    longest = max(map(len, names), default=0)
    right = longest * SIZE * EM / WIDTH if longest else 0.04
    axes = figure.add_axes((0.11, 0.56 / height, 0.85 - right, 1 - 0.96 / height))
    axes.set_title(title, family=FONT, fontsize=9.5, weight="bold", loc="left", parse_math=False)
    axes.set_xlabel(x, family=FONT, fontsize=SIZE, color=INK)
    axes.set_ylabel(y, family=FONT, fontsize=SIZE, color=INK)
    axes.tick_params(labelsize=SIZE, labelfontfamily=FONT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


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
