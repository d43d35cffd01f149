"""What a server refuses of its settings before it counts any memory: of ranks together, of their GPUs, of GPU kernels.
Asked by the server's own plan, and of a machine that is only described.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from holdfast.checkpoints import StoredTensor
from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError
from holdfast.hardware.nvidia import NvidiaGpu
from holdfast.models import ModelSpec
from holdfast.planner.inputs.question import Device, Machine
from holdfast.planner.serve.ranks import refuse_with_ranks
from holdfast.planner.serve.shares.gpu_ranks import require_alike, require_same
from holdfast.planner.sizing.default_limits import check_step
from holdfast.planner.sizing.dtype import check_type

OF_A_CPU, TOO_WIDE = "HF127", "HF128"
WIDEST_HEAD = 256
_DESCRIBED_SYSTEM = "linux"
"""Of a machine that is only named: the one that its ranks would run on."""


def refuse_ranks_on(
    machine: Machine, config: EngineConfig, spec: ModelSpec, stored: Mapping[str, StoredTensor] | None
) -> None:
    """Of several ranks on a machine that may be another one. `config` is given its device. Of a GPU that is named it is
    taken that the installation there is whole."""
    first, ranks = machine.devices[0], config.tensor_parallel_size * config.pipeline_parallel_size
    refuse_with_ranks(
        config,
        spec,
        stored,
        compiled_kernels=machine.compiled_kernels or first.kind == "gpu",
        system=None if first.measured else _DESCRIBED_SYSTEM,
    )
    if first.kind == "gpu":
        require_together(config, spec, [_as_the_driver_has_it(device) for device in machine.devices[:ranks]])


def refuse_settings_on(
    machine: Machine, config: EngineConfig, spec: ModelSpec, stored: Mapping[str, StoredTensor] | None
) -> None:
    """All that needs no count of memory, in the order of a start."""
    config = replace(config, device="cuda" if machine.kind == "gpu" else "cpu")
    refuse_ranks_on(machine, config, spec, stored)
    check_step(config.max_num_seqs, config.max_num_batched_tokens)
    if config.device == "cuda":
        check_of_a_gpu(config, spec)


def require_together(config: EngineConfig, spec: ModelSpec, gpus: Sequence[NvidiaGpu]) -> None:
    """`gpus`: of all ranks, in their order."""
    if config.tensor_parallel_size * config.pipeline_parallel_size == 1:
        return
    require_alike(gpus)
    if config.tensor_parallel_size > 1 and any(tensor.experts for tensor in spec.tensors):
        require_same(gpus)


def check_of_a_gpu(config: EngineConfig, spec: ModelSpec) -> None:
    """Types and kernels that no GPU of ours has."""
    check_type(config.dtype, spec)
    for name, asked, others in (
        ("attention_backend", config.attention_backend, ("auto",)),
        ("expand_weights", config.expand_weights, ("auto", "never")),
    ):
        if asked not in others:
            raise ConfigurationError(
                f"{name} {asked} is a CPU setting; a GPU has no such choice",
                code=OF_A_CPU,
                needed=" or ".join(others),
                found=asked,
                fix=f"leave --{name.replace('_', '-')} out, or --device cpu",
                field=name,
            )
    widest = max(layer.head_dim or spec.head_dim for layer in spec.layers)
    if widest > WIDEST_HEAD:
        raise ConfigurationError(
            f"the GPU kernels do not support attention heads of {widest} dimensions",
            code=TOO_WIDE,
            needed=f"head_dim up to {WIDEST_HEAD}",
            found=str(widest),
            fix="--device cpu",
            field="device",
        )


def _as_the_driver_has_it(device: Device) -> NvidiaGpu:
    return NvidiaGpu(
        index=device.index,
        uuid=device.name,
        name=device.name,
        total_bytes=device.total_bytes,
        free_bytes=device.free_bytes,
        known=device.gpu,
        capability=None if device.gpu is None else device.gpu.compute_capability,
    )
