# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Bring your own
#
# * **Goal:** You can run an acceptance rule, a drafter and a kernel of your own in the package, and have each of them
#   proved or refuted. You know which errors no sample of text shows.
# * **Before:** Notebooks 01, 03 and 06.
# * **Time:** 60 minutes to work through, 15 seconds to run. No GPU.
#
# You have an idea for a better rule, a cheaper drafter or a faster kernel. It runs, and the text looks good. Is it
# right? For each of the three, the question means something else:
#
# * A **rule** must keep the target's distribution. An enumeration proves it.
# * A **drafter** of tokens may propose anything. It can only be slow, but not wrong.
# * A **kernel** must do exactly what its callers expect, to the last tie and the last padded row. A contract has the
#   cases.

# %%
from collections.abc import Sequence
from types import SimpleNamespace

import torch

import specsim
from specsim import AcceptanceRule, Accepted, NgramConfig, Proposal, SamplingParams, SpecConfig, TreeLimits, plots
from specsim.core.rule import Tree
from specsim.correctness.conformance.contract import BY_NAME
from specsim.correctness.conformance.runner import CASES, call
from specsim.correctness.exact import certify_rules
from specsim.correctness.exact.cases import RULE_CASES, draws, text_prob
from specsim.correctness.exact.rule_distribution import rule_distribution
from specsim.correctness.exact.verifier import DraftedTree
from specsim.correctness.wrong_rules import shared_uniform
from specsim.reference.sampling import inverse_cdf

# %% [markdown]
# ## A rule that looks right
#
# In Exercise 03-3 you wrote a rule for one draft. Here is somebody's rule for a chain. It keeps draft x if u · q(x) <
# p(x), draws the replacement from the residual distribution, and stops at the first rejected draft. It contains one
# economy: the same uniform u decides about all drafts of a round. An `AcceptanceRule` gives it a name, and says which
# drafts it verifies: here `sampled`, that is, drawn from the drafter's distribution.

# %%
rule = AcceptanceRule("shared uniform", "sampled", shared_uniform)
pair = specsim.load()
chain = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4, verifier="rejection")
sampling = SamplingParams(temperature=0.8, max_new_tokens=40, seed=7)
for verifier in (None, rule):
    generation = specsim.generate(pair, "def read(path):", chain, sampling, verifier=verifier)
    print(f"--- {verifier or 'rejection'}: accept length {generation.acceptance.accept_length:.2f}")
    print(generation.outputs[0].text)

# %% [markdown]
# Its text is no worse, and its accept length is even higher. Whoever tests it on single drafts finds no error either,
# because with one draft it *is* the right rule.
#
# The package has 15 cases for rules of this kind: one to three drafts, ordinary models and degenerate ones. On each it
# enumerates every draft and every region of the uniforms, in fractions.
#
# ### Prediction
#
# The rule is right for one draft. Some cases have one draft, or a length limit that leaves room for one or none.

# %%
guess = specsim.course.predict("In how many of the 15 cases is the distribution wrong?", 12)
guess

# %%
certificates = certify_rules([rule])
assert len(certificates.rows) == 15
for row in certificates.rows:
    note = "more than any lossless rule" if row.accepted > row.optimum else ""
    print(f"{row.case:48} distance {row.total_variation!s:5} accepted {row.accepted!s:6} {note}")
guess.score(sum(row.total_variation > 0 for row in certificates.rows))

# %% [markdown]
# * Which cases show the error? What do they have in common?
# * `target = drafter` is a chain of 2, and still right. Why?
# * In two cases the rule accepts more drafts than the optimum of all lossless rules. Why is this alone a refutation?
#
# How far would a simpler test get? The next picture has the case `2 tokens, a chain of 2`, with tokens `a` and `b`. It
# shows the first two tokens of the text.

# %%
case = next(each for each in RULE_CASES["sampled"] if each.name == "2 tokens, a chain of 2")
found = rule_distribution(rule, case).exact.text_probs
target = {text: text_prob(case.target, text) for text in found}
pairs = {"aa": (0, 0), "ab": (0, 1), "ba": (1, 0), "bb": (1, 1)}
shown = {
    name: [sum(prob for text, prob in probs.items() if text[:2] == start) for start in pairs.values()]
    for name, probs in (("target p", target), ("shared uniform", found))
}
plots.distributions(shown, [*pairs], kind="text")

# %% [markdown]
# Let us count single tokens, as a quick test would do.

# %%
for place in range(3):
    one, other = (sum(probs[text] for text in found if text[place] == 0) for probs in (target, found))
    print(f"token {place + 1} is `a` with probability {one} in the target, {other} with the rule")

# %% [markdown]
# * The first token is right, and so is the third. What would a test of the first token of many rounds report?
# * An accepted first draft `a` says that u was small. Find in the picture which text then comes out too often.
# * The counterexample names the models, the drafts and the region of the uniform. Check one of its numbers by hand:

# %%
print(next(row.counterexample for row in certificates.rows if row.counterexample))

# %% [markdown]
# ## Your rule
#
# A rule is a function of a request's tree, the distributions and the uniforms. It returns the accepted path and the
# token after it. Here is what one call receives, in a case with drafts that were chosen and not drawn (`best`):

# %%
case = next(each for each in RULE_CASES["best"] if each.name == "4 tokens, a given tree of 6 drafts")
given = DraftedTree.of(next(iter(draws(case))))
print("tokens of the nodes: ", given.tree.tokens, " (the root's does not matter)")
print("parents of the nodes:", given.tree.parents)
print("children of the root:", list(given.tree.acceptable_children([0])))
print("target after the root:  ", given.prob_NV[0].tolist())
print("a token drawn from it:  ", inverse_cdf(given.prob_NV[0], 0.7))

# %% [markdown]
# The root has depth 0, its children have depth 1. `uniforms[d]` belongs to the nodes of depth d, also to those without
# children, and `final_uniform` is one more. All of them are independent. A *path* is a list of nodes that begins with
# the root, 0.

# %% [markdown]
# ### Exercise 15-1
#
# Write `follow`, a rule for drafts that were not drawn, but chosen: the drafter's best tokens. Begin at the root, node
# 0. At a node of depth d, draw the target's token with `inverse_cdf(prob_NV[node], uniforms[d])`. If an acceptable
# child holds this token, go on there. Otherwise the round ends with it. Return `Accepted(path, bonus)`: the nodes from
# the root on, and the token after them.
#
# The check enumerates your rule on cases of `certify`. Its distance from the target must be 0, and it must accept as
# many drafts as this description allows.
#
# Hint: a node may have several children. `tree.acceptable_children(path)` lists those children of the path's last node
# that the length limit of the request allows. `tree.tokens[child]` is the token of a child.


# %%
def follow(
    tree: Tree, prob_NV: torch.Tensor, draft_prob_NV: None, uniforms: list[float], final_uniform: float
) -> Accepted:
    """Draw the target's token after every node of the path, and follow the draft that equals it.

    prob_NV: the target's distribution after every node. draft_prob_NV: None, as the drafts were not drawn.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("15-1", follow)

# %% [markdown]
# `specsim.course.solution("15-1")` shows a solution.
#
# The check's wrong answers are stored with the exercise. The next cell has them certified, so that you see how well
# each one hides.

# %%
for number, mistake in enumerate(specsim.course.exercise("15-1").mistakes, start=1):
    certificates = certify_rules([AcceptanceRule(f"wrong answer {number}", "best", mistake.answer)])
    wrong = [row for row in certificates.rows if row.total_variation > 0]
    accepted = sum(float(row.accepted) for row in certificates.rows)
    ended = ", then a path that is impossible" if certificates.inconsistent else ""
    print(f"{number}: wrong in {len(wrong)} of {len(certificates.rows)} cases, {accepted:.2f} drafts accepted{ended}")

# %% [markdown]
# * Numbers 3 and 6 are lossless everywhere. What is wrong with them? Which figure shows it?
# * Number 4 is right until a request ends. Which kind of test would never reach that case?
# * **Try** `certify_rules([AcceptanceRule("mine", "best", follow)]).failures` with your own rule; the result must be
#   empty. In a file `my_rule.py` with `rule = AcceptanceRule(…)`, the command is `specsim certify --module
#   my_rule.py:rule`. `specsim.generate(…, verifier=rule)` runs it in both implementations.
#
# The certificate covers rules that compare, add, multiply and divide the numbers as they are given. After `float(…)` or
# a logarithm nothing is claimed, and a *sampling test* of whole engines takes its place (`specsim sampling-test
# --rule`).
#
# ## Your drafter
#
# A drafter that sees tokens only is an object with two methods. `propose` returns candidates below the root, and
# `finish` receives the text of a request that has ended. The engine verifies whatever is proposed. Prompt lookup is
# such a drafter: it proposes what followed the last few tokens when they occurred before.

# %%
prompt = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n"
chain = SpecConfig(topk=1, num_steps=4)
greedy = SamplingParams(max_new_tokens=60)
plain = specsim.generate(pair, prompt, SpecConfig.plain(), greedy)
lookup = specsim.generate(pair, prompt, chain, greedy, drafter=NgramConfig())
print(f"tokens equal to plain decoding: {lookup.outputs[0].token_ids == plain.outputs[0].token_ids}")
print(f"accept length {lookup.acceptance.accept_length:.2f}, without any draft model")

# %% [markdown]
# ### Exercise 15-2
#
# Write `propose`, the method of a token drafter. It receives the tokens of a request so far. Find the latest earlier
# place that has the same two tokens as the end of the text, and propose the tokens that followed it there, as a chain.
# Without such a place, return an empty proposal: `Proposal([], [], [])`.
#
# `Proposal(tokens, parents, scores)` lists the drafts below the root. A parent is the index of an earlier draft, or −1
# for the root. Give every draft the score 1. Propose at most `limits.max_depth` drafts, and at most `limits.max_nodes`.
#
# Hint: the last two tokens of the text are not an earlier place.


# %%
def propose(request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
    """Propose a chain: the tokens that followed the latest earlier occurrence of the last two tokens.

    tokens: prompt and output so far; the last one is the root. limits: max_depth, max_nodes and topk of the tree.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("15-2", propose)

# %% [markdown]
# To run your own, make an object of it: `SimpleNamespace(propose=propose, finish=lambda *_: None)`.
#
# ### Prediction
#
# The most usual mistake is to be one place off: the drafter proposes the tokens in the right order, but begins one
# token too early. Such a drafter is stored as a wrong answer of the exercise. Every one of its chains begins with a
# wrong draft, unless the text repeats a token. So nearly all of its drafts are nonsense.

# %%
guess = specsim.course.predict("How many of the 60 tokens differ from plain decoding?", 15, at_least=0.5)
guess

# %%
one_place_off = SimpleNamespace(propose=specsim.course.exercise("15-2").mistakes[0].answer, finish=lambda *_: None)
wrong = specsim.generate(pair, prompt, chain, greedy, drafter=one_place_off)
tokens = zip(wrong.outputs[0].token_ids, plain.outputs[0].token_ids, strict=True)
guess.score(sum(one != other for one, other in tokens))

# %% [markdown]
# No test of the output can find this mistake, since verification repairs it. What shows it is acceptance. (A drafter
# that draws its drafts has one duty more: the distribution that it reports must be the one that it drew from, because
# the rule computes with it.)

# %%
plots.acceptance({"prompt lookup": lookup.acceptance, "one place off": wrong.acceptance})

# %% [markdown]
# * The number at a line is its accept length. How many target passes did each of the two need for 60 tokens?
# * Your drafter has an accept length of 1.3, and the paper says 3. Which of your tests would have caught a shift by
#   one?
# * **Try** your own drafter on this prompt. Is it better than prompt lookup with up to four tokens? In a file, it is
#   `specsim generate --drafter my_drafter.py:MyDrafter`, and `specsim accept` measures it on the shipped prompts.
#
# The engine does check the form of a proposal: limits, parents, distinct siblings. The next cell proposes a token that
# the target does not have.

# %%
beyond = SimpleNamespace(propose=lambda *_: Proposal([10**6], [-1], [1.0]), finish=lambda *_: None)
try:
    specsim.generate(pair, prompt, chain, greedy, drafter=beyond)
except specsim.InputError as error:
    print(error)

# %% [markdown]
# ## Your kernel
#
# A kernel replaces one operation of a round. Its caller relies on a convention: the order of arguments, what is written
# where, what happens to ties, padding and empty batches. The package writes it down as a *contract*, with cases for
# each of 13 operations. The function names are those of SGLang and vLLM, so that their kernels can be tested as they
# are.
#
# The first operation of the contract is the drafter's top-k. `torch.topk` has the right signature. Does it conform?
#
# ### Prediction

# %%
cpu = torch.device("cpu")
cases = [each for each in CASES if each.operation == "draft_topk"]
print(BY_NAME["draft_topk"].summary)
print(f"{len(cases)} cases:", ", ".join(each.name for each in cases))

# %%
guess = specsim.course.predict("How many of the ten cases does torch.topk pass?", 10)
guess

# %%
outcomes = [call(torch.topk, each, cpu) for each in cases]
assert (len(outcomes), len(BY_NAME)) == (10, 13)
for outcome in outcomes:
    if not outcome.passed:
        print(f"{outcome.case}: {outcome.detail}")
guess.score(sum(outcome.passed for outcome in outcomes))

# %% [markdown]
# * What do the failed cases have in common? `torch.topk` is not wrong by its own documentation: it promises no order
#   among equal values.
# * Two GPUs draft different trees for the same text. Is the output still right? What has become impossible?
#
# Now a kernel with more to get wrong. It is the greedy verification of a tree, as SGLang calls it.

# %%
operation = BY_NAME["verify_greedy"]
print(f"{operation.functions[0]}: {operation.summary}")
for value in operation.arguments:
    print(f"    {value.role:4} {value.name:22} {value.dtype} [{value.shape}]")

# %% [markdown]
# ### Exercise 15-3
#
# Write `verify_tree_greedy`, in the convention of SGLang's kernel (in plain loops; speed does not count). Node 0 of
# each request is the root. `candidates` holds the token of every node, `target_predict` the target's best token after
# every node. `retrive_next_token` is a node's first child, `retrive_next_sibling` the next child of the same parent, −1
# for none. `retrive_index` is the number of a node in the whole batch.
#
# Walk down from the root while one of the children is the target's best token. Write to `predicts`, at the number of
# every node of the path, the target's best token after it; to `accept_index` the numbers of the path's nodes, the root
# first; to `accept_token_num` the number of accepted *drafts*. A path has at most W nodes. All other entries stay as
# they are.
#
# Hint: a request's tree is in its own row. For example, `int(retrive_next_token[request, node])` is a node of the same
# row.


# %%
def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk down every request's tree along the target's best tokens; the first three arguments are written.

    Shapes: predicts [B·N], accept_index [B, W], accept_token_num [B], all others [B, N].
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("15-3", verify_tree_greedy)

# %% [markdown]
# * Which of your first attempts failed on which case? Would you have thought of this case yourself?
# * **Try** `call(verify_tree_greedy, case, cpu)` on the operation's last case, the last one of `[each for each in CASES
#   if each.operation == "verify_greedy"]`: the siblings of one request form a circle, so that a careless walk never
#   ends. For this reason the package runs it in a process of its own, and you
#   should too: save the function in a file `my_kernels.py` and run `specsim conformance --module my_kernels.py --device
#   cpu`.
#
# ## What a proof does not say
#
# The cases are small: up to 4 tokens and 7 nodes for rules, and tensors that a person can read for kernels. A rule may
# fail with 5 siblings, and a kernel at 2³¹ elements. Neither check says anything about speed. And right parts can be
# put together wrongly: a right kernel that receives stale metadata gives wrong tokens. For whole engines there are
# `specsim diff --rule`, `specsim sampling-test --rule`, and the fault catalogue.
#
# ## Your predictions

# %%
specsim.course.scores()

# %% [markdown]
# ## What to remember
#
# * Good text proves nothing, and neither does a test of the first token. The rule with a shared uniform is right for
#   one draft, and wrong for two.
# * A rule that accepts more than the optimum of all lossless rules is not lossless.
# * A drafter of tokens cannot change the output, so no test of the output finds its errors. Watch acceptance.
# * A kernel is right if it keeps the convention in every case: ties, padding, limits, empty batches, and what a counter
#   counts.
#
# The guide has a page for [drafters and acceptance rules](guide/own-drafter.md), one for
# [kernels](guide/own-kernel.md), and one for [exact certificates](guide/certificates.md). A rule that passes can enter
# the leaderboard of acceptance rules in `papers/leaderboard.md`.
