"""Which GPU each rank of a server has, and which of them the plan is made for: the one with the least to use, with the
terms of the rank that holds most. Knows no model.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from holdfast.errors import ConfigurationError
from holdfast.hardware.nvidia import NvidiaGpu
from holdfast.observability.decisions import Decision
from holdfast.planner.inputs.machine import holders, measured_device
from holdfast.planner.inputs.question import Device
from holdfast.units import counted, format_bytes

TOO_FEW_GPUS, UNLIKE_GPUS = "HF133", "HF138"
RANK_GPUS = "HOLDFAST_RANK_GPUS"
"""The visible GPU of each rank, by its place: 0,1. One may be named for several ranks, which then share it: that shows
that they are right, and is slow."""


def gpus_of_ranks(
    gpus: Sequence[NvidiaGpu], ranks: int, environment: Mapping[str, str] | None = None
) -> tuple[NvidiaGpu, ...]:
    """One for each rank, in order. Raises ConfigurationError where there are too few, or they are not alike."""
    listed = (os.environ if environment is None else environment).get(RANK_GPUS)
    if listed is not None:
        return _listed(gpus, ranks, listed)
    if len(gpus) < ranks:
        shown = ", ".join(f"{gpu.index}: {gpu.name}" for gpu in gpus) or "none"
        raise ConfigurationError(
            f"tensor_parallel_size is {ranks}, and rank {len(gpus)} has no GPU",
            code=TOO_FEW_GPUS,
            needed=f"{counted(ranks, 'GPU')}, one for each rank",
            found=f"{len(gpus)} visible: {shown}",
            fix=f"--tensor-parallel-size {max(1, len(gpus))}; or make more visible (CUDA_VISIBLE_DEVICES)",
            field="tensor_parallel_size",
        )
    # Those with most memory free, in the order in which CUDA counts them.
    most = sorted(range(len(gpus)), key=lambda place: (-gpus[place].free_bytes, place))[:ranks]
    chosen = tuple(gpus[place] for place in sorted(most))
    _require_alike(chosen)
    return chosen


def _listed(gpus: Sequence[NvidiaGpu], ranks: int, listed: str) -> tuple[NvidiaGpu, ...]:
    words = [word.strip() for word in listed.split(",")]
    if len(words) != ranks or not all(word.isdecimal() and int(word) < len(gpus) for word in words):
        raise ConfigurationError(
            f"{RANK_GPUS} does not name the GPU of each rank",
            code=TOO_FEW_GPUS,
            needed=f"{ranks} numbers with commas between them, each under {len(gpus)}",
            found=listed,
            fix=f"unset {RANK_GPUS}",
            field="tensor_parallel_size",
        )
    return tuple(gpus[int(word)] for word in words)


def _require_alike(gpus: Sequence[NvidiaGpu]) -> None:
    first = gpus[0]
    for rank, gpu in enumerate(gpus):
        if gpu.capability != first.capability:
            raise ConfigurationError(
                f"rank {rank} has {gpu.name} and rank 0 {first.name}: the same kernels do not run on both",
                code=UNLIKE_GPUS,
                needed="GPUs of one compute capability",
                found=", ".join(f"{one.name} {'.'.join(map(str, one.capability or ()))}" for one in gpus),
                fix=f"CUDA_VISIBLE_DEVICES={first.index} and --tensor-parallel-size 1",
                field="tensor_parallel_size",
            )


def tightest(gpus: Sequence[NvidiaGpu], utilization: float) -> tuple[int, Device]:
    """The rank whose GPU has the least for it, and that GPU as its device. Ranks of one GPU have equal parts of it."""
    sharing = Counter(gpu.uuid for gpu in gpus)

    def part(gpu: NvidiaGpu) -> NvidiaGpu:
        many = sharing[gpu.uuid]
        return replace(gpu, free_bytes=gpu.free_bytes // many, total_bytes=gpu.total_bytes // many)

    parts = [part(gpu) for gpu in gpus]
    rank = min(range(len(gpus)), key=lambda one: min(parts[one].free_bytes, int(parts[one].total_bytes * utilization)))
    return rank, measured_device(0, parts[rank])


def rank_decision(gpus: Sequence[NvidiaGpu], rank: int) -> Decision:
    """For people to read. `rank`: the one that the plan is made for."""
    places = ", ".join(str(gpu.index) for gpu in gpus)
    rows = "; ".join(
        f"rank {number} has GPU {gpu.index}, {format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free"
        for number, gpu in enumerate(gpus)
    )
    short = "" if len({gpu.free_bytes for gpu in gpus}) == 1 else f"; rank {rank} has the least"
    held = holders(gpus[rank]) if short else ()
    taken = f", others hold: {', '.join(held)}" if held else ""
    return Decision("device", f"GPUs {places}, {gpus[0].name}", f"{rows}{short}{taken}", "measured")
