# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # EAGLE drafting: a tree that grows
#
# * **Goal:** You can say what an EAGLE head reads in each row, grow its draft tree level by level, choose the nodes
#   that the target verifies, and find the bonus token of every request in the result.
# * **Before:** Notebooks 01 to 03.
# * **Time:** 50 minutes to work through, 15 seconds to run. No GPU.
#
# A separate small language model can draft, but it has to understand the whole text by itself. EAGLE's drafter is
# lazier. It reads what the *target* has computed already, and adds one decoder layer. This notebook opens that drafter:
# first its input, then the tree that it grows, and then the choice of the best nodes. It ends with a real error, which
# no test with a chain could find.

# %%
from collections import Counter
from types import SimpleNamespace

import torch

import specsim
from specsim import SamplingParams, SpecConfig, plots
from specsim.reference.oracle_draft import draft_topk
from specsim.reference.oracle_eagle import eagle3_forward
from specsim.reference.oracle_forward import in_dtype, target_forward
from specsim.reference.tree import MalformedTree, parents_of, select

pair = specsim.load()
decode = pair.tokenizer.decode
pair.drafter

# %% [markdown]
# ## What the head reads
#
# The target has read a text of L tokens. For every position it has computed hidden states. Some of them are given to
# the drafter and are called *features*. EAGLE-3, the kind shipped here, takes the inputs of three layers. Features say
# more than the tokens do: they hold the target's thoughts about the next token.
#
# But one thing they cannot hold: which token was *sampled* next. So each row of the head has two inputs.
#
# ```text
# row p:   features of token p,  id of token p+1   →   distribution of token p+2
# ```
#
# The next cell runs both models over a text, without a cache. Each line shows a row, with the head's best draft and the
# target's choice for the same place.

# %%
models = SimpleNamespace(target=in_dtype(pair.target, torch.float32), drafter=in_dtype(pair.drafter, torch.float32))
text = "def read(path):\n    with open(path) as f:\n        return f.read()\n"
ids = pair.tokenizer.encode(text)
layers = pair.drafter.config.feature_layers
logits, features = target_forward(models.target.config, models.target.tensors, ids, layers)
print(f"features of one token: {features.shape[1]} numbers, inputs of layers {', '.join(map(str, layers))}\n")
for place in range(3, 12):
    _, draft_logits = eagle3_forward(models, ids[1 : place + 2], features[: place + 1], [])
    (draft,), _ = draft_topk(models.drafter, draft_logits, 1, "prob")
    wanted = int(logits[place + 1].argmax())
    row = f"features of {decode([ids[place]])!r:9} with id of {decode([ids[place + 1]])!r:9}"
    print(f"{row} → draft {decode([draft])!r:9} target {decode([wanted])!r}")

# %% [markdown]
# * In which lines do draft and target agree?
# * Compare a line with the next one: the token whose id was read becomes the token of the features.
#
# Why does the head need the token as well? Because the features do not know it. Here the same features are followed by
# three different tokens:

# %%
for token in pair.tokenizer.encode(" as, ="):
    _, draft_logits = eagle3_forward(models, [*ids[1:11], token], features[:11], [])
    drafts, probs = draft_topk(models.drafter, draft_logits, 3, "prob")
    best = ", ".join(f"{decode([draft])!r} {prob:.2f}" for draft, prob in zip(drafts, probs.tolist(), strict=True))
    print(f"features of {decode([ids[10]])!r} with id of {decode([token])!r:6} → {best}")

# %% [markdown]
# ### Prediction
#
# Suppose that someone forgets to shift the tokens: row p has the features of token p and the id of token p. Everything
# still runs. Over a generated text, the first draft with right rows is the target's choice in about 87 of 100 places.

# %%
guess = specsim.course.predict(
    "With rows that are not shifted, how many of 100 first drafts are still right?", 60, at_least=5
)
guess

# %%
generation = specsim.generate(pair, "def read(path):\n    with open(", sampling=SamplingParams(max_new_tokens=64))
whole = [*generation.outputs[0].prompt_token_ids, *generation.outputs[0].token_ids]
logits, features = target_forward(models.target.config, models.target.tensors, whole, layers)
right = Counter()
places = range(3, len(whole) - 2)
for shift in (1, 0):
    for count in places:
        _, draft_logits = eagle3_forward(models, whole[shift : shift + count], features[:count], [])
        (draft,), _ = draft_topk(models.drafter, draft_logits, 1, "prob")
        right[shift] += draft == int(logits[count].argmax())
print(f"shifted by one: {right[1]} of {len(places)} first drafts are the target's choice; not shifted: {right[0]}")
assert round(100 * right[1] / len(places)) == 87
guess.score(100 * right[0] / len(places))

# %% [markdown]
# The output would still be right, since verification does not trust any draft. It would only be slow. So this error is
# found by looking at the accept length, not at the text.
#
# There is a second detail. The target has features only for tokens that it has read. For the drafts of this round it
# has none yet. There the head reads its own output of the row before. The output of row p − 1 takes the place of the
# features of token p, so it counts as a hidden state of position p.

# %% [markdown]
# ### Exercise 04-1
#
# Write `head_rows`. A request has the tokens t0, t1, …, tL. The target has read all but the last one, which is the root
# of the tree: it was sampled, but not read. So there are features of the positions 0 to L − 1. `drafted` holds the
# drafts on one path below the root; it may be empty.
#
# Return all rows that the head has to read before it can propose the next draft, in order. A row is a tuple of the
# model whose hidden state it reads, the position of that state, and the id of the token one position ahead.
#
# Hint: every token but t0 is in exactly one row. Row p always holds token p + 1, be it a token of the text or a draft.


# %%
def head_rows(tokens: list[int], drafted: list[int]) -> list[tuple[str, int, int]]:
    """List the rows that the head reads, as (model, position, token id).

    model: "target" or "drafter", whose hidden state of that position the row has.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("04-1", head_rows)

# %% [markdown]
# `specsim.course.solution("04-1")` shows a solution.
#
# ## The tree, level by level
#
# One row of the head gives probabilities for *all* next tokens. EAGLE-2 uses the best K of them, and grows a tree.
#
# 1. The K best tokens after the root are the first level. Each is a *lane*.
# 2. The head runs once, with a row for each lane. Every lane gets K children, so there are K² of them.
# 3. A child's *score* is the product of the probabilities on its path. The K children with the best scores are the next
#    lanes. The others stay, but get no children.
# 4. Repeat steps 2 and 3 until the tree has S levels.
#
# Let us look at K = 3. `num_draft_tokens` is set so high that no node is left out. First, two levels:

# %%
prompt = "def read(path):\n    with open("
two = SpecConfig(topk=3, num_steps=2, num_draft_tokens=1 + 3 + 9)
once = SamplingParams(max_new_tokens=2)
plots.tree(specsim.trace(pair, prompt, two, once)[0].verify_input, None, decode)

# %% [markdown]
# Three of the nine nodes on the right will be lanes of the next step. Find the three best scores before you go on.

# %%
every = SpecConfig(topk=3, num_steps=3, num_draft_tokens=1 + 3 + 9 + 9)
grown = specsim.trace(pair, prompt, every, once)[0]
assert [round(float(grown.verify_input.scores[0, node]), 3) for node in (14, 4)] == [0.014, 0.481]
plots.tree(grown.verify_input, None, decode)

# %% [markdown]
# * Which nodes of the second level are lanes? They are the ones with children.
# * Two of the three lanes have the same parent. What happened to the lane of `):`?
# * Node 14 has 0.014 and its parent has 0.481. What probability did the drafter give to it after `as`?
# * **Try** another prompt: put `"from typing import"` in place of `prompt` in this cell, and remove the `assert`. How
#   many of its nodes have a score above 0.01?
#
# The tree is *dynamic*: its shape follows the drafter's confidence. A confident drafter gives deep trees, an unsure one
# gives broad trees.
#
# ## Choosing the nodes
#
# The target should not verify all 21 drafts: in a large batch every draft costs time, as notebook 02 showed. So the N −
# 1 best candidates of *all* levels are chosen. Here N is 8.

# %%
chosen = specsim.trace(pair, prompt, SpecConfig(topk=3, num_steps=3, num_draft_tokens=8), once)[0]
plots.tree(chosen.verify_input, None, decode)

# %% [markdown]
# * Which lane of the second level is not in this tree, although it was a lane?
# * Does every node have its parent? Nobody checked this. Why is it always so?
#
# The answer is in the scores. A probability is at most 1, so a child's score is at most its parent's. Where the child
# is among the best, so is the parent. There is one catch: *ties*. If the drafter is certain, a child has exactly its
# parent's score. Then the order decides. Candidates are numbered level by level, so that a parent has a lower number
# than its child. The rule is: **of equal scores, the lower number wins.**

# %%
scores = torch.tensor([[0.6, 0.4, 0.6, 0.0, 0.4, 0.0]])  # candidates 2 and 3 are children of 0; 4 and 5 of 1
for count in (1, 2, 3, 4):
    print(f"the best {count}: candidates {select(scores, count)[0].tolist()}")

# %% [markdown]
# A library's top-k does not promise this order. On a GPU it may return child 2 without its parent 0.
#
# ## Why products along the path?
#
# A draft is accepted only if all drafts before it are accepted. So the probability of a node's *path* is what counts.
# If the scores were exactly these probabilities, then their sum would be the expected number of accepted drafts. And
# the best set of N − 1 nodes would be the one with the largest sum: simply the N − 1 largest scores.
#
# What if we rank by each token's own probability instead? The next cell tries it for the 21 candidates above. The root
# is no candidate, so candidate 0 is node 1 in the picture of 22 nodes.

# %%
candidates = grown.drafts()
path_scores, parents = candidates["score"].tolist(), candidates["parent"].tolist()
own = [score / (path_scores[up] if up >= 0 else 1) for score, up in zip(path_scores, parents, strict=True)]
best = select(torch.tensor([own]), 7)[0].tolist()
for number in best:
    above = f"below candidate {parents[number]}" if parents[number] >= 0 else "below the root"
    print(f"candidate {number:2} {candidates['text'][number]!r:10} own {own[number]:.3f}, {above}")
try:
    parents_of(best, grown.verify_input.candidates.parent_list[0].tolist(), every.topk)
except MalformedTree as error:
    print("no tree:", error)

# %% [markdown]
# * Which candidate was chosen without its parent?
# * `w` after a quotation mark is likely. Why is it nevertheless a bad use of one of seven places?

# %% [markdown]
# ### Exercise 04-2
#
# Write `best_drafts`. It receives the candidates of a tree: for each its parent and the probability of its own token.
# Return the numbers of the `count` candidates with the best scores, in ascending order. A score is the product of the
# probabilities on the path. Of equal scores the lower number wins.
#
# Hint: a parent comes before its children, so one pass in order computes all scores.


# %%
def best_drafts(parents: list[int], probs: list[float], count: int) -> list[int]:
    """Choose the candidates that become nodes: the `count` best, as ascending numbers.

    parents: number of each candidate's parent, an earlier candidate, or -1 for the root. probs: the drafter's
    probability of each candidate's token after its parent.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("04-2", best_drafts)

# %% [markdown]
# ## Are the scores probabilities?
#
# So much for the idea. But a score comes from the *drafter*. Is it the probability that the target accepts the path? We
# can count. The next cell generates text for eleven prompts, at temperature 1, and sorts all drafts by their scores.

# %%
prompts = [
    "def count(n):\n    while n",
    "def read(path):\n    with open(",
    "import os\n\n\ndef main(",
    "if __name__ ==",
]
prompts += ["class Stack:\n    def __init__(self", "def test_sum():\n    assert", "for i in range(", "    return self."]
prompts += ["try:\n    import", "def add(a, b):\n    return a", "from typing import"]
config = SpecConfig(topk=4, num_steps=3, num_draft_tokens=8)
drawn = specsim.trace(pair, prompts, config, SamplingParams(temperature=1.0, max_new_tokens=48))
nodes = drawn.to_pandas()
drafts = nodes[nodes["depth"] > 0]
for low, high in ((0, 0.1), (0.1, 0.2), (0.2, 0.4), (0.4, 0.6), (0.6, 1.01)):
    group = drafts[(drafts["score"] >= low) & (drafts["score"] < high)]
    print(f"{len(group):4} drafts: mean score {group['score'].mean():.2f}, accepted {group['accepted'].mean():.2f}")
num_rounds = len(nodes) - len(drafts)  # each has one root
forecast, accepted = drafts["score"].sum() / num_rounds, drafts["accepted"].sum() / num_rounds
print(f"a round: sum of the scores {forecast:.2f}, accepted drafts {accepted:.2f}")

# %% [markdown]
# The scores are close to the shares that are accepted, and their sum is close to the accept length without the bonus
# token. The drafter is a little too sure of itself.
#
# ### Prediction
#
# Now the same at temperature 0. Look only at drafts with a score between 0.4 and 0.6.

# %%
guess = specsim.course.predict("At temperature 0, how many of 100 drafts with scores near 0.5 are accepted?", 48)
guess

# %%
greedy = specsim.trace(pair, prompts, config, SamplingParams(temperature=0.0, max_new_tokens=48))
nodes = greedy.to_pandas()
drafts = nodes[nodes["depth"] > 0]
shares = {}
for low, high in ((0, 0.1), (0.1, 0.2), (0.2, 0.4), (0.4, 0.6), (0.6, 1.01)):
    shares[low] = drafts[(drafts["score"] >= low) & (drafts["score"] < high)]["accepted"].mean()
    print(f"scores from {low} to {min(1, high)}: accepted {shares[low]:.2f}")
guess.score(100 * shares[0.4])

# %% [markdown]
# At temperature 0 the target always takes its most probable token. A draft with probability one half usually *is* the
# most probable one. So a score is no longer a probability of acceptance. It is still a good **rank**: drafts with
# higher scores are accepted more often, and a rank is all that the choice of nodes needs.
#
# Verification never reads the scores. A wrong score costs time, and never changes the output.
#
# ## A stride that only trees notice
#
# After verification the drafter must know where to go on: the bonus token of every request. Two tables hold the result
# for B requests:
#
# * `predict`, with B · N entries: for each node of the accepted path the token after it, else −1.
# * `accept_index`, with B rows of **S + 1** entries: the nodes of the accepted path, the root first, then −1. A node
#   has a *global* number here: node j of request b is b · N + j.
#
# Here they are after a round with four requests. N is 8 and S is 3.

# %%
four = prompts[:4]
batch = specsim.trace(pair, four, config, SamplingParams(max_new_tokens=24))
verdict = batch[0].verdict
num_nodes, width = config.num_draft_tokens, config.num_steps + 1
print("predict:", verdict.predict.view(4, num_nodes), sep="\n")
print("accept_index:", verdict.accept_index, sep="\n")
print("num_accepted_drafts:", verdict.num_accepted_drafts.tolist())

# %% [markdown]
# On a GPU both tables are flat memory. A kernel that wants row b has to know how long a row is. In SGLang, one line
# took rows of `accept_index` to be N long, since a tree has N nodes
# ([sglang#26866](https://github.com/sgl-project/sglang/pull/26866)). But a path has at most S + 1.
#
# ### Prediction
#
# The next cell reads every bonus token with that wrong stride, in all rounds in which four requests run.

# %%
guess = specsim.course.predict("With the wrong stride, how many of 100 bonus tokens are right?", 5, at_least=3)
guess

# %%
outcomes = Counter()
for each in batch:
    table, counts = each.verdict.accept_index.flatten().tolist(), each.verdict.num_accepted_drafts.tolist()
    for request, count in enumerate(counts if len(counts) == 4 else []):
        entry, wrong = request * width + count, request * num_nodes + count
        found = "right" if wrong < len(table) and table[wrong] == table[entry] else "another entry"
        outcomes[request, found if wrong < len(table) else "outside the table"] += 1
for (request, found), times in sorted(outcomes.items()):
    print(f"request {request}: {times} times {found}")
is_right = sum(times for (_, found), times in outcomes.items() if found == "right")
guess.score(100 * is_right / outcomes.total())

# %% [markdown]
# * Why is request 0 always right?
# * Which request does request 1 read instead of its own row?
# * **Try** a chain, `config = SpecConfig(topk=1, num_steps=3)`, in the cell that prints the tables. What is found then?
#
# So a test with one request finds nothing, and a test with chains finds nothing. The requests that are wrong go on from
# a token that the target did not choose, or from whatever memory follows the table. The same pull request repaired a
# second error of the kind: a loop over B · N entries of a table with B · (S + 1).

# %% [markdown]
# ### Exercise 04-3
#
# Write `bonus_tokens`. All tables are flat lists, as on a GPU: `predict` has `num_nodes` entries for each request,
# `accept_index` has `width`. `num_accepted_drafts` has one number for each request, and the root is not counted in it.
# Return the bonus token of each request: `predict` at the last node of its accepted path.
#
# Hint: entry 0 of a row of `accept_index` is the root. The entries are global node numbers.


# %%
def bonus_tokens(
    predict: list[int], accept_index: list[int], num_accepted_drafts: list[int], num_nodes: int, width: int
) -> list[int]:
    """Find each request's bonus token, the token after the last node of its accepted path.

    num_nodes: N, nodes of a request in `predict`. width: S + 1, entries of a request in `accept_index`.
    """
    raise NotImplementedError("your answer")


# %%
specsim.course.check("04-3", bonus_tokens)

# %% [markdown]
# ## Your predictions

# %%
specsim.course.scores()

# %% [markdown]
# ## What to remember
#
# * Row p of an EAGLE head has the features of token p and the id of token p + 1. For drafts the head's own output takes
#   the place of features.
# * Only K lanes are extended in each step, but the N − 1 nodes are chosen among the candidates of all levels.
# * A score is the product along the path. So the best nodes form a tree, as long as ties go to the lower number.
# * Scores choose drafts; they never accept them. Near temperature 1 they are close to acceptance rates, at temperature
#   0 they are only a rank.
# * The result's rows have S + 1 entries, not N. Test trees with several requests.
#
# Papers: [EAGLE](https://arxiv.org/abs/2401.15077), [EAGLE-2](https://arxiv.org/abs/2406.16858) with the dynamic tree,
# [EAGLE-3](https://arxiv.org/abs/2503.01840) with features of three layers. In the package: `reference/drafting.py`
# grows the tree, `reference/tree.py` chooses, and `reference/drafters/eagle3.py` is the head.
