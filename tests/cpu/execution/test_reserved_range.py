"""The range of GPU addresses behind the KV pool: what the driver refuses changes nothing. The driver is a fake."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.errors import EngineError
from holdfast.execution.gpu.memory.virtual_memory import OUT_OF_MEMORY, RangeError, ReservedRange

GRANULE = 2 << 20
START = 1 << 40


class FakeDriver:
    """Keeps CUDA's books of handles and mappings, and refuses what CUDA refuses. `fail`: the next call of that name
    does not succeed."""

    CUmemAccessDesc = SimpleNamespace
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    INVALID = 1

    def __init__(self) -> None:
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.accessible: set[int] = set()
        self.fail: str | None = None
        self._next = 0

    @staticmethod
    def CUmemAllocationProp() -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    def _fails(self, name: str) -> bool:
        if self.fail != name:
            return False
        self.fail = None
        return True

    def cuMemGetAllocationGranularity(self, properties: Any, flag: int) -> tuple[int, ...]:
        return 0, GRANULE

    def cuMemAddressReserve(self, nbytes: int, *_: int) -> tuple[int, ...]:
        self.reserved[START] = nbytes
        return 0, START

    def cuMemAddressFree(self, at: int, nbytes: int) -> tuple[int, ...]:
        assert not self.mapped
        assert self.reserved.pop(at) == nbytes
        return (0,)

    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> tuple[int, ...]:
        if self._fails("create"):
            return OUT_OF_MEMORY, 0
        self._next += 1
        self.handles[self._next] = nbytes
        return 0, self._next

    def cuMemMap(self, at: int, nbytes: int, offset: int, handle: int, flags: int) -> tuple[int, ...]:
        if self._fails("map") or at in self.mapped:
            return (self.INVALID,)
        self.mapped[at] = (nbytes, handle)
        return (0,)

    def cuMemSetAccess(self, at: int, nbytes: int, access: Any, count: int) -> tuple[int, ...]:
        if self._fails("access"):
            return (OUT_OF_MEMORY,)
        self.accessible.add(at)
        return (0,)

    def cuMemUnmap(self, at: int, nbytes: int) -> tuple[int, ...]:
        if at not in self.mapped:
            return (self.INVALID,)
        assert self.mapped.pop(at)[0] == nbytes
        self.accessible.discard(at)
        return (0,)

    def cuMemRelease(self, handle: int) -> tuple[int, ...]:
        del self.handles[handle]
        return (0,)


def made(nbytes: int = 10 * GRANULE) -> tuple[ReservedRange, FakeDriver]:
    driver = FakeDriver()
    return ReservedRange(nbytes, torch.device("cpu"), driver), driver


@pytest.mark.parametrize("call", ["create", "map", "access"])
def test_what_is_refused_changes_nothing_and_can_be_tried_again(call: str) -> None:
    one, driver = made()
    one.back(1)
    before = (dict(driver.handles), dict(driver.mapped), one.mapped_bytes)
    driver.fail = call
    with pytest.raises(RangeError) as caught:
        one.back(3 * GRANULE)
    assert caught.value.out_of_memory == (call != "map")
    assert (driver.handles, driver.mapped, one.mapped_bytes) == before
    one.back(3 * GRANULE)
    assert one.mapped_bytes == sum(driver.handles.values()) == 3 * GRANULE
    assert driver.accessible == set(driver.mapped)
    one.close()


def test_backing_is_in_whole_granules_side_by_side_and_never_less() -> None:
    one, driver = made(5 * GRANULE - 1)
    assert one.reserved_bytes == 5 * GRANULE
    for nbytes in (1, GRANULE, GRANULE + 1, 7, 5 * GRANULE):
        one.back(nbytes)
    assert {at: size for at, (size, _) in driver.mapped.items()} == {
        START: GRANULE,
        START + GRANULE: GRANULE,
        START + 2 * GRANULE: 3 * GRANULE,
    }
    with pytest.raises(EngineError, match="shorter"):
        one.back(5 * GRANULE + 1)
    one.close()


def test_closing_gives_everything_back_once() -> None:
    one, driver = made()
    one.back(GRANULE)
    one.back(4 * GRANULE)
    one.close()
    one.close()
    assert driver.reserved == driver.handles == driver.mapped == {}
    assert one.mapped_bytes == 0
    with pytest.raises(EngineError, match="closed"):
        one.back(GRANULE)
