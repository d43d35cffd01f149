"""Extra peak memory of engines that quantize to FP8 only after the whole checkpoint is loaded.

    vLLM     0.16 and later allocate and quantize each matrix when it is read; 0.15 and older hold all of them
    SGLang   allocates the whole model as it is stored, in every release so far

Plans nothing: gives a note, or the reason why it cannot work.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.planner.fit.search import Plan
from holdfast.planner.sizing.sharded_weights import rank_bytes, weights_of
from holdfast.units import format_bytes


def loaded_whole(found: Plan, engine: str) -> tuple[str | None, str | None]:
    """A note where it fits all the same, or why it does not. `engine`: its name, with the releases that do so."""
    whole = _whole_bytes(found)
    rank = max(found.ranks, key=lambda one: whole[one.stage] - one.device.free_bytes)
    needed, free = whole[rank.stage], rank.device.free_bytes
    said = f"{engine} loads the full unquantized weights, {format_bytes(needed)} per GPU, before quantizing them to FP8"
    if needed <= free:
        return said, None
    return None, f"{said}, but {rank.device.name} has {format_bytes(free)}: use a checkpoint stored in FP8"


def _whole_bytes(found: Plan) -> list[int]:
    """Of a rank, by stage."""
    model = found.question.model
    plain = replace(model, spec=replace(model.spec, quantization=None), made_as=None)
    weights = weights_of(plain, dtype=found.dtype)
    return [
        rank_bytes(weights, plain.spec, tensor_parallel=found.tensor_parallel, layers=layers)
        for layers in found.stage_layers
    ]
