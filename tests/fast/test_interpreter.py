"""Caches of the interpreter change none of its results."""

import math

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from specsim.fast.runtime.launch import INTERPRETED, kernel

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="with a GPU kernels are compiled")

ELEMENTS = (tl.int1, tl.int32, tl.uint32, tl.int64, tl.float32, tl.bfloat16, tl.pointer_type(tl.float32))
SHAPES = ([1], [8], [2, 4], [4, 2], [2, 2, 2])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_types_of_one_shape_keep_their_elements(shape):
    found = [tl.block_type(element, shape) for _ in range(2) for element in ELEMENTS]
    for each, element in zip(found, 2 * ELEMENTS, strict=True):
        assert each.element_ty is each.scalar is element
        assert list(each.shape) == shape
        assert each.numel == math.prod(shape)
        assert each.name == f"<{tl.core.tuple(shape)}, {element}>"
        assert [each == other for other in found] == [element == other.element_ty for other in found]


def test_shapes_of_one_size_differ():
    found = [tl.block_type(tl.int32, shape) for shape in SHAPES]
    assert [[one == other for other in found] for one in found] == np.eye(len(SHAPES)).tolist()


def test_constants_of_the_language_are_sizes():
    assert tl.block_type(tl.int32, [tl.constexpr(4)]) == tl.block_type(tl.int32, [4])


@pytest.mark.parametrize("shape", [[3], [2, 5], []])
def test_bad_shapes_are_refused_each_time(shape):
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)):
            tl.block_type(tl.int32, shape)


@pytest.mark.parametrize("shape", [None, *SHAPES], ids=str)
def test_a_value_has_the_shape_of_its_type(shape):
    for element in ELEMENTS:
        kind = tl.block_type(element, shape) if shape else element
        value = tl.tensor("handle", kind)
        assert (value.handle, value.type, value.dtype) == ("handle", kind, element)
        assert [size.value for size in value.shape] == (shape or [])
        assert value.numel.value == math.prod(shape or [])


@pytest.mark.parametrize(
    ("element", "expected"),
    [(tl.int1, bool), (tl.int32, np.int32), (tl.uint8, np.uint8), (tl.float16, np.float16), (tl.bfloat16, np.uint16)],
)
def test_numpy_types_are_those_of_elements(element, expected):
    for _ in range(2):
        for kind in (element, tl.block_type(element, [2])):
            assert interpreter._get_np_dtype(kind) == np.dtype(expected)
        for kind in (tl.pointer_type(element), tl.block_type(tl.pointer_type(element), [2])):
            assert interpreter._get_np_dtype(kind) == np.dtype(np.uint64)


def value(shape: list[int] | None, element: tl.dtype = tl.int32) -> tl.tensor:
    """A value of ones, a scalar without a shape."""
    ones = np.ones(shape or 1, interpreter._get_np_dtype(element))
    return tl.tensor(interpreter.TensorHandle(ones, element), tl.block_type(element, shape) if shape else element)


SEMANTIC = interpreter.interpreter_semantic


@pytest.mark.parametrize("second", [None, [1], [4], [1, 4], [2, 1], [2, 4], [2, 2, 4]], ids=str)
@pytest.mark.parametrize("first", [None, [1], [4], [1, 4], [2, 1], [2, 4], [2, 2, 4]], ids=str)
def test_operands_are_broadcast_as_in_numpy(first, second):
    for element in (tl.int32, tl.float32, tl.int32):
        found = SEMANTIC.broadcast_impl_value(value(first), value(second, element))
        shape = list(np.broadcast_shapes(first or (), second or ()))
        assert [[size.value for size in each.shape] for each in found] == [shape, shape]
        assert [list(each.handle.data.shape) for each in found] == [shape or [1]] * 2
        assert [each.dtype for each in found] == [tl.int32, element]


def test_shapes_that_do_not_fit_are_refused_each_time():
    for _ in range(2):
        with pytest.raises(ValueError, match="incompatible"):
            SEMANTIC.broadcast_impl_value(value([2]), value([4]))


@pytest.mark.parametrize("element", [tl.float16, tl.bfloat16])
def test_quotients_of_16_bits_are_computed_in_32(element):
    for divides, kind in ((True, tl.float32), (False, element), (True, tl.float32)):
        assert SEMANTIC.computation_type_impl(element, False, element, False, divides) is kind
    lhs, rhs = SEMANTIC.binary_op_type_checking_impl(value([4], element), value([4], element), div_or_mod=True)
    assert lhs.dtype is rhs.dtype is tl.float32


def test_pointers_are_no_operands_of_a_product():
    pointer = value([4], tl.pointer_type(tl.float32))
    for _ in range(2):
        with pytest.raises(Exception, match="pointer"):
            SEMANTIC.mul(pointer, pointer, sanitize_overflow=False)


def test_equal_numbers_of_other_types_are_other_constants():
    numbers = [(1, tl.int32), (1, tl.int64), (1.0, tl.float32), (True, tl.int1), (0, tl.int32), (1, tl.int32)]
    found = [SEMANTIC.scalar_constant(number, element) for number, element in numbers]
    assert [(each.handle.data.item(), each.dtype) for each in found] == numbers
    assert found[0] is found[-1]
    with pytest.raises(ValueError, match="read-only"):
        found[0].handle.data[:] = 2


@kernel
def _multiply(out_ptr, factor):
    value = tl.load(out_ptr)
    tl.store(out_ptr, value * value + factor)


@pytest.mark.parametrize(("dtype", "expected"), [(torch.int32, 2**17 + 2), (torch.int64, 2**32 + 2**17 + 2)])
def test_integers_wrap_as_on_a_gpu(dtype, expected):
    out = torch.full((1,), 2**16 + 1, dtype=dtype)
    _multiply[(1,)](out, 1)
    assert out.item() == expected


@kernel
def _keep_where(x_ptr, out_ptr, first, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    mask = (first > 0) & (offs < first)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=mask, other=-1))


def test_a_scalar_comparison_is_part_of_a_mask():
    out = torch.zeros(4, dtype=torch.int64)
    _keep_where[(1,)](x_ptr=torch.arange(4), out_ptr=out, first=2, BLOCK=4)
    assert out.tolist() == [0, 1, -1, -1]


@pytest.mark.parametrize("operands", [tl.int32, tl.int64, tl.float32])
def test_comparisons_are_of_one_bit(operands):
    value = interpreter.TensorHandle(np.ones(2, interpreter._get_np_dtype(operands)), operands)
    compare = "create_fcmpOLT" if operands.is_floating() else "create_icmpSLT"
    assert getattr(interpreter.interpreter_builder, compare)(value, value).dtype == tl.int1
