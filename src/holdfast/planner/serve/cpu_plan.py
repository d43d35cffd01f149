"""The plan that a server on a CPU starts with: from its config and the free memory to limits that fit. Same arithmetic
as `holdfast plan`.

Reads headers only, no torch; refuses before anything is loaded. `settle_pool` corrects it by measurements after
loading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial

from holdfast.checkpoints import StoredTensor
from holdfast.config import EngineConfig
from holdfast.footprint.cpu import KV_STORE_USUAL_BYTES
from holdfast.hardware import Memory, Processor
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision
from holdfast.planner.fit.result import Plan
from holdfast.planner.fit.search import fit
from holdfast.planner.inputs.question import Device, Machine, PlannedModel, Question, settings_of
from holdfast.planner.models.requested import requested
from holdfast.planner.serve import refusals
from holdfast.planner.serve.ranks import expert_parallel_said, refuse_with_ranks
from holdfast.planner.serve.shares.engines import one_share, ram_share
from holdfast.planner.serve.shares.nodes import all_nodes
from holdfast.planner.serve.streamed import with_streamed_layers
from holdfast.planner.sizing.default_limits import beside_decision, check_step
from holdfast.units import format_bytes


def make_cpu_plan(
    spec: ModelSpec,
    stored: Mapping[str, StoredTensor] | None,
    config: EngineConfig,
    machine: Memory,
    processor: Processor,
    *,
    name: str = "the model",
    gguf: bool = False,
    compiled_kernels: bool = False,
    front_bytes: int = 0,
) -> Plan:
    """`stored`: the checkpoint's tensors by canonical name; None: dummies. `gguf`: they are of a GGUF file.
    `compiled_kernels`: this installation has them, and this CPU can run them. `front_bytes`: of another process that
    comes out of the same budget, once for all engines."""
    refuse_with_ranks(config, spec, stored, compiled_kernels=compiled_kernels)
    model_made = planned_model(spec, stored, name)

    def attempt(tried: EngineConfig) -> Plan:
        check_step(tried.max_num_seqs, tried.max_num_batched_tokens)
        wanted = requested(tried.asked_quantization, spec.quantization, gguf=gguf, name=name)
        own = all_nodes(one_share(machine, tried.data_parallel_size), tried.nnodes)
        device = Device(
            index=0,
            name="cpu",
            kind="cpu",
            total_bytes=own.total_bytes,
            free_bytes=own.available_bytes,
            budget_bytes=None if tried.ram is None else (ram_share(tried) or 0) * tried.nnodes,
            measured=True,
            limited_by=own.limited_by,
        )
        question = Question(
            model=model_made(wanted.made),
            machine=Machine(
                devices=(device,),
                cpu_features=processor.features,
                cores=(tried.threads or processor.cores) * tried.nnodes,
                compiled_kernels=compiled_kernels,
            ),
            settings=settings_of(
                tried,
                max_loras=tried.lora_places,
                max_lora_rank=tried.lora_rank,
                attention_backend=tried.attention_backend,
                kv_cache_memory_bytes=tried.kv_cache_memory_bytes,
                lora_copies=tried.lora_copies,
                ranks=tried.tensor_parallel_size,
                stages=tried.pipeline_parallel_size,
                nodes=tried.nnodes,
                expert_parallel=tried.enable_expert_parallel,
                expert_placement=tried.expert_placement_strategy,
                structured_output=not tried.skip_tokenizer_init,
                kv_store_size=0 if tried.kv_store is None else tried.kv_store_size or KV_STORE_USUAL_BYTES,
                front_bytes=front_bytes // tried.data_parallel_size,
            ),
            decisions=(_budget(tried, machine), *wanted.decisions, *expert_parallel_said(tried)),
        )
        found = fit(question)
        if not found.fits and tried.nvme_path is not None:
            found = with_streamed_layers(found, tried)
        if not found.fits:
            raise refusals.does_not_fit(found)
        return found

    try:
        found = attempt(config)
    except refusals.PlanRefusal as refusal:
        candidates = partial(refusals.cpu_candidates, machine=machine)
        raise refusals.with_remedies(refusal, config, spec.max_position, attempt, candidates) from None
    beside, cores = found.engine.prompt_tokens_beside, found.question.machine.cores
    if beside is not None and beside < found.limits.max_num_batched_tokens:
        found = replace(found, decisions=(*found.decisions, beside_decision(beside, cores)))
    return without_tensors(found)


def planned_model(
    spec: ModelSpec, stored: Mapping[str, StoredTensor] | None, name: str
) -> Callable[[str | None], PlannedModel]:
    """By what its plain matrices become while they are loaded. The same object each time: what is counted of it is
    counted once."""

    @cache
    def made(quantize: str | None) -> PlannedModel:
        model = PlannedModel(name=name, spec=spec, origin="folder", stored=stored, canonical=stored, made_as=quantize)
        return model if stored is None else replace(model, format="safetensors")

    return made


def without_tensors(found: Plan) -> Plan:
    """So that a plan can be sent: the process that loads the model opens its files itself."""
    model = replace(found.question.model, stored=None, canonical=None)
    return replace(found, question=replace(found.question, model=model))


def _budget(config: EngineConfig, machine: Memory) -> Decision:
    free, engines = f"{format_bytes(machine.available_bytes)} free ({machine.limited_by})", config.data_parallel_size
    each = f", divided by {engines} engines" if engines > 1 else ""
    each += f", on each of {config.nnodes} nodes as large as this one" if config.nnodes > 1 else ""
    if config.ram is None:
        budget = int(machine.available_bytes * config.gpu_memory_utilization) // engines * config.nnodes
        reason = f"{config.gpu_memory_utilization:g} of {free}{each}"
        return Decision("budget", format_bytes(budget), reason, "measured")
    if config.ram > machine.available_bytes:
        raise refusals.budget_is_not_there(config.ram, machine)
    return Decision("budget", format_bytes(config.ram // engines * config.nnodes), f"set with ram{each}; {free}", "set")
