"""This machine's NVIDIA GPUs as CUDA would show them to a program: memory, who holds it, what the environment hides.

Asks the driver through NVML, which allocates nothing on a GPU and needs no torch. A GPU that has no memory of its own
(Jetson, GB10) is given what the machine has free.

CUDA counts GPUs of different kinds with the fastest first, by a rule of its own that NVML does not tell: which one that
is, is guessed here from published rates, and said. Of MIG slices it shows a process one, and no whole GPU beside it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

from holdfast.hardware import gpus
from holdfast.hardware.probe import Memory, memory
from holdfast.units import shorten

Answer = TypeVar("Answer")

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
_MEMORY_V2 = 0x2000028
"""NVML's struct version number: the size of nvmlMemory_v2_t (40 bytes) and a 2 in the top byte."""
_SLICES = 7
"""MIG divides the compute of a GPU into this many."""
_SLICE = re.compile(r"(\d)g\.\d+gb", re.IGNORECASE)
_OLD_MIG = re.compile(r"MIG-(GPU-[0-9a-f-]+)/(\d+)/(\d+)", re.IGNORECASE)


class Nvml(Protocol):
    """What is used of `pynvml`; a fake with these will do."""

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str: ...
    def nvmlSystemGetCudaDriverVersion_v2(self) -> int: ...
    def nvmlSystemGetProcessName(self, pid: int) -> str: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...
    def nvmlDeviceGetName(self, handle: Any) -> str: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Sequence[Any]: ...
    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> Sequence[Any]: ...
    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> Sequence[int]: ...
    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any) -> int: ...
    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Any) -> int: ...
    def nvmlDeviceGetMigMode(self, handle: Any) -> Sequence[int]: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any: ...
    def nvmlDeviceGetGpuInstanceId(self, handle: Any) -> int: ...
    def nvmlDeviceGetComputeInstanceId(self, handle: Any) -> int: ...


@dataclass(frozen=True, slots=True)
class GpuProcess:
    pid: int
    """In the driver's own count: inside a container it may be another process here."""
    name: str
    nbytes: int | None
    """None: the driver does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaGpu:
    index: int
    """Of the physical GPU, in NVML's order (by bus)."""
    uuid: str
    name: str
    total_bytes: int
    """What programs can have: without what the driver keeps for itself."""
    free_bytes: int
    processes: tuple[GpuProcess, ...] = ()
    known: gpus.Gpu | None = None
    """Rates and links, where the catalogue has a GPU of that name; of a MIG slice, its share of them."""
    unified: bool = False
    mig: bool = False
    capability: tuple[int, int] | None = None
    """Compute capability; None: the driver does not say."""
    engines: int = 1
    """Of one server, that divide its memory: what is free and in all is then the part of one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaMachine:
    gpus: tuple[NvidiaGpu, ...] = ()
    """In the order in which CUDA counts them."""
    hidden: int = 0
    """GPUs and slices that a program would not see."""
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    """The newest version of CUDA whose programs the driver runs; None: it does not say."""
    reason: str = ""
    """Why there are none, or what was left out, for people to read."""


def probe(
    environment: Mapping[str, str] | None = None, nvml: Nvml | None = None, ram: Memory | None = None
) -> NvidiaMachine:
    """Never raises: where there is no driver there are no GPUs, and `reason` says why."""
    try:
        library = _library() if nvml is None else nvml
        library.nvmlInit()
    except Exception as error:
        return NvidiaMachine(reason=f"no NVIDIA driver answers ({_said(error)})")
    try:
        found = list(_all(library, ram))
        driver = library.nvmlSystemGetDriverVersion()
        cuda = _cuda_version(library)
    except Exception as error:
        return NvidiaMachine(reason=f"the NVIDIA driver answers with an error ({_said(error)})")
    finally:
        with contextlib.suppress(Exception):
            library.nvmlShutdown()
    if not found:
        return NvidiaMachine(driver=driver, reason="the NVIDIA driver knows no GPU")
    surroundings = os.environ if environment is None else environment
    ordered, guess = _in_cuda_order(found, surroundings)
    listed = surroundings.get(VISIBLE)
    seen, why = (_whole(ordered), "") if listed is None else _visible(ordered, listed)
    shown, alone = _one_slice(seen)
    return NvidiaMachine(
        gpus=shown,
        hidden=sum(len(one.slices) or 1 for one in found) - len(shown),
        driver=driver,
        cuda=cuda,
        reason="; ".join(part for part in (why, alone, guess) if part),
    )


def _cuda_version(library: Nvml) -> tuple[int, int] | None:
    try:
        number = library.nvmlSystemGetCudaDriverVersion_v2()
    except Exception:
        return None
    return number // 1000, number % 1000 // 10


def process_bytes(uuid: str, pid: int, nvml: Nvml | None = None) -> int | None:
    """What one process holds on a GPU; None: the driver does not tell, as inside most containers."""
    return _ask_device(uuid, lambda library, handle: _held_by(library, handle, pid), nvml)


@dataclass(frozen=True, slots=True)
class DeviceUse:
    total_bytes: int
    free_bytes: int
    own_bytes: int | None
    """Of the process that was asked for; None: the driver does not tell."""


def device_use(uuid: str, pid: int, nvml: Nvml | None = None) -> DeviceUse | None:
    """Of one GPU, now; None: the driver does not tell. A GPU without memory of its own is not told of either."""

    def ask(library: Nvml, handle: Any) -> DeviceUse | None:
        there = _memory(library, handle)
        return None if there is None else DeviceUse(*there, _held_by(library, handle, pid))

    return _ask_device(uuid, ask, nvml)


def _ask_device(uuid: str, ask: Callable[[Nvml, Any], Answer | None], nvml: Nvml | None) -> Answer | None:
    """Of the GPU of this UUID; None: there is none, or the driver does not tell."""
    try:
        library = _library() if nvml is None else nvml
        library.nvmlInit()
    except Exception:
        return None
    try:
        for index in range(library.nvmlDeviceGetCount()):
            handle = library.nvmlDeviceGetHandleByIndex(index)
            if library.nvmlDeviceGetUUID(handle) == uuid:
                return ask(library, handle)
    except Exception:
        return None
    finally:
        with contextlib.suppress(Exception):
            library.nvmlShutdown()
    return None


def _held_by(nvml: Nvml, handle: Any, pid: int) -> int | None:
    return next((process.nbytes for process in _processes(nvml, handle) if process.pid == pid), None)


def _library() -> Nvml:
    import pynvml

    return cast(Nvml, pynvml)


def _said(error: Exception) -> str:
    return shorten(f"{type(error).__name__}: {error}", 160)


# What is there


@dataclass(frozen=True, slots=True)
class _Found:
    gpu: NvidiaGpu
    names: tuple[str, ...]
    """By which CUDA_VISIBLE_DEVICES may call it, beside its index."""
    slices: tuple[_Found, ...] = ()
    """MIG devices; a GPU that is divided can only be used through them."""
    divided: bool = False

    @property
    def usable(self) -> NvidiaGpu | None:
        """A divided GPU shows a program its first slice; None: it has none yet."""
        if self.slices:
            return self.slices[0].gpu
        return None if self.divided else self.gpu


def _all(nvml: Nvml, ram: Memory | None) -> Iterator[_Found]:
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        whole = _gpu(nvml, handle, index, ram)
        most = _most_slices(nvml, handle)
        yield _Found(whole, (whole.uuid,), tuple(_slices(nvml, handle, whole, ram, most)), divided=most > 0)


def _gpu(nvml: Nvml, handle: Any, index: int, ram: Memory | None) -> NvidiaGpu:
    name = nvml.nvmlDeviceGetName(handle)
    known = _in_its_slot(gpus.lookup(name), nvml, handle)
    sizes = None if known is not None and known.unified else _memory(nvml, handle)
    if sizes is None:
        # The driver reports no memory of a GPU that has none of its own.
        machine = memory() if ram is None else ram
        sizes = machine.total_bytes, machine.available_bytes
        unified = True
    else:
        unified = False
    return NvidiaGpu(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=name,
        total_bytes=sizes[0],
        free_bytes=sizes[1],
        processes=_processes(nvml, handle),
        known=known,
        unified=unified,
        capability=_capability(nvml, handle),
    )


def _in_its_slot(known: gpus.Gpu | None, nvml: Nvml, handle: Any) -> gpus.Gpu | None:
    """With the link that this machine gives it. The generation is the fastest of GPU and slot together: an idle GPU
    lowers its own until there is something to copy."""
    if known is None or not known.host_link.name.startswith("PCIe"):
        return known
    with contextlib.suppress(Exception):
        generation, lanes = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle), nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)
        link = gpus.pcie_link(int(generation), int(lanes))
        return known if link is None else replace(known, host_link=link)
    return known


def _capability(nvml: Nvml, handle: Any) -> tuple[int, int] | None:
    with contextlib.suppress(Exception):
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        return int(major), int(minor)
    return None


def _memory(nvml: Nvml, handle: Any) -> tuple[int, int] | None:
    """(total, free), what the driver keeps for itself not counted; old drivers do not tell that apart."""
    with contextlib.suppress(Exception):
        found = nvml.nvmlDeviceGetMemoryInfo(handle, version=_MEMORY_V2)
        return int(found.total) - int(found.reserved), int(found.free)
    with contextlib.suppress(Exception):
        found = nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(found.total), int(found.free)
    return None


def _processes(nvml: Nvml, handle: Any) -> tuple[GpuProcess, ...]:
    """Those that hold memory, most first; drivers that may not tell say nothing."""
    found: dict[int, GpuProcess] = {}
    for ask in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        with contextlib.suppress(Exception):
            for process in ask(handle):
                used = process.usedGpuMemory
                name = "unknown"
                with contextlib.suppress(Exception):
                    name = nvml.nvmlSystemGetProcessName(process.pid).rpartition("/")[2] or name
                found[process.pid] = GpuProcess(process.pid, shorten(name, 40), None if used is None else int(used))
    return tuple(sorted(found.values(), key=lambda process: (-(process.nbytes or 0), process.pid)))


def _most_slices(nvml: Nvml, handle: Any) -> int:
    """0: not divided."""
    try:
        return nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if nvml.nvmlDeviceGetMigMode(handle)[0] else 0
    except Exception:
        return 0  # Most GPUs cannot be divided, and their driver says so with an error.


def _slices(nvml: Nvml, handle: Any, whole: NvidiaGpu, ram: Memory | None, most: int) -> Iterator[_Found]:
    for number in range(most):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except Exception:
            continue  # Places that hold no slice.
        gpu = _gpu(nvml, part, whole.index, ram)
        names = [gpu.uuid]
        with contextlib.suppress(Exception):
            ids = f"{nvml.nvmlDeviceGetGpuInstanceId(part)}/{nvml.nvmlDeviceGetComputeInstanceId(part)}"
            names.append(f"MIG-{whole.uuid}/{ids}")
        yield _Found(replace(gpu, mig=True, known=_share(gpu, whole)), tuple(names))


def _share(part: NvidiaGpu, whole: NvidiaGpu) -> gpus.Gpu | None:
    """The rates of a slice: its share of the memory's bandwidth, and of the compute that its name tells."""
    known, named = whole.known, _SLICE.search(part.name)
    if known is None or named is None:
        return None
    width, power = part.total_bytes / whole.total_bytes, int(named[1]) / _SLICES
    return replace(
        known,
        memory_bytes=part.total_bytes,
        usable_bytes=part.total_bytes,
        bandwidth_gb_s=known.bandwidth_gb_s * width,
        half_tflops=known.half_tflops * power,
        fp8_tflops=None if known.fp8_tflops is None else known.fp8_tflops * power,
        peer_link=None,
    )


# What CUDA shows of it


def _in_cuda_order(found: Sequence[_Found], environment: Mapping[str, str]) -> tuple[list[_Found], str]:
    """By the bus where CUDA is told to, or all are alike; else the fastest first, and a word that this is a guess."""
    by_bus = list(found)
    if len({one.gpu.name for one in found}) == 1 or environment.get(ORDER, "").upper() == "PCI_BUS_ID":
        return by_bus, ""
    advice = f"set {ORDER}=PCI_BUS_ID to have them counted by bus"
    if any(one.gpu.known is None for one in found):
        return by_bus, f"GPUs of different kinds, one of them unknown: CUDA may count them otherwise; {advice}"
    fastest = max(by_bus, key=_speed)
    others = [one for one in by_bus if one is not fastest]
    return [fastest, *others], f"GPUs of different kinds: CUDA counts the fastest first, most likely this; {advice}"


def _speed(found: _Found) -> float:
    return found.gpu.known.half_tflops if found.gpu.known is not None else 0.0


def _one_slice(seen: Sequence[NvidiaGpu]) -> tuple[tuple[NvidiaGpu, ...], str]:
    slices = [gpu for gpu in seen if gpu.mig]
    if not slices or len(seen) == 1:
        return tuple(seen), ""
    return (slices[0],), "CUDA shows a process one MIG slice, and no other GPU beside it"


def _whole(found: Sequence[_Found]) -> tuple[NvidiaGpu, ...]:
    return tuple(gpu for one in found if (gpu := one.usable) is not None)


def _visible(found: Sequence[_Found], listed: str) -> tuple[tuple[NvidiaGpu, ...], str]:
    """As CUDA reads it: entries up to the first that names nothing, none when one is named twice."""
    seen: list[NvidiaGpu] = []
    for entry in (word.strip() for word in listed.split(",")):
        named = _named(found, entry)
        if named is None:
            why = f"{VISIBLE} is {shorten(listed)!r}"
            if entry not in ("", "-1"):
                why += f", and {shorten(entry)!r} names no GPU: it and what follows are not used"
            return tuple(seen), why
        if named in seen:
            return (), f"{VISIBLE} is {shorten(listed)!r}: a GPU that is named twice hides all"
        seen.append(named)
    return tuple(seen), f"{VISIBLE} is {shorten(listed)!r}"


def _named(found: Sequence[_Found], entry: str) -> NvidiaGpu | None:
    if entry.isdecimal():
        return found[int(entry)].usable if len(entry) < 9 and int(entry) < len(found) else None
    if entry.upper().startswith("MIG-"):
        return _one([part for whole in found for part in whole.slices], entry)
    return _one(found, entry) if entry.upper().startswith("GPU-") else None


def _one(found: Sequence[_Found], entry: str) -> NvidiaGpu | None:
    """By the whole name, or the beginning of one when there is only one that begins so."""
    wanted = entry.casefold()
    # A prefix of an older MIG name would also begin many: its numbers must be whole.
    whole = _OLD_MIG.fullmatch(entry) is not None
    fitting = [
        candidate
        for candidate in found
        if any(
            name.casefold() == wanted or (not whole and name.casefold().startswith(wanted)) for name in candidate.names
        )
    ]
    return fitting[0].usable if len(fitting) == 1 else None
