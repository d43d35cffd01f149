"""How a model is stored: headers, layouts, bytes of tensors, and where files come from. No torch."""

from holdfast.checkpoints.agreement import require_agreement, unused_head
from holdfast.checkpoints.checkpoint import Checkpoint, extra_tensors, match, open_checkpoint, stored_name
from holdfast.checkpoints.claims import as_stored
from holdfast.checkpoints.files import GGUFHeader, ModelFiles, StoredTensor
from holdfast.checkpoints.layouts import ENGINE_LAYOUTS, LAYOUTS, Layout
from holdfast.checkpoints.packing import packing_of
from holdfast.checkpoints.quantized import Packing, Part, stored_bytes, stored_parts
from holdfast.checkpoints.source import DEFAULT_MODEL, describe, from_path, locate, locate_headers, spec_of

__all__ = [
    "DEFAULT_MODEL",
    "ENGINE_LAYOUTS",
    "LAYOUTS",
    "Checkpoint",
    "GGUFHeader",
    "Layout",
    "ModelFiles",
    "Packing",
    "Part",
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
