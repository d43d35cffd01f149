"""What is said when a model does not fit: the bytes short, and changes that help, each planned before it is named.

Owns the words and the search for ways out; whether something fits is for `room` to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from holdfast.config import EngineConfig
from holdfast.errors import DoesNotFitError, HoldfastError
from holdfast.footprint.cpu import BOOK_BYTES
from holdfast.hardware import Memory
from holdfast.models import ModelSpec
from holdfast.planner.serve.plan import Plan
from holdfast.planner.sizing.cpu_budget import LEAST_TOKENS, RAM_STEP_BYTES, CpuBudget
from holdfast.units import MIB, counted, format_bytes

Attempt = Callable[[EngineConfig], "Plan"]
"""Plans with other settings, or raises."""

MOST_WAYS_OUT = 3


def spell(terms: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in terms.items())


def budget_is_not_there(asked: int, machine: Memory) -> DoesNotFitError:
    return DoesNotFitError(
        f"a budget of {format_bytes(asked)} was requested, but less is free",
        needed=format_bytes(asked),
        found=f"{format_bytes(machine.available_bytes)} free ({machine.limited_by}): "
        f"{format_bytes(asked - machine.available_bytes)} short",
        fix=f"--ram {machine.available_bytes // MIB}MiB, or leave it out",
        field="ram",
    )


def loading_does_not_fit(room: CpuBudget) -> DoesNotFitError:
    short = room.loading_bytes - room.budget_bytes
    return DoesNotFitError(
        "the model does not fit in memory",
        needed=f"{format_bytes(room.loading_bytes)} while it is loaded: {spell(room.loading_terms)}",
        found=f"{format_bytes(room.budget_bytes)} of budget: {format_bytes(short)} short",
        fix="free memory, or use a smaller or a quantized model",
    )


def nothing_fits(room: CpuBudget) -> DoesNotFitError:
    least = room.one_sequence(room.least) * (room.layout.page_bytes + BOOK_BYTES)
    return DoesNotFitError(
        "the model does not fit in memory",
        needed=f"{spell(room.terms(room.least))}, and {format_bytes(least)} for the KV of"
        f" {counted(room.least, 'token')}",
        found=f"{format_bytes(room.budget_bytes)} of budget: {format_bytes(room.short_bytes(room.least))} short",
        fix="free memory, or use a smaller or a quantized model",
    )


def pool_does_not_fit(room: CpuBudget) -> DoesNotFitError:
    asked, left, page = room.config.kv_cache_memory_bytes or 0, max(0, room.left(1)), room.layout.page_bytes
    held = left // (page + BOOK_BYTES) * page // MIB
    enough = held * MIB >= room.one_sequence(room.least) * page
    return DoesNotFitError(
        f"a KV pool of {format_bytes(asked)} does not fit",
        needed=f"{format_bytes(asked)} in addition to {spell(room.terms(1))}",
        found=f"{format_bytes(left)} left of the budget: {format_bytes(asked - left)} short",
        fix=f"--kv-cache-memory-bytes {held}MiB" if enough else None,
        field="kv_cache_memory_bytes",
    )


def pool_holds_no_block(room: CpuBudget) -> DoesNotFitError:
    page = room.layout.page_bytes
    return DoesNotFitError(
        f"a KV pool of {format_bytes(room.config.kv_cache_memory_bytes or 0)} holds no block",
        needed=f"at least {format_bytes(2 * page)}: a block of {counted(room.layout.block_tokens, 'token')} and the"
        " null page",
        found=format_bytes(room.config.kv_cache_memory_bytes or 0),
        fix=f"--kv-cache-memory-bytes {-(-max(64, room.one_sequence(room.least)) * page // MIB)}MiB",
        field="kv_cache_memory_bytes",
    )


def length_does_not_fit(room: CpuBudget, wanted: int, longest: int) -> DoesNotFitError:
    blocks, short = room.one_sequence(wanted), room.short_bytes(wanted)
    needed, books = blocks * room.layout.page_bytes, 0
    pool = _enough_pool(room, wanted, needed)
    if room.config.kv_cache_memory_bytes is None:
        books = blocks * BOOK_BYTES
    fixes = [f"--max-model-len {longest}"] if longest >= LEAST_TOKENS else []
    fixes += [f"--kv-cache-memory-bytes {pool // MIB}MiB"] if pool is not None else []
    return DoesNotFitError(
        f"one sequence of {counted(wanted, 'token')} does not fit in the KV pool",
        needed=f"{format_bytes(needed + books)} for max_model_len {wanted:,}",
        found=f"{_left_for_kv(room, wanted, needed + books - short)}{', as set' if pool is not None else ''}:"
        f" {format_bytes(short)} short",
        fix=", or ".join(fixes)
        or f"free {format_bytes(short)} of memory: it holds only {counted(longest, 'token')}, too few to be useful",
        field="max_model_len",
    )


def _left_for_kv(room: CpuBudget, length: int, left: int) -> str:
    if left >= 0:
        return format_bytes(left)
    before = spell(room.terms(length))
    return f"none of {format_bytes(room.budget_bytes)}: {before} take {format_bytes(-left)} more than that"


def _enough_pool(room: CpuBudget, length: int, needed: int) -> int | None:
    """Where the pool was set too small and the budget has more: what would do, in whole MiB."""
    if room.config.kv_cache_memory_bytes is None:
        return None
    enough = -(-needed // MIB) * MIB
    larger = replace(room, config=replace(room.config, kv_cache_memory_bytes=enough))
    return enough if larger.fits(length) else None


def became_short(reserve: int, needed: int, short: int, available: int, over: int) -> DoesNotFitError:
    """`available`: below nothing where what is still to be loaded is more than is free."""
    found = f"{format_bytes(max(0, available))} free"
    if over > 0:
        found += f", and {format_bytes(over)} more than planned were used by loading and by a step"
    ours = over > 0 and available - reserve >= needed
    return DoesNotFitError(
        "loading and a step took more memory than planned" if ours else "memory ran short while loading",
        needed=f"{format_bytes(needed)} for KV" + (f", and {format_bytes(reserve)} left free" if reserve else ""),
        found=f"{found}: {format_bytes(short)} short",
        fix=("a larger budget" if ours else "stop what else uses memory") + ", or set a smaller --max-model-len",
    )


def with_remedies(
    refusal: DoesNotFitError, config: EngineConfig, spec: ModelSpec, machine: Memory, attempt: Attempt
) -> DoesNotFitError:
    """The refusal with the changes of one setting that make it fit; its own fix first."""
    found: list[str] = []
    for flag, changed in _candidates(config, machine, attempt):
        try:
            plan = attempt(changed)
        except HoldfastError:
            continue
        if plan.limits.max_model_len >= min(LEAST_TOKENS, config.max_model_len or spec.max_position):
            found.append(flag)
        if len(found) == MOST_WAYS_OUT:
            break
    own = refusal.fix if refusal.field is not None and str(refusal.fix).startswith("--") else None
    texts = list[str]()
    for text in [*([own] if own else []), *found]:
        if not any(_flags(text) == _flags(other) for other in texts):
            texts.append(text)
    return DoesNotFitError(
        refusal.message,
        code=refusal.code,
        needed=refusal.needed,
        found=refusal.found,
        fix=", or ".join(texts) or refusal.fix,
        field=refusal.field,
    )


def _flags(advice: str) -> set[str]:
    return {word for word in advice.split() if word.startswith("--")}


def _candidates(config: EngineConfig, machine: Memory, attempt: Attempt) -> Iterator[tuple[str, EngineConfig]]:
    """Cheapest first: settings that cost nothing, then speed, then precision."""
    if config.ram is not None and (enough := _enough_ram(config, config.ram, machine, attempt)) is not None:
        yield f"--ram {enough // MIB}MiB", replace(config, ram=enough)
    if config.kv_cache_memory_bytes is not None:
        yield "leave --kv-cache-memory-bytes out", replace(config, kv_cache_memory_bytes=None)
    if (lower := _lower_limits(config, attempt)) is not None:
        yield lower
    for count in (16, 4, 1):
        if count < config.sequences:
            yield f"--max-num-seqs {count}", replace(config, max_num_seqs=count)
            break
    if config.step_tokens > 128:
        yield "--max-num-batched-tokens 128", replace(config, max_num_batched_tokens=128)
    if config.ram is None and config.gpu_memory_utilization < 0.95:
        yield "--gpu-memory-utilization 0.95", replace(config, gpu_memory_utilization=0.95)
    if config.expand_weights == "always":
        yield "--expand-weights never", replace(config, expand_weights="never")
    if config.kv_cache_dtype in ("auto", "float32"):
        yield "--kv-cache-dtype float16", replace(config, kv_cache_dtype="float16")
    if config.max_model_len is not None:
        yield "leave --max-model-len out", replace(config, max_model_len=None)


def _lower_limits(config: EngineConfig, attempt: Attempt) -> tuple[str, EngineConfig] | None:
    """The largest limits that fit where several of those that were set are too large; None: none do."""
    given = {
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
    }
    if sum(size is not None for size in given.values()) < 2:
        return None
    try:
        found = attempt(replace(config, max_model_len=None, max_num_seqs=None, max_num_batched_tokens=None)).limits
    except HoldfastError:
        return None
    lower = {name: size and min(size, getattr(found, name)) for name, size in given.items()}
    flags = [f"--{name.replace('_', '-')} {size}" for name, size in lower.items() if size != given[name]]
    changed = replace(
        config,
        max_model_len=lower["max_model_len"],
        max_num_seqs=lower["max_num_seqs"],
        max_num_batched_tokens=lower["max_num_batched_tokens"],
    )
    return " ".join(flags), changed


def _enough_ram(config: EngineConfig, given: int, machine: Memory, attempt: Attempt) -> int | None:
    """The smallest budget that would do, in whole steps; None: more than is free."""
    low, high = given // RAM_STEP_BYTES, machine.available_bytes // RAM_STEP_BYTES
    if high <= low or not _fits(replace(config, ram=high * RAM_STEP_BYTES), attempt):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(replace(config, ram=middle * RAM_STEP_BYTES), attempt):
            high = middle
        else:
            low = middle
    return high * RAM_STEP_BYTES


def _fits(config: EngineConfig, attempt: Attempt) -> bool:
    try:
        attempt(config)
    except HoldfastError:
        return False
    return True
