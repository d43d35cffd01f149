"""Which settings are varied, and over which values: ladders around what the engine takes by itself.

    exact    sequences and tokens of a step, context, share of memory, layers on a disk, GPUs: the answers stay the same
    lossy    type of the KV cache, quantized weights: other answers, so only where the user allows it

Looks at a plan of the default and at the traffic; measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.bench.load.load import Arrival
from holdfast.planner.fit.result import Plan
from holdfast.tune.configuration import Axis, Value

FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
LEAST_STEP_TOKENS = 32
UTILIZATIONS = (0.7, 0.8, 0.9, 0.95)
LENGTH_STEP, LENGTH_MARGIN = 256, 1.25
"""A context that is set is the traffic's longest request and a quarter, in steps of this."""


def axes_of(
    default: Plan,
    arrivals: Sequence[Arrival],
    *,
    engine: str,
    lossy: bool = False,
    nvme_path: str | None = None,
    fixed: frozenset[str] = frozenset(),
) -> list[Axis]:
    """`fixed`: settings that the user gave, which stay as they are."""
    limits, gpu = default.limits, default.question.machine.kind == "gpu"
    own = engine == "holdfast"
    found = [
        Axis("max_num_seqs", _ladder(limits.max_num_seqs, 1, keep=not own)),
        Axis("max_num_batched_tokens", _ladder(limits.max_num_batched_tokens, LEAST_STEP_TOKENS, keep=not own)),
        Axis("max_model_len", _lengths(limits.max_model_len, arrivals)),
        Axis(
            "gpu_memory_utilization", tuple(None if share == default.utilization else share for share in UTILIZATIONS)
        ),
    ]
    if nvme_path is not None:
        found.append(Axis("nvme_path", (None, nvme_path)))
    devices = len(default.question.machine.all_devices)
    if not own and gpu and devices > 1:
        sizes = tuple(1 << power for power in range(1, devices.bit_length()))
        found += [Axis("tensor_parallel_size", (None, *sizes)), Axis("data_parallel_size", (None, *sizes))]
    if lossy:
        found += [
            Axis("kv_cache_dtype", (None, "fp8") if gpu or not own else (None, "bfloat16", "fp8")),
            Axis("quantization", _quantized(default, own=own)),
        ]
    return [axis for axis in found if len(axis.values) > 1 and axis.name not in fixed]


def _ladder(default: int, least: int, *, keep: bool) -> tuple[Value | None, ...]:
    """`keep`: the value itself stays beside None, since what the engine takes by itself is not known for sure."""
    values = sorted({max(least, round(default * factor)) for factor in FACTORS})
    found: list[Value | None] = []
    for value in values:
        found += [value, None] if value == default and keep else [None] if value == default else [value]
    return tuple(found)


def _lengths(served: int, arrivals: Sequence[Arrival]) -> tuple[Value | None, ...]:
    wanted = LENGTH_MARGIN * longest(arrivals)
    length = -int(-wanted // LENGTH_STEP) * LENGTH_STEP
    return (length, None) if length < served else (None,)


def longest(arrivals: Sequence[Arrival]) -> int:
    return max(one.prompt_tokens + one.output_tokens for one in arrivals)


def _quantized(default: Plan, *, own: bool) -> tuple[Value | None, ...]:
    if default.question.model.spec.quantization is not None:
        return (None,)  # It is stored so; a better one would be another file.
    return (None, "fp8", "int4") if own else (None, "fp8")
