"""Exercise 15-3: a kernel for greedy verification, run on the cases of the contract."""

from collections.abc import Callable
from typing import Any

import torch

from specsim.course.exercise import Exercise, Mistake


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
    # begin answer
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
    # end answer


def _counts_bonus(*arguments: torch.Tensor) -> None:
    verify_tree_greedy(*arguments)
    arguments[2].add_(1)


def _own_numbers(*arguments: torch.Tensor) -> None:
    verify_tree_greedy(*arguments)
    accept_index, candidates = arguments[1], arguments[3]
    if len(candidates):
        accept_index.copy_(torch.where(accept_index >= 0, accept_index % candidates.shape[1], accept_index))


def _only_first_child(*arguments: torch.Tensor) -> None:
    changed = list(arguments)
    changed[6] = torch.full_like(changed[6], -1)
    verify_tree_greedy(*changed)


def _no_bonus(*arguments: torch.Tensor) -> None:
    verify_tree_greedy(*arguments)
    predicts, accept_index, accept_token_num = arguments[:3]
    for request, count in enumerate(accept_token_num.tolist()):
        predicts[accept_index[request, count]] = -1


def _walk(*arguments: torch.Tensor, written: str = "path", has_limit: bool = True, is_swapped: bool = False) -> None:
    """Walk like the solution, with one mistake.

    written: nodes whose predictions are written, `path` or `all`, or `own token` for the token of the node itself.
    """
    predicts, accept_index, accept_token_num, candidates, numbers, first_child, sibling, best_BN = arguments
    for request in range(len(candidates)):
        if written == "all":
            predicts[numbers[request]] = best_BN[request].to(predicts.dtype)
        path = [0]
        while True:
            node = path[-1]
            predicts[numbers[request, node]] = (candidates if written == "own token" else best_BN)[request, node]
            child = int(first_child[request, node])
            wanted, found = (candidates, best_BN) if is_swapped else (best_BN, candidates)
            while child >= 0 and found[request, child] != wanted[request, node]:
                child = int(sibling[request, child])
            if child < 0 or (has_limit and len(path) == accept_index.shape[1]):
                break
            accept_index[request, len(path)] = numbers[request, child]
            path.append(child)
        accept_index[request, 0] = numbers[request, 0]
        accept_token_num[request] = len(path) - 1


def _all_nodes(*arguments: torch.Tensor) -> None:
    _walk(*arguments, written="all")


def _own_token(*arguments: torch.Tensor) -> None:
    _walk(*arguments, written="own token")


def _no_limit(*arguments: torch.Tensor) -> None:
    _walk(*arguments, has_limit=False)


def _swapped(*arguments: torch.Tensor) -> None:
    _walk(*arguments, is_swapped=True)


def _own_numbers_everywhere(*arguments: torch.Tensor) -> None:
    changed = list(arguments)
    changed[4] = torch.arange(arguments[4].shape[1]).expand_as(arguments[4])
    verify_tree_greedy(*changed)


def conforms(kernel: Callable[..., Any], case: str) -> dict[str, str]:
    """Run a kernel on one of the cases of the contract."""
    from specsim.correctness.conformance.runner import CASES, call

    chosen = next(each for each in CASES if (each.operation, each.name) == ("verify_greedy", case))
    outcome = call(kernel, chosen, torch.device("cpu"))
    if outcome.detail.startswith("NotImplementedError"):
        raise NotImplementedError
    return {"the result": f"{outcome.status}: {outcome.detail}" if outcome.detail else outcome.status}


VERIFY = Exercise(
    "15-3",
    "Write `verify_tree_greedy`, in the convention of SGLang's kernel (in plain loops; speed does not count). Node 0 "
    "of each request is the root. `candidates` holds the token of every node, `target_predict` the target's best token "
    "after every node. `retrive_next_token` is a node's first child, `retrive_next_sibling` the next child of the same "
    "parent, −1 for none. `retrive_index` is the number of a node in the whole batch.\n\n"
    "Walk down from the root while one of the children is the target's best token. Write to `predicts`, at the number "
    "of every node of the path, the target's best token after it; to `accept_index` the numbers of the path's nodes, "
    "the root first; to `accept_token_num` the number of accepted *drafts*. A path has at most W nodes. All other "
    "entries stay as they are.\n\n"
    "Hint: a request's tree is in its own row. For example, `int(retrive_next_token[request, node])` is a node of the "
    "same row.",
    verify_tree_greedy,
    (
        ("every end of a walk over two levels",),
        ("rows shorter than the tree is deep",),
        ("random trees",),
        ("chains",),
        ("padded requests",),
        ("token ids beyond 2^24",),
        ("no requests",),
    ),
    (
        Mistake(
            _counts_bonus,
            "The count includes the bonus token. In this convention accept_token_num counts drafts only, whatever its "
            "name says.",
        ),
        Mistake(
            _own_numbers,
            "The nodes are numbered within their request. The callers index tensors of the whole batch with "
            "accept_index, so it needs the numbers of retrive_index.",
        ),
        Mistake(
            _only_first_child,
            "Only first children are compared. Follow retrive_next_sibling until a child has the token.",
        ),
        Mistake(
            _no_bonus,
            "The last node of the path has no prediction. The token there is the bonus token, which every round gives.",
        ),
        Mistake(
            _own_numbers_everywhere,
            "The nodes are numbered within their request, in `predicts` too, so that all requests write over the first "
            "one. Use the numbers of retrive_index.",
        ),
        Mistake(
            _all_nodes,
            "The predictions of all nodes are written. Only those of the path's nodes may be: other entries stay as "
            "they are.",
        ),
        Mistake(
            _own_token,
            "`predicts` gets the token of the node itself. It needs the target's best token *after* the node.",
        ),
        Mistake(
            _no_limit,
            "A path may be cut off: accept_index has W entries for a request. Stop when they are full.",
        ),
        Mistake(
            _swapped,
            "The comparison is the wrong way round. A child is accepted if *its* token is the target's best token "
            "after its parent.",
        ),
    ),
    "The walk is the reference's `greedy`. Most errors in such kernels are in the convention: what is counted, how "
    "nodes are numbered, who fills the rest.",
    conforms,
)
