"""A model larger than its GPU: which layers stay in VRAM, which wait in pinned RAM, and which on a disk.

    VRAM  [ terms | weights that stay | slots | KV pool ]
    RAM   [ streamed layers ]                                as few as need be, spread evenly
    NVMe  [ those that RAM does not hold ]                   as few as need be, spread evenly

Chooses numbers of layers; what each number takes is counted by `fit` and `footprint.streamed`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.footprint.streamed import StreamedLayers
from holdfast.planner.fit.count import counted_for, streamed_on_gpu
from holdfast.planner.fit.result import Plan, Rank
from holdfast.planner.fit.search import fit
from holdfast.planner.inputs.question import Question

STREAMED_TOKENS = 8192
"""Of context that layers make room for where none was asked for: more would cost every token of every answer time."""
SEQUENCE_TOKENS = 256
"""Of KV that they make room for, for each sequence of a step."""


@dataclass(frozen=True, slots=True)
class Placement:
    plan: Plan
    """It fits on the GPU; whether RAM and disk hold the rest is said by the others."""
    streamed: StreamedLayers
    ram_short_bytes: int = 0
    """What pinned RAM lacks with all that the disk may take; 0: nothing."""
    disk_short_bytes: int = 0
    """What the disk lacks; 0: nothing, or there is none."""

    @property
    def fits(self) -> bool:
        return self.ram_short_bytes == self.disk_short_bytes == 0


def can_stream(question: Question) -> bool:
    """Whether this engine runs it on one GPU with memory of its own, so that layers may wait in RAM."""
    device, settings = question.machine.devices[0], question.settings
    if device.kind != "gpu" or device.unified or len(question.machine.devices) > 1:
        return False
    if settings.pipeline_parallel > 1 or (settings.tensor_parallel or 1) > 1 or settings.data_parallel > 1:
        return False
    return question.engine in (None, "holdfast") and counted_for(question, device, 1) == "holdfast"


def place(question: Question, kv_bytes: int = 0) -> Placement | None:
    """With the fewest layers streamed with which it fits, and of these the fewest on the disk. `kv_bytes`: of a pool
    that was set. None: not even with all layers streamed."""
    layers, asked = len(question.model.spec.layers), question.settings.max_model_len

    def planned(streamed: int, length: int | None) -> Plan:
        return fit(with_streamed(question, streamed, 0, length))

    most = planned(layers, asked)
    if not most.fits:
        return None
    wanted = asked or min(question.model.spec.max_position, STREAMED_TOKENS)
    longer = most if asked else planned(layers, wanted)
    most, length = (longer, wanted) if longer.fits else (most, None)

    def enough(plan: Plan) -> bool:
        wanted = min(roomy, _pool_bytes(plan.ranks[0], plan, kv_bytes))
        return plan.fits and _steps(plan) == _steps(most) and plan.ranks[0].room_bytes >= wanted

    roomy = most.ranks[0].room_bytes
    streamed = next(count for count in range(layers + 1) if enough(planned(count, length)))
    return _on_disk(planned(streamed, asked), streamed)


def _steps(plan: Plan) -> tuple[int, int]:
    return plan.limits.max_num_seqs, plan.limits.max_num_batched_tokens


def _pool_bytes(rank: Rank, plan: Plan, kv_bytes: int) -> int:
    """What the KV pool shall have beside streamed layers: each sequence some, all that was set, and no more than is of
    use."""
    each = min(SEQUENCE_TOKENS, plan.limits.max_model_len)
    return max(kv_bytes, rank.kv.needed_bytes(plan.limits.max_num_seqs, each))


def with_streamed(question: Question, streamed: int, on_disk: int, max_model_len: int | None) -> Question:
    settings = replace(question.settings, streamed_layers=streamed, layers_on_disk=on_disk, max_model_len=max_model_len)
    return replace(question, settings=settings)


def _on_disk(plan: Plan, streamed: int) -> Placement | None:
    question, machine = plan.question, plan.question.machine
    room = machine.ram_bytes or 0

    def split(on_disk: int) -> StreamedLayers:
        found = streamed_on_gpu(with_streamed(question, streamed, on_disk, question.settings.max_model_len))
        assert found is not None
        return found

    if streamed == 0:
        return None
    counts = range(streamed + 1) if machine.nvme_bytes else range(1)
    fitting = next((count for count in counts if split(count).pinned_bytes <= room), counts[-1])
    found = split(fitting)
    settings = replace(question.settings, layers_on_disk=fitting)
    return Placement(
        replace(plan, question=replace(question, settings=settings)),
        found,
        max(0, found.pinned_bytes - room),
        max(0, found.file_bytes - (machine.nvme_bytes or 0)),
    )
