# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The KV of a round
#
# * **Goal:** You can say in which slot every draft's KV is, phase by phase, and name three ways to lose it: no copy of
#   the prefix's tail, no move of the accepted path, a table that is read with the wrong width.
# * **Before:** Notebooks 01, 04 and 05.
# * **Time:** 45 minutes to work through, 20 seconds to run. No GPU.
#
# A round writes KV for many tokens and keeps a few of them. The drafter's lanes have KV, every node of the tree has KV,
# and at the end only the accepted path counts. So somebody has to decide where all of it goes, and to clean up. Faults
# in this part can change the *text*, and a test must be chosen well to see them.
#
# Notebook 01 showed the move of one accepted path. Here we look at the layout as a whole, and then break it on purpose.

# %%
from dataclasses import replace
from unittest.mock import patch

import torch

import specsim
from specsim import SamplingParams, SpecConfig, plots
from specsim.core.columns import round_columns
from specsim.core.pool import lane_columns, tail_columns
from specsim.correctness.faults.catalogue import FAULTS

pair = specsim.load()
config = SpecConfig(topk=3, num_steps=3, num_draft_tokens=8, page_size=4)
sampling = SamplingParams(max_new_tokens=40)

# %% [markdown]
# ## Columns, slots and pages
#
# Three words must be kept apart. A *column* is a place in the text of one request: column 0 is its first token. A
# *slot* is a place in the memory that all requests share. A *page* is a run of slots, here four, that is given to one
# request as a whole. The table `req_to_token` maps the columns of every request to slots.
#
# `trace` generates a text and keeps every round. We look at its second round. The table has one row for each request.

# %%
rounds = specsim.trace(pair, "def load(path, mode):\n    with open(", config, sampling)
second = rounds[1]
length = int(second.batch.seq_lens[0])
pools = second.states.drafted_pools
assert (length, len(rounds[0].accepted_tokens())) == (14, 3)
print(f"{length} committed tokens, on pages of {pools.page_size}")
print("slots of columns 0 to 19:", pools.req_to_token[0, :20].tolist())

# %% [markdown]
# A single request in an empty pool gets its pages in order, so its slots equal its columns. With several requests they
# do not.
#
# ## The draft lanes
#
# First the drafter extends K lanes by S tokens, here three by three. Where should their KV go? A page belongs to one
# sequence of tokens, and the attention kernel reads a lane page by page: the pages of the prefix, then the pages of the
# lane. So two lanes cannot share a page.

# %%
second.kv("draft")

# %% [markdown]
# The upper number in a cell is the column. Below it, `1.2` is lane 1, step 2, and a single `1` is a copy that belongs
# to lane 1.
#
# * The prefix has 14 tokens and does not fill its last page. Which lane continues on this page?
# * Lanes 1 and 2 begin with two copied columns each. Which columns of the prefix do they repeat?
# * How many slots between lane 0 and lane 1 are empty, and why?
# * **Try** `page_size=1` in `config`. Then try a chain: `topk=1` and `num_draft_tokens=4`, with pages of 4 and without
#   the `assert`. Why does neither need copies?
#
# The same layout as numbers, for another length: 7 tokens on pages of 4, with lanes of 5 steps.

# %%
other = SpecConfig(topk=3, num_steps=5, page_size=4)
for lane, (tail, steps) in enumerate(
    zip(tail_columns(7, other).tolist(), lane_columns(7, other).tolist(), strict=True)
):
    print(f"lane {lane}: tail of the prefix in columns {tail}, drafts in columns {steps}")

# %% [markdown]
# ### Exercise 07-1
#
# Write `lane_column` for a drafter with several lanes. The prefix has `length` tokens. Lane 0 continues right after it,
# on the prefix's last page if that page has room. Every other lane has whole pages of its own, as many as lane 0 uses
# from that page on, and no page between two lanes is left out. A lane first has the copy of the prefix's unfinished
# page, then its steps.
#
# Hint: compare with the numbers printed above. How far is it from a step of one lane to the same step of the next?


# %%
def lane_column(length: int, lane: int, step: int, num_steps: int, page_size: int) -> int:
    """Compute the column in which a lane writes its KV of a step; lanes and steps count from 0."""
    raise NotImplementedError("your answer")


# %%
specsim.course.check("07-1", lane_column)

# %% [markdown]
# `specsim.course.solution("07-1")` shows a solution.
#
# ### Prediction
#
# Many engines use larger pages. Take a request of 20 tokens, four lanes of three steps, and pages of 16. With pages of
# one slot the last lane would end at column 20 + 4 · 3 = 32.

# %%
guess = specsim.course.predict("At which column do four lanes of three steps end, with pages of 16?", 32)
guess

# %%
wide = SpecConfig(topk=4, num_steps=3, num_draft_tokens=8, page_size=16, release="round")
guess.score(round_columns(20, wide))

# %% [markdown]
# Twelve drafts occupy the room of sixty tokens. Each lane owns a page of 16, most of it copies and empty slots. With
# `release="round"` a request borrows this room for the draft phase and gives it back. With `release="finish"`, the
# setting of the picture above, it keeps room for two such rounds until it ends.

# %%
for release in ("round", "finish"):
    print(release, [round_columns(20, replace(wide, page_size=size, release=release)) for size in (1, 4, 16, 64)])

# %% [markdown]
# * Each list is for pages of 1, 4, 16 and 64 slots. How many requests of 20 tokens fit into 4096 slots in each case?
# * A row of the table must be as wide as the largest of these numbers, not as the longest text. What happens in a
#   kernel if it is not?
#
# ## Copies of the tail
#
# Lanes 1 and 2 need a copy of the prefix's last, unfinished page. It is tempting to copy only the *entries of the
# table*. The kernel then finds a page for each lane, and nothing crashes. But the page holds no KV of the prefix.
#
# We can leave the copy out and see. `patch` replaces a function while the block runs. The second `patch` fills new
# memory with zeros, so that this notebook gives the same result in every run.
#
# ### Prediction
#
# Six prompts generate 40 tokens each, with four lanes of six steps and pages of 64. Three of the four lanes now read
# zeros where the prefix's last page should be. For these short texts that is the whole prefix.

# %%
guess = specsim.course.predict("Without copies of the tail, how many of six texts change?", 6, at_least=0.5)
guess

# %%
prompts = ["def count(n):\n    while n", "class Node:\n    def __init__(self, value):\n", "def add(a, b):\n    return",
           "for i in range(10):\n    print(", "while True:\n    line =", "import os\n\ndef main():\n"]  # fmt: skip
wide = SpecConfig(topk=4, num_steps=6, num_draft_tokens=10, page_size=64)
whole = specsim.generate(pair, prompts, wide, sampling)
with patch("torch.empty", torch.zeros), patch("specsim.reference.drafters.autoregressive.duplicate_tails"):
    no_tails = specsim.generate(pair, prompts, wide, sampling)
changed = [one.token_ids != other.token_ids for one, other in zip(whole.outputs, no_tails.outputs, strict=True)]
guess.score(sum(changed))

# %%
plots.acceptance({"copied": whole.acceptance, "not copied": no_tails.acceptance})

# %% [markdown]
# * Three of four lanes have lost the prefix, but the text is the same. Who made the text right?
# * The two lines are close. Would you notice the difference on a server's dashboard?
# * The first draft is not made by a lane at all. Where does it come from?
# * **Try** `page_size=4` in `wide`. Why is the effect smaller?
#
# This is the first rule of the notebook. **A fault in the drafter's KV costs time. It never costs correctness.** A test
# that compares texts cannot find it, and the accept length may hardly fall. So compare the drafter's KV itself. (With
# sampling, read "distribution" for "text".)
#
# ## The tree
#
# The lanes are done. The draft phase has chosen eight nodes among the candidates, and the target reads them in one
# pass. Its KV has a buffer of its own with the same slots. Node j of a request is in column L + j, whatever its depth.

# %%
plots.kv_pages(pools, second.batch, config, second.verify_input, second.verdict, committed=False)

# %% [markdown]
# The accepted path has gaps. Nodes 0, 2, 5 and 7 are at depths 0, 1, 2 and 3, so their tokens are at positions 14 to
# 17. The next round reads columns 0 to 17 as the text. It would find node 1 where node 2 belongs.
#
# The *commit* closes the gaps. It moves content from slot to slot, and the table stays as it is.

# %%
second.kv_move()

# %%
assert [node for node in second.verdict.accept_index[0].tolist() if node >= 0] == [0, 2, 5, 7]
moves = 0
for each in rounds:
    path = [node for node in each.verdict.accept_index[0].tolist() if node >= 0]
    moves += path != list(range(len(path)))
    print(f"round {each.index}: {int(each.batch.seq_lens[0])} tokens, path {path}")
print(f"{moves} of {len(rounds)} accepted paths have a gap")

# %% [markdown]
# * A chain of drafts accepts nodes 0, 1, 2, … up to some node. Does a chain ever need the move?
# * The drafter's KV is not moved. Which phase writes it again, and from what?
# * The bonus token ends every round. Why has it no KV yet?

# %% [markdown]
# ### Exercise 07-2
#
# Write the commit of one request. Before it, columns 0 to `length` − 1 hold the prefix, and column `length` + j holds
# node j. Change `content` so that the nodes of `path` stand in the columns right after the prefix, in their order. What
# is in later columns afterwards does not matter.
#
# Hint: node 5 may go to the column where node 2 is now. Is node 2 already safe?


# %%
def compact(content: list[str], length: int, path: list[int]) -> list[str]:
    """Move the content of the path's nodes to the columns after the prefix, and return what the next round reads.

    content: what each column of a request holds. path: accepted nodes, root first.
    """
    raise NotImplementedError("your answer")
    return content[: length + len(path)]


# %%
specsim.course.check("07-2", compact)

# %% [markdown]
# ## What goes wrong without the commit
#
# SGLang's overlap schedule once drafted chains only. The pull request
# [sglang#26866](https://github.com/sgl-project/sglang/pull/26866) brought trees to it, and with them this move. What if
# it were missing? We leave the commit out in the same way as the copies above.
#
# ### Prediction
#
# The first token comes from the prefill, and the first round accepts two drafts and a bonus token. Then the KV of the
# accepted path is wrong. How many tokens of the output are right before the first wrong one?

# %%
guess = specsim.course.predict(
    "Without the commit, how many tokens are right before the first wrong one?", 1, within=0.2
)
guess

# %%
with patch("specsim.reference.kv.commit"):
    stale = specsim.generate(pair, "def load(path, mode):\n    with open(", config, sampling)
right, wrong = rounds.generation.outputs[0], stale.outputs[0]
same = [one == other for one, other in zip(right.token_ids, wrong.token_ids, strict=True)]
guess.score(same.index(False))

# %%
print(right.text)
print("--- without the commit:")
print(wrong.text)

# %% [markdown]
# Nothing crashed, no number is infinite, and the text even looks like code. **A fault in the target's KV changes the
# text.** It also makes the drafter look bad:

# %%
plots.acceptance({"with the commit": rounds.acceptance, "without it": stale.acceptance})

# %% [markdown]
# * The target now continues a text that nobody wrote. Why do the drafts fit worse?
# * Which of the two faults would a benchmark of tokens per second show first?
#
# Would a test have found it? The simplest test case is a chain. So run both faults with a chain.

# %%
chain = SpecConfig(topk=1, num_steps=3, page_size=4)
expected = specsim.generate(pair, prompts, chain, sampling)
with patch("specsim.reference.kv.commit"), patch("specsim.reference.drafters.autoregressive.duplicate_tails"):
    found = specsim.generate(pair, prompts, chain, sampling)
print("texts equal:", [one.token_ids for one in expected.outputs] == [one.token_ids for one in found.outputs])
print("accept lengths:", f"{expected.acceptance.accept_length:.3f} and {found.acceptance.accept_length:.3f}")

# %% [markdown]
# With a chain, both steps do nothing. A test without trees passes whether they are there or not.
#
# ## The commit of a batch
#
# Exercise 07-2 moved the nodes of one request, by column. The engine moves those of all requests at once, by slot. The
# table `accept_index` says which nodes: one row for each request, S + 1 entries wide, filled up with −1.

# %%
both = specsim.trace(pair, prompts[:2], config, sampling, most_rounds=1)[0]
table = both.states.drafted_pools.req_to_token
print("accept_index:", both.verdict.accept_index.tolist())
for row, length in both.batch.rows_and_lens:
    columns = f"columns {length} to {length + config.num_draft_tokens - 1}"
    print(f"{columns} are in slots {table[row, length : length + config.num_draft_tokens].tolist()}")

# %% [markdown]
# * Nodes in `accept_index` are counted over the whole batch. Which ones belong to the second request?
# * Which three slots does the commit read for the second request, and which three does it write?
#
# A kernel sees `accept_index` as flat memory and computes where a row begins. Notebook 04 showed what happens if it
# takes rows to be as long as a tree.

# %% [markdown]
# ### Exercise 07-3
#
# Write `commit_moves`, the commit of a whole batch, as a list of pairs: the slot in which an accepted node is, and the
# slot to which it moves. Take the requests in order, and the nodes of a path in order, root first. A node that stays
# where it is has a pair, too.
#
# `accept_index` is flat, as a kernel sees it: `num_steps` + 1 entries for each request. Every tree has `num_nodes`
# nodes. `slots[b][c]` is the slot of column c of request b, and `seq_lens[b]` its number of committed tokens.
#
# Hint: go from the entry to the node of the request, from there to its column, and then to the slot.


# %%
def commit_moves(
    accept_index: list[int], seq_lens: list[int], slots: list[list[int]], num_nodes: int, num_steps: int
) -> list[tuple[int, int]]:
    """List (slot before, slot after) for every accepted node, request after request, root first.

    accept_index: flat. seq_lens: L of each request. slots: of each request, the slots of its columns 0, 1, …
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("07-3", commit_moves)

# %% [markdown]
# KV is not the only thing that has an entry for each node. The predicted tokens and the features that the drafter reads
# next have them too, and they are gathered along the same path.
#
# The fault catalogue of the package holds these faults and others, each with its source. `specsim faults --name NAME`
# injects one into a copy of the package and shows which check finds it.

# %%
for fault in FAULTS:
    if "sglang#26866" in fault.source or ("sglang#" in fault.source and fault.operation == "kv"):
        print(f"{fault.name}: {fault.cause}")

# %% [markdown]
# * Which of these need a tree to show? Which need pages of more than one slot?
#
# ## Your predictions

# %%
specsim.course.scores()

# %% [markdown]
# ## What to remember
#
# * A column is a place in a request's text, a slot a place in memory. Pages change owners; the copies of the tail and
#   the commit move content.
# * With pages and several lanes, each lane has pages of its own, and a copy of the *content* of the prefix's last page.
# * The KV of an accepted path must move to the front, in every layer, before the next round. So must everything else
#   that has an entry for each node.
# * Wrong KV of the drafter costs time, wrong KV of the target costs correctness. Test with trees: for a chain both
#   steps do nothing.
#
# The layout is in `specsim/core/columns.py`, the copies and the commit in `specsim/reference/kv.py`. The changes behind
# them are described in `papers/sglang-26866/notes.md`; the copy of the tail's content is
# [sglang#7725](https://github.com/sgl-project/sglang/pull/7725).
