"""Several engines of one server (data parallelism): the part of the machine that each of them is planned for. Plans
nothing itself, and knows nothing of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError
from holdfast.hardware import Memory
from holdfast.hardware.nvidia import NvidiaGpu
from holdfast.planner.inputs.replicas import TOO_FEW_DEVICES
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


def gpus_share(config: EngineConfig, gpus: Sequence[NvidiaGpu], number: int) -> Sequence[NvidiaGpu]:
    """The GPUs of one engine, in the order in which CUDA_VISIBLE_DEVICES shows them; all of them where it is alone."""
    engines, each = config.data_parallel_size, config.tensor_parallel_size * config.pipeline_parallel_size
    if engines == 1:
        return gpus
    if len(gpus) < engines * each:
        raise ConfigurationError(
            f"{engines} engines of {counted(each, 'GPU')} each need {counted(engines * each, 'GPU')}",
            code=TOO_FEW_DEVICES,
            needed=counted(engines * each, "GPU"),
            found=f"{len(gpus)}: {', '.join(gpu.name for gpu in gpus)}" if gpus else "none",
            fix=f"--data-parallel-size {len(gpus) // each}" if len(gpus) >= 2 * each else "leave -dp out",
            field="data_parallel_size",
        )
    return gpus[number * each : (number + 1) * each]
