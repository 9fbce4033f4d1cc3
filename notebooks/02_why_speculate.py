# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Why speculate
#
# * **Goal:** You can explain where the speed-up of speculative decoding comes from, compute it from two numbers, and
#   name three cases in which speculation cannot pay.
# * **Before:** Notebook 01.
# * **Time:** 40 minutes to work through, 10 seconds to run. No GPU.
#
# Speculative decoding does *more* arithmetic than plain decoding: the drafter runs too, and the target reads drafts
# that are thrown away. How can it be faster? The answer is that a GPU which generates one token at a time does hardly
# any arithmetic. It waits for memory.

# %%
import specsim
from specsim import plots
from specsim.simulator import hardware, model, theory
from specsim.simulator.acceptance import iid
from specsim.simulator.cell import Cell

# %% [markdown]
# ## A forward pass with one token
#
# Take Llama 3.1 8B with 16-bit weights, on one H100. For every token that it generates, the GPU reads all weights from
# its memory, and uses each of them once: for one multiplication and one addition.

# %%
gpu = hardware("H100-SXM")
llama = model("llama-3.1-8b")
weights = llama.parameters - llama.embedding_weights  # of the embedding only one row is read
reading = 2 * weights / gpu.bandwidth
arithmetic = 2 * weights / gpu.flops("bfloat16")
print(f"weights: {weights / 1e9:.1f} billion, {2 * weights / 1e9:.0f} GB")
print(f"reading them takes at least {1e3 * reading:.2f} ms")
print(f"the arithmetic of one token takes at least {1e3 * arithmetic:.4f} ms")

# %% [markdown]
# Both figures are lower bounds, from the data sheet's peak rates. The arithmetic is not even half a percent of the
# reading.
#
# ### Prediction
#
# Now let the pass read 64 tokens at once: 64 requests with a token each, or one request with 63 drafts. The weights are
# still read once.

# %%
guess = specsim.course.predict("What is the lower bound, in ms, for a forward pass with 64 tokens?", 287, within=0.2)
guess

# %%
guess.score(1e3 * max(reading, 64 * arithmetic))

# %% [markdown]
# The other 63 tokens are free: while the weights arrive, there is time for their arithmetic. This is the reason why
# speculative decoding works. To *check* several drafts in one pass takes hardly longer than to *generate* one token.
#
# The picture shows the time over the number of tokens in a pass. The dashed line is the bound. The solid line is the
# simulator's forecast for a real server, which reaches neither peak and has some fixed costs. A `Cell` holds the
# settings of one forecast.

# %%
scenario = Cell(model="llama-3.1-8b", hardware="H100-SXM", num_steps=3).scenario
plots.roofline(scenario, marks={"1 chain": 4, "64 chains of 3": 256})

# %% [markdown]
# * Up to how many tokens is the bound flat? Where does the forecast begin to rise?
# * A round of one request with 3 drafts reads 4 tokens, the root among them. How much longer does it take than a pass
#   with one token? And a round of 64 such requests?
# * **Try** another `hardware`, such as `"H200"`, or `model="qwen3-32b"`. What moves, and what stays where it is?
#
# The next exercise computes the end of the flat part.

# %% [markdown]
# ### Exercise 02-1
#
# Write `free_tokens`: the number of tokens in one forward pass at which the arithmetic takes as long as reading the
# weights. Every parameter is read once for all tokens. Every token needs one multiplication and one addition for each
# parameter.
#
# Hint: compute the seconds of both. Only one of them grows with the number of tokens.


# %%
def free_tokens(parameters: float, bytes_per_parameter: float, bandwidth: float, peak_flops: float) -> float:
    """Compute the number of tokens in a forward pass at which the arithmetic takes as long as reading the weights.

    bandwidth: bytes per second. peak_flops: operations per second; a multiplication and an addition are two.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("02-1", free_tokens)

# %% [markdown]
# `specsim.course.solution("02-1")` shows a solution.
#
# ## Tokens of a round
#
# So the target's pass costs the same with drafts and without them. What is gained depends on how many drafts are
# accepted. The usual model has one number: α, the probability that a draft is accepted if all drafts before it are.
# Drafts after a rejection are lost.
#
# The picture shows the share of rounds that accept at least 1, 2, … of 5 drafts, for two values of α. `iid(α, n)` is
# this model with n drafts.

# %%
plots.positions({"α = 0.8": iid(0.8, 5), "α = 0.6": iid(0.6, 5)})

# %% [markdown]
# * The number at the end of a line is the *accept length*: tokens per round, with the bonus token. How do you get it
#   from the points of the line?
# * With α = 0.6, how often is the fifth draft accepted? Is it worth its time?

# %% [markdown]
# ### Exercise 02-2
#
# Write `expected_tokens`. A round proposes a chain of gamma drafts. Each is accepted with probability alpha if all
# drafts before it are accepted; after a rejection no later draft counts. Every round also gives one token of the
# target. Return the mean number of tokens, also for alpha 0 and 1.
#
# Hint: the mean of a count is the sum of the probabilities that it is at least 1, at least 2, and so on.


# %%
def expected_tokens(alpha: float, gamma: int) -> float:
    """Compute the mean number of tokens of a round with a chain of gamma drafts, bonus token included.

    alpha: probability that a draft is accepted, given that all before it are.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("02-2", expected_tokens)

# %% [markdown]
# ## The speed-up
#
# Drafts are not free either. Let c be the time of one draft, as a share of the target's forward pass. A round of γ
# drafts takes γ·c + 1 passes' time and gives 1 + α + … + α^γ tokens. Plain decoding takes one pass for each token. So
# the speed-up is
#
# (1 + α + … + α^γ) / (γ·c + 1).
#
# ### Prediction
#
# A good drafter has α = 0.8 and c = 0.05: four of five drafts are right, and twenty drafts cost as much as one pass of
# the target. It proposes γ = 4 drafts in a round.

# %%
guess = specsim.course.predict("What is the speed-up with α = 0.8, c = 0.05 and 4 drafts?", 4)
guess

# %%
guess.score(theory.speedup(0.8, 4, 0.05))

# %% [markdown]
# Should it propose more? The next table goes through the numbers of drafts, for two drafters.

# %%
for gamma in (0, 1, 2, 3, 4, 6, 8, 12, 16):
    good, poor = theory.speedup(0.8, gamma, 0.05), theory.speedup(0.5, gamma, 0.2)
    print(f"{gamma:2} drafts: {good:.2f} with α = 0.8, c = 0.05   {poor:.2f} with α = 0.5, c = 0.2")

# %% [markdown]
# * Both speed-ups rise and then fall. Why do they fall?
# * The poor drafter is right half of the time. Why does it gain so little?
# * With 16 drafts the poor drafter makes decoding slower. How much slower can it get with ever more drafts?

# %% [markdown]
# ### Exercise 02-3
#
# Write `best_gamma`: the number of drafts with the largest speed-up, from 0 to `most`. A round of gamma drafts takes
# gamma · cost_ratio + 1 times as long as plain decoding takes for one token, and gives as many tokens as in Exercise
# 02-2.


# %%
def best_gamma(alpha: float, cost_ratio: float, most: int) -> int:
    """Find the number of drafts, from 0 to most, with the largest speed-up; 0 where none is faster.

    cost_ratio: time of one draft, as a share of the time of a forward pass of the target.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("02-3", best_gamma)

# %% [markdown]
# ## When it cannot pay
#
# **The drafter is too slow.** The first draft adds α tokens and costs c. If α ≤ c, no number of drafts makes decoding
# faster.
#
# **The GPU has no idle arithmetic.** The formula takes verification as free. That is true on the flat part of the
# roofline only. A batch of many requests uses the arithmetic by itself, and then every draft costs its full share. The
# simulator knows this; the formula does not.
#
# ### Prediction
#
# A server runs Llama 3.1 8B with an EAGLE-3 drafter whose acceptance is a published one. It proposes a tree of 16 nodes
# for every request. With one request this is more than twice as fast as plain decoding. But in a batch every request
# brings 16 tokens. How many requests does the flat part of the roofline hold? And is the whole speed-up lost where it
# ends?

# %%
tree = Cell(topk=4, num_steps=5, num_draft_tokens=16).scenario
guess = specsim.course.predict("From how many requests on is plain decoding faster than trees of 16?", 300, within=0.25)
guess

# %%
print(f"with one request: {tree.speedup(1):.2f} times as fast")
guess.score(tree.crossover())

# %%
chains = {f"chain of {steps}": Cell(num_steps=steps).scenario for steps in (1, 3, 5)}
plots.speedup({**chains, "tree of 16": tree}, most=512)

# %% [markdown]
# * With one request the tree is the best setting. Which is the best with 100 requests, and with 500?
# * The bands show how much the forecast depends on the server's parameters. For which statements does it not matter?
# * **Try** `hardware="H200"` in both cells. Does a GPU with more bandwidth make speculation better or worse?
#
# **The text is unpredictable.** α depends on the text: high for code, tables and quotations, low for poetry at a high
# temperature. A drafter that was measured on one kind of text may not pay on another.
#
# ## Your predictions

# %%
specsim.course.scores()

# %% [markdown]
# ## What to remember
#
# * Decoding with a small batch waits for memory. More tokens in the same pass are almost free, up to a few hundred.
# * Tokens of a round: 1 + α + … + α^γ. Speed-up: this, divided by γ·c + 1.
# * More drafts are not always better. The best number grows with α, and falls with c and with the batch.
# * With large batches speculation can make a server slower. Measure, or ask `specsim plan`.
#
# The formula is from [Leviathan, Kalman and Matias](https://arxiv.org/abs/2211.17192); in the package it is
# `specsim.simulator.theory.speedup`.
