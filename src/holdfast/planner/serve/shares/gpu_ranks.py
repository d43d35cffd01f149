"""Which GPU each rank of a server has, and which of them the plan is made for: the one with the least to use, with the
terms of the rank that holds most. Knows no model.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from holdfast.config.unsupported import NOT_WITH_RANKS, RANK_GPUS
from holdfast.errors import ConfigurationError
from holdfast.hardware.nvidia import NvidiaGpu
from holdfast.observability.decisions import Decision
from holdfast.planner.fit.result import GpuChoice, device_budget
from holdfast.planner.inputs.machine import holders, measured_device
from holdfast.planner.inputs.question import Device
from holdfast.units import counted, format_bytes

TOO_FEW_GPUS = "HF133"


def gpus_of_ranks(
    gpus: Sequence[NvidiaGpu], ranks: int, environment: Mapping[str, str] | None = None, *, nodes: int = 1
) -> tuple[NvidiaGpu, ...]:
    """One for each rank, in order: as RANK_GPUS names them, or the visible ones from the first on. `ranks`: of this
    node, where there are several `nodes`. Raises ConfigurationError where it does not name each, one is not there, or
    they are not alike."""
    listed = (os.environ if environment is None else environment).get(RANK_GPUS)
    if listed is None:
        if len(gpus) < ranks:
            raise _too_few(gpus, ranks, nodes)
        chosen = tuple(gpus[:ranks])
        require_alike(chosen)
        return chosen
    chosen = named_gpus(gpus, listed, ranks, "-tp times -pp")
    require_alike(chosen)
    return chosen


def gpus_of_nodes(
    gpus: Sequence[NvidiaGpu], ranks: int, nodes: int, environment: Mapping[str, str] | None = None
) -> tuple[NvidiaGpu, ...]:
    """The same of several nodes before others are known, as if each had such GPUs as this one."""
    own = gpus_of_ranks(gpus, ranks // nodes, environment, nodes=nodes)
    others = (replace(gpu, uuid=f"{gpu.uuid}, of node {node}", processes=()) for node in range(1, nodes) for gpu in own)
    return (*own, *others)


def named_gpus(gpus: Sequence[NvidiaGpu], listed: str, ranks: int, times: str) -> tuple[NvidiaGpu, ...]:
    """As RANK_GPUS lists them. `times`: of what `ranks` is the product, for people."""
    words = [word.strip() for word in listed.split(",")]
    if len(words) != ranks or not all(word.isdecimal() for word in words):
        raise ConfigurationError(
            f"{RANK_GPUS} does not name the GPU of each rank",
            code=TOO_FEW_GPUS,
            needed=f"{counted(ranks, 'number')} with commas between them, for as many ranks ({times})",
            found=listed,
            fix=f"{RANK_GPUS}={','.join(map(str, range(ranks)))}",
            field="tensor_parallel_size",
        )
    for rank, word in enumerate(words):
        if int(word) >= len(gpus):
            raise _not_there(gpus, rank, listed)
    return tuple(gpus[int(word)] for word in words)


def choice_of(gpu: NvidiaGpu) -> GpuChoice:
    return GpuChoice(index=gpu.index, uuid=gpu.uuid, name=gpu.name, engines=gpu.engines)


def _too_few(gpus: Sequence[NvidiaGpu], ranks: int, nodes: int) -> ConfigurationError:
    sizes, where = "-tp 1" if len(gpus) == 1 else f"-tp times -pp of 1 to {len(gpus)}", ""
    if nodes > 1:
        sizes, where = "more nodes, or smaller -tp and -pp", " of this node"
    return ConfigurationError(
        f"rank {len(gpus)}{where} has no GPU: {counted(ranks, 'rank')}, and {counted(len(gpus), 'visible GPU')}",
        code=TOO_FEW_GPUS,
        needed="a GPU for each rank" + (f"; with these {sizes}" if nodes == 1 else ""),
        found=_shown(gpus),
        fix=f"{sizes}; or make more GPUs visible (CUDA_VISIBLE_DEVICES); or ranks on the CPU: --device cpu",
        field="tensor_parallel_size",
    )


def _shown(gpus: Sequence[NvidiaGpu]) -> str:
    return f"{len(gpus)} visible: " + (", ".join(f"{place}: {gpu.name}" for place, gpu in enumerate(gpus)) or "none")


def _not_there(gpus: Sequence[NvidiaGpu], rank: int, listed: str) -> ConfigurationError:
    return ConfigurationError(
        f"rank {rank} has no GPU: {RANK_GPUS} is {listed}",
        code=TOO_FEW_GPUS,
        needed=f"numbers under {len(gpus)}, the visible GPUs by their place",
        found=_shown(gpus),
        fix="smaller numbers; or make more GPUs visible (CUDA_VISIBLE_DEVICES); or ranks on the CPU: --device cpu",
        field="tensor_parallel_size",
    )


def require_alike(gpus: Sequence[NvidiaGpu]) -> None:
    """Raises ConfigurationError, with the first rank whose GPU has not rank 0's compute capability."""
    first = gpus[0]
    for rank, gpu in enumerate(gpus):
        if gpu.capability != first.capability:
            raise ConfigurationError(
                f"rank {rank} has {gpu.name} and rank 0 {first.name}: the same kernels do not run on both",
                code=NOT_WITH_RANKS,
                needed="GPUs of one compute capability",
                found=", ".join(f"{one.name} {'.'.join(map(str, one.capability or ()))}" for one in gpus),
                fix=f"name GPUs that are alike in {RANK_GPUS}, or leave -tp and -pp out",
                field="tensor_parallel_size",
            )


def require_same(gpus: Sequence[NvidiaGpu]) -> None:
    """Raises ConfigurationError, with the first rank whose GPU is another one than rank 0's. Each rank chooses experts
    by itself: products are cut by what a GPU has, and a choice that is near could fall otherwise on another one."""
    first = gpus[0]
    for rank, gpu in enumerate(gpus):
        if gpu.name != first.name:
            raise ConfigurationError(
                f"rank {rank} has {gpu.name} and rank 0 {first.name}: they may choose other experts for the same token",
                code=NOT_WITH_RANKS,
                needed="GPUs of one model for a mixture of experts",
                found=", ".join(one.name for one in gpus),
                fix=f"name GPUs that are the same in {RANK_GPUS}, or leave -tp out",
                field="tensor_parallel_size",
            )


def tightest(gpus: Sequence[NvidiaGpu], utilization: float) -> tuple[int, Device]:
    """The rank whose GPU has the least for it, and that GPU as its device. Ranks of one GPU have equal parts of it."""
    return _tightest(_parts(gpus), range(len(gpus)), utilization)


def stage_devices(gpus: Sequence[NvidiaGpu], stages: int, utilization: float) -> list[tuple[int, Device]]:
    """The same of each stage, of ranks that follow one another; empty: all stages have as much, or there is one."""
    parts, each = _parts(gpus), len(gpus) // stages
    found = [_tightest(parts, range(first, first + each), utilization) for first in range(0, len(gpus), each)]
    alike = len({device_budget(device, utilization) for _, device in found}) == 1
    return [] if alike else found


def _parts(gpus: Sequence[NvidiaGpu]) -> list[Device]:
    """Of each rank."""
    sharing = Counter(gpu.uuid for gpu in gpus)

    def part(gpu: NvidiaGpu) -> NvidiaGpu:
        many = sharing[gpu.uuid]
        return replace(gpu, free_bytes=gpu.free_bytes // many, total_bytes=gpu.total_bytes // many)

    return [measured_device(0, part(gpu)) for gpu in gpus]


def _tightest(parts: Sequence[Device], ranks: Sequence[int], utilization: float) -> tuple[int, Device]:
    rank = min(ranks, key=lambda one: device_budget(parts[one], utilization))
    return rank, parts[rank]


def of_node(rank: int, ranks: int, nodes: int) -> str:
    """For people; nothing where there is one."""
    return f" of node {rank * nodes // ranks}" if nodes > 1 else ""


def rank_decision(gpus: Sequence[NvidiaGpu], rank: int, nodes: int = 1) -> Decision:
    """For people to read. `rank`: the one that the plan is made for. `nodes`: on which they are, as many on each."""
    places = ", ".join(str(gpu.index) for gpu in gpus)
    rows = "; ".join(
        f"rank {number} has GPU {gpu.index}{of_node(number, len(gpus), nodes)}, {format_bytes(gpu.free_bytes)} of"
        f" {format_bytes(gpu.total_bytes)} free"
        for number, gpu in enumerate(gpus)
    )
    short = "" if len({gpu.free_bytes for gpu in gpus}) == 1 else f"; rank {rank} has the least"
    held = holders(gpus[rank]) if short else ()
    taken = f", others hold: {', '.join(held)}" if held else ""
    most = max(gpu.engines for gpu in gpus)
    shared = f"; {most} engines of this server divide a GPU, and this is one's part" if most > 1 else ""
    return Decision("device", f"GPUs {places}, {gpus[0].name}", f"{rows}{short}{taken}{shared}", "measured")
