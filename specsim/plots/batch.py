"""Timeline of a simulated batch: waiting and decoding of every request."""

from specsim.core.errors import require, require_type
from specsim.plots.chart import SIZE, new_chart
from specsim.plots.sheet import ACCEPTED, FONT, SPARE, Picture
from specsim.simulator.results import SimulatedRun

MOST = 200


def batch(run: SimulatedRun, first: int = 0, last: int | None = None) -> Picture:
    """Draw a bar per request in seconds: from sending to its first token, and to its last.

    Requests first to last by number (None: the end); InputError for none of them, or more than 200. A cross marks a
    preempted request.
    """
    require_type("run", run, SimulatedRun, "a SimulatedRun, as specsim.simulator.server.simulate gives one")
    numbers = range(len(run.arrivals))[first : None if last is None else last + 1]
    require(1 <= len(numbers) <= MOST, "requests", len(numbers), f"1 to {MOST} of them")
    height = 1.2 + 0.12 * max(len(numbers), 8)
    title = f"requests {numbers[0]} to {numbers[-1]}, simulated: waiting, then decoding"
    figure, axes = new_chart(title, "seconds", "request", height)
    for number in numbers:
        sent = float(run.arrivals[number])
        begun = float(run.firsts[number])
        ended = float(run.lasts[number])
        for start, end, look, kind in ((sent, begun, SPARE, "wait"), (begun, ended, ACCEPTED, "decode")):
            bar = axes.barh(number, end - start, left=start, height=0.7, color=look.face, edgecolor=look.edge, lw=0.6)
            bar[0].set_gid(f"{kind}:{number}")
        if run.preemptions[number]:
            axes.plot([begun], [number], "x", color="#A2487D", markersize=5, gid=f"preempted:{number}")
    axes.set_ylim(numbers[-1] + 0.6, numbers[0] - 0.6)
    axes.set_yticks([numbers[0], numbers[-1]])
    axes.set_xlim(left=min(0.0, float(run.arrivals[numbers[0]])) if first == 0 else None)
    axes.text(1, 1.01, f"{run.duration:.2f} s, {run.num_steps:,} steps in all", ha="right", va="bottom",
              transform=axes.transAxes, family=FONT, fontsize=SIZE)  # fmt: skip
    return figure
