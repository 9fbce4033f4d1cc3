"""The page of all pictures: every function of specsim.plots that draws, what it draws, and the code that calls it."""

from notebooks.guide.pages.pictures import svg
from specsim import plots
from specsim.plots.sheet import Picture

HEAD = """# Pictures

Every picture that the notebooks show is drawn by a function of `specsim.plots`. It takes values of the package and
returns a matplotlib figure, which a notebook shows by itself. `figure.savefig("round.svg")` keeps it. Each figure has
an alternative text, `figure.alternative`. The pictures below were drawn when this page was built, after this code:
"""
SETUP = """import specsim
from specsim import plots
from specsim.simulator.cell import Cell

pair = specsim.load()
decode = pair.tokenizer.decode
prompt = "def count(n):\\n    while n"
config = specsim.SpecConfig(topk=4, num_steps=3, num_draft_tokens=8, page_size=4)
sampling = specsim.SamplingParams(max_new_tokens=16)
rounds = specsim.trace(pair, prompt, config, sampling)
states = rounds[0].states  # the states that the phases exchanged
verdict = states.verify_output.verdict
cell = Cell(model="llama-3.1-8b", hardware="H100-SXM", num_steps=3, requests=32)
"""
EXAMPLES = {
    "tree": "plots.tree(states.verify_input, verdict, decode)",
    "mask": "plots.mask(states.verify_input, decode=decode)",
    "kv_pages": "plots.kv_pages(states.drafted_pools, states.batch, config)",
    "kv_move": "plots.kv_move(states.verify_input, verdict, decode)",
    "keys_seen": """sees = {"rebuilt": [range(4, 9), range(5, 10)], "stale": [range(4, 9), range(4, 10)]}
plots.keys_seen(sees, length=8)""",
    "states": """following = states.next_draft_input
plots.states(states.draft_input, states.verify_input, states.verify_output, following)""",
    "acceptance": """chain = specsim.generate(pair, prompt, specsim.SpecConfig(topk=1, num_steps=3), sampling)
plots.acceptance({"tree of 8": rounds.acceptance, "chain of 3": chain.acceptance})""",
    "acceptance_rates": """from specsim.acceptance.measured_pair import record_of

plots.acceptance_rates({"tree of 8": record_of(rounds.generation), "chain of 3": record_of(chain)})""",
    "positions": """from specsim.simulator.acceptance import iid

plots.positions({"rate 0.8": iid(0.8, 5), "rate 0.6": iid(0.6, 5)})""",
    "distributions": """target, draft = (5 / 8, 2 / 8, 1 / 8), (3 / 8, 1 / 8, 4 / 8)
plots.distributions({"target": target, "draft": draft}, ("owl", "cat", "dog"))""",
    "rejection": 'plots.rejection(target, draft, ("owl", "cat", "dog"))',
    "losses": """steps = range(60)
plots.losses({"run A": [6 / (1 + step / 8) for step in steps], "run B": [6 / (1 + step / 30) for step in steps]})""",
    "divergence": """from specsim.correctness.differential.result import Divergence

plots.divergence(Divergence("a cell", 2, "verify", 0, 3, "num_accepted_drafts", 2, 1))""",
    "timeline": """engine = specsim.load_engine(pair, config)
scheduler = specsim.Scheduler(engine, specsim.ServingConfig(max_running=2))
for number, text in enumerate(["def main():", "import os", "class Node:"]):
    scheduler.submit(specsim.make_request(pair.target.config, pair.tokenizer, number, text, sampling))
scheduler.run()
plots.timeline(scheduler.trace)""",
    "batch": "plots.batch(cell.scenario.run(cell.scenario.option))",
    "roofline": 'plots.roofline(cell.scenario, marks={"16 requests": 16, "16 trees of 8": 128})',
    "speedup": 'plots.speedup({"chain of 3": cell.scenario}, most=128)',
    "pareto": """import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from specsim.simulator.sweep import Results, cells, sweep

with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as executor:
    results = Results(Path(folder) / "sweep.sqlite")
    sweep(cells(cell, {"num_steps": [0, 3], "concurrency": [1, 4, 16]}), results, executor)
    rows = results.rows()
plots.pareto(rows)""",
}


def gallery_pages() -> dict[str, str]:
    """Run every example, and write the page with its pictures, by path."""
    names: dict[str, object] = {}
    exec(SETUP, names)
    lines = [HEAD, "```python", SETUP.rstrip(), "```", ""]
    pages = {}
    for name, code in EXAMPLES.items():
        picture = _run(code, names)
        pages[f"generated/pictures/{name}.svg"] = svg(picture)
        first = (getattr(plots, name).__doc__ or "").splitlines()[0]
        lines += [f"## {name}", "", first, "", "```python", code, "```", ""]
        lines += [f"![{_plain(picture.alternative)}](generated/pictures/{name}.svg)", ""]
    return pages | {"pictures.md": "\n".join(lines)}


def _run(code: str, names: dict[str, object]) -> Picture:
    """Run an example, and return the value of its last line."""
    *lines, last = code.splitlines()
    exec("\n".join(lines), names)
    picture = eval(last, names)
    if not isinstance(picture, Picture):
        raise TypeError(f"{last} draws nothing")
    return picture


def _plain(text: str) -> str:
    """Escape what Markdown would read as markup in an alternative text."""
    return "".join(f"\\{character}" if character in r"\[]*_`<>$" else character for character in text)
