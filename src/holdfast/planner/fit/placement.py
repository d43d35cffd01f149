"""A model larger than its GPU: which layers stay in VRAM, which wait in pinned RAM, and which on a disk.

    VRAM  [ terms | weights that stay | slots | KV pool ]
    RAM   [ streamed layers ]                                as few as need be, or as was asked for by hand
    NVMe  [ those that RAM does not hold ]                   as few as need be

Chooses numbers of layers; what each number takes is counted by `fit` and `footprint.streamed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from holdfast.config.engine import GPU_SEQUENCES
from holdfast.config.parts.offload import OffloadRequest, check_all_stay
from holdfast.errors import ConfigurationError
from holdfast.footprint import lora
from holdfast.footprint.cpu import FRONT_BYTES
from holdfast.footprint.identity_key import Same
from holdfast.footprint.streamed import StreamedLayers, last_of_groups, streamed_layers
from holdfast.observability.decisions import Decision
from holdfast.planner.compat.gpu_kernels import lacks_engine
from holdfast.planner.fit.count import counted_for, streamed_on_gpu
from holdfast.planner.fit.result import Plan
from holdfast.planner.fit.search import fit
from holdfast.planner.inputs.question import CPU_USEFUL_TOKENS, STREAMED_SEQUENCE_TOKENS, Question
from holdfast.planner.sizing.dtype import compute_dtype
from holdfast.planner.sizing.engine_weights import engine_weights
from holdfast.planner.sizing.host_ram import HOST_SHARE, host_budget, server_bytes
from holdfast.units import MIB

CANNOT_STREAM = "HF136"
STREAMED_TOKENS = 8192
"""Of KV that layers make room for, and of context where none was asked for: more would cost every token of every answer
time."""
LEAST_SPEED = 0.8
"""Of one sequence, of what it has beside that KV: no more is given up for sequences that were set."""
LEAST_HELD = 0.75
"""Of these, at full length side by side: for fewer nothing is given up."""
POOL_SHARE = 0.9
"""Of that KV, which does: for the rest no layer goes that would otherwise stay. Layers leave for it when requests want
it (`engine.core.kv_balance`)."""
SPARE_BYTES = 64 * MIB
"""Left in the pool beyond the KV that must fit: a start may take more than its plan (H200: kernels and libraries took
up to 57 MiB more than their term has), and a context that was set is not shortened for it."""


@dataclass(frozen=True, slots=True)
class Placement:
    plan: Plan
    """With layers streamed; whether RAM and disk hold those is said by the others."""
    streamed: StreamedLayers
    ram_short_bytes: int = 0
    """What pinned RAM lacks with all that the disk may take; 0: nothing, or it is not known what there is."""
    disk_short_bytes: int = 0
    """What the disk lacks; 0: nothing, or none is used."""

    @property
    def fits(self) -> bool:
        return self.plan.fits and self.ram_short_bytes == self.disk_short_bytes == 0

    @property
    def free_ram_bytes(self) -> int:
        return free_ram_bytes(self.plan, self.streamed.pinned_bytes)

    @property
    def resident(self) -> int:
        return len(self.plan.question.model.spec.layers) - len(self.streamed.layers)


def can_stream(question: Question) -> bool:
    """Whether this engine runs it on one GPU with memory of its own, so that layers may wait in RAM."""
    device, settings = question.machine.devices[0], question.settings
    if device.kind != "gpu" or device.unified or len(question.machine.devices) > 1:
        return False
    if settings.pipeline_parallel > 1 or (settings.tensor_parallel or 1) > 1 or settings.data_parallel > 1:
        return False
    if question.engine not in (None, "holdfast") or counted_for(question, device, 1) != "holdfast":
        return False
    return question.model.draft is None and engine_weights(Same(question.model)) is not None


def wants_streaming(question: Question) -> bool:
    """By hand, whether or not all layers would fit."""
    asked = question.settings.offload
    check_all_stay(asked, len(question.model.spec.layers))
    if asked.experts_by_hand or not asked.by_hand or (asked.gpu_layers or 0) >= len(question.model.spec.layers):
        return False
    check_can_stream(question)
    return by_hand(question) > 0


def check_can_stream(question: Question) -> None:
    """What was asked for by hand is refused where it cannot be done."""
    asked = question.settings.offload
    if question.engine not in (None, "holdfast"):
        raise ConfigurationError(
            f"{asked.flag}: what waits in RAM is planned as Holdfast does it, not for {question.engine}",
            code=CANNOT_STREAM,
            needed="--for holdfast, or none",
            found=f"--for {question.engine}",
            fix="leave --for out; llama.cpp has flags of the same names, and vLLM --cpu-offload-gb",
            field="for",
        )
    if not can_stream(question):
        device = question.machine.devices[0]
        what = "experts cannot wait in RAM" if asked.experts_by_hand else "layers cannot be streamed"
        of_machine = ", whose memory is the machine's" if device.unified else ""
        split, unsupported = _split(question), question.model.spec.unsupported
        needed = "one GPU with memory of its own" + (", and one rank" if split else "")
        found = f"{device.name}{of_machine}{f', with {split}' if split else ''}"
        fix = f"leave {split} out, or {asked.flag}" if split else "leave it out"
        lacking = lacks_engine("holdfast", [device.gpu])
        if lacking is not None:
            needed, found, fix = "a GPU that Holdfast runs on", lacking, "leave it out"
        elif unsupported:
            needed, found = (
                "a model that Holdfast runs",
                f"{question.model.spec.family}: Holdfast cannot run this model",
            )
            found += f" yet: it lacks {', '.join(unsupported)}"
            fix = "leave it out; --for llama.cpp plans which layers llama.cpp keeps in RAM"
        elif len(question.machine.devices) > 1 and not split:
            found = f"{len(question.machine.devices)} x {device.name}"
        raise ConfigurationError(
            f"{asked.flag}: {what} here",
            code=CANNOT_STREAM,
            needed=needed,
            found=found,
            fix=fix,
            field="gpu_layers",
        )


def _split(question: Question) -> str:
    """Flags that divide the model, or the requests, over several ranks."""
    settings = question.settings
    sizes = {
        "-tp": settings.tensor_parallel or 1, "-pp": settings.pipeline_parallel, "-dp": settings.data_parallel
    }  # fmt: skip
    return " ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)


def may_stream(question: Question) -> bool:
    """By itself: where it was not refused, and not said by hand that all layers stay."""
    asked = question.settings.offload
    return not asked.refused and not asked.by_hand and not asked.experts_by_hand and can_stream(question)


def place(question: Question, kv_bytes: int = 0) -> Placement | None:
    """With the fewest layers streamed that leave KV what it shall have, and of these the fewest on the disk; where RAM
    and disk do not hold so many, with less KV. `kv_bytes`: of a pool that was set. None: not even with all layers
    streamed."""
    layers, asked = len(question.model.spec.layers), question.settings.max_model_len

    @cache
    def planned(streamed: int, length: int | None) -> Plan:
        return fit(with_streamed(question, streamed, 0, length))

    roomiest = with_most_room(question, lambda length: planned(layers, length))
    if roomiest is None:
        return None
    most, length = roomiest
    # What is left with all of them streamed bounds how many may stay: few need to be planned.
    left = most.ranks[0].room_bytes - min(most.ranks[0].room_bytes, _pool_bytes(most, kv_bytes))
    room = _held(question, layers) + left
    able = (count for count in range(1, layers + 1) if _held(question, count) <= room)
    streamed = next(count for count in able if leaves_enough(question, planned(count, length), most, kv_bytes))
    if asked is not None and question.settings.max_num_seqs is not None and not kv_bytes:
        counts = range(streamed, layers + 1)
        streamed = for_sequences(counts, lambda count: _moved(question, count), lambda count: planned(count, asked))
    placed = _over_host(planned(streamed, asked))
    # What the pool has beyond what must fit is a preference: it gives way before anything is refused.
    for count in range(streamed - 1, 0, -1):
        plan = planned(count, asked)
        if placed.fits or not leaves_least(question, plan, kv_bytes):
            break
        placed = _over_host(plan)
    return placed


def with_most_room(question: Question, planned: Callable[[int | None], Plan]) -> tuple[Plan, int | None] | None:
    """`planned`: by the context, with as little on the GPU as can be. With as long a one as weights make room for, or
    whatever fits where that does not (None); None: nothing fits."""
    asked = question.settings.max_model_len
    most = planned(asked)
    if not most.fits:
        return None
    wanted = asked or min(question.model.spec.max_position, STREAMED_TOKENS)
    longer = planned(wanted)
    return (longer, wanted) if longer.fits else (most, None)


def leaves_enough(question: Question, plan: Plan, most: Plan, kv_bytes: int) -> bool:
    """Whether the KV pool has what it shall beside weights that do not all stay, or what it has with as little on the
    GPU as can be (`most`), with the same steps. `kv_bytes`: of a pool that was set."""
    pool = min(most.ranks[0].room_bytes, max(_least_pool_bytes(question, plan), _pool_bytes(plan, kv_bytes)))
    return plan.fits and _steps(plan) == _steps(most) and plan.ranks[0].room_bytes >= pool


def leaves_least(question: Question, plan: Plan, kv_bytes: int) -> bool:
    """Whether the KV pool has what was set, and room for one sequence of the context that was, or of one worth serving,
    with whatever steps."""
    return plan.fits and plan.ranks[0].room_bytes >= max(_least_pool_bytes(question, plan), kv_bytes)


def _least_pool_bytes(question: Question, plan: Plan) -> int:
    """Where a context was set, which is not shortened."""
    return 0 if question.settings.max_model_len is None else plan.needed_bytes(plan.ranks[0]) + SPARE_BYTES


def length_to_set(plan: Plan) -> int:
    """The context with which as much stays on the GPU where it is set: one that is set has SPARE_BYTES beside its KV,
    and takes smaller tables than the model's own."""
    question, length = plan.question, plan.limits.max_model_len
    asked = question.settings.offload
    if not question.settings.offloads or question.stated or asked.by_hand or asked.experts_by_hand:
        return length

    def beside(room_bytes: int) -> int:
        return plan.ranks[0].kv.longest(max(0, room_bytes - SPARE_BYTES), length)

    def room(asked: int) -> int:
        # How many layers stay is found before it is known which of the others lie on a disk.
        settings = replace(question.settings, max_model_len=asked, layers_on_disk=0, embedding_on_disk=False)
        return fit(replace(question, settings=settings)).ranks[0].room_bytes

    shortest = beside(plan.ranks[0].room_bytes)
    if shortest < CPU_USEFUL_TOKENS:
        return length
    # Tables of the shortest leave most room: a context for that may lack a little of it, and the next does not.
    return beside(room(beside(room(shortest))))


def for_sequences(counts: Sequence[int], moved: Callable[[int], int], planned: Callable[[int], Plan]) -> int:
    """Which of `counts`, of what does not stay, where the sequences and their length were both set: the one with which
    sequences of that length, side by side, have most tokens a second, unless one of them would be slower by much. Where
    many of them would still not fit, short ones are meant, and it is the first. `moved`: by a step, which takes as
    long as that."""
    least, best, chosen = moved(counts[0]), 0.0, counts[0]
    for count in counts:
        speed = least / moved(count)
        if speed < LEAST_SPEED:
            break
        limits = planned(count).limits
        held = min(limits.max_num_seqs, int(planned(count).concurrency(limits.max_model_len)))
        if held >= LEAST_HELD * limits.max_num_seqs and held * speed > best:
            best, chosen = held * speed, count
    return chosen


def _moved(question: Question, streamed: int) -> int:
    """In every step, which takes as long as that."""
    found = streamed_on_gpu(with_streamed(question, streamed, 0, None))
    assert found is not None
    return found.moved_bytes


def _held(question: Question, streamed: int) -> int:
    """Of VRAM, by layers."""
    found = streamed_on_gpu(with_streamed(question, streamed, 0, None))
    assert found is not None
    return found.resident_bytes + found.slots_bytes


def place_by_hand(question: Question) -> Placement | None:
    """As was asked for, whether or not it fits; None: all layers stay."""
    streamed = by_hand(question)
    if not streamed:
        return None
    return _over_host(fit_by_hand(with_streamed(question, streamed, 0, question.settings.max_model_len)))


def fit_by_hand(question: Question) -> Plan:
    """With what waits in RAM as it was asked for: where no context was, with the longest that this leaves, be it
    shorter than one that is usually worth serving."""
    found = fit(question)
    if found.fits or question.stated:
        return found
    length, flag = found.longest_tokens, question.settings.offload.flag
    # A shorter context needs smaller tables, and smaller tables leave room for other steps: twice is enough.
    for _ in range(2):
        if length < CPU_USEFUL_TOKENS:
            break
        shorter = fit(replace(question, settings=replace(question.settings, max_model_len=length)))
        if shorter.fits:
            reason = f"of the model's {question.model.spec.max_position:,}: the longest that {flag} leaves room for"
            said = Decision("max_model_len", f"{length:,}", reason, "planner", lowered=True)
            return replace(shorter, decisions=(*shorter.decisions, said))
        length = shorter.longest_tokens
    return found


def by_hand(question: Question) -> int:
    """Layers that are to be streamed."""
    asked, layers = question.settings.offload, len(question.model.spec.layers)
    if asked.gpu_layers is not None:
        return max(0, layers - asked.gpu_layers)
    if asked.groups is not None:
        return len(last_of_groups(layers, *asked.groups))
    return _layers_of(question, asked)


def _layers_of(question: Question, asked: OffloadRequest) -> int:
    """The fewest that have so many bytes; all where the model has less."""
    weights = engine_weights(Same(question.model))
    assert weights is not None, "asked of what can_stream says"
    by_layer = weights.by_layer(dtype=compute_dtype(question, 1))
    counts = range(len(by_layer) + 1)
    return next(
        (count for count in counts if streamed_layers(by_layer, count).weights_bytes >= asked.cpu_bytes), counts[-1]
    )


def _steps(plan: Plan) -> tuple[int, int]:
    return plan.limits.max_num_seqs, plan.limits.max_num_batched_tokens


def _pool_bytes(plan: Plan, kv_bytes: int) -> int:
    """What the KV pool shall have beside streamed layers: STREAMED_TOKENS, some for each sequence of a step, no more
    than all of these can use, and all that was set."""
    sequences, longest = plan.limits.max_num_seqs, plan.limits.max_model_len
    each = min(longest, max(STREAMED_SEQUENCE_TOKENS, STREAMED_TOKENS // sequences))
    return max(kv_bytes, int(POOL_SHARE * plan.ranks[0].kv.needed_bytes(sequences, each)))


def pinned_room(question: Question) -> int | None:
    """That layers may take: what a budget leaves, or a share of what is free; None: it is not known what there is."""
    machine, sequences = question.machine, question.settings.max_num_seqs or GPU_SEQUENCES
    if machine.pinned_bytes is not None or machine.ram_bytes is None:
        return machine.pinned_bytes
    return max(0, host_budget(machine.ram_bytes) - beside_layers(question, sequences))


def free_ram_bytes(plan: Plan, weights_bytes: int) -> int:
    """That a machine must have for weights in RAM and the server itself; without a budget, with what stays free too."""
    needed = weights_bytes + beside_layers(plan.question, plan.limits.max_num_seqs)
    return needed if plan.question.machine.pinned_bytes is not None else -int(-needed // HOST_SHARE)


def beside_layers(question: Question, sequences: int) -> int:
    """RAM that a server takes which is not for layers. Behind every adapter on the GPU there is a copy."""
    settings, spec, adapters = question.settings, question.model.spec, 0
    if settings.max_loras:
        dtype, copies = compute_dtype(question, 1), max(settings.lora_copies, settings.max_loras)
        adapters = lora.held_bytes(spec, dtype=dtype, places=copies, max_rank=settings.max_lora_rank)
    return server_bytes(spec, sequences, front_bytes=FRONT_BYTES, adapters_bytes=adapters)


def _embedding_in_rows(question: Question) -> bool:
    weights = engine_weights(Same(question.model))
    return weights is not None and weights.embedding_in_rows(dtype=compute_dtype(question, 1))


def with_streamed(question: Question, streamed: int, on_disk: int, max_model_len: int | None) -> Question:
    settings = replace(question.settings, streamed_layers=streamed, layers_on_disk=on_disk, max_model_len=max_model_len)
    return replace(question, settings=settings)


def with_more_streamed(placed: Placement, more: int) -> Placement:
    """The same with so many layers fewer on the GPU. Not of groups, which say themselves how many."""
    question, count = placed.plan.question, len(placed.streamed.layers) + more
    whole = replace(question, settings=replace(question.settings, embedding_on_disk=False))
    return _over_host(fit(with_streamed(whole, count, 0, question.settings.max_model_len)))


def _over_host(plan: Plan) -> Placement:
    """Of the plan's streamed layers, as few on the disk as RAM does not hold."""
    settings, machine = plan.question.settings, plan.question.machine

    def split(on_disk: int, rows: bool) -> StreamedLayers:
        asked = with_streamed(plan.question, settings.streamed_layers, on_disk, settings.max_model_len)
        found = streamed_on_gpu(replace(asked, settings=replace(asked.settings, embedding_on_disk=rows)))
        assert found is not None
        return found

    on_disk, rows, room = 0, False, pinned_room(plan.question)
    if room is not None and machine.nvme_bytes and split(0, False).pinned_bytes > room:
        rows = _embedding_in_rows(plan.question)
        counts = range(settings.streamed_layers + 1)
        on_disk = next((count for count in counts if split(count, rows).pinned_bytes <= room), counts[-1])
    found = split(on_disk, rows)
    placed = replace(settings, layers_on_disk=on_disk, embedding_on_disk=found.embedding_on_disk)
    question = replace(plan.question, settings=placed)
    return Placement(
        replace(plan, question=question),
        found,
        0 if room is None else max(0, found.pinned_bytes - room),
        max(0, found.file_bytes - (machine.nvme_bytes or 0)),
    )
