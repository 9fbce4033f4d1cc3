# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Find the fault
#
# * **Goal:** You can find the cause of a fault in an engine: compare its outputs, run it in lockstep with a reference,
#   and read the first difference.
# * **Before:** Notebooks 01, 06 and 07.
# * **Time:** 50 minutes to work through, 15 seconds to run. No GPU.
#
# A speculative engine is wrong, but not obviously: its text is fluent, and nothing crashes. Often the text is even
# right, since the target corrects every bad draft. This notebook gives you three such engines. Each has one fault that
# a real engine has had. You know the faults by their numbers only: 1, 2 and 3. At the end you name the phase, the field
# and the cause of each.

# %%
import specsim
from specsim import SpecConfig, plots
from specsim.correctness.explain import Noise, explain
from specsim.course import hidden_faults

# %% [markdown]
# ## Three engines
#
# `examine` copies the package, changes a few lines of the copy, and lets another process import it. So the fault is in
# the code, as it would be in an engine of your own. It is in the *fast* implementation, whose kernels run in Triton's
# interpreter here. `None` stands for the package as it is. The name is that of a fault which serves as an example.
#
# Each copy does two things. The shipped pair continues a prompt. Then a small random pair runs in lockstep with the
# reference, once with a chain and once with a tree.
#
# `results` has an entry for each copy: `answer` (the tokens with their log probabilities), `accept_length`, and
# `differences` for the chain and the tree. You will see them step by step.

# %%
prompt = "class Stack:"
config = SpecConfig(topk=2, num_steps=3, num_draft_tokens=6)
common = dict(kind="eagle3", num_steps=3, page_size=4, batch=2, rounds=1)
settings = {"chain": dict(common, topk=1), "tree": dict(common, topk=2, num_draft_tokens=6)}
example = "draft-position-early"
results = hidden_faults.examine([None, example, 1, 2, 3], prompt, config, settings)
healthy = results[None]
print(repr(prompt + healthy.text), "-", len(healthy.answer.tokens), "new tokens")

# %% [markdown]
# This is the right continuation. The engine decodes greedily, so it is the only right one.
#
# ### Prediction
#
# Fault 1 is in a part of the code that only the drafter needs. In how many of the 8 places does the engine give another
# token?

# %%
guess = specsim.course.predict("In how many of 8 places does fault 1 change the token?", 3, at_least=1)
guess

# %%
for fault in (1, 2, 3):
    result = results[fault]
    places = [one != other for one, other in zip(healthy.answer.tokens, result.answer.tokens, strict=True)]
    print(f"fault {fault}: {sum(places):2} of {len(places)} tokens differ, accept length {result.accept_length:.2f}")
print(f"without a fault: accept length {healthy.accept_length:.2f}")

# %%
changed = sum(one != other for one, other in zip(healthy.answer.tokens, results[1].answer.tokens, strict=True))
guess.score(changed)

# %% [markdown]
# * Which of the three would a test find that compares texts?
# * Which would a benchmark find? It measures time, and time depends on the accept length. What would it say about
#   fault 2?
# * Why can a fault of the drafter not change the text? Notebook 06 has the answer.
#
# ## Is it rounding?
#
# Text that differs is no proof of a fault. Two right engines add numbers in different orders. Where two tokens are
# almost equally probable, rounding decides. `explain` compares the log probabilities too. If the same token after the
# same tokens has clearly different ones, it is a fault. `Noise` says how far rounding can move a log probability.
# `specsim explain` does the same with the files of any two engines.

# %%
noise = Noise.of("float32")
for fault in (1, 2, 3):
    (finding,) = explain([healthy.answer], [results[fault].answer], noise)
    print(f"fault {fault}: {finding.verdict}: {finding.says}")

# %% [markdown]
# * Fault 3 has the right text. What does it do to a user who filters answers by their log probability?
# * Fault 1 passes. What does this say about a check of outputs?
#
# From outside there is no more to see. Now we open the engines.
#
# ## Lockstep
#
# The two implementations read and write the same states. So they can run side by side:
#
# 1. Both begin a phase with the same state and the same KV.
# 2. Both run the phase.
# 3. Every field and every KV slot is compared, in the order in which it is computed.
# 4. If all are equal, the *reference's* results begin the next phase, for both.
#
# Step 4 matters. No error is carried on, so the first difference was made in the phase in which it is found.

# %% [markdown]
# ### Exercise 10-1
#
# Write `first_difference`. It receives the steps of two runs, in the order in which they ran. A step is a tuple of
# round, phase, and a dictionary of fields. The fields of a step are in the order in which they were computed, and each
# holds a list of numbers. Both runs have the same steps and fields. A value is right if it is within `tolerance` of the
# value of the reference: their difference, upwards or downwards, is at most `tolerance`. So integers must be equal, as
# it is below 1.
#
# Return the round, phase, field and index of the *first* wrong value, or None if all are right.
#
# Hint: a value that was never computed may be NaN. Every comparison with NaN is false.


# %%
def first_difference(
    reference: list[tuple[int, str, dict[str, list[float]]]],
    fast: list[tuple[int, str, dict[str, list[float]]]],
    tolerance: float,
) -> tuple[int, str, str, int] | None:
    """Find the first wrong value: its round, phase, field and index in the field; None if all values are right."""
    raise NotImplementedError("your answer")


# %%
specsim.course.check("10-1", first_difference)

# %% [markdown]
# `specsim.course.solution("10-1")` shows a solution.
#
# How large may the tolerance be? The differential does not choose it. It runs the reference a second time in float64,
# and so knows for each field how far rounding goes.
#
# ## An example
#
# The fault of the example is known: `draft-position-early`, which SGLang has had. Before a draft forward, the position
# of the tokens is raised by one too early. Its text is right, and even its accept length is the right one here. No
# check from outside finds it. Here is the first difference that the lockstep finds with a tree.

# %%
(finding,) = explain([healthy.answer], [results[example].answer], noise)
print(f"{finding.verdict}, accept length {results[example].accept_length:.2f}")
assert finding.verdict == "equal"
assert results[example].accept_length == healthy.accept_length
plots.divergence(results[example].differences["tree"].first)

# %% [markdown]
# The title begins with the setting (`k2-s3-n6`: topk 2, 3 steps, 6 nodes) and ends with the place: which request, and
# which entry of the field. A row is a round, and the phases run from left to right. The prefill was equal, so the phase
# is `draft`. The field is `candidates.scores`. But a wrong score is not yet a cause: what made it wrong?
#
# A state is what a phase *returns*. Inside the draft phase, the drafter runs several forward passes. A closer look
# compares what goes into each of them: positions, slots, copied KV; and then its logits. The finding nearest to the
# cause comes first. `call 2` is the second phase that ran, and a draft phase counts its forward passes from 0.

# %%
for finding in results[example].differences["tree"].inside:
    print(f"{finding.place}: {finding.field} is {finding.found:.4g}, not {finding.expected:.4g}")

# %% [markdown]
# * Read the list from top to bottom. Which line is the cause, and which lines are its effects?
# * Forward 0 reads the first drafts. The prompt of request 0 has tokens 0 to 6, so the root is token 7, and a first
#   draft is token 8. In notebook 01, a row of the drafter had the features of a token with the id of the token *after*
#   it, and the position of the features. Which number is right, 7 or 8?
# * The score is wrong by little. With weights in bfloat16, rounding might hide it. Would the position still be found?
#
# This is the way to the cause: the phase, the first wrong field, and then what the field is made of.
#
# ## The three differences
#
# ### Prediction
#
# Fault 2 changes the text. This is the place of its first wrong token:

# %%
(finding,) = explain([healthy.answer], [results[2].answer], noise)
print(f"first wrong token: number {finding.place + 1} of {len(results[2].answer.tokens)}")
print(f"tokens of a round without a fault: {healthy.accept_length:.0f} on average")

# %%
guess = specsim.course.predict("In which round does the lockstep find fault 2?", 3, within=0)
guess

# %%
guess.score(results[2].differences["tree"].first.round)

# %% [markdown]
# The lockstep finds a fault in the first round that it spoils, so it need not run another. A text shows it only when a
# wrong number has become a wrong choice, some rounds later.
#
# Here are the first differences of faults 1, 2 and 3, in this order, with a tree.

# %%
plots.divergence(results[1].differences["tree"].first)

# %%
plots.divergence(results[2].differences["tree"].first)

# %%
plots.divergence(results[3].differences["tree"].first)

# %% [markdown]
# * Two of them are in the same phase. Are they found in the same field?
# * In which of the three can the *next token* of the request be wrong? Which data does it depend on?
# * The title ends with a request and an entry. An entry of `target keys` or `draft keys` is a column of the request's
#   KV. Request 1 has 8 prompt tokens, in columns 0 to 7. Whose KV is wrong: the prompt's or that of accepted tokens?
#
# ## Which settings show it?
#
# A second source of knowledge is cheap: change one option, and see whether the fault is still there.

# %%
for fault, result in results.items():
    found = {name: "found" if difference.first else "not found" for name, difference in result.differences.items()}
    print(f"{fault or 'no fault'}: " + ", ".join(f"with a {name} {word}" for name, word in found.items()))

# %% [markdown]
# In a chain, every node has one child. So the accepted path is always the first nodes, in order: 0, 1, 2, … In a tree
# it may be 0, 2, 5.
#
# * What does a fault need a tree for, if a chain does not show it? Think of all places where something is taken along
#   the accepted path. Notebook 07 has one of them.
# * The first line is a control. Why is a check without it worth little?
#
# ## The cause
#
# These causes are suspects. Each is the cause of a fault that a real engine has had. Three of them are yours.

# %%
hidden_faults.suspects()

# %% [markdown]
# ### Exercise 10-2
#
# Write `diagnose`. For the number of a fault it returns three texts: the phase of the first difference, the first wrong
# field, and the letter of the cause. Take phase and field from the pictures of the trees, exactly as they are written
# there.
#
# A dictionary with three entries is enough.
#
# Hint: for each suspect, think which field it would make wrong first, and whether a chain would show it too.


# %%
def diagnose(fault: int) -> tuple[str, str, str]:
    """Name the phase and the field of the first difference, as the pictures do, and the letter of the cause."""
    raise NotImplementedError("your answer")


# %%
specsim.course.check("10-2", diagnose)

# %% [markdown]
# The solution gives the names of the faults. With a name you can read the injected lines
# (`specsim/correctness/faults/catalogue`), and `specsim faults --name NAME` repeats the experiment.
#
# * **Try** another entry of the catalogue in place of the example, such as `"path-not-compacted"`. Predict phase and
#   field before you run the cells.
# * **Try** `"hidden-without-residual"`. In the closer look, forward 0 is right and forward 1 is wrong. What is handed
#   from one to the other?
#
# ## Your predictions

# %%
specsim.course.scores()

# %% [markdown]
# ## What to remember
#
# * Right text proves little. A fault of the drafter costs time only, and a fault of the log probabilities costs
#   nothing that a text shows.
# * Compare phase by phase, and begin every phase with equal states. Then the first difference was made
#   where it is found.
# * The first difference counts, not the largest. Look at what it is made of, until you find the first wrong input.
# * A tolerance that passes NaN, or one that was chosen until the test passed, finds nothing.
# * Options that make a fault vanish narrow down its cause.
#
# In the package: `specsim diff` runs the lockstep, `specsim explain` compares answers, and `specsim faults` checks that
# every fault of the catalogue is found. [The guide](guide/differential.md) says what the lockstep cannot see: a fault
# that both implementations share.
