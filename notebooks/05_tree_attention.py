# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Tree attention and masks
#
# * **Goal:** You can lay out a tree as a sequence, make its mask and its positions, read the mask as bits, and say why
#   one forward pass over the tree gives the same predictions as one pass for every branch.
# * **Before:** Notebooks 01 and 04. You know how attention uses queries, keys and values.
# * **Time:** 45 minutes to work through, 10 seconds to run. No GPU.
#
# A transformer reads a sequence. A draft tree is no sequence: it holds many alternative continuations. We could give
# the target one branch after the other. But notebook 02 showed that the number of passes is what costs time. So the
# whole tree goes through the target in *one* pass. This notebook shows what has to be changed for that: a mask and a
# list of positions, and nothing else.

# %%
from copy import deepcopy
from dataclasses import replace

import torch

import specsim
from specsim import SamplingParams, SpecConfig, plots
from specsim.reference.attention import tree_metadata
from specsim.reference.oracle_forward import in_dtype, target_forward
from specsim.reference.tree import bitpacked_mask, full_mask, trees, visibility

pair = specsim.load()
decode = pair.tokenizer.decode

# %% [markdown]
# ## A tree as a sequence
#
# Here is the tree of one round, with 16 nodes.

# %%
prompt = "def read(path):\n    with open("
config = SpecConfig(topk=4, num_steps=3, num_draft_tokens=16)
round_0 = specsim.trace(pair, prompt, config, SamplingParams(max_new_tokens=2))[0]
verify_input = round_0.verify_input
plots.tree(verify_input, None, decode)

# %% [markdown]
# The nodes have numbers, level by level, so each parent comes before its children. Written in this order, the tree is a
# list of 16 tokens. A second list holds the parent of every node. No more is needed to find each node's path.

# %%
(tree,) = trees(round_0.batch, verify_input, pair.target.config.max_position_embeddings)
num_nodes = len(tree.tokens)
print("parents:", tree.parents)
for node in (1, 2, 6, 12, 13):
    print(f"node {node:2}: path {tree.path(node)!s:14} {decode(tree.path_tokens(node)[1:])!r}")

# %% [markdown]
# * Which nodes are leaves? They are missing in the list of parents.
# * Every leaf is the end of a branch. How many branches are there?
#
# ## What a row may see
#
# In a normal forward pass each row attends to all rows before it. For the tree this would be wrong: node 13 would see
# tokens of other branches, and take them for text that comes before it. A node may see the prefix, the nodes of its own
# path, and itself. For every pair of nodes the *mask* says whether the one sees the other.
#
# ### Prediction
#
# The mask of a normal pass is a triangle: with 16 rows it has 136 entries that are true.

# %%
guess = specsim.course.predict("How many of the 256 entries of this tree's mask are true?", 136)
guess

# %%
mask = visibility(tree.parents)
assert torch.equal(mask, verify_input.mask[0])
guess.score(int(mask.sum()))

# %%
plots.mask(verify_input, decode=decode)

# %% [markdown]
# * Compare row 5 with row 1, its parent. In which entries do they differ?
# * Why does every row see node 0?
# * The number of true entries in a row is the node's depth plus one. What is the largest number that a row can have?
#
# The first question has the answer to the next exercise: **a row is its parent's row, and one more entry.**

# %% [markdown]
# ### Exercise 05-1
#
# Write `ancestor_bits`. It receives the parents of a tree's nodes, -1 for the root. Return one integer for each node:
# its row of the mask, as bits. Bit c is 1 where the node sees node c. A node sees its ancestors, the root among them,
# and itself.
#
# Hint: `1 << c` is the word in which only bit c is 1. `a | b` has the bits of both.


# %%
def ancestor_bits(parents: list[int]) -> list[int]:
    """Make the mask's rows as words: bit c of row n is 1 where node n sees node c.

    parents: parent of every node, -1 for the root. A parent comes before its children.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("05-1", ancestor_bits)

# %% [markdown]
# `specsim.course.solution("05-1")` shows a solution.
#
# ## One pass, or one pass for each branch
#
# Is a pass with this mask really the same as reading each branch by itself? There are three steps in a layer.
#
# * The norms, the projections and the MLP work on each row by itself. A row does not notice how many others there are.
# * Attention is a weighted sum over the keys that the row sees. The order of the summands does not matter, and a key
#   with weight 0 is as good as none.
# * A key carries its *position*, by a rotation. The position comes with the row. It is not the place in the list.
#
# So a row gives the same result in the tree as in its branch, if it sees the same keys with the same positions. By the
# same argument these keys are the same in every layer, since they come from rows of the same path.
#
# An argument is good, a number is better. The next cell runs a pass without cache, mask or tree for every node: over
# the prompt and the path. It compares the logits of the last row with those of the node in the one pass of the round.

# %%
target = in_dtype(pair.target, torch.float32)
prompt_ids = pair.tokenizer.encode(prompt)
in_tree = round_0.verify_output.target_logits
num_rows = 0
worst = 0.0
for node in range(num_nodes):
    branch = [*prompt_ids, *tree.path_tokens(node)]
    logits, _ = target_forward(target.config, target.tensors, branch, ())
    assert int(logits[-1].argmax()) == int(in_tree[node].argmax())
    worst = max(worst, float((logits[-1] - in_tree[node]).abs().max()))
    num_rows += len(branch)
print(f"{num_nodes} passes, {num_rows} rows; in the tree: 1 pass, {num_nodes} rows")
print(
    f"logits of size {in_tree.abs().max():.0f}; all next tokens are equal, and all logits within 1e-3: {worst < 1e-3}"
)

# %% [markdown]
# The small differences are rounding errors: the sums are taken in another order.
#
# ### Prediction
#
# Node 2 is the draft `,`. We replace it by another token and run the pass again.

# %%
guess = specsim.course.predict("If the token of node 2 is replaced, how many of the 16 predictions change?", 14)
guess

# %% [markdown]
# The pass needs a copy of the pools, since it writes KV. `tree_metadata` makes the mask over all columns, prefix and
# tree, and the list of slots to read.

# %%
engine = specsim.load_engine(pair, config)
replaced = 2
other = verify_input.draft_tokens.clone()
other[0, replaced] = pair.tokenizer.encode(" while")[0]
pools = deepcopy(round_0.states.drafted_pools)
metadata = tree_metadata(round_0.batch, replace(verify_input, draft_tokens=other), pools)
hidden = engine.target.forward(other.flatten(), metadata, pools.target, ()).hidden
changed = ((engine.target.logits(hidden) - in_tree).abs().amax(1) > 1e-3).nonzero().flatten().tolist()
print("nodes whose logits change:", changed)
assert changed == mask[:, replaced].nonzero().flatten().tolist()
guess.score(len(changed))

# %% [markdown]
# * Find these nodes in the picture of the mask: they are the entries of column 2.
# * **Try** `replaced = 0`, the root, and `replaced = 15`. How many predictions change then?
#
# ## Two ways to get it wrong
#
# Both errors below run without complaint. In the first, the mask is the usual triangle. In the second, the mask is
# right, but the positions count up through the list, as in a sequence.

# %%
first = int(verify_input.positions[0])
variants = {
    "as it should be": verify_input,
    "causal mask": replace(verify_input, mask=torch.ones(1, num_nodes, num_nodes, dtype=torch.bool).tril()),
    "positions by number": replace(verify_input, positions=first + torch.arange(num_nodes)),
}
for name, variant in variants.items():
    pools = deepcopy(round_0.states.drafted_pools)
    metadata = tree_metadata(round_0.batch, variant, pools)
    hidden = engine.target.forward(variant.draft_tokens.flatten(), metadata, pools.target, ()).hidden
    differs = engine.target.logits(hidden).argmax(-1) != in_tree.argmax(-1)
    wrong = differs.nonzero().flatten().tolist()
    print(f"{name:20} {len(wrong):2} of {num_nodes} next tokens differ, at nodes {wrong}")
print("positions:", [int(position) - first for position in verify_input.positions], "after the root's")

# %% [markdown]
# * Nodes 0 and 1 are right in every line. Why? (Some others are right by luck: their logits change, but not enough.)
# * With a chain both errors vanish. Why?
# * The next tokens decide what is accepted. So these errors are worse than a bad draft: the *output* is wrong.
#
# Siblings have the same position. But each needs a place of its own for its KV: node j of a request with L committed
# tokens is in **column** L + j, and at **position** L + its depth.

# %% [markdown]
# ### Exercise 05-2
#
# Write `tree_positions`. It receives the parents of a tree's nodes and the number of committed tokens, L. Return the
# position of every node: the place that its token has in the text of its own branch.
#
# Hint: the committed tokens have the positions 0 to L − 1, and the root comes next.


# %%
def tree_positions(parents: list[int], seq_len: int) -> list[int]:
    """Compute the position of every node; seq_len: L, number of committed tokens, which have positions 0 to L - 1."""
    raise NotImplementedError("your answer")


# %%
specsim.course.check("05-2", tree_positions)

# %% [markdown]
# ## The mask in memory
#
# Attention kernels read the mask in one of three layouts.
#
# * **FULL**: one byte for each node and each column, prefix included. Simple, but the prefix is long, and all of its
#   entries are true.
# * **QLEN_ONLY**: one byte for each node and each node. The kernel knows that the prefix is visible.
# * **QLEN_BITPACKED**: the same in bits. A row of up to 32 nodes is one word of 8, 16 or 32 bits, the smallest that has
#   room. A longer row has several words of 32 bits.
#
# ### Prediction
#
# A server runs 64 requests with 4,096 committed tokens each, and trees of 64 nodes.

# %%
guess = specsim.course.predict("How many times larger is the FULL mask than the one in bits?", 8)
guess

# %%
masks = visibility([-1, *range(63)]).expand(64, 64, 64)  # the shape does not depend on the parents
sizes = {"FULL": full_mask(masks, torch.full((64,), 4096)).nbytes, "QLEN_ONLY": masks.numel()}
sizes["QLEN_BITPACKED"] = bitpacked_mask(masks).nbytes
for name, size in sizes.items():
    print(f"{name:15} {size:12,} bytes")
guess.score(sizes["FULL"] / sizes["QLEN_BITPACKED"])

# %% [markdown]
# The mask is sent to the GPU in every round, or built there. So its size matters.
#
# In the bits, column c of the tree is bit c of the word. Bit 0 is the one on the right, so in print the row is
# mirrored.

# %%
for node, word in enumerate(bitpacked_mask(mask[None])[0].tolist()):
    print(f"node {node:2}: {word & 0xFFFF:016b} = {word}")

# %% [markdown]
# * Compare the rows with the picture of the mask.
# * The last word is negative. Which bit is the sign of a word of 16 bits? Does a shift and a test of one bit care?

# %% [markdown]
# ### Exercise 05-3
#
# Write `visible_columns`, the part of an attention kernel that reads a row of the mask. It receives the row as words of
# 32 bits: bit c of the first word is node c, bit c of the second word is node 32 + c, and so on. The mask is of the
# tree only. The row also sees all L committed columns, and node c is in column L + c. Return all columns that the row
# sees.
#
# Words are signed: where bit 31 is 1, the number is negative. Hint: `word >> c & 1` is bit c, for negative numbers too.


# %%
def visible_columns(words: list[int], seq_len: int) -> list[int]:
    """List the columns that a row sees, in ascending order.

    words: the row's mask in words of 32 bits, for a tree of more than 32 nodes several. seq_len: L.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("05-3", visible_columns)

# %% [markdown]
# ## Your predictions

# %%
specsim.course.scores()

# %% [markdown]
# ## What to remember
#
# * A tree is a list of tokens and a list of parents, parents first.
# * A node sees the prefix, its path and itself. Its row of the mask is its parent's row with one more entry.
# * Siblings share a position, L + depth, but not a column, L + number of the node.
# * With the right mask and positions a pass over the tree equals a pass over each branch, up to rounding.
# * A wrong mask or position changes the target's own predictions, so the output. Chains do not show it.
#
# Tree attention comes from [SpecInfer](https://arxiv.org/abs/2305.09781); [Medusa](https://arxiv.org/abs/2401.10774)
# has a fixed tree. In the package: `reference/tree.py` makes the mask, and `tree_metadata` in
# `reference/attention.py` joins it with the prefix.
