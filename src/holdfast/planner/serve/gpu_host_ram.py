"""What a server on a GPU holds in RAM beside it, as far as settings decide: the front, forms, and copies of adapters.

Held against the RAM that is free before anything is loaded. Counts nothing of the GPU's own memory.
"""

from __future__ import annotations

import os
from dataclasses import replace

from holdfast.config import EngineConfig
from holdfast.errors import DoesNotFitError
from holdfast.footprint import lora
from holdfast.footprint.structured_output import FEW_CORES, forms_bytes
from holdfast.hardware import Memory
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision
from holdfast.planner.fit.result import Fit
from holdfast.units import counted, format_bytes


def with_host_memory(plan: Fit, spec: ModelSpec, config: EngineConfig, machine: Memory, front_bytes: int) -> Fit:
    """The plan with what forms and adapters take of RAM said, or a refusal where there is none for adapters."""
    forms = (
        0
        if config.skip_tokenizer_init
        else forms_bytes(spec.vocab_size, plan.limits.max_num_seqs, os.cpu_count() or FEW_CORES)
    )
    if forms:
        said = "maximum host RAM for structured output; a request whose grammar does not fit waits"
        told = Decision("structured_outputs", format_bytes(forms), said, "planner")
        plan = replace(plan, decisions=(*plan.decisions, told))
    if not config.lora_copies:
        return plan
    one = lora.held_bytes(spec, dtype=plan.dtype, places=1, max_rank=config.lora_rank)
    free, asked = max(0, machine.available_bytes - front_bytes - forms), config.lora_copies * one
    if asked > free:
        fewer = free // one
        raise DoesNotFitError(
            f"{counted(config.lora_copies, 'adapter')} of rank {config.lora_rank} do not fit in host RAM, where copies"
            " of them are kept",
            needed=f"{format_bytes(asked)}, {format_bytes(one)} each, and {format_bytes(front_bytes + forms)} for the"
            " API server and structured output",
            found=f"{format_bytes(machine.available_bytes)} free ({machine.limited_by})",
            fix=f"--max-cpu-loras {fewer}"
            if fewer >= config.lora_places
            else "fewer --max-loras, or a smaller --max-lora-rank",
            field="max_cpu_loras",
        )
    said = f"host RAM for {counted(config.lora_copies, 'adapter')}, {format_bytes(one)} each"
    return replace(plan, decisions=(*plan.decisions, Decision("max_cpu_loras", format_bytes(asked), said, "planner")))
