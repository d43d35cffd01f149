"""How a model is stored: headers, layouts, bytes of tensors, and where files come from. No torch."""

from holdfast.checkpoints.checkpoint import Checkpoint, extra_tensors, open_checkpoint, stored_name
from holdfast.checkpoints.files import GGUFHeader, ModelFiles, StoredTensor
from holdfast.checkpoints.formats.block_layouts import ENGINE_LAYOUTS, LAYOUTS, Layout
from holdfast.checkpoints.formats.packed_modules import packing_of
from holdfast.checkpoints.formats.quantized_tensors import PackedPart, Packing, stored_bytes, stored_parts
from holdfast.checkpoints.sources.resolve import DEFAULT_MODEL, describe, from_path, locate, locate_headers, spec_of
from holdfast.checkpoints.validation.match import match
from holdfast.checkpoints.validation.stored_dtypes import as_stored
from holdfast.checkpoints.validation.tensor_shapes import require_agreement, unused_head

__all__ = [
    "DEFAULT_MODEL",
    "ENGINE_LAYOUTS",
    "LAYOUTS",
    "Checkpoint",
    "GGUFHeader",
    "Layout",
    "ModelFiles",
    "PackedPart",
    "Packing",
    "StoredTensor",
    "as_stored",
    "describe",
    "extra_tensors",
    "from_path",
    "locate",
    "locate_headers",
    "match",
    "open_checkpoint",
    "packing_of",
    "require_agreement",
    "spec_of",
    "stored_bytes",
    "stored_name",
    "stored_parts",
    "unused_head",
]
