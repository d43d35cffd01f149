"""A model larger than its GPU, as llama.cpp runs it: the last layers on the GPU with their KV, the others on the CPU.

    GPU  [ terms but weights | a layer on its way | output | N layers and their KV ]    RAM  [ embedding | the others ]

Sized with llama.cpp's own terms. Which end -ngl counts the output from differs between its releases, so it is counted
in any case; prompts have layers of the CPU copied to the GPU, for which one layer's room is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.engine_profiles.profile import profile
from holdfast.planner.advice.offload import RAM_SHARE
from holdfast.planner.engines.command import Command, line, shown_gpus
from holdfast.planner.fit.search import Plan
from holdfast.planner.inputs.question import USEFUL_TOKENS
from holdfast.planner.models.model_sources import llama_source
from holdfast.planner.sizing.sharded_weights import layer_bytes, weights_of
from holdfast.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLayers:
    layers: int
    on_gpu: int
    ram_bytes: int
    """Of the layers on the CPU, their KV and the embedding."""
    free_bytes: int | None
    """RAM that they may take; None: not known."""
    kv_tokens: int
    """That the command asks for, and all layers have room for."""
    command: Command

    @property
    def runs(self) -> bool:
        return self.free_bytes is not None and self.ram_bytes <= self.free_bytes

    @property
    def may_run(self) -> bool:
        """It does, or RAM is not known."""
        return self.runs or self.free_bytes is None

    @property
    def placement(self) -> str:
        return f"{self.on_gpu} of {self.layers} layers on the GPU"

    @property
    def verdict(self) -> str:
        """Behind `does not fit`, for people."""
        what = f"{self.placement}, the others on the CPU"
        if self.free_bytes is None:
            return f"llama.cpp runs it with {what}, given {format_bytes(int(self.ram_bytes / RAM_SHARE))} of free RAM"
        if not self.runs:
            return f"RAM is {format_bytes(self.ram_bytes - self.free_bytes)} short for llama.cpp with {what}"
        return f"llama.cpp runs it with {what}"


def llama_layers(found: Plan) -> LlamaLayers | None:
    """None: all of it fits, another engine was asked for, it is over several GPUs or shares the machine's RAM, or not
    one layer fits."""
    question = found.question
    device = question.machine.devices[0]
    if found.fits or question.engine != "llama.cpp" or device.kind != "gpu" or device.unified or len(found.ranks) > 1:
        return None
    spec, rank, asked = question.model.spec, found.ranks[0], question.settings
    held = layer_bytes(weights_of(question.model, dtype=found.weights_as), spec, tensor_parallel=1)
    count = len(spec.layers)
    kv = found.needed_bytes(rank) // count
    largest = max(held.get(layer, 0) for layer in range(count))
    others = sum(term.nbytes for term in rank.terms if term.name != "weights")
    room = rank.budget_bytes - others - held.get(None, 0) - largest
    on_gpu = 0
    for layer in reversed(range(count)):
        room -= held.get(layer, 0) + kv
        if room < 0:
            break
        on_gpu += 1
    if not on_gpu:
        return None
    length = question.traffic.length if question.traffic is not None else asked.max_model_len or 0
    length = length or min(USEFUL_TOKENS, spec.max_position)
    waits = sum(held.get(layer, 0) + kv for layer in range(count - on_gpu)) + held.get(None, 0)
    ram = question.machine.ram_bytes
    return LlamaLayers(
        layers=count,
        on_gpu=on_gpu,
        ram_bytes=waits,
        free_bytes=None if ram is None else int(ram * RAM_SHARE),
        kv_tokens=length * found.required_sequences,
        command=_command(found, on_gpu, length * found.required_sequences),
    )


def _command(found: Plan, on_gpu: int, tokens: int) -> Command:
    source = llama_source(found.question.model, found.weights_dtype)
    kv_type = profile("llama.cpp").data["kv-types"][found.kv_dtype]
    settings: dict[str, object] = {
        **source.flags,
        "max_model_len": tokens,
        "max_num_seqs": found.required_sequences,
        "n_gpu_layers": on_gpu,
        "cache_type_k": None if kv_type == "f16" else kv_type,
        "cache_type_v": None if kv_type == "f16" else kv_type,
        "flash_attn": "on" if kv_type == "q8_0" else None,
    }
    note = "layers that are not on the GPU are computed by the CPU, from RAM"
    text = shown_gpus(found) + line("llama.cpp", source.name, settings)
    return Command(engine="llama.cpp", text=text, available=source.ready, notes=(*source.notes, note))
