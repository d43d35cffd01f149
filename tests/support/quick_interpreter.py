"""Triton's interpreter with its faults mended, and without work that it does for nothing. What a kernel computes is not
touched. Importing this changes Triton, where kernels are interpreted; it knows nothing of our kernels."""

from __future__ import annotations

import dataclasses
import functools
from types import MethodType
from typing import Any

import numpy
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language import core
from triton.runtime import interpreter

_patch_tensor, _patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
_patched = set[frozenset[str]]()
_found: dict[tuple[frozenset[frozenset[str]], frozenset[str]], list[tuple[Any, str, Any]]] = {}


def _patch_with_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 makes loop bounds of arrays with one element by int(), which numpy has refused since 2.4."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _patch_once(function: Any) -> Any:
    """Triton 3.6 patches its language again at every call of a device function, which takes most of the time, and looks
    for what is to be patched at every launch, a tenth of what is left."""
    languages = frozenset(name for name in ("tl", "core") if name in function.__globals__)
    if languages in _patched:
        return interpreter._LangPatchScope()
    key = frozenset(_patched), languages
    if key in _found:
        scope = interpreter._LangPatchScope()
        for owner, name, member in _found[key]:
            scope.set_attr(owner, name, member)
    else:
        scope = _patch_language(function)
        _found[key] = [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]
    if not _patched:
        scope.restore = MethodType(_restore, scope)
    _patched.add(languages)
    return scope


def _restore(scope: Any) -> None:
    """At the end of the launch, which patched first."""
    _patched.clear()
    type(scope).restore(scope)


def _patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """As Triton's own, without a copy of all arguments for every call, and without a look whether one of them is the
    one that is added here."""
    if getattr(member, core.TRITON_BUILTIN, False):
        member = getattr(member, "__wrapped__", member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **kwargs)

    scope.set_attr(owner, name, call)


_np_dtype = interpreter._get_np_dtype
_np_dtype_of_scalar = functools.cache(_np_dtype)


def _np_dtype_once(dtype: Any) -> Any:
    """It makes a table of all types to look up one. Types of pointers have no hash."""
    return _np_dtype(dtype) if dtype.scalar.is_ptr() else _np_dtype_of_scalar(dtype.scalar)


@functools.cache
def _shape_of(sizes: tuple[int, ...]) -> tuple[Any, int, Any, Any]:
    """A type's shape and count, then a tensor's: the same objects for the same sizes, so that `is` compares them."""
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    count = validate_block_shape(list(sizes))
    return tl.tuple(sizes), count, tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(count)


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    self.element_ty = element_ty
    self.sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    self.shape, self.numel, self.tensor_shape, self.tensor_numel = _shape_of(self.sizes)


def _with_element_ty(self: Any, scalar: Any) -> Any:
    made = tl.block_type.__new__(tl.block_type)
    made.__dict__.update(self.__dict__)
    made.element_ty = scalar
    return made


_SCALAR_SHAPE, _ONE = tl.tuple([]), tl.constexpr(1)


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    """As Triton's own, with its objects for a shape made once and not for every value."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    if type.is_block():
        self.numel, self.shape = type.tensor_numel, type.tensor_shape
    else:
        self.numel, self.shape = _ONE, _SCALAR_SHAPE


_valid_size = interpreter._validate_np_data_size


def _init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    """As the dataclass's own, with its check where numbers could be too wide only. Types of pointers have no width."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if data.itemsize * 8 > getattr(dtype, "primitive_bitwidth", 64) and not _valid_size(data, dtype):
        raise ValueError(f"numbers of {data.itemsize} bytes are too wide for {dtype}")


def _spread(data: Any, shape: Any) -> Any:
    """The same numbers in a larger shape, in which nothing is copied and nobody writes."""
    if not data.flags.c_contiguous:
        return numpy.broadcast_to(data, shape)
    added = len(shape) - data.ndim
    kept = zip(data.shape, shape[added:], data.strides, strict=True)
    strides = (0,) * added + tuple([stride if size == wanted else 0 for size, wanted, stride in kept])
    spread = numpy.ndarray(shape, data.dtype, data, 0, strides)
    spread.flags.writeable = False
    return spread


def _splat(scalar: Any, block: Any) -> Any:
    """A number as a block of a type's shape."""
    handle, kind = scalar.handle, block.with_element_ty(scalar.type.scalar)
    data = handle.data
    if type(data) is numpy.ndarray and data.size == 1 and data.dtype == _np_dtype_once(handle.dtype):
        return tl.tensor(interpreter.TensorHandle(_spread(data.reshape(1), block.sizes), handle.dtype.scalar), kind)
    return tl.tensor(interpreter.interpreter_builder.create_splat(kind, handle), kind)


@functools.cache
def _common_sizes(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return numpy.broadcast_shapes(left, right)


def _spread_block(block: Any, sizes: tuple[int, ...]) -> Any:
    if block.type.sizes == sizes:
        return block
    data = _spread(block.handle.data, sizes)
    kind = tl.block_type(block.type.scalar, sizes)
    return tl.tensor(interpreter.TensorHandle(data, block.handle.dtype.scalar), kind)


def _broadcast(left: Any, right: Any) -> Any:
    """As Triton's own. Most operands have the same shape already."""
    first, second = left.type, right.type
    if not first.is_block():
        return (_splat(left, second), right) if second.is_block() else (left, right)
    if not second.is_block():
        return left, _splat(right, first)
    if first.shape is second.shape:
        return left, right
    sizes = _common_sizes(first.sizes, second.sizes)
    return _spread_block(left, sizes), _spread_block(right, sizes)


_constant = interpreter.interpreter_semantic.scalar_constant
_constant_once = functools.lru_cache(maxsize=4096, typed=True)(_constant)


def _scalar_constant(value: Any, dtype: Any) -> Any:
    """Most are the same few, and nothing writes into them. Types of pointers have no hash."""
    return _constant(value, dtype) if dtype is None or dtype.is_ptr() else _constant_once(value, dtype)


_check = interpreter.interpreter_semantic.binary_op_type_checking_impl
_NUMBERS = (int, float)


@functools.lru_cache(maxsize=4096, typed=True)
def _number_for(number: Any, dtype: Any, on_the_right: bool, div: bool) -> Any:
    """What a Python number becomes in an operation with numbers of a type: a scalar of the type that is computed in."""
    scalar = _constant(0, dtype)
    return _check(scalar, number, div_or_mod=div)[1] if on_the_right else _check(number, scalar, div_or_mod=div)[0]


def _check_unless_same(
    left: Any,
    right: Any,
    pointer_left: Any = False,
    pointer_right: Any = False,
    arithmetic: Any = True,
    div: Any = False,
) -> Any:
    """Blocks of the same type are computed in it; only divisions of short floats are not. A number's type follows from
    the block's."""
    if isinstance(left, tl.tensor) and isinstance(right, tl.tensor):
        if left.dtype is right.dtype and not div and not left.dtype.is_ptr():
            return _broadcast(left, right)
    elif arithmetic and type(right) in _NUMBERS and isinstance(left, tl.tensor) and not left.dtype.is_ptr():
        number = _number_for(right, left.dtype, True, bool(div))
        return _broadcast(interpreter.interpreter_semantic.cast(left, number.dtype), number)
    elif arithmetic and type(left) in _NUMBERS and isinstance(right, tl.tensor) and not right.dtype.is_ptr():
        number = _number_for(left, right.dtype, False, bool(div))
        return _broadcast(number, interpreter.interpreter_semantic.cast(right, number.dtype))
    return _check(left, right, pointer_left, pointer_right, arithmetic, div)


_EQUAL, _OTHER = tl.constexpr(True), tl.constexpr(False)
_tuple_equal = core.tuple.__eq__


def _equal_tuples(self: Any, other: Any) -> Any:
    if self is other:
        return _EQUAL
    if type(other) is list and all(type(size) is int for size in other):
        return _EQUAL if self.values == other else _OTHER
    return _tuple_equal(self, other)


_dtype_equal = tl.dtype.__eq__


def _equal_dtypes(self: Any, other: Any) -> bool:
    return self is other or _dtype_equal(self, other)


_INTEGERS = frozenset([*tl.dtype.SINT_TYPES, *tl.dtype.UINT_TYPES])

interpreter._patch_lang_tensor = _patch_with_index
interpreter._patch_lang = _patch_once
interpreter._patch_attr = _patch_attr
interpreter._get_np_dtype = _np_dtype_once
interpreter.interpreter_semantic.broadcast_impl_value = _broadcast
interpreter.interpreter_semantic.binary_op_type_checking_impl = _check_unless_same
interpreter.interpreter_semantic.scalar_constant = _scalar_constant
# Every launch ends with a copy of all storages onto themselves: the host's are the device's here.
interpreter.GridExecutor._restore_args_dev = lambda *storages: None
interpreter.TensorHandle.__init__ = _init_handle
tl.tensor.__init__ = _init_tensor
tl.block_type.__init__ = _init_block_type
tl.block_type.with_element_ty = _with_element_ty
tl.block_type.to_ir = lambda self, builder: self  # Triton's own makes the same once more.
tl.dtype.is_int = lambda self: self.name in _INTEGERS
tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
core.tuple.__eq__ = _equal_tuples
tl.dtype.__eq__ = _equal_dtypes

# Every sum and product of integers is computed a second time in int64 and compared with the limits, for an assert that
# exists with `debug` only: a third of all time, for nothing.
_options = interpreter.interpreter_builder.options
assert not _options.debug
interpreter.interpreter_builder.options = dataclasses.replace(_options, sanitize_overflow=False)
