"""The stored tensor of every tensor that a spec names, with the shape and layout the engine needs. Headers only."""

from __future__ import annotations

from holdfast.checkpoints.checkpoint import Checkpoint, stored_name
from holdfast.checkpoints.files import StoredTensor
from holdfast.checkpoints.formats.block_layouts import ENGINE_LAYOUTS
from holdfast.checkpoints.formats.packed_modules import packing_of
from holdfast.checkpoints.validation.packed_parts import find_packed, refuse_input_scales, refuse_scaled_numbers
from holdfast.checkpoints.validation.stored_dtypes import PLAIN, require_quantization
from holdfast.checkpoints.validation.tensor_shapes import require_no_more
from holdfast.errors import CheckpointError
from holdfast.models import ModelSpec, TensorSpec

UNANNOUNCED = (
    "the weights are quantized, but config.json has no quantization_config: write there what quantize_config.json or"
    ' quant_config.json says, with its quant_method ("awq", "gptq"), or download a copy that has it'
)
_FIX = "download the model again; if it still fails, its config.json belongs to another model"


def match(spec: ModelSpec, checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """The stored tensor of every canonical name; optional ones may be missing from the result.

    Raises CheckpointError when a tensor is missing, of another shape, or stored as the engine cannot read, when
    there are more layers than the spec has, and when nothing is quantized though the config says so.
    """
    unannounced = require_quantization(spec, checkpoint.tensors) if checkpoint.format == "safetensors" else ()
    require_no_more(spec, checkpoint)
    if spec.quantization is not None and checkpoint.format == "safetensors":
        refuse_input_scales(checkpoint.tensors)
    found, missing = find_tensors(spec, checkpoint)
    if missing:
        raise lacking(missing, spec, checkpoint, UNANNOUNCED if unannounced else _FIX)
    return found


def find_tensors(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[dict[str, StoredTensor], list[str]]:
    """As `match`, with the names of what is missing instead of a refusal."""
    found: dict[str, StoredTensor] = {}
    missing: list[str] = []
    for tensor in spec.tensors:
        stored, name = _find(tensor, spec, checkpoint)
        if stored is not None:
            found[tensor.name] = stored
        elif not tensor.optional:
            missing.append(name)
    return found, missing


def lacking(missing: list[str], spec: ModelSpec, checkpoint: Checkpoint, fix: str = _FIX) -> CheckpointError:
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return CheckpointError(
        f"the checkpoint lacks {len(missing)} of the {len(spec.tensors)} tensors that its config requires",
        needed=", ".join(missing[:3]) + more,
        found=f"{len(checkpoint.tensors)} tensors, such as " + ", ".join(list(checkpoint.tensors)[:3]),
        fix=fix,
    )


def _find(tensor: TensorSpec, spec: ModelSpec, checkpoint: Checkpoint) -> tuple[StoredTensor | None, str]:
    """The stored tensor, or the name under which there is none. Experts that lie one by one are told as one stack,
    under the name they have in common."""
    name = stored_name(tensor, checkpoint)
    if spec.quantization is not None and checkpoint.format == "safetensors":
        packing = packing_of(spec.quantization, tensor, spec.stored_dtype)
        codes = checkpoint.tensors.get(name.replace("{expert}", "0"))
        left_alone = codes is not None and codes.layout in PLAIN
        if packing is not None and not left_alone:
            return find_packed(tensor, packing, checkpoint.tensors)
        if packing is not None:
            refuse_scaled_numbers(tensor, checkpoint.tensors)
    if "{expert}" not in name:
        stored = checkpoint.tensors.get(name)
        if stored is not None:
            _check(tensor.shape, tensor, stored, spec)
        return stored, name
    parts: list[StoredTensor] = []
    for one, shape in tensor.in_safetensors():
        stored = checkpoint.tensors.get(one)
        if stored is None:
            return None, one
        _check(shape, tensor, stored, spec)
        parts.append(stored)
    first = parts[0]
    other = next((part for part in parts if part.layout != first.layout), None)
    if other is not None:
        raise CheckpointError(
            f"the experts of {tensor.name} have different tensor types",
            needed=f"{first.layout}, as {first.name}",
            found=f"{other.layout}: {other.name}",
        )
    total = sum(part.nbytes for part in parts)
    return StoredTensor(name, tensor.shape, first.layout, first.path, first.offset, total), name


def _check(shape: tuple[int, ...], tensor: TensorSpec, stored: StoredTensor, spec: ModelSpec) -> None:
    # GGUF keeps a matrix of one row as a vector.
    if stored.shape != shape and (len(shape) == 1 or stored.shape != tuple(size for size in shape if size != 1)):
        raise CheckpointError(
            f"the shape of tensor {stored.name!r} ({tensor.name}) does not match the config of {spec.architecture}",
            needed=str(list(shape)),
            found=f"{list(stored.shape)} in {stored.path.name}",
        )
    if stored.layout not in ENGINE_LAYOUTS:
        raise CheckpointError(
            f"tensor {stored.name!r} is stored as {stored.layout}, which this engine does not support",
            needed="one of " + ", ".join(sorted(ENGINE_LAYOUTS)),
            found=stored.layout,
            fix="use another file of this model, such as Q8_0, Q4_1 or BF16",
        )
