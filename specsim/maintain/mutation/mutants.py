"""Mutants: small changes of a module, found in its syntax tree and made in its text.

Tools of the ecosystem were tried on paper first. mutmut leaves decorated functions alone, which every kernel is, and
switches mutants by a trampoline that a kernel's compiler would not follow. cosmic-ray changes files in place, one at a
time in a working copy, under one test command for all, and knows neither masks nor strides. So this is ours: the
mutants of kernels are read from a changed copy as the kernels themselves are.
"""

import ast
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

Span = tuple[int, int]  # byte offsets in a source
Made = Iterator[tuple[str, ast.AST, str]]  # operator, what is replaced, by which text

FLIPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
OPERATORS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
SWAPPED = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min"}
# How a launch is tuned, which changes no result, and texts that only people read.
TUNING = {"num_warps", "num_stages", "STAGES", "PDL", "eviction_policy", "input_precision", "on_gpu"}


# What only a GPU runs, or what decides how fast it does.
ON_GPU = {"_tiling", "_multiprocessors", "_shared_memory", "stages_within", "can_overlap", "await_predecessor"}
ON_GPU |= {"let_successor_begin", "await_input", "_capture_cuda", "_without_collection"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """In `function` of `module`, at `line`, `old` becomes `new`. span: of old in the source's bytes.

    before, after: the lines that old lies in, as they are and changed, with single spaces.
    """

    module: str
    function: str
    is_kernel: bool
    line: int
    operator: str
    old: str
    new: str
    before: str
    after: str
    span: Span

    @property
    def key(self) -> str:
        """By which it is known as long as its line does not change, wherever that stands."""
        return f"{self.module}.{self.function}: {self.before} -> {self.after}"

    def apply(self, source: str) -> str:
        """The module with the change."""
        raw, (start, end) = source.encode(), self.span
        return (raw[:start] + self.new.encode() + raw[end:]).decode()


def mutants(module: str, source: str) -> list[Mutant]:
    """All mutants of a module, in the order of its source."""
    tree, raw = ast.parse(source), source.encode()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.AST) -> Span:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def text(node: ast.AST) -> str:
        start, end = span(node)
        return raw[start:end].decode()

    def lines(target: ast.AST, new: str) -> str:
        start, end = span(target)
        first, last = starts[target.lineno - 1], starts[target.end_lineno]
        return " ".join((raw[first:start].decode() + new + raw[end:last].decode()).split())

    found = []
    for function, is_kernel, node in _visited(tree):
        for operator, target, new in _made(node, text):
            old = text(target)
            if new != old:
                place = module, function, is_kernel, target.lineno
                changes = operator, old, new, lines(target, old), lines(target, new)
                found.append(Mutant(*place, *changes, span(target)))
    return sorted(found, key=lambda each: (each.span, each.operator, each.new))


def sample(candidates: dict[str, list[Mutant]], count: int, seed: int) -> list[Mutant]:
    """`count` of them, or one a module if that is more, drawn by seed: of every module in proportion to the root of how
    many it has.
    """
    rng, weights = random.Random(seed), {name: len(found) ** 0.5 for name, found in candidates.items() if found}
    exact = {name: count * weight / sum(weights.values()) for name, weight in sorted(weights.items())}
    shares = {name: max(1, int(share)) for name, share in exact.items()}
    for name in sorted(exact, key=lambda name: int(exact[name]) - exact[name]):  # the largest remainder first
        shares[name] += sum(shares.values()) < count
    return [each for name in shares for each in _by_turns(rng, candidates[name])[: shares[name]]]


def _by_turns(rng: random.Random, found: list[Mutant]) -> list[Mutant]:
    """Shuffled, one of each operator after the other, so that constants do not crowd out the rest."""
    piles: dict[str, list[Mutant]] = {}
    for each in rng.sample(found, len(found)):
        piles.setdefault(each.operator, []).append(each)
    order = rng.sample(sorted(piles), len(piles))
    return [each for turn in zip_longest(*(piles[operator] for operator in order)) for each in turn if each]


def _visited(tree: ast.Module) -> Iterator[tuple[str, bool, ast.AST]]:
    """Every node inside a function with the function's name, but for what is not run, is tuning, or is told."""

    def walk(node: ast.AST, function: str, is_kernel: bool) -> Iterator[tuple[str, bool, ast.AST]]:
        if isinstance(node, ast.FunctionDef) and node.name in ON_GPU:
            return
        if isinstance(node, ast.FunctionDef):
            is_kernel |= any(ast.unparse(each) in ("kernel", "triton.jit") for each in node.decorator_list)
            function = f"{function}.{node.name}".lstrip(".")
            children = node.body
        elif isinstance(node, ast.ClassDef):
            function, children = f"{function}.{node.name}".lstrip("."), node.body
        elif isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)) or _is_told(node):
            return
        else:
            if function:
                yield function, is_kernel, node
            children = [child for child in ast.iter_child_nodes(node) if not _is_tuning(child)]
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "block_of":
                children = node.args[:1]
            if isinstance(node, ast.AnnAssign):
                children = [node.value] if node.value else []
        for child in children:
            yield from walk(child, function, is_kernel)

    return walk(tree, "", False)


def _is_told(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_tuning(node: ast.AST) -> bool:
    is_choice = isinstance(node, ast.IfExp) and "INTERPRETED" in ast.unparse(node.test)
    return is_choice or (isinstance(node, ast.keyword) and node.arg in TUNING)


def _made(node: ast.AST, text: Callable[[ast.AST], str]) -> Made:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPERATORS:
        flipped = FLIPS[OPERATORS[type(node.ops[0])]]
        yield "comparison flipped", node, f"({text(node.left)}) {flipped} ({text(node.comparators[0])})"
    elif isinstance(node, ast.Constant) and type(node.value) is int and not isinstance(node.value, bool):
        yield "off by one", node, str(node.value + 1)
        yield "off by one", node, str(node.value - 1) if node.value else "(-1)"
    elif isinstance(node, ast.BinOp):
        yield from _of_operation(node, text)
    elif isinstance(node, ast.BoolOp):
        joint = " or " if isinstance(node.op, ast.And) else " and "
        yield "and for or", node, "(" + joint.join(f"({text(value)})" for value in node.values) + ")"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert)):
        yield "not dropped", node, f"({text(node.operand)})"
    elif isinstance(node, (ast.If, ast.While)):
        yield "condition negated", node.test, f"not ({text(node.test)})"
    elif isinstance(node, ast.Call):
        yield from _of_call(node, text)


def _of_operation(node: ast.BinOp, text: Callable[[ast.AST], str]) -> Made:
    left, right = f"({text(node.left)})", f"({text(node.right)})"
    if isinstance(node.op, ast.BitAnd):
        yield "condition dropped", node, left
        yield "condition dropped", node, right
        yield "and for or", node, f"({left} | {right})"
    elif isinstance(node.op, ast.BitOr):
        yield "and for or", node, f"({left} & {right})"
    elif isinstance(node.op, (ast.Sub, ast.FloorDiv, ast.Mod, ast.Div)):
        sign = {ast.Sub: "-", ast.FloorDiv: "//", ast.Mod: "%", ast.Div: "/"}[type(node.op)]
        yield "operands swapped", node, f"({right} {sign} {left})"
        if isinstance(node.op, ast.Sub):
            yield "sign changed", node, f"({left} + {right})"
    elif isinstance(node.op, ast.Add):
        yield "sign changed", node, f"({left} - {right})"
        if isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Mult):
            first, stride = f"({text(node.left.left)})", f"({text(node.left.right)})"
            yield "stride swapped", node, f"({first} + {right} * {stride})"
    elif isinstance(node.op, ast.Mult):
        yield "sum for product", node, f"({left} + {right})"


def _of_call(node: ast.Call, text: Callable[[ast.AST], str]) -> Made:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in SWAPPED:
        prefix = text(node.func).removesuffix(name)
        yield "min for max", node.func, prefix + SWAPPED[name]
    if name == "where" and len(node.args) == 3:
        condition, first, second = map(text, node.args)
        yield "branches swapped", node, f"{text(node.func)}({condition}, {second}, {first})"
    for each in node.keywords:
        if each.arg == "mask":
            yield "mask dropped", each.value, f"(({text(each.value)}) | True)"
