"""From settings to an answered question: the way of `holdfast plan` and of `from holdfast import plan`.

Puts together what resolve, machine and traffic find; counts and judges nothing itself. Never imports torch.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.config.engine import GPU_SEQUENCES
from holdfast.config.plan import PlanConfig
from holdfast.errors import ConfigurationError
from holdfast.observability.decisions import Decision
from holdfast.planner.fit.placement import beside_layers
from holdfast.planner.inputs.machine import Asked, machine_of
from holdfast.planner.inputs.question import Machine, Question, Traffic, settings_of
from holdfast.planner.inputs.replicas import (
    all_machines,
    one_replica,
    ranks_of_a_replica,
    share_of_a_replica,
    sizes_of_nodes,
)
from holdfast.planner.models.adjusted import adjusted
from holdfast.planner.models.resolve import resolve_model
from holdfast.planner.report.answer import PlanAnswer, answer
from holdfast.planner.serve.ranks import check_experts
from holdfast.planner.serve.streamed import disk_room
from holdfast.units import counted, format_bytes

OF_A_CPU = "HF127"
DEFAULT_LORA_RANK = 16
"""vLLM's."""
_ADDRESS = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}(?:/\S*)?")
ABSURD_TOKENS = 1 << 40
"""Of all requests at once; beyond it something was mistyped."""


def plan(model: str | None = None, *, engine: str | None = None, **settings: Any) -> PlanAnswer:
    """What fits: `plan("meta-llama/Llama-3.1-8B", gpu="rtx4090", max_model_len=8192)`.

    `settings` are those of `holdfast plan --help` with underscores. `engine` is whose commands are wanted: holdfast,
    vllm (also vllm==0.26), sglang or llama.cpp. Raises a ConfigurationError or a ModelError with a code; that the
    model does not fit is no error, but `fits` of the answer.
    """
    return answer(question_of(PlanConfig.from_arguments(model=model, **settings)), engine=engine)


Stated = tuple[Traffic | None, tuple[Decision, ...]]


def question_of(config: PlanConfig, *, traffic: Stated | None = None) -> Question:
    """`traffic`: what `traffic_of` gave for these settings before, so that a log is read once for several questions.

    The machine is looked at first: a mistake in its name is cheaper to find than a model.
    """
    asked = Asked(
        gpu=config.gpu,
        vram=config.vram,
        ram=config.ram,
        nvme=config.nvme,
        device=config.device,
        ranks=ranks_of_a_replica(config) * (config.data_parallel_size or 1) // config.nnodes,
        replicas=config.data_parallel_size or 1,
        nodes=config.nnodes,
    )
    found = machine_of(asked)
    if config.expand_weights == "always" and found.machine.kind == "gpu":
        raise ConfigurationError(
            "expand_weights always is a CPU setting; on a GPU weights stay quantized",
            code=OF_A_CPU,
            needed="auto or never",
            found="always",
            fix="leave --expand-weights out, or --device cpu",
            field="expand_weights",
        )
    wanted, said = traffic_of(config) if traffic is None else traffic
    resolved = resolve_model(config.model, revision=config.revision, quantization=config.quantization)
    check_experts(config.enable_expert_parallel, resolved.model.spec)
    model, changed = adjusted(resolved.model, config)
    config, sizes = sizes_of_nodes(found.machine, resolved.model, config)
    machine, on_disk = _with_disk(found.machine, config)
    machine, shared = _share_of_vram(machine, config)
    machine, divided = one_replica(machine, config)
    machine, spread = all_machines(machine, config)
    several = (config.data_parallel_size or 1) > 1
    question = Question(
        model=model,
        machine=machine,
        settings=settings_of(
            config,
            tensor_parallel=config.tensor_parallel_size or (1 if several else None),
            pipeline_parallel=config.pipeline_parallel_size or (1 if several else None),
            data_parallel=config.data_parallel_size or 1,
            nodes=config.nnodes,
            max_loras=config.max_loras if config.max_loras is not None else int(config.enable_lora),
            max_lora_rank=config.max_lora_rank or DEFAULT_LORA_RANK,
            graphs=not config.enforce_eager,
            expert_parallel=config.enable_expert_parallel,
            rope_scaling=config.rope_scaling,
            spec_method=config.spec_method,
            speculative_config=config.speculative_config,
            text_only=config.language_model_only,
        ),
        traffic=_with_length(share_of_a_replica(wanted, config), config.max_model_len or model.spec.max_position),
        decisions=(
            *resolved.decisions,
            *changed,
            *found.decisions,
            *on_disk,
            *shared,
            *divided,
            *spread,
            *sizes,
            *said,
        ),
    )
    return _with_pinned_ram(question, config)


def _with_pinned_ram(question: Question, config: PlanConfig) -> Question:
    """--ram of a plan is the machine's, for the whole server; without it, a share of what is free may be pinned. That
    of `serve` beside a GPU is what may be pinned."""
    machine = question.machine
    if machine.kind != "gpu" or config.ram is None or machine.ram_bytes is None:
        return question
    others = beside_layers(question, config.max_num_seqs or GPU_SEQUENCES)
    return replace(question, machine=replace(machine, pinned_bytes=max(0, machine.ram_bytes - others)))


def _with_disk(machine: Machine, config: PlanConfig) -> tuple[Machine, tuple[Decision, ...]]:
    """A folder is named, as for `serve`: layers find the room that is there."""
    if config.nvme_path is None:
        if config.nvme is not None and machine.kind == "cpu":
            raise ConfigurationError(
                "nvme is the size of a file, but there is no folder for it",
                needed="nvme_path as well, on a CPU",
                fix="--nvme-path DIR",
                field="nvme",
            )
        return machine, ()
    room = disk_room(config.nvme_path, machine.nvme_bytes)
    reason = f"free in {config.nvme_path}" if config.nvme is None else f"at most {config.nvme} in {config.nvme_path}"
    said = Decision("nvme", format_bytes(room), reason, "measured")
    return replace(machine, nvme_bytes=room, nvme_path=config.nvme_path), (said,)


def _share_of_vram(machine: Machine, config: PlanConfig) -> tuple[Machine, tuple[Decision, ...]]:
    """Both were set: --vram is what a GPU has, and the budget a share of that."""
    share = config.gpu_memory_utilization
    if config.vram is None or share is None or machine.kind != "gpu":
        return machine, ()
    devices = tuple(
        device if device.budget_bytes is None else replace(device, budget_bytes=int(device.budget_bytes * share))
        for device in machine.devices
    )
    reason = "--vram is the memory of a GPU where --gpu-memory-utilization is set too: its share is the budget"
    return replace(machine, devices=devices), (Decision("vram", f"{share:g} of {config.vram}", reason, "set"),)


def _with_length(traffic: Traffic | None, context: int) -> Traffic | None:
    """Where the source tells only the least of its lengths, requests may be as long as the context."""
    if traffic is None or not traffic.at_least:
        return traffic
    return replace(traffic, length_tokens=max(traffic.length, context))


def traffic_of(config: PlanConfig) -> Stated:
    if config.traffic is not None:
        from holdfast.planner.inputs.traffic import read_traffic  # Most plans are made without any.

        return read_traffic(_source(config.traffic), concurrency=config.concurrency)
    if config.prompt is None or config.output is None:
        if config.concurrency is None or config.max_model_len is None:
            return None, ()
        stated = Traffic(concurrency=config.concurrency, prompt_tokens=config.max_model_len, output_tokens=0)
        reason = "no lengths are set: every request is as long as max_model_len"
    else:
        stated = Traffic(concurrency=config.concurrency or 1, prompt_tokens=config.prompt, output_tokens=config.output)
        reason = "as stated"
    if stated.length * stated.concurrency > ABSURD_TOKENS:
        raise ConfigurationError(
            f"{stated.concurrency:,} requests of {stated.length:,} tokens exceed any machine",
            needed=f"at most {ABSURD_TOKENS:,} tokens at once",
            fix="fewer requests (--concurrency), or shorter ones (--prompt, --output)",
            field="concurrency",
        )
    lengths = f"{stated.concurrency:,} x {counted(stated.length, 'token')}"
    return stated, (Decision("traffic", lengths, reason, "set"),)


def _source(written: str) -> str:
    """A bare address, as `holdfast ps` takes it, is one of a server unless a file is called so."""
    try:
        address = _ADDRESS.fullmatch(written) is not None and not Path(written).exists()
    except OSError:
        address = False
    return f"http://{written}" if address else written
