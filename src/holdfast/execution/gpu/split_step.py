"""A step that did not find the memory it needed, in smaller ones. Knows what a part is, not how one is launched."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from holdfast.execution.gpu.launched_step import GpuStep, Launched, ReadStep, in_order, no_memory
from holdfast.execution.gpu.memory.oom import is_shortage
from holdfast.execution.gpu.step import halves
from holdfast.records import Row, StepFailure, StepPlan, TokenLogprobs

log = logging.getLogger("holdfast")


def run_in_parts(
    plan: StepPlan,
    *,
    enter: Callable[[], None],
    launch: Callable[[Sequence[Row]], Launched],
    read: ReadStep,
    give_back: Callable[[], None],
) -> GpuStep:
    """Once more and then in smaller ones. What it may have written already is written again: the same keys and values,
    and the same tokens. In the order of the rows, because one may read from the prefix cache what another before it
    writes. What torch keeps for itself is given back only when the smallest part fails: somebody else may be faster to
    take it. A row that fails even then is left out."""
    log.warning("out of GPU memory in a step of %d tokens: the step is split", plan.token_count)
    entered, given_back, failures = False, False, dict[int, StepFailure]()
    parts, found = deque([list(plan.rows)]), dict[int, tuple[int, TokenLogprobs | None]]()
    scores: dict[int, list[TokenLogprobs]] = {row.slot: [] for row in plan.rows if row.scored}
    embedded, late = dict[int, bytes](), list[int]()
    while parts:
        part = [row for row in parts.popleft() if row.slot not in failures]
        if not part:
            continue
        try:
            if not entered:
                enter()
                entered = True
            launched = launch(part)
            sampled, told = read(launched)
            embedded |= launched.embeddings
            late += launched.late
        except RuntimeError as error:
            if not is_shortage(error):
                raise
            smaller, said = halves(part), str(error).splitlines()[0]
        else:
            found.update(zip([row.slot for row in part if row.samples], sampled, strict=True))
            for row, entries in zip([row for row in part if row.scored], told, strict=True):
                scores[row.slot] += entries
            continue
        if not smaller and given_back:
            failures[part[0].slot] = no_memory(part[0], said)
            continue
        if not smaller:
            give_back()
            given_back = True
        parts.extendleft(reversed(smaller or [part]))
    return GpuStep(
        read,
        plan,
        sampled=[found.get(row.slot, (0, None)) for row in plan.rows if row.samples],
        told=[[] if slot in failures else entries for slot, entries in scores.items()],
        embeddings=in_order(plan.rows, embedded),
        failures=list(failures.values()),
        late=late,
    )
