"""Loads the experts of a layer: stacks whose experts are read one at a time, from files that keep them either way.

Peak while loading: the final bytes, the raw bytes of one expert's matrix, and one float tile of its expansion; and in
the host's memory those that are read ahead for a GPU (see `load`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from holdfast.checkpoints import Checkpoint, StoredTensor
from holdfast.errors import CheckpointError, EngineError
from holdfast.execution.layers.experts import (
    BlockStack,
    DenseStack,
    ExpertWeights,
    PlacedStack,
    QuantizedStack,
    SharedExpert,
    Stack,
)
from holdfast.execution.layers.linear import DenseLinear, Linear, StackedLinear
from holdfast.execution.memory import MakeTensor
from holdfast.execution.native import BlockMatrix, CompiledMatrix, ExpertLayer
from holdfast.execution.native.elementwise import ACTIVATION_NUMBERS
from holdfast.execution.streaming.device_experts import DeviceExperts
from holdfast.execution.weights.decoder_weights import GatedWeights, MlpWeights
from holdfast.execution.weights.gguf_blocks import QuantizedMatrix
from holdfast.execution.weights.packed import column_order, order_part
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.layouts import BLOCK_COLUMNS
from holdfast.footprint.scaled_layouts import ScaledLayout
from holdfast.models import LayerSpec, TensorSpec
from holdfast.models.quantization import INSTEAD
from holdfast.models.spec import Activation

PLAIN_NUMBERS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""As compiled products call them."""


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
    @property
    def experts(self) -> DeviceExperts | None: ...

    def linear(self, *names: str) -> Linear: ...

    def kept_layout(self, name: str) -> str | ScaledLayout | None: ...

    def travels(self, matrix: ScaledMatrix, layer: int | None) -> None: ...

    def fill_scaled(self, matrix: ScaledMatrix, first: int, name: str, expert: int | None = None) -> None: ...

    def read_expert(self, name: str, expert: int) -> torch.Tensor: ...

    def experts_in_turn(self, name: str) -> Iterator[int]: ...

    def fill_experts(self, targets: Sequence[torch.Tensor], tensor: TensorSpec) -> None: ...

    def step(self) -> None: ...


class _Part(NamedTuple):
    """Of a layer's stacks."""

    experts: int
    make: MakeTensor
    waits: bool = False
    """Does not stay where it is made."""


def load_experts(loader: ExpertLoader, layer: LayerSpec) -> ExpertWeights:
    """Those that do not stay on the GPU are then where they wait."""
    assert layer.experts is not None
    name = f"layers.{layer.index}"
    joined, down = _names(loader, layer.index)
    blocks = loader.compiled and _in_blocks(loader, [*(part for parts in joined for part in parts), down])
    shared = None
    if layer.experts.shared_intermediate_size:
        shared = SharedExpert(
            gate_up=loader.linear(f"{name}.shared.gate", f"{name}.shared.up"),
            down=loader.linear(f"{name}.shared.down"),
            router=loader.linear(f"{name}.shared.router"),
        )
    parts, placed = [_Part(len(layer.experts.numbers), loader.make)], loader.experts
    if placed is not None and layer.index in placed:
        stay = placed.resident(layer.index)
        parts = [_Part(stay, loader.make)] if stay else []
        parts.append(_Part(layer.experts.count - stay, placed.arena(layer.index).tensor, waits=True))
    stacks = tuple(_stack(loader, names, blocks, parts) for names in joined)
    weights = ExpertWeights(
        spec=layer.experts,
        router=loader.linear(f"{name}.router"),
        gate_up=stacks,
        down=_stack(loader, (down,), blocks, parts),
        shared=shared,
        same_order=_same_order(stacks),
    )
    if placed is not None and layer.index in placed:
        placed.keep(layer.index)
    return weights


def load_host_layer(loader: ExpertLoader, layer: LayerSpec, activation: Activation) -> ExpertLayer:
    """The experts of a layer as the host computes with them for a GPU: all of them, and nothing else."""
    assert layer.experts is not None
    joined, down = _names(loader, layer.index)
    names = [*(part for parts in joined for part in parts), down]
    if not _in_blocks(loader, names):
        raise EngineError(
            "compiled kernels do not read these experts",
            needed=f"rows of a multiple of {BLOCK_COLUMNS} columns",
            found=", ".join(str(loader.tensors[name].shape[2]) for name in names),
            fix="--cpu-compute off",
        )
    parts = [_Part(layer.experts.count, loader.make)]
    stacks = [_stack(loader, names, True, parts) for names in (*joined, (down,))]
    matrices = [stack.matrices for stack in stacks if isinstance(stack, BlockStack)]
    return ExpertLayer(
        gate_up=list(zip(*matrices[:-1], strict=True)),
        down=matrices[-1],
        per_token=layer.experts.per_token,
        normalized=layer.experts.normalized,
        activation=activation,
    )


def _same_order(stacks: tuple[Stack, ...]) -> bool:
    """Told while both are there: layers that are streamed share the memory that they are in while they run."""
    matrices = [stack.matrix for stack in stacks if isinstance(stack, QuantizedStack)]
    orders = [matrix.order for matrix in matrices if isinstance(matrix, ScaledMatrix) and matrix.order is not None]
    return len(orders) == len(stacks) == 2 and torch.equal(*orders)


def _names(loader: ExpertLoader, layer: int) -> tuple[list[tuple[str, ...]], str]:
    """Gates and ups as one stack where they are stored so, or lie alike and take their inputs in the same order; and
    the last matrices. What lies in memory must follow from the headers of files, which do not tell that two orders are
    the same."""
    gate_up, gate, up, down = (f"layers.{layer}.experts.{part}" for part in ("gate_up", "gate", "up", "down"))
    if gate_up in loader.tensors:
        return [(gate_up,)], down
    layout = loader.kept_layout(gate)
    ordered = isinstance(layout, ScaledLayout) and layout.ordered
    return [(gate, up)] if layout == loader.kept_layout(up) and not ordered else [(gate,), (up,)], down


def _in_blocks(loader: ExpertLoader, names: Sequence[str]) -> bool:
    """Compiled products read rows in pieces; a layer's stacks are all multiplied by them, or none is."""
    columns = {name: loader.tensors[name].shape[2] for name in names}
    scaled = {name: loader.kept_layout(name) for name in names}
    planes = all(layout.compiles(columns[name]) for name, layout in scaled.items() if isinstance(layout, ScaledLayout))
    return planes and all(count % BLOCK_COLUMNS == 0 for count in columns.values())


def _stack(loader: ExpertLoader, names: tuple[str, ...], blocks: bool, parts: Sequence[_Part]) -> Stack:
    """The matrices of these names, those of an expert one below the other. With `blocks` in one part."""
    layout = loader.kept_layout(names[0])
    loader.layouts.add(str(layout or loader.dtype).removeprefix("torch."))
    if layout is None:
        return _dense(loader, names, blocks, parts)
    if isinstance(layout, ScaledLayout):
        return _scaled(loader, names, layout, blocks, parts)
    if blocks:
        return _blocks(loader, names, layout)
    columns, rows = _sizes(loader, names)
    matrices = [QuantizedMatrix(layout, part.experts * sum(rows), columns, loader.device, part.make) for part in parts]
    homes, first = _homes(parts, loader.tensors[names[0]]), 0
    for name, count in zip(names, rows, strict=True):
        for expert, (part, place) in homes.items():
            matrices[part].fill_rows(place * sum(rows) + first, loader.read_expert(name, expert).to(loader.device))
        first += count
        loader.step()
    stacks = [QuantizedStack(matrix, part.experts) for matrix, part in zip(matrices, parts, strict=True)]
    return _whole(stacks, parts)


def _homes(parts: Sequence[_Part], tensor: TensorSpec) -> dict[int, tuple[int, int]]:
    """In which part each expert that is here lies, by its number, and at which place there."""
    places = [(number, place) for number, part in enumerate(parts) for place in range(part.experts)]
    return dict(zip(tensor.expert_numbers, places, strict=True))


def _whole(stacks: Sequence[Stack], parts: Sequence[_Part]) -> Stack:
    if not parts[-1].waits:
        return stacks[0]
    return PlacedStack(stacks[0] if len(stacks) > 1 else None, stacks[-1])


def _scaled(
    loader: ExpertLoader, names: tuple[str, ...], layout: ScaledLayout, blocks: bool, parts: Sequence[_Part]
) -> Stack:
    columns, rows = _sizes(loader, names)
    matrices = [
        ScaledMatrix(layout, part.experts * sum(rows), columns, loader.device, part.make, part.experts)
        for part in parts
    ]
    for matrix in matrices:
        loader.travels(matrix, loader.tensors[names[0]].layer)
    homes, first = _homes(parts, loader.tensors[names[0]]), 0
    for name, count in zip(names, rows, strict=True):
        for expert in loader.experts_in_turn(name):
            part, place = homes[expert]
            loader.fill_scaled(matrices[part], place * sum(rows) + first, name, expert)
        first += count
        loader.step()
    if matrices[0].inputs is not None:
        # Inputs are rounded once for all experts; the scale is read wherever these are.
        largest = torch.stack([matrix.inputs for matrix in matrices if matrix.inputs is not None]).amax(0)
        for matrix in matrices:
            matrix.inputs = largest
    if blocks:
        return BlockStack(matrices[0].compiled_parts(parts[0].experts), matrices[0].nbytes)
    stacks = [QuantizedStack(matrix, part.experts) for matrix, part in zip(matrices, parts, strict=True)]
    return _whole(stacks, parts)


def _dense(loader: ExpertLoader, names: tuple[str, ...], blocks: bool, parts: Sequence[_Part]) -> Stack:
    columns, rows = _sizes(loader, names)
    weights = [part.make((part.experts, sum(rows), columns), loader.dtype, loader.device) for part in parts]
    for number, name in enumerate(names):
        loader.fill_experts([weight.split(rows, dim=1)[number] for weight in weights], loader.tensors[name])
    if not blocks:
        return _whole([DenseStack(weight) for weight in weights], parts)
    [weight] = weights
    return BlockStack([BlockMatrix(expert.view(torch.uint8), "F32") for expert in weight], weight.nbytes)


def _blocks(loader: ExpertLoader, names: tuple[str, ...], layout: str) -> Stack:
    _, rows = _sizes(loader, names)
    numbers = loader.tensors[names[0]].expert_numbers
    row_bytes = loader.stored[names[0]].nbytes // (len(numbers) * rows[0])
    target = loader.make((len(numbers), sum(rows), row_bytes), torch.uint8, loader.device)
    for name, part in zip(names, torch.split(target, rows, dim=1), strict=True):
        for place, expert in enumerate(numbers):
            part[place].copy_(loader.read_expert(name, expert).view(-1, row_bytes))
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


def _sizes(loader: ExpertLoader, names: tuple[str, ...]) -> tuple[int, list[int]]:
    """(columns, rows of each) of one expert"""
    return loader.tensors[names[0]].shape[2], [loader.tensors[name].shape[1] for name in names]


def host_mlp(weights: MlpWeights, activation: Activation) -> ExpertLayer | None:
    """One of the host's memory as one expert that all tokens go to; None: compiled products do not read it."""
    if not isinstance(weights, GatedWeights) or activation not in ACTIVATION_NUMBERS:
        return None
    gate_up, down = _compiled_parts(weights.gate_up), _compiled_parts(weights.down)
    if not gate_up or len(down) != 1 or any(part.bias is not None for part in (*gate_up, *down)):
        return None
    return ExpertLayer(gate_up=[gate_up], down=down, per_token=1, normalized=False, activation=activation)


def _compiled_parts(linear: Linear) -> list[CompiledMatrix]:
    """What its outputs are computed from, side by side; nothing where compiled products do not read it."""
    if isinstance(linear, CompiledMatrix):
        return [linear]
    if isinstance(linear, DenseLinear) and linear.columns % BLOCK_COLUMNS == 0:
        return [BlockMatrix(linear.weight.view(torch.uint8), PLAIN_NUMBERS[linear.weight.dtype], linear.bias)]
    if isinstance(linear, StackedLinear) and all(isinstance(part, CompiledMatrix) for part in linear.parts):
        return [part for part in linear.parts if isinstance(part, CompiledMatrix)]
    return []
