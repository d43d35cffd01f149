"""What `--device auto` means on this machine, and why a GPU that was asked for, or the folder of --nvme-path, cannot be
had. No torch.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from holdfast.config import EngineConfig
from holdfast.config.parts.offload import offload_request
from holdfast.errors import ConfigurationError
from holdfast.footprint.gpu import LEAST_CAPABILITY
from holdfast.hardware import processor
from holdfast.hardware.nvidia import NvidiaMachine, probe
from holdfast.hardware.torch_build import TorchBuild, torch_build
from holdfast.planner.serve.gpu_plan import too_old
from holdfast.planner.serve.shares.engines import gpus_share
from holdfast.planner.serve.shares.gpu_ranks import gpus_of_ranks
from holdfast.planner.serve.streamed import another_folder, disk_room
from holdfast.planner.sizing.dtype import asked_type
from holdfast.records.sampling import MAX_LOGPROBS, WHOLE_VOCABULARY

log = logging.getLogger("holdfast")

NO_GPU, NO_CUDA_BUILD, OLD_DRIVER = "HF121", "HF123", "HF124"


def settle_device(
    config: EngineConfig, *, here: NvidiaMachine | None = None, build: TorchBuild | None = None
) -> EngineConfig:
    """With `auto` become cuda or cpu. `here`, `build`: what this machine has, looked up where they are left out.

    A dtype that the CPU only emulates, or that no compiled kernel computes in, and a folder that layers could not be
    written to, are said before anything is fetched."""
    if config.nvme_path is not None:
        _check_layer_folder(config.nvme_path)
    settled = _settled(config, here, build)
    if settled.device == "cpu" and settled.dtype == "bfloat16" and not processor().fast_bfloat16:
        log.warning(
            "dtype bfloat16: this CPU has no bfloat16 instructions, and emulation is many times slower; leave dtype out"
        )
    if settled.device == "cpu" and asked_type(settled.dtype) == "float16":
        log.warning(
            "dtype float16: on a CPU no compiled kernel computes in it; torch's are slower, and quantized weights may"
            " be expanded for them; leave dtype out"
        )
    if settled.device == "cuda" and settled.pipeline_parallel_size > 1:
        log.warning(
            "pipeline_parallel_size %d: stages were run on one H200 so far, never on several GPUs; compare with one",
            settled.pipeline_parallel_size,
        )
    if settled.device == "cuda" and settled.nnodes > 1:
        log.warning(
            "nnodes %d: nodes with GPUs have run on one H200 so far, never on several machines; compare with one",
            settled.nnodes,
        )
    if settled.device == "cuda" and settled.offload_backend == "uva" and not settled.cpu_offload_gb:
        log.warning(
            "offload_backend uva has no effect without --cpu-offload-gb: layers that do not fit on the GPU are streamed"
            " by themselves, others are not"
        )
    if settled.device == "cuda" and settled.max_logprobs == WHOLE_VOCABULARY:
        log.warning("max_logprobs -1: on a GPU a request may ask for up to %d, of prompts too", MAX_LOGPROBS)
        return replace(settled, max_logprobs=MAX_LOGPROBS)
    return settled


def _settled(config: EngineConfig, here: NvidiaMachine | None, build: TorchBuild | None) -> EngineConfig:
    if config.device == "cpu":
        return config
    machine = probe() if here is None else here
    if config.device == "auto" and _of_ram_alone(config):
        if machine.gpus and _problem(machine, torch_build() if build is None else build) is None:
            log.warning(
                "using the CPU, and not %s: --ram alone is the budget of a server on the CPU; --device cuda uses the"
                " GPU, with --ram for what waits in RAM beside it",
                " or ".join(dict.fromkeys(gpu.name for gpu in machine.gpus)),
            )
        return replace(config, device="cpu")
    if not machine.gpus and config.device == "auto":
        return replace(config, device="cpu")  # With --vram the plan says what to set instead.
    problem = _problem(machine, torch_build() if build is None else build)
    if problem is None:
        settled = replace(config, device="cuda")
        ranks = settled.tensor_parallel_size * settled.pipeline_parallel_size
        # Before anything is fetched: too few GPUs, or GPUs that are not alike.
        if settled.data_parallel_size > 1:
            for number in range(settled.data_parallel_size):
                gpus_share(settled, machine.gpus, number)
        elif ranks > 1 and settled.distributed_executor_backend != "ray":  # Which chooses among those of all nodes.
            gpus_of_ranks(machine.gpus, ranks // settled.nnodes, nodes=settled.nnodes)
        return settled
    if config.device == "cuda" or config.vram is not None:
        raise problem
    log.warning("using the CPU: %s", problem)
    return replace(config, device="cpu")


def _of_ram_alone(config: EngineConfig) -> bool:
    """A budget of RAM alone is for a CPU; beside one of a GPU it is for layers that do not fit there."""
    return config.ram is not None and config.vram is None and not offload_request(config).by_hand


def _problem(machine: NvidiaMachine, build: TorchBuild | None) -> ConfigurationError | None:
    """Why no GPU of this machine can be used; None: one can."""
    if not machine.gpus:
        return ConfigurationError(
            "a GPU was requested, but none can be used",
            code=NO_GPU,
            needed="an NVIDIA GPU that the driver lists",
            found=machine.reason or "none",
            fix="--device cpu; check nvidia-smi and CUDA_VISIBLE_DEVICES",
            field="device",
        )
    if build is None or build.cuda is None:
        version = "none" if build is None else build.version
        return ConfigurationError(
            "torch was installed without CUDA",
            code=NO_CUDA_BUILD,
            needed="a CUDA build of torch",
            found=f"torch {version}, built for CPUs; {', '.join(gpu.name for gpu in machine.gpus)}",
            fix="pip install --force-reinstall torch (from PyPI, which has CUDA builds for Linux), or --device cpu",
            field="device",
        )
    # A driver runs programs of its own major version of CUDA and of older ones.
    if machine.cuda is not None and machine.cuda[0] < int(build.cuda.split(".")[0]):
        return ConfigurationError(
            "the NVIDIA driver is too old for this torch",
            code=OLD_DRIVER,
            needed=f"a driver for CUDA {build.cuda}",
            found=f"driver {machine.driver}, for CUDA {machine.cuda[0]}.{machine.cuda[1]} and older",
            fix=f"update the driver, install a torch built for CUDA {machine.cuda[0]}, or --device cpu",
            field="device",
        )
    if all(gpu.capability is not None and gpu.capability < LEAST_CAPABILITY for gpu in machine.gpus):
        return too_old(machine.gpus)
    return None


def _check_layer_folder(folder: str) -> None:
    """Also where all layers stay in memory: tomorrow less of it may be free."""
    try:
        os.listdir(folder)  # So that a file is told from a folder.
        tempfile.TemporaryFile(dir=folder).close()  # Permissions do not tell of a disk that is read-only.
    except OSError as error:
        missing = isinstance(error, FileNotFoundError) and _may_be_made(Path(folder))
        raise ConfigurationError(
            f"--nvme-path: {error.strerror or error}: {folder}",
            needed="a folder on a fast disk, in which files can be written",
            fix=another_folder(folder) + (f", or first: mkdir -p {shlex.quote(folder)}" if missing else ""),
            field="nvme_path",
        ) from error
    disk_room(folder, None)  # It refuses what lies in memory.


def _may_be_made(folder: Path) -> bool:
    """Not in /proc, whose size is nothing."""
    parent = next(one for one in folder.absolute().parents if one.exists())
    return parent.is_dir() and os.access(parent, os.W_OK) and shutil.disk_usage(parent).total > 0
