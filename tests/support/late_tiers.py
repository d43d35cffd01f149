"""The GPU's KV tiers below a runner on a CPU: RAM that counts as pinned, places for a store's pages, and copies over a
simulated link, launched as a GPU launches them and told of as it tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from holdfast.execution.streaming.pinned_memory import PinnedMemory
from holdfast.execution.tiers.disk import DiskReads
from holdfast.execution.tiers.gpu import DiskPlaces, GpuPageCopies
from holdfast.footprint.cpu import staging_stride
from holdfast.prefix_store import PrefixStore

CPU = torch.device("cpu")


def pinned(
    sizes: list[int], ready: Callable[[int], int] = lambda address: 0, *, file: int | None = None
) -> PinnedMemory:
    return PinnedMemory(
        sizes,
        CPU,
        pin=lambda address, nbytes: ready(address),
        unpin=lambda addresses, device: None,
        background=range(len(sizes)),
        file=file,
    )


def disk_places(store: PrefixStore, page_bytes: int) -> DiskPlaces:
    stride = staging_stride(page_bytes)
    memory = pinned([8 * stride]).pieces[0]
    reads = DiskReads(store, page_bytes, 4, memoryview(memory.numpy())[: 4 * stride])
    return DiskPlaces(store, reads, memory, page_bytes, stride)


class AsGpu:
    """What a runner on a CPU uses as its tiers."""

    def __init__(self, copies: GpuPageCopies) -> None:
        self.copies, self.tiers = copies, copies.tiers

    def begin(self, plan: Any) -> None:
        self.copies.begin(plan)

    def end(self, plan: Any, kv: Any) -> tuple[list[int], list[int]]:
        self.copies.launch_stores(plan)
        return self.copies.over(not plan.rows)

    def give_up_reads(self) -> list[int]:
        return self.copies.give_up_reads()

    def abandon(self) -> None:
        self.copies.abandon()

    def close(self) -> None:
        self.copies.close()
