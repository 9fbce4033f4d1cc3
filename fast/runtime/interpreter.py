"""Caches for Triton's interpreter, which otherwise computes the same constants for every value."""

import functools
import inspect
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
    _remember_scalars(interpreter)
    _remember_common_types(interpreter)
    _remember_common_shapes(interpreter)
    _unwrap_by_type()
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

    interpreter._patch_attr = functools.partial(_call_directly, interpreter.interpreter_semantic)
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    setattr(tl.core.tensor, "__index__", _index)  # noqa: B010  # numpy 2.4 refuses Triton 3.6's own
    scope = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda function: scope


def _call_directly(semantic: Any, owner: Any, name: str, member: Any, *_: Any) -> None:
    """Replace a function of the language by its innermost one, without the checks made around it at each call."""
    function = inspect.unwrap(member)

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs, _semantic=semantic)

    setattr(owner, name, call)


def _index(self: Any) -> int:
    """Return the bound of a loop, a scalar that the interpreter keeps as an array of one entry."""
    return self.handle.data.item()


def _remember_numpy_types(interpreter: Any) -> None:
    """Cache NumPy types, instead of building a table of them for every look-up."""
    numpy_type = interpreter._get_np_dtype
    cache = {}
    interpreter._get_np_dtype = lambda kind: cache.get(kind.name) or cache.setdefault(kind.name, numpy_type(kind))


def _remember_block_types() -> None:
    """Cache a block type's shape, size and name, instead of checking and formatting them for every value."""
    from triton.language import core

    initialise = core.block_type.__init__
    of_element = core.block_type.with_element_ty
    cache = {}
    siblings = {}

    def remembered(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in cache:
            initialise(self, element_ty, shape)
            cache[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = cache[key]

    def sibling(self: Any, scalar_ty: Any) -> Any:
        key = self.name, scalar_ty.name
        return siblings.get(key) or siblings.setdefault(key, of_element(self, scalar_ty))

    core.block_type.__init__ = remembered
    core.block_type.with_element_ty = sibling


def _remember_shapes() -> None:
    """Cache a value's shape and size, as constants of the language; equal shapes are one object."""
    from triton.language import core

    by_sizes = {}
    cache = {}

    def constants(type: Any) -> tuple[Any, Any]:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in by_sizes:
            by_sizes[sizes] = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))
        return by_sizes[sizes]

    def remembered(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = cache.get(type.name) or cache.setdefault(type.name, constants(type))

    core.tensor.__init__ = remembered


def _remember_scalars(interpreter: Any) -> None:
    """Cache the values of numbers in a kernel's source; nothing can write into them."""
    semantic = type(interpreter.interpreter_semantic)
    constant = semantic.scalar_constant
    cache = {}

    def remembered(self: Any, value: Any, dtype: Any) -> Any:
        if not isinstance(value, (int, float)):
            return constant(self, value, dtype)
        key = type(value), value, dtype.name
        if key not in cache:
            cache[key] = constant(self, value, dtype)
            cache[key].handle.data.flags.writeable = False
        return cache[key]

    semantic.scalar_constant = remembered


def _unwrap_by_type() -> None:
    """Decide by a value's exact type whether it is a constant of the language, before all its base classes."""
    from triton.language import core

    unwrap = core._unwrap_if_constexpr
    plain = {core.tensor, core.dtype, core.block_type, int, float, bool, str, type(None)}

    def by_type(value: Any) -> Any:
        kind = type(value)
        return value if kind in plain else value.value if kind is core.constexpr else unwrap(value)

    core._unwrap_if_constexpr = by_type


def _remember_common_types(interpreter: Any) -> None:
    """Cache the type in which an operation computes; operands of one type and shape stay as they are."""
    semantic = type(interpreter.interpreter_semantic)
    computation_type, cast = semantic.computation_type_impl, semantic.cast
    check = semantic.binary_op_type_checking_impl
    tensor = interpreter.interpreter_semantic.tensor
    unchanged = {"int1", "int8", "int32", "int64", "uint8", "uint32", "uint64", "fp32", "fp64"}  # in quotients too
    cache = {}

    def checked(self: Any, lhs: Any, rhs: Any, *options: Any, **more: Any) -> Any:
        is_same = type(lhs) is type(rhs) is tensor and lhs.dtype is rhs.dtype and lhs.shape is rhs.shape
        return (lhs, rhs) if is_same and lhs.dtype.name in unchanged else check(self, lhs, rhs, *options, **more)

    def remembered(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, divides: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, divides
        return cache.get(key) or cache.setdefault(key, computation_type(self, a, a_is_scalar, b, b_is_scalar, divides))

    def changed(self: Any, value: Any, dst_ty: Any, *rounding: Any, **options: Any) -> Any:
        return value if value.dtype is dst_ty.scalar else cast(self, value, dst_ty, *rounding, **options)

    semantic.computation_type_impl = remembered
    semantic.cast = changed
    semantic.binary_op_type_checking_impl = checked


def _remember_common_shapes(interpreter: Any) -> None:
    """Cache the shape to which two operands are broadcast, and leave operands of one shape as they are."""
    semantic = type(interpreter.interpreter_semantic)
    broadcast = semantic.broadcast_impl_value
    cache = {}

    def fitted(self: Any, value: Any, shape: Any, block: Any, sizes: tuple[int, ...]) -> Any:
        if value.shape is shape:
            return value
        kind = block.with_element_ty(value.dtype)
        is_block = value.type.is_block()
        create = self.builder.create_broadcast if is_block else self.builder.create_splat
        handle = create(value.handle, sizes) if is_block else create(kind, value.handle)
        return self.tensor(handle, kind)

    def remembered(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        key = id(lhs.shape), id(rhs.shape)  # of the cached shapes, which live on
        if key not in cache:
            common, _ = broadcast(self, lhs, rhs)
            cache[key] = common.shape, common.type, tuple(size.value for size in common.shape)
        return fitted(self, lhs, *cache[key]), fitted(self, rhs, *cache[key])

    semantic.broadcast_impl_value = remembered
