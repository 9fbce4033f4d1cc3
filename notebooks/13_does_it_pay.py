# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does it pay?
#
# * **Goal:** You can go from a model, a GPU, a load and acceptance rates to a setting for a server. You can say how
#   certain the forecast is, and from which load on speculation stops paying.
# * **Before:** Notebook 02.
# * **Time:** 50 minutes to work through, 15 seconds to run. No GPU.
#
# Somebody gives you a drafter and its measured acceptance. Should your server use it, and with how many drafts? A
# measurement of every setting at every load takes a GPU for days. The formula of notebook 02 takes a second, but it
# knows one request and one number. This notebook works with the package's simulator, which serves a whole load. It
# computes a forecast, and says how far the forecast can be off.

# %%
from pathlib import Path

import specsim
from specsim import plots
from specsim.core.display import short_setting
from specsim.simulator.cell import Cell
from specsim.simulator.engine_files import text, vllm_file
from specsim.simulator.plan import plan
from specsim.simulator.rank_by_depth import chain_shares
from specsim.simulator.reproduce.tables import reproduction
from specsim.simulator.scenario import speedup_range
from specsim.simulator.slo import RateGoal, Slo, highest_rate
from specsim.simulator.sweep import cells, run_cell

# %% [markdown]
# ## Four inputs
#
# **The model and the GPU** give the bytes and the operations of every forward pass.
#
# **The acceptance** is the share of rounds that accept at least 1, 2, 3, … drafts. Engines print it as rates by
# position. The next cell has such rates for three kinds of text. They are made up for this notebook, but of the usual
# size.
#
# **The load** is the number of clients, with the lengths of prompts and outputs.
#
# A `Cell` holds all four. Its *profile* says how well a real engine uses the GPU. It was fitted to published
# benchmarks.

# %%
rates = {
    "code": (0.88, 0.76, 0.65, 0.55, 0.46),
    "chat": (0.75, 0.52, 0.36, 0.25, 0.17),
    "poems": (0.50, 0.22, 0.10, 0.04, 0.02),
}
texts = {
    name: Cell(model="llama-3.1-8b", hardware="H100-SXM", shares=chain_shares(own), profile="vllm-2026-dense")
    for name, own in rates.items()
}
for name, cell in texts.items():
    print(f"{name:5}: accept length {cell.scenario.option.accept_length:.2f} with a chain of {cell.num_steps}")

# %% [markdown]
# * How does the accept length 2.63 of `chat` follow from its rates? (A chain of 3 uses the first three.)
#
# ## One round
#
# A round has three parts. The drafter proposes, the target verifies, and the drafter reads what was accepted. The table
# compares a round of 3 drafts with a step of plain decoding, in milliseconds.

# %%
chat = texts["chat"].scenario
print("requests   plain   draft  verify  extend   round / plain")
for requests in (1, 8, 32, 64, 128, 256):
    plain, drafts = (1e3 * chat.phases(chat.plain, requests).total, chat.phases(chat.option, requests))
    parts = "".join(f"{1e3 * seconds:8.2f}" for seconds in (drafts.draft, drafts.verify, drafts.extend))
    print(f"{requests:8}{plain:8.2f}{parts}{1e3 * drafts.total / plain:12.2f}")

# %% [markdown]
# * With one request, verifying 4 tokens takes hardly longer than generating one. With 256 requests it takes more than
#   twice as long. Which line of notebook 02's roofline explains it?
# * The drafter is small, but it runs three times in a row. What is its share of the round with one request, and with
#   256?
#
# The last column says how much a round costs. Whether it pays depends on what the round gives.

# %% [markdown]
# ### Exercise 13-1
#
# Write `break_even`: the accept length at which a round with drafts gives as many tokens per second as plain decoding.
# A step of plain decoding gives one token. A round consists of the drafting, the target's pass and the drafter's
# extension, and gives as many tokens as its accept length, bonus token included.
#
# Hint: write down the tokens per second of both.


# %%
def break_even(plain: float, draft: float, verify: float, extend: float) -> float:
    """Compute the accept length at which decoding with drafts is as fast as plain decoding.

    plain: time of a step of plain decoding. draft, verify, extend: times of the parts of a round, in the same unit.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("13-1", break_even)

# %% [markdown]
# `specsim.course.solution("13-1")` shows a solution.
#
# ### Prediction
#
# With one request, 3 drafts make decoding of `chat` 2.2 times as fast.

# %%
guess = specsim.course.predict("One request: 2.2 times as fast. How many times with 256 requests?", 2.2)
guess

# %%
assert round(chat.speedup(1), 1) == 2.2
guess.score(chat.speedup(256))

# %% [markdown]
# The picture shows all batch sizes, for the three kinds of text. Each line has a band, which the next section explains.

# %%
plots.speedup({name: cell.scenario for name, cell in texts.items()}, most=512)

# %% [markdown]
# * Where do the lines fall fastest? Compare with the column `verify` above.
# * The number at a line's point is the *crossover*: from this batch size on, plain decoding is faster. Why does `code`
#   have none, although its rounds cost exactly as much?
# * **Try** `prompt_tokens=(8000, 8000)` in the cells. With long prompts, plain decoding spends its time on reading the
#   KV of each request, which drafts share. What does that do to the lines? (The KV of many such requests would not fit
#   on the GPU.)
#
# With more drafts, the speed-up falls sooner. The next cell prints the crossovers of chains of different length.

# %%
for name, cell in texts.items():
    found = {steps: cell.with_values(num_steps=steps).scenario.crossover() for steps in (1, 2, 3, 5)}
    print(f"{name:5}: " + ", ".join(f"{steps} drafts {size or 'never'}" for steps, size in found.items()))

# %% [markdown]
# * A colleague reports that speculation makes the server slower, another one that it does not. Both are right. Name
#   three questions that you would put to them.
#
# ## How certain is a forecast?
#
# The profile's parameters are known only roughly: which share of the bandwidth an engine reaches, how long the host
# takes, and so on. The simulator varies all of them as far as the published benchmarks allow. The result is a *90 %
# band*: the true speed-up is in it nine times out of ten. It belongs to every figure that you pass on.

# %%
for requests in (1, 16, 64, 128, 256):
    found = speedup_range(chat, requests)
    verdict = "pays" if found.lowest > 1 else "does not pay" if found.highest < 1 else "undecided"
    print(f"{requests:3} requests: {found.value:.2f}, band {found.span}: {verdict}")

# %% [markdown]
# * The forecast for 128 requests is well above 1. Why is the answer still "undecided"?
# * At which sizes would you measure before you decide? At which would a measurement change nothing?
#
# Why believe such a band? Because the simulator can be tested: it fits a few cells of a published benchmark, and
# predicts the others. Here is a table of [vllm#20780](https://github.com/vllm-project/vllm/issues/20780).

# %%
for figure in reproduction("vllm_20780")().figures:
    if figure.role == "held out":
        error = figure.simulated / figure.published - 1
        print(
            f"{figure.setting}: published {figure.published:.2f} ms, predicted {figure.simulated:.2f} ms, {error:+.1%}"
        )

# %% [markdown]
# The guide's page on held-out errors has all tables, also those where the prediction failed. `specsim calibrate` makes
# a profile of your own server from six measured cells, and the band becomes narrower.
#
# ## A server is more than its rounds
#
# So far a fixed number of requests was decoding. A server also reads prompts, and requests wait. The simulator serves
# such a load step by step. In the next cell 32 clients send a request each, wait for its answer, and send the next one.

# %%
load = texts["chat"].with_values(concurrency=32, requests=192)
served = {
    name: load.with_values(num_steps=steps).run().metrics() for name, steps in (("no drafts", 0), ("3 drafts", 3))
}
shown = ("Output Throughput (tok/s)", "Mean TPOT (ms)", "P99 ITL (ms)")
for name in shown:
    one, other = (metrics[name] for metrics in served.values())
    print(f"{name:26}{one:9.1f} → {other:7.1f}   {other / one:.2f} ×")
print(f"{'decoding alone':46}{chat.speedup(32):.2f} ×")

# %% [markdown]
# * Why does the throughput rise less than decoding alone? Which part of the work is not faster with drafts?
# * The TPOT falls, and the P99 of the inter-token latency rises. A *delivery* is what one round sends to a client. Does
#   the text of a request arrive faster or more slowly?
#
# ### Prediction
#
# The table leaves out the time to first token (TTFT). Without drafts its median is 53 ms. Drafts make decoding faster,
# so that a place becomes free sooner.

# %%
guess = specsim.course.predict("Median TTFT without drafts: 53 ms. How many ms with 3 drafts?", 34)
guess

# %%
assert round(served["no drafts"]["Median TTFT (ms)"]) == 53
guess.score(served["3 drafts"]["Median TTFT (ms)"])

# %% [markdown]
# A new prompt waits for the round that is running, and rounds with drafts are longer. The drafter has to read the
# prompt too. And since requests end sooner, more prompts arrive per second.
#
# What a user notices and what a server earns are two figures. The picture has one on each axis: how fast a request gets
# its tokens, and how many tokens all requests get. A point is a number of clients.

# %%
grid = cells(load, {"num_steps": (0, 1, 5), "concurrency": (1, 4, 16, 64, 128)})
plots.pareto([{"key": str(place)} | cell.to_json() | run_cell(cell.to_json()) for place, cell in enumerate(grid)])

# %% [markdown]
# * A ring marks a point that no other one beats in both figures. Which setting has the rings for few clients, and which
#   for many?
# * Choose a speed that every user should have, for example 100 tokens a second. How many tokens does the server give at
#   this speed with each setting?
#
# ## Objectives
#
# The last question is the one that operators put. They have *service-level objectives* (SLOs): bounds on the latencies
# of every request. A request that exceeds a bound counts for nothing. *Goodput* counts the others.

# %% [markdown]
# ### Exercise 13-2
#
# Write `goodput`: the number of requests per second that stay within both bounds. The TPOT of a request is the time
# from its first token to its last one, divided by the number of tokens after the first.
#
# A request that puts out a single token has no TPOT. It counts as good if its TTFT is within the bound. A value that
# equals its bound is within it.


# %%
def goodput(requests: list[tuple[float, float, int]], ttft: float, tpot: float, seconds: float) -> float:
    """Compute the requests per second that stay within both bounds.

    requests: (time to the first token, time to the last token, number of output tokens) of each, times in ms. ttft,
    tpot: largest allowed values, in ms. seconds: duration of the run.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("13-2", goodput)

# %% [markdown]
# With objectives, the question is no longer how many tokens a server gives. It is how many requests per second it can
# take while 99 % of them are good. The simulator finds this rate by bisection.
#
# ### Prediction
#
# The objectives are a TTFT of at most 300 ms and a TPOT of at most 12 ms. Without drafts the server takes 8 requests
# per second. At 32 clients, 3 drafts made it 1.6 times as fast.

# %%
guess = specsim.course.predict("Within objectives: 8 requests/s without drafts. How many with 3 drafts?", 12.8)
guess

# %%
goal = RateGoal(Slo.parse("ttft=300ms,tpot=12ms"))
highest = {}
for steps in (0, 3):
    cell = load.with_values(num_steps=steps)
    highest[steps] = highest_rate(cell, cell.option(cell.config), goal)
    print(f"{short_setting(cell.config)}: {highest[steps]:.1f} requests per second within {goal.slo}")
assert round(highest[0]) == 8
guess.score(highest[3])

# %% [markdown]
# * Plain decoding with *one* request takes 8.2 ms per token. How much room does a bound of 12 ms leave for a batch? How
#   much room do drafts leave?
# * **Try** a bound of 30 ms instead of 12. Is the gain larger or smaller? Why? (Take `requests=384` for it: at such
#   rates 192 requests are over before a queue forms, and the run flatters the server.)
#
# So the gain depends on the objective. A tight bound on the TPOT makes drafts worth more than any speed-up says, and a
# loose one less.
#
# ## The best setting
#
# `plan` puts everything together. It serves the same requests with every setting, several times with other random
# numbers. *Regret* is the additional time for the same tokens over the best setting. Settings whose regret may be
# chance count as equal, and the cheapest of them comes first.

# %%
found = plan(load, replicates=3)
for row in found.candidates:
    band = "{:.2f} to {:.2f}".format(*found.band(row))
    speed = f"{row.metrics['Output Throughput (tok/s)']:5.0f} tok/s, {found.over_plain(row):.2f} × ({band})"
    print(f"{short_setting(row.config):10} {speed}, regret {row.regret:5.1%}{', equal' if row.is_equal else ''}")

# %% [markdown]
# * Which settings count as equal, and which of them would you take?
# * The bands of the first four settings overlap almost completely. Why is their order still known much better than
#   their speed-up?
#
# A server's load changes over the day. `found.by_batch` has the best setting for other numbers of requests.

# %%
for row in found.by_batch:
    low, high = row.span
    print(f"{row.batch:3} requests: {short_setting(row.config)}, {row.speedup:.2f} × ({low:.2f} to {high:.2f})")

# %% [markdown]
# No single number of drafts is the best one. Engines can therefore read a schedule by batch size.

# %% [markdown]
# ### Exercise 13-3
#
# Write `schedule`. It receives batch sizes in ascending order, and for each of them a list: entry n is the tokens per
# second with n drafts. Choose for every size the *fewest* drafts that reach at least 99 % of the best entry.
#
# Return ranges (lowest size, highest size, drafts). The first range begins at 1. A size between two listed ones gets
# the choice of the next larger one. Neighbours with the same choice are one range.


# %%
def schedule(sizes: list[int], speeds: list[list[float]]) -> list[tuple[int, int, int]]:
    """Choose the number of drafts for every batch size, as ranges (lowest size, highest size, drafts).

    speeds[i][n]: tokens per second with sizes[i] requests and n drafts.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("13-3", schedule)

# %% [markdown]
# The plan has made such a schedule too, and can write it as a file for vLLM, SGLang or TensorRT-LLM. An entry is the
# lowest batch size, the highest one, and the number of drafts.

# %%
print(text(vllm_file(found.chains, "eagle3", "my/eagle3-head"), Path("spec.json")))

# %% [markdown]
# * **Try** the plan for `code` and for `poems`. What would happen if the schedule for `code` served poems?
# * On a command line, `specsim plan --hardware H100-SXM --concurrency 32 --accept-rates 0.75,0.52,0.36,0.25,0.17` does
#   the same. `--slo ttft=300ms,tpot=12ms` adds objectives.
#
# ## Your predictions

# %%
specsim.course.scores()

# %% [markdown]
# ## What to remember
#
# * A round pays if its accept length is larger than its time in steps of plain decoding.
# * This time grows with the batch, so every number of drafts stops paying somewhere. More drafts stop sooner, unless
#   acceptance is very high.
# * A forecast without a band is half a forecast. If the band contains 1, measure.
# * Decoding speed, throughput, latency and goodput are different questions, with different answers.
# * The best number of drafts depends on the batch: give the engine a schedule.
#
# Goodput as a guide for speculation is the idea of [TurboSpec](https://arxiv.org/abs/2406.14066), and goodput under
# objectives that of [DistServe](https://arxiv.org/abs/2401.09670). In the package this is `specsim plan`, and the code
# is in `specsim/simulator`.
