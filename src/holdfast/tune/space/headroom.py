"""What is said where nothing that was measured left the headroom: what came nearest, by how much it missed, and which
settings hold that much less by the planner's count. Keeps nothing and measures nothing."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec

from holdfast.bench.load.load import Arrival
from holdfast.errors import DoesNotFitError, HoldfastError
from holdfast.hardware.probe import memory, memory_holders
from holdfast.planner.fit.result import Plan
from holdfast.tune.configuration import ServerConfiguration, Value, flags_of
from holdfast.tune.space.axes import LEAST_STEP_TOKENS, UTILIZATIONS, length_of_traffic, longest
from holdfast.tune.space.plans import Planner
from holdfast.tune.trial import Trial
from holdfast.units import MIB, counted, format_bytes, shorten

NOTHING_LEFT = "HF167"
LOWER_UTILIZATIONS = (0.6, 0.5, 0.4, 0.3)
"""Below those that are worth a run where there is room."""
LESS = {
    "max_num_seqs": "fewer sequences at once, the others wait",
    "max_model_len": "a shorter context, still as long as this traffic",
    "max_num_batched_tokens": "smaller steps",
    "gpu_memory_utilization": "a smaller KV cache",
    "kv_cache_dtype": "KV in 8 bits, which changes answers",
    "quantization": "weights in fewer bits, which changes answers",
}


class NearestMiss(msgspec.Struct, frozen=True, kw_only=True):
    configuration: ServerConfiguration
    memory: str
    """RAM or VRAM."""
    free_share: float
    short_share: float
    """Of that memory, what was missing to the headroom."""


def nearest_miss(trials: Sequence[Trial], headroom: float) -> NearestMiss | None:
    """By the worst of its runs. None: all died at least once, or nobody said how much was free.

    One that died once is not kept for that, however much its other runs left; one that left enough missed nothing."""
    died = {trial.configuration for trial in trials if trial.died}
    worst: dict[ServerConfiguration, tuple[float, str]] = {}
    for trial in trials:
        for name, share in trial.free_share.items():
            if trial.configuration not in died:
                worst[trial.configuration] = min(worst.get(trial.configuration, (share, name)), (share, name))
    missed = {configuration: least for configuration, least in worst.items() if least[0] < headroom}
    if not missed:
        return None
    configuration, (share, name) = max(missed.items(), key=lambda item: item[1][0])
    nearest = NearestMiss(configuration=configuration, memory=name, free_share=share, short_share=headroom - share)
    assert nearest.short_share > 0
    return nearest


def no_headroom(
    trials: Sequence[Trial], headroom: float, planner: Planner, arrivals: Sequence[Arrival], *, model: str
) -> DoesNotFitError:
    tried = len({trial.configuration for trial in trials})
    died = len({trial.configuration for trial in trials if trial.died})
    found, fix = f"{counted(tried, 'configuration')}, which left less", "fewer sequences, a shorter context"
    if reasons := [trial.died for trial in trials if trial.died] if died == tried else []:
        found = f"{counted(tried, 'configuration')}, which left less in some runs and died in others: "
        found += shorten(reasons[0], 200)
    if (nearest := nearest_miss(trials, headroom)) is not None:
        plan, total_bytes = _planned(planner, nearest.configuration), memory().total_bytes
        on_gpu = plan is not None and plan.question.machine.kind == "gpu"
        if plan is not None and nearest.memory == "VRAM":
            total_bytes = plan.ranks[0].device.total_bytes
        short_bytes = int(nearest.short_share * total_bytes)
        among = f"came nearest of {counted(tried, 'configuration')}" if tried > 1 else "is all that was tried"
        found = (
            f"{nearest.free_share:.1%} of {nearest.memory} with {nearest.configuration}, which {among}:"
            f" {nearest.short_share:.1%} short, {format_bytes(short_bytes)}"
        )
        if nearest.memory == "RAM" and (others := _held_by_others(headroom)):
            fix = others
        elif nearest.memory == "RAM" and on_gpu:
            fix = "less RAM for KV and layers (--kv-ram, --ram), more RAM, or end what else holds it"
        elif plan is not None:
            flag = "--vram" if nearest.memory == "VRAM" else "--ram"
            fix = "; or ".join(_ways_out(planner, nearest.configuration, plan, short_bytes, arrivals, (model, flag)))
    return DoesNotFitError(
        f"nothing is kept: no configuration that was tried left {headroom:.0%} of memory free",
        code=NOTHING_LEFT,
        needed=f"{headroom:.0%} of RAM and VRAM free at the worst moment (--headroom)",
        found=found + (f"; {died} of them died" if 0 < died < tried else ""),
        fix=fix,
        field="headroom",
    )


def _held_by_others(headroom: float) -> str:
    """Where no setting of a server helps: it has ended, and without it there is too little. Empty: there is enough."""
    now = memory()
    free_share = now.available_bytes / now.total_bytes
    if free_share >= headroom:
        return ""
    holders = memory_holders()
    most = f" ({', '.join(holders)})" if holders else ""
    return (
        f"without any server {free_share:.1%} of RAM is free now: end what else holds it{most}, a machine with more,"
        f" or a --headroom below that"
    )


def _ways_out(
    planner: Planner,
    nearest: ServerConfiguration,
    plan: Plan,
    short_bytes: int,
    arrivals: Sequence[Arrival],
    asked: tuple[str, str],
) -> Iterator[str]:
    """Each is enough. `asked`: the model, and the flag of a plan for this memory."""
    held_bytes = _held(plan)
    if short_bytes >= held_bytes:
        yield (
            f"end what else holds memory, or a machine with more: the server itself is planned to hold"
            f" {format_bytes(held_bytes)}, less than what was short"
        )
        return
    found = False
    for name, values in _candidates(plan, arrivals):
        for value in values:
            changes = tuple((other, set_to) for other, set_to in nearest.changes if other != name)
            less = _planned(planner, ServerConfiguration((*changes, (name, value))))
            if less is None or less.limits.max_model_len < longest(arrivals):
                continue
            if (saved := held_bytes - _held(less)) >= short_bytes:
                found = True
                flags = shlex.join(flags_of([(name, value)]))
                yield f"{flags} ({LESS[name]}; planned to hold {format_bytes(saved)} less)"
                break
    model, flag = asked
    enough = f"{max(1, (plan.budget_bytes - short_bytes) // MIB)}MiB"
    what = "with several of these, or with a smaller model" if found else "no setting alone is enough: a smaller model"
    yield f"{what}, as holdfast plan {shlex.quote(model)} {flag} {enough} says"


def _candidates(plan: Plan, arrivals: Sequence[Arrival]) -> Iterator[tuple[str, Sequence[Value]]]:
    """What costs the least first, each by the smallest change first."""
    yield "max_num_seqs", _halves(plan.limits.max_num_seqs, 1)
    length = length_of_traffic(arrivals)
    yield "max_model_len", [length] if length < plan.limits.max_model_len else []
    yield "max_num_batched_tokens", _halves(plan.limits.max_num_batched_tokens, LEAST_STEP_TOKENS)
    shares = sorted((*UTILIZATIONS, *LOWER_UTILIZATIONS), reverse=True)
    yield "gpu_memory_utilization", [share for share in shares if share < plan.utilization]
    yield "kv_cache_dtype", ["fp8"]
    if plan.question.model.spec.quantization is None:
        yield "quantization", ["fp8", "int4"] if plan.question.engine == "holdfast" else ["fp8"]


def _halves(value: int, least: int) -> list[int]:
    found = []
    while (value := value // 2) >= least:
        found.append(value)
    return found


def _planned(planner: Planner, configuration: ServerConfiguration) -> Plan | None:
    """None: it is refused, or does not fit."""
    with suppress(HoldfastError):
        found = planner.plan(configuration)
        return found if found.fits else None
    return None


def _held(plan: Plan) -> int:
    """By the fullest rank; engines on one CPU share its memory."""
    engines = plan.question.settings.data_parallel if plan.question.machine.kind == "cpu" else 1
    return engines * max(sum(term.nbytes for term in rank.terms) + rank.pool_bytes for rank in plan.ranks)
