# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Typed states and two counters
#
# * **Goal:** You can say what a row of every state of a round stands for, why each phase has a type of its own, and
#   which of the two counters each part of an engine must read.
# * **Before:** Notebooks 01 and 07.
# * **Time:** 40 minutes to work through, 10 seconds to run. No GPU.
#
# Two changes in SGLang added no feature, and both are worth studying.
# [sglang#24859](https://github.com/sgl-project/sglang/pull/24859) gave draft-extend a class of its own, and
# [sglang#23962](https://github.com/sgl-project/sglang/pull/23962) split one counter into two. Both remove the same kind
# of error: a value whose meaning depends on the moment at which it is read. In this notebook you repair both.

# %%
from dataclasses import FrozenInstanceError
from typing import Any

import torch

import specsim
from specsim import SamplingParams, SpecConfig, plots
from specsim.core.metrics import accept_length_from_tensorrt_llm, acceptance
from specsim.core.phases import AutoregressiveInput

pair = specsim.load()
prompts = [
    "def count(n):\n    while n",
    "def read(path):\n    with open(",
    "class Node:\n    def __init__(self, value):\n",
]
config = SpecConfig(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, extend="ragged")
rounds = specsim.trace(pair, prompts, config, SamplingParams(max_new_tokens=40))
first = rounds[0]
print("accepted drafts of the three requests:", first.verdict.num_accepted_drafts.tolist())

# %% [markdown]
# ## The states of one round
#
# A round is three functions. Each one takes the state that the one before has made: `DraftInput → draft → VerifyInput →
# verify → VerifyOutput → draft_extend → DraftInput`. Here is the state that the round began with.

# %%
first.draft_input

# %% [markdown]
# Every tensor has one row for each of the three requests. `hidden` is the drafter's state, from which the four first
# drafts of each request came. Draft-extend, at the end of the round, reads a state with a `hidden` too.
#
# ### Prediction
#
# Draft-extend runs the drafter over the tokens that this round has added, so that their KV comes from the target's true
# features. The first cell of the notebook printed how many drafts were accepted.

# %%
guess = specsim.course.predict("How many rows has the hidden state that draft-extend reads?", 3)
guess

# %%
extend = first.verify_output.draft_extend_input
guess.score(len(extend.hidden))

# %% [markdown]
# The same name has two meanings. The picture shows all names that several states of the round use. A cell holds the
# shape, and its colour says what a row stands for.

# %%
plots.states(first.draft_input, first.verify_input, first.verify_output, first.next_draft_input)

# %% [markdown]
# * Which names mean rows of requests wherever they occur? Which change their meaning?
# * `hidden` is also three times as wide in the middle. Whose features are they there?
# * `bonus_tokens` has the same shape in two types. In one of them it is the root of the next tree. What is it in the
#   other?
# * **Try** `extend="fixed"` in `config`. How many rows does draft-extend have then, and which of them are padding?
#
# ## One object for all phases
#
# Before the first change, one object lived through all of this. Verify wrote draft-extend's data into it, and called it
# the next draft input. A later forward pass overwrote its fields one after the other, and only then the name was true.
# The next cell keeps just one field of it, in a dictionary.

# %%
shared = {"hidden": first.draft_input.hidden}
print("during draft:          ", list(shared["hidden"].shape))
shared["hidden"] = extend.hidden  # verify
print("after verify:          ", list(shared["hidden"].shape))
after_verify = dict(shared)
shared["hidden"] = first.next_draft_input.hidden  # draft-extend
print("after draft-extend:    ", list(shared["hidden"].shape))

# %% [markdown]
# Nothing is wrong yet: every phase reads the object when its content fits. But a server does more between two phases.
# Suppose that request 1 ends in this round, and the server removes its rows: it keeps the rows 0 and 2. The next cell
# does this too early, on the object as verify has left it. `owner` says which request each row belongs to.

# %%
keep = torch.tensor([0, 2])
owner = torch.arange(3).repeat_interleave(extend.row_starts.diff())
print("rows kept of the shared object:", list(after_verify["hidden"][keep].shape))
print("they belong to requests", owner[keep].tolist(), "instead of", keep.tolist())
assert owner[keep].tolist() == [0, 0]

# %% [markdown]
# Two rows for two requests, and nothing crashes. But both rows are request 0's, so draft-extend would give request 2
# the features of another request's text. The output would stay right, because the target verifies every draft. Only
# fewer drafts would be accepted.
#
# With types, the mistake has no place. `filter` belongs to states with a row for each request, and draft-extend's state
# has no such method. And no phase can write into the state of another:

# %%
print("filter of the draft input:  ", list(first.next_draft_input.filter(keep).hidden.shape))
print("draft-extend's state has it:", hasattr(extend, "filter"))
try:
    extend.hidden = first.next_draft_input.hidden
except FrozenInstanceError as error:
    print("an assignment:", error)

# %% [markdown]
# In the first exercise you write the step that used to be an overwriting: from the rows of draft-extend to the rows of
# the next draft input.

# %% [markdown]
# ### Exercise 08-1
#
# Write `next_hidden`. Draft-extend has computed a hidden state for every one of its rows, and the next draft phase
# needs one for each request: that of its last accepted token. Request b has the rows from `row_starts[b]` up to
# `row_starts[b + 1]`, which is not included. Its first `num_accepted_tokens[b]` rows are accepted tokens. With
# `extend="fixed"` there is padding behind them.
#
# The rows are texts here, so that you can see whose they are. Return a list with one of them for each request.


# %%
def next_hidden(hidden: list[str], row_starts: list[int], num_accepted_tokens: list[int]) -> list[str]:
    """Select the row of draft-extend from which each request's next drafts are made.

    row_starts: first row of each request, then the number of rows.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("08-1", next_hidden)

# %% [markdown]
# `specsim.course.solution("08-1")` shows a solution.
#
# ## The batch that becomes empty
#
# Between two rounds requests leave and others join. What if *all* requests leave, and new ones join later? The batch
# needs some state in between. The state that was there last does not fit: it has rows, and nobody owns them. An absent
# state does not fit either, since every reader would have to check for it. A draft input with 0 rows fits.

# %%
idle = AutoregressiveInput.empty(topk=4, hidden_size=first.draft_input.hidden.shape[1])
newcomer = first.next_draft_input.filter(torch.tensor([2]))
print("idle:", idle.is_idle, {name: list(tensor.shape) for name, tensor in idle.tensors.items()})
print("an idle state and a newcomer:", len(idle.merge(newcomer).bonus_tokens), "row")
print("the last state and a newcomer:", len(first.next_draft_input.merge(newcomer).bonus_tokens), "rows")

# %% [markdown]
# * The batch has one request. How many roots would be drafted from in the last case?
# * An idle batch may also have to run a whole round, if other GPUs wait for it. Why does a state of 0 rows make that
#   easy?

# %% [markdown]
# ### Exercise 08-2
#
# Write `between_rounds`, which a server calls after every round. `state` is the draft input of the running requests: a
# list for each field, with one entry for each request. Remove the requests that have finished, keep the others in their
# order, and append the requests that arrive. `arriving` has the same fields; if nobody arrives, its lists are empty.
#
# If all requests have finished, the result is still a state. And the old state must not change: under the overlap
# schedule another part still reads it.


# %%
def between_rounds(
    state: dict[str, list[Any]], is_finished: list[bool], arriving: dict[str, list[Any]]
) -> dict[str, list[Any]]:
    """Make the state of the next round: without the requests that have finished, then with those that arrive.

    state, arriving: by the name of a field, one entry for each request.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("08-2", between_rounds)

# %% [markdown]
# ## Two counters
#
# A round that accepts three drafts gives four tokens: the bonus token comes on top. So there are two numbers, and they
# differ by one. SGLang had one name for both. `accept_length` counted drafts, until a line in the middle of a function
# added one in place. From there on it counted tokens.

# %%
accept_length = first.verdict.num_accepted_drafts.clone()
kept_for_metrics = accept_length  # another part of the program keeps what it was given
print("before the line:", accept_length.tolist())
accept_length += 1
print("after it:       ", accept_length.tolist())
print("kept earlier:   ", kept_for_metrics.tolist())

# %% [markdown]
# The last row is the trouble. `+=` changes a tensor in place, so whoever received it before now holds another number.
# Every reader must know on which side of the line it runs. And so corrections by one had spread over attention backends
# and graph runners.
#
# The rule is now: two tensors, written together and never changed. A name with `draft` counts drafts only. A name with
# `accept` and without `draft` includes the bonus token.

# %%
verdict = first.verdict
after = first.batch.after(verdict.num_accepted_tokens)
for request in range(3):
    drafts, count = int(verdict.num_accepted_drafts[request]), int(verdict.num_accepted_tokens[request])
    path = verdict.accept_index[request].tolist()
    print(f"request {request}: {drafts} drafts, {count} tokens, path {path}, last node {path[drafts]}, "
          f"length {first.batch.seq_lens[request]} → {after.seq_lens[request]}")  # fmt: skip

# %% [markdown]
# * Which counter is the index of the last accepted node in the path? Which one is added to the length?
# * The KV of an accepted path has n + 1 entries, and the new tokens are n + 1 too. Are they the same n + 1?
#
# Two figures of merit need different counters as well. The *accept rate* is the share of drafts that are accepted. The
# *accept length* is the number of tokens of a round, bonus included.
#
# ### Prediction
#
# The next cell prints the accept rate of the run above. A metric now reads the counter after the line that adds one. It
# still divides by three steps.

# %%
print(f"accept rate: {rounds.acceptance.accept_rate:.2f}")

# %%
guess = specsim.course.predict("Which accept rate does a metric report that reads the counter after the line?", 0.9)
guess

# %%
drafts = torch.cat([each.verdict.num_accepted_drafts for each in rounds])
tokens = torch.cat([each.verdict.num_accepted_tokens for each in rounds])
guess.score(float(tokens.double().mean()) / config.num_steps)

# %% [markdown]
# With good drafts the figure is impossible, and somebody notices. With poor drafts it looks like a fair result. The
# package's own metric refuses counts that no round can have:

# %%
print(f"accept length: {acceptance(drafts.tolist(), config.num_steps, config.num_draft_tokens).accept_length:.2f}")
try:
    acceptance(tokens.tolist(), config.num_steps, config.num_draft_tokens)
except ValueError as error:
    print("error:", error)

# %% [markdown]
# ### Exercise 08-3
#
# Write `round_figures`. A round of some requests with a chain or a tree of `num_steps` steps has accepted
# `num_accepted_drafts` drafts, a number for each request. Return a dictionary with five entries. For each request:
# `num_accepted_tokens`, `seq_lens` after the round (the old ones are given), and `last_entry`, the place of the last
# accepted node in its row of accept_index, where the root has place 0. For the whole round: `accept_length`, the mean
# number of tokens of a request, and `accept_rate`. The rate is one number: of all requests' drafts, the share that is
# accepted, where each request counts `num_steps` drafts.
#
# Choose one of the two counters for each entry. The arguments must not change.


# %%
def round_figures(seq_lens: list[int], num_accepted_drafts: list[int], num_steps: int) -> dict[str, Any]:
    """Compute what a round's readers need; the arguments must not change.

    Keys: num_accepted_tokens, seq_lens (after the round), last_entry, accept_length, accept_rate.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("08-3", round_figures)

# %% [markdown]
# ## The same word in other tools
#
# The two meanings live on in the reports of different engines. SGLang and vLLM print an accept length with the bonus
# token. TensorRT-LLM prints the mean number of accepted drafts.
#
# ### Prediction
#
# TensorRT-LLM reports 1.9 for your model, and vLLM 2.7 with the same drafter, prompts and setting.

# %%
guess = specsim.course.predict("By how many tokens per round is vLLM better than TensorRT-LLM here?", 0.8)
guess

# %%
guess.score(2.7 - accept_length_from_tensorrt_llm(1.9))

# %% [markdown]
# vLLM is not better but worse, by two tokens in ten rounds. Before you compare two accept lengths, find out what each
# one counts. Notebook 14 has more of this kind.
#
# The fault catalogue holds the errors of this notebook. `specsim faults --name counter-mutated` injects one of them
# into a copy of the package, and a check names the field that is wrong.

# %% [markdown]
# ## Your predictions

# %%
specsim.course.scores()

# %% [markdown]
# ## What to remember
#
# * One type for each phase, made by one phase and read by the next. The meaning of a row belongs to the type, not to
#   the moment.
# * States are values. A phase returns a new one and changes no other.
# * A batch without requests has a state with 0 rows: not the last one, and not none.
# * `num_accepted_drafts` and `num_accepted_tokens` are two tensors. Index the path with the first, advance lengths by
#   the second, and never add one in place.
#
# The states are in `specsim/core/phases.py`; notes on the two changes are in `papers/sglang-24859/notes.md` and
# `papers/sglang-23962/notes.md`. The fast implementation reuses its buffers on purpose. There the rule is that every
# state that leaves the engine is a copy, and notebook 09 shows why it reuses them.
