"""The error for a model that does not fit: missing bytes, and fixes that were planned before they are offered.

Owns the words and the candidates; whether something fits is decided by `fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

from holdfast.config import EngineConfig
from holdfast.config.parts.quantization import MADE_WHILE_LOADING
from holdfast.errors import DoesNotFitError, HoldfastError
from holdfast.footprint.cpu import BOOK_BYTES
from holdfast.hardware import Memory
from holdfast.planner.advice.search import first_that_fits, that_fit
from holdfast.planner.fit.cpu import CpuCount, count_on_cpu
from holdfast.planner.fit.result import Plan
from holdfast.planner.fit.search import fit
from holdfast.planner.inputs.question import CPU_USEFUL_TOKENS, MOST_UTILIZATION
from holdfast.planner.sizing.default_limits import RAM_STEP_BYTES
from holdfast.units import MIB, counted, format_bytes

Attempt = Callable[[EngineConfig], Plan]
"""Plans with other settings, or raises."""
SettingsChange = Mapping[str, object]
"""Settings as they are written on a command line, by the names of fields; None: left out."""
Candidates = Callable[[EngineConfig, Attempt], Iterator[SettingsChange]]
"""Changes of these settings to be planned, cheapest first."""

RAM_IS_SHORT = "HF114"
"""Of what would be pinned."""
MOST_REMEDIES = 3
_WRITTEN = {"offload": "--no-offload"}
"""Settings that are only ever written as their opposite."""
FROM_DISK = "--nvme-path DIR on a fast disk, from which layers that RAM does not hold are read for every step"
NOTHING_FITS = "free memory, or use a smaller or a quantized model"


class PlanRefusal(DoesNotFitError):
    """With the changes that it would offer itself; they are planned before they are printed."""

    def __init__(
        self,
        message: str,
        *,
        needed: str,
        found: str,
        changes: Iterable[SettingsChange] = (),
        fix: str = NOTHING_FITS,
        kept: Literal["first", "last"] | None = None,
        field: str | None = None,
        code: str | None = None,
    ) -> None:
        """`fix`: what is said where no change of settings fits; `kept`: before or behind those that do; None:
        not beside them."""
        super().__init__(message, needed=needed, found=found, fix=fix, field=field, code=code)
        self.changes, self.kept = changes, kept


def spell(terms: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in terms.items())


def budget_is_not_there(asked: int, machine: Memory) -> PlanRefusal:
    return PlanRefusal(
        f"a budget of {format_bytes(asked)} was requested, but less is free",
        needed=format_bytes(asked),
        found=f"{format_bytes(machine.available_bytes)} free ({machine.limited_by}): "
        f"{format_bytes(asked - machine.available_bytes)} short",
        # Not all of it: a little less may be free when the command is tried.
        changes=({"ram": f"{int(machine.available_bytes * MOST_UTILIZATION) // MIB}MiB"}, {"ram": None}),
        field="ram",
    )


def tiers_are_not_there(asked: int, others: int, machine: Memory) -> PlanRefusal:
    """Beside a GPU, where --ram is what tiers may take and the server's own processes come on top."""
    free = machine.available_bytes
    smaller: tuple[SettingsChange, ...] = ({"ram": f"{(free - others) // MIB}MiB"},) if free - others >= MIB else ()
    return PlanRefusal(
        f"{format_bytes(asked)} of RAM were requested for layers and experts beside the GPU, but less is free",
        needed=f"{format_bytes(asked)}, and {format_bytes(others)} for the server's own processes",
        found=f"{format_bytes(free)} free ({machine.limited_by}): {format_bytes(asked + others - free)} short",
        changes=(*smaller, {"ram": None}),
        field="ram",
    )


def does_not_fit(found: Plan) -> PlanRefusal:
    """Of this engine on a CPU: what lacks first, while it is loaded, of the pool that was set, or of the context."""
    count = count_on_cpu(found.question, found.limits, expand=found.engine.expand_weights)
    pool, page, length = count.settings.kv_cache_memory_bytes, count.layout.page_bytes, found.required_tokens
    if count.loading_bytes - count.budget_bytes == found.short_bytes:
        needed = f"{format_bytes(count.loading_bytes)} while it is loaded: {spell(count.loading_terms)}"
        return _nothing_fits(found, needed)
    if pool is not None and pool > (left := max(0, count.left(1))):
        held = left // (page + BOOK_BYTES) * page
        return PlanRefusal(
            f"a KV pool of {format_bytes(pool)} does not fit",
            needed=f"{format_bytes(pool)} in addition to {spell(count.terms(1))}",
            found=f"{format_bytes(left)} left of the budget: {format_bytes(pool - left)} short",
            changes=({"kv_cache_memory_bytes": f"{held // MIB}MiB" if held >= MIB else str(held)},),
            field="kv_cache_memory_bytes",
        )
    if pool is not None and pool // page < 2:
        enough = -(-max(64, count.one_sequence(length)) * page // MIB)
        return PlanRefusal(
            f"a KV pool of {format_bytes(pool)} holds no block",
            needed=f"at least {format_bytes(2 * page)}: a block of {counted(count.layout.block_tokens, 'token')} and"
            " the null page",
            found=format_bytes(pool),
            changes=({"kv_cache_memory_bytes": f"{enough}MiB"},),
            field="kv_cache_memory_bytes",
        )
    if found.longest_tokens and found.length_is_set:
        return _length_does_not_fit(count, length, found.longest_tokens)
    least = count.one_sequence(length) * (page + BOOK_BYTES)
    kv = f"{format_bytes(least)} for the KV of {counted(length, 'token')}"
    return _nothing_fits(found, f"{spell(count.terms(length))}, and {kv}")


def _nothing_fits(found: Plan, needed: str) -> PlanRefusal:
    """A disk is named where it would do; what of it is free, and where, is for the user to say."""
    settings = replace(found.question.settings, streamed_layers=len(found.question.model.spec.layers))
    from_disk = not found.question.settings.streamed_layers and fit(replace(found.question, settings=settings)).fits
    return PlanRefusal(
        "the model does not fit in memory",
        needed=needed,
        found=f"{format_bytes(found.budget_bytes)} of budget: {format_bytes(found.short_bytes)} short",
        fix=FROM_DISK if from_disk else NOTHING_FITS,
        kept="last" if from_disk else None,
    )


def _length_does_not_fit(count: CpuCount, wanted: int, longest: int) -> PlanRefusal:
    blocks, short = count.one_sequence(wanted), count.short_bytes(wanted)
    needed, books = blocks * count.layout.page_bytes, 0
    pool = _enough_pool(count, wanted, needed)
    if count.settings.kv_cache_memory_bytes is None:
        books = blocks * BOOK_BYTES
    changes: list[SettingsChange] = [{"max_model_len": longest}] if longest >= CPU_USEFUL_TOKENS else []
    changes += [{"kv_cache_memory_bytes": f"{pool // MIB}MiB"}] if pool is not None else []
    too_few = f"free {format_bytes(short)} of memory: it holds only {counted(longest, 'token')}, too few to be useful"
    return PlanRefusal(
        f"one sequence of {counted(wanted, 'token')} does not fit in the KV pool",
        needed=f"{format_bytes(needed + books)} for max_model_len {wanted:,}",
        found=f"{_left_for_kv(count, wanted, needed + books - short)}{', as set' if pool is not None else ''}:"
        f" {format_bytes(short)} short",
        changes=changes,
        fix=NOTHING_FITS if changes else too_few,
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
    refusal: PlanRefusal, config: EngineConfig, max_position: int, attempt: Attempt, candidates: Candidates
) -> HoldfastError:
    """The refusal with the changes of settings that make it fit when planned: its own, then candidates. A budget that
    is not there hides what else is wrong: where no other budget helps, what is refused without any is said too."""

    def plan(change: SettingsChange) -> Plan | None:
        found = attempt(changed(config, change))
        enough = found.limits.max_model_len >= min(CPU_USEFUL_TOKENS, config.max_model_len or max_position)
        return found if enough else None

    own = [change for change, _ in that_fit(refusal.changes, plan)]
    texts = [", or ".join(map(change_text, own))] if own else []
    for change, _ in islice(that_fit(candidates(config, attempt), plan), MOST_REMEDIES):
        if not any(_flags(change_text(change)) == _flags(other) for other in texts):
            texts.append(change_text(change))
    fix = ", or ".join(texts)
    if not fix and refusal.field in ("ram", "vram"):
        left_out: SettingsChange = {refusal.field: None}
        try:
            attempt(changed(config, left_out))
        except PlanRefusal as other:
            inner = with_remedies(other, changed(config, left_out), max_position, attempt, candidates)
            fix = f"{change_text(left_out)}, and {inner.fix}" if inner.fix != other.fix else ""
        except HoldfastError as other:
            return other
    if not fix and (without := _unset(config)) and first_that_fits([without], plan) is not None:
        fix = change_text(without)
    if fix and refusal.kept is not None:
        fix = ", or ".join([refusal.fix or "", fix] if refusal.kept == "first" else [fix, refusal.fix or ""])
    return DoesNotFitError(
        refusal.message,
        code=refusal.code,
        needed=refusal.needed,
        found=refusal.found,
        fix=fix or refusal.fix,
        field=refusal.field,
    )


def changed(config: EngineConfig, change: SettingsChange) -> EngineConfig:
    """Values are read as flags are: what a setting does not take is an error."""
    fields = EngineConfig.__dataclass_fields__
    read: dict[str, Any] = {
        name: fields[name].default if value is None else fields[name].metadata["parse"](name, str(value))
        for name, value in change.items()
    }
    return replace(config, **read)


def change_text(change: SettingsChange) -> str:
    """--max-model-len 2336; leave --ram out."""
    flags = {_WRITTEN.get(name, f"--{name.replace('_', '-')}"): value for name, value in change.items()}
    given = [f"{flag} {value}" for flag, value in flags.items() if value is not None]
    gone = [flag for flag, value in flags.items() if value is None]
    return " and ".join([*([" ".join(given)] if given else []), *([f"leave {' and '.join(gone)} out"] if gone else [])])


def _unset(config: EngineConfig) -> SettingsChange:
    """All that was set of limits and pool left out, with as much memory as may be used; empty: nothing was."""
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes")
    gone: dict[str, object] = {name: None for name in names if getattr(config, name) is not None}
    if config.ram is None and config.vram is None and config.gpu_memory_utilization < MOST_UTILIZATION:
        return {"gpu_memory_utilization": MOST_UTILIZATION} | gone
    return gone


def _flags(advice: str) -> set[str]:
    return {word for word in advice.split() if word.startswith("--")}


def cpu_candidates(config: EngineConfig, attempt: Attempt, machine: Memory) -> Iterator[SettingsChange]:
    """Cheapest first: settings that cost nothing, then speed, then precision."""
    if config.ram is not None and (enough := _enough_ram(config, config.ram, machine, attempt)) is not None:
        yield {"ram": f"{enough // MIB}MiB"}
    yield from _fewer_engines(config, attempt)
    if config.kv_cache_memory_bytes is not None:
        yield {"kv_cache_memory_bytes": None}
    yield from _lower_limits(config, attempt)
    for count in (16, 4, 1):
        if count < config.sequences:
            yield {"max_num_seqs": count}
            break
    if config.step_tokens > 128:
        yield {"max_num_batched_tokens": 128}
    if config.ram is None and config.gpu_memory_utilization < MOST_UTILIZATION:
        yield {"gpu_memory_utilization": MOST_UTILIZATION}
    if config.expand_weights == "always":
        yield {"expand_weights": "never"}
    if config.kv_cache_dtype in ("auto", "float32"):
        yield {"kv_cache_dtype": "float16"}
    if not config.kv_cache_dtype.startswith("fp8"):
        yield {"kv_cache_dtype": "fp8"}
    if config.max_model_len is not None:
        yield {"max_model_len": None}
    yield from _quantized(config)


def gpu_candidates(config: EngineConfig, attempt: Attempt) -> Iterator[SettingsChange]:
    if not config.offload:
        yield {"offload": None}
    if config.gpu_layers is not None:
        yield {"gpu_layers": None}
    if config.kv_cache_memory_bytes is not None:
        yield {"kv_cache_memory_bytes": None}
    yield from _lower_limits(config, attempt)
    if config.vram is None and config.gpu_memory_utilization < MOST_UTILIZATION:
        yield {"gpu_memory_utilization": MOST_UTILIZATION}
    if not config.kv_cache_dtype.startswith("fp8"):
        yield {"kv_cache_dtype": "fp8"}
    if config.max_model_len is not None:
        yield {"max_model_len": None}
    yield from _quantized(config)


def _quantized(config: EngineConfig) -> Iterator[SettingsChange]:
    """Of an unquantized checkpoint; others are refused with it."""
    if config.asked_quantization is None:
        yield from ({"quantization": method} for method in MADE_WHILE_LOADING)


def _fewer_engines(config: EngineConfig, attempt: Attempt) -> Iterator[SettingsChange]:
    """As many as fit, of those that share RAM."""
    for count in range(config.data_parallel_size - 1, 0, -1):
        if _fits(replace(config, data_parallel_size=count), attempt):
            yield {"data_parallel_size": None if count == 1 else count}
            return


def _lower_limits(config: EngineConfig, attempt: Attempt) -> Iterator[SettingsChange]:
    """The largest limits that fit where several of those that were set are too large."""
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
    given = {name: size for name in names if (size := getattr(config, name)) is not None}
    if len(given) < 2:
        return
    plan = first_that_fits(
        [replace(config, max_model_len=None, max_num_seqs=None, max_num_batched_tokens=None)], attempt
    )
    if plan is not None:
        lower = {name: min(size, getattr(plan[1].limits, name)) for name, size in given.items()}
        yield {name: size for name, size in lower.items() if size != given[name]}


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
