"""Quantized models beside transformers' own: inputs of its linear layers rounded by the formats' words, and what this
engine's runner says after a prompt."""

from __future__ import annotations

from typing import Any

import torch
from quantized_files import Format

from holdfast.execution.runner import Runner, RunnerLimits
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.models import ModelSpec
from holdfast.records import Row, SamplingParams, SequenceStart, StepPlan, TableWrite

CPU = torch.device("cpu")


def round_inputs(model: Any, made: Format) -> list[Any]:
    """Every linear layer that was quantized rounds what it takes, by the formats' own words; returns the hooks."""

    def rounded(module: Any, arguments: tuple[torch.Tensor]) -> torch.Tensor:
        (x,) = arguments
        parts = x.double().reshape(*x.shape[:-1], -1, made.input_group or x.shape[-1])
        largest = 448 if made.inputs == "fp8" else 127
        if made.static is None:
            most = parts.float().abs().max(-1, keepdim=True).values
            scale = (most if made.bound is None else most.clamp(max=made.bound)) / largest
            if made.powers:
                scale = torch.exp2(torch.ceil(torch.log2(scale)))
        else:
            scale = torch.tensor(made.static)
        steps = (parts.float() / scale).clamp(-largest - (made.inputs == "int8"), largest)
        codes = steps.to(torch.float8_e4m3fn).float() if made.inputs == "fp8" else torch.round(steps)
        return (codes * scale).reshape(x.shape)

    return [
        module.register_forward_pre_hook(rounded)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.endswith("_proj")
    ]


def log_chances(spec: ModelSpec, weights: Weights, prompt: list[int]) -> torch.Tensor:
    groups, places = form_groups([layer.window for layer in spec.layers])
    layout = KVLayout(
        groups=groups,
        block_tokens=16,
        layers_per_page=places,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        element_bytes=4,
    )
    limits = RunnerLimits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64)
    runner = Runner(spec, weights, layout, limits, CPU)
    runner.back_kv(5)
    captured: list[torch.Tensor] = []
    original = runner._sampler.sample

    def capture(logits: torch.Tensor, *rest: Any) -> Any:
        captured.append(logits.clone())
        return original(logits, *rest)

    runner._sampler.sample = capture  # type: ignore[method-assign]
    start = SequenceStart(0, "r", prompt, len(prompt), SamplingParams(temperature=0.0))
    rows = [Row(0, 0, len(prompt), True)]
    runner.execute(StepPlan(step_id=0, starts=[start], table_writes=[TableWrite(0, 0, 0, [1, 2, 3])], rows=rows))
    return captured[0][0].log_softmax(-1)
