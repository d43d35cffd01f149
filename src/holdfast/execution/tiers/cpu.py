"""Pages between a pool in RAM and a store on disk. The engine's thread copies them, between steps: no other thread
touches the pool. Decides nothing."""

from __future__ import annotations

import numpy
import torch

from holdfast.execution.kv_pool import KVPool
from holdfast.execution.tiers.disk import DiskReads, Store
from holdfast.footprint.cpu import staging_places
from holdfast.kvcache.pool import Tier
from holdfast.records import StepPlan

WAIT_S = 0.02
"""For a page, where there is nothing to compute."""
CLOSE_S = 5.0
"""For what is still to be written when the engine ends."""

Over = tuple[list[int], list[int]]
"""Copies that are over: done, and failed."""


class CpuPageCopies:
    tiers = (Tier.DISK,)

    def __init__(self, store: Store, page_bytes: int) -> None:
        self._store, self._page_bytes = store, page_bytes
        self._reads = DiskReads(store, page_bytes, staging_places(page_bytes))

    def begin(self, plan: StepPlan) -> None:
        """Before the rows of the plan are computed."""
        self._reads.begin([copy for copy in plan.copies if copy.source_tier == Tier.DISK])

    def end(self, plan: StepPlan, kv: KVPool) -> Over:
        """After them. Waits a little only where there are none."""
        pages = _as_bytes(kv.pages)
        finished, failed = list[int](), list[int]()
        for copy in plan.copies:
            if copy.target_tier == Tier.DISK:
                taken = self._store.write(copy.key, memoryview(pages[copy.source]))
                (finished if taken else failed).append(copy.copy_id)
        idle = not plan.rows and not finished and not failed
        for copy, place in self._reads.collect(WAIT_S if idle else 0.0):
            if place is None:
                failed.append(copy.copy_id)
                continue
            pages[copy.target] = numpy.frombuffer(self._reads.views[place], dtype=numpy.uint8)
            self._reads.release(place)
            finished.append(copy.copy_id)
        return finished, failed

    def give_up_reads(self) -> list[int]:
        """Pages on their way from the disk are nobody's from now on. Returns which copies will never be over."""
        return [copy.copy_id for copy in self._reads.give_up()]

    def abandon(self) -> None:
        """What is on its way is nobody's: the books that asked for it are gone."""
        self._reads.give_up()

    def close(self) -> None:
        self._reads.give_up()
        self._store.close(CLOSE_S)


def _as_bytes(pages: torch.Tensor) -> numpy.ndarray[tuple[int, int], numpy.dtype[numpy.uint8]]:
    """[block, bytes], the same memory."""
    return pages.view(torch.uint8).view(len(pages), -1).numpy()
