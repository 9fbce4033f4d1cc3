# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train a head on a laptop
#
# * **Goal:** You can train a small EAGLE-3 head, compare its trainer's accept length with the served one, and recognise
#   three classic mistakes by what they do to the loss and to the accept length.
# * **Before:** Notebooks 01 and 04. You have trained some model with PyTorch.
# * **Time:** 50 minutes to work through, 40 seconds to run. No GPU.
#
# A head is a drafter of one transformer layer. It reads hidden states of the target and learns to guess the target's
# next tokens. The training itself is ordinary. What goes wrong are three details in which trainer and engine must
# agree: which token is the label, which layer the features come from, and on which side of the norm a hidden state is
# taken. None of these mistakes raises an error, and the output stays lossless. Only the accept length suffers.

# %%
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import specsim
from specsim import SamplingParams, SpecConfig, plots, training
from specsim.models.shipped import TINY, load_prompts

# %% [markdown]
# ## A text and a target
#
# The package ships a text: excerpts of Python files. The held-out prompts come from other files. The target is the
# shipped one, as a module of `transformers`, since PyTorch must compute gradients here.

# %%
pair = specsim.load()
encode, decode = pair.tokenizer.encode, pair.tokenizer.decode
target = training.load_target(TINY / "target")
excerpts = load_prompts(name="text")
tokens = training.join_texts([encode(excerpt["text"]) for excerpt in excerpts], separator=0)
prompts = [prompt["text"] for prompt in load_prompts()[:12]]
num_characters = sum(len(excerpt["text"]) for excerpt in excerpts)
print(f"{len(excerpts)} excerpts, {num_characters:,} characters, {len(tokens):,} tokens")

# %% [markdown]
# ## What a head learns
#
# A *row* of the head has two inputs: a hidden state, and the token after it. At step 0 the hidden state of row r is
# made of the target's features of token r, and the row reads token r + 1. Then the head drafts the token after that.
#
# In a round, the head drafts several tokens before the target runs again. For the later ones there are no features yet,
# so the head reads its own output of the step before. It is trained in the same way: the trainer *unrolls* some steps.

# %%
ids = encode("def area(width, height):\n    return width * height")
row = 5
for step in (0, 1, 2):
    source = f"the features of {decode([ids[row]])!r}" if step == 0 else f"its own output of step {step - 1}"
    token, draft = decode([ids[row + step + 1]]), decode([ids[row + step + 2]])
    print(f"row {row}, step {step}: reads {source} and the token {token!r}, learns to draft {draft!r}")

# %% [markdown]
# * In which step does the row read a token that the target has not seen at inference? (Who wrote this token then?)
# * The trainer takes the tokens from the text. Where do they come from when the head is served?
#
# The *label* is what the head should predict. It is not the token of the text but the target's whole distribution over
# this token: the head shall imitate the target, not the author of the text. The target computes one such distribution
# in every *column*, for each token that it reads.

# %% [markdown]
# ### Exercise 16-1
#
# Write `label_column`. At step i, row r has read the tokens up to r + i + 1, and drafts the token after them. Its label
# is the target's distribution over this token. Return the column of the target that holds this distribution. Rows,
# steps, columns and tokens are counted from 0.
#
# Hint: the target's output in column c is its distribution over token c + 1.


# %%
def label_column(row: int, step: int) -> int:
    """Find the column of the target that holds the label of a row at an unrolled step."""
    raise NotImplementedError("your answer")


# %%
specsim.course.check("16-1", label_column)

# %% [markdown]
# `specsim.course.solution("16-1")` shows a solution.
#
# ## Which layers
#
# An EAGLE-3 head reads three hidden states of the target: an early one, a middle one and a late one. Its config.json
# names them by layer ids. Two conventions are in use, and published heads do not always say which one they follow.

# %%
output = target.model(torch.tensor([ids]), output_hidden_states=True)
for index, state in enumerate(output.hidden_states):
    print(f"hidden_states[{index}]: {tuple(state.shape)}, root mean square {state.square().mean().sqrt():.2f}")

# %% [markdown]
# * The target has 4 layers. Why are there 5 states? (transformers applies the final norm to the last one.)
# * The states grow from layer to layer. What does a head see that was trained on states 1, 2, 3 and reads 0, 1, 2?

# %% [markdown]
# ### Exercise 16-2
#
# Write `feature_states`. `hidden_states` is what transformers returns: entry 0 is the embedding, which enters layer 0,
# and entry i is the state that enters layer i. Return a list with the states that the head reads, in the order of
# `layers`.
#
# If `convention` is "entering", id i means the state that enters layer i. If it is "output", id i means the state that
# leaves layer i.


# %%
def feature_states(hidden_states: Sequence[Any], layers: Sequence[int], convention: str) -> list[Any]:
    """Choose the hidden states that a head reads, in the order of its layer ids.

    hidden_states: entry i enters layer i. convention: "entering" or "output".
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("16-2", feature_states)

# %% [markdown]
# ## Before or after the norm
#
# A step of the head ends with a hidden state. It has two uses: `lm_head` turns it into the logits of the draft, and the
# next step reads it.

# %% [markdown]
# ### Exercise 16-3
#
# Write `read_out`. The layer of the head has computed `hidden`. Return two values: the logits of the draft, and the
# hidden state that the next step reads. `norm` and `lm_head` are functions.
#
# Hint: lm_head reads normed states only. The next step must read what step 0 reads: a hidden state as it leaves a
# layer, to which no norm has been applied yet.


# %%
def read_out(
    hidden: torch.Tensor, norm: Callable[..., Any], lm_head: Callable[..., Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the logits of a draft step, and the hidden state that the next step reads."""
    raise NotImplementedError("your answer")


# %%
specsim.course.check("16-3", read_out)

# %% [markdown]
# ## Training
#
# `NUM_STEPS` is the number to change. 100 steps give a poor head in a quarter of a minute, which is enough to see every
# effect. For a better one take 3000: on two free cores that is less than ten minutes.
#
# Every step draws 4 windows of 64 tokens from the text, runs the target on them, and unrolls the head for 3 drafts. The
# head starts as a copy of the target's last layer, and drafts from the 1024 most frequent tokens of the text.

# %%
NUM_STEPS = 100

options = training.TrainingOptions(num_steps=NUM_STEPS)
trained = training.train_drafter(target, tokens, options)
plots.losses({"trained": trained.losses})

# %% [markdown]
# The bold line is the mean over 10 steps. The loss is in nats for each draft.
#
# * The loss cannot reach 0, not even with a perfect head. Why not? (What is the label?)
# * Is the training finished? What would you change, and in which direction?
#
# ## The trainer's accept length and the served one
#
# The trainer can estimate the accept length without an engine. The target continues each prompt greedily. The head
# drafts after each token of the continuation, and the drafts that equal the text are counted, round by round.
#
# The engine has its own code for all this: its own attention, KV and features. So we write the head to a folder, load
# it like a published checkpoint, and serve the same prompts.

# %%
chain = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4)
greedy = SamplingParams(max_new_tokens=64)
storage = TemporaryDirectory()
folder = Path(storage.name)
trained.drafter.write(folder)
served = specsim.generate(specsim.load("tiny", folder), prompts, chain, greedy)
shipped = specsim.generate(pair, prompts, chain, greedy)
continuations = training.continue_texts(target, [encode(prompt) for prompt in prompts])
estimate = training.estimate_acceptance(trained.drafter, target, continuations)
plots.acceptance(
    {"trained, by the trainer": estimate, "trained, served": served.acceptance, "shipped": shipped.acceptance}
)

# %%
assert abs(estimate.accept_length - served.acceptance.accept_length) < 0.05
assert [output.token_ids for output in served.outputs] == [output.token_ids for output in shipped.outputs]
print("trainer and engine agree, and both heads give the same text")

# %% [markdown]
# The small difference has a reason: the last round of a request is cut off at 64 tokens, and the trainer looks a
# little further. If the two differ by more, trainer and engine do not do the same thing. That is the first thing to
# check after a training.
#
# * The shipped head has the same architecture. What did it have more of?
# * Two very different heads give the same text. Why? What does a bad head cost?
# * **Try** `NUM_STEPS = 3000`, and get a coffee. How far does the accept length rise?
#
# ## Mistake 1: labels shifted by one
#
# The course stores usual wrong answers with every exercise. We train with the first one of Exercise 16-1, for half as
# many steps. The trainer receives the three functions as `Conventions`.

# %%
wrong_column = specsim.course.exercise("16-1").mistakes[0].answer
wrong_labels = replace(training.ENGINE, label_column=wrong_column)
fewer = replace(options, num_steps=NUM_STEPS // 2, conventions=wrong_labels)
shifted = training.train_drafter(target, tokens, fewer)
assert sum(shifted.losses[-10:]) < sum(trained.losses[len(shifted.losses) - 10 : len(shifted.losses)])
plots.losses({"trained": trained.losses, "labels shifted": shifted.losses})

# %% [markdown]
# At the same step, the loss with shifted labels is the lower one. Does that make it the better head?
#
# ### Prediction
#
# The accept length is at least 1, since the target adds a token of its own in every round.

# %%
guess = specsim.course.predict("What is the accept length of the head whose labels are shifted?", 1.4, within=0.05)
guess

# %%
found = training.estimate_acceptance(shifted.drafter, target, continuations)
guess.score(round(found.accept_length, 1))

# %% [markdown]
# The head has learned to predict a token that it has just read. That is easy, and useless. A loss that falls too fast
# is a warning.
#
# ## Mistake 2: features of another layer
#
# For the other mistakes we take the shipped head, since it has more to lose. `draft_fields` replaces a field of its
# config.json. Its ids 1, 2, 3 are those of the layers that the states enter. A config.json in the other convention says
# 0, 1, 2. An engine that takes these for entering ids reads every feature one layer too early.
#
# ### Prediction
#
# Neighbouring layers have similar hidden states. With the right ones the accept length is about 3.3.

# %%
assert round(shipped.acceptance.accept_length, 1) == 3.3
guess = specsim.course.predict("What is the accept length with features of one layer too early?", 2.9)
guess

# %%
too_early = specsim.load("tiny", TINY / "eagle3", draft_fields={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
early = specsim.generate(too_early, prompts, chain, greedy)
assert [output.token_ids for output in early.outputs] == [output.token_ids for output in shipped.outputs]
guess.score(round(early.acceptance.accept_length, 1))

# %% [markdown]
# No error, no warning, the same text: only the accept length shows it.
#
# ## Mistake 3: the norm on the wrong side
#
# The engine's code is fixed, but a head in the trainer may follow other conventions. `read_eagle3` reads the shipped
# head into the trainer. The first wrong answer of Exercise 16-3 gives the right logits, and hands the normed state to
# the next step.
#
# ### Prediction
#
# Think of the three drafts one by one: which of them reads a normed state?

# %%
guess = specsim.course.predict("What is the accept length if the next step reads the normed state?", 1.6)
guess

# %%
normed = replace(training.ENGINE, read_out=specsim.course.exercise("16-3").mistakes[0].answer)
shipped_head = training.read_eagle3(TINY / "eagle3", target, normed)
late = training.estimate_acceptance(shipped_head, target, continuations)
guess.score(round(late.accept_length, 1))

# %% [markdown]
# The picture shows where each mistake takes effect.

# %%
plots.acceptance({"shipped": shipped.acceptance, "normed state": late, "layer too early": early.acceptance})

# %% [markdown]
# * Which mistake hurts the first draft already? Why does the other one hardly change it?
# * You see only the accept length of a head that you have downloaded, and it is too low. Which line of the report do
#   you look at next?
# * **Try** the second wrong answer of Exercise 16-3, `mistakes[1]`. Which drafts does it hurt?
# * **Try** to train with a mistake *and* to estimate with it: give a training `conventions=wrong`, which its head
#   keeps. Is the trainer's accept length low? And the served one? This is why you compare the two.
# * **Try** your own three lines: `replace(training.ENGINE, label_column=label_column, feature_states=feature_states,
#   read_out=read_out)`. The losses must be those of the first training, to the last digit.
#
# ## Your predictions

# %%
specsim.course.scores()

# %% [markdown]
# ## What to remember
#
# * A row that has read token t learns the target's distribution over token t + 1. A loss that falls too fast means that
#   it learns something else.
# * Features are named by layer ids in one of two conventions. The wrong one costs most of the accept length, silently.
# * Between two steps the hidden state is handed on *without* the norm. The mistake leaves the first draft intact and
#   hurts those after it.
# * After every training: serve the head, and compare the accept length with the trainer's. They must agree.
#
# The unrolled training is from [EAGLE-3](https://arxiv.org/abs/2503.01840), where it is called training-time test. In
# the package it is `specsim.training`, the code that trained the shipped heads too.
