"""Several engines of one server (data parallelism): the part of the machine that each of them is planned for. Plans
nothing itself, and knows nothing of processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from holdfast.config import EngineConfig
from holdfast.config.unsupported import RANK_GPUS
from holdfast.errors import ConfigurationError
from holdfast.hardware import Memory
from holdfast.hardware.nvidia import NvidiaGpu
from holdfast.planner.fit.result import Plan
from holdfast.planner.inputs.replicas import TOO_FEW_DEVICES
from holdfast.planner.serve.shares.gpu_ranks import named_gpus, require_alike
from holdfast.units import counted


def one_share(machine: Memory, engines: int) -> Memory:
    """Of RAM that engines share, what one of them may have."""
    if engines == 1:
        return machine
    return replace(
        machine,
        available_bytes=machine.available_bytes // engines,
        limited_by=f"{machine.limited_by}; for each of {engines} engines",
    )


def ram_share(config: EngineConfig) -> int | None:
    """Of --ram, which is for all engines together."""
    return None if config.ram is None else config.ram // config.data_parallel_size


def threads_share(config: EngineConfig, cores: int, number: int) -> int:
    """Of an engine on a CPU: as many cores for each, those left over for the first ones, unless --threads says it."""
    engines = config.data_parallel_size
    return config.threads or max(1, cores // engines + (number < cores % engines))


def gpus_share(
    config: EngineConfig, gpus: Sequence[NvidiaGpu], number: int, environment: Mapping[str, str] | None = None
) -> Sequence[NvidiaGpu]:
    """The GPUs of one engine, one for each of its ranks, in the order in which CUDA_VISIBLE_DEVICES shows them, or as
    RANK_GPUS lists those of all engines; all of them where it is alone. Ranks of several engines that share a GPU have
    equal parts of it."""
    engines, each = config.data_parallel_size, config.tensor_parallel_size * config.pipeline_parallel_size
    if engines == 1:
        return gpus
    listed = (os.environ if environment is None else environment).get(RANK_GPUS)
    if listed is None and len(gpus) < engines * each:
        raise ConfigurationError(
            f"{engines} engines of {counted(each, 'GPU')} each need {counted(engines * each, 'GPU')}",
            code=TOO_FEW_DEVICES,
            needed=counted(engines * each, "GPU"),
            found=f"{len(gpus)}: {', '.join(gpu.name for gpu in gpus)}" if gpus else "none",
            fix=f"--data-parallel-size {len(gpus) // each}" if len(gpus) >= 2 * each else "leave -dp out",
            field="data_parallel_size",
        )
    if listed is None:
        chosen: Sequence[NvidiaGpu] = gpus[: engines * each]
    else:
        chosen = named_gpus(gpus, listed, engines * each, "-dp times -tp times -pp")
    of_engines = [[gpu.uuid for gpu in chosen[at * each : (at + 1) * each]] for at in range(engines)]
    found = [_part(gpu, of_engines, number) for gpu in chosen[number * each : (number + 1) * each]]
    require_alike(found)
    return found


def _part(gpu: NvidiaGpu, of_engines: Sequence[Sequence[str]], number: int) -> NvidiaGpu:
    """What an engine may have of a GPU, by how many of its ranks are there."""
    ranks = [uuids.count(gpu.uuid) for uuids in of_engines]
    own, of_all = ranks[number], sum(ranks)
    return replace(
        gpu,
        free_bytes=gpu.free_bytes * own // of_all,
        total_bytes=gpu.total_bytes * own // of_all,
        engines=sum(count > 0 for count in ranks),
    )


def same_part(gpu: NvidiaGpu, plan: Plan, own_bytes: int) -> NvidiaGpu:
    """For an engine that is planned again, and holds `own_bytes` there already: what others have left, and no more than
    its part where other engines of this server have theirs."""
    assert plan.engine.gpu is not None
    free, engines, part = gpu.free_bytes + own_bytes, plan.engine.gpu.engines, plan.device
    if engines == 1:
        return replace(gpu, free_bytes=free)
    return replace(gpu, free_bytes=min(free, part.free_bytes), total_bytes=part.total_bytes, engines=engines)
