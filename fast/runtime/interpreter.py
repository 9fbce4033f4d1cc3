"""Caches for Triton's interpreter, which otherwise computes the same constants for every value."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any


def spare_the_interpreter() -> None:
    """Install the caches, which save two thirds of its time, where this process never compiles."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    # Only debug mode checks whether integer sums overflow.
    builder.options = replace(builder.options, sanitize_overflow=False)
    _remember_numpy_types(interpreter)
    _remember_block_types()
    _remember_shapes()
    _define_language_once(interpreter)
    _type_comparisons(interpreter)


def _type_comparisons(interpreter: Any) -> None:
    """Make comparisons return int1.

    Triton 3.9 keeps the operands' type, and then refuses such masks.
    """
    import triton.language as tl

    def typed(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda lhs, rhs: interpreter.TensorHandle(compare(lhs, rhs).data, tl.int1)

    builder = interpreter.interpreter_builder
    for name in dir(builder):
        if name.startswith(("create_icmp", "create_fcmp")):
            setattr(builder, name, typed(getattr(builder, name)))


def _define_language_once(interpreter: Any) -> None:
    """Patch triton.language once, instead of at every launch and every call of a device function."""
    import triton.language as tl

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    setattr(tl.core.tensor, "__index__", _index)  # noqa: B010  # numpy 2.4 refuses Triton 3.6's own
    kept = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda function: kept


def _index(self: Any) -> int:
    """Return the bound of a loop, a scalar that the interpreter keeps as an array of one entry."""
    return self.handle.data.item()


def _remember_numpy_types(interpreter: Any) -> None:
    """Cache NumPy types, instead of building a table of them for every look-up."""
    numpy_type = interpreter._get_np_dtype
    known = {}
    interpreter._get_np_dtype = lambda kind: known.get(kind.name) or known.setdefault(kind.name, numpy_type(kind))


def _remember_block_types() -> None:
    """Cache a block type's shape, size and name, instead of checking and formatting them for every value."""
    from triton.language import core

    initialise = core.block_type.__init__
    known = {}

    def remembered(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in known:
            initialise(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    core.block_type.__init__ = remembered


def _remember_shapes() -> None:
    """Cache a value's shape and size, as constants of the language."""
    from triton.language import core

    known = {}

    def remembered(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in known:
            known[sizes] = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = known[sizes]

    core.tensor.__init__ = remembered
