"""The functions of pynvml that the probe of GPUs uses, over made-up devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30


@dataclass
class FakeDevice:
    name: str
    uuid: str
    total: int = 24 * GIB
    used: int = 0
    reserved: int = GIB // 2
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    desktop: list[tuple[int, int | None]] = field(default_factory=list)
    slices: list[FakeDevice | None] = field(default_factory=list)
    instance: tuple[int, int] = (0, 0)
    has_memory: bool = True


class FakeError(Exception):
    pass


class FakeNvml:
    def __init__(self, *devices: FakeDevice, broken: str = "", new_memory: bool = True) -> None:
        self.devices, self.broken, self.new_memory, self.open = devices, broken, new_memory, 0

    def nvmlInit(self) -> None:
        if self.broken:
            raise FakeError(self.broken)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.12"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12080

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        if pid == 404:
            raise FakeError("not found")
        return f"/usr/bin/program{pid}"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeDevice:
        return self.devices[index]

    def nvmlDeviceGetUUID(self, handle: FakeDevice) -> str:
        return handle.uuid

    def nvmlDeviceGetName(self, handle: FakeDevice) -> str:
        return handle.name

    def nvmlDeviceGetMemoryInfo(self, handle: FakeDevice, version: int | None = None) -> Any:
        if not handle.has_memory or (version is not None and not self.new_memory):
            raise FakeError("not supported")
        free = handle.total - handle.reserved - handle.used
        return SimpleNamespace(total=handle.total, free=free, used=handle.used, reserved=handle.reserved)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeDevice) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in handle.processes]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: FakeDevice) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in handle.desktop]

    def nvmlDeviceGetMigMode(self, handle: FakeDevice) -> list[int]:
        if not handle.slices:
            raise FakeError("not supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeDevice) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeDevice, index: int) -> FakeDevice:
        found = handle.slices[index] if index < len(handle.slices) else None
        if found is None:
            raise FakeError("not found")
        return found

    def nvmlDeviceGetGpuInstanceId(self, handle: FakeDevice) -> int:
        return handle.instance[0]

    def nvmlDeviceGetComputeInstanceId(self, handle: FakeDevice) -> int:
        return handle.instance[1]
