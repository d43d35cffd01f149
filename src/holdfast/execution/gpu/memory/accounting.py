"""What the engine holds on its GPU, as the driver counts it, and what is free there. What the process held before the
engine came is not its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
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


def held_before(uuid: str) -> int:
    """What this process holds on a GPU that the engine did not take: a caller's tensors and context. To be asked before
    `open_device`. 0 where the driver does not tell: what is free is then all that is looked at."""
    torch.cuda.empty_cache()  # What torch only keeps would become the engine's, and be counted as the caller's.
    return process_bytes(uuid, os.getpid()) or 0


class GpuMemory:
    """`free_before_bytes`: on the GPU before the engine touched it, for drivers that do not tell processes apart.
    `not_ours_bytes`: what this process held before the engine came. `sharing`: ranks of this engine on the same GPU,
    which hold about the same. `context_bytes`: that a context takes, where other engines take of the GPU at the same
    time: what has become less there is not ours; None: there are none."""

    def __init__(
        self,
        device: torch.device,
        uuid: str,
        free_before_bytes: int,
        not_ours_bytes: int = 0,
        sharing: int = 1,
        context_bytes: int | None = None,
    ) -> None:
        self._sharing, self._context = sharing, context_bytes
        self.beside_torch: Callable[[], int] = lambda: 0
        """Bytes that the engine has taken there without torch."""
        self.device, self._uuid, self._free_before = device, uuid, free_before_bytes
        self._not_ours, self._tensors_before = not_ours_bytes, 0
        self._own, self._next_look_s = 0, 0.0

    def held(self) -> GpuHeld:
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        own = self.told_bytes()
        # In a container the driver counts processes by other numbers: what has become less is then ours.
        return GpuHeld(self._not_told(free) if own is None else own, free, total)

    def _not_told(self, free_bytes: int) -> int:
        if self._context is not None:
            kept = int(torch.cuda.memory_reserved(self.device)) - self._tensors_before
            return self._context + max(0, kept) + self.beside_torch()
        return max(0, self._free_before - free_bytes) // self._sharing

    def told_bytes(self) -> int | None:
        """What the engine holds by the driver's count; None: the driver does not tell."""
        told = process_bytes(self._uuid, os.getpid())
        return None if told is None else max(0, told - self._not_ours)

    def own_bytes(self) -> int:
        """Asked for after every step; looked up no more than once in LOOK_S."""
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_S
            own = self.told_bytes()
            self._own = self._not_told(torch.cuda.mem_get_info(self.device)[0]) if own is None else own
        return self._own

    def look_again(self) -> None:
        """The next `own_bytes` is of that moment."""
        self._next_look_s = 0.0

    def watch_tensors(self) -> None:
        """From here on `most_allocated` counts; tensors that are there already are not the engine's."""
        torch.cuda.reset_peak_memory_stats(self.device)
        self._tensors_before = int(torch.cuda.memory_allocated(self.device))

    def forget_loading(self) -> None:
        """Weights may have lain there twice for a moment: that is no part of a step. What torch keeps of it is given
        back."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def most_allocated(self) -> int:
        """Bytes of tensors that the engine had at once since `watch_tensors`, or since the load where that is over."""
        return int(torch.cuda.max_memory_allocated(self.device)) - self._tensors_before

    def kept_by_torch(self) -> int:
        """Of tensors, and of what torch has freed and keeps, with that of graphs."""
        return int(torch.cuda.memory_reserved(self.device))

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
            "CUDA failed to initialize",
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
        "torch does not see the planned GPU",
        code="HF121",
        needed=uuid,
        found=f"{count} devices, none of which is it",
        fix="keep CUDA_VISIBLE_DEVICES as it was when the plan was made",
        field="device",
    )
