"""Which layers each stage of a pipeline has: consecutive ones. Counts nothing itself.

rooms that are alike    divided by bytes, so that the largest stage is as small as can be
rooms that differ       so that all stages hold as much KV as can be, then so that the fullest is as empty as can be
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

from holdfast.errors import ConfigurationError
from holdfast.models import ModelSpec
from holdfast.models.stages import LayerStage, stage_has
from holdfast.planner.sizing.kv_cost import largest
from holdfast.units import counted

PP_NOT_POSSIBLE = "HF132"
SHARES = 1 << 16
"""How finely the share of a room that is filled is told from another."""
HeldBytes = Callable[[int, int, int, int], int]
"""Of a stage, from its first layer to behind its last one, with so much KV: more layers and more KV are more bytes."""


def divide_stages(
    spec: ModelSpec, nbytes: Mapping[str, int], count: int, ends: Sequence[int] = ()
) -> tuple[LayerStage, ...]:
    """`nbytes`: of each layer by `layers.3`, of what is in no layer by its own name. `ends`: where layers are cut
    already, 0 and their number included; empty: evenly. Raises ConfigurationError where there are fewer layers than
    stages."""
    layers = len(spec.layers)
    if count > layers:
        raise ConfigurationError(
            f"pipeline_parallel_size is {count}, but the model has {counted(layers, 'layer')}",
            code=PP_NOT_POSSIBLE,
            needed=f"1 to {layers}",
            found=str(count),
            fix=f"--pipeline-parallel-size {layers}",
            field="pipeline_parallel_size",
        )
    if not ends:
        ends = cut_evenly(layer_bytes(spec, nbytes), count, *end_bytes(spec, nbytes))
    return tuple(
        LayerStage(index=index, count=count, first=first, last=last)
        for index, (first, last) in enumerate(pairwise(ends))
    )


def layer_bytes(spec: ModelSpec, nbytes: Mapping[str, int]) -> list[int]:
    return [nbytes[f"layers.{layer.index}"] for layer in spec.layers]


def end_bytes(spec: ModelSpec, nbytes: Mapping[str, int]) -> tuple[int, int]:
    """Of what the first stage and the last one have beside their layers."""
    first, last = LayerStage(index=0, count=2, first=0, last=0), LayerStage(index=1, count=2, first=0, last=0)
    alone = [tensor for tensor in spec.tensors if tensor.layer is None]
    before = sum(nbytes.get(tensor.name, 0) for tensor in alone if stage_has(spec, first, tensor))
    behind = sum(nbytes.get(tensor.name, 0) for tensor in alone if stage_has(spec, last, tensor))
    return before, behind


def cut_evenly(sizes: Sequence[int], parts: int, before: int = 0, behind: int = 0) -> list[int]:
    """Where consecutive sizes are cut into so many parts, 0 and the end included: the largest part is as small as can
    be, and of such cuts the squares of all are least. `before`, `behind`: what the first and the last have beside."""
    sums, count = [0, *accumulate(sizes)], len(sizes)

    def part(first: int, last: int) -> int:
        more = (before if first == 0 else 0) + (behind if last == count else 0)
        return sums[last] - sums[first] + more

    # Of the first so many sizes in `done` parts: the largest, the squares, and where the last part begins.
    best = [[(part(0, last), part(0, last) ** 2, 0) for last in range(1, count + 1)]]
    for done in range(2, parts + 1):
        row = list[tuple[int, int, int]]()
        for last in range(1, count + 1):
            tried = [
                (max(best[-1][cut - 1][0], size := part(cut, last)), best[-1][cut - 1][1] + size**2, cut)
                for cut in range(done - 1, last)
            ]
            row.append(min(tried, default=(2 * sums[-1] + before + behind + 1, 0, 0)))
        best.append(row)
    ends = [count]
    for row in reversed(best):
        ends.append(row[ends[-1] - 1][2])
    return ends[::-1]


def cut_for_rooms(held: HeldBytes, rooms: Sequence[int], layers: int, most_kv: int) -> list[int]:
    """Where so many layers are cut into a stage for each room, 0 and the end included: every stage holds as much KV as
    can be, at most `most_kv`, and of such cuts the largest share of a room that is filled is least. Where a room holds
    its part of no cut without any KV, the largest shortage is as small as can be."""

    def filled(caps: Sequence[int], kv: int) -> list[int] | None:
        """A cut with no more in each stage than its cap. Of cuts before a layer the last is the best for the stage that
        ends there: it has the fewest layers then."""
        cuts = [0]
        before = list[dict[int, int]]()
        for stage, cap in enumerate(caps):
            reached, behind = dict[int, int](), len(caps) - 1 - stage
            for last in range(stage + 1, layers - behind + 1) if behind else (layers,):
                at = bisect_left(cuts, last) - 1
                if at >= 0 and held(stage, cuts[at], last, kv) <= cap:
                    reached[last] = cuts[at]
            before.append(reached)
            cuts = list(reached)
        if not cuts:
            return None
        ends = [layers]
        for reached in reversed(before):
            ends.append(reached[ends[-1]])
        return ends[::-1]

    def short(nbytes: int) -> list[int] | None:
        return filled([room + nbytes for room in rooms], 0)

    if filled(rooms, 0) is None:
        high = 1
        while short(high) is None:
            high *= 2
        found = short(high - largest(0, high, lambda less: short(high - less) is not None))
    else:
        kv = 1
        while kv < most_kv and filled(rooms, kv) is not None:
            kv *= 2
        kv = largest(0, min(kv, most_kv), lambda one: filled(rooms, one) is not None)

        def shared(share: int) -> list[int] | None:
            return filled([room * share // SHARES for room in rooms], kv)

        found = shared(SHARES - largest(0, SHARES, lambda less: shared(SHARES - less) is not None))
    assert found is not None, "halving ends with what was tried"
    return found
