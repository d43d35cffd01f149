"""How many layers (-ngl) fit on llama.cpp's GPU, from the numbers in its log.

    projected   the total for the requested layers, as llama.cpp itself estimated it
    buffers     weights and KV are loaded, and the compute buffers were refused
    weights     the buffer of the weights was refused; KV is computed from the model's dimensions

Arithmetic; knows no flag.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

MARGIN_GIB = 1.0
"""Left free of what is projected, as llama.cpp's own fitting leaves it."""
STEP_GIB = 0.6
"""Buffers of a step beside KV; more with a long context without flash attention."""
SLACK_GIB = 0.2
"""Beyond what was refused: allocations are rounded up, and several."""
_KV_BYTES = 2


def layers_that_fit(numbers: Mapping[str, float]) -> dict[str, float]:
    """`layers_asked`, and where it can be reckoned `layers_fit` with what they take and what there is for them."""
    asked = _asked(numbers)
    if asked is None:
        return {}
    found = [
        told for told in (_projected(numbers), _buffers(numbers), _weights(numbers, asked)) if told and told[0] > 0
    ]
    taken, room = min(found, key=lambda one: one[1] / one[0], default=(0.0, 0.0))
    if room >= taken:
        return {"layers_asked": asked}  # Nothing is told of it, or it was refused although there was room.
    fit = min(asked - 1, max(0, math.floor(asked * room / taken)))
    return {"layers_asked": asked, "layers_fit": fit, "layers_gib": taken, "layers_room_gib": max(0.0, room)}


def _asked(numbers: Mapping[str, float]) -> float | None:
    """The output counts as one; a number beyond all of them, or below 0, means all."""
    if "layers_offloaded" in numbers:
        return numbers["layers_offloaded"] or None
    every = numbers["layers"] + 1 if "layers" in numbers else None
    told = numbers.get("layers_on_gpu")
    if told is None or told < 0:
        return every
    return (told if every is None else min(told, every)) or None


def _projected(numbers: Mapping[str, float]) -> tuple[float, float] | None:
    """What the layers take, and the room for them."""
    used, free = numbers.get("projected_gib"), numbers.get("projected_free_gib")
    return None if used is None or free is None else (used, free - MARGIN_GIB)


def _buffers(numbers: Mapping[str, float]) -> tuple[float, float] | None:
    """Of one GPU alone: of several it is not told which layers each has."""
    weights, free, tried = numbers.get("device_weights_gib"), numbers.get("device_free_gib"), numbers.get("tried_gib")
    if "bytes" in numbers:
        tried = numbers["bytes"] / 2**30
    if weights is None or free is None or tried is None or numbers.get("gpus", 1) > 1:
        return None
    return weights + numbers.get("device_kv_gib", 0.0), free - tried - SLACK_GIB


def _weights(numbers: Mapping[str, float], asked: float) -> tuple[float, float] | None:
    device = int(numbers.get("device", 0))
    free = numbers.get(f"device{device}_free_gib")
    tried, whole = numbers.get("tried_gib"), numbers.get("weights_gib", numbers.get("weights2_gib"))
    if tried is None and whole is not None and "layers" in numbers and numbers.get("gpus", 1) <= 1:
        tried = whole * asked / (numbers["layers"] + 1)
    if free is None or tried is None or "device_weights_gib" in numbers:
        return None
    widths = numbers.get("k_width", 0.0) + numbers.get("v_width", 0.0)
    shared = max(1.0, numbers.get("gpus", 1.0))
    kv = numbers.get("max_model_len", 0.0) * widths * _KV_BYTES * asked / shared / 2**30
    return tried + kv, free - STEP_GIB
