"""Which device and number type a runner computes with, and why. Knows nothing of models beyond their stored type."""

from __future__ import annotations

import platform
from collections.abc import Collection
from pathlib import Path

import torch

from holdfast.errors import ConfigurationError
from holdfast.models import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SPELLINGS = {"float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "bf16": "bfloat16"}

FAST_BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""CPU flags (x86 and Arm spellings) under which bfloat16 products run in hardware."""


def choose_device(requested: str = "auto") -> torch.device:
    """`auto` and `cpu` give the CPU; anything else is refused by name."""
    if requested in ("auto", "cpu"):
        return torch.device("cpu")
    if requested.split(":")[0] == "cuda":
        raise ConfigurationError(
            "CUDA execution is not part of this build yet",
            code="HF120",
            needed="device cpu",
            found=requested,
            fix="--device cpu",
            field="device",
        )
    raise ConfigurationError(
        f"device {requested!r} is not known", needed="auto or cpu", found=requested, fix="--device cpu", field="device"
    )


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Feature names of the first CPU; empty where the system does not tell."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def choose_dtype(requested: str, spec: ModelSpec, flags: Collection[str] | None = None) -> tuple[torch.dtype, str]:
    """The type of weights and activations on a CPU, with the reason."""
    name = _SPELLINGS.get(requested, requested)
    if name in DTYPES:
        return DTYPES[name], "asked for"
    if name != "auto":
        raise ConfigurationError(
            f"dtype {requested!r} is not known",
            needed="auto, " + ", ".join(DTYPES),
            found=requested,
            fix="--dtype auto",
            field="dtype",
        )
    if spec.stored_dtype == "float32":
        return torch.float32, "the model is stored in float32"
    have = frozenset(cpu_flags() if flags is None else flags)
    fast = [flag for flag in FAST_BFLOAT16_FLAGS if flag in have]
    if fast:
        return torch.bfloat16, f"this CPU multiplies bfloat16 in hardware ({fast[0]})"
    return torch.float32, f"this CPU ({platform.machine()}) has no bfloat16 products; float32 is the fastest it has"


def packs_weights(dtype: torch.dtype, device: torch.device, flags: Collection[str] | None = None) -> bool:
    """Whether oneDNN's packed products are worth their reordering: where bfloat16 has instructions of its own."""
    have = frozenset(cpu_flags() if flags is None else flags)
    hardware = not have.isdisjoint(("amx_bf16", "avx512_bf16"))
    if device.type != "cpu" or dtype != torch.bfloat16 or not hardware:
        return False
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def set_threads(count: int | None) -> int:
    """Sets how many threads torch computes with, where a number is given; returns the number in force."""
    if count is not None:
        if count < 1:
            raise ConfigurationError(
                f"{count} threads cannot compute", needed="at least 1", found=str(count), field="threads"
            )
        torch.set_num_threads(count)
    return torch.get_num_threads()
