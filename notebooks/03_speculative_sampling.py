# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Speculative sampling
#
# * **Goal:** You can say why a small model may guess the tokens of a large one without changing their distribution, and
#   prove it for a small case. You recognise two wrong rules that produce good-looking text.
# * **Before:** Notebook 01. Probabilities and fractions.
# * **Time:** 45 minutes to work through, 15 seconds to run. No GPU.
#
# At temperature 0 it is easy to check a draft: it is right if the target would have chosen the same token. With
# sampling there is no such token. The target has a whole distribution, and the output must follow this distribution
# exactly. This notebook shows the rule that achieves it, first for one token, then for a chain of drafts.

# %%
from fractions import Fraction
from itertools import islice

import torch

import specsim
from specsim import AcceptanceRule, SamplingParams, SpecConfig, plots
from specsim.core.display import stdout_console
from specsim.correctness.exact import certify, certify_rules
from specsim.correctness.exact.breakpoints import REJECTION
from specsim.correctness.exact.cases import ExactCase, ExactModel, draws
from specsim.correctness.exact.distribution import joint_regions
from specsim.correctness.exact.implementations import reference
from specsim.correctness.exact.optimum import optimum
from specsim.correctness.exact.rule_distribution import rule_distribution
from specsim.correctness.wrong_rules import at_least
from specsim.reference.sampling import inverse_cdf

# %% [markdown]
# ## Two distributions
#
# Suppose that three tokens can come next: `owl`, `cat` and `dog`. The *target*, which is large and slow, gives them the
# probabilities p. The *drafter*, which is small and fast, gives them q. Fractions keep every number below exact.

# %%
tokens = ["owl", "cat", "dog"]
target_prob = [Fraction(5, 8), Fraction(2, 8), Fraction(1, 8)]
draft_prob = [Fraction(3, 8), Fraction(1, 8), Fraction(4, 8)]
plots.distributions({"target p": target_prob, "drafter q": draft_prob}, tokens)

# %% [markdown]
# The drafter is not good: it likes `dog` four times as much as the target does. We want to use its drafts all the same.
# In every round the drafter draws a token from q. A rule then either keeps this draft or replaces it by another token.
# In the end `owl` must come out with probability 5/8, `cat` with 2/8 and `dog` with 1/8.
#
# One rule is easy to find. Draw a token from the target too, keep the draft if the two are equal, and else give the
# target's token. The output is right, since it is always the target's. But how often are two independent draws equal?

# %%
equal = sum(p * q for p, q in zip(target_prob, draft_prob, strict=True))
print(f"two independent draws are equal with probability {equal} = {float(equal):.3f}")

# %% [markdown]
# ### Prediction
#
# Can a cleverer rule keep more drafts, with exactly the same output? Think of `dog`: it is drafted in half of all
# rounds, but may come out in only one eighth of them. Replace the number below by your guess, then run the cell.

# %%
guess = specsim.course.predict("Of 1000 drafts, how many can the best rule keep?", 328)
guess

# %% [markdown]
# ## The rule
#
# Consider one token x. It may come out with probability p(x), and it is drafted with probability q(x).
#
# * Where q(x) ≤ p(x), the drafter does not propose x too often. **Keep** every draft x.
# * Where q(x) > p(x), the drafter proposes x too often. Keep it only with probability p(x) / q(x).
#
# Both cases in one line: keep the draft with probability min(1, p(x) / q(x)). A random number between 0 and 1, the
# *uniform*, decides.
#
# A draft that is not kept needs a replacement. It must not be drawn from p: then a token could come out both as a kept
# draft and as a replacement, too often in sum. The replacement makes up for what the kept drafts do not give yet. The
# distribution that does this is called the *residual distribution*. You will find its formula in Exercise 03-2.
#
# The picture shows the whole rule. A point in the square is one round: its horizontal place is the draft, and its
# height is the uniform. Areas are probabilities.

# %%
plots.rejection(target_prob, draft_prob, tokens)

# %% [markdown]
# * Why does no draft `owl` ever get replaced?
# * Why is a draft `dog` never replaced by `dog`?
# * Add up the two areas of `owl`, and compare the sum with p. Do the same for the other tokens.
# * **Try** a drafter that equals the target, and one that always proposes `dog`. What do the squares look like?
#
# The area without hatching is the share of drafts that are kept. You can now compute it.

# %% [markdown]
# ### Exercise 03-1
#
# Write `accept_rate`. It receives the two distributions as lists of fractions, and returns the probability that the
# draft is kept. The drafter may give a token probability 0.
#
# Hint: the drafter proposes x with probability q(x), and the rule keeps it with probability min(1, p(x) / q(x)).
# Multiply, and look at the two cases of the minimum. Then no division remains.


# %%
def accept_rate(target_prob: list[Fraction], draft_prob: list[Fraction]) -> Fraction:
    """Compute the probability that the draft is kept, over all drafts."""
    raise NotImplementedError("your answer")


# %%
specsim.course.check("03-1", accept_rate)

# %% [markdown]
# The check says "not solved yet" until you have written the function. `specsim.course.solution("03-1")` shows a
# solution.
#
# The package knows the largest possible share as well: the solution of a linear program over all rules that keep the
# target's distribution. So the next cell scores your prediction with a number that does not depend on your exercise.

# %%
target, drafter = ExactModel(((5, 2, 1),)), ExactModel(((3, 1, 4),))  # weights in eighths
one_draft = ExactCase("one draft", target, drafter, parents=(-1, 0))
best = optimum(one_draft)
print(f"optimum over all rules: {best}")
guess.score(1000 * best)

# %% [markdown]
# `parents` describes the tree: node 0 is the root, and node 1 is the only draft.
#
# The areas without hatching sum to the same number, so the rule reaches the optimum. With *one* draft, no rule that
# keeps the target's distribution can keep more drafts. With several drafts in a row there are better rules, such as
# block verification.

# %% [markdown]
# ### Exercise 03-2
#
# Write `residual`. It returns the distribution of the token that replaces a rejected draft, as a list of fractions that
# sum to 1. If target and drafter agree on every token, no draft is ever rejected; return the target's distribution
# then.
#
# Hint: token x must have probability p(x) in the end. Kept drafts already give it min(p(x), q(x)).


# %%
def residual(target_prob: list[Fraction], draft_prob: list[Fraction]) -> list[Fraction]:
    """Compute the distribution of the token that replaces a rejected draft; p itself if no draft is ever rejected."""
    raise NotImplementedError("your answer")


# %%
specsim.course.check("03-2", residual)

# %% [markdown]
# ## The proof, by listing every case
#
# Why is the result exactly p? There is a short proof. Kept drafts give token x with probability min(p(x), q(x)). A
# draft is rejected with probability 1 − Σ min(p, q), which is the same number as Σ max(p − q, 0). The replacement is x
# with probability max(p(x) − q(x), 0), divided by this sum. The sum cancels, and
#
# min(p(x), q(x)) + max(p(x) − q(x), 0) = p(x).
#
# But does the *code* follow this rule? We check it in the same way, without drawing a single random number. The code
# reads a draft and two uniforms: one decides whether the draft is kept, the other one chooses the token after it. Its
# result can change only at a few values of the uniforms. Between them it is constant, so one call in every region is
# enough. The sum of the regions' volumes is an exact probability.
#
# `draws` lists the drafts. `joint_regions` lists the regions, and calls the function that the reference engine runs. A
# kept draft is followed by one more token, drawn from the target, so some texts have two tokens.

# %%
drafted = list(draws(one_draft))
regions = joint_regions(REJECTION, drafted, reference(REJECTION))
outcomes = reference(REJECTION)(drafted, [region.trials[0] for region in regions])
first_token = [Fraction(0)] * 3
for region, (path, bonus) in zip(regions, outcomes, strict=True):
    draft = drafted[region.draw].tokens[1]
    is_kept = len(path) > 1
    first_token[draft if is_kept else bonus] += region.volume
    text = f"{tokens[draft]} {tokens[bonus]}" if is_kept else tokens[bonus]
    print(f"draft {tokens[draft]}: probability {region.volume!s:6} {'kept    ' if is_kept else 'replaced'} → {text}")
print("first token:", ", ".join(f"{token} {prob}" for token, prob in zip(tokens, first_token, strict=True)))
assert first_token == target_prob

# %% [markdown]
# * Find the rows that begin with `draft dog` and say `kept`. What is the sum of their probabilities?
# * Which row is the hatched area of `owl`?
#
# The last line is p, to the last digit. There is no sample, no tolerance and no "almost".
#
# Real drafts come in chains: the drafter proposes several tokens, and each has its own p and q, which depend on the
# tokens before it. The first rejected draft ends the chain. `certify` does the same enumeration for chains of two and
# three drafts, with a target that depends on the context. It also prints the optimum.

# %%
certify("rejection").show(stdout_console())

# %% [markdown]
# * The distance is 0 in every row: the rule is *lossless*.
# * In the first table the gap is not 0. For chains, token-by-token rejection keeps fewer drafts than possible.
#
# ## A wrong rule that looks fine
#
# Could we do without the uniform? Here is such a rule, known from the trace reference of FlashInfer: keep the draft
# whenever the target likes it at least as much as the drafter does, that is, if p(x) ≥ q(x). Else replace it from the
# residual distribution, as before. It keeps only drafts that the target likes. What could go wrong?
#
# Let the shipped pair write some code with both rules.

# %%
pair = specsim.load()
wrong_rule = AcceptanceRule("at least", "sampled", at_least)
chain = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, verifier="rejection")
sampling = SamplingParams(temperature=0.8, max_new_tokens=40, seed=7)
for rule in (None, wrong_rule):
    generation = specsim.generate(pair, "def read(path):", chain, sampling, verifier=rule)
    print(f"--- {rule or 'rejection'}: accept length {generation.acceptance.accept_length:.2f}")
    print(generation.outputs[0].text)

# %% [markdown]
# Can you tell which text is wrong? Neither can a reviewer, and a benchmark of answers may not notice either.
#
# ### Prediction
#
# Back to `owl`, `cat` and `dog`. The target writes `dog` in 125 of 1000 rounds. How often does the wrong rule?

# %%
guess = specsim.course.predict("Of 1000 tokens, how many are `dog` with the wrong rule?", 125, at_least=20)
guess

# %%
found = rule_distribution(wrong_rule, one_draft).exact
wrong_prob = [sum(prob for text, prob in found.text_probs.items() if text[0] == token) for token in range(3)]
guess.score(1000 * wrong_prob[tokens.index("dog")])

# %%
plots.distributions({"target p": target_prob, "the wrong rule": wrong_prob}, tokens)

# %% [markdown]
# The token that the drafter likes too much never comes out. As a draft it is always rejected, and as a replacement it
# has no weight. The difference to the target has a name: the *total variation distance*, half the sum of all absolute
# differences. It is the largest error in the probability of any event.

# %%
print("distance:", sum(abs(p - wrong) for p, wrong in zip(target_prob, wrong_prob, strict=True)) / 2)
refuted = certify_rules([wrong_rule])
print("refuted:", *islice(refuted.failures, 3), sep="\n  ")
print("counterexample:", next(row.counterexample for row in refuted.rows if row.counterexample))

# %% [markdown]
# A counterexample is worth more than a suspicion: it names the models, the draft and the probability that is wrong.
#
# Now it is your turn. `inverse_cdf` draws a token from weights: it divides the line from 0 to 1 into parts of these
# sizes, and returns the part in which the uniform lies.

# %%
weights = torch.tensor([2.0, 1.0, 0.0])
[tokens[inverse_cdf(weights, uniform)] for uniform in (0.1, 0.6, 0.7, 0.9)]

# %% [markdown]
# ### Exercise 03-3
#
# Write the rule itself, for one draft. Two independent uniforms decide: the first whether the draft is kept, the second
# which token replaces it. `inverse_cdf(weights, uniform)` draws a token; the weights need not sum to 1. For the
# residual's weights you may write `(target_prob - draft_prob).clamp(min=0)`.
#
# The check enumerates your rule exactly. Its distance from the target's distribution must be 0, and no such rule may
# keep more drafts than yours. It passes exact numbers in place of floats, so compute with the values as they are,
# without `float(...)` or `torch.tensor(...)`.


# %%
def keep_or_replace(
    token: int, target_prob: torch.Tensor, draft_prob: torch.Tensor, uniform: float, final_uniform: float
) -> tuple[bool, int]:
    """Decide one draft: return whether it is kept, and the token that the round gives.

    The distributions are tensors; uniform and final_uniform are independent.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("03-3", keep_or_replace)

# %% [markdown]
# * **Try** your own wrong rules: use the same uniform twice, draw the replacement from p, keep every draft. Which of
#   them changes the distribution only a little?
# * A rule that never keeps a draft is lossless. What does the check say about it, and why?
#
# ## Your predictions

# %%
specsim.course.scores()

# %% [markdown]
# ## What to remember
#
# * Keep a draft x with probability min(1, p(x) / q(x)). Replace a rejected draft from max(p − q, 0).
# * The output has exactly the distribution p, whatever the drafter proposes. A bad drafter costs time, not quality.
# * The share of kept drafts is Σ min(p, q), the overlap of both distributions.
# * Text that looks good proves nothing. An enumeration of a small case proves or refutes a rule in a second.
#
# The rule was published twice at about the same time: [Leviathan, Kalman and Matias](https://arxiv.org/abs/2211.17192)
# and [Chen et al.](https://arxiv.org/abs/2302.01318). `specsim/reference/acceptance.py` has it in ten lines, in the
# function `rejection`.
