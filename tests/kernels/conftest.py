"""Kernels run on the GPU where there is one, else in Triton's interpreter: with two of its faults mended, and
without work that it does for nothing. What a kernel computes is not touched."""

from __future__ import annotations

import dataclasses
import functools
import math
from types import MethodType
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    import triton.language as tl
    from triton.runtime import interpreter

    _patch_tensor, _patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    _patched = set[frozenset[str]]()

    def _patch_with_index(tensor: Any, scope: Any) -> None:
        """Triton 3.6 makes loop bounds of arrays with one element by int(), which numpy has refused since 2.4."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def _patch_once(function: Any) -> Any:
        """Triton 3.6 patches its language again at every call of a device function, which takes most of the time."""
        languages = frozenset(name for name in ("tl", "core") if name in function.__globals__)
        if languages in _patched:
            return interpreter._LangPatchScope()
        scope = _patch_language(function)
        if not _patched:
            scope.restore = MethodType(_restore, scope)
        _patched.add(languages)
        return scope

    def _restore(scope: Any) -> None:
        """At the end of the launch, which patched first."""
        _patched.clear()
        type(scope).restore(scope)

    interpreter._patch_lang_tensor = _patch_with_index
    interpreter._patch_lang = _patch_once

    # Every sum and product of integers is computed a second time in int64 and compared with the limits, for an assert
    # that exists with `debug` only: a third of all time, for nothing.
    _options = interpreter.interpreter_builder.options
    assert not _options.debug
    interpreter.interpreter_builder.options = dataclasses.replace(_options, sanitize_overflow=False)

    _np_dtype = interpreter._get_np_dtype
    _np_dtype_of_scalar, _block_type = functools.cache(_np_dtype), functools.cache(tl.block_type)

    def _np_dtype_once(dtype: Any) -> Any:
        """It makes a table of all types to look up one. Types of pointers have no hash."""
        return _np_dtype(dtype) if dtype.scalar.is_ptr() else _np_dtype_of_scalar(dtype.scalar)

    def _with_element_ty(self: Any, scalar: Any) -> Any:
        return tl.block_type(scalar, self.shape) if scalar.is_ptr() else _block_type(scalar, self.shape)

    @functools.cache
    def _count_and_shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])

    def _init_tensor(self: Any, handle: Any, type: Any) -> None:
        """As Triton's own, with its objects for a shape made once and not for every value."""
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = _count_and_shape(type.shape if type.is_block() else ())

    interpreter._get_np_dtype = _np_dtype_once
    tl.tensor.__init__ = _init_tensor
    tl.block_type.with_element_ty = _with_element_ty


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", params=["llama", "window"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tiny_gpu import LLAMA, MISTRAL, Tiny

    return Tiny(tmp_path_factory.mktemp("tiny"), **(LLAMA if request.param == "llama" else MISTRAL))


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """For whole models, most of whose time the interpreter would spend on the kernel for few rows, and on parts of a
    row's keys that are empty. Both have tests of their own."""
    from holdfast.execution.gpu.layers import linear
    from holdfast.execution.triton_kernels.attention import decode

    if device.type == "cpu":
        splits = decode.decode_splits
        monkeypatch.setattr(linear, "SKINNY_ROWS", 0)
        monkeypatch.setattr(decode, "decode_splits", lambda *sizes, codes: min(4, splits(*sizes, codes=codes)))
