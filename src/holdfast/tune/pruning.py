"""What the planner rules out before anything is started: combinations that cannot start, that would leave too little
memory, that are the same server as another under this traffic, and, once something was measured, that cannot be better.

Every combination is planned, as `holdfast serve` would; the reasons are counted. Starts nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec

from holdfast.bench.load.load import Arrival
from holdfast.config.plan import PlanConfig
from holdfast.errors import HoldfastError
from holdfast.planner.advice.throughput import throughput
from holdfast.planner.api import question_of
from holdfast.planner.fit.result import Plan
from holdfast.planner.fit.search import fit
from holdfast.planner.inputs.question import Question
from holdfast.planner.sizing.default_limits import check_step
from holdfast.tune.configuration import Axis, ServerConfiguration
from holdfast.tune.space import longest
from holdfast.units import format_bytes

REFUSED, SHORT, TIGHT, SAME, SLOWER = (
    "does not fit or is refused",
    "context shorter than the traffic",
    "too little memory left",
    "same server as another",
    "cannot be faster",
)
_OF_A_QUESTION = ("quantization", "tensor_parallel_size", "data_parallel_size")
"""Settings that change the model or the machine of a question; the others are only its limits."""


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    count: int
    example: str
    """A configuration of this kind, and why."""


class PlannedServer(msgspec.Struct, frozen=True):
    configuration: ServerConfiguration
    point: tuple[int, ...]
    """Places on the axes."""
    plan: Plan | None
    """None: it cannot be planned, and only the server itself can tell."""


class Planner:
    """Plans of one model on this machine."""

    def __init__(self, model: str, *, engine: str, settings: Mapping[str, Any]) -> None:
        self._model, self._engine, self._settings = model, engine, dict(settings)
        self._question = cache(self._asked)

    def _asked(self, *changes: tuple[str, Any]) -> Question:
        config = PlanConfig.from_arguments(model=self._model, **self._settings | dict(changes))
        return replace(question_of(config), engine=self._engine)

    def plan(self, configuration: ServerConfiguration) -> Plan:
        """Raises where it is refused; `fits` says the rest."""
        changes = dict(configuration.changes)
        changes.pop("nvme_path", None)
        question = self._question(*((name, changes.pop(name)) for name in _OF_A_QUESTION if name in changes))
        if "gpu_memory_utilization" in changes:
            changes["utilization"] = changes.pop("gpu_memory_utilization")
        settings = replace(question.settings, **changes)  # type: ignore[arg-type]
        if self._engine == "holdfast":
            check_step(settings.max_num_seqs, settings.max_num_batched_tokens)
        return fit(replace(question, settings=settings))


class Survivors(msgspec.Struct, frozen=True, kw_only=True):
    axes: list[Axis]
    servers: list[PlannedServer]
    """Worth a run; the default is the first, whatever the planner says of it."""
    same_as: dict[tuple[int, ...], int]
    """By places on the axes, which of them it is, or is the same server as."""
    pruned: list[Pruned]
    combinations: int

    @property
    def configurations(self) -> list[ServerConfiguration]:
        return [server.configuration for server in self.servers]

    @property
    def points(self) -> list[tuple[int, ...]]:
        return [server.point for server in self.servers]


def survivors(
    axes: Sequence[Axis], planner: Planner, arrivals: Sequence[Arrival], *, engine: str, headroom: float
) -> Survivors:
    counts: dict[str, list[str]] = {}
    servers: list[PlannedServer] = []
    same_as: dict[tuple[int, ...], int] = {}
    by_key: dict[object, int] = {}
    points = sorted(itertools.product(*(range(len(axis.values)) for axis in axes)), key=lambda at: _changed(axes, at))
    for point in points:
        configuration = configuration_at(axes, point)
        found, why = _planned(planner, configuration)
        kind, why = (REFUSED, why) if found is None else _ruled_out(found, configuration, arrivals, headroom)
        key: object = point if found is None else _same_server(found, configuration, arrivals, engine)
        if configuration.is_default:
            kind = ""
        elif not kind and key in by_key:
            same_as[point] = by_key[key]
            kind, why = SAME, f"under this traffic it does as {servers[by_key[key]].configuration}"
        if kind:
            counts.setdefault(kind, []).append(f"{configuration}: {why}")
            continue
        by_key[key] = same_as[point] = len(servers)
        servers.append(PlannedServer(configuration, point, found))
    pruned = [Pruned(kind=kind, count=len(said), example=said[0]) for kind, said in counts.items()]
    return Survivors(axes=list(axes), servers=servers, same_as=same_as, pruned=pruned, combinations=len(points))


def configuration_at(axes: Sequence[Axis], point: Sequence[int]) -> ServerConfiguration:
    chosen = ((axis.name, axis.values[place]) for axis, place in zip(axes, point, strict=True))
    return ServerConfiguration(tuple((name, value) for name, value in chosen if value is not None))


def _changed(axes: Sequence[Axis], point: Sequence[int]) -> tuple[int, int]:
    """Fewest changes first, then the smallest, so that of several servers that are the same the plainest stays."""
    steps = [abs(place - axis.values.index(None)) for axis, place in zip(axes, point, strict=True)]
    return sum(step > 0 for step in steps), sum(steps)


def _planned(planner: Planner, configuration: ServerConfiguration) -> tuple[Plan | None, str]:
    try:
        found = planner.plan(configuration)
    except HoldfastError as error:
        return None, error.message
    if not found.fits and configuration.value("nvme_path") is None:
        return None, f"{format_bytes(found.short_bytes)} short"
    return found, ""


def _ruled_out(
    found: Plan, configuration: ServerConfiguration, arrivals: Sequence[Arrival], headroom: float
) -> tuple[str, str]:
    if found.fits and configuration.value("nvme_path") is not None:
        return SLOWER, "the model fits in RAM, and layers of a disk are read for every step"
    if found.fits and found.limits.max_model_len < (needed := longest(arrivals)):
        return SHORT, f"{found.limits.max_model_len:,} tokens, and a request has {needed:,}"
    for rank in found.ranks if found.fits else ():
        free = rank.device.free_bytes - sum(term.nbytes for term in rank.terms) - rank.pool_bytes
        if free < headroom * rank.device.total_bytes:
            return TIGHT, f"{free / rank.device.total_bytes:.1%} of {rank.device.name} would be left, of {headroom:.0%}"
    return "", ""


def _same_server(found: Plan, configuration: ServerConfiguration, arrivals: Sequence[Arrival], engine: str) -> object:
    """Servers of one key do the same with this traffic: what is beyond all of it at once makes no difference, and of
    the KV cache what is beyond the longest requests that may run at once. Their prompts have nothing in common, so that
    none is of use to another."""
    block = found.question.settings.block_tokens
    lengths = sorted((one.prompt_tokens + one.output_tokens for one in arrivals), reverse=True)
    running = lengths[: found.limits.max_num_seqs]
    at_once = sum(-(-length // block) * block for length in running) + block * len(running)
    prompts = sum(one.prompt_tokens for one in arrivals)
    unknown = configuration.is_default and engine != "holdfast"  # What that one takes by itself is its own affair.
    return (
        unknown,
        min(found.limits.max_num_seqs, len(arrivals)),
        min(found.limits.max_num_batched_tokens, prompts + len(arrivals)),
        min(found.kv_tokens, at_once) if found.fits else -1,
        (found.dtype, found.kv_dtype, found.weights_as, found.question.model.made_as),
        (found.tensor_parallel, found.pipeline_parallel, found.question.settings.data_parallel),
        configuration.value("nvme_path"),
    )


def most_goodput(plan: Plan | None, arrivals: Sequence[Arrival], offered_s: float) -> float | None:
    """Requests a second that the device could answer at the very best: the shortest answers first, at the rate that
    its memory allows so many sequences. None: the rates of the device are not known."""
    rate = throughput(plan) if plan is not None and plan.fits else None
    if rate is None:
        return None
    tokens, count = rate.largest.estimate.high * offered_s, 0
    for output in sorted(one.output_tokens for one in arrivals):
        tokens -= output
        if tokens < 0:
            break
        count += 1
    return count / offered_s
