"""What the planner rules out before anything is started: combinations that cannot start, that would leave too little
memory, that are the same server as another under this traffic, and, once something was measured, that cannot be better.

Every combination is planned, as `holdfast serve` would; the reasons are counted. Starts nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from holdfast.bench.load.load import Arrival
from holdfast.errors import HoldfastError
from holdfast.planner.advice.throughput import throughput
from holdfast.planner.fit.result import Plan
from holdfast.tune.configuration import Axis, ServerConfiguration
from holdfast.tune.replay import kept_per_s
from holdfast.tune.space import kv_tiers
from holdfast.tune.space.axes import longest
from holdfast.tune.space.kv_tiers import CommonPrefixes
from holdfast.tune.space.parallel_sizes import ranks_of
from holdfast.tune.space.plans import Planner
from holdfast.units import format_bytes

REFUSED, SHORT, TIGHT, SAME, SLOWER = (
    "does not fit or is refused",
    "context shorter than the traffic",
    "too little memory left",
    "same server as another",
    "cannot be faster",
)


class PrunedAgainst(msgspec.Struct, frozen=True, kw_only=True):
    """What the servers are for, and on."""

    arrivals: Sequence[Arrival]
    """Of a trial."""
    engine: str
    headroom: float
    prefixes: CommonPrefixes = CommonPrefixes()
    most_ranks: int | None = None
    """As many as a CPU has memories; None: the planner says it."""

    @property
    def own(self) -> bool:
        return self.engine == "holdfast"


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


def survivors(axes: Sequence[Axis], planner: Planner, against: PrunedAgainst) -> Survivors:
    counts: dict[str, list[str]] = {}
    servers: list[PlannedServer] = []
    same_as: dict[tuple[int, ...], int] = {}
    by_key: dict[object, int] = {}
    points = sorted(itertools.product(*(range(len(axis.values)) for axis in axes)), key=lambda at: _changed(axes, at))
    for point in points:
        configuration = configuration_at(axes, point)
        found, kind, why = _judged(planner, configuration, against)
        key: object = point if found is None else _same_server(found, configuration, against)
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


def _judged(
    planner: Planner, configuration: ServerConfiguration, against: PrunedAgainst
) -> tuple[Plan | None, str, str]:
    """Its plan, and of what kind it is that it need not be run, and why; no kind: it is worth a run."""
    ranks = ranks_of(dict(configuration.changes))
    if against.most_ranks is not None and ranks > against.most_ranks:
        return None, SLOWER, f"{ranks} ranks would share {against.most_ranks} memories"
    try:
        found = planner.plan(configuration)
    except HoldfastError as error:
        return None, REFUSED, error.message
    if not found.fits:
        return None, REFUSED, f"{format_bytes(found.short_bytes)} short"
    kind, why = _ruled_out(found, configuration, against)
    return found, kind, why


def _ruled_out(found: Plan, configuration: ServerConfiguration, against: PrunedAgainst) -> tuple[str, str]:
    if configuration.value("nvme_path") is not None and not found.question.settings.offloads:
        return SLOWER, "the model fits without it, and layers of a disk are read for every step"
    if found.limits.max_model_len < (needed := longest(against.arrivals)):
        return SHORT, f"{found.limits.max_model_len:,} tokens, and a request has {needed:,}"
    if kv_tiers.too_much_ram(found, configuration, own=against.own):
        return REFUSED, "there is not so much RAM beside the server"
    if configuration.value(kv_tiers.STORE) is not None:
        held = kv_tiers.of_use(found, configuration, against.arrivals, against.prefixes, own=against.own)
        why = kv_tiers.why_no_store(found, against.arrivals, against.prefixes, held)
        if why is not None:
            return SLOWER, why
    # Engines on one CPU share its memory, and each was planned with its part.
    engines = found.question.settings.data_parallel if found.question.machine.kind == "cpu" else 1
    for rank in found.ranks:
        free = engines * (rank.device.free_bytes - sum(term.nbytes for term in rank.terms) - rank.pool_bytes)
        if free < against.headroom * rank.device.total_bytes:
            memory = "RAM" if rank.device.kind == "cpu" else rank.device.name
            left = f"{free / rank.device.total_bytes:.1%} of {memory} would be left"
            return TIGHT, f"{left}, of {against.headroom:.0%}"
    return "", ""


def _same_server(found: Plan, configuration: ServerConfiguration, against: PrunedAgainst) -> object:
    """Servers of one key do the same with this traffic: what is beyond all of it at once makes no difference, and of
    KV what is beyond the longest requests that may run at once and what prompts have in common."""
    arrivals, settings = against.arrivals, found.question.settings
    at_once = kv_tiers.running_tokens(found, arrivals) + against.prefixes.kv_tokens
    prompts = sum(one.prompt_tokens for one in arrivals)
    unknown = configuration.is_default and not against.own  # What that one takes by itself is its own affair.
    return (
        unknown,
        min(found.limits.max_num_seqs, len(arrivals)),
        min(found.limits.max_num_batched_tokens, prompts + len(arrivals)),
        min(found.kv_tokens, at_once),
        (found.dtype, found.kv_dtype, found.weights_as, found.question.model.made_as),
        (found.tensor_parallel, found.pipeline_parallel, settings.ranks, settings.stages, settings.data_parallel),
        (settings.streamed_layers, settings.layers_on_disk, settings.resident_experts),
        kv_tiers.of_use(found, configuration, arrivals, against.prefixes, own=against.own),
        (configuration.value("nvme_path"), configuration.value(kv_tiers.STORE)),
    )


def most_goodput(plan: Plan | None, arrivals: Sequence[Arrival], offered_s: float, climb: float = 1.0) -> float | None:
    """Requests a second that the device could answer at the very best: the shortest answers first, at the rate that
    its memory allows so many sequences. None: the rates of the device are not known."""
    rate = throughput(plan) if plan is not None and plan.fits else None
    if rate is None:
        return None
    replicas = 1 if plan is None else plan.question.settings.data_parallel  # One of them was planned.
    tokens, count = replicas * rate.largest.estimate.high * offered_s, 0
    for output in sorted(one.output_tokens for one in arrivals):
        tokens -= output
        if tokens < 0:
            break
        count += 1
    return kept_per_s(count, len(arrivals), offered_s, climb)
