"""Which settings are varied, and over which values: ladders around what the engine takes by itself.

    exact    sequences and tokens of a step, context, share of memory, sizes of parallelism (parallel_sizes.py), tiers
             for KV (kv_tiers.py), layers on a disk: the answers stay the same
    lossy    type of the KV cache, quantized weights: other answers, so only where the user allows it

Looks at a plan of the default and at the traffic; measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.bench.load.load import Arrival
from holdfast.hardware import processor
from holdfast.hardware.numa import allowed_nodes
from holdfast.planner.fit.result import Plan
from holdfast.tune.configuration import Axis, LeftOut, Value
from holdfast.tune.space.kv_tiers import kv_tier_axes
from holdfast.tune.space.parallel_sizes import parallel_sizes

FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
LEAST_STEP_TOKENS = 32
UTILIZATIONS = (0.7, 0.8, 0.9, 0.95)
LENGTH_STEP, LENGTH_MARGIN = 256, 1.25
"""A context that is set is the traffic's longest request and a quarter, in steps of this."""
LOSSY = ("kv_cache_dtype", "quantization")


class TuneSpace(msgspec.Struct, frozen=True):
    axes: list[Axis]
    left_out: list[LeftOut]
    most_ranks: int | None = None
    """Of a CPU, by its memories."""


def space_of(
    default: Plan,
    arrivals: Sequence[Arrival],
    *,
    engine: str,
    lossy: bool = False,
    nvme_path: str | None = None,
    kv_store: str | None = None,
    fixed: frozenset[str] = frozenset(),
    cores: int | None = None,
    memory_nodes: int | None = None,
) -> TuneSpace:
    """`fixed`: settings that the user gave, which stay as they are. `cores`, `memory_nodes`: of the CPU, this one's
    where they are not given."""
    limits, gpu = default.limits, default.question.machine.kind == "gpu"
    own = engine == "holdfast"
    parallel = parallel_sizes(
        default.question.machine,
        cores=processor().cores if cores is None else cores,
        memory_nodes=len(allowed_nodes()) if memory_nodes is None else memory_nodes,
    )
    tiers, no_tiers = kv_tier_axes(default, own=own, store=kv_store)
    # Those that matter most first: the search looks along each by itself before it looks at several together.
    found = [
        Axis("max_num_seqs", _ladder(limits.max_num_seqs, 1, keep=not own)),
        Axis("max_num_batched_tokens", _ladder(limits.max_num_batched_tokens, LEAST_STEP_TOKENS, keep=not own)),
        *parallel.axes,
        *tiers,
        Axis("max_model_len", _lengths(limits.max_model_len, arrivals)),
        Axis(
            "gpu_memory_utilization", tuple(None if share == default.utilization else share for share in UTILIZATIONS)
        ),
    ]
    if nvme_path is not None:
        found.append(Axis("nvme_path", (None, nvme_path)))
    if lossy:
        found += [
            Axis("kv_cache_dtype", (None, "fp8") if gpu or not own else (None, "bfloat16", "fp8")),
            Axis("quantization", _quantized(default, own=own)),
        ]
    axes = [axis for axis in found if len(axis.values) > 1 and axis.name not in fixed]
    left_out = [*parallel.left_out, *no_tiers, *([] if lossy else [LeftOut(LOSSY, "they change answers (--lossy)")])]
    set_by_user = tuple(axis.name for axis in found if axis.name in fixed)
    if set_by_user:
        left_out.insert(0, LeftOut(set_by_user, "set by --serve-flags"))
    return TuneSpace(axes, left_out, parallel.most_ranks)


def _ladder(default: int, least: int, *, keep: bool) -> tuple[Value | None, ...]:
    """`keep`: the value itself stays beside None, since what the engine takes by itself is not known for sure."""
    values = sorted({max(least, round(default * factor)) for factor in FACTORS})
    found: list[Value | None] = []
    for value in values:
        found += [value, None] if value == default and keep else [None] if value == default else [value]
    return tuple(found)


def _lengths(served: int, arrivals: Sequence[Arrival]) -> tuple[Value | None, ...]:
    length = length_of_traffic(arrivals)
    return (length, None) if length < served else (None,)


def length_of_traffic(arrivals: Sequence[Arrival]) -> int:
    return -int(-LENGTH_MARGIN * longest(arrivals) // LENGTH_STEP) * LENGTH_STEP


def longest(arrivals: Sequence[Arrival]) -> int:
    return max(one.prompt_tokens + one.output_tokens for one in arrivals)


def _quantized(default: Plan, *, own: bool) -> tuple[Value | None, ...]:
    if default.question.model.spec.quantization is not None:
        return (None,)  # It is stored so; a better one would be another file.
    return (None, "fp8", "int4") if own else (None, "fp8")
