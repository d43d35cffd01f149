"""The plan of a server whose model is larger than its GPU: layers wait in pinned RAM, and on a disk where RAM is too
small as well. Refused, with numbers, where that would leave the host without memory.

Owns the host's budget and the words; which layers stay is chosen in `fit.placement`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from holdfast.config import EngineConfig
from holdfast.config.parts.offload import OffloadRequest
from holdfast.config.parts.quantization import MADE_WHILE_LOADING
from holdfast.footprint import lora
from holdfast.hardware import Memory, Processor
from holdfast.observability.decisions import Decision
from holdfast.planner.advice.offload import kv_price
from holdfast.planner.advice.search import first_that_fits
from holdfast.planner.advice.throughput import host_gain, shown_rate, throughput
from holdfast.planner.fit.expert_placement import ExpertPlacement, place_larger, place_larger_by_hand
from holdfast.planner.fit.placement import Placement
from holdfast.planner.fit.result import Plan
from holdfast.planner.serve import refusals
from holdfast.planner.serve.expert_offload import check_experts, expert_decisions, too_few_by_hand
from holdfast.planner.serve.streamed import disk_room
from holdfast.planner.sizing.host_ram import HOST_SHARE, host_budget, server_bytes
from holdfast.units import MIB, counted, format_bytes

DISK_IS_SHORT = "HF115"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShare:
    """RAM and disk beside a GPU, as far as layers may wait there."""

    machine: Memory
    ram_bytes: int | None
    """That tiers may take, as --ram sets it: the server's own processes come on top. None: a share of what is free,
    less these."""
    other_bytes: int
    """Not of tiers: both processes, structured output, copies of adapters."""
    kv_bytes: int
    """Of tiers, but for KV blocks (--kv-ram)."""
    adapters: int
    """Of which there are copies."""
    disk_bytes: int | None
    """None: there is no folder for layers."""
    processor: Processor
    computes: bool
    """It has compiled kernels."""

    @property
    def pinned_bytes(self) -> int:
        """For layers and experts."""
        if self.ram_bytes is not None:
            return max(0, self.ram_bytes - self.kv_bytes)
        return max(0, host_budget(self.machine.available_bytes) - self.other_bytes - self.kv_bytes)

    @property
    def reason(self) -> str:
        free = f"{format_bytes(self.machine.available_bytes)} free ({self.machine.limited_by})"
        adapters = f" and copies of {counted(self.adapters, 'adapter')}" if self.adapters else ""
        own = f"{format_bytes(self.other_bytes)} for the server's own processes{adapters}"
        kv = f"{format_bytes(self.kv_bytes)} for KV blocks" if self.kv_bytes else ""
        if self.ram_bytes is None:
            return f"{HOST_SHARE:g} of {free}, less {own}{f' and {kv}' if kv else ''}"
        return f"{format_bytes(self.ram_bytes)}, as set{f', less {kv}' if kv else ''}; {own} come on top, of {free}"


def host_share(
    machine: Memory, config: EngineConfig, found: Plan, front_bytes: int, *, processor: Processor, computes: bool
) -> HostShare:
    spec, copies = found.question.model.spec, config.lora_copies
    others = server_bytes(
        spec,
        config.sequences,
        front_bytes=front_bytes,
        adapters_bytes=lora.held_bytes(spec, dtype=found.dtype, places=copies, max_rank=config.lora_rank),
        cores=processor.cores,
        structured_output=not config.skip_tokenizer_init,
    )
    if config.ram is not None and config.ram + others > machine.available_bytes:
        raise refusals.tiers_are_not_there(config.ram, others, machine)
    return HostShare(
        machine=machine,
        ram_bytes=config.ram,
        other_bytes=others,
        kv_bytes=config.kv_ram_bytes or 0,
        adapters=copies,
        disk_bytes=None if config.nvme_path is None else disk_room(config.nvme_path, config.nvme),
        processor=processor,
        computes=computes,
    )


def with_offload(found: Plan, config: EngineConfig, host: HostShare) -> Plan:
    """`found` does not fit on its GPU, or layers are to be streamed by hand. What is returned may not fit, where
    streaming layers does not help."""
    asked = found.question.settings.offload
    machine = replace(
        found.question.machine,
        pinned_bytes=host.pinned_bytes,
        nvme_bytes=host.disk_bytes,
        host=host.processor,
        host_computes=host.computes,
    )
    question = replace(found.question, machine=machine)
    by_hand = asked.by_hand or asked.experts_by_hand
    placed = place_larger_by_hand(question) if by_hand else place_larger(question, config.kv_cache_memory_bytes or 0)
    if placed is None:
        return found
    if isinstance(placed, ExpertPlacement):
        check_experts(placed, asked, host.pinned_bytes, host.reason, config.nvme_path)
        said = expert_decisions(placed, host.reason)
    else:
        if not placed.plan.fits:
            raise _too_few_by_hand(placed, asked)
        if not placed.fits:
            raise _host_is_short(placed, host, config)
        said = _decisions(placed, host)
    return replace(placed.plan, decisions=(*placed.plan.decisions, *said))


def _decisions(placed: Placement, host: HostShare) -> Iterator[Decision]:
    streamed, plan = placed.streamed, placed.plan
    layers, asked = len(plan.question.model.spec.layers), plan.question.settings.offload
    value = f"{len(streamed.layers)} of {layers}, {format_bytes(streamed.moved_bytes)}"
    reason, source = "the others stay in VRAM; these are copied to the GPU for every step", "planner"
    if asked.by_hand:
        reason, source = f"{asked.flag}: {reason}", "set"
    else:
        reason = f"{reason}; --no-offload refuses instead"
    yield Decision("streamed_layers", value, reason, source, lowered=True)
    yield Decision("pinned_ram", format_bytes(streamed.pinned_bytes), f"of {host.reason}", "planner", lowered=True)
    if streamed.on_disk:
        on_disk = f"{len(streamed.on_disk)} of {len(streamed.layers)}, {format_bytes(streamed.read_bytes)}"
        reason = "RAM holds the others; these are read from the disk of --nvme-path for every step"
        yield Decision("layers_on_disk", on_disk, reason, "planner", lowered=True)
    if streamed.embedding_on_disk:
        reason = "rows of it are read from the disk of --nvme-path for every step: RAM holds so much more of layers"
        yield Decision("embedding_on_disk", format_bytes(streamed.embedding_bytes), reason, "planner", lowered=True)
    rate = throughput(plan)
    if rate is not None:
        value = f"about {shown_rate(rate.one.estimate.tokens_per_s)} tokens/s of one sequence"
        for tokens, many in rate.side_by_side(plan):
            value += f", {shown_rate(many.estimate.tokens_per_s)} of {many.batch} of {counted(tokens, 'token')}"
        moved = f"{streamed.moved_bytes / 1e9:.1f} GB a step"
        link = plan.device.gpu.host_link.name if plan.device.gpu is not None else "the link"
        reason = f"{moved} over {link}; limited by {rate.one.limited_by}"
        if (gain := host_gain(plan)) > 1:
            reason += f"; with MLPs on the host's cores, {gain:.1f} times as fast for one sequence: a start measures it"
        yield Decision("expected_speed", value, reason, "estimate", lowered=True)
    price = None if asked.by_hand else kv_price(placed)
    if price is not None:
        yield Decision("kv_price", price, "what a larger KV cache costs every step", "estimate", lowered=True)


def alternative(config: EngineConfig, attempt: refusals.Attempt) -> Iterator[Decision]:
    """What would stay on the GPU whole, and how fast that is: the first way of quantizing it while it is loaded."""
    methods = () if config.asked_quantization is not None else MADE_WHILE_LOADING
    whole = {"offload": "false", "nvme_path": None, "nvme": None, "offload_prefetch_step": None}
    changes: list[refusals.SettingsChange] = [{**whole, "quantization": method} for method in methods]
    found = first_that_fits(changes, lambda change: attempt(refusals.changed(config, change)))
    if found is not None:
        change, plan = found
        rate = throughput(plan)
        speed = "" if rate is None else f", about {shown_rate(rate.one.estimate.tokens_per_s)} tokens/s of one sequence"
        value = f"--quantization {change['quantization']}: all layers on the GPU{speed}"
        yield Decision(
            "alternative", value, "less precise weights; nothing would be streamed", "estimate", lowered=True
        )


def _too_few_by_hand(placed: Placement, asked: OffloadRequest) -> refusals.PlanRefusal:
    field, names = "cpu_offload_gb", ["cpu_offload_gb", "offload_backend"]
    if asked.gpu_layers is not None:
        field, names = "gpu_layers", ["gpu_layers"]
    elif asked.groups is not None:
        field = "offload_group_size"
        names = ["offload_group_size", "offload_num_in_group", "offload_backend"]
    stays = f"{placed.resident} of {len(placed.plan.question.model.spec.layers)} layers"
    return too_few_by_hand(placed.plan, asked, stays, dict.fromkeys(names), "fewer layers on the GPU", field)


def _host_is_short(placed: Placement, host: HostShare, config: EngineConfig) -> refusals.PlanRefusal:
    streamed, plan = placed.streamed, placed.plan
    name, gpu, layers = plan.question.model.name, plan.device.name, counted(len(streamed.layers), "layer")
    if placed.ram_short_bytes or config.nvme_path is None:
        no_disk = config.nvme_path is None
        return refusals.PlanRefusal(
            f"{name} does not fit on {gpu}, and RAM does not hold the layers that would wait there: pinned, they would"
            " leave the machine without memory",
            needed=f"{format_bytes(streamed.pinned_bytes)} of pinned RAM for {layers}",
            found=f"{format_bytes(host.pinned_bytes)} ({host.reason}): {format_bytes(placed.ram_short_bytes)} short",
            fix="--nvme-path DIR on a fast disk with room for them" if no_disk else "more RAM, or a quantized model",
            kept="first" if no_disk else None,
            field="nvme_path" if no_disk else "ram",
            code=refusals.RAM_IS_SHORT,
        )
    return refusals.PlanRefusal(
        f"{name} does not fit on {gpu}, and the layers that RAM does not hold do not fit in {config.nvme_path}",
        needed=f"{format_bytes(streamed.file_bytes)} for {counted(len(streamed.on_disk), 'layer')}"
        + (" and the embedding" if streamed.embedding_on_disk else ""),
        found=f"{format_bytes(host.disk_bytes or 0)}: {format_bytes(placed.disk_short_bytes)} short",
        changes=({"nvme": f"{-(-streamed.file_bytes // MIB)}MiB"}, {"nvme": None}) if config.nvme is not None else (),
        fix="--nvme-path on a larger disk, or --device cuda with a larger --ram",
        field="nvme_path",
        code=DISK_IS_SHORT,
    )
