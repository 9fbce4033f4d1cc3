# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Other drafters
#
# * **Goal:** You can say what ten kinds of drafters read and write, what each costs per draft, and how many drafts of
#   each are accepted. You can choose one by its speed-up.
# * **Before:** Notebooks 02, 03 and 04.
# * **Time:** 50 minutes to work through, 20 seconds to run. No GPU.
#
# Verification does not care where drafts come from. A bad draft costs time, never a wrong token. So anything may draft:
# a head on the target's hidden states, a second language model, or a search in the text. This notebook compares them,
# on one target and with trained weights.

# %%
from fractions import Fraction

import specsim
from specsim import NgramConfig, SamplingParams, ServingConfig, SpecConfig, plots
from specsim.models.draft_cost import draft_cost
from specsim.models.shipped import load_prompts
from specsim.models.synthetic_pair import bridged_pair
from specsim.reference.drafters.ngram import chain
from specsim.serving.requests import make_requests
from specsim.serving.serve import serve
from specsim.simulator import drafter, model

# %% [markdown]
# ## Ten drafters
#
# | drafter | reads | writes |
# |---|---|---|
# | EAGLE | the target's last hidden state | its own KV |
# | EAGLE-3 | hidden states of three layers | its own KV |
# | P-EAGLE | hidden states of three layers | its own KV |
# | MTP | the target's last hidden state | KV of every module |
# | frozen KV | the target's hidden state and *the target's KV* | nothing |
# | DFlash | hidden states of several layers | KV of its context |
# | DSpark | hidden states of several layers | KV of its context |
# | standalone | tokens | its own KV |
# | n-gram | tokens of the request | nothing |
# | suffix | tokens of this and of finished requests | nothing |
#
# The first seven were trained for this target. A standalone model may come from anywhere. The last two have no weights.
#
# All of them run behind the same protocol. The engines tell how they differ for the KV cache:

# %%
kinds = ("eagle", "eagle3", "p-eagle", "mtp", "frozen-kv", "dflash", "dspark", "standalone", "ngram", "suffix")
config = SpecConfig(topk=1, num_steps=3)
pairs = {kind: specsim.load(drafter=kind) for kind in kinds}
for kind, pair in pairs.items():
    own = specsim.load_engine(pair, config).drafter
    layers = own.kv_layout.num_layers if own.kv_layout else 0
    print(f"{kind:10}  layers of KV {layers}   bonus columns {own.bonus_columns}   lookahead {own.lookahead}")

# %% [markdown]
# * **Lead.** In an EAGLE drafter, slot p holds the features of token p together with the id of token p+1. A language
#   model has no features: its slot p holds token p. So its drafts begin one column later.
# * **Lookahead.** The third MTP module needs tokens that come two places later. Which rows of its KV must be written
#   again when drafts are rejected?
#
# ## How many drafts are accepted?
#
# The measurement: six excerpts of Python files that no model here was trained on, 32 new tokens each, greedy, chains of
# three drafts. A round gives one to four tokens.
#
# ### Prediction
#
# N-gram drafting has no weights. It searches for the last tokens further left, and proposes what followed there. How
# many tokens does such a round give, in the mean?

# %%
guess = specsim.course.predict("How many tokens does a round of the n-gram drafter give?", 1.2)
guess

# %%
prompts = [prompt["text"] for prompt in load_prompts()][:6]
sampling = SamplingParams(max_new_tokens=32)
results = {kind: specsim.generate(pair, prompts, config, sampling) for kind, pair in pairs.items()}
guess.score(results["ngram"].acceptance.accept_length)

# %%
for kind, result in results.items():
    rates = ", ".join(f"{rate:.2f}" for rate in result.acceptance.accepted_by_position)
    print(f"{kind:10}  accept length {result.acceptance.accept_length:.2f}   accepted by position {rates}")
texts = [output.token_ids for output in results["eagle3"].outputs]
assert all([output.token_ids for output in result.outputs] == texts for result in results.values())

# %%
shown = ("eagle", "p-eagle", "mtp", "frozen-kv", "ngram")
plots.acceptance({kind: results[kind].acceptance for kind in shown})

# %% [markdown]
# The cell before the picture ends with an assertion: all ten gave the same text. The picture shows five of them. The
# lines of others would lie on these.
#
# * Which drafters differ little? With six prompts, small differences mean nothing.
# * The line of the n-gram drafter falls steeply to the first draft, and then more slowly than the others. What does
#   this say about a search that has found something?
# * **Try** `temperature=1.0`. Why do all of them fall?
#
# ## Drafts from the text
#
# How can a search be right so often? Code repeats names, signatures and whole lines.

# %%
pair = pairs["ngram"]
text = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height"
tokens = pair.tokenizer.encode(text)
proposal = chain(tokens, NgramConfig(max_ngram=4), 3)
print(repr(text[-24:]), "→", repr(pair.tokenizer.decode(list(proposal.tokens))))

# %% [markdown]
# ### Exercise 12-1
#
# Write `prompt_lookup`. Take the last n tokens of the list, first for n = `max_ngram`, then for shorter ones down to n
# = 1. Search for the same n tokens further left. At the first n that has a match, return the tokens after it, at most
# `num_drafts`. If it has several matches, take the *earliest*. Without any match return an empty list.
#
# At least one token must follow a match. A match may overlap the last n tokens, and what follows may reach into them.
#
# Example: in 1 2 3 9 1 2 3 the last three tokens also stand at the beginning, and 9 1 follows.


# %%
def prompt_lookup(tokens: list[int], max_ngram: int, num_drafts: int) -> list[int]:
    """Propose at most num_drafts tokens: those after the earliest match of the longest n-gram that occurs earlier."""
    raise NotImplementedError("your answer")


# %%
specsim.course.check("12-1", prompt_lookup)

# %% [markdown]
# `specsim.course.solution("12-1")` shows a solution.
#
# A **suffix** drafter goes further. It keeps a tree of all suffixes, with counts, of the request and also of the
# outputs of *finished* requests. The better a match, the more tokens it proposes. Agents and test loops send similar
# requests again and again.
#
# ### Prediction
#
# One server gets the same six prompts twice. The first time, a round of the suffix drafter gives as many tokens as in
# the table above. And the second time?

# %%
guess = specsim.course.predict("How many tokens does a round of the suffix drafter give the second time?", 2.0)
guess

# %%
engine = specsim.load_engine(pairs["suffix"], config)
serving = ServingConfig(max_running=6, num_slots=8192)
lengths = []
for turn in range(2):
    ids = range(6 * turn, 6 * turn + 6)
    requests = make_requests(pairs["suffix"], prompts, sampling, list(ids), config.length_limit)
    lengths.append(serve(engine, requests, serving).acceptance.accept_length)
    print(f"turn {turn + 1}: accept length {lengths[-1]:.2f}")

# %%
guess.score(lengths[1])

# %% [markdown]
# * Four is the largest possible. Why is the first round of a request not always that good?
# * **Try** `SpecConfig(topk=1, num_steps=8)` for both turns. Which other drafter of this notebook could use eight
#   drafts so well?
# * With `SuffixConfig(shared=False)` requests do not see each other. Which reasons could a server have for that?
#
# ## Several tokens at once: MTP
#
# An EAGLE drafter runs once for each draft. DeepSeek-V3 and others are trained with *modules*: module k makes the draft
# of depth k+1. Module 0 reads the target's hidden state, and every other one the hidden state of the module before.
#
# All modules run over the rows that verification accepted. So the drafts of the next round are known before it begins,
# and its draft phase runs no forward at all. The price shows in a tree.

# %%
tree = SpecConfig(topk=4, num_steps=3, num_draft_tokens=12)
rounds = specsim.trace(pairs["mtp"], "import numpy as np\n\nx =", tree, SamplingParams(max_new_tokens=4))
rounds[0].tree(0)

# %% [markdown]
# * Compare the children of `array` and of `random`. Which of them make sense?
# * Module 2 ran before the tree existed, along the best drafts: `.` and `array`. What would an EAGLE drafter do for the
#   lane of `random`?

# %%
for kind in ("eagle3", "mtp"):
    length = specsim.generate(pairs[kind], prompts, tree, sampling).acceptance.accept_length
    print(f"{kind}: chain of 3 {results[kind].acceptance.accept_length:.2f}, tree of 12 {length:.2f}")

# %% [markdown]
# * Both gain about the same here, and with six prompts a small difference means nothing. Which of the two would gain
#   more from a much larger tree?
#
# ## All drafts in one forward: P-EAGLE, DFlash, DSpark
#
# MTP has a module for each depth. Three other drafters make all drafts of a round in *one* forward. Where no token is
# known yet, they read a mask token.
#
# * **P-EAGLE** is an EAGLE-3 head. After the rows of the accepted tokens it runs one mask row for each further draft.
# * **DFlash** runs a block: the bonus token and mask tokens, which see each other in both directions, and the target's
#   hidden states as context. Slot j gives draft j.
# * **DSpark** is such a block too. But a small head adds a bias for the token before each draft, one draft after the
#   other, and another head ends a chain whose next draft is unlikely.
#
# So the weights are read once for all drafts. What does one draft cost in a round of 1, 3 or 7, as a share of a pass of
# the target?

# %%
for kind in ("eagle3", "p-eagle", "dflash", "dspark"):
    print(f"{kind:10}", "  ".join(f"{num_steps}: {draft_cost(pairs[kind], num_steps):.2f}" for num_steps in (1, 3, 7)))

# %% [markdown]
# * Which number of the table above shows the price? Compare the third draft of EAGLE-3 with that of the others. What
#   does it know that a mask row does not?
# * Only DSpark's drafts know the draft before them. Which of its weights are read for each draft again?
#
# ## No KV at all
#
# The KV of a drafter takes memory, and it must be filled, moved and released like the target's. The **frozen KV**
# drafter, as in Gemma 4's assistant, has queries only. They attend to the KV that the target has written anyway.
# Nothing is written, so nothing can become stale.
#
# * Its drafts do not see each other's KV. How does the third draft know the first one?
# * Its accept length is among the best in the table. Which drafter's KV does it save you, in layers?
#
# ## Another language model
#
# A small language model of the same family can draft without any training. But it must have the same vocabulary. Equal
# sizes prove nothing: id 17 may mean another token. If only some tokens are common to both, drafts are drawn from these
# alone.

# %%
target_tokens = ["dog", "owl", "cat", "emu"]
draft_tokens = ["owl", "cat", "fox"]
draft_prob = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)]
common = set(target_tokens) & set(draft_tokens)
print("common:", sorted(common), "with probability", sum(draft_prob[draft_tokens.index(token)] for token in common))

# %% [markdown]
# ### Exercise 12-2
#
# Write `bridged`. A draft model has the tokens `draft_tokens`, and its probabilities are `draft_prob`, in the same
# order. The target has the tokens `target_tokens`. A token is the same if its text is. Return the probabilities from
# which drafts are drawn: a list with one fraction for each of the target's tokens, which sum to 1. A token that only
# one of the models has is never drafted. The relation between two common tokens stays as it is.


# %%
def bridged(draft_prob: list[Fraction], draft_tokens: list[str], target_tokens: list[str]) -> list[Fraction]:
    """Compute the probability of every token of the target, by its id there, for a drafter with another vocabulary."""
    raise NotImplementedError("your answer")


# %%
specsim.course.check("12-2", bridged)

# %% [markdown]
# The package does this once, to the weights, when a model is loaded (`specsim.load(..., bridge_vocabularies=True)`).
#
# What does it cost? `bridged_pair` gives the shipped standalone model another vocabulary: other ids, and every eighth
# token of the target is missing, frequent ones too.
#
# ### Prediction
#
# With all tokens, the standalone model had the accept length in the table above, almost 3. How much has it with seven
# eighths of them?

# %%
assert round(results["standalone"].acceptance.accept_length, 1) == 3.0
guess = specsim.course.predict("What is the accept length with seven eighths of the tokens?", 2.9)
guess

# %%
other = bridged_pair(pairs["standalone"])
result = specsim.generate(other, prompts, config, sampling)
assert [output.token_ids for output in result.outputs] == texts
guess.score(result.acceptance.accept_length)

# %% [markdown]
# The text is the same, as always. But one missing token hurts three times. It is never drafted, it ends the chain, and
# afterwards the drafter reads its *stand-in*, an unknown token, in the context.
#
# * Which of the three would a larger model repair?
# * Two real tokenizers share most of their *frequent* tokens. Is the true loss larger or smaller than here?
#
# ## What a draft costs
#
# Notebook 02: with few requests, a forward pass takes as long as reading the weights. So the cost of a draft is the
# number of weights that it reads, as a share of the target's weights. First for the shipped pair with three drafts a
# round, then for large models.

# %%
for kind, pair in pairs.items():
    print(f"{kind:10}  {draft_cost(pair, config.num_steps):.2f}")

# %%
llama = model("llama-3.1-8b")
large = {kind: drafter(kind, llama).model for kind in ("eagle", "mtp")}
large["eagle3"] = drafter("eagle3", llama, 32_000).model
costs = {kind: each.active_parameters / llama.active_parameters for kind, each in large.items()}
costs["ngram"] = 0.0
vicuna = model("vicuna-7b-v1.3")
costs["standalone"] = model("vicuna-68m").active_parameters / vicuna.active_parameters
for kind, cost in costs.items():
    print(f"{kind:10}  {cost:.3f}")

# %% [markdown]
# The last line is Vicuna-68M as a drafter of Vicuna-7B; the others draft for Llama 3.1 8B.
#
# * On the shipped pair, a draft of most drafters costs more than half of a pass. Why so much? The target has four
#   layers, a drafter one or two. And who reads the head, with 4096 rows?
# * EAGLE-3 has a vocabulary of its own with 32,000 tokens. Compare its cost with that of `eagle`, which reads the head
#   of Llama with 128,256 rows.
#
# Accept length and cost together decide.

# %% [markdown]
# ### Exercise 12-3
#
# Write `best_drafter`. It receives the accept length and the cost of one draft for each drafter by name, and the number
# of drafts in a round. The cost is a share of a forward pass of the target. A round costs one such pass, and the
# drafts, one after the other. Plain decoding gives one token per pass. Return the name of the drafter with the largest
# speed-up, or `"none"` if no drafter is faster than plain decoding.


# %%
def best_drafter(drafters: dict[str, tuple[float, float]], num_drafts: int) -> str:
    """Name the drafter with the largest speed-up; `none` where no drafter is faster than plain decoding.

    drafters: accept length and cost of one draft, as a share of a forward pass of the target, by name.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("12-3", best_drafter)

# %% [markdown]
# The next cell combines the accept lengths of the small pair with the costs of the large ones. That is an illustration,
# not a forecast: a large target has other accept lengths. `specsim plan` uses measured ones.

# %%
for kind in costs:
    length = results[kind].acceptance.accept_length
    small, big = (length / (1 + 3 * cost) for cost in (draft_cost(pairs[kind]), costs[kind]))
    print(f"{kind:10}  speed-up with the costs of the shipped pair {small:.2f}, of the large models {big:.2f}")

# %% [markdown]
# * Which drafter is best on the shipped pair, which on the large models? What made the difference?
# * These costs are weights only. What do they leave out for a drafter that searches on the host, once for each request
#   and round?
#
# ## Your predictions

# %%
specsim.course.scores()

# %% [markdown]
# ## What to remember
#
# * Verification makes every drafter lossless. Choose by accept length *and* cost.
# * Heads that read the target's hidden states are small and good, but must be trained for one target.
# * MTP drafts are made before the round begins. So its modules do not see the branches of a tree.
# * P-EAGLE and block drafters read their weights once for all drafts of a round. Their later drafts know less.
# * Searches cost nothing and shine on text that repeats: edits, summaries, agents.
# * A vocabulary that differs a little costs much acceptance.
#
# In the package: [the guide](guide/drafters.md) has all drafters with measured accept lengths, `specsim accept`
# measures them again, and `papers` has notes on each. Sources: [Medusa](https://arxiv.org/abs/2401.10774),
# [EAGLE-3](https://arxiv.org/abs/2503.01840), [DeepSeek-V3](https://arxiv.org/abs/2412.19437) for MTP,
# [SuffixDecoding](https://arxiv.org/abs/2411.04975), [heterogeneous vocabularies](https://arxiv.org/abs/2502.05202).
