"""Sizes of parallelism that are worth a look on a machine, and why others are not: GPUs, or
ranks on a CPU where it has several memories. What a size needs, and whether a model divides so, the planner says.

    several GPUs             -tp, -pp, -dp, together no more than there are
    a CPU, several memories  -tp, -pp, -dp, up to one rank for each of them
    a CPU, one memory        -dp, where each engine would still have some cores: ranks would read the same memory, and
                             add up what they computed on top
"""

from __future__ import annotations

import msgspec

from holdfast.planner.inputs.question import Machine
from holdfast.tune.configuration import Axis, LeftOut, Value
from holdfast.tune.space.plans import PARALLEL_SIZES

CORES_OF_AN_ENGINE = 4
"""At least, for each of several engines on one memory: with fewer an engine alone keeps all of them busy."""
TENSOR, PIPELINE, DATA = PARALLEL_SIZES


class ParallelSizes(msgspec.Struct, frozen=True):
    axes: list[Axis]
    left_out: list[LeftOut]
    most_ranks: int | None = None
    """Of all sizes together; None: the planner says it."""


def parallel_sizes(machine: Machine, *, cores: int, memory_nodes: int) -> ParallelSizes:
    """`cores`, `memory_nodes`: of the CPU that would compute."""
    if machine.kind == "gpu":
        return _of_gpus(len(machine.all_devices))
    if (most := min(memory_nodes, cores)) > 1:
        return ParallelSizes([_axis(name, most) for name in PARALLEL_SIZES], [], most)
    one_memory = LeftOut((TENSOR, PIPELINE), "the CPU has one memory, which all ranks would read")
    if cores >= 2 * CORES_OF_AN_ENGINE:
        return ParallelSizes([_axis(DATA, cores // CORES_OF_AN_ENGINE)], [one_memory])
    few = LeftOut((DATA,), f"each engine would have fewer than {CORES_OF_AN_ENGINE} cores, of {cores}")
    return ParallelSizes([], [one_memory, few])


def _of_gpus(count: int) -> ParallelSizes:
    if count == 1:
        return ParallelSizes([], [LeftOut(PARALLEL_SIZES, "there is one GPU")])
    return ParallelSizes([_axis(name, count) for name in PARALLEL_SIZES], [])  # Which go together, a start says.


def _axis(name: str, most: int) -> Axis:
    """One, which every engine takes by itself, twos of it, and all."""
    twos: set[Value] = {1 << power for power in range(1, most.bit_length())}
    return Axis(name, (None, *sorted(twos | {most} - {1})))


def ranks_of(values: dict[str, Value]) -> int:
    found = 1
    for name in PARALLEL_SIZES:
        found *= int(values.get(name, 1))
    return found
