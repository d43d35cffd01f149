"""What several ranks cannot do together yet: refused by name before anything is loaded. How a model is divided, and
which sizes can be, is decided by sizing/shards.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from holdfast.checkpoints import StoredTensor, packing_of
from holdfast.config import EngineConfig
from holdfast.config.offload import offload_request
from holdfast.config.quantization import MADE_WHILE_LOADING
from holdfast.config.unsupported import NOT_WITH_RANKS
from holdfast.errors import ConfigurationError
from holdfast.models import ModelSpec, TensorSpec

ONE_RANK = "leave --tensor-parallel-size and --pipeline-parallel-size out"


def refuse_with_ranks(
    config: EngineConfig, spec: ModelSpec, stored: Mapping[str, StoredTensor] | None, *, compiled_kernels: bool
) -> None:
    """Raises ConfigurationError for the first of them. Nothing is refused of one rank."""
    sizes = {name: getattr(config, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
    several = [f"{name} is {size}" for name, size in sizes.items() if size > 1]
    if not several:
        return
    for field, what, fix in (
        *_of_settings(config),
        *(_of_gpus(config, spec, stored) if config.device == "cuda" else ()),
        *(_of_divided_layers(config, spec, stored) if config.tensor_parallel_size > 1 else ()),
        *_of_model(spec),
        *_of_machine(config, compiled_kernels),
    ):
        raise ConfigurationError(
            f"{' and '.join(several)}, and {what}",
            code=NOT_WITH_RANKS,
            needed="one rank",
            fix=fix,
            field=field,
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


def _of_gpus(config: EngineConfig, spec: ModelSpec, stored: Mapping[str, StoredTensor] | None) -> Iterator[_Reason]:
    if config.enable_lora:
        reason = "LoRA adapters are not divided among ranks on GPUs yet"
        yield "enable_lora", reason, f"leave --enable-lora out, or {ONE_RANK}"
    if spec.decoder.query_key_norm == "whole":
        reason = "this model norms the queries of all heads together, which ranks on GPUs do not yet"
        yield "tensor_parallel_size", reason, ONE_RANK
    if config.asked_quantization in MADE_WHILE_LOADING and spec.quantization is None:
        reason = "weights are not quantized while several ranks load them to GPUs yet"
        yield "quantization", reason, f"leave --quantization out, or {ONE_RANK}"
    if spec.quantization is not None and stored is None:
        yield "load_format", "dummies of a quantized model are not divided among ranks on GPUs", ONE_RANK
    if any(one.packed.packing.inputs != "plain" for one in (stored or {}).values() if one.packed is not None):
        reason = "products of these weights round their inputs, which ranks on GPUs would do each by its own part"
        yield "tensor_parallel_size", reason, ONE_RANK
    if config.data_parallel_size > 1:
        reason = "ranks on GPUs are of one engine so far"
        yield "data_parallel_size", reason, f"leave --data-parallel-size out, or {ONE_RANK}"
    reason = "scales of a KV cache in FP8{} are not found by ranks on GPUs yet"
    if config.kv_cache_dtype.startswith("fp8"):
        yield "kv_cache_dtype", reason.format(""), f"leave --kv-cache-dtype out, or {ONE_RANK}"
    if spec.kv_cache_fp8 and config.kv_cache_dtype == "auto":
        asked = reason.format(", which this checkpoint asks for,")
        yield "kv_cache_dtype", asked, f"--kv-cache-dtype bfloat16, or {ONE_RANK}"
    offload = offload_request(config)
    if offload.by_hand or offload.experts_by_hand:
        reason = "layers and experts that wait in RAM are not divided among ranks yet"
        yield "cpu_offload_gb", reason, f"leave the settings of offload out, or {ONE_RANK}"
    if config.kv_ram_bytes:
        reason = "KV blocks that leave the GPU are not kept in RAM by several ranks yet"
        yield "kv_ram", reason, f"leave --kv-ram out, or {ONE_RANK}"


def _of_divided_layers(
    config: EngineConfig, spec: ModelSpec, stored: Mapping[str, StoredTensor] | None
) -> Iterator[_Reason]:
    packings = [one.packed.packing for one in (stored or {}).values() if one.packed is not None]
    if any(packing.act_order for packing in packings):
        yield "tensor_parallel_size", "the columns of these weights have an order of their own (act-order)", ONE_RANK
    if any(_rounds_rows(one, config, spec, stored) for one in spec.tensors if one.name.endswith(".experts.down")):
        reason = "what comes into an expert's last matrix is rounded by rows, which ranks would do each by its own part"
        yield "tensor_parallel_size", reason, ONE_RANK


def _rounds_rows(
    tensor: TensorSpec, config: EngineConfig, spec: ModelSpec, stored: Mapping[str, StoredTensor] | None
) -> bool:
    """Its inputs have one scale a row, which is found when they come."""
    if spec.quantization is None:
        return config.asked_quantization == "fp8"
    if stored is None:
        packing = packing_of(spec.quantization, tensor, spec.stored_dtype)
    else:
        found = stored[tensor.name].packed if tensor.name in stored else None
        packing = None if found is None else found.packing
    return packing is not None and packing.inputs != "plain" and not packing.static_inputs and not packing.input_group


def _of_model(spec: ModelSpec) -> Iterator[_Reason]:
    if spec.classifier is not None and spec.classifier.token_ids:
        yield (
            "tensor_parallel_size",
            "this classifier is made of rows of the vocabulary, which another rank has",
            ONE_RANK,
        )


def _of_machine(config: EngineConfig, compiled_kernels: bool) -> Iterator[_Reason]:
    if sys.platform != "linux":
        yield "tensor_parallel_size", "ranks share memory in a way that only Linux has", ONE_RANK
    if not compiled_kernels and config.device != "auto":
        reason = "ranks wait for one another by compiled code, which this installation has not got"
        yield "tensor_parallel_size", reason, f"reinstall with a C compiler, or {ONE_RANK}"
