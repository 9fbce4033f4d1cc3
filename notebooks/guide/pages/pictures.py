"""Pictures of README and the guide: the package, rounds, round time, and the persistent forward's schedule.

python -m notebooks.guide.pages.pictures [FOLDER] writes them as SVG, into notebooks/guide/images/ unless a folder is
given.
"""

import json
import sys
import tomllib
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from specsim.bench.row import OURS
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.pair import Pair
from specsim.explorer.rounds import trace
from specsim.maintain.page import GUIDE, ROOT
from specsim.models.load import load
from specsim.models.shipped import load_prompts
from specsim.plots import acceptance
from specsim.plots.sheet import (
    ACCEPTED,
    EM,
    FAINT,
    LINES,
    PREFIX,
    TREE,
    End,
    Picture,
    draw_box,
    draw_text,
    label_ends,
    label_point,
    new_chart,
    new_sheet,
)

IMAGES = GUIDE / "images"
SCALE = ROOT / "fast" / "measurements" / "bench-scale.json"
CONTEXT = 1024  # tokens of each request's KV in the chart
PROMPT = 0  # of the shipped ones
ROUND = 1  # the round that is drawn, counted from 0
TRACED = ["def count(n):\n    while n", "def read(path):\n    with open("]  # prompts of the page on specsim.trace
REQUEST_TICKS = (1, 4, 16, 64, 256)
MILLISECOND_TICKS = (4, 8, 16, 32, 64)
# What precedes a product of the persistent forward: attention has two steps, and `down` begins with the first inputs.
WAITS = {"qkv": ("qkv",), "keys": ("keys", "merge"), "o": ("o",), "gate_up": ("gate_up",), "down": ("first", "last")}
NAMES = {"plain": "one token a round", "(4, 3, 8)": "tree of 8 tokens"}

FOLDERS = {  # by name, in a few words
    "maintain": "run by maintainers, from a checkout",
    "cli": "commands, whose options are fields of values",
    "course": "exercises, and the checker of answers",
    "explorer": "a page to click through rounds",
    "plots": "pictures of rounds, servers and distributions",
    "bench": "time measured on a GPU",
    "acceptance": "how many drafts are accepted",
    "correctness": "tries to prove the rest wrong",
    "serving": "requests, scheduler, prefix cache, HTTP",
    "training": "drafters trained on a target",
    "models": "checkpoints, shapes, synthetic pairs",
    "reference": "plain PyTorch, to be read with a paper; the oracle",
    "fast": "Triton kernels under CUDA graphs",
    "core": "states, pools, uniforms, configs: what both implementations share",
    "simulator": "simulator: time predicted without a model; drives the serving loop, needs no PyTorch",
}
ROUND_PARTS = (  # states in boxes of draft nodes, phases in boxes of accepted ones
    *(("DraftInput", TREE), ("→", None), ("draft", ACCEPTED), ("→", None), ("VerifyInput", TREE), ("→", None)),
    *(("verify", ACCEPTED), ("→", None), ("DraftExtendInput", TREE), ("→", None), ("draft_extend", ACCEPTED)),
    *(("→", None), ("DraftInput", TREE)),
)


def token_tree(pair: Pair) -> Picture:
    """Draw the tree of a round of the shipped pair, with its accepted path and the bonus token."""
    prompt = load_prompts()[PROMPT]["text"]
    return trace(pair, prompt, SpecConfig(), SamplingParams(max_new_tokens=16))[ROUND].tree()


def of_a_trace(pair: Pair) -> dict[str, Picture]:
    """Draw what the guide's page on specsim.trace shows, by the names of its files."""
    config = SpecConfig(topk=4, num_steps=3, num_draft_tokens=8, page_size=4)
    sampling = SamplingParams(max_new_tokens=24)
    rounds = trace(pair, TRACED, config, sampling)
    chain = trace(pair, TRACED, SpecConfig(topk=1, num_steps=3), sampling)
    return {
        "trace-tree": rounds[0].tree(1),
        "trace-mask": rounds[0].mask(1),
        "trace-draft": rounds[0].kv("draft"),
        "trace-commit": rounds[0].kv("commit"),
        "trace-acceptance": acceptance({"tree of 8": rounds.acceptance, "chain of 3": chain.acceptance}),
    }


def round_time(result: Mapping[str, Any]) -> Picture:
    """Draw the time of a round and its roofline bound by batch size, from a kept `bench --suite scale` result."""
    run = result["runs"][0]
    title = f"Time of a round: {result['shape']}, bfloat16, {CONTEXT:,} tokens of context, {run['versions']['gpu']}"
    labels = [f"{name}, {what}" for name in NAMES.values() for what in ("measured", "bound")]
    figure, axes = new_chart(title, "requests in the batch", "milliseconds", 3.6, labels)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ends = []
    for tree_name, (color, _) in zip(NAMES, LINES, strict=False):
        rows = [row for row in result["rows"] if row["setting"]["tree"] == tree_name and row["setting"]["L"] == CONTEXT]
        requests = [row["setting"]["requests"] for row in rows]
        measured = [row["timings"][OURS]["median_us"] / 1e3 for row in rows]
        bound = [row["roofline_bound_us"] / 1e3 for row in rows]
        axes.plot(requests, measured, color=color, marker="o", markersize=4)
        axes.plot(requests, bound, color=color, linestyle="--", linewidth=1)
        ends += [
            End(measured[-1], requests[-1], f"{NAMES[tree_name]}, measured", color),
            End(bound[-1], requests[-1], f"{NAMES[tree_name]}, bound", color),
        ]
    for ticks, set_ticks in ((REQUEST_TICKS, axes.set_xticks), (MILLISECOND_TICKS, axes.set_yticks)):
        set_ticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    label_ends(axes, ends)
    return figure


def persistent_layer(nodes: int = 8, program: int = 0) -> Picture:
    """Draw one layer of the persistent forward of Llama-3-8B: the ring's stages in order, and what awaits whom."""
    from specsim.fast.persistent.forward import schedule_of
    from specsim.models.shapes import shape

    schedule = schedule_of(shape("llama-3-8b").config, 1, nodes)
    stages = list(schedule.layer_stages(program, (CONTEXT,)))
    lanes = ("qkv", "keys", "o", "gate_up", "down")
    names = ("qkv", "keys", "merge", "o", "gate_up", "first", "last")
    awaited = dict(zip(names, schedule.dependencies(program), strict=True))
    title = f"One layer of program {program} of {schedule.programs}: Llama-3-8B, {nodes} nodes, {CONTEXT:,} tokens"
    figure, axes = new_chart(title, "stages of 32 KB in the order of the ring", "", 3.2)
    for row, lane in enumerate(lanes):
        numbers = [number for number, stage in enumerate(stages) if stage.product == lane]
        color, _ = LINES[row % len(LINES)]
        axes.broken_barh([(number, 0.9) for number in numbers], (row - 0.3, 0.6), color=color)
        named = [awaited[barrier] for barrier in WAITS[lane]]
        counts = " and ".join(f"{expected:,}" for _, expected in named)
        label_point(axes, numbers[-1] + 1, row, f"awaits {counts} signals", color, (5, 0))
    axes.set_yticks(range(len(lanes)), [lane.replace("_", "-") for lane in lanes])
    axes.set_xlim(0, len(stages) * 1.4)
    axes.invert_yaxis()
    return figure


def house() -> Picture:
    """Draw the folders of the package by layer, and the phases of a round with what watches each of them."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    layers = [layer.replace("|", ":").split(" : ") for layer in contract[0]["layers"]]
    figure, axes = new_sheet(10.0, 0.42 * len(layers) + 1.85)
    draw_text(axes, 0.1, 0.2, "The package: a folder imports from its own row and from those below", 9.5, weight="bold")
    for row, folders in enumerate(layers):
        width = 9.8 / len(folders)
        for column, folder in enumerate(folders):
            name = folder.strip()
            look = PREFIX if name in ("reference", "fast") else TREE
            x, y = 0.1 + column * width, 0.4 + 0.42 * row
            draw_box(axes, x, y, width - 0.08, 0.34, look, f"folder:{name}")
            draw_text(axes, x + 0.1, y + 0.17, name, 8, weight="bold")
            draw_text(axes, x + 0.2 + len(name) * 8 * EM, y + 0.17, FOLDERS[name], 7, FAINT)
    top = 0.4 + 0.42 * len(layers)
    draw_text(axes, 0.1, top + 0.14, FOLDERS["simulator"], 7, FAINT)
    draw_text(axes, 0.1, top + 0.5, "A round, in both implementations", 9.5, weight="bold")
    x, y = 0.1, top + 0.7
    for name, look in ROUND_PARTS:
        width = 0.2 + len(name) * 8 * EM
        if look is not None:
            draw_box(axes, x, y, width, 0.34, look, f"round:{name}")
        draw_text(axes, x + 0.1, y + 0.17, name, 8)
        x += width + (0.02 if look is None else 0.05)
    return figure


def svg(picture: Picture) -> str:
    """Make the SVG of a picture: equal for equal pictures, without a date or random names."""
    from matplotlib import rc_context

    file = StringIO()
    with rc_context({"svg.hashsalt": "specsim"}):
        picture.savefig(file, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def write(folder: Path) -> None:
    """Write all pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pair = load()
    result = json.loads(SCALE.read_text(encoding="utf-8"))
    pictures = {
        "token-tree": token_tree(pair),
        "round-time": round_time(result),
        "persistent-layer": persistent_layer(),
        "house": house(),
        **of_a_trace(pair),
    }
    for name, picture in pictures.items():
        (folder / f"{name}.svg").write_text(svg(picture), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if sys.argv[1:] else IMAGES)
