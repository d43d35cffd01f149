"""The error for a model that does not fit: missing bytes, and fixes that were planned before they are offered.

Owns the words and the candidates; whether something fits is decided by `fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from holdfast.config import EngineConfig
from holdfast.errors import DoesNotFitError, HoldfastError
from holdfast.footprint.cpu import BOOK_BYTES
from holdfast.hardware import Memory
from holdfast.planner.advice.search import first_that_fits, that_fit
from holdfast.planner.fit.cpu import CpuCount, count_on_cpu
from holdfast.planner.fit.result import Plan
from holdfast.planner.inputs.question import CPU_USEFUL_TOKENS
from holdfast.planner.sizing.default_limits import RAM_STEP_BYTES
from holdfast.units import MIB, counted, format_bytes

Attempt = Callable[[EngineConfig], Plan]
"""Plans with other settings, or raises."""
SettingsChange = tuple[str, EngineConfig]
"""As people write it, and the settings with it."""

MOST_WAYS_OUT = 3
NOTHING_FITS = "free memory, or use a smaller or a quantized model"


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


def does_not_fit(found: Plan) -> DoesNotFitError:
    """Of this engine on a CPU: what lacks first, while it is loaded, of the pool that was set, or of the context."""
    count = count_on_cpu(found.question, found.limits, expand=found.engine.expand_weights)
    pool, page, length = count.settings.kv_cache_memory_bytes, count.layout.page_bytes, found.required_tokens
    if count.loading_bytes - count.budget_bytes == found.short_bytes:
        needed = f"{format_bytes(count.loading_bytes)} while it is loaded: {spell(count.loading_terms)}"
        return _nothing_fits(found, needed)
    if pool is not None and pool > (left := max(0, count.left(1))):
        held = left // (page + BOOK_BYTES) * page
        return DoesNotFitError(
            f"a KV pool of {format_bytes(pool)} does not fit",
            needed=f"{format_bytes(pool)} in addition to {spell(count.terms(1))}",
            found=f"{format_bytes(left)} left of the budget: {format_bytes(pool - left)} short",
            fix=f"--kv-cache-memory-bytes {f'{held // MIB}MiB' if held >= MIB else held}",
            field="kv_cache_memory_bytes",
        )
    if pool is not None and pool // page < 2:
        return DoesNotFitError(
            f"a KV pool of {format_bytes(pool)} holds no block",
            needed=f"at least {format_bytes(2 * page)}: a block of {counted(count.layout.block_tokens, 'token')} and"
            " the null page",
            found=format_bytes(pool),
            fix=f"--kv-cache-memory-bytes {-(-max(64, count.one_sequence(length)) * page // MIB)}MiB",
            field="kv_cache_memory_bytes",
        )
    if found.longest_tokens and found.length_is_set:
        return _length_does_not_fit(count, length, found.longest_tokens)
    least = count.one_sequence(length) * (page + BOOK_BYTES)
    kv = f"{format_bytes(least)} for the KV of {counted(length, 'token')}"
    return _nothing_fits(found, f"{spell(count.terms(length))}, and {kv}")


def _nothing_fits(found: Plan, needed: str) -> DoesNotFitError:
    return DoesNotFitError(
        "the model does not fit in memory",
        needed=needed,
        found=f"{format_bytes(found.budget_bytes)} of budget: {format_bytes(found.short_bytes)} short",
        fix="free memory, or use a smaller or a quantized model",
    )


def _length_does_not_fit(count: CpuCount, wanted: int, longest: int) -> DoesNotFitError:
    blocks, short = count.one_sequence(wanted), count.short_bytes(wanted)
    needed, books = blocks * count.layout.page_bytes, 0
    pool = _enough_pool(count, wanted, needed)
    if count.settings.kv_cache_memory_bytes is None:
        books = blocks * BOOK_BYTES
    fixes = [f"--max-model-len {longest}"] if longest >= CPU_USEFUL_TOKENS else []
    fixes += [f"--kv-cache-memory-bytes {pool // MIB}MiB"] if pool is not None else []
    return DoesNotFitError(
        f"one sequence of {counted(wanted, 'token')} does not fit in the KV pool",
        needed=f"{format_bytes(needed + books)} for max_model_len {wanted:,}",
        found=f"{_left_for_kv(count, wanted, needed + books - short)}{', as set' if pool is not None else ''}:"
        f" {format_bytes(short)} short",
        fix=", or ".join(fixes)
        or f"free {format_bytes(short)} of memory: it holds only {counted(longest, 'token')}, too few to be useful",
        field="max_model_len",
    )


def _left_for_kv(count: CpuCount, length: int, left: int) -> str:
    if left >= 0:
        return format_bytes(left)
    before = spell(count.terms(length))
    return f"none of {format_bytes(count.budget_bytes)}: {before} take {format_bytes(-left)} more than that"


def _enough_pool(count: CpuCount, length: int, needed: int) -> int | None:
    """Where the pool was set too small and the budget has more: what would do, in whole MiB."""
    if count.settings.kv_cache_memory_bytes is None:
        return None
    enough = -(-needed // MIB) * MIB
    settings = replace(count.settings, kv_cache_memory_bytes=enough)
    return enough if replace(count, question=replace(count.question, settings=settings)).fits(length) else None


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
    refusal: DoesNotFitError,
    config: EngineConfig,
    max_position: int,
    attempt: Attempt,
    candidates: Iterable[SettingsChange] = (),
) -> DoesNotFitError:
    """The refusal with the changes of settings that make it fit when planned: those that it names itself, then
    candidates."""

    def plan(change: SettingsChange) -> Plan | None:
        found = attempt(change[1])
        enough = found.limits.max_model_len >= min(CPU_USEFUL_TOKENS, config.max_model_len or max_position)
        return found if enough else None

    named = refusal.field is not None and str(refusal.fix).startswith("--")
    own = ", or ".join(text for (text, _), _ in that_fit(_named(refusal, config) if named else (), plan))
    texts = [own] if own else []
    for (text, _), _ in islice(that_fit(candidates, plan), MOST_WAYS_OUT):
        if not any(_flags(text) == _flags(other) for other in texts):
            texts.append(text)
    return DoesNotFitError(
        refusal.message,
        code=refusal.code,
        needed=refusal.needed,
        found=refusal.found,
        fix=", or ".join(texts) or (NOTHING_FITS if named else refusal.fix),
        field=refusal.field,
    )


def _named(refusal: DoesNotFitError, config: EngineConfig) -> Iterator[SettingsChange]:
    """The changes that its own fix names: `--max-model-len 2336, or leave it out`. A value that the setting does not
    take is not a change."""
    fields = EngineConfig.__dataclass_fields__
    for text in str(refusal.fix).split(", or "):
        words, changed = text.split(), dict[str, Any]()
        try:
            for flag, value in zip(words[::2], words[1::2], strict=False):
                field = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else refusal.field or ""
                changed[field] = fields[field].metadata["parse"](field, value) if flag.startswith("--") else None
            yield text, replace(config, **changed)
        except HoldfastError:
            continue


def _flags(advice: str) -> set[str]:
    return {word for word in advice.split() if word.startswith("--")}


def cpu_candidates(config: EngineConfig, machine: Memory, attempt: Attempt) -> Iterator[SettingsChange]:
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


def _lower_limits(config: EngineConfig, attempt: Attempt) -> SettingsChange | None:
    """The largest limits that fit where several of those that were set are too large; None: none do."""
    given = {
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
    }
    if sum(size is not None for size in given.values()) < 2:
        return None
    unset = replace(config, max_model_len=None, max_num_seqs=None, max_num_batched_tokens=None)
    plan = first_that_fits([unset], attempt)
    if plan is None:
        return None
    found = plan[1].limits
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
    return first_that_fits([config], attempt) is not None
