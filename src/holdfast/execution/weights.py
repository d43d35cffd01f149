"""Brings a model's tensors into memory, one at a time, fused and turned as the decoder multiplies them.

Peak while loading: the final bytes, the raw bytes of one tensor, and one float tile of its expansion
(EXPAND_BYTES). Knows nothing of files beyond `Checkpoint.read`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from holdfast.checkpoints.checkpoint import Checkpoint, match
from holdfast.checkpoints.files import StoredTensor
from holdfast.errors import CheckpointError
from holdfast.execution.device import packs_weights
from holdfast.execution.dummy import fill_dummy
from holdfast.execution.linear import DenseLinear, Linear, PackedLinear, QuantizedLinear, StackedLinear
from holdfast.execution.memory import exact_tensor, trim_memory
from holdfast.execution.native import BlockMatrix
from holdfast.execution.quantization import QUANTIZED_LAYOUTS, QuantizedMatrix, dequantize_stored
from holdfast.models import ModelSpec, TensorSpec
from holdfast.planner.layouts import memory_layout

EXPAND_BYTES = 8 << 20
"""Of float32 rows expanded at a time."""

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    attn_norm: torch.Tensor
    qkv: Linear
    o: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    dtype: torch.dtype
    """Of activations, and of every matrix that is not quantized."""
    embed: DenseLinear | QuantizedLinear | BlockMatrix
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Linear
    """The embedding itself where they are tied."""
    rope_freqs: torch.Tensor | None
    layouts: tuple[str, ...]
    """How the matrices lie in memory: number types, and quantized layouts that were kept."""

    @property
    def nbytes(self) -> int:
        total = self.embed.nbytes + self.final_norm.nbytes
        if self.head is not self.embed:
            total += self.head.nbytes
        for layer in self.layers:
            total += layer.attn_norm.nbytes + layer.mlp_norm.nbytes
            total += sum(linear.nbytes for linear in (layer.qkv, layer.o, layer.gate_up, layer.down))
        return total


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
) -> Weights:
    """`expand`: quantized matrices become `dtype`; otherwise they stay as they are stored. No checkpoint: dummies.

    `compiled`: what stays as it is stored is multiplied by compiled kernels (float32 on a CPU that has them).

    `pack`: dense matrices are reordered for oneDNN (by default where that is faster); it needs one matrix more
    at the peak.
    """
    packed = packs_weights(dtype, device) if pack is None else pack
    with torch.inference_mode():
        weights = _Loader(spec, checkpoint, dtype, device, expand, compiled, packed, progress).load()
    trim_memory()
    return weights


class _Loader:
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
    ) -> None:
        self.spec, self.checkpoint = spec, checkpoint
        self.dtype, self.device, self.progress = dtype, device, progress
        self.expand, self.compiled, self.pack = expand, compiled, pack
        self.tensors = {tensor.name: tensor for tensor in spec.tensors}
        self.stored: dict[str, StoredTensor] = {} if checkpoint is None else match(spec, checkpoint)
        self.done = 0
        self.layouts: set[str] = set()

    def load(self) -> Weights:
        embed = self.linear("embed")
        assert isinstance(embed, DenseLinear | QuantizedLinear | BlockMatrix), "it has one name, so it is never stacked"
        layers = tuple(self.layer(f"layers.{layer.index}") for layer in self.spec.layers)
        return Weights(
            dtype=self.dtype,
            embed=embed,
            layers=layers,
            final_norm=self.vector("final_norm"),
            head=embed if self.spec.tied_embeddings else self.linear("head"),
            rope_freqs=self.vector("rope_freqs", torch.float32) if self.has("rope_freqs") else None,
            layouts=tuple(sorted(self.layouts)),
        )

    def layer(self, name: str) -> LayerWeights:
        return LayerWeights(
            attn_norm=self.vector(f"{name}.attn_norm"),
            qkv=self.linear(f"{name}.q", f"{name}.k", f"{name}.v"),
            o=self.linear(f"{name}.o"),
            mlp_norm=self.vector(f"{name}.mlp_norm"),
            gate_up=self.linear(f"{name}.gate", f"{name}.up"),
            down=self.linear(f"{name}.down"),
        )

    def has(self, name: str) -> bool:
        """Dummies have every tensor of the spec but those a checkpoint may lack."""
        if self.checkpoint is None:
            return name in self.tensors and not self.tensors[name].optional
        return name in self.stored

    def vector(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        target = torch.empty(self.tensors[name].shape, dtype=dtype or self.dtype, device=self.device)
        self.fill(target, self.tensors[name])
        return target

    def linear(self, *names: str) -> Linear:
        """The matrices of these names, their rows one below the other."""
        kinds = {self.kept_layout(name) for name in names}
        if len(kinds) > 1:
            return StackedLinear([self.linear(name) for name in names])
        layout = kinds.pop()
        rows = [self.tensors[name].shape[0] for name in names]
        columns = self.tensors[names[0]].shape[1]
        bias = self.bias(names, rows)
        self.layouts.add(layout or str(self.dtype).removeprefix("torch."))
        if layout is None:
            weight = exact_tensor((sum(rows), columns), self.dtype, self.device)
            for name, part in zip(names, torch.split(weight, rows), strict=True):
                self.fill(part, self.tensors[name])
            # The embedding is also looked up by rows, which a packed matrix cannot give.
            return PackedLinear(weight, bias) if self.pack and names != ("embed",) else DenseLinear(weight, bias)
        if self.compiled:
            return self.blocks(names, rows, layout, bias)
        matrix = QuantizedMatrix(layout, sum(rows), columns, self.device)
        first = 0
        for name, count in zip(names, rows, strict=True):
            matrix.fill_rows(first, self.read(name).to(self.device), self.row_order(self.tensors[name]))
            first += count
            self.step()
        return QuantizedLinear(matrix, self.dtype, bias)

    def blocks(self, names: tuple[str, ...], rows: list[int], layout: str, bias: torch.Tensor | None) -> BlockMatrix:
        """The stored bytes themselves, rows one below the other."""
        row_bytes = self.stored[names[0]].nbytes // rows[0]
        target = exact_tensor((sum(rows), row_bytes), torch.uint8, self.device)
        for name, part in zip(names, torch.split(target, rows), strict=True):
            stored, order = self.read(name).view(-1, row_bytes), self.row_order(self.tensors[name])
            part.copy_(stored if order is None else stored.index_select(0, order))
            self.step()
        return BlockMatrix(target, layout, bias)

    def bias(self, names: tuple[str, ...], rows: list[int]) -> torch.Tensor | None:
        """One vector for fused matrices; zeros for those of them that have none."""
        if not any(self.has(f"{name}_bias") for name in names):
            return None
        bias = torch.zeros(sum(rows), dtype=self.dtype, device=self.device)
        for name, part in zip(names, torch.split(bias, rows), strict=True):
            if self.has(f"{name}_bias"):
                self.fill(part, self.tensors[f"{name}_bias"])
        return bias

    def kept_layout(self, name: str) -> str | None:
        """The stored layout a matrix keeps in memory; None: it becomes `dtype`."""
        dtype = str(self.dtype).removeprefix("torch.")
        stored = self.stored[name].layout if name in self.stored else None
        layout = memory_layout(self.tensors[name], stored, dtype=dtype, expand=self.expand, compiled=self.compiled)
        return None if layout == dtype else layout

    def read(self, name: str) -> torch.Tensor:
        assert self.checkpoint is not None
        return torch.from_numpy(self.checkpoint.read(self.stored[name].name))

    def row_order(self, tensor: TensorSpec) -> torch.Tensor | None:
        """Which stored row becomes each row; None: they are in order."""
        if self.checkpoint is None or self.checkpoint.format != "gguf" or tensor.gguf_turn == "none":
            return None
        return torch.arange(tensor.shape[0]).view(tensor.heads, -1, 2).transpose(1, 2).reshape(-1)

    def fill(self, target: torch.Tensor, tensor: TensorSpec) -> None:
        if self.checkpoint is None:
            fill_dummy(target, tensor, tied=self.spec.tied_embeddings)
        else:
            expand_into(target, self.read(tensor.name), self.stored[tensor.name].layout, self.row_order(tensor))
        self.step()

    def step(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, len(self.tensors) if self.checkpoint is None else len(self.stored))


def expand_into(target: torch.Tensor, raw: torch.Tensor, layout: str, order: torch.Tensor | None = None) -> None:
    """Stored bytes as numbers into `target`, in tiles of rows; `order` picks the stored row for each row."""
    if layout not in _PLAIN and layout not in QUANTIZED_LAYOUTS:
        raise CheckpointError(f"tensors stored as {layout} cannot be expanded", needed=", ".join(_PLAIN), found=layout)
    rows = target.shape[0]
    stored = raw.view(rows, -1)
    tile_rows = max(1, EXPAND_BYTES // (4 * max(1, target.numel() // rows)))
    for first in range(0, rows, tile_rows):
        last = min(first + tile_rows, rows)
        part = stored[first:last] if order is None else stored.index_select(0, order[first:last])
        if layout in _PLAIN:
            target[first:last].copy_(part.view(_PLAIN[layout]).view(target[first:last].shape))
        elif target.dim() == 1:
            wide = torch.empty((1, rows), dtype=torch.float32)
            dequantize_stored(layout, raw, wide)
            target.copy_(wide[0])
            return
        else:
            dequantize_stored(layout, part.contiguous(), target[first:last])
