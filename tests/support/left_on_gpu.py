"""What is held on the first GPU, and by whom, before and after engines that must leave nothing there."""

from __future__ import annotations

import time

import torch

from holdfast.hardware.nvidia import probe

LEFT_MIB = 64


def used_mib() -> int:
    free, total = torch.cuda.mem_get_info(0)
    return (total - free) >> 20


def on_the_gpu() -> set[int]:
    """Processes that the driver lists there, by its own count: of a container perhaps none."""
    return {one.pid for one in probe().gpus[0].processes}


def assert_nothing_is_left(before_mib: int, before: set[int]) -> None:
    until_s = time.monotonic() + 20
    while (used_mib() > before_mib + LEFT_MIB or on_the_gpu() - before) and time.monotonic() < until_s:
        time.sleep(0.2)
    assert used_mib() <= before_mib + LEFT_MIB, f"{used_mib()} MiB are held, {before_mib} before"
    assert on_the_gpu() <= before
