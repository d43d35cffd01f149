"""A mixture of experts larger than its GPU: how many experts of every layer stay in VRAM, which the others wait in RAM
for, and whether RAM has them once more for the host's cores.

    VRAM  [ terms | all that is of no expert | experts that stay, as many of each layer | slots | KV pool ]
    RAM   [ experts that wait, pinned | all experts as the cores compute with them, if that fits too | exchange ]

Where RAM does not hold the experts that wait, whole layers are placed instead, which may be on a disk (`placement`).
Chooses numbers of experts; what each takes is counted by `fit` and `footprint.expert_places`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from holdfast.errors import ConfigurationError
from holdfast.footprint.cpu import ELEMENT_BYTES
from holdfast.footprint.expert_places import HOST_ACTIVATIONS, ExpertPlaces, exchange_layout
from holdfast.footprint.experts import kinds
from holdfast.footprint.identity_key import Same
from holdfast.planner.fit.count import experts_on_gpu
from holdfast.planner.fit.placement import (
    CANNOT_STREAM,
    Placement,
    check_can_stream,
    fit_by_hand,
    for_sequences,
    free_ram_bytes,
    leaves_enough,
    leaves_least,
    pinned_room,
    place,
    place_by_hand,
    wants_streaming,
    with_most_room,
)
from holdfast.planner.fit.result import Plan
from holdfast.planner.fit.search import fit
from holdfast.planner.inputs.expert_layers import check_expert_layers, expert_layers, moe_layers
from holdfast.planner.inputs.question import Question
from holdfast.planner.sizing.engine_weights import engine_weights
from holdfast.planner.sizing.host_cores import host_is_sooner
from holdfast.planner.sizing.kv_cost import largest
from holdfast.units import counted, format_bytes


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    plan: Plan
    """With experts in RAM; whether RAM holds those is said by the other."""
    places: ExpertPlaces
    exchange_bytes: int
    """Of pinned RAM, between the GPU and the host's cores."""
    ram_short_bytes: int = 0
    """What RAM lacks for experts that wait; 0: nothing, or it is not known what there is."""
    idle_reason: str = ""
    """Why the host's cores compute none, for people; empty: they do."""
    copy_short_bytes: int = 0
    """What RAM lacks for the copy that they would compute with; 0: nothing, or there is another reason."""

    @property
    def fits(self) -> bool:
        return self.plan.fits and self.ram_short_bytes == 0

    @property
    def ram_bytes(self) -> int:
        return ram_bytes(self.places, self.exchange_bytes)

    @property
    def free_ram_bytes(self) -> int:
        return free_ram_bytes(self.plan, self.ram_bytes)

    @property
    def resident_experts(self) -> int:
        """Of all layers with experts."""
        every = self.places.experts * len(moe_layers(self.plan.question.model.spec))
        return every - sum(self.places.waiting)

    @property
    def all_experts(self) -> int:
        return self.places.experts * len(moe_layers(self.plan.question.model.spec))


def ram_bytes(places: ExpertPlaces, exchange_bytes: int) -> int:
    """All that experts take there: pinned, the host's own, and the exchange."""
    return places.pinned_bytes + places.host_bytes + exchange_bytes


def exchange_bytes(plan: Plan, places: ExpertPlaces) -> int:
    """0: the host computes nothing."""
    if not places.host_sizes:
        return 0
    spec = plan.question.model.spec
    return exchange_layout(spec, places, plan.limits.max_num_seqs, ELEMENT_BYTES[plan.dtype]).nbytes


def wants_offload(question: Question) -> bool:
    """By hand, layers or experts, whether or not all would fit."""
    return wants_streaming(question) or _wants_experts(question)


def _wants_experts(question: Question) -> bool:
    asked = question.settings.offload
    if not asked.experts_by_hand:
        return False
    check_expert_layers(asked, question.model.spec)
    check_can_stream(question)
    if _in_order(question):
        raise ConfigurationError(
            f"{asked.flag}: experts in act-order stay with their layer",
            code=CANNOT_STREAM,
            needed="experts that take their inputs as they come, as with desc_act false",
            found="a checkpoint with desc_act",
            fix="leave it out: whole layers wait in RAM then",
            field="gpu_layers",
        )
    return len(expert_layers(asked, question.model.spec)) > 0


def place_larger(question: Question, kv_bytes: int = 0) -> Placement | ExpertPlacement | None:
    """Of a model that does not fit: experts in RAM where that does, else whole layers. `kv_bytes`: of a pool that was
    set. None: it does not fit in any way."""
    experts = _place_experts(question, kv_bytes) if _can_place(question) else None
    if experts is None or (not experts.fits and question.machine.nvme_bytes):
        return place(question, kv_bytes)
    return experts


def place_larger_by_hand(question: Question) -> Placement | ExpertPlacement | None:
    """As was asked for, whether or not it fits; None: all stays on the GPU."""
    if not _wants_experts(question):
        return place_by_hand(question)
    return _over_host(fit_by_hand(_with_experts(question, None, question.settings.max_model_len)))


def _can_place(question: Question) -> bool:
    """Asked of what `can_stream`: layers with experts have equally many, of one kind, which take their inputs as they
    come."""
    return len(kinds(question.model.spec)) == 1 and not _in_order(question)


def _in_order(question: Question) -> bool:
    """An order of inputs lies with its expert, and inputs are put into it for resident and waiting ones at once."""
    weights = engine_weights(Same(question.model))
    return weights is not None and weights.experts_in_order


def _place_experts(question: Question, kv_bytes: int) -> ExpertPlacement | None:
    """With the most experts on the GPU that leave KV what it shall have, evenly; where RAM does not hold the others,
    with less KV. None: not even with none there."""
    (kind,), layers = kinds(question.model.spec), len(moe_layers(question.model.spec))
    asked = question.settings.max_model_len

    @cache
    def planned(resident: int, length: int | None) -> Plan:
        return fit(_with_experts(question, resident, length))

    roomiest = with_most_room(question, lambda length: planned(0, length))
    if roomiest is None:
        return None
    most, length = roomiest

    def enough(resident: int) -> bool:
        if not leaves_enough(question, planned(resident, length), most, kv_bytes):
            return False
        # Where no context was set, tables for the model's own make the pool a little smaller.
        plan = planned(resident, asked)
        return plan.ranks[0].room_bytes >= kv_bytes and (length is None or plan.limits.max_model_len >= length)

    # One more of every layer makes slots smaller too: these first, then those that not every layer has.
    each = largest(0, kind.count - 1, lambda count: enough(count * layers))
    resident = each * layers
    if asked is not None and question.settings.max_num_seqs is not None and not kv_bytes:
        counts = range(kind.count - each, kind.count + 1)
        waiting = for_sequences(
            counts,
            lambda count: _moved(question, (kind.count - count) * layers),
            lambda count: planned((kind.count - count) * layers, asked),
        )
        resident = (kind.count - waiting) * layers
    if resident == each * layers:
        resident += largest(0, layers - 1, lambda more: enough(resident + more))
    placed = _over_host(planned(resident, asked))
    if placed.fits:
        return placed
    # What the pool has beyond what must fit is a preference: it gives way before anything is refused.
    most_more = kind.count * layers - 1 - resident
    able = largest(0, most_more, lambda more: leaves_least(question, planned(resident + more, asked), kv_bytes))
    too_few = largest(0, able, lambda more: not _over_host(planned(resident + more, asked)).fits)
    return _over_host(planned(resident + min(able, too_few + 1), asked))


def _moved(question: Question, resident: int) -> int:
    found = experts_on_gpu(_with_experts(question, resident, None))
    assert found is not None
    return found.moved_bytes


def _with_experts(question: Question, resident: int | None, max_model_len: int | None) -> Question:
    settings = replace(question.settings, resident_experts=resident, experts_wait=True, max_model_len=max_model_len)
    return replace(question, settings=settings)


def _over_host(plan: Plan) -> ExpertPlacement:
    """With the experts once more for the host's cores, where they compute sooner and RAM has room for them."""
    room, waiting = pinned_room(plan.question), experts_on_gpu(plan.question)
    assert waiting is not None
    idle, copy_short = _idle_reason(plan), 0
    if not idle:
        computing = _with_host(plan)
        copy_short = 0 if room is None else max(0, computing.ram_bytes - room)
        if not copy_short:
            return computing
        copy = format_bytes(computing.places.host_bytes)
        idle = f"RAM is {format_bytes(copy_short)} short for a second copy of {copy}"
    short = 0 if room is None else max(0, waiting.pinned_bytes - room)
    return ExpertPlacement(plan, waiting, 0, short, idle, copy_short)


def _idle_reason(plan: Plan) -> str:
    """Why the host's cores compute no experts, be there RAM enough; empty: they may."""
    question, weights, gpu = plan.question, engine_weights(Same(plan.question.model)), plan.device.gpu
    assert weights is not None
    host = question.machine.host
    if not question.settings.offload.cpu_compute:
        return "--cpu-compute off"
    if not question.machine.host_computes:
        return "this installation has no compiled kernels for this CPU"
    if weights.host_expert_sizes() is None:
        return f"compiled kernels do not read experts in {weights.format or plan.dtype}"
    if question.model.spec.activation not in HOST_ACTIVATIONS:
        return f"compiled kernels have no {question.model.spec.activation}"
    if host is not None and gpu is not None and not host_is_sooner(host, gpu.host_link.gb_s):
        return f"{counted(host.cores, 'core')} would take longer than the GPU over {gpu.host_link.name}"
    return ""


def _with_host(plan: Plan) -> ExpertPlacement:
    plan = replace(plan, question=replace(plan.question, settings=replace(plan.question.settings, host_experts=True)))
    places = experts_on_gpu(plan.question)
    assert places is not None
    return ExpertPlacement(plan, places, exchange_bytes(plan, places))
