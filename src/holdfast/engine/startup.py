"""From a config to an engine that can step: resolve, load, rehearse, back the KV pool.

`find_model` needs no torch (the front uses it too); `build_core` imports execution when it is called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from holdfast.checkpoints import DEFAULT_MODEL, ModelFiles, extra_tensors, locate, match, open_checkpoint, spec_of
from holdfast.checkpoints.builtin import refuse_revision
from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError, RequestError
from holdfast.hardware import memory, processor
from holdfast.kvcache import KVCache
from holdfast.models import ModelSpec
from holdfast.planner import Plan, make_plan, settle_pool
from holdfast.records import EngineInfo, SamplingParams
from holdfast.scheduler import Scheduler, SchedulerLimits
from holdfast.text import Tokenizer, check_text, load_template

if TYPE_CHECKING:
    from holdfast.engine.core import EngineCore
    from holdfast.execution.runner import Runner

log = logging.getLogger("holdfast")

Progress = Callable[[str, int, int], None]
"""(stage, done, total): tensors while loading."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    files: ModelFiles
    spec: ModelSpec


def find_model(config: EngineConfig, *, progress: bool = True) -> FoundModel:
    refuse_revision(config.model or DEFAULT_MODEL, config.revision)
    files = locate(config.model, revision=config.revision, progress=progress)
    spec = spec_of(files)  # First, because for a model that cannot be run no other advice helps.
    wanted = config.load_format
    if wanted in ("safetensors", "gguf") and files.format != wanted:
        raise ConfigurationError(
            f"load_format is {wanted}, but {files.name} is stored as {files.format}",
            fix="leave load_format out",
            field="load_format",
        )
    if files.format == "none" and wanted != "dummy":
        raise ConfigurationError(
            f"{files.name} has a config but no weights",
            needed="*.safetensors files, or load_format=dummy",
            fix="--load-format dummy for random weights in the same shapes",
            field="load_format",
        )
    return FoundModel(files, spec)


def open_tokenizer(config: EngineConfig, model: FoundModel) -> Tokenizer | None:
    """With what silently breaks people checked and said: vocabulary, ends, chat template."""
    if config.skip_tokenizer_init:
        return None
    files = model.files if config.tokenizer is None else locate(config.tokenizer, revision=None)
    template = None if config.chat_template is None else load_template(config.chat_template)
    tokenizer = Tokenizer.from_files(files, chat_template=template)
    for warning in check_text(model.spec, tokenizer, model.files):
        log.warning("%s", warning)
    return tokenizer


def sampling_defaults(generation_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a model's own generation_config.json says of sampling, under our names."""
    config = generation_config or {}
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: config[name] for name in names if config.get(name) is not None}
    try:
        SamplingParams(**found)
    except (RequestError, TypeError) as error:
        raise ConfigurationError(
            f"the model's generation_config.json cannot be used: {error}",
            fix="--generation-config vllm leaves it out",
            field="generation_config",
        ) from error
    return found


def build_core(config: EngineConfig, model: FoundModel, progress: Progress) -> tuple[EngineCore, EngineInfo]:
    from holdfast.engine.core import EngineCore
    from holdfast.execution import native
    from holdfast.execution.device import DTYPES, choose_device, set_threads
    from holdfast.execution.runner import Runner, RunnerLimits
    from holdfast.execution.weights import load_weights

    if config.load_format == "dummy":
        checkpoint, stored = None, None
    else:
        checkpoint = open_checkpoint(model.files)
        stored = match(model.spec, checkpoint)
        if unused := extra_tensors(model.spec, checkpoint):
            log.warning("%d tensors of the checkpoint are not used: %s ...", len(unused), ", ".join(unused[:3]))
    plan = make_plan(model.spec, stored, config, memory(), processor(), compiled_kernels=native.available())
    device = choose_device(config.device)
    set_threads(config.threads or processor().cores)
    progress("load", 0, 0)
    weights = load_weights(
        model.spec,
        checkpoint,
        dtype=DTYPES[plan.dtype],
        device=device,
        expand=plan.expand_weights,
        compiled=plan.compiled,
        progress=lambda done, total: progress("load", done, total),
    )
    if checkpoint is not None:
        checkpoint.close()
    runner = Runner(
        model.spec,
        weights,
        plan.layout,
        RunnerLimits(
            max_num_seqs=plan.limits.max_num_seqs,
            max_num_batched_tokens=plan.limits.max_num_batched_tokens,
            max_model_len=plan.limits.max_model_len,
        ),
        device,
        kv_dtype=DTYPES[plan.kv_dtype],
        compiled=plan.compiled_attention,
    )
    progress("rehearse", 0, 0)
    runner.back_kv(2)
    runner.rehearse()
    plan = settle_pool(plan, memory().available_bytes)
    runner.back_kv(plan.blocks)
    steps_ahead = 0
    scheduler = Scheduler(
        SchedulerLimits(
            max_num_seqs=plan.limits.max_num_seqs,
            max_num_batched_tokens=plan.limits.max_num_batched_tokens,
            max_model_len=plan.limits.max_model_len,
            policy="priority" if config.scheduling_policy == "priority" else "fcfs",
            max_steps_in_flight=steps_ahead + 1,
        ),
        KVCache(plan.layout, plan.blocks, config.enable_prefix_caching),
    )
    return EngineCore(scheduler, runner, steps_ahead=steps_ahead), _info(config, model, plan, runner)


def _info(config: EngineConfig, model: FoundModel, plan: Plan, runner: Runner) -> EngineInfo:
    return EngineInfo(
        model=model.files.name,
        device="cpu",
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        block_size=plan.layout.block_tokens,
        blocks=plan.blocks - 1,
        max_model_len=plan.limits.max_model_len,
        max_num_seqs=plan.limits.max_num_seqs,
        max_num_batched_tokens=plan.limits.max_num_batched_tokens,
        prefix_caching=config.enable_prefix_caching,
        parameters=model.spec.parameters,
        weights_bytes=runner.weights_bytes,
        kv_pool_bytes=plan.terms["kv_pool"],
        attention_backend=f"{runner.attention_backend} ({_why(plan)})",
        max_concurrency=(plan.blocks - 1) / plan.layout.peak_blocks(*_longest(plan)),
        kv_groups=len(plan.layout.groups),
        decisions=[decision.line() for decision in plan.decisions],
    )


def _longest(plan: Plan) -> tuple[int, int]:
    return plan.limits.max_model_len, plan.limits.max_num_batched_tokens


def _why(plan: Plan) -> str:
    from holdfast.execution import native

    if plan.compiled_attention:
        return "kernels compiled at install, float32"
    if plan.dtype != "float32":
        return f"torch's own; the compiled kernels compute in float32, not {plan.dtype}"
    if plan.compiled:
        return "torch's own, as asked for"
    return f"torch's own; no compiled kernels: {native.why_not()}"


def with_located_model(config: EngineConfig, model: FoundModel) -> EngineConfig:
    """So that the engine process opens the very files that the front has found, and downloads nothing."""
    return replace(config, model=str(model.files.path), revision=None)
