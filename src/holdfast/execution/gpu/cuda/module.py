"""Compiled CUDA kernels on the current GPU: loaded once, launched on torch's current stream, also while a graph is
captured. Knows the driver and no kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache

import torch

from holdfast.errors import EngineError
from holdfast.execution.gpu.cuda.compiler import cubin

_MOST_DYNAMIC_SHARED_BYTES = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""
_STATIC_SHARED_LIMIT = 48 * 1024
"""More than this must be asked for."""

Argument = torch.Tensor | int | float | None


class Kernel:
    """`shared_bytes` of dynamic shared memory for every launch."""

    def __init__(self, function: ctypes.c_void_p, threads: int, shared_bytes: int) -> None:
        self._function, self._threads, self._shared_bytes = function, threads, shared_bytes
        self._launch = _driver().cuLaunchKernel
        if shared_bytes > _STATIC_SHARED_LIMIT:
            _check(_driver().cuFuncSetAttribute(function, _MOST_DYNAMIC_SHARED_BYTES, shared_bytes), "shared memory")

    def __call__(self, grid: tuple[int, int, int], *arguments: Argument) -> None:
        """Tensors are pointers to their first element, None a null pointer, int is an `int`, float a `float`. The
        kernel must take as many, in these types: nothing checks it."""
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = self._launch(
            self._function, *grid, self._threads, 1, 1, self._shared_bytes, stream, pointers, None
        )  # fmt: skip
        _check(status, "a launch")


class Module:
    """The kernels of one source, compiled with these macros for the current GPU."""

    def __init__(self, source: str, defines: Mapping[str, int] | None = None) -> None:
        torch.zeros(1, device="cuda")  # makes the context that modules are loaded to
        data = cubin(source, torch.cuda.get_device_capability(), defines)
        self._module = ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(self._module), data), "loading a module")

    def kernel(self, name: str, *, threads: int, shared_bytes: int = 0) -> Kernel:
        function = ctypes.c_void_p()
        status = _driver().cuModuleGetFunction(ctypes.byref(function), self._module, name.encode())
        _check(status, f"the kernel {name}")
        return Kernel(function, threads, shared_bytes)


def _value(argument: Argument) -> ctypes._SimpleCData[int] | ctypes._SimpleCData[float] | ctypes.c_void_p:
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int(argument)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise EngineError(f"{what} failed in the CUDA driver", found=(text.value or b"").decode() or f"status {status}")
