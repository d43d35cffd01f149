"""A model larger than its GPU: what stays, what waits in RAM and is moved every step, and how fast that can be.

    GPU  [ terms but weights | copy slots | head | layers that stay | KV ]      RAM  [ embedding | layers that stream ]
    NVMe [ layers that RAM does not hold either ]
    moved a step = weights read + KV in use - what the GPU has left for them
    step = max(moved / link, what of it comes from NVMe / its rate, compute)

`placed_tiers`: as this engine places it, to the byte. `place`: of what it does not run or not stream, physics only, in
bytes instead of whole layers; whether an engine can do it is said where it is offered.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.planner.advice.throughput import (
    EXPECTED,
    HIGH,
    LOW,
    NVME_GB_S,
    Efficiency,
    Estimate,
    stage_reads,
    step_seconds,
    throughput,
    usual_context,
)
from holdfast.planner.fit.network import GB
from holdfast.planner.fit.placement import STREAMED_TOKENS, Placement, with_more_streamed
from holdfast.planner.fit.search import Plan
from holdfast.planner.sizing.sharded_weights import layer_bytes, rank_bytes, weights_of
from holdfast.units import counted, format_bytes

COPY_SLOTS = 3
"""Layers on their way to the GPU while others compute."""
RAM_SHARE = 0.9
"""Of the free RAM; the rest stays with the system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    layers: int
    resident_layers: int
    gpu_bytes: int
    """Held on the fullest GPU."""
    ram_bytes: int
    """Held in RAM, by all ranks together."""
    nvme_bytes: int
    """Held on disk, and read every step."""
    moved_bytes: int
    """Over the link of one GPU, every step of `batch` sequences."""
    batch: int
    one: Estimate | None
    """Tokens/s of one stream; None: the link is not known."""
    at_batch: Estimate | None


def placed_tiers(placed: Placement) -> Tiers:
    plan, streamed = placed.plan, placed.streamed
    rank, rate = plan.ranks[0], throughput(placed.plan)
    return Tiers(
        layers=len(plan.question.model.spec.layers),
        resident_layers=placed.resident,
        gpu_bytes=sum(term.nbytes for term in rank.terms) + rank.pool_bytes,
        ram_bytes=streamed.pinned_bytes,
        nvme_bytes=streamed.file_bytes,
        moved_bytes=streamed.moved_bytes,
        batch=1 if rate is None else rate.largest.batch,
        one=None if rate is None else rate.one.estimate,
        at_batch=None if rate is None or rate.largest.batch == 1 else rate.largest.estimate,
    )


def kv_price(placed: Placement) -> str | None:
    """What as much KV again as the default would cost, or what RAM and disk lack for it, for people; None: no layer is
    left that could make room."""
    plan, streamed = placed.plan, placed.streamed
    tokens = min(STREAMED_TOKENS, plan.question.model.spec.max_position)
    more = -(-plan.ranks[0].kv.needed_bytes(1, tokens) // max(1, streamed.place_bytes))
    if more > placed.resident:
        return None
    said = f"{counted(tokens, 'token')} more of KV: {counted(more, 'more layer')} streamed"
    moved = f"{said}, {more * streamed.waiting_bytes / streamed.moved_bytes:.0%} more bytes a step"
    if plan.question.settings.offload.groups is not None:
        return moved
    after = with_more_streamed(placed, more)
    if after.ram_short_bytes:
        return f"{said}, for which RAM is {format_bytes(after.ram_short_bytes)} short"
    if after.disk_short_bytes:
        return f"{said}, for which the disk is {format_bytes(after.disk_short_bytes)} short"
    return _price_of_disk(placed, after, said) or moved


def _price_of_disk(placed: Placement, after: Placement, said: str) -> str | None:
    """None: RAM holds these layers too, or it is not known how fast a step is with them."""
    from_disk = len(after.streamed.on_disk) - len(placed.streamed.on_disk)
    if from_disk <= 0 or not after.fits:
        return None
    rates = [throughput(one.plan) for one in (placed, after)]
    if rates[0] is None or rates[1] is None:
        return None
    share = 1 - rates[1].one.estimate.tokens_per_s / rates[0].one.estimate.tokens_per_s
    return f"{said}, {from_disk} of them from NVMe: {share:.0%} fewer tokens/s of one sequence"


def place(fit: Plan) -> Tiers | None:
    """None: not even the parts that must stay fit, or RAM and disk do not hold the rest, or there is no GPU beside
    it."""
    if fit.question.machine.kind != "gpu" or fit.pipeline_parallel > 1 or fit.question.machine.devices[0].unified:
        return None
    spec, rank = fit.question.model.spec, min(fit.ranks, key=lambda one: one.budget_bytes)
    weights = weights_of(fit.question.model, dtype=fit.weights_as)
    held = layer_bytes(weights, spec, tensor_parallel=fit.tensor_parallel)
    of_layer = [held.get(layer, 0) for layer in range(len(spec.layers))]
    looked_up = [weight for weight in weights if weight.tensor is not None and weight.tensor.name == "embed"]
    # Tied, it is the head as well and stays on the GPU.
    embedding = 0 if spec.tied_embeddings else rank_bytes(looked_up, spec, tensor_parallel=fit.tensor_parallel)
    head = held.get(None, 0) - embedding
    # A layer on its way takes longer than its launches: nothing is gained by capturing graphs.
    others = sum(term.nbytes for term in rank.terms if term.name not in ("weights", "graphs"))
    slots = COPY_SLOTS * max(of_layer)
    kv = fit.needed_bytes(rank)
    usable = rank.budget_bytes - others - slots - head
    if usable < 0:
        return None
    excess = max(0, sum(of_layer) + kv - usable)
    ram = (excess + embedding) * fit.tensor_parallel
    known = fit.question.machine.ram_bytes
    disk = 0 if known is None else max(0, ram - int(known * RAM_SHARE))
    if disk > min(fit.question.machine.nvme_bytes or 0, excess * fit.tensor_parallel):
        return None
    ram -= disk
    average = sum(of_layer) / len(of_layer)
    resident = max(0, min(len(of_layer), int((usable - kv) / average))) if excess else len(of_layer)
    met = stage_reads(
        fit, [weight for weight in weights if weight.tensor is not None and weight.tensor.layer is not None]
    )

    def moved(batch: int) -> int:
        """Of experts only those that the step's tokens are sent to."""
        return int(excess * met.bytes_for(batch) / sum(of_layer))

    def rate(batch: int) -> Estimate | None:
        # One disk serves all ranks; what lies on it is read as often as what lies in RAM.
        return _rate(fit, moved(batch), moved(batch) * disk // max(1, excess), batch)

    return Tiers(
        layers=len(of_layer),
        resident_layers=resident,
        gpu_bytes=others + slots + head + min(usable, sum(of_layer) + kv),
        ram_bytes=ram,
        nvme_bytes=disk,
        moved_bytes=moved(fit.required_sequences),
        batch=fit.required_sequences,
        one=rate(1),
        at_batch=rate(fit.required_sequences) if fit.required_sequences > 1 else None,
    )


def _rate(fit: Plan, moved: int, from_disk: int, batch: int) -> Estimate | None:
    gpu = fit.ranks[0].device.gpu
    if gpu is None or gpu.host_link.gb_s <= 0:
        return None
    link = gpu.host_link.gb_s * GB

    def rate(efficiency: Efficiency) -> float:
        computing = step_seconds(fit, batch, usual_context(fit), efficiency) or 0.0
        reading = from_disk / (NVME_GB_S * GB * efficiency.link)
        return batch / max(moved / (link * efficiency.link), reading, computing)

    return Estimate(rate(EXPECTED), rate(LOW), rate(HIGH))
