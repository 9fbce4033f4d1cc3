"""Pictures of the front page: a token tree of the shipped pair, and round time against the roofline bound.

python -m specsim.maintain.pictures [FOLDER] writes both as SVG, into notebooks/guide/images/ unless told otherwise.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from specsim.bench.row import OURS
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.pair import Pair
from specsim.core.phases import Batch, PrefillInput, Verdict, VerifyInput
from specsim.models.load import load
from specsim.models.shipped import load_prompts
from specsim.plots import tree
from specsim.plots.chart import LINES, End, label_ends, new_chart
from specsim.plots.sheet import Picture
from specsim.serving.generation import load_engine

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "notebooks" / "guide" / "images"
SCALE = ROOT / "fast" / "measurements" / "bench-scale.json"
CONTEXT = 1024  # tokens of each request's KV in the chart
PROMPT = 0  # of the shipped ones
ROUND = 1  # the round that is drawn, counted from 0
REQUEST_TICKS = (1, 4, 16, 64, 256)
MILLISECOND_TICKS = (4, 8, 16, 32, 64)
NAMES = {"plain": "one token a round", "(4, 3, 8)": "tree of 8 tokens"}


def rounds(pair: Pair, prompt_ids: Sequence[int]) -> Iterator[tuple[VerifyInput, Verdict]]:
    """Run greedy rounds of one request: the tree of each, and its accepted path."""
    engine = load_engine(pair, SpecConfig())
    pools = engine.make_pools(1, engine.config.reserved_columns(engine.config.length_limit))
    row = pools.open()
    pools.reserve(row, len(prompt_ids))
    batch = Batch.of([0], [row], [len(prompt_ids)], [SamplingParams()], engine.target.config.vocab_size)
    draft_input = engine.prefill(batch, PrefillInput.whole([prompt_ids]), pools).draft_input
    while True:
        verify_input = engine.draft(batch, draft_input, pools)
        output = engine.verify(batch, verify_input, pools)
        yield verify_input, output.verdict
        draft_input = engine.draft_extend(batch, output.draft_extend_input, pools)
        batch = batch.after(output.verdict.num_accepted_tokens)


def token_tree(pair: Pair) -> Picture:
    """Draw the tree of a round of the shipped pair, with its accepted path and the bonus token."""
    assert pair.tokenizer is not None
    prompt_ids = pair.tokenizer.encode(load_prompts()[PROMPT]["text"])
    with torch.inference_mode():
        verify_input, verdict = next(islice(rounds(pair, prompt_ids), ROUND, None))
    return tree(verify_input, verdict, pair.tokenizer.decode)


def round_time(result: Mapping[str, Any]) -> Picture:
    """Draw the time of a round by batch size with its roofline bound, from a kept result of `bench --suite scale`."""
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
        set_ticks(ticks, [str(each) for each in ticks])
    axes.minorticks_off()
    label_ends(axes, ends)
    return figure


def svg(picture: Picture) -> str:
    """SVG of a picture, the same whenever the picture is: no date, no random names."""
    from matplotlib import rc_context

    file = StringIO()
    with rc_context({"svg.hashsalt": "specsim"}):
        picture.savefig(file, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def write(folder: Path) -> None:
    """Write both pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    result = json.loads(SCALE.read_text(encoding="utf-8"))
    for name, picture in (("token-tree", token_tree(load())), ("round-time", round_time(result))):
        (folder / f"{name}.svg").write_text(svg(picture), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if sys.argv[1:] else IMAGES)
