"""Mutants: small changes of a module, found in its syntax tree and made in its text.

Existing tools do not fit. mutmut skips decorated functions, as every kernel is, and switches mutants by a trampoline
that a kernel's compiler cannot follow. cosmic-ray changes files in place, one at a time in a working copy, under one
test command for all, and knows neither masks nor strides.
"""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import NamedTuple

FLIPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
OPERATORS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
SWAPPED = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min"}
# How a launch is tuned, which changes no result, and texts that only people read.
TUNING = {"num_warps", "num_stages", "STAGES", "PDL", "eviction_policy", "input_precision", "on_gpu"}
# What only a GPU runs, or what decides how fast it does.
ON_GPU = {
    "_tiling",
    "_multiprocessors",
    "_shared_memory",
    "stages_within",
    "can_overlap",
    "capability",
    "await_predecessor",
}
ON_GPU |= {"let_successor_begin", "await_input", "_capture_cuda", "_without_collection"}


class Span(NamedTuple):
    """Byte offsets in a source."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed expression of a module."""

    module: str
    function: str
    is_kernel: bool
    line: int
    operator: str
    old: str
    new: str
    before: str  # lines that the expression lies in, with single spaces
    after: str  # the same lines with the change
    span: Span  # of the expression

    @property
    def key(self) -> str:
        """Name that holds as long as the line does not change, wherever it stands."""
        return f"{self.module}.{self.function}: {self.before} -> {self.after}"

    def apply(self, source: str) -> str:
        """Make the change in the module's text."""
        raw = source.encode()
        return (raw[: self.span.start] + self.new.encode() + raw[self.span.end :]).decode()


class Change(NamedTuple):
    """Source text in the place of an expression."""

    operator: str
    target: ast.expr
    new: str


class Place(NamedTuple):
    """A node of a syntax tree and the function around it."""

    function: str
    is_kernel: bool
    node: ast.AST


class Source:
    """Text of a module by the nodes of its syntax tree, which count columns in bytes."""

    def __init__(self, text: str) -> None:
        self._raw = text.encode()
        self._line_starts = [0, *accumulate(map(len, self._raw.splitlines(keepends=True)))]

    def span(self, node: ast.expr) -> Span:
        start = self._line_starts[node.lineno - 1] + node.col_offset
        return Span(start, self._line_starts[_last_line(node) - 1] + (node.end_col_offset or 0))

    def text(self, node: ast.expr) -> str:
        start, end = self.span(node)
        return self._raw[start:end].decode()

    def lines(self, node: ast.expr, new: str) -> str:
        """Lines that a node lies in, with `new` in its place and single spaces."""
        start, end = self.span(node)
        before = self._raw[self._line_starts[node.lineno - 1] : start].decode()
        after = self._raw[end : self._line_starts[_last_line(node)]].decode()
        return " ".join((before + new + after).split())


def _last_line(node: ast.expr) -> int:
    return node.end_lineno or node.lineno


def mutants(module: str, text: str) -> list[Mutant]:
    """Make all mutants of a module, in the order of its source."""
    source = Source(text)
    found = []
    for function, is_kernel, node in _places(ast.parse(text)):
        for operator, target, new in _changes(node, source):
            old = source.text(target)
            if new != old:
                lines = source.lines(target, old), source.lines(target, new)
                place = module, function, is_kernel, target.lineno
                found.append(Mutant(*place, operator, old, new, *lines, source.span(target)))
    return sorted(found, key=lambda each: (each.span, each.operator, each.new))


def sample(candidates: dict[str, list[Mutant]], count: int, seed: int) -> list[Mutant]:
    """Draw `count` mutants by seed, at least one per module.

    A module's share is in proportion to the square root of its number of mutants.
    """
    rng = random.Random(seed)
    weights = {name: len(found) ** 0.5 for name, found in candidates.items() if found}
    exact = {name: count * weight / sum(weights.values()) for name, weight in sorted(weights.items())}
    shares = {name: max(1, int(share)) for name, share in exact.items()}
    for name in sorted(exact, key=lambda name: int(exact[name]) - exact[name]):  # the largest remainder first
        shares[name] += sum(shares.values()) < count
    return [each for name in shares for each in _by_turns(rng, candidates[name])[: shares[name]]]


def _by_turns(rng: random.Random, found: list[Mutant]) -> list[Mutant]:
    """Shuffle, then take one of each operator after the other, so that constants do not crowd out the rest."""
    piles: dict[str, list[Mutant]] = {}
    for each in rng.sample(found, len(found)):
        piles.setdefault(each.operator, []).append(each)
    order = rng.sample(sorted(piles), len(piles))
    return [each for turn in zip_longest(*(piles[operator] for operator in order)) for each in turn if each]


def _places(node: ast.AST, function: str = "", is_kernel: bool = False) -> Iterator[Place]:
    """Nodes inside functions, except those that are not run, only tune, or are texts for people."""
    if isinstance(node, ast.FunctionDef):
        if node.name in ON_GPU:
            return
        is_kernel |= any(ast.unparse(each) in ("kernel", "triton.jit") for each in node.decorator_list)
        function = f"{function}.{node.name}".lstrip(".")
        children = node.body
    elif isinstance(node, ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
        children = node.body
    elif isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)) or _is_text(node):
        return
    else:
        if function:
            yield Place(function, is_kernel, node)
        children = _mutable_children(node)
    for child in children:
        yield from _places(child, function, is_kernel)


def _mutable_children(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "block_of":
        return list(node.args[:1])
    if isinstance(node, ast.AnnAssign):
        return [node.value] if node.value else []
    return [child for child in ast.iter_child_nodes(node) if not _is_tuning(child)]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_tuning(node: ast.AST) -> bool:
    is_choice = isinstance(node, ast.IfExp) and "INTERPRETED" in ast.unparse(node.test)
    return is_choice or (isinstance(node, ast.keyword) and node.arg in TUNING)


def _changes(node: ast.AST, source: Source) -> Iterator[Change]:
    text = source.text
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPERATORS:
        flipped = FLIPS[OPERATORS[type(node.ops[0])]]
        yield Change("comparison flipped", node, f"({text(node.left)}) {flipped} ({text(node.comparators[0])})")
    elif isinstance(node, ast.Constant) and type(node.value) is int and not isinstance(node.value, bool):
        yield Change("off by one", node, str(node.value + 1))
        yield Change("off by one", node, str(node.value - 1) if node.value else "(-1)")
    elif isinstance(node, ast.BinOp):
        yield from _operation_changes(node, source)
    elif isinstance(node, ast.BoolOp):
        joint = " or " if isinstance(node.op, ast.And) else " and "
        yield Change("and for or", node, f"({joint.join(f'({text(value)})' for value in node.values)})")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert)):
        yield Change("not dropped", node, f"({text(node.operand)})")
    elif isinstance(node, (ast.If, ast.While)):
        yield Change("condition negated", node.test, f"not ({text(node.test)})")
    elif isinstance(node, ast.Call):
        yield from _call_changes(node, source)


def _operation_changes(node: ast.BinOp, source: Source) -> Iterator[Change]:
    text = source.text
    left = f"({text(node.left)})"
    right = f"({text(node.right)})"
    if isinstance(node.op, ast.BitAnd):
        yield Change("condition dropped", node, left)
        yield Change("condition dropped", node, right)
        yield Change("and for or", node, f"({left} | {right})")
    elif isinstance(node.op, ast.BitOr):
        yield Change("and for or", node, f"({left} & {right})")
    elif isinstance(node.op, (ast.Sub, ast.FloorDiv, ast.Mod, ast.Div)):
        sign = {ast.Sub: "-", ast.FloorDiv: "//", ast.Mod: "%", ast.Div: "/"}[type(node.op)]
        yield Change("operands swapped", node, f"({right} {sign} {left})")
        if isinstance(node.op, ast.Sub):
            yield Change("sign changed", node, f"({left} + {right})")
    elif isinstance(node.op, ast.Add):
        yield Change("sign changed", node, f"({left} - {right})")
        if isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Mult):
            first = f"({text(node.left.left)})"
            stride = f"({text(node.left.right)})"
            yield Change("stride swapped", node, f"({first} + {right} * {stride})")
    elif isinstance(node.op, ast.Mult):
        yield Change("sum for product", node, f"({left} + {right})")


def _call_changes(node: ast.Call, source: Source) -> Iterator[Change]:
    text = source.text
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in SWAPPED:
        prefix = text(node.func).removesuffix(name)
        yield Change("min for max", node.func, prefix + SWAPPED[name])
    if name == "where" and len(node.args) == 3:
        condition, first, second = map(text, node.args)
        yield Change("branches swapped", node, f"{text(node.func)}({condition}, {second}, {first})")
    for each in node.keywords:
        if each.arg == "mask":
            yield Change("mask dropped", each.value, f"(({text(each.value)}) | True)")
