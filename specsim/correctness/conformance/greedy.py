"""Cases of the greedy verifier of trees, and the trees that verifiers are called on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from specsim.correctness.conformance.contract import Call, KernelCase, arguments, integers, replaced, strided
from specsim.correctness.conformance.drafting import chosen, drafted

if TYPE_CHECKING:
    from specsim.core.rule import Tree

FLAT = [-1, 0, 0, 1, 1, 2]  # two children of the root, the first with two children, the second with one


@dataclass(frozen=True, slots=True)
class Forest:
    """One tree per request."""

    parents: list[list[int]]  # [B][N]
    tokens: list[list[int]]  # [B][N]
    most: int  # drafts that may be accepted

    @property
    def size(self) -> tuple[int, int]:
        return len(self.parents), len(self.parents[0]) if self.parents else 6

    @property
    def trees(self) -> "list[Tree]":
        """The trees in the reference's form."""
        from specsim.core.rule import Tree
        from specsim.reference.tree import links

        pairs = zip(self.parents, self.tokens, strict=True)
        return [Tree(tokens, parents, *links(parents), self.most) for parents, tokens in pairs]

    def call(self, operation: str, walked: Sequence[tuple[list[int], int]], *more: Any) -> Call:
        """Make the call of a verifier that has to find these paths and bonus tokens; more: further arguments."""
        from specsim.reference.tree import links

        batch, num_nodes = self.size
        predicts = torch.full((batch * num_nodes,), -1)
        accept_index = torch.full((batch, self.most + 1), -1)
        for request, (path, bonus) in enumerate(walked):
            first = request * num_nodes
            accept_index[request, : len(path)] = first + integers(path)
            for node, after in pairwise(path):
                predicts[first + node] = self.tokens[request][after]
            predicts[first + path[-1]] = bonus
        number = integers((len(path) - 1 for path, _ in walked), torch.int32)
        expected = {"predicts": predicts.int(), "accept_index": accept_index.int(), "accept_token_num": number}
        outputs = (torch.full_like(result, fill) for result, fill in zip(expected.values(), (-1, -1, -7), strict=True))
        all_links = [links(parents) for parents in self.parents]
        tables = (
            integers(self.tokens).view(batch, num_nodes),
            torch.arange(batch * num_nodes).view(batch, num_nodes),
            integers(first for first, _ in all_links).view(batch, num_nodes),
            integers(sibling for _, sibling in all_links).view(batch, num_nodes),
        )
        return Call(arguments(operation, *outputs, *tables, *more), expected)


def grown(batch: int, k: int, num_steps: int, num_nodes: int) -> Forest:
    """Grow trees by a draft loop, whose steps may all be accepted."""
    from specsim.reference.tree import parents_of

    draft_loop = drafted(batch, k, num_steps, seed=num_nodes)
    picked = chosen(draft_loop, num_nodes)
    rows = zip(picked.tolist(), draft_loop.parent_list.tolist(), strict=True)
    parents = [parents_of(selected, parent_list, k) for selected, parent_list in rows]
    tokens = torch.cat([torch.full((batch, 1), 5), draft_loop.tokens.gather(1, picked)], dim=1)
    return Forest(parents, tokens.tolist(), num_steps)


def greedy_call(forest: Forest, best: list[list[int]]) -> Call:
    """Make one call in which these are the target's best tokens after each node, by request."""
    from specsim.reference.acceptance import greedy

    walked = []
    for tree, best_tokens in zip(forest.trees, best, strict=True):
        vocabulary = sorted({*best_tokens, *tree.tokens})  # a vocabulary of the tokens that occur, in their order
        index_of = {token: index for index, token in enumerate(vocabulary)}
        rows = torch.nn.functional.one_hot(integers(index_of[token] for token in best_tokens), len(vocabulary)).double()
        path, bonus = greedy(replace(tree, tokens=[index_of[token] for token in tree.tokens]), rows)
        walked.append((path, vocabulary[bonus]))
    return forest.call("verify_greedy", walked, integers(best).view(forest.size))


def _led(forest: Forest, seed: int) -> Call:
    """Choose targets that often take one of a node's children, with equal probability for each."""
    generator = torch.Generator().manual_seed(seed)
    best = []
    for tree in forest.trees:
        best_tokens = []
        for node in range(len(tree.tokens)):
            children = [tree.tokens[child] for child in tree.children(node)]
            options = [*children * 3, 7]
            best_tokens.append(options[int(torch.randint(len(options), (), generator=generator))])
        best.append(best_tokens)
    return greedy_call(forest, best)


def _by_hand(most: int = 2) -> Call:
    """Cover every end of a walk over two levels."""
    best = [
        [1, 3, 0, 2, 0, 0], [1, 0, 0, 2, 3, 0], [2, 0, 2, 0, 0, 1], [2, 0, 3, 0, 0, 1], [1, 1, 3, 0, 0, 1],
        [3, 3, 2, 0, 0, 1], [0, 0, 0, 0, 0, 0],
    ]  # fmt: skip
    return greedy_call(Forest([FLAT] * len(best), [[0, 1, 2, 3, 0, 2]] * len(best), most), best)


def _roots() -> Call:
    """Pad requests: the root has no child, whatever tokens the other nodes hold."""
    from specsim.core.rule import Tree
    from specsim.reference.acceptance import greedy

    forest = Forest([FLAT] * 3, [[0, 1, 2, 3, 0, 2]] * 3, 2)
    call = greedy_call(forest, [[1, 3, 0, 2, 0, 0]] * 3)
    none = [-1] * 6
    path, bonus = greedy(Tree([0, 1, 2, 3, 0, 2], FLAT, none, none, 2), torch.eye(4)[integers([1, 3, 0, 2, 0, 0])])
    alone = Forest([FLAT] * 3, forest.tokens, 2).call(
        "verify_greedy", [([0, 1, 3], 2), (path, bonus), (path, bonus)], call.arguments["target_predict"]
    )
    next_token = call.arguments["retrive_next_token"].clone()
    next_sibling = call.arguments["retrive_next_sibling"].clone()
    next_token[1:] = -1
    next_sibling[1:] = -1
    call = replaced(call, retrive_next_token=next_token, retrive_next_sibling=next_sibling)
    return replace(call, expected=alone.expected)


def _circle() -> Call:
    """Make three requests; the siblings of the middle one form a circle, and none is the target's."""
    forest = Forest([FLAT] * 3, [[0, 1, 2, 3, 0, 2]] * 3, 2)
    call = greedy_call(forest, [[1, 3, 0, 2, 0, 0], [3] * 6, [2, 0, 3, 0, 0, 1]])
    siblings = call.arguments["retrive_next_sibling"].clone()
    well = torch.tensor([True, False, True])
    siblings[1, 2] = 1
    rows = {"predicts": well.repeat_interleave(6), "accept_index": well, "accept_token_num": well}
    return replace(replaced(call, retrive_next_sibling=siblings), rows=rows)


def _wide_tokens() -> Call:
    """Use token ids that are equal as float32 but differ as integers."""
    large = 2**24
    tokens = [[0, large, large + 1, large + 2, large + 3, 2**31 - 1]]
    return greedy_call(Forest([FLAT], tokens, 2), [[large + 1, 0, 2**31 - 1, 0, 0, large]])


def _greedy_refusable(change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    call = _by_hand()
    names = ("candidates", "retrive_next_token", "retrive_next_sibling", "target_predict")
    return replaced(call, **{name: change(call.arguments[name]) for name in names})


CASES = (
    KernelCase("verify_greedy", "every end of a walk over two levels", _by_hand),
    KernelCase("verify_greedy", "rows shorter than the tree is deep", partial(_by_hand, most=1)),
    KernelCase("verify_greedy", "random trees", lambda: _led(grown(7, 4, 3, 13), 1)),
    KernelCase("verify_greedy", "64 nodes", lambda: _led(grown(3, 6, 4, 64), 2)),
    KernelCase("verify_greedy", "chains", lambda: _led(grown(5, 1, 6, 7), 3)),
    KernelCase("verify_greedy", "padded requests", _roots),
    KernelCase("verify_greedy", "token ids beyond 2^24", _wide_tokens),
    KernelCase("verify_greedy", "no requests", lambda: greedy_call(Forest([], [], 2), [])),
    KernelCase("verify_greedy", "inputs with gaps", partial(_greedy_refusable, strided), may_refuse=True),
    KernelCase("verify_greedy", "inputs in int32", partial(_greedy_refusable, torch.Tensor.int), may_refuse=True),
    KernelCase("verify_greedy", "malformed: siblings in a circle", _circle, may_refuse=True),
)
