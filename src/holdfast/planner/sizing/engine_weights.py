"""A model's weights as this engine holds them: what of its files, and what they become while they are loaded.

Takes the layouts from `footprint`, so that a plan and an allocation are the same to the byte. How other engines hold
weights, and how they are split over GPUs, is counted in sharded_weights.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path

from holdfast.checkpoints import LAYOUTS, StoredTensor, packing_of, stored_parts
from holdfast.checkpoints.files import PackedMatrix
from holdfast.checkpoints.validation.stored_dtypes import PLAIN_LAYOUTS
from holdfast.config.parts.quantization import MADE_WHILE_LOADING
from holdfast.errors import CheckpointError
from holdfast.footprint import cpu, expert_places, streamed
from holdfast.footprint.identity_key import Same
from holdfast.footprint.layouts import Quantize, is_quantized, memory_layout, quantized_layout
from holdfast.footprint.rounded import gpu_lacks, rounding_of
from holdfast.footprint.scaled_layouts import ScaledLayout
from holdfast.models import ModelSpec, QuantSpec, TensorSpec
from holdfast.observability.decisions import Decision
from holdfast.planner.inputs.question import PlannedModel
from holdfast.units import MIB

NO_FILE = Path()
"""Of tensors that are only counted."""
OF_QUANTIZATION = "quantization_config:"
"""Before what a quantization needs that this engine lacks."""
QUANTIZING_BYTES = 16 * MIB
"""Beyond the tile that any matrix is expanded in: the weights of one as numbers, and what its codes are tried with."""
_NAMES: Mapping[str, str] = {
    "awq": "AWQ int4", "gptq": "GPTQ", "int4": "INT4", "int8": "INT8", "fp8": "FP8", "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
    "bitsandbytes": "bitsandbytes",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineWeights:
    spec: ModelSpec
    """Quantized as its files are."""
    stored: Mapping[str, StoredTensor] | None = field(repr=False)
    """By canonical name; None: dummies."""
    quantize: Quantize | None = None
    """What plain matrices of linear layers become."""

    def nbytes(self, *, dtype: str, expand: bool = False, compiled: bool = False) -> int:
        return cpu.weights_bytes(
            self.spec, self.stored, dtype=dtype, expand=expand, compiled=compiled, quantize=self.quantize
        )

    def by_name(self, *, dtype: str, expand: bool = False, compiled: bool = False) -> Mapping[str, int]:
        """Bytes by `layers.3`; what is of no layer by its own name."""
        return cpu.bytes_by_name(
            self.spec, self.stored, dtype=dtype, expand=expand, compiled=compiled, quantize=self.quantize
        )

    def by_layer(self, *, dtype: str, expand: bool = False, compiled: bool = False) -> tuple[int, ...]:
        return cpu.layer_bytes(
            self.spec, self.stored, dtype=dtype, expand=expand, compiled=compiled, quantize=self.quantize
        )

    def saved_by_layer(self, *, dtype: str) -> tuple[int, ...]:
        """What each layer has less where it waits for a GPU."""
        return _saved_by_layer(Same(self.spec), Same(self.stored), dtype, self.quantize)

    def gathered_bytes(self, *, dtype: str) -> int:
        """Of an embedding that is not the head as well: a token reads one row of it."""
        if self.spec.tied_embeddings:
            return 0
        return cpu.embedding_bytes(self.spec, self.stored, dtype=dtype, quantize=self.quantize)

    def embedding_in_rows(self, *, dtype: str) -> bool:
        """Whether each row of that embedding is one piece of numbers, which can be read from a disk."""
        rows = self.spec.vocab_size * self.spec.hidden_size * cpu.ELEMENT_BYTES[dtype]
        return self.spec.classifier is None and self.gathered_bytes(dtype=dtype) == rows

    def expert_sizes(self, *, dtype: str) -> Mapping[int, int]:
        """Of one expert of each layer that has some, on a GPU."""
        return _expert_sizes(Same(self.spec), Same(self.stored), dtype, self.quantize)

    def host_expert_sizes(self) -> Mapping[int, int] | None:
        """The same as the host's cores compute with it; None: they cannot."""
        return _host_expert_sizes(Same(self.spec), Same(self.stored), self.quantize)

    def host_reads_mlps(self, *, dtype: str) -> bool:
        """Whether the host's cores can compute the MLPs of its layers for a GPU."""
        return expert_places.host_reads_mlps(self.spec, self.stored, dtype=dtype, quantize=self.quantize)

    @property
    def experts_in_order(self) -> bool:
        """Some take their inputs in an order of their own (GPTQ's act-order)."""
        return any(layout.ordered for layout in _layouts(Same(self.spec), Same(self.stored), self.quantize, True))

    @property
    def quantized(self) -> bool:
        """Some of it is, in memory too unless it is expanded."""
        return self.quantize is not None or self.spec.quantization is not None or self.in_blocks

    @property
    def in_blocks(self) -> bool:
        """Of a GGUF file."""
        return _in_blocks(Same(self.stored))

    def in_codes(self, *, expand: bool) -> bool:
        """Whether matrices are held as codes with scales. `expand`: all are expanded whose inputs are not rounded."""
        if self.quantize is not None:
            return True
        if self.spec.quantization is None:  # GGUF's MXFP4.
            return not expand and bool(_compiled_layouts(Same(self.spec), Same(self.stored), None))
        return not expand or self.rounds_inputs(None)

    def compiles(self) -> bool:
        """Whether compiled products read all codes where they lie; what they do not is expanded tile by tile."""
        layouts = _compiled_layouts(Same(self.spec), Same(self.stored), self.quantize)
        return all(layout.compiles(columns) for layout, columns in layouts)

    def in_whole_numbers(self) -> bool:
        """Whether compiled products multiply all codes as whole numbers."""
        layouts = _compiled_layouts(Same(self.spec), Same(self.stored), self.quantize)
        return all(layout.whole_numbers for layout, _ in layouts)

    def rounds_inputs(self, capability: tuple[int, int] | None) -> bool:
        """Whether products of layers without experts round their inputs on such a GPU; None: on a CPU, experts too."""
        layouts = _layouts(Same(self.spec), Same(self.stored), self.quantize)
        if capability is None:
            layouts += _layouts(Same(self.spec), Same(self.stored), self.quantize, True)
        return any(
            layout.inputs != "plain" if capability is None else rounding_of(layout, capability).inputs != "plain"
            for layout in layouts
        )

    def divides_inputs(self) -> bool:
        """Whether some are rounded with scales that ranks find together."""
        return any(layout.divided_inputs for layout in _layouts(Same(self.spec), Same(self.stored), self.quantize))

    def gathers_inputs(self) -> bool:
        """Whether some columns take inputs of other ranks."""
        return any(layout.gathered_inputs for layout in _layouts(Same(self.spec), Same(self.stored), self.quantize))

    def products(self, capability: tuple[int, int], gpu: str) -> Iterator[Decision]:
        """How weights of eight bits are multiplied on a GPU, each way with its reason."""
        layouts = _layouts(Same(self.spec), Same(self.stored), self.quantize)
        eight = [rounding_of(layout, capability) for layout in layouts if not layout.four_bits]
        for rounding in dict.fromkeys(eight):
            how = "weight-only" if rounding.inputs == "plain" else rounding.inputs
            yield Decision("products", how, f"{gpu}: {rounding.reason}", "hardware")

    def missing_kernels(self, capability: tuple[int, int]) -> Iterator[str]:
        """What no kernel for such a GPU takes, in words."""
        for experts in (False, True):
            for layout in _layouts(Same(self.spec), Same(self.stored), self.quantize, experts):
                lacking = gpu_lacks(layout, capability, experts=experts)
                if lacking is not None:
                    yield f"{'experts' if experts else 'matrices'} in {layout}: {lacking}"

    @property
    def largest_quantized_bytes(self) -> int:
        """Of one matrix as it is stored, or one expert of a stack: it is on the device too while it is put in its order
        or quantized."""
        stored = (self.stored or {}).values()
        blocks = (tensor.nbytes for tensor in stored if tensor.packed is None and is_quantized(tensor.layout))
        packed = (tensor.nbytes // _experts(tensor) for tensor in stored if tensor.packed is not None)
        return max((0, *blocks, *packed, self._largest_made_bytes))

    @property
    def quantizing_bytes(self) -> int:
        """Of the copies of a tile that is quantized while it is loaded."""
        return 0 if self.quantize is None else QUANTIZING_BYTES

    @property
    def _largest_made_bytes(self) -> int:
        """Of what is quantized while it is loaded, with the copies of a tile."""
        if self.quantize is None or self.stored is None:
            return 0
        matrices = [tensor for tensor in self.spec.tensors if quantized_layout(tensor, self.quantize) is not None]
        stored = [self.stored[tensor.name] for tensor in matrices if tensor.name in self.stored]
        return self.quantizing_bytes + max((tensor.nbytes // _experts(tensor) for tensor in stored), default=0)

    @property
    def format(self) -> str:
        """For people: AWQ int4 g128, GGUF Q4_K and Q6_K. Empty: it is plain."""
        if self.quantize is not None:
            return f"{self.quantize.upper()}, quantized while loading"
        if self.spec.quantization is not None:
            return described(self.spec.quantization)
        return _block_format(Same(self.stored))


@lru_cache(maxsize=64)
def _in_blocks(stored: Same[Mapping[str, StoredTensor] | None]) -> bool:
    return any(is_quantized(tensor.layout) for tensor in (stored.held or {}).values() if tensor.packed is None)


@lru_cache(maxsize=64)
def _block_format(stored: Same[Mapping[str, StoredTensor] | None]) -> str:
    sizes = Counter[str]()
    for tensor in (stored.held or {}).values():
        if is_quantized(tensor.layout):
            sizes[tensor.layout] += tensor.nbytes
    return f"GGUF {' and '.join(layout for layout, _ in sizes.most_common(2))}" if sizes else ""


@lru_cache(maxsize=64)
def _saved_by_layer(
    spec: Same[ModelSpec], stored: Same[Mapping[str, StoredTensor] | None], dtype: str, quantize: Quantize | None
) -> tuple[int, ...]:
    return streamed.saved_by_layer(spec.held, stored.held, dtype=dtype, quantize=quantize)


@lru_cache(maxsize=64)
def _expert_sizes(
    spec: Same[ModelSpec], stored: Same[Mapping[str, StoredTensor] | None], dtype: str, quantize: Quantize | None
) -> Mapping[int, int]:
    return expert_places.expert_sizes(spec.held, stored.held, dtype=dtype, quantize=quantize)


@lru_cache(maxsize=64)
def _host_expert_sizes(
    spec: Same[ModelSpec], stored: Same[Mapping[str, StoredTensor] | None], quantize: Quantize | None
) -> Mapping[int, int] | None:
    return expert_places.host_expert_sizes(spec.held, stored.held, quantize=quantize)


@lru_cache(maxsize=256)
def _layouts(
    spec: Same[ModelSpec],
    stored: Same[Mapping[str, StoredTensor] | None],
    quantize: Quantize | None,
    experts: bool = False,
) -> tuple[ScaledLayout, ...]:
    """Of matrices that are experts', or of those that are not, each once."""
    chosen = (tensor for tensor in spec.held.tensors if (tensor.experts > 0 if experts else _is_linear(tensor)))
    return tuple(dict.fromkeys(layout for layout, _ in _scaled(chosen, spec.held, stored.held, quantize)))


@lru_cache(maxsize=256)
def _compiled_layouts(
    spec: Same[ModelSpec], stored: Same[Mapping[str, StoredTensor] | None], quantize: Quantize | None
) -> tuple[tuple[ScaledLayout, int], ...]:
    """Of all matrices, with the lengths of their rows, each once."""
    return tuple(dict.fromkeys(_scaled(spec.held.tensors, spec.held, stored.held, quantize)))


def _is_linear(tensor: TensorSpec) -> bool:
    return tensor.linear and not tensor.experts


def _scaled(
    tensors: Iterable[TensorSpec],
    spec: ModelSpec,
    stored: Mapping[str, StoredTensor] | None,
    quantize: Quantize | None,
) -> Iterator[tuple[ScaledLayout, int]]:
    """Those that lie in codes, with the lengths of their rows."""
    for tensor in tensors:
        kept = None if stored is None else stored.get(tensor.name)
        if kept is None and stored is not None:
            continue
        layout = memory_layout(
            tensor,
            kept,
            dtype="bfloat16",
            expand=False,
            compiled=False,
            quantization=spec.quantization,
            quantize=quantize,
        )
        if isinstance(layout, ScaledLayout):
            yield layout, tensor.shape[-1]


def described(quantization: QuantSpec) -> str:
    """AWQ int4 g128, GPTQ int8 g64 in act-order, FP8 128x128, bitsandbytes nf4."""
    words = [_NAMES[quantization.method]]
    if quantization.method == "gptq":
        words.append(f"int{quantization.bits}")
    if quantization.method == "bitsandbytes":
        words.append("nf4" if quantization.bits == 4 else "int8")
    if quantization.granularity == "block":
        words.append("{}x{}".format(*quantization.block))
    elif quantization.group_size:
        words.append(f"g{quantization.group_size}")
    if quantization.activation_order:
        words.append("in act-order")
    others = sorted({described(other) for other in quantization.others} - {" ".join(words)})
    return " and ".join([" ".join(words), *others])


def held_or_not(spec: ModelSpec, stored: Mapping[str, StoredTensor] | None) -> ModelSpec:
    """The same spec; where a matrix of it cannot lie in memory as it is quantized, one that this engine does not run,
    with the reason."""
    if not spec.runnable or spec.quantization is None:
        return spec
    try:
        EngineWeights(spec, stored).nbytes(dtype="bfloat16")
    except CheckpointError as error:
        return replace(spec, unsupported=(*spec.unsupported, f"{OF_QUANTIZATION} {error.message}"))
    return spec


@lru_cache(maxsize=64)
def engine_weights(key: Same[PlannedModel]) -> EngineWeights | None:
    """None: what its files have is not known by the names of the spec."""
    model = key.held
    if model.made_as in MADE_WHILE_LOADING:
        plain = model if model.unquantized is None else model.unquantized
        return EngineWeights(plain.spec, _stored(plain), "fp8" if model.made_as == "fp8" else "int4")
    if model.stored is not None and model.canonical is None and not model.derived:
        return None
    return EngineWeights(model.spec, _stored(model))


def _stored(model: PlannedModel) -> Mapping[str, StoredTensor] | None:
    """As the file is, or will be when it is fetched. None: a config without weights, which only dummies fill, and those
    are made in the dtype that is computed in."""
    if model.canonical is not None:
        return model.canonical
    if model.stored is not None:
        return model.stored
    packed = model.made_as is not None and model.spec.quantization is not None
    fetched = model.origin in ("catalogue", "builtin") or packed
    return published_tensors(Same(model.spec)) if fetched else None


@lru_cache(maxsize=16)
def published_tensors(key: Same[ModelSpec]) -> Mapping[str, StoredTensor]:
    """As the model's maker, or its quantizer, writes them; plain ones in the dtype that the model is published in."""
    return {tensor.name: _published(tensor, key.held) for tensor in key.held.tensors if not tensor.optional}


def _published(tensor: TensorSpec, spec: ModelSpec) -> StoredTensor:
    packing = None if spec.quantization is None else packing_of(spec.quantization, tensor, spec.stored_dtype)
    if packing is None:
        return _whole(tensor.name, tensor.shape, PLAIN_LAYOUTS[spec.stored_dtype])
    *stacked, rows, columns = tensor.shape
    parts = {part.name: _whole(part.name, part.shape, part.layout) for part in stored_parts(packing, rows, columns)}
    total = prod(stacked) * sum(part.nbytes for part in parts.values())
    codes = next(iter(parts.values()))
    packed = PackedMatrix(packing, {name.removesuffix("_inv"): part for name, part in parts.items()})
    return StoredTensor(tensor.name, tensor.shape, codes.layout, NO_FILE, 0, total, packed)


def _whole(name: str, shape: tuple[int, ...], layout: str) -> StoredTensor:
    return StoredTensor(name, shape, layout, NO_FILE, 0, LAYOUTS[layout].bytes_for(shape) or 0)


def _experts(tensor: StoredTensor) -> int:
    return tensor.shape[0] if len(tensor.shape) == 3 else 1
