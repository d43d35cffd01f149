"""What this process holds on its GPU, as the driver counts it, and what is free there."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from holdfast.errors import ConfigurationError
from holdfast.hardware.nvidia import process_bytes

LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class GpuHeld:
    own_bytes: int
    free_bytes: int
    total_bytes: int


class GpuMemory:
    """`free_before_bytes`: on the GPU before this process touched it, for drivers that do not tell processes apart."""

    def __init__(self, device: torch.device, uuid: str, free_before_bytes: int) -> None:
        self.device, self._uuid, self._free_before = device, uuid, free_before_bytes
        self._own, self._next_look_s = 0, 0.0

    def held(self) -> GpuHeld:
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        own = process_bytes(self._uuid, os.getpid())
        # In a container the driver counts processes by other numbers: what has become less is then ours.
        return GpuHeld(max(0, self._free_before - free) if own is None else own, free, total)

    def own_bytes(self) -> int:
        """Asked for after every step; looked up no more than once in LOOK_S."""
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_S
            own = process_bytes(self._uuid, os.getpid())
            self._own = max(0, self._free_before - torch.cuda.mem_get_info(self.device)[0]) if own is None else own
        return self._own

    def most_allocated(self) -> int:
        """Bytes of tensors that torch had at once since the process began."""
        return int(torch.cuda.max_memory_allocated(self.device))

    def give_back_cached(self) -> None:
        """What torch has freed and keeps for itself."""
        torch.cuda.empty_cache()


def open_device(uuid: str) -> torch.device:
    """The device of this UUID as torch counts devices, with a context on it."""
    try:
        count = torch.cuda.device_count()
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            "CUDA does not start",
            code="HF124",
            needed=f"a driver for CUDA {torch.version.cuda}",
            found=str(error).splitlines()[0],
            fix="update the NVIDIA driver, install a torch build for the CUDA version that nvidia-smi shows, "
            "or --device cpu",
            field="device",
        ) from error
    for index in range(count):
        if str(torch.cuda.get_device_properties(index).uuid) in uuid:
            device = torch.device("cuda", index)
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)
            return device
    raise ConfigurationError(
        "the planned GPU is not there for torch",
        code="HF121",
        needed=uuid,
        found=f"{count} devices, none of them it",
        fix="leave CUDA_VISIBLE_DEVICES as it was when the plan was made",
        field="device",
    )
