"""Scales of the KV cache as checkpoints bring them: a number each for keys and values of every layer.

Tools write them under several names, those that vLLM reads. Knows nothing of how they are used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.files import StoredTensor
from holdfast.errors import CheckpointError
from holdfast.execution.kv_scales import KVScales

_NAME = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.(?:self_attn|attn|attention)\."
    r"(?:(?:attn\.|qkv_proj\.)?(?P<whole>[kv]_scale|kv_scale)"
    r"|(?P<of>[kv])_proj\.(?:(?P=of)_scale|output_scale))$"
)
LEAST, MOST = 1e-8, 1e6
"""Scales within which keys and values of a model lie; others are damage, or were meant for something else."""


def is_kv_scale(name: str) -> bool:
    return _NAME.search(name) is not None


def stored_kv_scales(checkpoint: Checkpoint, layers: Sequence[int]) -> KVScales | None:
    """Of these layers, by number. None: the checkpoint has none. One that has them for some only is refused."""
    keys, values = dict[int, tuple[float, str]](), dict[int, tuple[float, str]]()
    for name in checkpoint.tensors:
        found = _NAME.search(name)
        if found is None:
            continue
        scale, layer = _read(checkpoint, name), int(found["layer"])
        kind = found["of"] or found["whole"]
        for scales in (keys, values) if kind.startswith("kv") else (keys if kind.startswith("k") else values,):
            other, of = scales.setdefault(layer, (scale, name))
            if other != scale:
                raise CheckpointError(
                    f"the checkpoint has two scales of the KV cache for one thing: {of} and {name}",
                    needed="one, or the same number twice",
                    found=f"{other:g} and {scale:g}",
                    fix="--calculate-kv-scales, --kv-cache-dtype bfloat16, or another copy of the checkpoint",
                    field="kv_cache_dtype",
                )
    if not keys and not values:
        return None
    for what, scales in (("k_scale", keys), ("v_scale", values)):
        missing = [layer for layer in layers if layer not in scales]
        if missing:
            raise CheckpointError(
                f"the checkpoint has scales of the KV cache, but no {what} of layer {missing[0]}",
                needed=f"a {what} for each of {len(layers)} layers",
                found=f"{len(layers) - len(missing)}",
                fix="--kv-cache-dtype bfloat16, or a checkpoint with all of them",
                field="kv_cache_dtype",
            )
    return KVScales(tuple(keys[layer][0] for layer in layers), tuple(values[layer][0] for layer in layers))


def _read(checkpoint: Checkpoint, name: str) -> float:
    tensor = checkpoint.tensors[name]
    if math.prod(tensor.shape) != 1 or tensor.layout not in ("F32", "F16", "BF16"):
        raise CheckpointError(
            f"tensor {name!r}: scales of the KV cache are one number a layer",
            needed="one float32, float16 or bfloat16",
            found=f"{tensor.layout} {list(tensor.shape)}",
            fix="a checkpoint with one scale a layer, or --kv-cache-dtype bfloat16",
            field="kv_cache_dtype",
        )
    scale = _number(checkpoint.read(name).tobytes(), tensor)
    if not LEAST <= scale <= MOST:
        raise CheckpointError(
            f"tensor {name!r}: no scale of keys or values",
            needed=f"a number from {LEAST:g} to {MOST:g}",
            found=f"{scale:g}",
            fix="--calculate-kv-scales, --kv-cache-dtype bfloat16, or another copy of the checkpoint",
            field="kv_cache_dtype",
        )
    return scale


def _number(stored: bytes, tensor: StoredTensor) -> float:
    if tensor.layout == "BF16":
        stored = b"\0\0" + stored
    return float(numpy.frombuffer(stored, dtype="<f2" if tensor.layout == "F16" else "<f4")[0])
