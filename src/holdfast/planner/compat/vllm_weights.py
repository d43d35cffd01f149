"""What vLLM keeps beside a checkpoint's own bytes and prints as part of its weights, on each rank.

    rotary    cosines and sines of every position that the model was made for, whole on every rank
    padding   experts in MXFP4 laid out in the tiles of the kernel that multiplies them: which one that is depends on
              the GPU and on the version
    absorbed  of latent attention: the keys' and the values' part of a projection once more, each by itself
    rounding  what torch's allocator adds to a large tensor and counts as its own

Counts nothing that the checkpoint has; that is in sharded_weights.py. Knows no budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from holdfast.checkpoints import LAYOUTS, packing_of, stored_parts
from holdfast.footprint.cpu import FUSED
from holdfast.footprint.identity_key import Same
from holdfast.hardware.gpus import Gpu
from holdfast.models import ModelSpec, TensorSpec
from holdfast.planner.compat.vllm_release import Vllm
from holdfast.planner.inputs.question import PlannedModel
from holdfast.planner.sizing.sharded_weights import DTYPE_BYTES, Weight, rank_bytes, weights_of
from holdfast.units import MIB

MULTIMODAL_TIMES = 4
"""Rotary tables for positions in three dimensions are that many times as long."""
THREE_DIMENSIONS = ("Qwen3VL", "Qwen3_5")
"""Architectures whose positions are so, though their configs call them default."""
TWO_BASES = ("Gemma3", "Gemma4", "Olmo3")
"""Architectures whose windows turn by another base than the rest: a table for each."""
ROUNDED_FROM_BYTES, ROUNDED_TO_BYTES, SPLIT_BYTES = 10 * MIB, 2 * MIB, 1 * MIB
"""torch takes memory for tensors from the first size on in multiples of the second, and gives back of that what is more
than the third: 35 MiB count as 36, 52.5 MiB as 52.5."""


ROUNDED_METHODS = ("fp8", "int8", "int4", "awq", "gptq")
LATENT_PROJECTION = ".kv_b"
ExpertKernel = tuple[int, int]
"""Sides of an expert are rounded up to multiples of these, the inner one on each rank by itself."""
EXPERT_KERNELS = {"Marlin": (256, 128), "Triton": (256, 64), "FlashInfer": (256, 256), "ROCm's Triton": (256, 256)}


@dataclass(frozen=True, slots=True)
class ExtraBytes:
    """Bytes of one rank."""

    rotary: int = 0
    padding: int = 0

    @property
    def total(self) -> int:
        return self.rotary + self.padding


def expert_kernel(gpu: Gpu | None, vllm: Vllm | None = None, *, adapters: bool = False) -> ExpertKernel:
    """For experts in MXFP4. Of a GPU that is not known the one that most have; of no version the newest."""
    if gpu is not None and gpu.vendor == "amd":
        return EXPERT_KERNELS["ROCm's Triton"]
    major = 0 if gpu is None or gpu.compute_capability is None else gpu.compute_capability[0]
    if major == 10 and not adapters:
        return EXPERT_KERNELS["FlashInfer"]
    if major == 9 and (vllm or Vllm()).has("triton-experts-on-hopper") and not adapters:
        return EXPERT_KERNELS["Triton"]
    return EXPERT_KERNELS["Marlin"]


def beside_weights(
    model: PlannedModel, kernel: ExpertKernel, *, dtype: str, tensor_parallel: int, layers: range | None = None
) -> ExtraBytes:
    return _beside(Same(model), kernel, dtype, tensor_parallel, layers)


@lru_cache(maxsize=512)
def _beside(
    key: Same[PlannedModel], kernel: ExpertKernel, dtype: str, tensor_parallel: int, layers: range | None
) -> ExtraBytes:
    model = key.held
    rotary, quantization = (
        rotary_positions(model.spec) * model.spec.rope.dim * DTYPE_BYTES[dtype],
        model.spec.quantization,
    )
    if quantization is None or quantization.method != "mxfp4" or model.format == "gguf":
        return ExtraBytes(rotary, 0)
    grown = [
        Weight(tensor=weight.tensor, nbytes=round(weight.nbytes * more))
        for weight in weights_of(model, dtype=dtype)
        if (more := _growth(model.spec, weight.tensor, kernel, tensor_parallel)) > 0
    ]
    padding = rank_bytes(grown, model.spec, tensor_parallel=tensor_parallel, layers=layers) if grown else 0
    return ExtraBytes(rotary, padding)


def absorbed_bytes(
    model: PlannedModel, vllm: Vllm, *, dtype: str, tensor_parallel: int, layers: range | None = None
) -> int:
    """Of releases that cache latents: kv_b_proj stays, and is kept once more in two halves of the compute dtype. The
    first of them multiplied these into the projections of queries and outputs as well."""
    into = vllm.has("absorbs-queries")
    return _absorbed(Same(model), into, dtype, tensor_parallel, layers)


@lru_cache(maxsize=128)
def _absorbed(key: Same[PlannedModel], into: bool, dtype: str, tensor_parallel: int, layers: range | None) -> int:
    spec = key.held.spec
    found = [
        Weight(tensor=tensor, nbytes=_absorbed_elements(spec, tensor, into) * DTYPE_BYTES[dtype])
        for tensor in spec.tensors
        if tensor.name.endswith(LATENT_PROJECTION) and tensor.part == "text"
    ]
    return rank_bytes(found, spec, tensor_parallel=tensor_parallel, layers=layers) if found else 0


def _absorbed_elements(spec: ModelSpec, tensor: TensorSpec, into: bool) -> int:
    latent = None if tensor.layer is None else spec.layers[tensor.layer].latent
    if not into or latent is None:
        return tensor.elements
    queries = next(
        (one.shape[1] for one in spec.tensors if one.layer == tensor.layer and one.name.endswith((".q", ".q_b"))), 0
    )
    return spec.heads * (queries * (latent.rank + latent.rope_dim) + latent.rank * spec.hidden_size)


def left_out_bytes(model: PlannedModel, *, dtype: str, tensor_parallel: int, layers: range | None = None) -> int:
    """Stored, but given up when weights are put in Marlin's order: zero points of symmetric GPTQ are all one number,
    and without act-order its groups are where they are expected."""
    quantization = model.spec.quantization
    if quantization is None or quantization.method != "gptq" or not quantization.symmetric:
        return 0
    unused = ("qzeros",) if quantization.activation_order else ("qzeros", "g_idx")
    return _of_parts(Same(model), unused, dtype, tensor_parallel, layers)


@lru_cache(maxsize=64)
def _of_parts(
    key: Same[PlannedModel], parts: tuple[str, ...], dtype: str, tensor_parallel: int, layers: range | None
) -> int:
    spec = key.held.spec
    found = [
        Weight(tensor=tensor, nbytes=nbytes)
        for tensor in spec.tensors
        if not tensor.optional and tensor.part != "draft" and (nbytes := _stored_part(spec, tensor, parts, dtype))
    ]
    return rank_bytes(found, spec, tensor_parallel=tensor_parallel, layers=layers) if found else 0


def _stored_part(spec: ModelSpec, tensor: TensorSpec, names: tuple[str, ...] | None, dtype: str) -> int:
    """Of a quantized matrix, the tensors of these names; None: its codes. 0: it is not quantized."""
    packing = None if spec.quantization is None else packing_of(spec.quantization, tensor, dtype)
    if packing is None:
        return 0
    *stacked, rows, columns = tensor.shape
    parts = stored_parts(packing, rows, columns)
    wanted = parts[:1] if names is None else [part for part in parts if part.name in names]
    return prod(stacked) * sum(LAYOUTS[part.layout].bytes_for(part.shape) or 0 for part in wanted)


def rounding_bytes(model: PlannedModel, *, dtype: str, tensor_parallel: int, layers: range | None = None) -> int:
    """Of plain weights, and of the codes of quantized ones whose kernels keep them in as many bytes."""
    quantization = model.spec.quantization
    if model.format == "gguf" or (quantization is not None and quantization.method not in ROUNDED_METHODS):
        return 0
    return _rounding(Same(model), dtype, tensor_parallel, layers)


@lru_cache(maxsize=128)
def _rounding(key: Same[PlannedModel], dtype: str, tensor_parallel: int, layers: range | None) -> int:
    """Matrices that are multiplied as one are one tensor. Those of a shape are counted once."""
    spec, together = key.held.spec, dict[str, list[Weight]]()
    held = range(len(spec.layers)) if layers is None else layers
    for weight in weights_of(key.held, dtype=dtype):
        if weight.tensor is not None and _is_held(weight.tensor, held, len(spec.layers)):
            codes = _stored_part(spec, weight.tensor, None, dtype)
            kept = Weight(tensor=weight.tensor, nbytes=codes) if codes else weight
            together.setdefault(_joined(weight.tensor.name), []).append(kept)
    alike: dict[tuple[tuple[int, ...], ...], list[list[Weight]]] = {}
    for one in together.values():
        alike.setdefault(tuple(weight.tensor.shape for weight in one if weight.tensor is not None), []).append(one)
    sizes = [(rank_bytes(same[0], spec, tensor_parallel=tensor_parallel), len(same)) for same in alike.values()]
    return sum(count * added for size, count in sizes if (added := _added(size)) <= SPLIT_BYTES)


def _added(nbytes: int) -> int:
    return -nbytes % ROUNDED_TO_BYTES if nbytes >= ROUNDED_FROM_BYTES else 0


def _is_held(tensor: TensorSpec, layers: range, count: int) -> bool:
    """By the stage that has these of `count` layers. Of the text model; vision towers are of small matrices."""
    if tensor.part != "text":
        return False
    if tensor.layer is not None:
        return tensor.layer in layers
    return layers.start == 0 if tensor.name == "embed" else tensor.name == "head" and layers.stop == count


def _joined(name: str) -> str:
    where, _, part = name.rpartition(".")
    return f"{where}." + next(("+".join(names) for names in FUSED if part in names), part)


def rotary_positions(spec: ModelSpec) -> int:
    """Rows of all tables together."""
    rows = spec.max_position
    if spec.rope.scaling == "longrope":
        rows += spec.rope.original_max_position
    if spec.rope.scaling == "mrope" or spec.architecture.startswith(THREE_DIMENSIONS):
        rows *= MULTIMODAL_TIMES
    return rows * (2 if spec.architecture.startswith(TWO_BASES) else 1)


def _growth(spec: ModelSpec, tensor: TensorSpec | None, kernel: ExpertKernel, ranks: int) -> float:
    """By what share of itself the tensor grows."""
    if tensor is None or tensor.layer is None or not tensor.experts or len(tensor.shape) != 3:
        return 0.0
    experts = spec.layers[tensor.layer].experts
    if experts is None:
        return 0.0
    hidden, inner = _whole(spec.hidden_size, kernel[0]), _whole(-(-experts.intermediate_size // ranks), kernel[1])
    return hidden * inner * ranks / (spec.hidden_size * experts.intermediate_size) - 1


def _whole(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
