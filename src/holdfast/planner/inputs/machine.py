"""From --gpu, --vram, --ram and --nvme, or from what this machine has, to the devices that a plan is made for.

    --gpu h100-80x2, --gpu rtx4090,rtx3090    GPUs of the catalogue, all of their memory free
    --vram 22GiB, --vram 22GiBx2              GPUs of no particular kind with so much to use; beside --gpu: a budget
    --ram 64GiB                               alone: a CPU with so much to use; beside GPUs: what tiers may take
    nothing                                   the GPUs that CUDA would show here, else the CPU, with what is free now

Measures through `hardware`; knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holdfast import hardware
from holdfast.config.setting import require_memory
from holdfast.errors import ConfigurationError
from holdfast.hardware import gpus
from holdfast.observability.decisions import Decision
from holdfast.planner.inputs.question import Device, Machine
from holdfast.units import MIB, TIB, format_bytes, parse_bytes, shorten

if TYPE_CHECKING:
    from holdfast.hardware import nvidia

CONTRADICTION = "HF143"
VRAM_LIMIT_BYTES, RAM_LIMIT_BYTES, NVME_LIMIT_BYTES = 16 * TIB, 1024 * TIB, 1024 * 1024 * TIB
_EACH = re.compile(r"(.+?)\s*[x×*]\s*(\d{1,9})")
_SHOWN_PROCESSES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """As the user wrote it; None was not given."""

    gpu: str | Sequence[str] | None = None
    vram: str | int | None = None
    ram: str | int | None = None
    nvme: str | int | None = None
    device: str = "auto"
    """auto, cpu or cuda."""
    ranks: int = 1
    """Of one machine: how many GPUs are meant where no number is written."""
    replicas: int = 1
    nodes: int = 1
    """That the ranks are of, for words."""


@dataclass(frozen=True, slots=True)
class Found:
    machine: Machine
    decisions: tuple[Decision, ...]


def machine_of(asked: Asked, *, here: nvidia.NvidiaMachine | None = None, ram: hardware.Memory | None = None) -> Found:
    """`here` and `ram`: what this machine has, measured now where they are left out."""
    _check(asked)
    ram_bytes = _size(asked.ram, "ram", RAM_LIMIT_BYTES)
    nvme_bytes = _size(asked.nvme, "nvme", NVME_LIMIT_BYTES)
    vram_bytes, count = _vram(asked.vram)
    if asked.gpu is not None:
        devices, decisions = _of_catalogue(asked, vram_bytes, count)
    elif vram_bytes is not None:
        devices, decisions = _of_size(asked, vram_bytes, count)
    else:
        return _this_machine(asked, ram_bytes, nvme_bytes, here, ram)
    machine = Machine(devices=devices, ram_bytes=ram_bytes, nvme_bytes=nvme_bytes, nvme_limit_bytes=nvme_bytes)
    return Found(machine, decisions)


def _check(asked: Asked) -> None:
    if asked.device not in ("auto", "cpu", "cuda"):
        raise ConfigurationError(
            f"device: {shorten(asked.device)!r} is not valid",
            needed="auto, cpu or cuda",
            fix="--device auto",
            field="device",
        )
    given = "gpu" if asked.gpu is not None else "vram" if asked.vram is not None else None
    if asked.device == "cpu" and given is not None:
        raise _contradicts("--device cpu excludes a GPU", f"--{given}", "leave one of the two out", given)


def _contradicts(message: str, found: str, fix: str, field: str) -> ConfigurationError:
    return ConfigurationError(message, code=CONTRADICTION, found=found, fix=fix, field=field)


def _size(written: str | int | None, field: str, limit_bytes: int) -> int | None:
    if written is None:
        return None
    try:
        found = parse_bytes(written, field=field)
    except OverflowError:
        found = limit_bytes + 1
    if isinstance(written, bool) or not 0 < found <= limit_bytes:
        raise ConfigurationError(
            f"{field}: {shorten(written)!r} is not valid",
            needed=f"more than 0, and at most {format_bytes(limit_bytes)}",
            found=shorten(written),
            fix=f"--{field} 22GiB",
            field=field,
        )
    return require_memory(field, written, found)


def _vram(written: str | int | None) -> tuple[int | None, int | None]:
    """Of each GPU, and how many, where it is written: `22GiBx2`."""
    each = _EACH.fullmatch(written.strip()) if isinstance(written, str) else None
    if each is None:
        return _size(written, "vram", VRAM_LIMIT_BYTES), None
    count = int(each[2])
    if not 1 <= count <= gpus.COUNT_LIMIT:
        raise ConfigurationError(
            f"vram: {count} is not a number of GPUs",
            code=gpus.WRONG_COUNT,
            needed=f"1 to {gpus.COUNT_LIMIT:,}",
            fix=f"--vram {shorten(each[1])}x2",
            field="vram",
        )
    return _size(each[1], "vram", VRAM_LIMIT_BYTES), count


# GPUs that are only named


def _of_catalogue(
    asked: Asked, budget: int | None, count: int | None
) -> tuple[tuple[Device, ...], tuple[Decision, ...]]:
    assert asked.gpu is not None
    names = asked.gpu.split(",") if isinstance(asked.gpu, str) else list(asked.gpu)
    if not all(name.strip() for name in names):
        raise ConfigurationError(
            f"gpu: in {shorten(','.join(names))!r} a name is empty",
            code=gpus.UNKNOWN_GPU,
            needed="the name of a GPU on either side of a comma",
            found=shorten(",".join(names)),
            fix=f"--gpu {','.join(name for name in names if name.strip()) or 'rtx4090'}",
            field="gpu",
        )
    groups = [gpus.find_group(name) for name in names]
    total = sum(group.count for group in groups)
    if count is not None and count != total:
        raise _contradicts(
            f"--gpu names {total} GPUs and --vram {count}", str(asked.vram), "use the same number", "vram"
        )
    if len(groups) == 1 and gpus.lookup(names[0]) is not None:
        # No number was written: as many as the ranks that were asked for.
        groups = [replace(groups[0], count=max(1, asked.ranks))]
    if sum(group.count for group in groups) > gpus.COUNT_LIMIT:
        raise ConfigurationError(
            f"gpu: {sum(group.count for group in groups):,} GPUs are too many",
            code=gpus.WRONG_COUNT,
            needed=f"at most {gpus.COUNT_LIMIT:,}",
            fix=f"--gpu {groups[0].gpu.key}x2",
            field="gpu",
        )
    _require_one_machine(groups)
    devices = [
        _catalogue_device(index, gpu, budget)
        for index, gpu in enumerate(group.gpu for group in groups for _ in range(group.count))
    ]
    decisions = [_catalogue_decision(group, name) for group, name in zip(groups, names, strict=True)]
    return tuple(devices), (*decisions, *_added(total, len(devices), groups[0].gpu.key, asked))


def _require_one_machine(groups: Sequence[gpus.Gpus]) -> None:
    """A GPU that has its machine's RAM and no link to others is the only one there: two of them are two machines."""
    alone = [group for group in groups if group.gpu.alone]
    count = sum(group.count for group in alone)
    if count < 2:
        return
    name = alone[0].gpu.key
    raise ConfigurationError(
        f"gpu: {count} x {name} means {count} machines: it uses the machine's own RAM, and a machine has only one",
        code=gpus.WRONG_COUNT,
        needed=f"one {name}, and -tp 1",
        found=str(count),
        fix=f"--gpu {name}, and a server on each machine",
        field="gpu",
    )


def _added(named: int, planned: int, name: str, asked: Asked) -> Iterator[Decision]:
    """Where no number was written, and the split that was asked for takes more than one."""
    if planned <= named:
        return
    sizes = "-tp x -pp x -dp needs" if asked.replicas > 1 else "-tp x -pp needs"
    each, on = ("", "") if asked.nodes == 1 else (" of each node", f" on each of {asked.nodes} nodes")
    reason = f"one {name} was given, but {sizes} {planned}{on}: planned for {planned}, as with {name}x{planned}"
    yield Decision("gpus", f"{planned}{each}", reason, "set")


def _catalogue_device(index: int, gpu: gpus.Gpu, budget: int | None) -> Device:
    if budget is not None and budget > gpu.usable_bytes:
        raise _contradicts(
            f"--vram is more than {gpu.key} has",
            f"{format_bytes(budget)} of {format_bytes(gpu.usable_bytes)}",
            f"--vram {gpu.usable_bytes // MIB}MiB, or leave it out",
            "vram",
        )
    return Device(
        index=index,
        name=gpu.key,
        kind="gpu",
        total_bytes=gpu.usable_bytes,
        free_bytes=gpu.usable_bytes,
        budget_bytes=budget,
        gpu=gpu,
        unified=gpu.unified,
    )


def _catalogue_decision(group: gpus.Gpus, written: str) -> Decision:
    gpu = group.gpu
    name = gpu.key if group.count == 1 else f"{group.count} x {gpu.key}"
    reason = f"{gpu.name}, {format_bytes(gpu.usable_bytes)} usable"
    if gpu.usable_estimated:
        reason += " (estimated from cards like it)"
    others = gpus.other_sizes(written)
    if others:
        reason += f"; no size was given: also sold as {', '.join(others)}"
    reason += f"; all of it is counted as free: {gpu.source}"
    return Decision("gpu", name, reason, "catalogue")


def _of_size(asked: Asked, vram: int, count: int | None) -> tuple[tuple[Device, ...], tuple[Decision, ...]]:
    number = count if count is not None else max(1, asked.ranks)
    devices = tuple(
        Device(index=index, name="gpu", kind="gpu", total_bytes=vram, free_bytes=vram, budget_bytes=vram)
        for index in range(number)
    )
    reason = "usable memory of an unspecified GPU: its speed is not known"
    chosen = Decision("gpu", f"{number} x {format_bytes(vram)}", reason, "set")
    return devices, (chosen, *_added(count or 1, number, str(asked.vram), asked))


# This machine


def _this_machine(
    asked: Asked,
    ram_bytes: int | None,
    nvme_bytes: int | None,
    here: nvidia.NvidiaMachine | None,
    ram: hardware.Memory | None,
) -> Found:
    processor = hardware.processor()
    features = processor.features
    if asked.device != "cpu":
        from holdfast.hardware import nvidia  # Where GPUs are named, nothing is asked of the driver.

        found = nvidia.probe() if here is None else here
        if found.gpus:
            memory = hardware.memory() if ram is None else ram
            devices = tuple(measured_device(index, gpu) for index, gpu in enumerate(found.gpus))
            available = memory.available_bytes if ram_bytes is None else ram_bytes
            machine = Machine(
                devices=devices,
                ram_bytes=available,
                nvme_bytes=nvme_bytes,
                nvme_limit_bytes=nvme_bytes,
                cpu_features=features,
                host=processor,
                host_computes=hardware.compiled_kernels(),
            )
            return Found(machine, _measured_decisions(found))
        if asked.device == "cuda":
            raise ConfigurationError(
                "--device cuda, but this machine has no GPU to plan for",
                code=CONTRADICTION,
                found=found.reason or "none",
                fix="name one: --gpu rtx4090, or its memory: --vram 24GiB",
                field="device",
            )
        why = found.reason
    else:
        why = "as asked"
    device, decision = _cpu(ram_bytes, hardware.memory() if ram is None else ram, why)
    kernels = hardware.compiled_kernels()
    machine = Machine(
        devices=(device,),
        nvme_bytes=nvme_bytes,
        nvme_limit_bytes=nvme_bytes,
        cpu_features=features,
        compiled_kernels=kernels,
    )
    return Found(machine, (decision,))


def _cpu(ram_bytes: int | None, memory: hardware.Memory, why: str) -> tuple[Device, Decision]:
    if ram_bytes is not None:
        device = Device(
            index=0, name="cpu", kind="cpu", total_bytes=ram_bytes, free_bytes=ram_bytes, budget_bytes=ram_bytes
        )
        return device, Decision("device", "cpu", f"with {format_bytes(ram_bytes)} of usable RAM; {why}", "set")
    device = Device(
        index=0,
        name="cpu",
        kind="cpu",
        total_bytes=memory.total_bytes,
        free_bytes=memory.available_bytes,
        measured=True,
    )
    reason = f"{format_bytes(memory.available_bytes)} of RAM are free ({memory.limited_by}); {why}"
    return device, Decision("device", "cpu", reason, "measured")


def measured_device(index: int, gpu: nvidia.NvidiaGpu) -> Device:
    return Device(
        index=index,
        name=gpu.known.key if gpu.known is not None else shorten(gpu.name),
        kind="gpu",
        total_bytes=gpu.total_bytes,
        free_bytes=gpu.free_bytes,
        gpu=gpu.known,
        measured=True,
        held_by=holders(gpu),
        unified=gpu.unified,
        selector=gpu.uuid if gpu.mig else str(gpu.index),
    )


def holders(gpu: nvidia.NvidiaGpu) -> tuple[str, ...]:
    """Who holds its memory, most first."""
    shown = [
        f"{shorten(process.name)} (pid {process.pid})"
        + (f": {format_bytes(process.nbytes)}" if process.nbytes is not None else "")
        for process in gpu.processes[:_SHOWN_PROCESSES]
    ]
    more = len(gpu.processes) - len(shown)
    return (*shown, f"and {more} more") if more else tuple(shown)


def _measured_decisions(found: nvidia.NvidiaMachine) -> tuple[Decision, ...]:
    decisions = []
    for gpu in found.gpus:
        where = "of the machine's RAM " if gpu.unified else ""
        reason = f"{format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} {where}are free"
        decisions.append(Decision("gpu", shorten(gpu.name), f"{reason}; driver {shorten(found.driver)}", "measured"))
    if found.reason:
        decisions.append(Decision("gpus", len(found.gpus), f"{found.reason}; {found.hidden} not seen", "environment"))
    return tuple(decisions)
