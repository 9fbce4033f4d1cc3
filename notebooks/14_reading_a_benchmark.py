# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reading a benchmark report
#
# * **Goal:** You can check the figures of a benchmark report against each other and against the hardware. You name what
#   cannot be true in it, and what it does not say.
# * **Before:** Notebooks 02 and 13.
# * **Time:** 50 minutes to work through, 5 seconds to run. No GPU.
#
# A slide says: 4.1 times as fast with speculative decoding. Before you install anything, take ten minutes and a pencil.
# The figures of a report are not independent: all of them were made from the same log. So they have to agree with each
# other. They also have to agree with the GPU, which cannot read faster than its data sheet says. This notebook does
# these checks, first by hand and then with `specsim lint-report`.

# %%
from dataclasses import replace

import specsim
from specsim import plots
from specsim.plots.servers import IDEAL
from specsim.simulator import hardware, model
from specsim.simulator.cell import Cell
from specsim.simulator.forward import Forward
from specsim.simulator.hardware import names
from specsim.simulator.lint import Stated, derived, lint
from specsim.simulator.measurement import Report
from specsim.simulator.rank_by_depth import chain_shares
from specsim.simulator.report import read_reports
from specsim.simulator.reproduce.reproduction import TABLES, rows

# %% [markdown]
# ## A real report
#
# The pull request [vllm#41162](https://github.com/vllm-project/vllm/pull/41162) published a benchmark of four models,
# with 3 drafts per round. It has 45 runs. Here is one of them: Llama 3 8B, temperature 0, 16 clients.

# %%
reports = {report.label: report for report in read_reports(TABLES / "vllm_41162.csv")}
assert len(reports) == 45
report = reports["Llama3 8B · 0.0 · 16 · before"]
for name, value in report.figures.items():
    if not name.startswith(("Median", "P99")):
        print(f"{name:30}{value:9.2f}")

# %% [markdown]
# Two of these figures count the same tokens. Output throughput is tokens per second. Request throughput is requests per
# second. What is their quotient?
#
# ### Prediction
#
# The text of the pull request states the command of the benchmark. It asks for 1536 output tokens per request.

# %%
guess = specsim.course.predict("The command says 1536 tokens. How many did a request put out?", 1536)
guess

# %%
figures = report.figures
guess.score(figures["Output Throughput (tok/s)"] / figures["Request Throughput (req/s)"])

# %% [markdown]
# So the figures do not come from this command. The prompts can be found in the same way: the total throughput counts
# prompt tokens too. The report prints neither number, and both are in it.
#
# A second way gives the same number. A request takes the time to its first token, and then one TPOT for each further
# token. With L output tokens,
#
# E2E latency = TTFT + (L − 1) · TPOT.

# %%
decoding = figures["Mean E2E Latency (ms)"] - figures["Mean TTFT (ms)"]
print(f"output tokens by the latencies: {1 + decoding / figures['Mean TPOT (ms)']:.2f}")
for name, value in derived(report).items():
    print(f"{name:10}{value:8.2f}")

# %% [markdown]
# `derived` computes such hidden figures. *By times* is the number of output tokens by the latencies, *under way* the
# mean number of requests in flight.
#
# * Both ways give 128.00 tokens. With means of unequal outputs, they would differ. What does the equality say about the
#   outputs of the single requests?
# * **Try** the report `"GPT-OSS 20B · 0.0 · 1 · before"`. Why are its two numbers different?
#
# ## Accept length and accept rate
#
# An engine that drafts reports how much was accepted. The *accept rate* is accepted over proposed drafts. The *accept
# length* is tokens per round, with the bonus token. With K drafts in every round,
#
# accept length = 1 + K · accept rate.
#
# Therefore the accept length can never exceed K + 1. And the two figures together say how many drafts there were. But
# printed figures are rounded, so that a check has to know their last place.

# %% [markdown]
# ### Exercise 14-1
#
# Write `numbers_of_drafts`. A report prints an accept length and an accept rate, both with two decimals. A chain of K
# drafts was used in every round, so that the true figures satisfy accept length = 1 + K · accept rate. Return all K
# from 1 to `most` for which both printed figures can be true; an empty list says that they contradict each other.
#
# A printed 0.34 stands for every number from 0.335 to 0.345.
#
# Hint: K = (accept length − 1) / accept rate. Compute its smallest and its largest value.


# %%
def numbers_of_drafts(accept_length: float, accept_rate: float, most: int) -> list[int]:
    """List the numbers of drafts, from 1 to most, for which both printed figures can be true.

    accept_length: tokens of a round, bonus token included. accept_rate: accepted over proposed drafts.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("14-1", numbers_of_drafts)

# %% [markdown]
# `specsim.course.solution("14-1")` shows a solution.
#
# The linter does the same. The next cell gives it a slide with an accept length of 2.05 and an accept rate of 51.20 %.

# %%
acceptance = {"Spec Decode Accept Length": 2.05, "Spec Decode Accept Rate (%)": 51.20}
for finding in lint(Report("a slide", acceptance, rounding=0.005)):
    print(f"{finding.verdict}: {finding.says}")

# %% [markdown]
# * No K gives both figures, but there is a hint: some tools count accepted *drafts* only, and call that the accept
#   length. What is the accept length in our sense then?
# * Which mistake would you make if you compared this 2.05 with the 2.05 of another tool?
#
# ## Throughput and latency
#
# Each of 16 clients waits for its answer before it sends the next request. So at most 16 requests are in flight, and a
# request takes the E2E latency. This limits the throughput. Many reports do not print the E2E latency, but it follows
# from TTFT and TPOT.

# %% [markdown]
# ### Exercise 14-2
#
# Write `most_tokens_per_s`: the largest output throughput that a report's latencies allow. There are `clients` clients.
# Each sends a request, waits until it is complete, and sends the next one. All requests put out equally many tokens.
# The latencies are in ms, the result is in tokens per second.
#
# Hint: how long does a request take? How many can a client complete in a second?


# %%
def most_tokens_per_s(clients: int, ttft: float, tpot: float, tokens: int) -> float:
    """Compute the largest output throughput, in tokens per second, that the latencies allow.

    clients: each has at most one request in flight. ttft, tpot: means in ms. tokens: output tokens of every request.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("14-2", most_tokens_per_s)

# %% [markdown]
# The next cell prints the share of this bound that three runs of the table reach. Requests in flight, divided by
# clients, is the same number.

# %%
for name in ("Llama3 8B · 0.0 · 1 · before", "Llama3 8B · 0.0 · 16 · before", "Llama3 8B · 0.0 · 64 · before"):
    each = reports[name]
    share = derived(each)["under way"] / each.concurrency
    print(f"{name}: {share:6.1%} of the throughput that the latencies allow")

# %% [markdown]
# * Why is the share almost 100 % with one client, and lower with more? Think of the end of a run.
# * Which share would you not believe?
#
# A slide shows the same report with a TPOT that is 1.3 times as long, and without the E2E latency. It takes a claim
# about the length of all outputs to see that something is wrong:

# %%
kept = {name: value for name, value in figures.items() if "E2E" not in name}
slide = replace(report, label="a slide", figures=kept | {"Mean TPOT (ms)": 1.3 * figures["Mean TPOT (ms)"]})
for finding in lint(slide, Stated(output_tokens=128)):
    if finding.verdict == "cannot be true":
        print(finding.says)

# %% [markdown]
# ## All checks at once
#
# `lint` checks every such identity for which the report has the figures. A verdict is one of three: the figures agree
# (`holds`), they contradict each other (`cannot be true`), or there is nothing to compare with, but something
# `follows`.

# %%
for finding in lint(report, Stated(output_tokens=128, num_drafts=3)):
    print(f"{finding.verdict:8} {finding.says}")

# %% [markdown]
# `Stated` holds what the text around a report claims. With the claim of 1536 tokens, or of 5 drafts, the verdict is
# another one:

# %%
for stated in (Stated(output_tokens=1536), Stated(num_drafts=5)):
    print(*(finding.says for finding in lint(report, stated) if finding.verdict == "cannot be true"), sep="\n")

# %% [markdown]
# Now let us falsify the report. Each row of the next cell multiplies some figures by a factor. Before you run it, say
# for every row whether the linter can notice it.

# %%
throughputs = [name for name in figures if "Throughput" in name]
times = [name for name in figures if "(ms)" in name]
stated = Stated(output_tokens=128, num_drafts=3)
changes = {
    "accept length × 2.1": {"Spec Decode Accept Length": 2.1},
    "all throughputs × 1.2": dict.fromkeys(throughputs, 1.2),
    "mean E2E latency × 0.05": {"Mean E2E Latency (ms)": 0.05},
    "mean ITL × 0.4": {"Mean ITL (ms)": 0.4},
    "mean TPOT × 0.7": {"Mean TPOT (ms)": 0.7},
    "everything 1.5 times as fast": dict.fromkeys(throughputs, 1.5) | dict.fromkeys(times, 1 / 1.5),
}
for words, factors in changes.items():
    false = {name: value * factors.get(name, 1) for name, value in figures.items()}
    found = [each.says for each in lint(replace(report, figures=false), stated) if each.verdict == "cannot be true"]
    print(f"{words}:", *(found or ["nothing found"]), sep="\n    ")

# %% [markdown]
# * A delivery holds at least one token. Which of the findings follows from this?
# * The last row passes every check. Why can no identity between figures of one report find it?
#
# A report that agrees with itself can still be wrong: a clock that runs too slowly makes everything faster in
# proportion. The next section compares with something outside the report.
#
# ## The hardware's bound
#
# A round of the target reads all weights once. It computes two operations for each parameter and each token that it
# verifies. No GPU exceeds the peaks of its data sheet.

# %% [markdown]
# ### Exercise 14-3
#
# Write `most_by_hardware`: a bound on the tokens per second of a whole server. In every round the GPU reads all weights
# once, for all requests together. It takes two operations for each parameter and each token that the target reads.
# Reading and arithmetic can happen at the same time. Nothing else takes time: no drafter, no KV, no host. A round gives
# `accept_length` tokens to each request.


# %%
def most_by_hardware(
    accept_length: float, requests: int, nodes: int, parameters: float, bandwidth: float, peak_flops: float
) -> float:
    """Compute the most tokens per second that the hardware allows, with 2 bytes for each parameter.

    nodes: tokens that the target reads in a round for each request, the root included. bandwidth: bytes per second.
    peak_flops: operations per second.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("14-3", most_by_hardware)

# %% [markdown]
# ### Prediction
#
# The pull request does not name its GPU. The bound can say which ones it was not. A round gives as many tokens as the
# accept length, and each takes one TPOT. So their product is the time of a round.

# %%
few, many = (reports[f"Llama3 8B · 0.0 · {clients} · before"].figures for clients in (1, 64))
round_few, round_many = (each["Spec Decode Accept Length"] * each["Mean TPOT (ms)"] for each in (few, many))
print(f"a round takes {round_few:.2f} ms with 1 client, and {round_many:.2f} ms with 64 clients")
assert f"{round_many:.1f}" == "12.2"
print(f"the simulator knows {len(names())} GPUs:", *names())

# %%
guess = specsim.course.predict("How many of the eight GPUs can it have been?", 6)
guess

# %% [markdown]
# With 1 client the target reads 4 tokens in a round, with 64 clients 256. `IDEAL` stands for an engine that reaches
# every peak and has no other costs.

# %%
llama = model("llama-3.1-8b")
possible = []
for name in names():
    ideal = Forward(hardware(name), llama, IDEAL, 1)
    least_few, least_many = (1e3 * ideal.products(tokens, tokens) for tokens in (4, 256))
    if least_few <= round_few and least_many <= round_many:
        possible.append(name)
    print(f"{name:14} at least {least_few:5.2f} ms with 1 client, {least_many:5.2f} ms with 64: {name in possible}")
guess.score(len(possible))

# %% [markdown]
# * Which GPUs are excluded by reading, and which one only by arithmetic?
# * Suppose that the report were 1.5 times as fast, as in the last section. Which GPUs would remain?
#
# The picture shows bound and forecast for an H100, with the two rounds marked. The forecast is what a usual engine
# needs.

# %%
scenario = Cell(model="llama-3.1-8b", hardware="H100-SXM", profile="vllm-2026-dense").scenario
plots.roofline(scenario, marks={"1 client": 4, "64 clients": 256})

# %% [markdown]
# * The target's pass is only a part of a round. Is it plausible that a round of 64 clients took 12.2 ms on an H100?
#
# A bound excludes, it never proves. But it needs no trust in anybody.
#
# ## A speed-up from a slow baseline
#
# Back to the slide: 271 tokens per second instead of 66, 4.1 times as fast, one request on an H100. The small print
# says that the accept length is 2.63 with 3 drafts.
#
# One check needs no hardware at all. A round takes at least as long as a step of plain decoding, because the target has
# to read its weights in both. It gives 2.63 tokens instead of one. So on the same engine,
#
# speed-up ≤ accept length.
#
# 4.1 is above 2.63, so the drafts alone cannot have done it. The published table of
# [Spec-Bench](https://github.com/hemingkx/Spec-Bench) obeys this bound in every row, since it uses one engine for
# everything:

# %%
published = rows("spec_bench")
ratios = {float(row["speedup"]) / float(row["mean_accepted_tokens"]): row for row in published}
best = ratios[max(ratios)]
print(
    f"largest speed-up / accept length of {len(published)} rows: {max(ratios):.2f}, {best['method']} on {best['gpu']}"
)
assert max(ratios) < 1

# %% [markdown]
# ### Prediction
#
# What is the drafts' own part in the 4.1? The slide's engine is the usual one of the previous notebook.

# %%
guess = specsim.course.predict("The slide says 4.1. How many times as fast is it on one engine?", 4.1)
guess

# %%
shares = chain_shares((0.75, 0.52, 0.36))
engines = {
    name: Cell(model="llama-3.1-8b", hardware="H100-SXM", profile=name, shares=shares).scenario
    for name in ("transformers-dense", "vllm-2026-dense")
}
for name, engine in engines.items():
    plain = 1 / engine.phases(engine.plain, 1).total
    drafts = engine.option.accept_length / engine.phases(engine.option, 1).total
    print(f"{name:20} {plain:4.0f} tok/s without drafts, {drafts:4.0f} with drafts: {drafts / plain:.2f} ×")
slow, usual = engines.values()
claimed = usual.speedup(1) * slow.phases(slow.plain, 1).total / usual.phases(usual.plain, 1).total
assert (round(claimed, 1), round(drafts), f"{usual.option.accept_length:.2f}") == (4.1, 271, "2.63")
guess.score(usual.speedup(1))

# %% [markdown]
# * The slide compared the lower right figure with the upper left one. Which factor of the 4.1 belongs to the engine?
# * **Try** `hardware="H200"`, which reads 1.4 times as fast. The slow engine is as fast as before. What does this say
#   about its bottleneck?
#
# `transformers-dense` is a profile of an engine that launches kernels one by one from Python. A report does not say so.
# But it names the GPU, the model and 66 tokens per second, which is enough: a step of plain decoding reads all weights.

# %%
weights = 2 * (llama.parameters - llama.embedding_weights)
for name, engine in engines.items():
    reached = weights / engine.phases(engine.plain, 1).total
    print(f"{name:20} reads {reached / 1e12:.2f} TB/s, {reached / hardware('H100').bandwidth:.0%} of the peak")

# %% [markdown]
# So the last check is a division: weights in bytes, times the tokens per second of the baseline with one request,
# divided by the bandwidth. Good engines reach more than half. A baseline far below tells you what was really compared.
#
# ## Your predictions

# %%
specsim.course.scores()

# %% [markdown]
# ## What to remember
#
# * Accept length = 1 + K · accept rate ≤ K + 1. Ask whether the bonus token is counted.
# * Output tokens = throughput / request rate = 1 + (E2E − TTFT) / TPOT. Requests in flight = request rate · E2E ≤
#   clients.
# * Agreement with itself is not truth. The hardware's bound checks a report from outside.
# * Speed-up ≤ accept length on one engine. Above it, the baseline is another engine. Compute the share of the bandwidth
#   that the baseline reaches.
# * A report that can be checked states model, number format, GPU, engine and version, clients, lengths of prompts and
#   outputs, temperature, number of drafts, accept length, and the baseline's own tokens per second.
#
# On the command line, `specsim lint-report results.json --output-tokens 128 --num-drafts 3` reads the files and the
# printed text of the benchmark clients of vLLM and SGLang. The identities are in
# `specsim/simulator/lint.py`.
