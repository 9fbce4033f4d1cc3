"""Table of the states of a round, with the shapes of the names that several of them have."""

import torch

from specsim.core.arguments import check_arguments
from specsim.core.phases import DraftExtendInput, DraftInput, State, VerifyInput, VerifyOutput
from specsim.plots.sheet import (
    FAINT,
    FREE,
    WIDTH,
    Axes,
    Look,
    Picture,
    draw_cell,
    draw_legend,
    draw_text,
    new_sheet,
)

REQUEST = Look("a row for each request", "#CBE3F3", "#0072B2")
NODE = Look("a row for each node of the trees", "#FFFFFF", "#8A8A8A", dashed=True)
ROW = Look("a row for each accepted token, with padding if the setting pads", "#BFE5D8", "#00664B", 2.0)
ROWS_OF_EXTEND = frozenset(("hidden", "input_ids", "positions", "cache_locations"))
MADE_BY = ("before the round", "made by draft", "made by verify", "made by verify", "made by draft_extend")
_NAME = 2.0  # inches of the column with the names
_LINE = 0.34


@check_arguments
def states(
    draft_input: DraftInput, verify_input: VerifyInput, verify_output: VerifyOutput, next_draft_input: DraftInput
) -> Picture:
    """Draw a table of a round's states, with a line for each name that two of them have.

    A cell holds the tensor's shape. Its colour says what a row of the tensor stands for.
    """
    extend = verify_output.draft_extend_input
    columns: list[State] = [draft_input, verify_input, verify_output.verdict, extend, next_draft_input]
    names = _shared_names(columns)
    figure, axes = new_sheet(WIDTH, 1.2 + _LINE * len(names) + 0.45)
    draw_text(axes, 0.2, 0.22, "names that several states of a round have", 9.5, weight="bold")
    width = (WIDTH - _NAME - 0.2) / len(columns)
    num_nodes = verify_input.draft_tokens.numel()
    for index, (state, made_by) in enumerate(zip(columns, MADE_BY, strict=True)):
        x_left = _NAME + index * width
        draw_text(axes, x_left + width / 2, 0.58, made_by, 7, FAINT, ha="center")
        draw_text(axes, x_left + width / 2, 0.8, type(state).__name__, 8, ha="center", weight="bold")
        for line, name in enumerate(names):
            tensor = state.tensors.get(name)
            look = FREE if tensor is None else _look(state, name, tensor, num_nodes)
            _cell(axes, (x_left, 1.0 + _LINE * line, width - 0.08), look, tensor, f"state:{index}:{name}")
    for line, name in enumerate(names):
        draw_text(axes, 0.2, 1.0 + _LINE * (line + 0.45), name, 8)
    draw_legend(axes, 1.2 + _LINE * len(names), [REQUEST, NODE, ROW])
    figure.description = " ".join(_in_words(name, columns) for name in names)
    return figure


def _shared_names(columns: list[State]) -> list[str]:
    """List the names that at least two states have, in order."""
    every = [name for state in columns for name in state.tensors]
    return [name for name in dict.fromkeys(every) if every.count(name) > 1]


def _look(state: State, name: str, tensor: torch.Tensor, num_nodes: int) -> Look:
    if isinstance(state, DraftExtendInput):
        return ROW if name in ROWS_OF_EXTEND else REQUEST
    is_by_node = not isinstance(state, DraftInput) and len(tensor) == num_nodes
    return NODE if is_by_node else REQUEST


def _cell(axes: Axes, box: tuple[float, float, float], look: Look, tensor: torch.Tensor | None, gid: str) -> None:
    x, y, width = box
    draw_cell(axes, x, y, width, _LINE - 0.06, look, gid)
    if tensor is not None:
        draw_text(axes, x + width / 2, y + (_LINE - 0.06) / 2, str(list(tensor.shape)), 8, ha="center")


def _in_words(name: str, columns: list[State]) -> str:
    held = [(type(state).__name__, state.tensors.get(name)) for state in columns]
    parts = (f"{list(tensor.shape)} in {kind}" for kind, tensor in held if tensor is not None)
    return f"{name}: {', '.join(parts)}."
