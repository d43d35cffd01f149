"""The planner's answer to a question, whole: whether it fits, what to run, what to beware of and what else there is.

Puts together what the files beside it find out; as JSON it is in json.py, printed in text.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from holdfast.observability.decisions import Decision
from holdfast.planner.advice.presets import max_configuration, safe_configuration, with_margin
from holdfast.planner.advice.remedies import ways_out
from holdfast.planner.advice.remedy import Remedy, too_long
from holdfast.planner.advice.rules_of_thumb import rules_of_thumb
from holdfast.planner.advice.throughput import EXPECTED, NVME_GB_S, no_throughput_reason, shown_rate, throughput
from holdfast.planner.advice.warnings import NO_KV, PlanWarning, faster_without, warnings
from holdfast.planner.compat.vllm_release import Vllm
from holdfast.planner.engines.command import Command
from holdfast.planner.engines.commands import commands, parse_engine
from holdfast.planner.engines.vllm_command import vllm_command
from holdfast.planner.fit.expert_placement import place_larger, place_larger_by_hand, wants_offload
from holdfast.planner.fit.network import GB, network_said
from holdfast.planner.fit.placement import may_stream, pinned_room
from holdfast.planner.fit.search import Plan, Question, Rank, describe_budget, describe_devices, fit
from holdfast.planner.report.findings import PlanFindings
from holdfast.planner.report.json import document
from holdfast.planner.report.llama_layers import llama_layers
from holdfast.planner.report.offload import Offload
from holdfast.planner.report.remedy_commands import RemedyCommands, remedy_commands
from holdfast.planner.report.text import lines
from holdfast.planner.serve.shares.nodes import held_by_each, node_shares
from holdfast.planner.serve.streamed import least_streamed
from holdfast.planner.sizing.host_ram import usual_kv_ram
from holdfast.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanAnswer(PlanFindings):
    """`print(answer)` draws it; `repr` is one line."""

    def to_json(self) -> dict[str, Any]:
        return document(self)

    def __repr__(self) -> str:
        said = "fits" if self.fits else self.problem or f"{format_bytes(self.fit.short_bytes)} short"
        if not self.fits and self.offload is not None:
            said += f"; {self.offload.verdict}"
        return (
            f"<PlanAnswer {self.question.model.name} on {describe_devices(self.question.machine.all_devices)}: {said}>"
        )

    def __str__(self) -> str:
        return "\n".join(lines(self))


def _from_disk(found: Plan) -> str:
    """The disk's share of a step; how long a CPU computes is not planned."""
    assert found.own is not None
    assert found.own.streamed is not None
    nbytes = found.own.streamed.read_bytes
    most = shown_rate(NVME_GB_S * GB * EXPECTED.link / max(1, nbytes))
    read = f"{nbytes / GB:.1f} GB are read for every step, at {NVME_GB_S:g} GB/s (assumed)"
    return f"1 at once: at most about {most} tokens/s, limited by the disk: {read}"


def answer(question: Question, *, engine: str | None = None) -> PlanAnswer:
    """`engine`: whose commands are wanted, as `holdfast plan --for` takes it. An impossible question is refused."""
    name, vllm = (None, Vllm()) if engine is None else parse_engine(engine)
    found, offload = _placed(replace(question, engine=name, vllm=vllm))
    found = held_by_each(found)
    ways = tuple(way for way in ways_out(found) if _is_for(way, name, vllm))
    unreadable = too_long(question)
    from_disk = question.machine.kind == "cpu" and _file_bytes(found) > 0
    rate = None if unreadable or from_disk else throughput(found)
    fits = found.fits and not unreadable
    # Of what runs with layers in RAM that is the plan: what all of it on the GPU would be left with is none.
    served = offload.placement.plan if offload is not None and offload.runs and not unreadable else found
    partly = None if unreadable else llama_layers(found)
    if partly is not None:  # It says itself what the estimate of tiers would.
        ways = tuple(way for way in ways if way.tiers is None)
    remedied = RemedyCommands({}, None) if fits else remedy_commands(found.question, ways, vllm)
    if partly is not None and partly.may_run:
        remedied = RemedyCommands({"llama.cpp": partly.command}, None)
    safe = safe_configuration(found) if fits else None
    printed = commands(found, sequences=found.limits.max_num_seqs, vllm=vllm) if fits else remedied.commands
    if from_disk:  # Nobody else reads them from there.
        printed = {"holdfast": printed["holdfast"]}
    return PlanAnswer(
        fit=found,
        safe=safe,
        max=max_configuration(found) if fits else None,
        warnings=with_margin(_warnings(found, served), found, safe),
        ways_out=ways,
        rules_of_thumb=rules_of_thumb(found),
        throughput=rate,
        no_throughput=None if rate is not None else _from_disk(found) if from_disk else _no_rate(found),
        commands=printed,
        commands_of="plan"
        if fits
        else "tiers"
        if partly is not None and partly.may_run
        else "none"
        if remedied.best is None
        else ways[remedied.best].kind,
        best=remedied.best,
        partly=partly,
        engine=name,
        vllm=vllm,
        as_requested=None if fits or name != "vllm" else _as_requested(found, vllm),
        decisions=(
            *served.decisions,
            *_budgets(found),
            *network_said(found),
            *(_kv_ram(found) if fits and offload is None and name in (None, "holdfast") else ()),
            *_as_the_engine(printed.get(name or ""), vllm),
        ),
        offload=offload,
        disk_would_do=None if fits or unreadable else _disk_would_do(found),
    )


def _placed(question: Question) -> tuple[Plan, Offload | None]:
    """With layers or experts in RAM as was asked for by hand; or without, and what a server would do where that does
    not fit."""
    if wants_offload(question):
        by_hand = place_larger_by_hand(question)
        assert by_hand is not None
        return by_hand.plan, Offload.of(by_hand, faster_without(question, by_hand))
    found = fit(question)
    machine, ours = question.machine, question.engine in (None, "holdfast")
    if not found.fits and ours and machine.kind == "cpu" and machine.nvme_path and not too_long(question):
        streamed = least_streamed(found)
        if streamed is not None and _file_bytes(streamed) <= (machine.nvme_bytes or 0):
            return streamed, None
    placed = None if found.fits or too_long(question) or not may_stream(question) else place_larger(question)
    return found, None if placed is None else Offload.of(placed)


def _disk_would_do(found: Plan) -> str | None:
    question = found.question
    settings, machine = question.settings, question.machine
    alone = max(settings.ranks, settings.stages, settings.nodes, settings.data_parallel) == 1
    if machine.kind != "cpu" or machine.nvme_path or not alone or question.engine not in (None, "holdfast"):
        return None
    streamed = least_streamed(found) if question.runs_on_cpu else None
    if streamed is None or streamed.own is None or streamed.own.streamed is None:
        return None
    layers = f"{len(streamed.own.streamed.on_disk)} of {len(question.model.spec.layers)} layers"
    return f"runs with {layers} read from NVMe, given --nvme-path DIR with {format_bytes(_file_bytes(streamed))} free"


def _file_bytes(found: Plan) -> int:
    """Of layers that are read from a disk for every step, which only this engine does."""
    streamed = None if found.own is None else found.own.streamed
    return 0 if streamed is None else streamed.file_bytes


def _is_for(way: Remedy, engine: str | None, vllm: Vllm) -> bool:
    """Whether the engine that was asked for can run it, be it with a file that has to be made; of tiers that nobody
    runs, each says so itself."""
    return engine is None or way.tiers is not None or not way.commands(vllm)[engine].lacks


def _warnings(found: Plan, served: Plan) -> tuple[PlanWarning, ...]:
    """Of what is served with layers in RAM the pool is not what all of it on the GPU would leave."""
    return tuple(one for one in warnings(found) if served is found or one.code != NO_KV)


def _as_requested(found: Plan, vllm: Vllm) -> Command | None:
    """None: it is not on a GPU, or longer than the model's context."""
    if found.question.machine.kind != "gpu" or too_long(found.question):
        return None
    command = vllm_command(found, found.limits.max_num_seqs, vllm)
    return None if command.kv_tokens is None else command


def _as_the_engine(command: Command | None, vllm: Vllm) -> Iterator[Decision]:
    """How the engine that was asked for would size it, where that is known of its version."""
    if command is None or command.kv_tokens is None:
        return
    value = f"{command.kv_tokens:,} KV tokens, a context of {command.max_model_len:,}"
    why = "; ".join(command.reasons) or "it stores KV as the plan does"
    yield Decision("vllm", value, f"as {vllm.name} sizes it: {why}", "version")


def _no_rate(found: Plan) -> str:
    return "requests are longer than the model's context" if too_long(found.question) else no_throughput_reason(found)


def _kv_ram(found: Plan) -> Iterator[Decision]:
    """RAM that a server of ours would take for KV blocks, if nothing is said of it."""
    left, (rank, *more) = pinned_room(found.question), found.ranks
    chosen = 0 if left is None or more else usual_kv_ram(left, rank.pool_bytes)
    if left is not None and chosen:
        why = f"for KV blocks that leave the GPU: {format_bytes(left)} of RAM are left beside the server"
        yield Decision("kv_ram", format_bytes(chosen), f"{why}; --kv-ram 0: none", "planner")


def _budgets(found: Plan) -> list[Decision]:
    """One for each kind of device, where they are not alike."""
    groups: dict[tuple[str, str], list[Rank]] = {}
    for rank in node_shares(found):
        groups.setdefault((rank.device.name, describe_budget(rank, found.utilization)), []).append(rank)
    decisions = []
    for (name, value), ranks in groups.items():
        device = ranks[0].device
        source = "measured" if device.measured else "catalogue" if device.gpu is not None else "set"
        nodes = found.question.settings.nodes > 1 and device.kind == "cpu"
        each = f" on each of {len(ranks)}{' nodes' if nodes else ''}"
        every = "" if len(ranks) == 1 else each
        decisions.append(Decision("budget", value, f"usable memory of {name}{every}", source))
    return decisions
