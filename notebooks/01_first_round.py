# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # One round
#
# A language model writes one token a forward pass. In a round of speculative decoding a small *drafter* proposes a
# tree of tokens, the *target* reads the whole tree in one forward pass, and keeps the path that it would have written
# itself. This notebook takes one such round apart and looks at everything it touches: the tree, the mask, the cache.
#
# Every question marked **Try** is answered by changing a cell and running it again. No GPU is needed.

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
# ## The setting
#
# `topk` is the number of lanes that the drafter follows at a time (K), `num_steps` how deep it goes (S), and
# `num_draft_tokens` how many nodes the target gets to see, the root included (N). Key and value vectors live in pages
# of `page_size` slots.
#
# Two requests share the batch, so that one can see whose slots are whose.

# %%
config = SpecConfig(topk=4, num_steps=3, num_draft_tokens=8, page_size=4)
prompts = ["def count(n):\n    while n", "def read(path):\n    with open("]
sampling = SamplingParams(temperature=0.0)


def start(impl):
    """An engine of a column, and two requests after their prefill."""
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
    draft_input = engine.prefill(batch, PrefillInput.whole(prompt_ids).to(device), pools).draft_input
    return engine, batch, draft_input, pools


engine, batch, draft_input, pools = start("reference")
print("tokens of the prompts (L):", batch.seq_lens.tolist())
print("next token, already known: ", [decode([token]) for token in draft_input.bonus_tokens.tolist()])

# %% [markdown]
# The last line is where a round starts. The target's latest token is known, but neither model has read it yet: its KV
# is nowhere. It becomes the *root* of the tree.
#
# ## Draft
#
# The drafter starts from the root's K best followers, which the step before has left in `draft_input`. In each of S−1
# forward passes it extends every lane by K children, scores a child by the product of probabilities along its path,
# and keeps the best K as the next lanes. At the end *all* candidates compete for the N−1 places below the root.

# %%
verify_input = engine.draft(batch, draft_input, pools)
plots.tree(verify_input, None, decode)

# %% [markdown]
# A blank is drawn as ␣, and `␣×7` are seven of them.
#
# * No score is above its parent's. Why can a product never be? What would go wrong if a child were ranked above its
#   parent?
# * Node 5 scores 0.193 below node 2 with 0.201. What probability did the drafter give to `:` after ` 1`?
# * **Try** `topk=1, num_draft_tokens=4`: a chain. Which of the nodes above does it have?
#
# ## Who sees whom
#
# The target reads the tree in one pass, so its 8 tokens lie side by side although some of them contradict each other.
# The mask keeps them apart: a node sees the prefix, its ancestors and itself. Siblings share a *position* (the place
# in the text that they compete for) and never a *column* (the place in the cache).

# %%
plots.mask(verify_input, decode=decode)

# %% [markdown]
# * Two rows stand for the same token `:`. What distinguishes their predictions?
# * **Try** the chain again: why is its mask a full triangle?
#
# ## Where drafts live
#
# The drafter needs KV of its own for the lanes it follows. Every slot below belongs to a page, every page to a
# request. Lane k writes the KV of its step s to the cell `k.s`; the target's cache is a second buffer with the same
# slots.

# %%
plots.kv_pages(pools, batch, config)

# %% [markdown]
# * Request 1 has 9 tokens on pages of 4, so its last page is begun. Each of its lanes 1, 2 and 3 keeps a copy of what
#   is on it, and lane 0 does not. Why does request 0 need no copies?
# * The last cell of each lane is never written. Count forward passes to see why.
# * **Try** `page_size=1`. What becomes of the copies, and why?
#
# ## Verify
#
# For verification node j of a request goes to column L+j. After its pass over the tree, the target knows its own next
# token at every node. It walks down from the root, as long as some child is the token that it would have written.
# Where none is, its own choice is the *bonus*: even a tree without a single right token yields one.

# %%
before = deepcopy(pools)
verify_output = engine.verify(batch, verify_input, pools)
verdict = verify_output.verdict
plots.tree(verify_input, verdict, decode)

# %%
for prompt, tokens in zip(prompts, verdict.accepted_tokens(), strict=True):
    print(repr(prompt), "→", [decode([token]) for token in tokens])

# %% [markdown]
# * The accepted path is not the drafter's favourite. What would the chain of `topk=1` have gained in this round?
# * `num_accepted_tokens` is `num_accepted_drafts` + 1, and the root is not among them. Where was the root counted?
# * **Try** `plots.tree(verify_input, verdict, decode, request=1)`.
#
# ## Commit
#
# The next round expects the KV of the accepted tokens in columns L, L+1, … But they lie where their nodes were.

# %%
plots.kv_pages(pools, batch, config, verify_input, verdict, committed=False)

# %% [markdown]
# So the content of the path's slots moves to the front, in every layer. The map from columns to slots stays as it is.

# %%
plots.kv_move(verify_input, verdict, decode)

# %%
plots.kv_pages(pools, batch, config, verify_input, verdict)

# %% [markdown]
# A picture can be wrong. `before` is a copy of the pools from before verification: with the target's forward run on
# it once more, and nothing moved, each accepted node's KV is still in its own column. It has to be what now stands in
# the front.

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
# * The slots that request 0's path moves to follow each other, those of request 1's have a gap. Find it in the map.
# * If nodes 2, 5 and 7 were moved one after the other, 7 first, whose KV would be lost?
# * **Try** `release="round"`: which slots of the last map are free now?
#
# ## Draft-extend
#
# The drafter's cache still holds what it *guessed* while drafting. Its rows are now written again with the target's
# true features. One thing has to be right here: the row that carries the features of a node carries the token *after*
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
# The bonus token is the root of the next tree, and the round is closed: `DraftInput → draft → VerifyInput → verify →
# VerifyOutput → draft_extend → DraftInput`.
#
# ## Is it what the target would have written?
#
# At temperature 0 the answer is a comparison: plain decoding, one token a pass, has to give the same text.

# %%
whole = SamplingParams(max_new_tokens=24)
speculative = specsim.generate(pair, prompts, config, whole)
plain = specsim.generate(pair, prompts, SpecConfig.plain(), whole)
assert [output.token_ids for output in speculative.outputs] == [output.token_ids for output in plain.outputs]
for output in speculative.outputs:
    rounds = output.num_accepted_tokens_per_round
    print(f"{len(output.token_ids)} tokens in {len(rounds)} passes of the target, {rounds} a round; plain: one a pass")
speculative

# %% [markdown]
# * **Try** `temperature=1.0` in `whole`. The assertion fails, and yet nothing is broken. Why not? What would have to
#   be compared instead? (The answer is in `papers/eagle1/notes.md`, and the comparison in
#   `tests/operations/test_verify.py`.)
#
# ## The same round on the fast column
#
# So far every step was plain PyTorch, written to be read. The fast column does the same in kernels, on buffers that
# never move, and on a GPU it replays the round from one CUDA graph. It takes and leaves the same states, so that
# every field of every state can be compared: integers exactly, floats within what a different order of summation
# explains.


# %%
def tensors(state, name):
    """Every tensor of a state by its full name."""
    if isinstance(state, torch.Tensor):
        yield name, state.cpu()
    elif is_dataclass(state):
        for field in fields(state):
            yield from tensors(getattr(state, field.name), f"{name}.{field.name}")


def play(impl):
    """A round of a column: every tensor that it leaves, by name, the committed KV included."""
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
# * **Try** to make them differ: change a score in `draft_input.topk_scores` of one of them before its round. Which
#   field is the first to tell?
