"""Exercises of notebook 15: bring your own kernel, drafter, verifier."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from specsim.core.rule import Accepted, Tree
from specsim.core.token_drafter import Proposal, TreeLimits
from specsim.course.enumeration import inverse_cdf, on_rule_case
from specsim.course.exercise import solves


def proposed(drafter: Callable[..., Any], tokens: list[int], max_depth: int, max_nodes: int) -> dict[str, Any]:
    """Look at the proposal for a text, and the limits of a chain."""
    drafts, parents, scores = drafter(0, tokens, TreeLimits(max_depth, max_nodes, 1))
    return {"drafts": list(drafts), "parents": list(parents), "scores in number": len(scores)}


def conforms(kernel: Callable[..., Any], case: str) -> dict[str, str]:
    """Run a kernel on one of the cases of the contract."""
    from specsim.correctness.conformance.runner import CASES, call

    contract_case = next(row for row in CASES if (row.operation, row.name) == ("verify_greedy", case))
    outcome = call(kernel, contract_case, torch.device("cpu"))
    if outcome.detail.startswith("NotImplementedError"):
        raise NotImplementedError
    return {"the result": f"{outcome.status}: {outcome.detail}" if outcome.detail else outcome.status}


# Every token is drawn from the target with a uniform of its own, so the text follows the target's distribution. The
# drafts only decide how many of the tokens come out of one round.
# - `uniforms[len(path) - 1]` → `uniforms[0]`: One uniform decides at every depth. An accepted draft says that this
#   uniform was in the draft's part, so the tokens after it depend on that.
# - `path, token` → `path, inverse_cdf(prob_NV[path[-1]], final_uniform)`: The last token is drawn a second time. Where
#   the first draw equalled no child, the second one may equal a child, and the tokens of drafts come out too often.
# - `tree.acceptable_children(path)` → `list(tree.acceptable_children(path))[:1]`: Only the first child is compared. The
#   distribution is right, but drafts that could be accepted are lost.
# - `tree.acceptable_children(path)` → `tree.children(path[-1])`: The path goes beyond the length limit of the request:
#   use tree.acceptable_children(path).
# - `inverse_cdf(prob_NV[path[-1]], uniforms[len(path) - 1])` → `int(prob_NV[path[-1]].argmax())`,
#   `Accepted(path, token)` → `Accepted(path, inverse_cdf(prob_NV[path[-1]], final_uniform))`: That follows the target's
#   most probable token. Under sampling the other tokens must come out too.
# - `if not equal` → `if not equal or len(path) > 1`: The round ends after one draft. The distribution is right, but
#   deeper drafts are never accepted: repeat the step at the accepted node.
# - `inverse_cdf(prob_NV[path[-1]], uniforms[len(path) - 1])` → `int(prob_NV[path[-1]].argmax())`: No uniform is used:
#   every token is the target's most probable one. That is greedy decoding; draw each token with `inverse_cdf`.
@solves("15-1", ("2 tokens, no draft",), ("2 tokens, 1 given draft",), ("2 tokens, both given",),
        ("2 tokens, a given chain of 2 drafts",), ("3 tokens, 3 given drafts",),
        ("4 tokens, a given tree of 6 drafts, 0 within max_len",), observe=on_rule_case)  # fmt: skip
def follow(
    tree: Tree, prob_NV: torch.Tensor, draft_prob_NV: None, uniforms: list[float], final_uniform: float
) -> Accepted:
    """Draw the target's token after every node of the path, and follow the draft that equals it.

    prob_NV: the target's distribution after every node. draft_prob_NV: None, as the drafts were not drawn.
    """
    path = [0]
    while True:
        token = inverse_cdf(prob_NV[path[-1]], uniforms[len(path) - 1])
        equal = [child for child in tree.acceptable_children(path) if tree.tokens[child] == token]
        if not equal:
            return Accepted(path, token)
        path.append(equal[0])


# This is prompt lookup with two tokens. It is worth most where the output repeats parts of the prompt.
# - `starts[-1] + 2` → `starts[-1] + 1`: The first draft is the root itself. The last two tokens are already in the
#   text: begin with the token after them.
# - `starts[-1] + 2` → `starts[0] + 2`: That is the first occurrence. The latest one is nearer to the end of the text,
#   and more often right.
# - `[: min(limits.max_depth, limits.max_nodes)]` → `[:]`: The chain is longer than the setting allows: the engine
#   refuses such a proposal.
# - `list(range(-1, len(drafts) - 1))` → `[-1] * len(drafts)`: All drafts hang below the root, so they are alternatives
#   to each other. In a chain, the parent of a draft is the draft before it.
# - `Proposal([], [], [])`: Nothing is ever proposed. The end of the text itself is found first, and nothing follows it:
#   the place must be an earlier one.
# - `range(len(tokens) - 2) if list(tokens[start : start + 2]) == last` →
#   `range(len(tokens) - 1) if tokens[start] == tokens[-1]`, `starts[-1] + 2` → `starts[-1] + 1`: That looks for the
#   last token alone. Both of the last two tokens must be the same.
# - `range(len(tokens) - 2)` → `range(len(tokens) - 3)`: A place may overlap the end of the text: in 5 5 5, the first
#   two tokens equal the last two, and a 5 follows.
# - `starts[-1] + 2` → `starts[-1] + 3`: The first token after the place is left out. The chain begins with it.
# - `range(-1, len(drafts) - 1)` → `range(len(drafts))`: Every draft is its own parent. The first draft has the root,
#   −1, as its parent, the next one has draft 0.
@solves("15-2", ([1, 2, 3, 9, 1, 2], 8, 8), ([1, 2, 3, 1, 2, 4, 1, 2], 2, 8), ([1, 2, 3, 9, 8, 7, 1, 2], 8, 3),
        ([1, 2, 3, 5, 2, 6, 1, 2], 8, 8), ([4, 1, 2, 3, 9, 4, 1, 2], 2, 8), ([5, 5, 5], 4, 4), ([1, 2, 3], 4, 4),
        ([7], 4, 4), observe=proposed)  # fmt: skip
def propose(request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
    """Propose a chain: the tokens that followed the latest earlier occurrence of the last two tokens.

    tokens: prompt and output so far; the last one is the root. limits: max_depth, max_nodes and topk of the tree.
    """
    last = list(tokens[-2:])
    starts = [start for start in range(len(tokens) - 2) if list(tokens[start : start + 2]) == last]
    if not starts:
        return Proposal([], [], [])
    drafts = list(tokens[starts[-1] + 2 :])[: min(limits.max_depth, limits.max_nodes)]
    return Proposal(drafts, parents=list(range(-1, len(drafts) - 1)), scores=[1.0] * len(drafts))


# The walk is the reference's `greedy`. Most errors in such kernels are in the convention: what is counted, how nodes
# are numbered, who fills the rest.
# - `accept_token_num[request] = count` → `accept_token_num[request] = count + 1`: The count includes the bonus token.
#   In this convention accept_token_num counts drafts only, whatever its name says.
# - `= retrive_index[request, 0]` → `= 0`, `= retrive_index[request, node]` → `= node`: The nodes are numbered within
#   their request. The callers index tensors of the whole batch with accept_index, so it needs the numbers of
#   retrive_index.
# - `int(retrive_next_sibling[request, child])` → `-1`: Only first children are compared. Follow retrive_next_sibling
#   until a child has the token.
# - `accept_token_num[request] = count` →
#   `accept_token_num[request] = count; predicts[retrive_index[request, node]] = -1`: The last node of the path has no
#   prediction. The token there is the bonus token, which every round gives.
# - `retrive_index[request, node]` → `node`, `retrive_index[request, 0]` → `0`: The nodes are numbered within their
#   request, in `predicts` too, so that all requests write over the first one. Use the numbers of retrive_index.
# - `node = 0` → `node = 0; predicts[retrive_index[request]] = target_predict[request].to(predicts.dtype)`: The
#   predictions of all nodes are written. Only those of the path's nodes may be: other entries stay as they are.
# - `] = best` → `] = candidates[request, node]`: `predicts` gets the token of the node itself. It needs the target's
#   best token *after* the node.
# - `child < 0 or count + 1 == accept_index.shape[1]` → `child < 0`: A path may be cut off: accept_index has W entries
#   for a request. Stop when they are full.
# - `candidates[request, child] != best` → `target_predict[request, child] != candidates[request, node]`: The comparison
#   is the wrong way round. A child is accepted if *its* token is the target's best token after its parent.
@solves("15-3", ("every end of a walk over two levels",), ("rows shorter than the tree is deep",), ("random trees",),
        ("chains",), ("padded requests",), ("token ids beyond 2^24",), ("no requests",), observe=conforms)  # fmt: skip
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
    for request in range(len(candidates)):
        node = 0
        count = 0
        accept_index[request, 0] = retrive_index[request, 0]
        while True:
            best = target_predict[request, node]
            predicts[retrive_index[request, node]] = best
            child = int(retrive_next_token[request, node])
            while child >= 0 and candidates[request, child] != best:
                child = int(retrive_next_sibling[request, child])
            if child < 0 or count + 1 == accept_index.shape[1]:
                break
            node = child
            count += 1
            accept_index[request, count] = retrive_index[request, node]
        accept_token_num[request] = count
