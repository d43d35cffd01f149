"""The bytes of a model's weights on each rank: exact from headers, else from shapes and the quantization.

    tensor parallel    a tensor with a shard axis is split over the ranks, others are whole on each
    pipeline parallel  layers go to stages; the embedding to the first, the last norm and the head to the last

Knows nothing of budgets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, lcm, prod

from holdfast.checkpoints import LAYOUTS, Packing, StoredTensor, packing_of, stored_bytes, unused_head
from holdfast.checkpoints.formats.quantized_tensors import WORD_BITS
from holdfast.checkpoints.validation.stored_dtypes import PLAIN
from holdfast.errors import CheckpointError, ConfigurationError
from holdfast.footprint.cpu import ELEMENT_BYTES
from holdfast.footprint.identity_key import Same
from holdfast.models import ModelSpec, TensorSpec
from holdfast.models.quantization import QuantSpec
from holdfast.models.spec import EXPERTS_AXIS
from holdfast.planner.inputs.question import PlannedModel
from holdfast.units import counted

DTYPE_BYTES = ELEMENT_BYTES
AS_STORED = "stored"
"""In the place of a type: plain tensors of a file stay what they are, as llama.cpp keeps them."""
VOCABULARY_PAD = 64
"""Engines pad the vocabulary to a multiple of this on every rank."""
TP_NOT_POSSIBLE, PP_NOT_POSSIBLE = "HF131", "HF132"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One tensor of the model, with all that is stored for it: quants, scales, zeros."""

    tensor: TensorSpec | None
    """None: bytes of the checkpoint that the spec has no tensor for; whole on every rank of the first stage."""
    nbytes: int


def weights_of(model: PlannedModel, *, dtype: str) -> list[Weight]:
    """Draft layers are left out: a server loads them only for speculation. Plain tensors become `dtype`, or stay what
    they are (AS_STORED, of models that have files)."""
    if model.stored is None:
        return list(_from_shapes(Same(model.spec), dtype))
    return _from_headers(model, dtype)


@lru_cache(maxsize=32)
def _from_shapes(key: Same[ModelSpec], dtype: str) -> tuple[Weight, ...]:
    spec, element = key.held, DTYPE_BYTES[dtype]
    sizes: dict[tuple[Packing, tuple[int, ...]], int] = {}
    found = []
    for tensor in spec.tensors:
        if tensor.part == "draft" or tensor.optional:
            continue
        packing = packing_of(spec.quantization, tensor, dtype) if spec.quantization is not None else None
        if packing is not None and (packing, tensor.shape) not in sizes:
            *stacked, rows, columns = tensor.shape
            sizes[packing, tensor.shape] = prod(stacked) * stored_bytes(packing, rows, columns)
        nbytes = tensor.elements * element if packing is None else sizes[packing, tensor.shape]
        found.append(Weight(tensor=tensor, nbytes=nbytes))
    return tuple(found)


def _from_headers(model: PlannedModel, dtype: str) -> list[Weight]:
    """Every stored tensor goes to the spec's tensor whose module it belongs to; the rest is counted as it is."""
    assert model.stored is not None
    by_module, unused = _modules(model), unused_head(model.spec, model.stored)
    held: dict[str, int] = {}
    rest = 0
    for name, stored in model.stored.items():
        if name in unused:
            continue
        tensor = _owner(name, by_module)
        nbytes = _loaded_bytes(stored, dtype, model.spec)
        if tensor is None:
            rest += nbytes
        elif tensor.part != "draft":
            held[tensor.name] = held.get(tensor.name, 0) + nbytes
    found = [Weight(tensor=tensor, nbytes=held[tensor.name]) for tensor in model.spec.tensors if tensor.name in held]
    return [*found, Weight(tensor=None, nbytes=rest)] if rest else found


def _modules(model: PlannedModel) -> dict[str, TensorSpec]:
    found: dict[str, TensorSpec] = {}
    for tensor in model.spec.tensors:
        # A server plans what it has matched already; what is only worked out has our own names.
        if model.stored is model.canonical or model.derived:
            found[tensor.name] = tensor
            continue
        if model.format == "gguf":
            found[tensor.gguf_name] = tensor
            continue
        for name, _ in tensor.in_safetensors():
            found[name] = tensor
            module = name.removesuffix(".weight")
            found.setdefault(module, tensor)
    return found


def _owner(name: str, by_module: Mapping[str, TensorSpec]) -> TensorSpec | None:
    """q_proj.qweight, q_proj.scales and q_proj.weight_scale_inv all belong to q_proj.weight."""
    if name in by_module:
        return by_module[name]
    module = name
    while "." in module:
        module = module.rpartition(".")[0]
        if module in by_module:
            return by_module[module]
    # Fused stacks keep scales beside them: gate_up_proj_blocks, gate_up_proj_scales.
    for end in ("_blocks", "_scales", "_bias", "_scale", "_scale_inv"):
        if name.endswith(end) and name.removesuffix(end) in by_module:
            return by_module[name.removesuffix(end)]
    return None


def _loaded_bytes(stored: StoredTensor, dtype: str, spec: ModelSpec) -> int:
    """As it lies in memory: plain numbers of an unquantized model become `dtype`."""
    if dtype != AS_STORED and spec.quantization is None and stored.layout in PLAIN:
        return prod(stored.shape) * DTYPE_BYTES[dtype]
    return stored.nbytes


def layouts_by_size(tensors: Iterable[StoredTensor]) -> list[str]:
    """Those of most bytes first."""
    sizes = Counter[str]()
    for tensor in tensors:
        sizes[tensor.layout] += tensor.nbytes
    return [layout for layout, _ in sizes.most_common()]


def total_bytes(weights: Sequence[Weight]) -> int:
    return sum(weight.nbytes for weight in weights)


# Ranks


@dataclass(frozen=True, slots=True)
class _Cut:
    """What ranks share, and how much of it must stay together."""

    what: str
    width: int
    whole: int = 1
    """A quantizer's group, block or packed word; 1: any number may."""
    most: int = 0
    """Ranks beyond so many repeat it; 0: none do."""

    def problem(self, size: int) -> str | None:
        parts = min(size, self.most) if self.most else size
        if self.width % (parts * self.whole) == 0:
            return None
        if self.whole == 1:
            return f"{self.what} does not divide by {parts}"
        return f"{self.what} does not divide by {parts}: quantized in groups of {self.whole}, which cannot be split"


def parallel_sizes(spec: ModelSpec, most: int = 64) -> tuple[int, ...]:
    """Tensor-parallel sizes that divide the model."""
    return tuple(size for size in range(1, most + 1) if why_not_parallel(spec, size) is None)


def why_not_parallel(spec: ModelSpec, size: int) -> str | None:
    if size == 1:
        return None
    if spec.heads % size:
        return f"{spec.heads} attention {'heads do' if spec.heads > 1 else 'head does'} not divide by {size}"
    if spec.kv_heads % size and size % spec.kv_heads:
        return f"{spec.kv_heads} KV heads neither divide by {size} nor replicate evenly over it"
    return next((problem for cut in _cuts(Same(spec)) if (problem := cut.problem(size)) is not None), None)


@lru_cache(maxsize=32)
def _cuts(key: Same[ModelSpec]) -> tuple[_Cut, ...]:
    """Each of a kind once, however many layers have it."""
    spec = key.held
    found = [
        _Cut(f"an MLP of {width} columns", width)
        for width in dict.fromkeys(width for layer in spec.layers for width in _split_widths(spec, layer.index))
    ]
    if spec.quantization is not None:
        for tensor in spec.tensors:
            if tensor.part == "text" and tensor.shard_axis is not None:
                found += _quantized_cut(spec, spec.quantization, tensor, tensor.shard_axis)
    return tuple(dict.fromkeys(found))


def _quantized_cut(spec: ModelSpec, quantization: QuantSpec, tensor: TensorSpec, axis: int) -> Iterator[_Cut]:
    whole_experts = tensor.experts > 0 and len(tensor.shape) == 3 and axis == EXPERTS_AXIS
    if whole_experts or packing_of(quantization, tensor, spec.stored_dtype) is None:
        return
    rows, columns = _whole(quantization)
    inner = axis == len(tensor.shape) - 1
    whole, width = columns if inner else rows, tensor.shape[axis]
    if whole > 1:
        module = tensor.hf_name.removesuffix(".weight").rpartition(".")[2]
        repeated = spec.kv_heads if _of_kv_heads(tensor) else 0
        yield _Cut(f"{module} of {width} {'columns' if inner else 'rows'}", width, whole, repeated)


def _whole(quantization: QuantSpec) -> tuple[int, int]:
    """Rows and columns of a matrix that must stay together. Engines that run experts in MXFP4 pad them."""
    if quantization.method == "mxfp4":
        return 1, 1
    if quantization.granularity == "block":
        return quantization.block
    # Packed integers lie in whole words: AWQ packs outputs, GPTQ inputs, and both the zero points of outputs.
    word = WORD_BITS // gcd(WORD_BITS, quantization.bits)
    packs_rows = quantization.method in ("awq", "gptq") or (
        quantization.method == "int4" and not quantization.symmetric
    )
    packs_columns = quantization.method in ("gptq", "int4")
    columns = lcm(quantization.group_size or 1, word if packs_columns else 1)
    return (word if packs_rows else 1), columns


def _of_kv_heads(tensor: TensorSpec) -> bool:
    return tensor.name.rpartition(".")[2] in ("k", "v", "k_bias", "v_bias")


def _split_widths(spec: ModelSpec, layer: int) -> list[int]:
    described = spec.layers[layer]
    if described.experts is None:
        return [described.intermediate_size or spec.intermediate_size]
    shared = [described.experts.shared_intermediate_size] if described.experts.shared_intermediate_size else []
    return shared if has_whole_experts(spec) else [described.experts.intermediate_size, *shared]


def with_whole_experts(spec: ModelSpec) -> ModelSpec:
    """Of expert parallelism: ranks have some experts each, not a part of every one. The same where there are none."""
    if not any(tensor.experts for tensor in spec.tensors):
        return spec
    tensors = [
        replace(tensor, shard_axis=EXPERTS_AXIS) if tensor.experts and len(tensor.shape) > 1 else tensor
        for tensor in spec.tensors
    ]
    return replace(spec, tensors=tuple(tensors))


def has_whole_experts(spec: ModelSpec) -> bool:
    return _whole_experts(Same(spec))


@lru_cache(maxsize=64)
def _whole_experts(key: Same[ModelSpec]) -> bool:
    stacks = [tensor for tensor in key.held.tensors if tensor.experts and len(tensor.shape) == 3]
    return bool(stacks) and all(tensor.shard_axis == EXPERTS_AXIS for tensor in stacks)


def check_parallel(spec: ModelSpec, tensor_parallel: int, pipeline_parallel: int, *, unchecked: bool = False) -> None:
    """`unchecked`: the shapes may be wrong, and with them the refusal."""
    reason = why_not_parallel(spec, tensor_parallel)
    if reason is not None:
        sizes = ", ".join(map(str, parallel_sizes(spec)))
        nearest = max(size for size in parallel_sizes(spec, tensor_parallel))
        raise ConfigurationError(
            f"the model cannot be split over {tensor_parallel} GPUs: {reason}",
            code=TP_NOT_POSSIBLE,
            needed=f"a tensor-parallel size of {sizes}",
            found=str(tensor_parallel),
            fix=f"-tp {nearest}" + ("; or use the hub id: the catalogue's shapes are unverified" if unchecked else ""),
            field="tensor_parallel_size",
        )
    if pipeline_parallel > len(spec.layers):
        raise ConfigurationError(
            f"{counted(len(spec.layers), 'layer')} cannot fill {pipeline_parallel} stages",
            code=PP_NOT_POSSIBLE,
            needed=f"at most {len(spec.layers)}",
            found=str(pipeline_parallel),
            fix=f"-pp {len(spec.layers)}",
            field="pipeline_parallel_size",
        )


def stage_layers(layers: int, stages: int) -> tuple[range, ...]:
    """Layers of each stage, as vLLM deals them out: evenly, and one more to the stage before the last and to those
    before it, as far as they go. The last stage, which has the head, is never a longer one."""
    least, more = divmod(layers, stages)
    sizes = [least + (stages - 1 - more <= index < stages - 1) for index in range(stages)]
    found, first = [], 0
    for size in sizes:
        found.append(range(first, first + size))
        first += size
    return tuple(found)


def rank_bytes(weights: Sequence[Weight], spec: ModelSpec, *, tensor_parallel: int, layers: range | None = None) -> int:
    """Of one rank of the stage that has these layers; None: all."""
    held, all_layers = _held(Same(weights), Same(spec), tensor_parallel), range(len(spec.layers))
    layers = all_layers if layers is None else layers
    first, last = layers.start == 0, layers.stop == all_layers.stop
    places: list[int | str] = [*layers]
    if first:
        places.append("first")
    if first or (spec.tied_embeddings and last):
        places.append("embedding")
    if last:
        places.append("last")
    return sum(held[place] for place in places)


@lru_cache(maxsize=256)
def _held(weights: Same[Sequence[Weight]], spec: Same[ModelSpec], tensor_parallel: int) -> Counter[int | str]:
    """What one tensor-parallel rank would hold of all stages, by where it goes: a layer, or an end. Once for all
    stages: remedies ask for many divisions of the same weights."""
    held = Counter[int | str]()
    for weight in weights.held:
        tensor = weight.tensor
        place: int | str = "first"
        if tensor is not None and tensor.part != "vision":
            other = "embedding" if tensor.name.startswith("embed") else "last"
            place = other if tensor.layer is None else tensor.layer
        whole = tensor_parallel == 1 or tensor is None or tensor.shard_axis is None  # Most are: saves the call.
        held[place] += weight.nbytes if whole else _share(weight, spec.held, tensor_parallel)
    return held


def layer_bytes(weights: Sequence[Weight], spec: ModelSpec, *, tensor_parallel: int) -> dict[int | None, int]:
    """Of one rank, by layer; None: what belongs to none."""
    held = Counter[int | None]()
    for weight in weights:
        held[None if weight.tensor is None else weight.tensor.layer] += _share(weight, spec, tensor_parallel)
    return held


def _share(weight: Weight, spec: ModelSpec, ranks: int) -> int:
    tensor = weight.tensor
    if ranks == 1 or tensor is None or tensor.shard_axis is None:
        return weight.nbytes
    if _of_kv_heads(tensor) and spec.kv_heads < ranks:
        return weight.nbytes // spec.kv_heads
    extent = tensor.shape[tensor.shard_axis]
    if tensor.name in ("embed", "head"):
        padded = -(-extent // (VOCABULARY_PAD * ranks)) * VOCABULARY_PAD * ranks
        return weight.nbytes * padded // extent // ranks
    return -(-weight.nbytes // ranks)


def require_known_layouts(model: PlannedModel) -> None:
    for stored in (model.stored or {}).values():
        if stored.layout not in LAYOUTS:
            raise CheckpointError(f"tensor {stored.name} is stored as {stored.layout}, which is not supported")
