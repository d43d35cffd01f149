"""Of an answer, what a model would be served with that does not fit on its GPU: what lives where, what every step
moves, how fast that is. Works out nothing that the placement does not say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.planner.advice.expert_offload import experts_price
from holdfast.planner.advice.offload import kv_price
from holdfast.planner.advice.throughput import NVME_GB_S, DecodeRate, Throughput, host_gain, shown_rate, throughput
from holdfast.planner.engines.command import Command
from holdfast.planner.engines.commands import commands
from holdfast.planner.fit.expert_placement import ExpertPlacement
from holdfast.planner.fit.placement import Placement, pinned_room
from holdfast.planner.report.expert_offload import (
    expert_document,
    expert_tier_lines,
    other_way_lines,
    ram_needed,
    what_is_where,
)
from holdfast.planner.report.wrapping import wrapped
from holdfast.units import counted, format_bytes


@dataclass(frozen=True, slots=True)
class Offload:
    placement: Placement | ExpertPlacement
    throughput: Throughput | None
    """None: the rates of the GPU are not known, or it does not run."""
    faster: str | None = None
    """Of what was asked for by hand: what is faster; None: nothing that is known."""

    @staticmethod
    def of(placement: Placement | ExpertPlacement, faster: str | None = None) -> Offload:
        return Offload(placement, throughput(placement.plan) if placement.fits else None, faster)

    @property
    def known(self) -> bool:
        """What RAM there is."""
        return pinned_room(self.placement.plan.question) is not None

    @property
    def runs(self) -> bool:
        return self.known and self.placement.fits

    @property
    def may_run(self) -> bool:
        """With RAM enough, where it is not known what there is."""
        return self.placement.fits

    @property
    def price(self) -> str | None:
        placed = self.placement
        return experts_price(placed) if isinstance(placed, ExpertPlacement) else kv_price(placed)

    @property
    def host_gain(self) -> float | None:
        """How many times as fast one sequence is because the host's cores compute MLPs of dense layers; None: they
        compute none, or nothing is known of them."""
        placed = self.placement
        gain = 1.0 if isinstance(placed, ExpertPlacement) or not placed.fits else host_gain(placed.plan)
        return gain if gain > 1 else None

    @property
    def title(self) -> str:
        return f"With {'experts' if isinstance(self.placement, ExpertPlacement) else 'layers'} in RAM"

    @property
    def command(self) -> Command:
        plan = self.placement.plan
        return commands(plan, sequences=plan.limits.max_num_seqs)["holdfast"]

    @property
    def verdict(self) -> str:
        """Behind `does not fit on the GPU`, for people."""
        return self.verdict_naming("--nvme SIZE")

    def verdict_naming(self, disk: str) -> str:
        """`disk`: the flag that names one, which of a plan is another than of a server."""
        placed = self.placement
        what, stays, disk_short = _what(placed), _stays(placed), 0
        if not isinstance(placed, ExpertPlacement):
            disk_short = placed.disk_short_bytes
        if not placed.plan.fits:
            return f"with {placed.plan.question.settings.offload.flag}, {stays} would stay"
        if not self.known:
            return f"runs with {what}, given {format_bytes(placed.free_ram_bytes)} of free RAM"
        if placed.ram_short_bytes:
            more = "" if placed.plan.question.machine.nvme_bytes else f"; {disk} names a disk for the others"
            return f"RAM is {format_bytes(placed.ram_short_bytes)} short for {what}{more}"
        if disk_short:
            return f"the disk is {format_bytes(disk_short)} short for {what}"
        return f"runs with {what}"


def _what(placed: Placement | ExpertPlacement) -> str:
    """Is where, for people."""
    if isinstance(placed, ExpertPlacement):
        return what_is_where(placed)
    what = f"{len(placed.streamed.layers)} of {len(placed.plan.question.model.spec.layers)} layers streamed from RAM"
    return f"{what} and {len(placed.streamed.on_disk)} of these from NVMe" if placed.streamed.on_disk else what


def _stays(placed: Placement | ExpertPlacement) -> str:
    if isinstance(placed, ExpertPlacement):
        return f"{placed.resident_experts:,} of {placed.all_experts:,} experts"
    return f"{placed.resident} of {len(placed.plan.question.model.spec.layers)} layers"


def offload_lines(offload: Offload, width: int) -> Iterator[str]:
    for line in (*_tiers(offload), *_rates(offload)):
        yield from wrapped(line, width, "  ", "        ")


def _tiers(offload: Offload) -> Iterator[str]:
    placed = offload.placement
    if isinstance(placed, ExpertPlacement):
        yield from expert_tier_lines(placed)
        return
    plan, streamed, rank = placed.plan, placed.streamed, placed.plan.ranks[0]
    terms = {term.name: format_bytes(term.nbytes) for term in rank.terms}
    others = sum(term.nbytes for term in rank.terms if term.name not in ("weights", "layer_slots"))
    of_layers = f"{placed.resident} of {len(plan.question.model.spec.layers)} layers"
    yield (
        f"VRAM  {of_layers} with what is of no layer, {terms['weights']}; {counted(streamed.slots, 'slot')},"
        f" {terms['layer_slots']}; KV {format_bytes(rank.pool_bytes)}, a context of {plan.limits.max_model_len:,}; the"
        f" rest {format_bytes(others)}"
    )
    known = pinned_room(plan.question)
    room = "" if known is None else f" of {format_bytes(known)} that layers may take"
    there = streamed.embedding_on_disk
    embedding = " and the embedding" if streamed.embedding_bytes and not there else ""
    pinned = f"{counted(len(streamed.in_ram), 'layer')}{embedding}, {format_bytes(streamed.pinned_bytes)} pinned{room}"
    yield f"RAM   {pinned}; {ram_needed(placed)}"
    if streamed.file_bytes:
        size, on_disk = format_bytes(streamed.file_bytes), counted(len(streamed.on_disk), "layer")
        beside = " and the embedding, of which rows are read" if there else ""
        yield f"NVMe  {on_disk}{beside}, {size}, read at {NVME_GB_S:g} GB/s (assumed)"
    gpu = plan.device.gpu
    link = "the link to the host" if gpu is None else f"{gpu.host_link.name}, {gpu.host_link.gb_s:g} GB/s stated"
    yield f"every step moves {streamed.moved_bytes / 1e9:.1f} GB over {link}"


def _rates(offload: Offload) -> Iterator[str]:
    placed, rate = offload.placement, offload.throughput
    of_experts = isinstance(placed, ExpertPlacement)
    rates: Iterable[tuple[int, DecodeRate]] = ()
    if rate is not None:
        rates = ((0, one) for one in rate.batches) if of_experts else ((0, rate.one), *rate.side_by_side(placed.plan))
    for tokens, decode in rates:
        one = decode.estimate
        shown, low, high = map(shown_rate, (one.tokens_per_s, one.low, one.high))
        each = f" of {counted(tokens, 'token')} each" if tokens else ""
        said = f"{decode.batch:,} at once{each}: about {shown} tokens/s ({low} to {high})"
        yield f"{said}, limited by {decode.limited_by}"
    if (gain := offload.host_gain) is not None:
        yield (
            f"1 at once, with MLPs on the host's cores as a start measures them: {gain:.1f} times as fast as without;"
            " counted above"
        )
    if offload.faster is not None:
        yield offload.faster
    if isinstance(placed, ExpertPlacement):
        if rate is not None:
            shown = shown_rate(rate.prefill.tokens_per_s)
            yield f"prompts: about {shown} tokens/s, limited by {rate.prefill_limited_by}"
        if placed.fits:
            yield from other_way_lines(placed)
    else:
        yield from _experts(placed, faster=offload.faster is not None)
    if offload.price is not None:
        yield f"price of KV: {offload.price}"


def _experts(placed: Placement, *, faster: bool) -> Iterator[str]:
    """Of a mixture of experts, what streaming whole layers costs it. `faster`: what helps was said."""
    spec = placed.plan.question.model.spec
    routed = [spec.layers[layer].experts for layer in placed.streamed.layers]
    kind = next((experts for experts in routed if experts is not None), None)
    if kind is not None:
        helps = "" if faster else ": with RAM for the experts alone, or weights in fewer bits, it is faster"
        yield (
            f"all experts of a streamed layer are moved, though a token uses {kind.per_token} of {kind.count}{helps}"
        )


def offload_document(offload: Offload | None, rates: Any) -> dict[str, Any] | None:
    """`rates`: writes a Throughput."""
    if offload is None:
        return None
    placed = offload.placement
    plan, rank = placed.plan, placed.plan.ranks[0]
    gpu = plan.device.gpu
    return {
        "runs": offload.runs if offload.known else None,
        "layers": len(plan.question.model.spec.layers),
        **_placement_document(placed),
        "vram": {**{term.name: term.nbytes for term in rank.terms}, "kv_pool": rank.pool_bytes},
        "pinned_limit_bytes": pinned_room(plan.question),
        "ram_short_bytes": placed.ram_short_bytes,
        "free_ram_needed_bytes": placed.free_ram_bytes,
        "link": None if gpu is None else {"name": gpu.host_link.name, "gb_s": gpu.host_link.gb_s},
        "max_model_len": plan.limits.max_model_len,
        "max_num_seqs": plan.limits.max_num_seqs,
        "max_num_batched_tokens": plan.limits.max_num_batched_tokens,
        "kv_tokens": plan.kv_tokens,
        "kv_price": offload.price,
        "host_gain": offload.host_gain,
        "throughput": rates(offload.throughput),
        "command": offload.command.text,
    }


def _placement_document(placed: Placement | ExpertPlacement) -> dict[str, Any]:
    layers = len(placed.plan.question.model.spec.layers)
    if isinstance(placed, ExpertPlacement):
        return {
            "resident_layers": layers,
            "streamed_layers": [],
            "layers_on_disk": [],
            "experts": expert_document(placed),
            "pinned_bytes": placed.places.pinned_bytes + placed.exchange_bytes,
            "nvme_bytes": 0,
            "nvme_short_bytes": 0,
            "moved_bytes_per_step": placed.places.moved_bytes,
            "read_bytes_per_step": 0,
        }
    streamed = placed.streamed
    return {
        "resident_layers": placed.resident,
        "streamed_layers": list(streamed.layers),
        "layers_on_disk": list(streamed.on_disk),
        "experts": None,
        "pinned_bytes": streamed.pinned_bytes,
        "nvme_bytes": streamed.file_bytes,
        "nvme_short_bytes": placed.disk_short_bytes,
        "moved_bytes_per_step": streamed.moved_bytes,
        "read_bytes_per_step": streamed.read_bytes,
    }
