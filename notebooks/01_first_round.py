# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # One round of speculative decoding
#
# * **Goal:** You can follow the data of a round through its phases: the tree, the attention mask, the KV of drafts, the
#   accepted path, and the state that begins the next round.
# * **Before:** You know what a transformer's forward pass and its KV cache are.
# * **Time:** 50 minutes to work through, 15 seconds to run. No GPU.
#
# A language model generates one token per forward pass. In a round of speculative decoding, a small *drafter* proposes
# a tree of tokens. The *target* model reads the whole tree in one forward pass. It keeps the path that it would have
# generated itself. This notebook runs one such round step by step and shows its data: the tree, the attention mask and
# the KV cache.
#
# To answer a question marked **Try**, change a cell and run it again. A *prediction* is a number that you guess before
# you see the result. An *exercise* is a function that you write; the cell after it checks your answer and says what is
# wrong.

# %%
from copy import deepcopy
from dataclasses import fields, is_dataclass

import torch

import specsim
from specsim import SamplingParams, SpecConfig, plots
from specsim.core.engine_options import EngineOptions
from specsim.core.phases import Batch, PrefillInput
from specsim.reference.attention import tree_metadata
from specsim.serving.generation import load_engine

pair = specsim.load()
decode = pair.tokenizer.decode
pair

# %% [markdown]
# ## The settings
#
# * `topk` (K): number of lanes, the paths that the drafter extends at the same time.
# * `num_steps` (S): depth of the draft tree.
# * `num_draft_tokens` (N): number of nodes that the target verifies, including the root.
# * `page_size`: number of slots in a page. A slot holds the keys and values of one token.
#
# The batch has two requests, so the pictures show which slots belong to which request.

# %%
config = SpecConfig(topk=4, num_steps=3, num_draft_tokens=8, page_size=4)
prompts = ["def count(n):\n    while n", "def read(path):\n    with open("]
sampling = SamplingParams(temperature=0.0)


def start(impl):
    """Make an engine of one implementation, and prefill two requests."""
    engine = load_engine(pair, config, EngineOptions(impl))
    prompt_ids = [pair.tokenizer.encode(prompt) for prompt in prompts]
    lengths = [len(ids) for ids in prompt_ids]
    room_for_two_rounds = sum(config.reserved_columns(length + config.num_steps + 1) for length in lengths)
    pools = engine.make_pools(num_requests=2, num_slots=room_for_two_rounds)
    rows = [pools.open() for _ in prompts]
    for row, length in zip(rows, lengths, strict=True):
        pools.reserve(row, length)
    device = pools.req_to_token.device
    batch = Batch.of([0, 1], rows, lengths, [sampling] * 2, pair.target.config.vocab_size).to(device)
    draft_input = engine.prefill(batch, PrefillInput.of_prompts(prompt_ids).to(device), pools).draft_input
    return engine, batch, draft_input, pools


engine, batch, draft_input, pools = start("reference")
print("tokens of the prompts (L):", batch.seq_lens.tolist())
print("next token, already known: ", [decode([token]) for token in draft_input.bonus_tokens.tolist()])

# %% [markdown]
# A round starts with the tokens in the last line. The target has sampled them, but neither model has read them yet, so
# the cache has no KV for them. Each becomes the *root* of its request's tree.
#
# ## Draft
#
# The drafter starts with the K most probable tokens after the root. The previous phase stored them in `draft_input`.
# The drafter then runs S−1 forward passes. Each pass extends every lane by K children. The score of a child is the
# product of the drafter's probabilities along its path. The K children with the best scores become the next lanes. At
# the end, the N−1 best of *all* candidates form the tree below the root.

# %%
verify_input = engine.draft(batch, draft_input, pools)
plots.tree(verify_input, None, decode)

# %% [markdown]
# The picture shows a space as ␣, and seven spaces as `␣×7`.
#
# * No child has a higher score than its parent. Why not? What would go wrong if a child had a better rank than its
#   parent?
# * Node 5 has a score of 0.193, and its parent, node 2, has 0.201. What probability did the drafter give to `:`
#   after ` 1`?
# * **Try** `topk=1, num_draft_tokens=4`, which makes a chain. Which of the nodes above does it have?
#
# ## The attention mask
#
# The target reads all 8 tokens of a tree in one pass, although some are alternatives to each other. The mask separates
# the alternatives: a node attends to the prefix, its ancestors and itself. Siblings have the same *position* in the
# text, but each has its own *column* in the cache.

# %%
plots.mask(verify_input, decode=decode)

# %% [markdown]
# * Two rows have the same token `:`. Why can their predictions differ?
# * **Try** the chain again. Why is its mask a full triangle?

# %% [markdown]
# ### Exercise 01-1
#
# Write `visible_nodes`: the nodes of the tree that a node attends to, in ascending order. `parents[j]` is the parent of
# node j. The root is node 0, and its parent is given as -1.


# %%
def visible_nodes(parents: list[int], node: int) -> list[int]:
    """List the nodes that a node attends to, in ascending order; the parent of the root, node 0, is -1."""
    raise NotImplementedError("your answer")


# %%
specsim.course.check("01-1", visible_nodes)

# %% [markdown]
# `specsim.course.solution("01-1")` shows a solution.
#
# ## The KV of drafts
#
# The drafter needs its own KV for its lanes. In the picture every slot belongs to a page, and every page belongs to a
# request. Lane k writes the KV of step s to the slot marked `k.s`. The target's cache is a second buffer with the same
# slots.

# %%
plots.kv_pages(pools, batch, config)

# %% [markdown]
# * Request 1 has 9 tokens on pages of 4, so its last page is not full. Lanes 1, 2 and 3 each have a copy of that page's
#   content. Lane 0 uses the page itself. Why does request 0 need no copies?
# * The last slot of each lane is never written. Count the forward passes to see why.
# * **Try** `page_size=1`. Are there still copies? Why?
#
# ## Verify
#
# For verification, node j of a request is in column L+j. After its pass over the tree, the target has a next token for
# every node. It walks down from the root as long as one of the children is this token. Where no child is, the target's
# token is the *bonus token*. So a round gives at least one token, even if every draft is wrong.
#
# ### Prediction
#
# Each tree has 7 drafts, on paths of 3 at most. Replace the number by your guess.

# %%
guess = specsim.course.predict("How many tokens do the two requests get in their first round, together?", 4)
guess

# %%
before = deepcopy(pools)
verify_output = engine.verify(batch, verify_input, pools)
verdict = verify_output.verdict
plots.tree(verify_input, verdict, decode)

# %%
for prompt, tokens in zip(prompts, verdict.accepted_tokens(), strict=True):
    print(repr(prompt), "→", [decode([token]) for token in tokens])
guess.score(int(verdict.num_accepted_tokens.sum()))

# %% [markdown]
# * The accepted path is not the one with the best scores. How many tokens would the chain with `topk=1` have given in
#   this round?
# * `num_accepted_tokens` is `num_accepted_drafts` + 1. It does not count the root. Which round counted the root?
# * **Try** `plots.tree(verify_input, verdict, decode, request=1)`.

# %% [markdown]
# ### Exercise 01-2
#
# Write `tokens_of_round`: the tokens that a round gives at temperature 0, in their order, with the bonus token at the
# end. `tokens[j]` is the token of node j, `parents[j]` its parent, and `next_tokens[j]` the target's next token after
# node j. Children of a node have different tokens.
#
# Hint: start at the root. The target's next token belongs to the text in any case. Has a child this token?


# %%
def tokens_of_round(tokens: list[int], parents: list[int], next_tokens: list[int]) -> list[int]:
    """List the tokens that a round gives, bonus token last.

    next_tokens: the target's next token after every node.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("01-2", tokens_of_round)

# %% [markdown]
# ## Commit
#
# The next round expects the KV of the accepted tokens in columns L, L+1, … But it is still in the columns of their
# nodes.

# %%
plots.kv_pages(pools, batch, config, verify_input, verdict, committed=False)

# %% [markdown]
# So the KV of the accepted path moves to the front, in every layer. The table that maps columns to slots does not
# change.

# %%
plots.kv_move(verify_input, verdict, decode)

# %%
plots.kv_pages(pools, batch, config, verify_input, verdict)

# %% [markdown]
# A picture can be wrong, so the next cell checks the move. `before` is a copy of the pools from before verification.
# The target's forward pass runs on this copy again, without a commit. There each accepted node's KV is still in the
# column of its node. It must equal the KV that is now in the front columns.

# %%
metadata = tree_metadata(batch, verify_input, before)
engine.target.forward(verify_input.draft_tokens.flatten(), metadata, before.target, engine.drafter.feature_layers)
for request, (row, length) in enumerate(batch.rows_and_lens):
    path = verdict.accept_index[request, : int(verdict.num_accepted_tokens[request])].long()
    source = verify_input.cache_locations[path]
    destination = pools.slots(row, length + torch.arange(len(path)))
    assert torch.equal(pools.target.keys[:, destination], before.target.keys[:, source])
    assert torch.equal(pools.target.values[:, destination], before.target.values[:, source])
    print(f"request {request}: slots {source.tolist()} → {destination.tolist()}, content equal in every layer")

# %% [markdown]
# * The destination slots of request 0 are consecutive. Those of request 1 have a gap. Find the gap in the picture of
#   the pages.
# * Suppose that nodes 2, 5 and 7 were moved one after the other, starting with 7. Whose KV would be lost?
# * **Try** `release="round"`. Which slots of the last picture are free now?
#
# ## Draft-extend
#
# The drafter's cache still has the KV that it computed from its *predicted* features. Now the drafter computes it again
# from the target's true features. One detail is important: a row with the features of a node has the token id *after*
# that node.

# %%
extend = verify_output.draft_extend_input
first, count = int(extend.row_starts[0]), int(extend.num_accepted_tokens[0])
nodes = verdict.accept_index[0, :count].tolist()
for row, node in enumerate(nodes, start=first):
    features_of = decode([int(verify_input.draft_tokens[0, node])])
    token = decode([int(extend.input_ids[row])])
    print(f"column {int(extend.positions[row])}: features of {features_of!r:12} with the id of {token!r}")

# %%
next_draft_input = engine.draft_extend(batch, extend, pools)
next_batch = batch.after(verdict.num_accepted_tokens)
plots.tree(engine.draft(next_batch, next_draft_input, pools), None, decode)

# %% [markdown]
# The bonus token is the root of the next tree. The round is complete: `DraftInput → draft → VerifyInput → verify →
# VerifyOutput → draft_extend → DraftInput`.
#
# ## Is this the text that the target would generate?
#
# At temperature 0 a comparison gives the answer. Plain decoding, with one token per pass, must give the same text. It
# needs 24 passes for 24 tokens.
#
# ### Prediction

# %%
guess = specsim.course.predict("How many passes of the target do 24 tokens of the first request take?", 12)
guess

# %%
whole = SamplingParams(max_new_tokens=24)
speculative = specsim.generate(pair, prompts, config, whole)
plain = specsim.generate(pair, prompts, SpecConfig.plain(), whole)
assert [output.token_ids for output in speculative.outputs] == [output.token_ids for output in plain.outputs]
for output in speculative.outputs:
    rounds = output.num_accepted_tokens_per_round
    print(f"{len(output.token_ids)} tokens in {len(rounds)} passes of the target, {rounds} per round")
guess.score(len(speculative.outputs[0].num_accepted_tokens_per_round))

# %% [markdown]
# * The second request has rounds with 2 and 3 tokens. How many of their drafts were right?
# * **Try** `temperature=1.0` in `whole`. The assertion fails, although the code is correct. Why? What should be
#   compared instead? (`papers/eagle1/notes.md` has the answer, and `tests/operations/test_verify.py` has the
#   comparison.)
#
# ## The same round with the fast implementation
#
# So far every step was plain PyTorch: the reference implementation. The fast implementation computes the same round
# with Triton kernels and static buffers. On a GPU it replays the round from one CUDA graph. Both implementations read
# and return the same states, so every field of every state can be compared. Integers must be equal. Floats may differ
# as much as a different order of summation explains.


# %%
def tensors(state, name):
    """Every tensor of a state by its full name."""
    if isinstance(state, torch.Tensor):
        yield name, state.cpu()
    elif is_dataclass(state):
        for field in fields(state):
            yield from tensors(getattr(state, field.name), f"{name}.{field.name}")


def play(impl):
    """Run a round with one implementation, and return its tensors by name, including the committed KV."""
    engine, batch, draft_input, pools = start(impl)
    states = engine.round(batch, draft_input, pools)
    left = {name: tensor for state in states for name, tensor in tensors(state, type(state).__name__)}
    for row, length in batch.after(states.verify_output.verdict.num_accepted_tokens).rows_and_lens:
        slots = pools.slots(row, torch.arange(length, device=pools.req_to_token.device))
        for model in ("target", "draft"):
            left[f"pools.{model}.keys of row {row}"] = getattr(pools, model).keys[:, slots].cpu()
            left[f"pools.{model}.values of row {row}"] = getattr(pools, model).values[:, slots].cpu()
    return left


expected, actual = play("reference"), play("fast")
assert expected.keys() == actual.keys()
for name in sorted(expected):
    one, other = expected[name], actual[name]
    assert (one.shape, one.dtype) == (other.shape, other.dtype), name
    if one.is_floating_point():
        largest, difference = float(one.abs().max()), float((one - other).abs().max())
        assert difference <= 1e-4 * max(largest, 1), name
        print(f"{name:50} {tuple(one.shape)!s:18} within {difference:.0e} of values up to {largest:.2g}")
    else:
        assert torch.equal(one, other), name
        print(f"{name:50} {tuple(one.shape)!s:18} equal")

# %% [markdown]
# * **Try** to make them differ: change a score in `draft_input.topk_scores` of one implementation before its round.
#   Which field shows the difference first?
#
# ## Your predictions

# %%
specsim.course.scores()

# %% [markdown]
# ## What to remember
#
# * A round has three phases: draft, verify, draft-extend. States are all that they exchange.
# * The target reads the whole tree in one pass, since the mask shows each node its own branch only.
# * A round gives the accepted drafts and the bonus token. The next round begins with this token as its root.
# * The KV of the accepted path moves to the front. Everything else of the round is thrown away.
#
# `specsim.trace` records rounds like this one of any prompt, and `specsim.explore` shows them on an interactive page.
