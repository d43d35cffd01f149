"""Loads the experts of a layer: stacks whose experts are read one at a time, from files that keep them either way.

Peak while loading: the final bytes, the raw bytes of one expert's matrix, and one float tile of its expansion; and in
the host's memory those that are read ahead for a GPU (see `load`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch

from holdfast.checkpoints import Checkpoint, StoredTensor
from holdfast.errors import CheckpointError
from holdfast.execution.layers.experts import BlockStack, DenseStack, ExpertWeights, QuantizedStack, SharedExpert, Stack
from holdfast.execution.layers.linear import Linear
from holdfast.execution.memory import MakeTensor
from holdfast.execution.native import BlockMatrix
from holdfast.execution.weights.gguf_blocks import QuantizedMatrix
from holdfast.execution.weights.packed import column_order, order_part
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.layouts import BLOCK_COLUMNS
from holdfast.footprint.scaled_layouts import ScaledLayout
from holdfast.models import LayerSpec, TensorSpec
from holdfast.models.quantization import INSTEAD


class ExpertLoader(Protocol):
    """What is asked of whoever loads the layers."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]: ...
    @property
    def stored(self) -> Mapping[str, StoredTensor]: ...
    @property
    def layouts(self) -> set[str]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def make(self) -> MakeTensor: ...
    @property
    def compiled(self) -> bool: ...
    @property
    def checkpoint(self) -> Checkpoint | None: ...

    def read_part(self, part: StoredTensor) -> torch.Tensor: ...

    def linear(self, *names: str) -> Linear: ...

    def kept_layout(self, name: str) -> str | ScaledLayout | None: ...

    def fill_scaled(self, matrix: ScaledMatrix, first: int, name: str, expert: int | None = None) -> None: ...

    def read_expert(self, name: str, expert: int) -> torch.Tensor: ...

    def experts_in_turn(self, name: str) -> Iterator[int]: ...

    def fill_experts(self, target: torch.Tensor, tensor: TensorSpec) -> None: ...

    def step(self) -> None: ...


def load_experts(loader: ExpertLoader, layer: LayerSpec) -> ExpertWeights:
    assert layer.experts is not None
    name = f"layers.{layer.index}"
    gate_up, gate, up, down = (f"{name}.experts.{part}" for part in ("gate_up", "gate", "up", "down"))
    joined = [(gate_up,)] if gate_up in loader.tensors else _joined(loader, gate, up)
    blocks = loader.compiled and _in_blocks(loader, [*(part for parts in joined for part in parts), down])
    shared = None
    if layer.experts.shared_intermediate_size:
        shared = SharedExpert(
            gate_up=loader.linear(f"{name}.shared.gate", f"{name}.shared.up"),
            down=loader.linear(f"{name}.shared.down"),
            router=loader.linear(f"{name}.shared.router"),
        )
    stacks = tuple(_stack(loader, names, blocks) for names in joined)
    return ExpertWeights(
        spec=layer.experts,
        router=loader.linear(f"{name}.router"),
        gate_up=stacks,
        down=_stack(loader, (down,), blocks),
        shared=shared,
        same_order=_same_order(stacks),
    )


def _same_order(stacks: tuple[Stack, ...]) -> bool:
    """Told while both are there: layers that are streamed share the memory that they are in while they run."""
    matrices = [stack.matrix for stack in stacks if isinstance(stack, QuantizedStack)]
    orders = [matrix.order for matrix in matrices if isinstance(matrix, ScaledMatrix) and matrix.order is not None]
    return len(orders) == len(stacks) == 2 and torch.equal(*orders)


def _joined(loader: ExpertLoader, gate: str, up: str) -> list[tuple[str, ...]]:
    """Both as one stack, where they lie alike and take their inputs in the same order. What lies in memory must follow
    from the headers of files, which do not tell that two orders are the same."""
    layout = loader.kept_layout(gate)
    ordered = isinstance(layout, ScaledLayout) and layout.ordered
    return [(gate, up)] if layout == loader.kept_layout(up) and not ordered else [(gate,), (up,)]


def _in_blocks(loader: ExpertLoader, names: Sequence[str]) -> bool:
    """Compiled products read rows in pieces; a layer's stacks are all multiplied by them, or none is."""
    columns = {name: loader.tensors[name].shape[2] for name in names}
    scaled = {name: loader.kept_layout(name) for name in names}
    planes = all(layout.compiles(columns[name]) for name, layout in scaled.items() if isinstance(layout, ScaledLayout))
    return planes and all(count % BLOCK_COLUMNS == 0 for count in columns.values())


def _stack(loader: ExpertLoader, names: tuple[str, ...], blocks: bool) -> Stack:
    """The matrices of these names, those of an expert one below the other."""
    layout = loader.kept_layout(names[0])
    loader.layouts.add(str(layout or loader.dtype).removeprefix("torch."))
    if layout is None:
        return _dense(loader, names, blocks)
    if isinstance(layout, ScaledLayout):
        return _scaled(loader, names, layout, blocks)
    if blocks:
        return _blocks(loader, names, layout)
    experts, columns, rows = _sizes(loader, names)
    matrix = QuantizedMatrix(layout, experts * sum(rows), columns, loader.device, loader.make)
    first = 0
    for part, name in enumerate(names):
        for expert in range(experts):
            stored = loader.read_expert(name, expert).to(loader.device)
            matrix.fill_rows(expert * sum(rows) + first, stored)
        first += rows[part]
        loader.step()
    return QuantizedStack(matrix, experts)


def _scaled(loader: ExpertLoader, names: tuple[str, ...], layout: ScaledLayout, blocks: bool) -> Stack:
    experts, columns, rows = _sizes(loader, names)
    matrix = ScaledMatrix(layout, experts * sum(rows), columns, loader.device, loader.make, experts)
    first = 0
    for part, name in enumerate(names):
        for expert in loader.experts_in_turn(name):
            loader.fill_scaled(matrix, expert * sum(rows) + first, name, expert)
        first += rows[part]
        loader.step()
    if blocks:
        return BlockStack(matrix.compiled_parts(experts), matrix.nbytes)
    return QuantizedStack(matrix, experts)


def _dense(loader: ExpertLoader, names: tuple[str, ...], blocks: bool) -> Stack:
    experts, columns, rows = _sizes(loader, names)
    weight = loader.make((experts, sum(rows), columns), loader.dtype, loader.device)
    for name, part in zip(names, torch.split(weight, rows, dim=1), strict=True):
        loader.fill_experts(part, loader.tensors[name])
    if not blocks:
        return DenseStack(weight)
    return BlockStack([BlockMatrix(expert.view(torch.uint8), "F32") for expert in weight], weight.nbytes)


def _blocks(loader: ExpertLoader, names: tuple[str, ...], layout: str) -> Stack:
    experts, _, rows = _sizes(loader, names)
    row_bytes = loader.stored[names[0]].nbytes // (experts * rows[0])
    target = loader.make((experts, sum(rows), row_bytes), torch.uint8, loader.device)
    for name, part in zip(names, torch.split(target, rows, dim=1), strict=True):
        for expert in range(experts):
            part[expert].copy_(loader.read_expert(name, expert).view(-1, row_bytes))
        loader.step()
    return BlockStack([BlockMatrix(expert, layout) for expert in target], target.nbytes)


def expert_rows(loader: ExpertLoader, tensor: TensorSpec, expert: int) -> torch.Tensor | None:
    """Which stored row becomes each row of an expert's matrix; None: they are in order. Those of gate and up go by what
    down takes them for, where a quantizer put down's columns into an order of their own (`takes_rows_in_order`)."""
    if loader.checkpoint is None:
        return None
    if tensor.alternating:
        return torch.arange(tensor.shape[1], device=loader.device).view(-1, 2).t().reshape(-1)
    where, _, part = tensor.name.rpartition(".")
    down = f"{where}.down"
    packed = loader.stored[down].packed if part in ("gate", "up") else None
    if packed is None or not packed.packing.act_order:
        return None
    layout, found = loader.kept_layout(down), order_part(packed.parts)
    if not isinstance(layout, ScaledLayout) or found is None:
        return None
    stored = loader.checkpoint.tensors[found.name.replace("{expert}", str(expert))]
    size = layout.group or loader.tensors[down].shape[2]
    return column_order(stored.name, loader.read_part(stored).view(-1).long(), size)


def reorder_rows(matrix: ScaledMatrix, first: int, order: torch.Tensor, tensor: TensorSpec) -> None:
    """Of rows first, first+1, ... the one of each index becomes the next."""
    if matrix.layout.group_rows > 1:
        raise CheckpointError(
            f"the rows of {tensor.hf_name} share scales, and take the order of another matrix's columns",
            needed="scales for rows or groups beside experts in act-order",
            found=str(matrix.layout),
            fix=INSTEAD,
            field="quantization_config",
        )
    matrix.reorder_rows(first, order)


def _sizes(loader: ExpertLoader, names: tuple[str, ...]) -> tuple[int, int, list[int]]:
    """(experts, columns, rows of each)"""
    experts, _, columns = loader.tensors[names[0]].shape
    return experts, columns, [loader.tensors[name].shape[1] for name in names]
