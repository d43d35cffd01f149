"""Tensors of a checkpoint that the model spec does not use: an error in GGUF, a warning in safetensors.

safetensors files hold buffers that are never read again, and config.json describes the rest; a GGUF header does not
mention biases, norms and rotations: only their tensors show that they exist. Loads nothing.
"""

from __future__ import annotations

import logging

from holdfast.checkpoints import ModelFiles, extra_tensors, open_checkpoint
from holdfast.errors import CheckpointError
from holdfast.models import ModelSpec
from holdfast.units import counted, shorten

log = logging.getLogger("holdfast")

_TOWERS = ("v.", "a.", "mm.")
"""What some GGUF files hold beside a decoder, which never reads it: encoders of images and of sound, and what leads
from them to it."""


def refuse_unclaimed(spec: ModelSpec, files: ModelFiles) -> None:
    """A GGUF file holds what its model computes with and no more: what nobody here knows of would be left out."""
    with open_checkpoint(files) as checkpoint:
        unclaimed = [name for name in extra_tensors(spec, checkpoint) if not name.startswith(_TOWERS)]
    if unclaimed:
        more = f" and {len(unclaimed) - 3} more" if len(unclaimed) > 3 else ""
        raise CheckpointError(
            f"{files.name} contains {counted(len(unclaimed), 'tensor')} that this engine does not know in a "
            f"{spec.architecture}; without them the output would be wrong",
            needed=f"the {len(spec.tensors)} tensors of a {spec.architecture}, and those of its encoders",
            found=", ".join(shorten(name, 80) for name in unclaimed[:3]) + more,
            fix="use another GGUF file of this model, or its safetensors files",
            field="general.architecture",
        )


def warn_of_unused(spec: ModelSpec, files: ModelFiles) -> None:
    from holdfast.execution.weights.kv_scales import is_kv_scale  # Not before torch is wanted.

    with open_checkpoint(files) as checkpoint:
        unused = [name for name in extra_tensors(spec, checkpoint) if not is_kv_scale(name)]
    if unused:
        names = shorten(", ".join(unused[:3]), 240)
        log.warning("%d tensors in the checkpoint are unused: %s ...", len(unused), names)
