# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Graphs and stale metadata
#
# * **Goal:** You can say what a captured graph keeps and what it reads again, find metadata that is stale in a draft
#   loop, and write an update that works inside a graph.
# * **Before:** Notebooks 01, 07 and 08.
# * **Time:** 50 minutes to work through, 25 seconds to run. No GPU.
#
# A draft step is a small forward pass of many small kernels. The host can need longer to launch them than the GPU needs
# to run them. So engines *capture* a step once in a CUDA graph and *replay* it, with one launch for all kernels. This
# is fast, and it invites a certain fault: a value that should change from step to step, and does not.
#
# [vllm#41162](https://github.com/vllm-project/vllm/pull/41162) repaired such a fault. A drafter with a sliding window
# read keys outside its window, and sometimes outside its memory. We replay it here without a GPU. The package has an
# emulated graph, `Tape`, which follows the rules of a CUDA graph.

# %%
from dataclasses import replace
from unittest.mock import patch

import torch

import specsim
from specsim import EngineOptions, SamplingParams, SpecConfig, plots
from specsim.core.engine_options import GRAPHS
from specsim.core.phases import Batch, PrefillInput
from specsim.fast.attention import attention
from specsim.fast.drafting.lanes import lane_metadata
from specsim.fast.runtime.graph import HostRead, Tape
from specsim.fast.sections import RoundPhases
from specsim.reference.attention import lane_metadata as reference_metadata

# %% [markdown]
# ## What a graph keeps
#
# `Tape.of` runs a function once and records its operations. `replay` repeats them. Our first graph adds a number to a
# tensor.

# %%
x = torch.tensor([10])
out = torch.zeros(1, dtype=torch.int64)
number = 1
tape = Tape.of(lambda: out.copy_(x + number))
print("captured:", [step.name for step in tape.steps], "out:", out.tolist())

# %% [markdown]
# ### Prediction
#
# Now both inputs change, and then the graph is replayed.

# %%
guess = specsim.course.predict("x was 10 and becomes 20; the number was 1 and becomes 5. What does a replay write?", 25)
guess

# %%
x.fill_(20)
number = 5
tape.replay()
guess.score(int(out))

# %% [markdown]
# A graph is a list of kernels with their arguments. An argument is an *address* or a *number*. What is stored at an
# address is read again in every replay. A number was written into the list at capture, and stays.
#
# What if the name `x` gets a new tensor?

# %%
x = torch.tensor([100])
tape.replay()
print("out:", out.tolist())

# %% [markdown]
# The new tensor is at another address. The graph still reads the old one, which it keeps alive. Nothing reports this,
# neither here nor on a GPU.
#
# Two ways out are left. Write new content into the *old* tensor. Or put the changing number on the device, and let the
# graph itself advance it.

# %%
counter = torch.tensor([0])
tape = Tape.of(lambda: (out.copy_(x + counter), counter.add_(1)))
counter.zero_()  # the capture has run the work once
for _ in range(3):
    tape.replay()
    print("out:", out.tolist(), "counter:", counter.tolist())

# %% [markdown]
# One thing is impossible in a graph: to read a device value on the host and decide by it. The host does not run at
# replay. So a capture refuses it.

# %%
try:
    Tape.of(lambda: out.fill_(int(counter)))
except HostRead as error:
    print(error)

# %% [markdown]
# * Why is it good that this raises, and bad that a new tensor under an old name does not?
# * Is a Python `if` on the number of requests safe in a graph? An `if` on the largest length?
# * **Try** `Tape.of(lambda: out.copy_(x[x > 5]))`. What does the host have to know?
#
# ## The step number
#
# A draft step writes its tokens to a column of a table: step 0 to column 0, and so on. If the step number is a number
# of the host, every replay writes column 0. So vLLM holds it in a tensor with one element.

# %% [markdown]
# ### Exercise 09-1
#
# Write `write_column`. It is captured once and replayed for every draft step, so it must work on the tensors in place.
# `draft_tokens[b, s]` is the draft of request b in step s, and `step` says which column comes next. Afterwards `step`
# must be one larger.
#
# Hint: the functions of torch that write in place end in `_`. `table.index_copy_(1, columns, values)` writes the
# values, [B, number of columns], to these columns. What does `table[:, columns]` give: a view or a copy?


# %%
def write_column(draft_tokens: torch.Tensor, step: torch.Tensor, tokens: torch.Tensor) -> None:
    """Write the tokens [B] to column `step` of draft_tokens [B, S], and add 1 to step, in place."""
    raise NotImplementedError("your answer")


# %%
specsim.course.check("09-1", write_column)

# %% [markdown]
# `specsim.course.solution("09-1")` shows a solution.
#
# ## Metadata of a draft step
#
# Attention needs more than queries and keys. Its *metadata* says at which position each row is, where its KV goes, and
# which keys it sees. In a draft loop, all of this depends on the step.
#
# Take a drafter with a sliding window: a row sees itself and the positions before it, 16 in all. The shipped drafter
# has no window, so we give it one. It was not trained for that, and its drafts get worse. But here we only compare the
# *same* drafter with right and with stale metadata.

# %%
window, num_steps = 16, 6
pair = specsim.load()
model = pair.drafter.config.model.with_windows((window,))
windowed = replace(pair, drafter=replace(pair.drafter, config=replace(pair.drafter.config, model=model)))
config = SpecConfig(topk=1, num_steps=num_steps, page_size=1)
prompts = ["def count(n):\n    while n", "def load(path, mode):\n    with open(", "def fib(n):\n    if n <",
           "def save(path, data):\n    with open(", "try:\n    import json\nexcept",
           "def read_lines(path):\n    for line in"]  # fmt: skip
begun = specsim.generate(pair, prompts, config, SamplingParams(max_new_tokens=12))
starts = [pair.tokenizer.encode(prompt) for prompt in prompts]
texts = [[*start, *output.token_ids] for start, output in zip(starts, begun.outputs, strict=True)]
lengths = [len(ids) for ids in texts]
print("tokens of the texts:", lengths)

# %% [markdown]
# The texts are longer than the window, so its start matters. As in notebook 01, the requests get rows and slots, and a
# prefill makes the state from which drafting starts. It runs on the reference implementation. States and pools belong
# to no implementation, so the fast one goes on from there.

# %%
engine = specsim.load_engine(windowed, config, EngineOptions("fast", device="cpu", graph="eager"))
pools = engine.make_pools(len(texts), sum(config.reserved_columns(length) for length in lengths))
rows = [pools.open() for _ in texts]
for row, length in zip(rows, lengths, strict=True):
    pools.reserve(row, config.reserved_columns(length))
batch = Batch.of(range(len(texts)), rows, lengths, [SamplingParams()] * len(texts), pair.target.config.vocab_size)
reference = specsim.load_engine(windowed, config)
draft_input = reference.prefill(batch, PrefillInput.of_prompts(texts), pools).draft_input

# %% [markdown]
# Which keys does each draft step see? We let the reference build the metadata of steps 0 to 4 for the first request.
# A chain has one lane, so each step's path is lane 0. A row sees a key if the mask allows it, and if the distance of
# their positions is less than the window.

# %%
right = []
for step in range(num_steps - 1):
    path = torch.zeros(1, 1, step + 1, dtype=torch.int64)
    metadata = reference_metadata(batch.filter(torch.tensor([0])), path, engine.config, pools)
    keys = metadata.keys[0]
    seen = keys.mask[0] & (metadata.positions[0] - keys.positions < window)
    right.append(keys.positions[seen].tolist())
stale_start = [list(range(min(right[0]), max(seen) + 1)) for seen in right]
nothing_moves = [right[0] for _ in right]

# %% [markdown]
# `stale_start` is what vLLM did before the change: lengths, positions and slots advanced, but the window's start had
# been computed once, before the loop. In `nothing_moves` all metadata is that of step 0.
#
# ### Prediction
#
# The window has 16 positions, and its start stays where it was in step 0.

# %%
guess = specsim.course.predict("How many keys does draft step 4 see with a window of 16 and a stale start?", 16)
guess

# %%
guess.score(len(stale_start[4]))

# %%
plots.keys_seen({"rebuilt": right, "stale start": stale_start, "nothing moves": nothing_moves}, lengths[0])

# %% [markdown]
# * The buffer of a kernel has room for a window of 16 keys. Which step writes outside it first?
# * In the last panel the slots do not move either. Where does step 1 write its KV, and whose KV is lost?
# * Which of the two faults does a test with texts of 8 tokens find?
# * **Try** `window = 32`. What remains of the difference, and why did the pull request's authors need a model with a
#   window to find the fault?

# %% [markdown]
# ### Exercise 09-2
#
# Write `visible_keys`. The prefix has the positions 0 to `length` − 1, and draft step i stands at position `length` +
# i. It sees itself and the positions before it, `window` positions in all, or fewer where the text has just begun.
# Return the first position and the number of positions, as a pair.
#
# Hint: compare with the upper panel of the picture.


# %%
def visible_keys(length: int, step: int, window: int) -> tuple[int, int]:
    """Find the first position that a draft step sees, and the number of positions, its own included.

    length: tokens of the prefix; step i is at position length + i.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("09-2", visible_keys)

# %% [markdown]
# ## The replay
#
# Now the fault itself. The drafter of the fast implementation has a method for one draft step. First we run it without
# a graph, and then we capture one step and replay it. `lanes` are the buffers of the loop, and `start` fills them with
# the first drafts.

# %%
drafter = engine.drafter
lanes = drafter.buffers(len(texts))
drafter.start(batch, draft_input, lanes, pools)
first = lane_metadata(batch, lanes, engine.config, pools)  # of step 0, for later
for _ in range(num_steps - 1):
    drafter.step(batch, lanes, pools)
eager = lanes.candidates.tokens.clone()
tapes = {"metadata in the graph": Tape.of(lambda: drafter.step(batch, lanes, pools))}
steps = tapes["metadata in the graph"].steps
print(
    f"one draft step: {len(steps)} operations, {sum(step.is_kernel for step in steps)} of them this package's kernels"
)

# %% [markdown]
# `drafter.step` builds the metadata itself, in a kernel that reads the step number on the device. So the graph contains
# it, and every replay builds it again.
#
# Two more graphs are captured. `patch` replaces a function during the capture. In the first one, attention takes the
# window's start from positions that were computed before the loop, and everything else is rebuilt. That is the fault of
# vllm#41162. In the second one, no metadata is rebuilt.

# %%
drafter.start(batch, draft_input, lanes, pools)
with patch(
    "specsim.fast.layers.attention",
    lambda query, layer, kv, metadata, window, **options: attention(
        query, layer, kv, replace(metadata, positions=first.positions), window, **options
    ),
):
    tapes["stale window start"] = Tape.of(lambda: drafter.step(batch, lanes, pools))
drafter.start(batch, draft_input, lanes, pools)
with patch("specsim.fast.drafters.autoregressive.lane_metadata", return_value=first):
    tapes["no metadata rebuilt"] = Tape.of(lambda: drafter.step(batch, lanes, pools))

# %% [markdown]
# ### Prediction
#
# Six requests have five drafts each after the first one. Of these 30 drafts, some were drafted with keys from outside
# their window. Count these in the picture first: the others cannot change.

# %%
guess = specsim.course.predict("Of 30 drafts, how many change with the stale start of the window?", 30, within=0.5)
guess

# %%
drafts = {}
for name, tape in tapes.items():
    drafter.start(batch, draft_input, lanes, pools)
    for _ in range(num_steps - 1):
        tape.replay()
    drafts[name] = lanes.candidates.tokens.clone()
    print(f"{name}: {int((drafts[name] != eager).sum())} drafts differ")
assert torch.equal(drafts["metadata in the graph"], eager)
assert torch.equal(drafts["stale window start"][:, :2], eager[:, :2])
guess.score(int((drafts["stale window start"] != eager).sum()))

# %% [markdown]
# Most drafts do not change, and none of them is impossible. The output cannot change at all, since the target verifies
# it. In vLLM the fault was found because a kernel left its memory. Where the wrong address is inside the memory, there
# is no symptom but somewhat fewer accepted drafts.
#
# * The first two drafts of a request never change. Which phase made the first one, and why is the second one right?
# * A draft can change although its step saw almost the right keys. What else reaches a step from the step before?
#
# ## Repairs that work, and one that does not
#
# The obvious repair is to build new metadata between two replays. The next cell does it, for the graph without any
# rebuilding.

# %%
metadata = first
drafter.start(batch, draft_input, lanes, pools)
for _ in range(num_steps - 1):
    metadata = lane_metadata(batch, lanes, engine.config, pools)
    tapes["no metadata rebuilt"].replay()
assert torch.equal(lanes.candidates.tokens, drafts["no metadata rebuilt"])
print(f"new metadata under the old name: {int((lanes.candidates.tokens != eager).sum())} drafts differ")

# %% [markdown]
# The metadata was right, and the graph did not read it. It has the addresses of `first`. So its *content* must be
# written there:

# %%
drafter.start(batch, draft_input, lanes, pools)
for _ in range(num_steps - 1):
    metadata = lane_metadata(batch, lanes, engine.config, pools)
    for old, new in zip([first.slots, *first.tensors], [metadata.slots, *metadata.tensors], strict=True):
        old.copy_(new)
    tapes["no metadata rebuilt"].replay()
assert torch.equal(lanes.candidates.tokens, eager)
print(f"content copied into the captured buffers: {int((lanes.candidates.tokens != eager).sum())} drafts differ")

# %% [markdown]
# That works, at the price of more launches between two replays. vLLM's builders run on the host, so it chose to capture
# a single step and to rebuild the metadata between its replays. This package builds metadata in a kernel. So the whole
# loop fits into one graph, or even the whole round. The next cell lists what each mode captures in one graph.

# %%
for mode in GRAPHS:
    graphs = [" + ".join(section.__name__ for section in run) for run in RoundPhases.of(mode, config).captured]
    print(f"{mode}: {len(graphs)} captured", *graphs, sep="\n  ")

# %% [markdown]
# * In which modes may the host change something between two draft steps?
# * `release="round"` moves pages between phases. Which mode is impossible then?
#
# The last exercise is the update between two steps as vLLM needs it in its graph: in place, without the host, and
# without effect after the last step.

# %% [markdown]
# ### Exercise 09-3
#
# Write `advance`, the update between two draft steps. It is captured together with the step and replayed with it.
# `seq_lens` and `window_starts` have one entry for each request, `step` has one element; `window` and `last_step` are
# numbers of the host, which never change. All lengths and the step grow by one. Then each window starts `window` keys
# before the new end of its request, or at 0 if the text is shorter than that.
#
# The graph is replayed after the last step too. If `step` has reached `last_step`, nothing may change.
#
# Hint: a comparison of tensors gives a tensor. What is `(step < last_step).long()` before the last step, and after it?


# %%
def advance(
    seq_lens: torch.Tensor, window_starts: torch.Tensor, step: torch.Tensor, window: int, last_step: int
) -> None:
    """Update the metadata in place for the next draft step; change nothing once step has reached last_step.

    seq_lens: keys of each request up to its own token. window_starts: first position that it sees.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("09-3", advance)

# %% [markdown]
# * **Try** `specsim faults --name swa-window-stale --name metadata-not-rebuilt` in a terminal. Which field does each
#   check name? Why is it not the tokens?
#
# ## Your predictions

# %%
specsim.course.scores()

# %% [markdown]
# ## What to remember
#
# * A graph keeps addresses and numbers. Content at an address is read again, a number never, and a new tensor under an
#   old name is not seen.
# * What changes from step to step must be on the device, and must be advanced in place. The step number too.
# * Everything that is derived from a position must be derived again when the position changes. If lengths advance and
#   a window's start does not, nothing crashes until an address is out of bounds.
# * Wrong metadata of the drafter changes drafts, not texts. Compare drafts, or the keys that are seen.
#
# The graph and its emulation are in `specsim/fast/runtime/graph.py`, the kernel that builds a draft step's metadata in
# `specsim/fast/drafting/lanes.py`. `papers/vllm-41162/notes.md` has the rule, its tests, and the benchmark that
# the pull request published.
