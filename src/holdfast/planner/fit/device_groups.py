"""Groups the GPUs of a machine that can hold one model together: same vendor, and either all dedicated or all unified
memory.

    rtx4090, rtx3090, m3-max-36, mi300x  ─►  (rtx4090, rtx3090)  (m3-max-36)  (mi300x)

Groups and compares; counts no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from holdfast.errors import ConfigurationError
from holdfast.footprint.identity_key import Same
from holdfast.observability.decisions import Decision
from holdfast.planner.compat.gpu_kernels import MAKERS
from holdfast.planner.fit.count import sizes
from holdfast.planner.fit.result import Plan, describe_devices
from holdfast.planner.inputs.question import Device, Question
from holdfast.units import counted, format_bytes

NOT_TOGETHER = "HF134"
Planned = Callable[[Question], Plan]


def _kin(device: Device) -> tuple[str, str, bool]:
    """A GPU of no particular kind is counted as NVIDIA's, as its terms are."""
    return device.kind, "nvidia" if device.gpu is None else device.gpu.vendor, device.unified


def _groups(devices: Sequence[Device]) -> list[tuple[Device, ...]]:
    found: dict[tuple[str, str, bool], list[Device]] = {}
    for device in devices:
        found.setdefault(_kin(device), []).append(device)
    return [tuple(group) for group in found.values()]


def apart(question: Question, plan: Planned) -> tuple[Question, ...]:
    """The question once for each kind of GPU that has as many as were asked for, the others set aside; as it is where
    all are of one kind. `plan`: answers another question, so that nothing is advised that does not fit."""
    machine, settings = question.machine, question.settings
    wanted = (settings.tensor_parallel or 1) * settings.pipeline_parallel
    if len({_kin(device) for device in machine.devices}) == 1 or wanted > len(machine.devices):
        return (question,)
    groups = _groups(_numbered(machine.devices))
    able = [group for group in groups if len(group) >= wanted]
    if not able:
        raise ConfigurationError(
            f"{wanted} GPUs are to hold one model, but there are not that many of one kind",
            code=NOT_TOGETHER,
            needed=f"{wanted} GPUs of one vendor, all with dedicated or all with unified memory",
            found=" | ".join(_described(group) for group in groups),
            fix="; or ".join(_fixes(question, groups, wanted, plan))
            or "leave -tp and -pp out: the plan then shows what is missing, and what would fit",
            field="tensor_parallel_size",
        )
    return tuple(
        replace(question, machine=replace(machine, devices=group, aside=(*machine.aside, *_others(group, groups))))
        for group in able
    )


def _numbered(devices: Sequence[Device]) -> list[Device]:
    """With the numbers that a maker's runtime gives them: it sees no GPU of others."""
    found: list[Device] = []
    for device in devices:
        place = sum(_kin(other)[:2] == _kin(device)[:2] for other in found)
        found.append(device if device.selector is not None else replace(device, selector=str(place)))
    return found


def _fixes(question: Question, groups: Sequence[tuple[Device, ...]], wanted: int, plan: Planned) -> Iterator[str]:
    """What fits, of two kinds: the largest split that one kind here can have, and as many GPUs of one kind as were
    asked for."""
    kinds = sorted(groups, key=len, reverse=True)
    for size in reversed(sizes(Same(question.model.spec), len(kinds[0]))):
        settings = replace(question.settings, tensor_parallel=size, pipeline_parallel=1)
        found = _fitting(replace(question, settings=settings), plan)
        if found is not None:
            flags = f"-tp {size}" if question.settings.pipeline_parallel == 1 else f"-tp {size} -pp 1"
            yield f"{flags}, on {describe_devices([rank.device for rank in found.ranks])}"
            break
    for kind in kinds:
        devices = tuple(replace(kind[0], index=index, selector=None) for index in range(wanted))
        more = replace(question, machine=replace(question.machine, devices=devices))
        if kind[0].gpu is not None and _fitting(more, plan) is not None:
            yield f"--gpu {kind[0].gpu.key}x{wanted}"
            break


def _fitting(question: Question, plan: Planned) -> Plan | None:
    try:
        found = plan(question)
    except ConfigurationError:
        return None
    return found if found.fits else None


def _others(group: tuple[Device, ...], groups: Sequence[tuple[Device, ...]]) -> list[Device]:
    return [device for other in groups if other is not group for device in other]


def _described(group: Sequence[Device]) -> str:
    _, maker, unified = _kin(group[0])
    return f"{describe_devices(group)} ({MAKERS[maker]}{', unified memory' if unified else ''})"


def best(found: Sequence[Plan]) -> Plan:
    """Of the same question on each kind of GPU: the one that fits and holds most. Says which were left out, and what
    they would have held."""
    chosen = max(found, key=value)
    others = [one for one in found if one is not chosen]
    tried = {device for one in others for device in one.question.machine.devices}
    few = [group for group in _groups(chosen.question.machine.aside) if group[0] not in tried]
    said = [f"{_described(one.question.machine.devices)}, {_alone(one)}" for one in others]
    said += [f"{_described(group)}, fewer than requested" for group in few]
    together = "GPUs of different vendors, or with and without dedicated memory, cannot hold one model together"
    decision = Decision(
        "gpus", describe_devices(chosen.question.machine.devices), f"{together}; left out: {'; '.join(said)}", "planner"
    )
    return replace(chosen, decisions=(*chosen.decisions, decision))


def value(one: Plan) -> tuple[int, ...]:
    """Of answers to one question, the larger the better."""
    limits = one.limits
    return (
        one.fits,
        one.longest_tokens,
        limits.max_model_len,
        limits.max_num_seqs,
        -one.short_bytes,
        one.kv_tokens,
        -len(one.ranks),
    )


def _alone(one: Plan) -> str:
    if not one.fits:
        return f"where {format_bytes(one.short_bytes)} would be missing"
    return f"where KV would hold {counted(one.kv_tokens, 'token')}"
