# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Verification: seven rules
#
# * **Goal:** You can say how each of seven verifiers decides, which of them keep the target's distribution, and how you
#   would notice one that does not: by a proof, and by a test of samples.
# * **Before:** Notebooks 03 and 05. What a standard error is.
# * **Time:** 60 minutes to work through, 20 seconds to run. No GPU.
#
# After the target's pass there is a tree of drafts, and the target's distribution after every node. A *verifier*
# decides from these which path is kept, and which token follows it. Notebook 03 had one such rule, for one draft.
# Engines have more, since drafts come in different ways:
#
# | verifier | drafts | decides by | lossless |
# |---|---|---|---|
# | greedy | any tree | equality with the target's best token | at temperature 0 |
# | target-only | the drafter's best tokens, any tree | a draw from the target | yes |
# | rejection | one drawn chain | p / q, token by token | yes |
# | block | one drawn chain | p / q of the whole chain | yes |
# | multi-round | several drawn siblings | p / q, sibling by sibling | yes |
# | Gumbel | one drawn chain | the same random numbers on both sides | yes |
# | typical | the drafter's best tokens, any tree | a threshold on p | **no** |
#
# *Lossless* means that the output has exactly the distribution of the target alone.

# %%
from fractions import Fraction

import torch

import specsim
from specsim import AcceptanceRule, SamplingParams, SpecConfig, plots
from specsim.correctness.exact import certify
from specsim.correctness.exact.breakpoints import BLOCK, MULTI_ROUND, REJECTION, TARGET_ONLY, TYPICAL
from specsim.correctness.exact.breakpoints import target_only as target_only_with
from specsim.correctness.exact.cases import ExactCase, ExactModel, draws
from specsim.correctness.exact.distribution import exact_distribution
from specsim.correctness.exact.implementations import reference
from specsim.correctness.exact.optimum import optimum
from specsim.correctness.exact.race import GUMBEL
from specsim.correctness.exact.verifier import DraftedTree
from specsim.correctness.statistics import run_sampling_tests
from specsim.reference import acceptance
from specsim.reference.sampling import inverse_cdf

tokens = ["owl", "cat", "dog"]
target, drafter = ExactModel(((5, 2, 1),)), ExactModel(((3, 1, 4),))  # probabilities in eighths, as in notebook 03

# %% [markdown]
# ## Greedy
#
# At temperature 0 the target has one right token after each node. The verifier starts at the root and follows the child
# with this token, as long as there is one. Notebook 01 did it. There is nothing random, so the output must be equal to
# plain decoding, token by token.
#
# ## Target-only: the drafts are given
#
# EAGLE's tree holds the drafter's *best* tokens. They are not drawn, so there is no q. But the target's token can be
# drawn, and compared with the children. The rule does both in one step.
#
# Suppose that the drafts `cat` and `dog` are given. Their probabilities under the target lie side by side on the line
# from 0 to 1: `cat` from 0 to 2/8, `dog` from 2/8 to 3/8. One uniform decides. If it lies in a draft's part, this draft
# is accepted. If it lies beyond them, the token is drawn from the target without `cat` and `dog`.
#
# In the next cell, `accept` receives the tree, a uniform for each depth, and a last uniform for the token that follows
# the accepted drafts. Only the first one changes.

# %%
given = ExactCase("cat and dog given", target, drafter, parents=(-1, 0, 0), tokens=(1, 2))
(drafted,) = draws(given)
for uniform in (0.1, 0.2, 0.3, 0.4, 0.9):
    path, bonus = TARGET_ONLY.accept(DraftedTree.of(drafted), [uniform, 0.5], 0.5)
    print(f"uniform {uniform}:", f"accepts {tokens[drafted.tokens[path[1]]]}" if path[1:] else f"draws {tokens[bonus]}")

# %% [markdown]
# The siblings share the uniform. That is right here and only here: their parts do not overlap. In notebook 03 you saw
# an exact enumeration. `exact_distribution` does it for any verifier and any small case.

# %%
found = exact_distribution(TARGET_ONLY, given, reference(TARGET_ONLY))
print("distance from the target:", found.total_variation(given))
print("accepted drafts:", found.accepted, " most that a lossless rule can accept:", optimum(given))

# %% [markdown]
# * The accepted share is p(cat) + p(dog). Why can no lossless rule accept more of *given* drafts?
# * A better drafter gives better drafts. Does the rule have to know how good they are?
#
# A draw from the target without some tokens is a draw with weights, some of them 0:

# %%
without_cat = torch.tensor([5.0, 0.0, 1.0])
[tokens[inverse_cdf(without_cat, uniform)] for uniform in (0.1, 0.5, 0.9)]

# %% [markdown]
# ### Exercise 06-1
#
# Write `sample_with_drafts`: target-only sampling at one node. The drafts are given, all of them different. Return
# whether one of them is accepted, and the token: the accepted draft, or else the token that is drawn in its place.
#
# Lay the drafts' probabilities p side by side, in order, on the line from 0 to 1. The draft in whose part `uniform`
# lies is accepted. If it lies in no part, draw from the target without the drafts. `inverse_cdf(weights, uniform)`
# draws a token; the weights need not sum to 1. Copy a tensor with `.clone()` before you set an entry to 0.
#
# The check enumerates your rule exactly. It passes exact numbers in place of floats, so do not write `float(...)` or
# `torch.tensor(...)`.


# %%
def sample_with_drafts(
    drafts: list[int], target_prob: torch.Tensor, uniform: float, final_uniform: float
) -> tuple[bool, int]:
    """Draw the next token from the target: return whether it is one of the drafts, and the token.

    uniform and final_uniform are independent.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("06-1", sample_with_drafts)

# %% [markdown]
# `specsim.course.solution("06-1")` shows a solution.
#
# ## Rejection and block: drawn chains
#
# Drafts that are drawn from q carry more information: the verifier knows how often a token is proposed. Notebook 03
# showed that a *single* draft is kept with probability min(1, p / q), and that no lossless rule keeps more. For a chain
# one can do this token by token. Is that the best, too?
#
# Take two tokens, A and B. The target gives them 1/3 and 2/3, and the drafter 2/3 and 1/3, at every place. The drafter
# proposes chains of two.
#
# ### Prediction
#
# Token by token, 1,111 drafts are kept in 1,000 rounds.

# %%
guess = specsim.course.predict("How many drafts does the best lossless rule keep in 1,000 rounds?", 1111, within=0.02)
guess

# %%
chain = ExactCase("a chain of 2", ExactModel(((1, 2),)), ExactModel(((2, 1),)), parents=(-1, 0, 1))
for verifier in (REJECTION, BLOCK):
    found = exact_distribution(verifier, chain, reference(verifier))
    print(
        f"{verifier.name:9} keeps {float(found.accepted):.3f} drafts a round, distance {found.total_variation(chain)}"
    )
guess.score(1000 * optimum(chain))

# %% [markdown]
# Block verification reaches the optimum. How? Look at the draft `A B`. The drafter writes it with probability 2/3 ·
# 1/3, and the target with 1/3 · 2/3. That is equal, so the *pair* could always be kept. But rejection looks at `A`
# first, which is proposed too often, and throws half of them away. At `B` the ratio is 2, and one half of it is lost.
#
# Block verification multiplies the ratios along the chain, each time capped at 1, and decides from the end. The longest
# prefix that passes is kept.

# %%
pair_ab = next(each for each in draws(chain) if each.tokens[1:] == (0, 1))
for verifier in (REJECTION, BLOCK):
    path, bonus = verifier.accept(DraftedTree.of(pair_ab), [0.7, 0.7], 0.5)
    drafts = " ".join("AB"[token] for token in pair_ab.tokens[1:])
    print(f"{verifier.name:9} with uniforms 0.7 and 0.7 keeps {len(path) - 1} of {drafts}, then writes {'AB'[bonus]}")

# %% [markdown]
# * Try it by hand: which uniforms make rejection keep both?
# * **Try** the pair `A A`, tokens `(0, 0)`, with several uniforms. Is there a pair for which block keeps less than
#   rejection? On average it never does.
#
# ## Multi-round: drawn siblings
#
# Now the drafter draws *several* tokens for the same place, each independently from q. If the first is rejected, the
# second is tried. But after a rejection the target is no longer p: what is still missing is the residual distribution.
# So each sibling faces a new target, and needs a new uniform.

# %%
siblings = ExactCase("two drawn siblings", target, drafter, parents=(-1, 0, 0))
one_draft = ExactCase("one draft", target, drafter, parents=(-1, 0))
for verifier, case in ((REJECTION, one_draft), (MULTI_ROUND, siblings)):
    found = exact_distribution(verifier, case, reference(verifier))
    line = f"{verifier.name:11} of {case.name:18}: keeps {found.accepted}, at most {optimum(case)}"
    print(line, f"possible, distance {found.total_variation(case)}")

# %% [markdown]
# * How much does the second sibling add? Why less than the first?
# * With siblings the best rule keeps more than multi-round verification. For one draft there is no gap.

# %% [markdown]
# ### Exercise 06-2
#
# Write `try_siblings`: multi-round verification at one node. The drafts were drawn independently from the drafter's
# distribution, so two of them may be equal. Try them in order. Each is accepted as in notebook 03, but after a
# rejection the target's distribution p is replaced by its residual distribution max(p − q, 0), *normalised*, and the
# next draft is compared with this. If none is accepted, draw the token from the last residual distribution.
#
# Return whether a draft is accepted, and the token. Each draft has a uniform of its own. The check enumerates your rule
# exactly, as in Exercise 06-1.


# %%
def try_siblings(
    drafts: list[int],
    target_prob: torch.Tensor,
    draft_prob: torch.Tensor,
    uniforms: list[float],
    final_uniform: float,
) -> tuple[bool, int]:
    """Verify siblings drawn independently from draft_prob: return whether one is accepted, and the token.

    uniforms: one for each draft, independent of each other and of final_uniform.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("06-2", try_siblings)

# %% [markdown]
# ## Gumbel: the same random numbers on both sides
#
# There is another way to draw from a distribution: add random noise to the logarithm of every probability, and take the
# largest sum. With noise of the right kind, *Gumbel noise*, token x comes out with probability p(x). So the target's
# draw is an argmax, and so is the drafter's. Let both use the *same* noise. Then they often choose the same token,
# although neither knows the other's distribution. Verification is greedy again: a draft is kept if it is the target's
# token.
#
# ### Prediction
#
# With independent random numbers, target and drafter would draw the same token in Σ p · q = 328 of 1,000 cases.

# %%
guess = specsim.course.predict("With the same noise, in how many of 1,000 cases do both draw the same token?", 328)
guess

# %%
found = exact_distribution(GUMBEL, one_draft, reference(GUMBEL))
print(
    "Gumbel keeps",
    found.accepted,
    "and rejection",
    exact_distribution(REJECTION, one_draft, reference(REJECTION)).accepted,
)
guess.score(1000 * found.accepted)

# %% [markdown]
# It is a little less than the optimum of 5/8. But there is something in return: the text does not depend on the drafts
# at all. Here two different settings write the same text.

# %%
pair = specsim.load()
sampling = SamplingParams(temperature=0.8, max_new_tokens=40, seed=7)
texts = []
for num_steps in (1, 3):
    config = SpecConfig(topk=1, num_steps=num_steps, verifier="gumbel")
    generation = specsim.generate(pair, "def read(path):", config, sampling)
    texts.append(generation.outputs[0].text)
    print(f"chains of {num_steps}: {generation.acceptance.accept_length:.2f} tokens a round")
print("equal texts:", texts[0] == texts[1])
print(texts[0])

# %% [markdown]
# * **Try** `verifier="rejection"`. The texts differ, and both are right. Why?
#
# ## Typical acceptance, and thresholds
#
# Medusa's rule asks for less. A draft passes if the target finds it likely enough: p(x) above a threshold, which is
# lower where the target is unsure. No draw is made. SGLang's target-only rule has thresholds too. At 1, the default,
# they do nothing. Below 1 they accept more: with `threshold_acc=0.5`, every draft's part of the line is twice as long.
#
# Let us see what comes out for the given drafts `cat` and `dog`. The target writes `owl` five times out of eight.

# %%
half = target_only_with(Fraction(1), Fraction(1, 2))
first_token = {"target p": list(target(()))}
for name, verifier in (("target-only", TARGET_ONLY), ("threshold 0.5", half), ("typical", TYPICAL)):
    found = exact_distribution(verifier, given, reference(verifier)).text_probs
    first_token[name] = [sum(prob for text, prob in found.items() if text[0] == token) for token in range(3)]
assert first_token["target-only"] == first_token["target p"]
plots.distributions(first_token, tokens)

# %% [markdown]
# * Typical acceptance always writes `cat`, because it was drafted and passes. What would it write if `owl` was drafted?
# * So the output now depends on the drafter. Whose text is it then?
#
# This is not forbidden. The text may even be good. But it is another model's text, and whoever turns it on should know.
#
# ## All rules, proven
#
# `certify` runs the enumeration for all verifiers, on cases with chains, trees and limits. For each rule the next cell
# shows the largest distance over its cases, and the accepted drafts compared with the optimum.

# %%
rows = [row for row in certify().rows if row.promise != "wrong"]
for name in dict.fromkeys(row.verifier for row in rows):
    own = [row for row in rows if row.verifier == name]
    distance = max(row.total_variation for row in own)
    share = sum(row.accepted for row in own) / sum(row.optimum for row in own)
    kept = f"accepts {float(share):4.0%} of the optimum" if distance == 0 else "not lossless"
    print(f"{name:29} {len(own)} cases, largest distance {float(distance):.4f}: {kept}")

# %% [markdown]
# * Which rule for drawn chains would you choose? What does it cost more than the others?
# * A lossy rule has no share of the optimum here, although it accepts more. Why would the number mislead?
#
# ## How would you notice?
#
# A proof needs the rule as a function. If all that you have is an engine, you can only look at its output.

# %%
typical = AcceptanceRule(
    "typical",
    "best",
    lambda tree, p, _q, _uniforms, final: acceptance.typical(tree, p, final, 0.09, 0.3),  # Medusa's two settings
    lossless=False,
)
for rule in (None, typical):
    config = SpecConfig(topk=4, num_steps=3, num_draft_tokens=8)
    generation = specsim.generate(pair, "def read(path):", config, sampling, verifier=rule)
    print(f"--- {rule or 'target-only'}: accept length {generation.acceptance.accept_length:.2f}")
    print(generation.outputs[0].text)

# %% [markdown]
# Both texts look fine, and the lossy rule is faster. A benchmark of answers would praise it. What helps is a target
# whose distribution is *known*, and a count. `run_sampling_tests` has a target with 16 tokens, in which each token
# depends on the two before it. It runs a whole engine, and compares the tokens with their known distributions. There
# are six tests, one for each setting of temperature, top-k and so on.
#
# The result of a test is a bound p: a correct engine gives a value as small as this with a probability of at most p.
#
# ### Prediction
#
# We give it only about 100 tokens for each of the six settings. Typical acceptance runs in the engine.

# %%
guess = specsim.course.predict("How many of the six tests reject typical acceptance?", 1, at_least=1)
guess

# %%
tests = run_sampling_tests(typical, tokens=600)
for row in tests.rows:
    print(
        f"{row.sampling:15} {row.tokens} tokens, p at most {row.p_value:.0e}: {'rejected' if row.is_rejected else '-'}"
    )
assert f"{tests.rows[0].bound:.1e}" == "1.7e-07"
guess.score(sum(row.is_rejected for row in tests.rows))

# %% [markdown]
# A distribution is rejected where p is below 1.7e-07, so that a correct engine almost never fails. Does the right rule
# pass? And what about a rule that is only a little wrong, target-only with a threshold of 0.9?

# %%
slightly = AcceptanceRule(
    "threshold 0.9", "best", lambda tree, p, _q, u, final: acceptance.target_only(tree, p, u, final, 1.0, 0.9)
)
for rule in ("target_only", slightly):
    tests = run_sampling_tests(rule, tokens=600)
    print(f"{rule}: {sum(row.is_rejected for row in tests.rows)} of {len(tests.rows)} tests reject it")

# %% [markdown]
# The slightly wrong rule passes! With so few tokens the test cannot see it. **A test that does not reject proves
# nothing**, unless you know what it could have seen. `specsim sampling-test` prints that in the column *detects*. The
# exact enumeration sees the error at once:

# %%
slight = target_only_with(Fraction(1), Fraction(9, 10))
found = exact_distribution(slight, given, reference(slight))
print("distance of the rule with threshold 0.9:", found.total_variation(given))
assert found.total_variation(given) > 0

# %% [markdown]
# How many tokens would a test need? The last exercise gives a rule of thumb.

# %% [markdown]
# ### Exercise 06-3
#
# Write `tokens_needed`. A lossless rule gives some token with probability p, `prob`. A wrong rule gives it with
# `wrong_prob`. We count the token among n tokens. Return the smallest n for which the expected count under the wrong
# rule differs from n · p by at least `errors` standard errors of the count under p.
#
# Hint: the standard error of such a count is √(n · p · (1 − p)). Solve for n, and round up.


# %%
def tokens_needed(prob: float, wrong_prob: float, errors: float) -> int:
    """Compute the number of tokens after which a wrong probability is expected to be `errors` standard errors off."""
    raise NotImplementedError("your answer")


# %%
specsim.course.check("06-3", tokens_needed)

# %% [markdown]
# * By how much does the number grow if the error is half as large?
# * **Try** `tokens_needed(1 / 8, 5 / 36, 5)`: `dog` under the threshold of 0.9.
#
# ## Your predictions

# %%
specsim.course.scores()

# %% [markdown]
# ## What to remember
#
# * Given drafts: draw from the target, and see whether it is a draft. Drawn drafts: compare p with q.
# * After each rejection the target is the residual distribution. One uniform may decide once, with one exception: the
#   siblings of given drafts, whose parts do not overlap.
# * Block verification never keeps less than rejection on average. Gumbel keeps a little less than the optimum for one
#   draft, and its text does not depend on the drafter.
# * Typical acceptance and thresholds below 1 are faster because they write another distribution.
# * Prove the rule, test the engine, and say how small an error the test would have seen.
#
# Papers: [rejection](https://arxiv.org/abs/2211.17192), [multi-round](https://arxiv.org/abs/2305.09781),
# [block](https://arxiv.org/abs/2403.10444), [Gumbel coupling](https://arxiv.org/abs/2408.07978),
# [typical](https://arxiv.org/abs/2401.10774). All seven rules are in `specsim/reference/acceptance.py`, and
# `papers/leaderboard.md` compares them. `specsim certify` and `specsim sampling-test` are the commands.
