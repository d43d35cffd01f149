"""Whether stored weights are those of the model that the config describes, for every family. Names and shapes only.

    a tensor that the config promises and the file lacks    refused; small vectors of a GGUF are said instead
    a matrix or a vector of another shape                   refused, by the config's field
    a layer or an expert beyond the config's                refused, by the config's field
    a head beside tied embeddings                           said, and not loaded

Converters to GGUF fold and rename norms and biases, so that their absence proves nothing; matrices they keep.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.files import StoredTensor
from holdfast.checkpoints.formats.packed_modules import packing_of
from holdfast.checkpoints.formats.quantized_tensors import PackedPart, Packing, stored_parts
from holdfast.checkpoints.validation.stored_dtypes import PLAIN, packed_part, require_packed_so, require_quantization
from holdfast.errors import CheckpointError
from holdfast.models import ModelSpec, TensorSpec
from holdfast.models.source import GGUF_NAMES
from holdfast.units import shorten

_HEADS = ("lm_head", "embed_out")
"""What safetensors call the head, after any prefix."""
_LAYER = re.compile(r"(.*?)\b(\d+)\.")
_EXPERT = re.compile(r"(.*\.)(\d+)\.")
_NAMES_SHOWN = 3
_FIX = {
    "safetensors": "config.json belongs to another model, or the download is incomplete: download both again",
    "gguf": "the file is incomplete, or was converted by a program with other tensor names: download another",
}
_INNER, _HIDDEN, _HEAD_COUNT = "intermediate_size", "hidden_size", "num_attention_heads"
_AXES: Mapping[str, tuple[str, str]] = {
    "embed": ("vocab_size", _HIDDEN), "head": ("vocab_size", _HIDDEN), "q": (_HEAD_COUNT, _HIDDEN),
    "k": ("num_key_value_heads", _HIDDEN), "v": ("num_key_value_heads", _HIDDEN), "o": (_HIDDEN, _HEAD_COUNT),
    "gate": (_INNER, _HIDDEN), "up": (_INNER, _HIDDEN), "down": (_HIDDEN, _INNER), "gate_up": (_INNER, _HIDDEN),
    "router": ("num_experts", _HIDDEN), "score": ("id2label", _HIDDEN),
}  # fmt: skip
"""What the config calls the rows and the columns of a matrix."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor, or one expert of it, lies and what it should look like there."""

    name: str
    shape: tuple[int, ...] | None
    """None: packed in a way that is not known from the config."""
    axes: tuple[str, str]
    packed: bool = False
    """Quantizers turn and tile what they pack: only its size is compared."""

    def holds(self, shape: tuple[int, ...]) -> bool:
        if self.shape is None:
            return True
        return prod(shape) == prod(self.shape) if self.packed else shape == self.shape


def require_agreement(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[str, ...]:
    """What is odd but harmless, in words. Raises CheckpointError."""
    odd = require_quantization(spec, checkpoint.tensors) if checkpoint.format == "safetensors" else ()
    missing: list[TensorSpec] = []
    folded = seen = 0
    for tensor in spec.tensors:
        if tensor.part != "text":
            continue
        there = _check_tensor(tensor, spec, checkpoint)
        seen += there
        if there or tensor.optional:
            continue
        if checkpoint.format == "gguf" and not _is_matrix(tensor):
            folded += 1
        else:
            missing.append(tensor)
    if missing:
        raise _lacking(missing, seen, spec, checkpoint)
    require_no_more(spec, checkpoint)
    notes = list(odd)
    if folded:
        notes.append(f"{folded} norms and biases expected from the header are missing")
    if unused := unused_head(spec, checkpoint.tensors):
        notes.append(f"{', '.join(sorted(unused))}: stored but not loaded, because the embeddings are tied")
    return tuple(notes)


def unused_head(spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> frozenset[str]:
    """Of a model whose head is its embedding: what is stored for a head all the same, which nobody loads."""
    if not spec.tied_embeddings:
        return frozenset()
    return frozenset(name for name in stored if name.rpartition(".")[0].rpartition(".")[2] in _HEADS or name in _HEADS)


def require_no_more(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Layers and experts are numbered: one beyond the config's was made for another config."""
    layers: dict[str, int] = {}
    experts: dict[str, int] = {}
    for tensor in spec.tensors:
        if tensor.part == "vision":
            continue
        name = tensor.gguf_name if checkpoint.format == "gguf" else tensor.hf_name
        if (tensor.layer is not None or tensor.part == "draft") and (found := _LAYER.match(name)):
            layers[found[1]] = max(layers.get(found[1], 0), int(found[2]) + 1)
        if "{expert}" in name:
            experts[name.partition("{expert}")[0]] = tensor.experts
    for name in checkpoint.tensors:
        layer = _LAYER.match(name)
        if layer is not None and _beyond(layer, layers):
            raise _more(
                name, "layers", f"{len(spec.layers)} layers", _field("num_hidden_layers", spec, checkpoint), checkpoint
            )
        expert = _EXPERT.match(name)
        if expert is not None and _beyond(expert, experts):
            raise _more(
                name, "experts", f"{experts[expert[1]]} experts", _field("num_experts", spec, checkpoint), checkpoint
            )


def _beyond(found: re.Match[str], known: Mapping[str, int]) -> bool:
    most = known.get(found[1])
    # A name of a stranger may hold digits without end.
    return most is not None and (len(found[2]) > 9 or int(found[2]) >= most)


def _more(name: str, what: str, needed: str, field: str, checkpoint: Checkpoint) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint has more {what} than its config says",
        needed=f"{needed}, as {field} says",
        found=shorten(name, 120),
        fix=_FIX[checkpoint.format],
        field=field,
    )


# One tensor


def _is_matrix(tensor: TensorSpec) -> bool:
    return tensor.linear or tensor.experts > 0 or tensor.name in ("embed", "head")


def _check_tensor(tensor: TensorSpec, spec: ModelSpec, checkpoint: Checkpoint) -> bool:
    """Whether all of it is there; of another shape, it is refused."""
    if checkpoint.format == "gguf":
        stored = checkpoint.tensors.get(tensor.gguf_name)
        if stored is not None and _is_matrix(tensor) and _squeezed(stored.shape) != _squeezed(tensor.shape):
            raise _misshapen(stored, tensor.shape, _axes(tensor), spec, checkpoint)
        return stored is not None
    for place in _places(tensor, spec, checkpoint.tensors):
        if place is None:
            return False
        stored = checkpoint.tensors[place.name]
        if place.shape is not None and not place.holds(stored.shape):
            raise _misshapen(stored, place.shape, place.axes, spec, checkpoint)
    return True


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(extent for extent in shape if extent != 1)


def _places(tensor: TensorSpec, spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> Iterator[_Place | None]:
    """None: one of them is not there, in any packing."""
    packing = None if spec.quantization is None else packing_of(spec.quantization, tensor, spec.stored_dtype)
    axes = _axes(tensor)
    packed_axes = (axes[1], axes[0]) if packing is not None and packing.method in ("awq", "gptq") else axes
    expected: PackedPart | None = None
    for name, shape in tensor.in_safetensors():
        found = stored.get(name)
        if found is not None and found.layout in PLAIN:
            yield _Place(name, shape, axes)
            continue
        packed = packed_part(name, stored)
        if packed is None:
            yield None
            continue
        if packing is not None and expected is None:
            expected = _packed(tensor, packing, packed, spec, stored)
        known = expected is not None and (found is not None or packed.name.endswith(expected.name))
        yield _Place(packed.name, expected.shape if expected and known else None, packed_axes, packed=True)


def _packed(
    tensor: TensorSpec, packing: Packing, found: StoredTensor, spec: ModelSpec, stored: Mapping[str, StoredTensor]
) -> PackedPart:
    """The part that holds the quants, of the whole tensor or of one expert. Raises CheckpointError."""
    *stacked, rows, columns = tensor.shape
    try:
        parts = stored_parts(packing, rows, columns)
    except CheckpointError as error:
        error.found = f"{error.found}, of {shorten(found.name, 120)}"
        error.fix = error.fix or _FIX["safetensors"]
        raise
    alone = "{expert}" in tensor.hf_name
    quantization = spec.quantization
    scheme = None if quantization is None else quantization.scheme_of(tensor.hf_name, tensor.experts)
    if scheme is not None and (alone or not stacked):
        require_packed_so(scheme, packing, parts, found, stored)
    return parts[0] if alone else replace(parts[0], shape=(*stacked, *parts[0].shape))


# Refusals


def _axes(tensor: TensorSpec) -> tuple[str, str]:
    role = tensor.name.rpartition(".")[2].removesuffix("_bias")
    rows, columns = _AXES.get(role, (tensor.name, tensor.name))
    if tensor.experts:
        rows, columns = (name.replace(_INNER, f"moe_{_INNER}") for name in (rows, columns))
    if len(tensor.shape) == 1:
        # A bias goes by the rows of its matrix, a norm by what it is applied to.
        return (rows, rows) if tensor.name.endswith("_bias") else (tensor.name, tensor.name)
    return rows, columns


def _misshapen(
    stored: StoredTensor, shape: tuple[int, ...], axes: tuple[str, str], spec: ModelSpec, checkpoint: Checkpoint
) -> CheckpointError:
    alike = len(stored.shape) == len(shape)
    last_differs = alike and stored.shape[-1] != shape[-1]
    first_differs = not alike or stored.shape[:-1] != shape[:-1]
    field = _field(axes[0] if first_differs or len(shape) == 1 or not last_differs else axes[1], spec, checkpoint)
    return CheckpointError(
        f"the shape of tensor {shorten(stored.name)!r} does not match the config of {spec.architecture} ({field})",
        needed=str(list(shape)),
        found=f"{list(stored.shape)} in {stored.path.name}",
        fix=_FIX[checkpoint.format],
        field=field,
    )


def _lacking(missing: list[TensorSpec], seen: int, spec: ModelSpec, checkpoint: Checkpoint) -> CheckpointError:
    if len(missing) > seen:
        return CheckpointError(
            f"the weights are not those of the {spec.architecture} that the config describes",
            needed=f"{seen + len(missing)} tensors",
            found=f"{seen} of them, among {len(checkpoint.tensors)} others such as "
            + shorten(", ".join(list(checkpoint.tensors)[:_NAMES_SHOWN]), 160),
            fix=_FIX[checkpoint.format],
            field="architectures",
        )
    gguf = checkpoint.format == "gguf"
    names = [tensor.gguf_name if gguf else tensor.hf_name.replace("{expert}", "*") for tensor in missing]
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return CheckpointError(
        f"the checkpoint lacks {len(missing)} of the {seen + len(missing)} tensors that its config requires",
        needed=", ".join(names[:_NAMES_SHOWN]) + more,
        found=f"{len(checkpoint.tensors)} tensors",
        fix=_FIX[checkpoint.format],
        field=_field(_why_missing(missing, spec), spec, checkpoint),
    )


def _why_missing(missing: list[TensorSpec], spec: ModelSpec) -> str:
    """The field that would have to say otherwise."""
    if all(tensor.name == "head" for tensor in missing):
        return "tie_word_embeddings"
    lost = {tensor.layer for tensor in missing}
    whole = [tensor for tensor in spec.tensors if tensor.layer in lost and not tensor.optional]
    if None not in lost and len(whole) == len(missing):
        return "num_hidden_layers"
    return "num_experts" if all(tensor.experts for tensor in missing) else "architectures"


def _field(name: str, spec: ModelSpec, checkpoint: Checkpoint) -> str:
    """As this file spells it."""
    if checkpoint.format != "gguf":
        return spec.spellings.get(name, name)
    spelled = GGUF_NAMES.get(name)
    return name if spelled is None else f"{spec.architecture}.{spelled if isinstance(spelled, str) else spelled[0]}"
