"""What an engine that is ready says of itself: limits, decisions, kernels. Measures nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.checkpoints import ModelFiles
from holdfast.config import EngineConfig
from holdfast.engine.core.pool_memory import breathing_decisions
from holdfast.engine.startup.kv_scales import WHOLE_NAMES
from holdfast.engine.startup.plan_lines import concurrency
from holdfast.hardware import memory
from holdfast.hardware.kernels import kernel_choice
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision
from holdfast.planner import Plan
from holdfast.records import EngineInfo, MemoryReport

if TYPE_CHECKING:
    from holdfast.execution.gpu.runner import GpuRunner
    from holdfast.execution.runner import Runner


def engine_info(
    config: EngineConfig,
    files: ModelFiles,
    spec: ModelSpec,
    plan: Plan,
    runner: Runner | GpuRunner,
    report: MemoryReport,
    profile_run_s: float | None = None,
) -> EngineInfo:
    classifier, total = spec.classifier, memory().total_bytes if plan.engine.gpu is None else plan.device.total_bytes
    by_itself = breathing_decisions(config, plan, total)
    last = {decision.field: decision for decision in plan.decisions}  # What was measured overrides what was planned.
    return EngineInfo(
        model=files.name,
        device="cpu" if plan.engine.gpu is None else f"cuda ({plan.engine.gpu.name})",
        dtype=plan.dtype,
        kv_dtype=WHOLE_NAMES.get(plan.kv_dtype, plan.kv_dtype),
        block_size=plan.engine.layout.block_tokens,
        blocks=plan.engine.blocks - 1,
        max_model_len=plan.limits.max_model_len,
        max_num_seqs=plan.limits.max_num_seqs,
        max_num_batched_tokens=plan.limits.max_num_batched_tokens,
        prefix_caching=config.enable_prefix_caching,
        parameters=spec.parameters,
        weights_bytes=runner.weights_bytes,
        kv_pool_bytes=plan.terms["kv_pool"],
        attention_backend=f"{runner.attention_backend} ({_why(plan)})",
        max_concurrency=concurrency(plan),
        hidden_size=spec.hidden_size,
        eos_token_ids=list(spec.eos_token_ids),
        labels=[] if classifier is None else list(classifier.labels),
        scores=files.trained_to_embed if config.pooling is None else config.pooling,
        label_activation="" if classifier is None else classifier.activation,
        max_loras=config.lora_places,
        kv_groups=len(plan.engine.layout.groups),
        decisions=[one.line() for one in (*plan.decisions, *by_itself, *_kernel_decision(plan), *runner.decisions)],
        lowered=[decision.line() for decision in last.values() if decision.lowered],
        profile_run_s=profile_run_s,
        memory=report,
    )


def _kernel_decision(plan: Plan) -> list[Decision]:
    choice = kernel_choice()
    if not plan.engine.compiled or isinstance(choice, str):
        return []
    return [Decision("cpu_kernels", choice.variant, choice.reason, choice.source)]


def _why(plan: Plan) -> str:
    from holdfast.execution import native

    if plan.engine.gpu is not None:
        return "Triton kernels, compiled on first use"
    if plan.engine.compiled_attention:
        return "kernels compiled at install, float32"
    if plan.dtype != "float32":
        return f"torch kernels; the compiled kernels support float32, not {plan.dtype}"
    if plan.engine.compiled:
        return "torch kernels, as requested"
    return f"torch kernels; no compiled kernels: {native.why_not()}"
