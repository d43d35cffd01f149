"""Brings a model's tensors into memory, one at a time, fused and turned as the decoder multiplies them.

Peak while loading: the final bytes, the raw bytes of one tensor (of a quantized matrix: of all that hold it), and one
tile of its expansion (gguf_blocks.EXPAND_BYTES); in the host's memory, where the weights are for a GPU, also
AHEAD_BYTES of experts (or one expert), which threads read meanwhile, and the buffers of `StagedReads` for all else.
Knows nothing of files beyond `Checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from holdfast.checkpoints.checkpoint import Checkpoint, piece_of
from holdfast.checkpoints.files import StoredTensor
from holdfast.checkpoints.validation.match import match
from holdfast.execution.device import packs_weights
from holdfast.execution.layers.linear import (
    DenseLinear,
    Linear,
    PackedLinear,
    QuantizedLinear,
    StackedLinear,
    scaled_linear,
)
from holdfast.execution.loading.classifier import load_classifier, token_rows
from holdfast.execution.loading.embedding import load_embedding
from holdfast.execution.loading.expert_reads import ExpertReads
from holdfast.execution.loading.staged_reads import StagedReads, expected_names, staged_reads
from holdfast.execution.memory import MakeTensor, PeakMemory, exact_tensor, trim_memory
from holdfast.execution.native import BlockMatrix
from holdfast.execution.parallel.pieces import fill_cut, fill_piece, read_piece, whole_of
from holdfast.execution.streaming.device_experts import DeviceExperts
from holdfast.execution.streaming.device_layers import DeviceLayers
from holdfast.execution.streaming.disk.layer_slots import LayerSlots
from holdfast.execution.weights.decoder_weights import (
    GatedWeights,
    LayerWeights,
    MlpWeights,
    Norm,
    PlainWeights,
    Weights,
)
from holdfast.execution.weights.dummy import fill_dummy, fill_dummy_codes
from holdfast.execution.weights.experts import expert_rows, load_experts, reorder_rows
from holdfast.execution.weights.gguf_blocks import PLAIN_TYPES, QuantizedMatrix, expand_into, read_rows
from holdfast.execution.weights.packed import PackedSource, biases_of, fill_mxfp4, require_no_bias
from holdfast.execution.weights.quantize import fill_quantized
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.layouts import Quantize, memory_layout, scaled_layout
from holdfast.footprint.scaled_layouts import ScaledLayout
from holdfast.models import LayerSpec, ModelSpec, TensorSpec

WORTH_TRIMMING_BYTES = 16 << 20
"""Held after loading and not weights: less than this is not waited for."""

_TYPES = {
    **PLAIN_TYPES,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E8M0": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Of the parts of quantized matrices."""

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""


def load_weights(
    spec: ModelSpec,
    checkpoint: Checkpoint | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    expand: bool,
    compiled: bool = False,
    progress: Progress | None = None,
    pack: bool | None = None,
    quantize: Quantize | None = None,
    slots: LayerSlots | DeviceLayers | None = None,
    arrange: Callable[[LayerWeights], None] | None = None,
    experts: DeviceExperts | None = None,
    whole: ModelSpec | None = None,
) -> Weights:
    """`expand`: quantized matrices become `dtype`, but for those whose inputs are rounded; otherwise they stay as they
    are stored. No checkpoint: dummies. `quantize`: what plain matrices of linear layers become.

    `compiled`: what stays as it is stored is multiplied by compiled kernels (float32 on a CPU that has them).

    `pack`: dense matrices are reordered for oneDNN (by default where that is faster); it needs one matrix more
    at the peak. `slots`: for layers that do not stay in memory; `arrange`: puts one of them into the order that
    products read, before it leaves. `experts`: of layers whose experts do not all stay on the GPU. `whole`: where
    `spec` is one rank's share, that of the model.
    """
    packed = packs_weights(dtype, device) if pack is None else pack
    before = PeakMemory.resident_bytes()
    loader = Loader(
        spec, checkpoint, dtype, device, expand, compiled, packed, progress, quantize, slots, arrange, experts, whole
    )
    if checkpoint is not None:
        loader.staged = staged_reads(checkpoint, expected_names(spec, loader.stored), device)
    try:
        with torch.inference_mode(), loader.ahead.readers:
            weights = loader.load()
    finally:
        if loader.staged is not None:
            loader.staged.close()
    here = weights.nbytes if device.type == "cpu" else 0
    if PeakMemory.resident_bytes() - before - here > WORTH_TRIMMING_BYTES:
        trim_memory()
    return weights


class Loader:
    """Knows the spec, the checkpoint and how matrices shall lie; every tensor is asked of it by its canonical name."""

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint | None,
        dtype: torch.dtype,
        device: torch.device,
        expand: bool,
        compiled: bool,
        pack: bool,
        progress: Progress | None,
        quantize: Quantize | None,
        slots: LayerSlots | DeviceLayers | None = None,
        arrange: Callable[[LayerWeights], None] | None = None,
        experts: DeviceExperts | None = None,
        whole: ModelSpec | None = None,
    ) -> None:
        self.spec, self.checkpoint = spec, checkpoint
        self.dtype, self.device, self.progress = dtype, device, progress
        self.expand, self.compiled, self.pack, self.quantize = expand, compiled, pack, quantize
        self.tensors = {tensor.name: tensor for tensor in spec.tensors}
        found = {} if checkpoint is None else match(whole or spec, checkpoint)
        self.stored: dict[str, StoredTensor] = {
            name: piece_of(one, self.tensors[name]) for name, one in found.items() if name in self.tensors
        }
        for name, (rows, kept) in ({} if whole is None else token_rows(whole, found)).items():
            self.tensors[name] = rows
            self.stored |= {} if kept is None else {name: kept}
        self.slots, self.arrange, self.experts = slots, arrange, experts
        self.make: MakeTensor = exact_tensor
        self.biases, self.tied = biases_of(whole or spec), (whole or spec).tied_embeddings
        self.done = 0
        self.layouts: set[str] = set()
        self.ahead = ExpertReads(checkpoint, ahead=device.type != "cpu")
        self.staged: StagedReads | None = None
        """Of whole tensors, ahead of need; None: they are read when their turn comes."""

    def load(self) -> Weights:
        nothing = torch.empty((0, self.spec.hidden_size), dtype=self.dtype, device=self.device)
        embed = load_embedding(self) if "embed" in self.tensors else DenseLinear(nothing)
        assert isinstance(embed, DenseLinear | QuantizedLinear | BlockMatrix), "it has one name, so it is never stacked"
        layers = tuple(self.placed(layer) for layer in self.spec.layers)
        return Weights(
            dtype=self.dtype,
            embed=embed,
            layers=layers,
            final_norm=self.norm("final_norm") if "final_norm" in self.tensors else Norm(nothing),
            head=self.head(embed, nothing),
            classifier=load_classifier(self, embed),
            rope_freqs=self.vector("rope_freqs", torch.float32) if self.has("rope_freqs") else None,
            rope_freqs_long=self.vector("rope_freqs_long", torch.float32) if self.has("rope_freqs_long") else None,
            layouts=tuple(sorted(self.layouts)),
            slots=self.slots,
            experts=self.experts,
        )

    def head(self, embed: Linear, nothing: torch.Tensor) -> Linear:
        """Nothing of a stage that is not the last."""
        if self.spec.tied_embeddings or self.spec.classifier is not None:
            return embed
        return self.linear("head") if "head" in self.tensors else DenseLinear(nothing)

    def placed(self, layer: LayerSpec) -> LayerWeights:
        """In memory of its own, or in a slot from which it then goes to where it waits."""
        if self.slots is None or layer.index not in self.slots:
            return self.layer(layer)
        self.make = self.slots.arena(layer.index).tensor
        try:
            made = self.layer(layer)
        finally:
            self.make = exact_tensor
        if self.arrange is not None:
            self.arrange(made)
        self.slots.keep(layer.index)
        return made

    def layer(self, layer: LayerSpec) -> LayerWeights:
        name, decoder = f"layers.{layer.index}", self.spec.decoder
        before, after = decoder.norms != "after", decoder.norms != "before"
        heads_normed = decoder.query_key_norm != "none"
        attn_norm = self.norm(f"{name}.attn_norm") if before else None
        qkv = self.joined(name, "qkv", ("q", "k", "v"))
        query_norm = self.vector(f"{name}.q_norm") if heads_normed else None
        key_norm = self.vector(f"{name}.k_norm") if heads_normed else None
        o = self.linear(f"{name}.o")
        post_attn_norm = self.norm(f"{name}.post_attn_norm") if after else None
        if isinstance(self.slots, DeviceLayers) and layer.index in self.slots:
            self.slots.divide(layer.index)  # What is above is read by the first half of the layer.
        return LayerWeights(
            attn_norm=attn_norm,
            qkv=qkv,
            query_norm=query_norm,
            key_norm=key_norm,
            o=o,
            post_attn_norm=post_attn_norm,
            mlp_norm=self.norm(f"{name}.mlp_norm") if before else None,
            mlp=self.mlp(layer),
            post_mlp_norm=self.norm(f"{name}.post_mlp_norm") if after else None,
        )

    def mlp(self, layer: LayerSpec) -> MlpWeights:
        name = f"layers.{layer.index}"
        if layer.experts is not None:
            return load_experts(self, layer)
        if self.spec.decoder.mlp == "plain":
            return PlainWeights(self.linear(f"{name}.up"), self.linear(f"{name}.down"))
        return GatedWeights(self.joined(name, "gate_up", ("gate", "up")), self.linear(f"{name}.down"))

    def joined(self, layer: str, whole: str, parts: tuple[str, ...]) -> Linear:
        """Matrices that are multiplied as one, whether the checkpoint keeps them so or apart."""
        if f"{layer}.{whole}" in self.tensors:
            return self.linear(f"{layer}.{whole}")
        return self.linear(*(f"{layer}.{part}" for part in parts))

    def norm(self, name: str) -> Norm:
        bias = f"{name}_bias"
        return Norm(self.vector(name), self.vector(bias) if self.has(bias) else None)

    def has(self, name: str) -> bool:
        """Dummies have every tensor of the spec but those a checkpoint may lack."""
        if self.checkpoint is None:
            return name in self.tensors and not self.tensors[name].optional
        return name in self.stored

    def vector(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self.tensors[name]
        kept = torch.float32 if tensor.wide else dtype or self.dtype
        target = self.make(tensor.shape, kept, self.device)
        self.fill(target, tensor)
        return target

    def linear(self, *names: str) -> Linear:
        """The matrices of these names, their rows one below the other."""
        kinds, rows = {self.kept_layout(name) for name in names}, [self.tensors[name].shape[0] for name in names]
        layout = kinds.pop()
        if kinds or (isinstance(layout, ScaledLayout) and len(names) > 1 and not layout.stacks(rows)):
            return StackedLinear([self.linear(name) for name in names])
        columns = self.tensors[names[0]].shape[1]
        bias = self.bias(names, rows)
        self.layouts.add(str(layout or self.dtype).removeprefix("torch."))
        if isinstance(layout, ScaledLayout):
            matrix, piece = self.scaled(names, rows, layout), self.tensors[names[0]].cut
            return scaled_linear(matrix, self.dtype, bias, piece, compiled=self.compiled)
        if layout is None:
            weight = self.make((sum(rows), columns), self.dtype, self.device)
            for name, part in zip(names, torch.split(weight, rows), strict=True):
                self.fill(part, self.tensors[name])
            # The embedding is also looked up by rows, which a packed matrix cannot give, nor does it lie in a slot.
            packed = self.pack and names != ("embed",) and self.make is exact_tensor
            return PackedLinear(weight, bias) if packed else DenseLinear(weight, bias)
        if self.compiled:
            return self.blocks(names, rows, layout, bias)
        stored = QuantizedMatrix(layout, sum(rows), columns, self.device, self.make)
        first = 0
        for name, count in zip(names, rows, strict=True):
            stored.fill_rows(first, self.raw(name), self.row_order(self.tensors[name]))
            first += count
            self.step()
        return QuantizedLinear(stored, self.dtype, bias)

    def scaled(self, names: tuple[str, ...], rows: list[int], layout: ScaledLayout) -> ScaledMatrix:
        """Codes and scales, rows one below the other."""
        matrix = ScaledMatrix(layout, sum(rows), self.tensors[names[0]].shape[1], self.device, self.make)
        self.travels(matrix, self.tensors[names[0]].layer)
        if matrix.inputs is not None and layout.divided_inputs:
            matrix.inputs.fill_(1.0)
        first = 0
        for name, count in zip(names, rows, strict=True):
            self.fill_scaled(matrix, first, name)
            first += count
            self.step()
        return matrix

    def travels(self, matrix: ScaledMatrix, layer: int | None) -> None:
        """Of a layer that may not stay on the GPU: its zero points may be packed meanwhile."""
        if matrix.layout.codes != "int4" or matrix.zeros is None or layer is None:
            return
        if isinstance(self.slots, DeviceLayers) and layer in self.slots:
            self.slots.pieces.pack(self.slots.place(layer), matrix.zeros)

    def fill_scaled(self, matrix: ScaledMatrix, first: int, name: str, expert: int | None = None) -> None:
        """The matrix of this name, or of one of its experts, to rows first, first+1, ..."""
        tensor = self.tensors[name]
        if self.checkpoint is None:
            dummy = partial(fill_dummy_codes, tensor=whole_of(tensor), expert=expert)
            fill_cut(matrix, first, tensor, dummy)
        elif self.stored[name].packed is not None:
            fill_cut(matrix, first, tensor, self.packed(name, matrix.layout, expert).fill)
        else:
            self.fill_plain_codes(matrix, first, name, expert)
        order = self.row_order(tensor) if expert is None else expert_rows(self, tensor, expert)
        if order is not None:
            reorder_rows(matrix, first, order.to(self.device), tensor)

    def fill_plain_codes(self, matrix: ScaledMatrix, first: int, name: str, expert: int | None) -> None:
        """What is stored as GGUF's MXFP4, or as numbers that are quantized now."""
        stored, tensor = self.stored[name], self.tensors[name]
        if stored.layout == "MXFP4":
            raw = self.raw(name) if expert is None else self.read_expert(name, expert)
            fill_mxfp4(matrix, first, raw.view(tensor.shape[-2], -1).to(self.device), stored.name)
            return
        plain = self.whole_bytes(name, expert).view(PLAIN_TYPES[stored.layout]).view(whole_of(tensor).shape[-2:])
        plain, file_name = plain.to(self.device), stored.name.replace("{expert}", str(expert))
        fill_cut(matrix, first, tensor, lambda target, row: fill_quantized(target, row, plain, file_name))

    def packed(self, name: str, layout: ScaledLayout, expert: int | None = None) -> PackedSource:
        """A matrix of a quantized checkpoint, or one expert's of it; of a rank the whole one."""
        stored, (rows, columns) = self.stored[name].packed, whole_of(self.tensors[name]).shape[-2:]
        assert stored is not None
        assert self.checkpoint is not None
        parts, read = stored.parts, self.read_part
        if expert is not None and "{expert}" in self.tensors[name].hf_name:
            named = {part: one.name.replace("{expert}", str(expert)) for part, one in parts.items()}
            parts = {part: self.checkpoint.tensors[one] for part, one in named.items()}
        elif expert is not None:
            read = partial(self.read_of_stack, expert)
        require_no_bias(next(iter(parts.values())), self.checkpoint, self.biases)
        return PackedSource(stored.packing, parts, layout, rows, columns, read)

    def read_part(self, part: StoredTensor) -> torch.Tensor:
        return self.bring(part.name).view(_TYPES[part.layout]).view(part.shape)

    def bring(self, stored: str) -> torch.Tensor:
        """All bytes of this name of the checkpoint's, on the device."""
        if self.staged is not None and self.staged.foreseen(stored):
            return self.staged.bring(stored)
        return self.read_whole(stored).to(self.device)

    def read_of_stack(self, expert: int, part: StoredTensor) -> torch.Tensor:
        """One expert's of a tensor that has those of all."""
        stored = torch.from_numpy(self.ahead.read_of_stack(part, expert))
        return stored.view(_TYPES[part.layout]).view(part.shape[1:]).to(self.device)

    def read_whole(self, stored: str) -> torch.Tensor:
        """By the checkpoint's own name."""
        return torch.from_numpy(self.ahead.read(stored))

    def experts_in_turn(self, name: str) -> Iterator[int]:
        """All experts of a stack that are here, by their numbers; some that come after the one whose turn it is are
        being read."""
        return self.ahead.in_turn(self.stored.get(name), self.tensors[name].expert_numbers)

    def blocks(self, names: tuple[str, ...], rows: list[int], layout: str, bias: torch.Tensor | None) -> BlockMatrix:
        """The stored bytes themselves, rows one below the other."""
        assert self.checkpoint is not None
        row_bytes = self.stored[names[0]].nbytes // rows[0]
        target = self.make((sum(rows), row_bytes), torch.uint8, self.device)
        for name, part in zip(names, torch.split(target, rows), strict=True):
            order = self.row_order(self.tensors[name])
            if self.tensors[name].piece is None:
                read_rows(self.checkpoint, self.stored[name].name, part, order)
            else:
                rows_read = self.read(name).view(part.shape).numpy()
                part.numpy()[:] = rows_read if order is None else rows_read[order.numpy()]
            self.step()
        return BlockMatrix(target, layout, bias)

    def bias(self, names: tuple[str, ...], rows: list[int]) -> torch.Tensor | None:
        """One vector for fused matrices; zeros for those of them that have none."""
        if not any(self.has(f"{name}_bias") for name in names):
            return None
        bias = self.make((sum(rows),), self.dtype, self.device).zero_()
        for name, part in zip(names, torch.split(bias, rows), strict=True):
            if self.has(f"{name}_bias"):
                self.fill(part, self.tensors[f"{name}_bias"])
        return bias

    def kept_layout(self, name: str) -> str | ScaledLayout | None:
        """The layout a matrix has in memory, as it is stored or quantized; None: it becomes `dtype`."""
        dtype = str(self.dtype).removeprefix("torch.")
        layout = memory_layout(
            self.tensors[name],
            self.stored.get(name),
            dtype=dtype,
            expand=self.expand,
            compiled=self.compiled,
            quantization=self.spec.quantization,
            quantize=self.quantize,
        )
        return None if layout == dtype else layout

    def raw(self, name: str) -> torch.Tensor:
        """The stored bytes of a matrix, or this rank's, on the device."""
        if self.tensors[name].piece is not None:
            return self.read(name).to(self.device)
        return self.bring(self.stored[name].name)

    def read(self, name: str) -> torch.Tensor:
        assert self.checkpoint is not None
        if self.tensors[name].piece is not None:
            return read_piece(self.checkpoint, self.stored[name].name, self.tensors[name])
        return torch.from_numpy(self.checkpoint.read(self.stored[name].name))

    def read_expert(self, name: str, expert: int) -> torch.Tensor:
        """One expert's matrix of a stack, or this rank's part of it."""
        assert self.checkpoint is not None
        stored = self.stored[name].name
        if self.tensors[name].cut is not None:
            return read_piece(self.checkpoint, stored.replace("{expert}", str(expert)), self.tensors[name], expert)
        return self.whole_bytes(name, expert)

    def whole_bytes(self, name: str, expert: int | None) -> torch.Tensor:
        """Of a matrix, or of one expert's of a stack, which GGUF keeps whole and safetensors one by one."""
        assert self.checkpoint is not None
        stored = self.stored[name].name
        if expert is None:
            return self.bring(stored)
        if "{expert}" in stored:
            return self.read_whole(stored.replace("{expert}", str(expert)))
        return torch.from_numpy(self.checkpoint.read(stored, part=expert, parts=whole_of(self.tensors[name]).experts))

    def row_order(self, tensor: TensorSpec) -> torch.Tensor | None:
        """Which stored row becomes each row; None: they are in order."""
        if self.checkpoint is None or self.checkpoint.format != "gguf" or tensor.gguf_turn == "none":
            return None
        return torch.arange(tensor.shape[0]).view(tensor.heads, -1, 2).transpose(1, 2).reshape(-1)

    def fill(self, target: torch.Tensor, tensor: TensorSpec) -> None:
        if self.checkpoint is None:
            dummy = partial(fill_dummy, tensor=whole_of(tensor), tied=self.tied)
            fill_piece(target, tensor, dummy)
        elif (packed := self.stored[tensor.name].packed) is not None:
            layout = scaled_layout(packed.packing, tensor, self.stored[tensor.name])
            fill_piece(target, tensor, self.packed(tensor.name, layout).expand)
        else:
            self.fill_plain(target, tensor)
            if tensor.plus_one and self.checkpoint.format == "safetensors":
                target += 1
        self.step()

    def fill_plain(self, target: torch.Tensor, tensor: TensorSpec) -> None:
        stored, order, staged = self.stored[tensor.name], self.row_order(tensor), self.staged
        whole = order is None and tensor.piece is None and stored.layout in PLAIN_TYPES
        if staged is None or not whole or not staged.foreseen(stored.name):
            expand_into(target, self.read(tensor.name), stored, order)
        else:
            staged.fill(stored.name, PLAIN_TYPES[stored.layout], target.view(-1))

    def fill_experts(self, targets: Sequence[torch.Tensor], tensor: TensorSpec) -> None:
        """`targets`: [experts, rows, columns] each, which together have all that are here; they may lie apart."""
        matrices = [matrix for target in targets for matrix in target]
        if self.checkpoint is None:
            # By expert: wherever each of them lies, its numbers are the same.
            for expert, matrix in zip(tensor.expert_numbers, matrices, strict=True):
                made = replace(whole_of(tensor), name=f"{expert}.{tensor.name}")
                fill_piece(matrix, tensor, partial(fill_dummy, tensor=made, tied=self.tied))
            self.step()
            return
        if (packed := self.stored[tensor.name].packed) is not None:
            layout = scaled_layout(packed.packing, tensor, self.stored[tensor.name])
            layout = replace(layout, ordered=packed.packing.act_order)
            for expert, matrix in zip(self.experts_in_turn(tensor.name), matrices, strict=True):
                fill_piece(matrix, tensor, self.packed(tensor.name, layout, expert).expand)
                if (order := expert_rows(self, tensor, expert)) is not None:
                    matrix.copy_(matrix.index_select(0, order))
        else:
            for expert, matrix in zip(self.experts_in_turn(tensor.name), matrices, strict=True):
                expand_into(matrix, self.read_expert(tensor.name, expert), self.stored[tensor.name])
                if (order := expert_rows(self, tensor, expert)) is not None:
                    matrix.copy_(matrix.index_select(0, order))
        self.step()

    def step(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, len(self.tensors) if self.checkpoint is None else len(self.stored))
