"""How many layers (-ngl) fit on llama.cpp's GPU, and of how many the experts must stay in RAM so that all do, from the
numbers in its log.

    projected   the total for the requested layers, as llama.cpp itself estimated it
    buffers     weights and KV are loaded, and the compute buffers were refused
    weights     the buffer of the weights was refused; KV is computed from the model's dimensions

Arithmetic; knows no flag.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

MARGIN_GIB = 1.0
"""Left free of what is projected, as llama.cpp's own fitting leaves it."""
STEP_GIB = 0.6
"""Buffers of a step beside KV; more with a long context without flash attention."""
SLACK_GIB = 0.2
"""Beyond what was refused: allocations are rounded up, and several."""
_KV_BYTES = 2
_EXPERT_MATRICES = 3
_EXPERTS_NAMED = re.compile(r"(?i)\d+x\d+(?:\.\d+)?b|(?<![a-z0-9])a\d+(?:\.\d+)?b(?![a-z0-9])|moe|gpt-oss|mixtral")
"""In the name of a model or its file, where the log does not print the dimensions."""


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


def experts_in_ram(numbers: Mapping[str, float], model: str | None) -> dict[str, float]:
    """`has_experts`, and where it can be reckoned `expert_layers`: of so many layers, the first ones, the experts go to
    RAM. `expert_layers_most`: of all. Call it with what `layers_that_fit` told."""
    if numbers.get("experts", 0.0) < 2 and ("experts" in numbers or not _EXPERTS_NAMED.search(model or "")):
        return {}
    told = {"has_experts": 1.0}
    if "layers" not in numbers:
        return told
    told["expert_layers_most"] = numbers["layers"]
    sizes = [numbers.get(name, 0.0) for name in ("width", "expert_width", "experts", "weight_bits")]
    layer_gib = _EXPERT_MATRICES * math.prod(sizes) / 8 / 2**30
    if layer_gib <= 0 or "layers_gib" not in numbers:
        return told
    missing = numbers["layers_gib"] - numbers["layers_room_gib"]
    # The first layers of the model are those that have no experts, and those that -ngl leaves in RAM already.
    before = max(numbers.get("dense_layers", 0.0), numbers["layers"] + 1 - numbers["layers_asked"])
    there = max(before, numbers.get("n_cpu_moe", 0.0))
    count = there + math.ceil(missing / layer_gib)
    if count <= numbers["layers"]:
        told |= {"expert_layers": count, "expert_layer_gib": layer_gib, "experts_missing_gib": missing}
    return told
