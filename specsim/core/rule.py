"""Acceptance rules of a user: both engines run them and correctness proves or refutes them.

A rule decides the accepted path of one request's tree and the token after it. Everything else of a round stays as it
is: the drafts, the target's distributions, the uniforms. At temperature 0 verification stays greedy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from specsim.core.arguments import check_arguments
from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require, require_type, text_of
from specsim.core.user_module import UserFunction, load_object, user_code
from specsim.core.verifiers import VERIFIER_OF, Drafts

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes 0..N-1 of one request's tree, with the root first."""

    tokens: list[int]  # [N]
    parents: list[int]  # [N], -1 for the root and for dead nodes: the last ones, where there are fewer drafts
    next_token: list[int]  # [N], first child, -1 for none
    next_sibling: list[int]  # [N], next sibling, -1 for none
    depth_limit: int  # depth of the deepest node that may be accepted

    def children(self, node: int) -> Iterator[int]:
        """List the children of a node, in sibling order."""
        child = self.next_token[node]
        while child >= 0:
            yield child
            child = self.next_sibling[child]

    def acceptable_children(self, path: list[int]) -> Iterator[int]:
        """List the children of a path's last node that the depth limit allows."""
        return self.children(path[-1]) if len(path) <= self.depth_limit else iter(())

    def path(self, node: int) -> list[int]:
        """List the nodes from the root to this one."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """List the tokens from the root to this node."""
        return [self.tokens[node] for node in self.path(node)]

    def chain(self) -> range:
        """List the drafts of a chain that may be accepted: the nodes of depth 1, 2, ..."""
        num_drafts = sum(parent >= 0 for parent in self.parents)
        return range(1, max(0, min(num_drafts, self.depth_limit)) + 1)


class Accepted(NamedTuple):
    """The accepted path and bonus token of one request."""

    path: list[int]  # nodes from the root on
    bonus: int  # token id


class Accept(Protocol):
    """A function from a tree, distributions and uniforms to the accepted path.

    It must depend on nothing else, and change none of them.
    """

    def __call__(
        self,
        tree: Tree,
        prob_NV: "torch.Tensor",
        draft_prob_NV: "torch.Tensor | None",
        uniforms: list[float],
        final_uniform: float,
        /,
    ) -> Accepted:
        """Walk a request's tree.

        prob_NV: f64 [N, V], the target's distribution of the token after every node. draft_prob_NV: f64 [N, V], the
        distribution q of a node's children, None under drafts `best`. uniforms: in (0, 1), independent; uniforms[d] for
        the children of a node of depth d, under drafts `siblings` and `distinct` uniforms[node] for each node, where
        the root's is that of node 1. final_uniform: another, for the bonus token.
        """
        ...


@check_arguments
@dataclass(frozen=True, slots=True)
class AcceptanceRule:
    """An acceptance rule in place of the named verifiers of a setting."""

    name: str
    drafts: Drafts  # that it verifies; the setting's verifier makes them, and names the uniforms
    accept: Accept
    lossless: bool = True  # claim that the target's distribution is kept, which specsim certify proves or refutes

    def __post_init__(self) -> None:
        require(self.name.strip(), "name", self.name, "a text that names the rule")

    def __str__(self) -> str:
        return f"rule {self.name}"

    def config(self) -> SpecConfig:
        """Make the default setting whose drafts the rule verifies."""
        return SpecConfig(topk=1 if self.drafts == "sampled" else 4, verifier=VERIFIER_OF[self.drafts])

    def check_config(self, config: SpecConfig) -> None:
        """Raise InputError for a setting that makes other drafts, or whose thresholds the rule would not read."""
        needed = VERIFIER_OF[self.drafts]
        allowed = f"{needed} in the setting of rule {self.name}, whose drafts are {self.drafts!r}"
        require(config.verifier == needed, "verifier", config.verifier, allowed)
        for name in config.verifier_kind.thresholds:
            value = getattr(config, name)
            require(value == 1, name, value, f"1 with rule {self.name}, which does not read it")

    def walk(
        self,
        tree: Tree,
        prob_NV: "torch.Tensor",
        draft_prob_NV: "torch.Tensor | None",
        uniforms: Sequence[float],
        final_uniform: float,
    ) -> Accepted:
        """Apply the rule, see `Accept`.

        Raises InputError where it returns no path of the tree or no token.
        """
        result = self.accept(tree, prob_NV, draft_prob_NV, list(uniforms), final_uniform)
        return checked(result, tree, prob_NV.shape[-1], f"the result of rule {self.name}")


def checked(result: Any, tree: Tree, vocab_size: int, name: str = "result") -> Accepted:
    """Return the result of a rule as plain integers.

    Raises InputError with this name where it is no path of the tree, or where the bonus is outside the vocabulary.
    """
    try:
        with user_code(name, "", "Accepted(path, bonus), a list of nodes and a token id"):
            path, bonus = result
            nodes = [index(node) for node in path]
            token = index(bonus)
    except InputError as error:
        raise InputError(name, f"the value {text_of(repr, result)[:200]}", error.allowed) from error
    pairs = list(pairwise(nodes))
    if nodes[:1] != [0]:
        raise InputError(name, f"the path {nodes}", "a path from the root on, node 0 of the argument tree")
    for parent, child in pairs:
        if not 0 < child < len(tree.parents) or tree.parents[child] != parent:
            wrong = f"the path {nodes}, with node {child} after node {parent}"
            children = list(tree.children(parent)) or "no children"
            allowed = f"nodes that are children of the one before; node {parent} of the argument tree has {children}"
            raise InputError(name, wrong, allowed)
    if len(pairs) > max(0, tree.depth_limit):
        raise InputError(name, f"a path of {len(pairs)} drafts", f"at most {tree.depth_limit}, tree.depth_limit")
    require(0 <= token < vocab_size, name, f"the bonus token {token}", f"a token id from 0 to {vocab_size - 1}")
    return Accepted(nodes, token)


def load_rule(path: str) -> AcceptanceRule:
    """Load the rule of a module or file by its path, MODULE:NAME or FILE.py:NAME.

    Raises InputError where it is none, and when its function raises.
    """
    allowed = "MODULE:NAME or FILE.py:NAME of an AcceptanceRule"
    require(":" in path, "rule", path, allowed)
    rule = load_object(path, "rule", allowed)
    require(isinstance(rule, AcceptanceRule), "rule", path, f"{allowed} (it is a {type(rule).__name__})")
    accept = UserFunction(rule.accept, "rule", path, "a rule that returns Accepted(path, bonus)")
    return AcceptanceRule(str.__str__(rule.name), rule.drafts, accept, rule.lossless)  # without methods of a subclass


def check_rule(rule: object) -> None:
    """Raise InputError unless the value is an acceptance rule."""
    allowed = "an AcceptanceRule; a verifier's name belongs to the setting, SpecConfig(verifier=...)"
    require_type("verifier", rule, AcceptanceRule, allowed)
