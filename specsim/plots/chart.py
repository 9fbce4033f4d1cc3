"""Axes for figures about servers: one look for all of them."""

from specsim.plots.sheet import FONT, INK, Axes, FigureCanvasAgg, Picture

SIZE = 8


def new_chart(title: str, x: str, y: str = "", height: float = 4.0, right: float = 0.04) -> tuple[Picture, Axes]:
    """A figure with one pair of labelled axes; right: share of the width left for names of lines."""
    figure = Picture(figsize=(7.2, height), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.11, 0.56 / height, 0.85 - right, 1 - 0.96 / height))
    axes.set_title(title, family=FONT, fontsize=9.5, weight="bold", loc="left", parse_math=False)
    axes.set_xlabel(x, family=FONT, fontsize=SIZE, color=INK)
    axes.set_ylabel(y, family=FONT, fontsize=SIZE, color=INK)
    axes.tick_params(labelsize=SIZE, labelfontfamily=FONT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def label_point(axes: Axes, x: float, y: float, text: str, color: str, offset: tuple[float, float] = (5, 0)) -> None:
    """Write a text next to a point; a dollar sign starts no formula."""
    axes.annotate(
        text,
        (x, y),
        offset,
        textcoords="offset points",
        va="center",
        annotation_clip=False,
        color=color,
        family=FONT,
        fontsize=SIZE,
        parse_math=False,
    )
