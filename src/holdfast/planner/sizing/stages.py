"""Which layers each stage of a pipeline has: consecutive ones, divided by bytes, so that the largest stage is as small
as can be. Counts nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from holdfast.errors import ConfigurationError
from holdfast.models import ModelSpec
from holdfast.models.stages import LayerStage, stage_has
from holdfast.units import counted

PP_NOT_POSSIBLE = "HF132"


def divide_stages(spec: ModelSpec, nbytes: Mapping[str, int], count: int) -> tuple[LayerStage, ...]:
    """`nbytes`: of each layer by `layers.3`, of what is in no layer by its own name. Raises ConfigurationError where
    there are fewer layers than stages."""
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
    first, last = LayerStage(index=0, count=2, first=0, last=0), LayerStage(index=1, count=2, first=0, last=0)
    alone = [tensor for tensor in spec.tensors if tensor.layer is None]
    before = sum(nbytes.get(tensor.name, 0) for tensor in alone if stage_has(spec, first, tensor))
    behind = sum(nbytes.get(tensor.name, 0) for tensor in alone if stage_has(spec, last, tensor))
    ends = cut_evenly([nbytes[f"layers.{layer.index}"] for layer in spec.layers], count, before, behind)
    return tuple(
        LayerStage(index=index, count=count, first=first, last=last)
        for index, (first, last) in enumerate(pairwise(ends))
    )


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
