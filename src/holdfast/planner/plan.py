"""What fits, decided once and with the reason: from a model, a machine and a config to limits that hold.

free memory x utilization = budget
budget - framework - weights - activations - logits - buffers = room for the KV pool
KV pool / page = blocks >= what one sequence of max_model_len needs, or it is refused here, before loading
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from holdfast.checkpoints import StoredTensor
from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError, DoesNotFitError
from holdfast.hardware import Memory, Processor
from holdfast.kvcache.groups import KVLayout
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision
from holdfast.planner import footprint
from holdfast.planner.footprint import Limits, expands, weight_sizes
from holdfast.planner.layouts import is_quantized
from holdfast.units import GIB, format_bytes

DEFAULT_KV_BYTES = 4 * GIB
"""RAM is shared with everything else on the machine, so the pool does not take all of it unasked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    dtype: str
    kv_dtype: str
    expand_weights: bool
    compiled: bool
    """Products with what is kept as stored are computed by compiled kernels, in float32."""
    compiled_attention: bool
    layout: KVLayout
    limits: Limits
    blocks: int
    """Pages of the pool, the null page included."""
    budget_bytes: int
    reserve_bytes: int
    """Free at start and not to be used."""
    terms: Mapping[str, int]
    """Planned bytes by name."""
    decisions: tuple[Decision, ...]


def make_plan(
    spec: ModelSpec,
    stored: Mapping[str, StoredTensor] | None,
    config: EngineConfig,
    machine: Memory,
    processor: Processor,
    *,
    compiled_kernels: bool = False,
) -> Plan:
    """`compiled_kernels`: this installation has them, and this CPU can run them."""
    decisions: list[Decision] = []
    dtype = _dtype(config.dtype, spec, processor, decisions)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    budget = int(machine.available_bytes * config.gpu_memory_utilization)
    decisions.append(
        Decision(
            "budget",
            format_bytes(budget),
            f"{config.gpu_memory_utilization:g} of {format_bytes(machine.available_bytes)} free ({machine.limited_by})",
            "measured",
        )
    )
    compiled = compiled_kernels and dtype == "float32"
    fast_blocks = compiled and processor.fast_block_products
    expand = _expand(spec, stored, dtype, fast_blocks, config, budget, decisions)
    layout = footprint.kv_layout(spec, block_tokens=config.block_size, kv_dtype=kv_dtype)
    wanted_length = _wanted_length(spec, config)
    limits = Limits(
        max_model_len=wanted_length,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    terms = {
        "framework": footprint.FRAMEWORK_BYTES,
        "weights": footprint.weights_bytes(spec, stored, dtype=dtype, expand=expand, compiled=compiled),
        "activations": footprint.activations_bytes(spec, limits, dtype=dtype),
        "logits": footprint.logits_bytes(spec, limits),
        "buffers": footprint.buffers_bytes(layout, limits),
    }
    room = budget - sum(terms.values())
    blocks = _blocks(layout, limits, config, room, terms, decisions)
    length = _settle_length(layout, limits, config, blocks, room, decisions)
    return Plan(
        dtype=dtype,
        kv_dtype=kv_dtype,
        expand_weights=expand,
        compiled=compiled,
        compiled_attention=_compiled_attention(config, compiled, decisions),
        layout=layout,
        limits=Limits(
            max_model_len=length,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        ),
        blocks=blocks,
        budget_bytes=budget,
        reserve_bytes=machine.available_bytes - budget,
        terms={**terms, "kv_pool": blocks * layout.page_bytes},
        decisions=tuple(decisions),
    )


def _dtype(asked: str, spec: ModelSpec, processor: Processor, decisions: list[Decision]) -> str:
    asked = {"half": "float16", "float": "float32"}.get(asked, asked)
    if asked != "auto":
        return asked
    if spec.stored_dtype == "float32":
        value, reason = "float32", "the model is stored in float32"
    elif processor.fast_bfloat16:
        value, reason = "bfloat16", "this CPU multiplies bfloat16 in hardware"
    else:
        value, reason = "float32", "this CPU has no bfloat16 products; emulated ones are many times slower"
    decisions.append(Decision("dtype", value, reason, "hardware"))
    return value


def _expand(
    spec: ModelSpec,
    stored: Mapping[str, StoredTensor] | None,
    dtype: str,
    fast_blocks: bool,
    config: EngineConfig,
    budget: int,
    decisions: list[Decision],
) -> bool:
    if stored is None or not any(is_quantized(tensor.layout) for tensor in stored.values()):
        return config.expand_weights == "always"
    if config.expand_weights != "auto":
        expand = config.expand_weights == "always"
        reason = weight_sizes(spec, stored, dtype)
        decisions.append(Decision("weights", "expanded" if expand else "quantized", reason, "set"))
        return expand
    expand, reason = expands(spec, stored, dtype=dtype, fast_blocks=fast_blocks, budget_bytes=budget)
    decisions.append(Decision("weights", "expanded" if expand else "quantized", reason, "planner"))
    return expand


def _compiled_attention(config: EngineConfig, compiled: bool, decisions: list[Decision]) -> bool:
    if config.attention_backend == "auto":
        return compiled
    if config.attention_backend == "compiled" and not compiled:
        raise ConfigurationError(
            "attention_backend is compiled, but there are no compiled kernels for this dtype here",
            code="HF112",
            needed="dtype float32 and kernels built at install (a C compiler)",
            fix="--attention-backend auto, or install again with a C compiler",
            field="attention_backend",
        )
    decisions.append(Decision("attention_backend", config.attention_backend, "asked for", "set"))
    return config.attention_backend == "compiled"


def _wanted_length(spec: ModelSpec, config: EngineConfig) -> int:
    if config.max_model_len is None:
        return spec.max_position
    if config.max_model_len > spec.max_position:
        raise ConfigurationError(
            f"max_model_len is {config.max_model_len:,}, but the model was made for {spec.max_position:,} tokens",
            code="HF111",
            needed=f"at most {spec.max_position:,}",
            found=f"{config.max_model_len:,}",
            fix=f"--max-model-len {spec.max_position}, or leave it out",
            field="max_model_len",
        )
    return config.max_model_len


def _blocks(
    layout: KVLayout,
    limits: Limits,
    config: EngineConfig,
    room: int,
    terms: Mapping[str, int],
    decisions: list[Decision],
) -> int:
    page = layout.page_bytes
    most_useful = 1 + limits.max_num_seqs * layout.peak_blocks(limits.max_model_len, limits.max_num_batched_tokens)
    if config.kv_cache_memory_bytes is not None:
        if config.kv_cache_memory_bytes > room:
            raise DoesNotFitError(
                f"a KV pool of {format_bytes(config.kv_cache_memory_bytes)} does not fit",
                needed=f"{format_bytes(config.kv_cache_memory_bytes)} beside {_spell(terms)}",
                found=f"{format_bytes(max(0, room))} left of the budget",
                fix=f"--kv-cache-memory-bytes {max(0, room) // page * page}",
                field="kv_cache_memory_bytes",
            )
        pool, reason, source = config.kv_cache_memory_bytes, "asked for", "set"
    else:
        one_sequence = 1 + layout.peak_blocks(limits.max_model_len, limits.max_num_batched_tokens)
        pool = min(room, max(DEFAULT_KV_BYTES, one_sequence * page))
        reason = "all that is left of the budget" if pool == room else "the default; --kv-cache-memory-bytes changes it"
        source = "planner"
        if most_useful * page < pool:
            pool, reason = most_useful * page, f"{limits.max_num_seqs} sequences of full length need no more"
    if pool < 2 * page and config.kv_cache_memory_bytes is not None:
        raise DoesNotFitError(
            f"a KV pool of {format_bytes(pool)} holds no block",
            needed=f"at least {format_bytes(2 * page)}: a block of {layout.block_tokens} tokens and the null page",
            found=format_bytes(pool),
            fix=f"--kv-cache-memory-bytes {64 * page}",
            field="kv_cache_memory_bytes",
        )
    if pool < 2 * page:
        raise DoesNotFitError(
            "the model does not fit in memory",
            needed=f"{_spell(terms)}, and at least {format_bytes(2 * page)} for KV",
            found=f"{format_bytes(sum(terms.values()) + room)} of budget: {format_bytes(2 * page - room)} short",
            fix="free memory, raise --gpu-memory-utilization, lower --max-num-seqs, or --expand-weights never",
        )
    blocks = pool // page
    decisions.append(
        Decision("kv_pool", f"{format_bytes(blocks * page)} ({blocks - 1:,} blocks and the null page)", reason, source)
    )
    return blocks


def _settle_length(
    layout: KVLayout, limits: Limits, config: EngineConfig, blocks: int, room: int, decisions: list[Decision]
) -> int:
    wanted = limits.max_model_len
    if layout.peak_blocks(wanted, limits.max_num_batched_tokens) <= blocks - 1:
        return wanted
    low, high = 0, wanted
    while low < high:
        middle = (low + high + 1) // 2
        if layout.peak_blocks(middle, limits.max_num_batched_tokens) <= blocks - 1:
            low = middle
        else:
            high = middle - 1
    needed = (1 + layout.peak_blocks(wanted, limits.max_num_batched_tokens)) * layout.page_bytes
    held = blocks * layout.page_bytes
    if config.max_model_len is not None or low == 0:
        raise DoesNotFitError(
            f"one sequence of {wanted:,} tokens does not fit in the KV pool",
            needed=f"{format_bytes(needed)} for max_model_len {wanted:,}",
            found=f"{format_bytes(held)}: {format_bytes(needed - held)} short",
            fix=f"--max-model-len {low}" + (f", or --kv-cache-memory-bytes {needed}" if needed <= room else ""),
            field="max_model_len",
        )
    decisions.append(
        Decision("max_model_len", f"{low:,}", f"the model allows {wanted:,}; the KV pool holds {low:,}", "planner")
    )
    return low


def settle_pool(plan: Plan, available_bytes: int) -> Plan:
    """The plan with the pool that memory really holds, `available_bytes` being free after loading and rehearsal.

    What was free at start and not in the budget stays free. A pool that has become smaller than one sequence of full
    length needs is refused: a neighbour has taken the memory meanwhile.
    """
    page = plan.layout.page_bytes
    blocks = min(plan.blocks, max(0, available_bytes - plan.reserve_bytes) // page)
    if blocks == plan.blocks:
        return plan
    needed = 1 + plan.layout.peak_blocks(plan.limits.max_model_len, plan.limits.max_num_batched_tokens)
    if blocks < needed:
        raise DoesNotFitError(
            "memory has become short while loading",
            needed=f"{format_bytes(needed * page)} for KV, and {format_bytes(plan.reserve_bytes)} left free",
            found=f"{format_bytes(available_bytes)} free",
            fix="stop what else takes memory, or set a smaller --max-model-len",
        )
    reason = f"{format_bytes(available_bytes)} are free after loading; planned were {plan.blocks:,} blocks"
    decision = Decision("kv_pool", f"{format_bytes(blocks * page)} ({blocks:,} blocks)", reason, "measured")
    terms = {**plan.terms, "kv_pool": blocks * page}
    return replace(plan, blocks=blocks, terms=terms, decisions=(*plan.decisions, decision))


def _spell(terms: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in terms.items())
