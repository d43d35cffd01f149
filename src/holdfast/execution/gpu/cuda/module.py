"""Compiled CUDA kernels on the current GPU: loaded once, launched on torch's current stream, also while a graph is
captured. Knows the driver and no kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

from holdfast.errors import EngineError
from holdfast.execution.gpu.cuda.compiler import available, cubin, supports
from holdfast.observability.decisions import Decision

Macros = tuple[tuple[str, int], ...]
"""That a source is compiled with."""
NO_GATE, SILU = -1, 0
"""Of the macro GATE: none, or an activation as common.cuh numbers them."""
_FOLDER = Path(__file__).parent
STATIC_SHARED_BYTES = 1024
"""At most, of a kernel beside what its launch asks for, with what that is aligned to."""
_MOST_DYNAMIC_SHARED_BYTES = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""
_SERIALIZED_BY_THE_KERNEL = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"""
EARLY_CAPABILITY = (9, 0)
_DEFAULT_SHARED_BYTES = 48 * 1024
"""More than this, with a kernel's own, must be asked for."""
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_UNSIGNED = {1: 0, 2: 1, 4: 2}
"""CU_TENSOR_MAP_DATA_TYPE_UINT8 and so on, by bytes"""
_SWIZZLE_128, _PROMOTE_256 = 3, 3
"""CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B"""


class DriverError(EngineError, RuntimeError):
    """As torch's own errors of the GPU are: who handles a shortage of memory, or a capture that failed, sees it."""


class TensorMap:
    """CUtensorMap of a matrix in GPU memory, or of several: what Hopper copies a box of at a time, with zeros where
    there is nothing. Dimensions from the outermost on; `strides` in elements, of all but the innermost. `swizzled`: in
    lines of 128 bytes, as wgmma reads them. Not to outlive the memory."""

    def __init__(
        self, place: int, element_bytes: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], *,
        swizzled: bool = False,
    ) -> None:  # fmt: skip
        self._memory = (ctypes.c_uint8 * (_MAP_BYTES + _MAP_ALIGNMENT))()
        start, rank = ctypes.addressof(self._memory), len(shape)
        offset = -start % _MAP_ALIGNMENT
        self.value = (ctypes.c_uint8 * _MAP_BYTES).from_buffer(self._memory, offset)
        status = _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(start + offset),
            _UNSIGNED[element_bytes],
            rank,
            ctypes.c_void_p(place),
            (ctypes.c_uint64 * rank)(*reversed(shape)),
            (ctypes.c_uint64 * (rank - 1))(*(stride * element_bytes for stride in reversed(strides))),
            (ctypes.c_uint32 * rank)(*reversed(box)),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,
            _SWIZZLE_128 if swizzled else 0,
            _PROMOTE_256,
            0,
        )
        _check(status, "describing a matrix")


Argument = torch.Tensor | TensorMap | int | float | None


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute"""

    _fields_ = (("id", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def text(name: str) -> str:
    """The source of this name beside this file, with what all of them share before it."""
    return "\n".join((_FOLDER / file).read_text() for file in ("common.cuh", f"{name}.cu"))


def against_gpu(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no kernel in CUDA can run there with inputs of this type; None: nothing is against it."""
    if device.type != "cuda":
        return "the kernels in CUDA need a GPU"
    if dtype.itemsize != 2:
        return f"the kernels in CUDA multiply numbers of 2 bytes; these have {dtype.itemsize}"
    if not available():
        return "the kernels in CUDA are compiled by libnvrtc, which torch's CUDA build brings; none was found"
    if not supports(torch.cuda.get_device_capability(device)):
        return "torch's libnvrtc does not know this GPU"
    return None


@cache
def processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def kernel_decision(
    about: str,
    found: Sequence[str | None],
    kernels: str = "cuda",
    reason: str = "codes are decoded in the registers that products read",
) -> Decision:
    """Which kernels take matrices of which this was found: what is against `kernels`, None where nothing is."""
    against = [one for one in found if one is not None]
    if not against:
        return Decision(about, kernels, reason, "measured")
    if len(against) == len(found):
        return Decision(about, "triton", against[0], "planner")
    return Decision(about, f"{kernels}, triton", f"{len(against)} of {len(found)} matrices: {against[0]}", "planner")


class Kernel:
    """`shared_bytes` of dynamic shared memory for every launch. `early`: it may begin while the kernel before it on the
    stream ends, and waits for that itself (`await_kernel_before`); Hopper and later."""

    def __init__(self, function: ctypes.c_void_p, threads: int, shared_bytes: int, *, early: bool = False) -> None:
        self._function, self._threads, self._shared_bytes = function, threads, shared_bytes
        self._launch = _driver().cuLaunchKernelEx
        self._attribute = _Attribute(_SERIALIZED_BY_THE_KERNEL, 0, (ctypes.c_uint * 16)(1))
        self._attributes = int(early and torch.cuda.get_device_capability() >= EARLY_CAPABILITY)
        if shared_bytes + STATIC_SHARED_BYTES > _DEFAULT_SHARED_BYTES:
            _check(_driver().cuFuncSetAttribute(function, _MOST_DYNAMIC_SHARED_BYTES, shared_bytes), "shared memory")

    def __call__(self, grid: tuple[int, int, int], *arguments: Argument) -> None:
        """Tensors are pointers to their first element, None a null pointer, int is an `int`, float a `float`, a map
        itself. The kernel must take as many, in these types: nothing checks it."""
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        config = _Config(
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(self._threads, 1, 1),
            self._shared_bytes,
            torch.cuda.current_stream().cuda_stream,
            ctypes.pointer(self._attribute),
            self._attributes,
        )
        _check(self._launch(ctypes.byref(config), self._function, pointers, None), "a launch")


class Module:
    """The kernels of one source, compiled with these macros for the current GPU."""

    def __init__(self, source: str, defines: Mapping[str, int] | None = None) -> None:
        torch.zeros(1, device="cuda")  # makes the context that modules are loaded to
        self._module, capability = ctypes.c_void_p(), torch.cuda.get_device_capability()
        load = _driver().cuModuleLoadData
        if load(ctypes.byref(self._module), cubin(source, capability, defines)):
            # What lay in the cache may be damaged.
            again = load(ctypes.byref(self._module), cubin(source, capability, defines, fresh=True))
            _check(again, "loading compiled kernels")

    def kernel(self, name: str, *, threads: int, shared_bytes: int = 0, early: bool = False) -> Kernel:
        function = ctypes.c_void_p()
        status = _driver().cuModuleGetFunction(ctypes.byref(function), self._module, name.encode())
        _check(status, f"the kernel {name}")
        return Kernel(function, threads, shared_bytes, early=early)


def _value(
    argument: Argument,
) -> ctypes._SimpleCData[int] | ctypes._SimpleCData[float] | ctypes.c_void_p | ctypes.Array[ctypes.c_uint8]:
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, TensorMap):
        return argument.value
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int(argument)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def driver_call(name: str, *arguments: object, fails: bool = True) -> None:
    """By its name in the driver. `fails`: raises DriverError where it does not succeed."""
    status = getattr(_driver(), name)(*arguments)
    if fails:
        _check(status, name)


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        found = (text.value or b"").decode() or f"status {status}"
        raise DriverError(f"{what} failed in the CUDA driver: {found}")
