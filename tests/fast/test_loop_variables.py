"""No kernel has a loop variable that Triton's compiler drops, while its interpreter carries it.

Triton compares the values of its trial pass through a loop with those before the loop. After `last = slot`, a loop that
repeats `last = slot` and then changes `slot` leaves `last` at the same value in that pass, so it is not carried.
"""

import ast
from pathlib import Path

import specsim.fast

KERNELS = ("jit", "kernel")
DROPPED = """
@triton.jit
def kernel(out_ptr, count):
    slot = 0 * count
    last = slot
    for _ in range(count):
        last = slot
        slot = slot + 3
    tl.store(out_ptr, last)
"""


def is_kernel(node: ast.AST) -> bool:
    """Check for a function with a decorator of a kernel or a device function."""
    names = [ast.unparse(each).rpartition(".")[2] for each in getattr(node, "decorator_list", [])]
    return isinstance(node, ast.FunctionDef) and any(name in KERNELS for name in names)


def dropped(body: list[ast.stmt], values: dict[str, object]) -> list[str]:
    """List the loop variables that would be dropped.

    values: a value of each name, the same one where names have the same value.
    """
    found = []
    for statement in body:
        if isinstance(statement, ast.For | ast.While):
            assigned = {name for inner in ast.walk(statement) for name in targets(inner)}
            inside = dict(values)
            found += dropped(statement.body, inside)
            found += [
                f"{name} in line {statement.lineno}"
                for name in assigned & set(values)
                for other in assigned & set(values) - {name}
                if inside[name] is values[name] is values[other] is not inside[other]
            ]
            values.update({name: object() for name in assigned})
        elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
            source = values.setdefault(statement.value.id, object())
            values.update(dict.fromkeys(targets(statement), source))
        else:
            for inner in ("body", "orelse"):
                found += dropped(getattr(statement, inner, []), dict(values))
            values.update({name: object() for each in ast.walk(statement) for name in targets(each)})
    return found


def targets(node: ast.AST) -> set[str]:
    """Name the variables that a statement assigns."""
    written = ast.walk(node) if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.For) else ()
    return {each.id for each in written if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def dropped_in(text: str) -> list[str]:
    kernels = [node for node in ast.walk(ast.parse(text)) if is_kernel(node)]
    return [f"{kernel.name}: {name}" for kernel in kernels for name in dropped(kernel.body, {})]


def test_no_kernel_has_a_dropped_loop_variable():
    files = sorted(Path(specsim.fast.__file__ or "").parent.rglob("*.py"))
    assert sum(is_kernel(node) for file in files for node in ast.walk(ast.parse(file.read_text()))) > 100
    assert {file.name: found for file in files if (found := dropped_in(file.read_text()))} == {}


def test_a_dropped_loop_variable_is_found():
    """It is not if it starts with another value, or is assigned an expression or after the change."""
    assert dropped_in(DROPPED) == ["kernel: last in line 6"]
    assert dropped_in(DROPPED.replace("    last = slot\n    for", "    last = slot + 1\n    for")) == []
    assert dropped_in(DROPPED.replace("        last = slot\n", "        last = slot - 0\n")) == []
    assert (
        dropped_in(
            DROPPED.replace("        last = slot\n        slot = slot + 3", "        slot += 3\n        last = slot")
        )
        == []
    )
