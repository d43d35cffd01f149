"""What several ranks cannot do together yet: refused by name before anything is loaded. How a model is divided, and
which sizes can be, is decided by sizing/shards.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from holdfast.checkpoints import Packing, StoredTensor, packing_of
from holdfast.config import EngineConfig
from holdfast.config.parts.offload import offload_request
from holdfast.config.unsupported import NOT_WITH_RANKS
from holdfast.errors import ConfigurationError
from holdfast.footprint.gpu import MOST_EXCHANGE_RANKS
from holdfast.models import ModelSpec, TensorSpec
from holdfast.observability.decisions import Decision

ONE_RANK = "leave --tensor-parallel-size and --pipeline-parallel-size out"


def refuse_with_ranks(
    config: EngineConfig,
    spec: ModelSpec,
    stored: Mapping[str, StoredTensor] | None,
    *,
    compiled_kernels: bool,
    system: str | None = None,
) -> None:
    """Raises ConfigurationError for the first of them. Nothing is refused of one rank. `system`: that they run on, as
    Python calls it; None: this one."""
    check_experts(config.enable_expert_parallel, spec)
    sizes = {name: getattr(config, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
    several = [f"{name} is {size}" for name, size in sizes.items() if size > 1]
    if not several:
        return
    for field, what, fix in (
        *_of_settings(config),
        *(_of_gpus(config) if config.device == "cuda" else ()),
        *(_of_divided_layers(config, spec, stored) if config.tensor_parallel_size > 1 else ()),
        *_of_machine(config, compiled_kernels, system or sys.platform),
    ):
        raise ConfigurationError(
            f"{' and '.join(several)}, and {what}",
            code=NOT_WITH_RANKS,
            needed="one rank",
            fix=fix,
            field=field,
        )


def expert_parallel_said(config: EngineConfig) -> Iterator[Decision]:
    """Where --enable-expert-parallel does less than its words, or than another engine does."""
    if not config.enable_expert_parallel:
        return
    if config.tensor_parallel_size == 1:
        reason = "it deals experts out among the ranks of --tensor-parallel-size, and one rank has all of them"
        yield Decision("enable_expert_parallel", "without effect", reason, "set")
    elif config.data_parallel_size > 1:
        reason = "engines of --data-parallel-size share nothing: each deals all experts out among its own ranks"
        yield Decision("enable_expert_parallel", "in each engine", reason, "set")


def check_experts(asked: bool, spec: ModelSpec) -> None:
    """That there are some to deal out, where that was asked for."""
    if asked and all(layer.experts is None for layer in spec.layers):
        raise ConfigurationError(
            "enable_expert_parallel is set, but this model has no experts",
            code=NOT_WITH_RANKS,
            needed="a model with experts",
            found=spec.architecture,
            fix="leave --enable-expert-parallel out",
            field="enable_expert_parallel",
        )


_Reason = tuple[str, str, str]
"""Setting, reason, fix."""


def _of_settings(config: EngineConfig) -> Iterator[_Reason]:
    if config.kv_store is not None:
        yield "kv_store", "a store of KV pages is not shared by ranks yet", f"leave --kv-store out, or {ONE_RANK}"
    if config.nvme_path is not None:
        reason = "layers that come from a disk are not divided among ranks yet"
        yield "nvme_path", reason, f"leave --nvme-path out, or {ONE_RANK}"
    if config.enable_sleep_mode:
        reason = "cached prefixes of several ranks are not kept while they sleep yet"
        yield "enable_sleep_mode", reason, f"leave --enable-sleep-mode out, or {ONE_RANK}"
    if config.idle_release or config.yield_to_neighbours:
        field = "idle_release" if config.idle_release else "yield_to_neighbours"
        reason = "a KV pool of several ranks does not give memory up by itself yet"
        yield field, reason, f"leave --{field.replace('_', '-')} out, or {ONE_RANK}"


def _of_gpus(config: EngineConfig) -> Iterator[_Reason]:
    divided = config.tensor_parallel_size > 1
    if divided and config.pipeline_parallel_size > 1:
        yield from _of_gpu_stages(config)
    size, ranks = config.tensor_parallel_size, config.tensor_parallel_size * config.pipeline_parallel_size
    if divided and ranks // config.nnodes % size:
        reason = (
            f"on {config.nnodes} nodes the GPUs of a stage would not be on one: they add up over CUDA IPC, which does"
            " not leave a machine, and not by NCCL between nodes yet"
        )
        yield "tensor_parallel_size", reason, f"-pp {config.nnodes}, with -tp for the GPUs of one node, or --device cpu"
    offload = offload_request(config)
    if offload.by_hand or offload.experts_by_hand:
        reason = "layers and experts that wait in RAM are not divided among ranks yet"
        yield "cpu_offload_gb", reason, f"leave the settings of offload out, or {ONE_RANK}"
    if config.kv_ram_bytes:
        reason = "KV blocks that leave the GPU are not kept in RAM by several ranks yet"
        yield "kv_ram", reason, f"leave --kv-ram out, or {ONE_RANK}"


def _of_gpu_stages(config: EngineConfig) -> Iterator[_Reason]:
    """Those of several ranks add up through memory that all ranks of a node map of one another, and in no other way."""
    size = config.tensor_parallel_size * config.pipeline_parallel_size
    alone = f"-tp 1 -pp {size}, whose stages hand on through RAM"
    if config.disable_custom_all_reduce:
        reason = "stages of several GPUs add up over CUDA IPC, which --disable-custom-all-reduce rules out"
        yield "disable_custom_all_reduce", reason, f"leave --disable-custom-all-reduce out, or {alone}"
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size // config.nnodes
    if ranks > MOST_EXCHANGE_RANKS:
        where = " of one node" if config.nnodes > 1 else ""
        reason = f"{ranks} ranks on GPUs{where} are more than the {MOST_EXCHANGE_RANKS} that map one another's memory"
        several = f"--nnodes with no more than {MOST_EXCHANGE_RANKS} on each, which may be on one machine"
        yield "pipeline_parallel_size", reason, f"{several}, or {alone}"


def _of_divided_layers(
    config: EngineConfig, spec: ModelSpec, stored: Mapping[str, StoredTensor] | None
) -> Iterator[_Reason]:
    of_experts = {tensor.name: _packing(tensor, spec, stored) for tensor in spec.tensors if tensor.experts}
    others = [_packing(tensor, spec, stored) for tensor in spec.tensors if not tensor.experts]
    whole = config.enable_expert_parallel
    if not whole and any(one is not None and one.act_order for one in of_experts.values()):
        reason = "the columns of these experts have an order of their own (act-order), in which they are not divided"
        fix = f"--enable-expert-parallel, which divides no expert, or {ONE_RANK}"
        yield "tensor_parallel_size", reason, fix
    if any(one is not None and one.act_order and one.inputs != "plain" for one in others):
        reason = "the columns of these weights have an order of their own (act-order), and their inputs are rounded"
        yield "tensor_parallel_size", reason, ONE_RANK
    if whole and any(one is not None and one.inputs != "plain" and one.static_inputs for one in of_experts.values()):
        # Whole experts are multiplied as on one rank, but for this scale.
        reason = "inputs of all experts of a layer are rounded with one stored scale, which is found among all of them"
        yield "enable_expert_parallel", reason, f"leave --enable-expert-parallel out, or {ONE_RANK}"
    made = spec.quantization is None and config.asked_quantization == "fp8"
    last = [one for name, one in of_experts.items() if name.endswith(".experts.down")]
    if not whole and last and (made or any(_rounds_rows(one) for one in last)):
        reason = "what comes into an expert's last matrix is rounded by rows, which ranks would do each by its own part"
        fix = f"--enable-expert-parallel, which divides no expert, or {ONE_RANK}"
        yield "tensor_parallel_size", reason, fix


def _packing(tensor: TensorSpec, spec: ModelSpec, stored: Mapping[str, StoredTensor] | None) -> Packing | None:
    """As it is stored, or would be where it is made up; None: in plain numbers, or blocks."""
    if stored is not None:
        found = stored[tensor.name].packed if tensor.name in stored else None
        return None if found is None else found.packing
    return None if spec.quantization is None else packing_of(spec.quantization, tensor, spec.stored_dtype)


def _rounds_rows(packing: Packing | None) -> bool:
    """Inputs have one scale a row, which is found when they come."""
    return packing is not None and packing.inputs != "plain" and not packing.static_inputs and not packing.input_group


def _of_machine(config: EngineConfig, compiled_kernels: bool, system: str) -> Iterator[_Reason]:
    if system != "linux":
        yield "tensor_parallel_size", "ranks share memory in a way that only Linux has", ONE_RANK
    if not compiled_kernels and config.device != "auto":
        reason = "ranks wait for one another by compiled code, which this installation has not got"
        yield "tensor_parallel_size", reason, f"reinstall with a C compiler, or {ONE_RANK}"
