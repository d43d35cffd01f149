"""What `--device auto` means on this machine, and why a GPU that was asked for cannot be had. No torch."""

from __future__ import annotations

import logging
from dataclasses import replace

from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError
from holdfast.hardware.nvidia import NvidiaMachine, probe
from holdfast.hardware.torch_build import TorchBuild, torch_build

log = logging.getLogger("holdfast")

NO_GPU, NO_CUDA_BUILD = "HF121", "HF123"


def settle_device(
    config: EngineConfig, *, here: NvidiaMachine | None = None, build: TorchBuild | None = None
) -> EngineConfig:
    """With `auto` become cuda or cpu. `here`, `build`: what this machine has, looked up where they are left out."""
    if config.device == "cpu" or (config.device == "auto" and config.ram is not None):
        return replace(config, device="cpu")
    machine = probe() if here is None else here
    asked = config.device == "cuda" or config.vram is not None
    if not machine.gpus:
        if config.vram is not None and config.device == "auto":
            return replace(config, device="cpu")  # Which says what to set instead.
        if asked:
            raise ConfigurationError(
                "a GPU is asked for, and none can be used",
                code=NO_GPU,
                needed="an NVIDIA GPU that the driver shows",
                found=machine.reason or "none",
                fix="--device cpu; nvidia-smi and CUDA_VISIBLE_DEVICES show what there is",
                field="device",
            )
        return replace(config, device="cpu")
    installed = torch_build() if build is None else build
    if installed is None or installed.cuda is None:
        names = ", ".join(gpu.name for gpu in machine.gpus)
        version = "none" if installed is None else installed.version
        if asked:
            raise ConfigurationError(
                "torch was installed without CUDA",
                code=NO_CUDA_BUILD,
                needed="a CUDA build of torch",
                found=f"torch {version}, built for CPUs; {names}",
                fix="pip install --force-reinstall torch (from PyPI, which has CUDA builds for Linux), or --device cpu",
                field="device",
            )
        log.warning("%s is there and is not used: torch %s was built for CPUs", names, version)
        return replace(config, device="cpu")
    return replace(config, device="cuda")
