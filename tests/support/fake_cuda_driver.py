"""A fake of the driver's calls for virtual memory, over ordinary memory: it keeps CUDA's books of handles and mappings,
refuses what CUDA refuses, and poisons what is not mapped, so that whoever reads it gets NaN instead of a fault."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import torch

from holdfast.execution.gpu.memory.kv_range import KVRange
from holdfast.execution.gpu.memory.virtual_memory import OUT_OF_MEMORY, ReservedRange
from holdfast.kvcache.groups import KVLayout

GRANULE = 2 << 20
POISON = 0xFF
"""NaN in float32, float16, bfloat16 and both kinds of float8."""


class FakeDriver:
    """`fail`: the next call of that name does not succeed. `interrupt`: Ctrl-C comes in the next of that name, which
    succeeds. `memory_bytes`: of the GPU, for all pieces together."""

    CUmemAccessDesc = SimpleNamespace
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    INVALID = 1

    def __init__(self, granule: int = GRANULE, memory_bytes: int = 1 << 40) -> None:
        self.granule, self.memory_bytes = granule, memory_bytes
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.accessible: dict[int, int] = {}
        self.fail: str | None = None
        self.interrupt: str | None = None
        self._next, self._memory = 0, torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def CUmemAllocationProp() -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    def _fails(self, name: str) -> bool:
        if self.fail != name:
            return False
        self.fail = None
        return True

    def _done(self, name: str, *values: int) -> tuple[int, ...]:
        if self.interrupt == name:
            self.interrupt = None
            signal.raise_signal(signal.SIGINT)
        return 0, *values

    def cuMemGetAllocationGranularity(self, properties: Any, flag: int) -> tuple[int, ...]:
        return 0, self.granule

    def cuMemAddressReserve(self, nbytes: int, *_: int) -> tuple[int, ...]:
        self._memory = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self.reserved[self._memory.data_ptr()] = nbytes
        return 0, self._memory.data_ptr()

    def cuMemAddressFree(self, at: int, nbytes: int) -> tuple[int, ...]:
        assert not self.mapped
        assert self.reserved.pop(at) == nbytes
        return self._done("free")

    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> tuple[int, ...]:
        assert nbytes % self.granule == 0
        if self._fails("create") or sum(self.handles.values()) + nbytes > self.memory_bytes:
            return OUT_OF_MEMORY, 0
        self._next += 1
        self.handles[self._next] = nbytes
        return self._done("create", self._next)

    def cuMemMap(self, at: int, nbytes: int, offset: int, handle: int, flags: int) -> tuple[int, ...]:
        if self._fails("map") or at in self.mapped:
            return (self.INVALID,)
        assert self.handles[handle] == nbytes
        self.mapped[at] = (nbytes, handle)
        return self._done("map")

    def cuMemSetAccess(self, at: int, nbytes: int, access: Any, count: int) -> tuple[int, ...]:
        if self._fails("access"):
            return (OUT_OF_MEMORY,)
        end = at + nbytes
        while at < end:
            size, _ = self.mapped[at]
            self.accessible[at] = size
            self.bytes_at(at, size).fill_(0x11)  # Whatever was there before.
            at += size
        assert at == end
        return self._done("access")

    def cuMemUnmap(self, at: int, nbytes: int) -> tuple[int, ...]:
        if at not in self.mapped:
            return (self.INVALID,)
        assert self.mapped.pop(at)[0] == nbytes
        self.accessible.pop(at, None)
        self.bytes_at(at, nbytes).fill_(POISON)
        return self._done("unmap")

    def cuMemRelease(self, handle: int) -> tuple[int, ...]:
        assert handle not in {held for _, held in self.mapped.values()}
        del self.handles[handle]
        return self._done("release")

    def bytes_at(self, at: int, nbytes: int) -> torch.Tensor:
        first = at - self._memory.data_ptr()
        return self._memory[first : first + nbytes]


class FakeRange(ReservedRange):
    """A range of a fake driver."""

    def __init__(self, nbytes: int, driver: FakeDriver) -> None:
        super().__init__(nbytes, torch.device("cpu"), driver)

    def bytes_view(self) -> torch.Tensor:
        assert self._address is not None
        return self._memory._driver.bytes_at(self._address, self.reserved_bytes)  # type: ignore[no-any-return]


def fake_kv_range(layout: KVLayout, most_blocks: int, dtype: torch.dtype, driver: FakeDriver) -> KVRange:
    reserved = FakeRange(most_blocks * layout.page_bytes, driver)
    return KVRange(layout, most_blocks, torch.device("cpu"), dtype, reserved=reserved)
