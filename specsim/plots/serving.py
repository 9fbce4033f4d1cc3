"""Timeline of a scheduler: the state of every request, step by step."""

from dataclasses import dataclass, field
from typing import NamedTuple

from specsim.core.arguments import check_arguments
from specsim.plots.sheet import (
    ACCEPTED,
    DRAFT,
    EM,
    FAINT,
    PREFIX,
    SPARE,
    WIDTH,
    Axes,
    Look,
    Picture,
    draw_cell,
    draw_legend,
    draw_text,
    new_sheet,
)
from specsim.serving.trace import StepRecord, Trace

WAITING = Look("waits for a place", SPARE.face, SPARE.edge)
PREFILL = Look("prompt tokens prefilled", PREFIX.face, PREFIX.edge)
BOTH = Look("prefill, then a round", "#DDE9E6", PREFIX.edge, 1.4)
ROUND = Look("a round; the number: tokens it gave, when they were read", ACCEPTED.face, ACCEPTED.edge)
PLACE = Look("has a place, is not advanced", DRAFT.face, DRAFT.edge)
AWAY = Look("preempted", "#F3D9E7", "#A2487D", 1.4, dashed=True)
LOOKS = {"wait": WAITING, "prefill": PREFILL, "both": BOTH, "round": ROUND, "place": PLACE, "preempt": AWAY}


@check_arguments
def timeline(trace: Trace, first: int = 0, last: int | None = None) -> Picture:
    """Draw a row per request and a column per step, from step `first` to step `last` (None: the end).

    Tokens stand in the step in which the host read them. At the end of a row: how the request ended.
    """
    records = [record for record in trace.records if record.step >= first and (last is None or record.step <= last)]
    lives = _lives(trace.records)
    steps = [record.step for record in records]
    drawn = {name: life for name, life in lives.items() if any(step in life.states for step in steps)}
    if not drawn:
        figure, axes = new_sheet(6.4, 0.6)
        draw_text(axes, 0.2, 0.3, "no request in these steps", 9)
        return figure
    x_left = 1.0
    top = 0.72
    height = 0.24
    cell = min(0.4, max(0.2, (WIDTH - x_left - 1.0) / len(steps)))
    width = max(x_left + cell * len(steps) + 1.0, 6.4)
    bottom = top + height * len(drawn)
    figure, axes = new_sheet(width, bottom + 0.75)
    _head(axes, Trace(records), steps, x_left, cell)
    for row, (name, life) in enumerate(drawn.items()):
        y = top + row * height
        draw_text(axes, x_left - 0.1, y + height / 2, f"request {name}", 7, ha="right")
        for index, step in enumerate(steps):
            if state := life.states.get(step):
                draw_cell(
                    axes, x_left + index * cell, y + 0.02, cell, height - 0.04, LOOKS[state], f"{state}:{name}:{step}"
                )
            if tokens := life.tokens.get(step):
                draw_text(axes, x_left + (index + 0.5) * cell, y + height / 2, str(tokens), 6.5, ha="center")
        if life.end and life.end.step in steps:
            x = x_left + (steps.index(life.end.step) + 1) * cell + 0.06
            draw_text(axes, x, y + height / 2, life.end.reason, 6.5, FAINT)
    used = [look for state, look in LOOKS.items() if any(state in life.states.values() for life in drawn.values())]
    draw_legend(axes, bottom + 0.25, used, room=width)
    return figure


def _head(axes: Axes, trace: Trace, steps: list[int], x_left: float, cell: float) -> None:
    counts = trace.counts()
    title = f"{counts['steps']} steps, {counts['num_kept']} tokens read from {counts['results']} rounds"
    draw_text(axes, 0.2, 0.22, f"{title}, {counts['num_prefilled']} prompt tokens prefilled", 9.5, weight="bold")
    every = max(1, round(5 * 6.5 * EM / cell + 0.5))
    for index, step in enumerate(steps):
        if index % every == 0:
            draw_text(axes, x_left + (index + 0.5) * cell, 0.58, str(step), 6.5, FAINT, ha="center")


class _End(NamedTuple):
    """The end of a request."""

    step: int
    reason: str


@dataclass(slots=True)
class _Life:
    """The course of one request."""

    states: dict[int, str] = field(default_factory=dict)  # by step
    tokens: dict[int, int] = field(default_factory=dict)  # read in a step
    end: _End | None = None


def _lives(records: list[StepRecord]) -> dict[int, _Life]:
    lives: dict[int, _Life] = {}
    waiting: set[int] = set()
    placed: set[int] = set()
    for record in records:
        away = {request.request_id for request in record.preempted}
        waiting = (waiting | set(record.arrived) | away) - set(record.admitted)
        placed |= set(record.admitted)
        prefilled = {chunk.request_id for chunk in record.prefilled}
        for name in sorted(waiting | placed | set(record.decoded) | set(record.arrived)):
            life = lives.setdefault(name, _Life())
            life.states[record.step] = _state(name, record, prefilled, away, waiting)
        for result in record.results:
            life = lives.setdefault(result.request_id, _Life())
            life.tokens[record.step] = life.tokens.get(record.step, 0) + result.num_kept
        for name, reason in record.finished:
            lives.setdefault(name, _Life()).end = _End(record.step, reason)
            waiting.discard(name)
            placed.discard(name)
    return lives


def _state(name: int, record: StepRecord, prefilled: set[int], away: set[int], waiting: set[int]) -> str:
    if name in prefilled:
        return "both" if name in record.decoded else "prefill"
    if name in record.decoded:
        return "round"
    return "preempt" if name in away else "wait" if name in waiting else "place"
