"""What the arbiter of a GPU's memory says: the price of KV in place of layers, and why a budget is not there. Counts
nothing."""

from __future__ import annotations

import logging

from holdfast.errors import DoesNotFitError
from holdfast.records import VramGrant
from holdfast.units import counted, format_bytes

log = logging.getLogger("holdfast")


def say_price(before: VramGrant, after: VramGrant, said: str, link_bytes_per_s: float) -> None:
    if before.layers is None or after.layers is None:
        return
    layers = counted(abs(len(after.layers.streamed) - len(before.layers.streamed)), "layer")
    moved = after.layers.moved_bytes - before.layers.moved_bytes
    speed = ""
    if link_bytes_per_s and before.layers.moved_bytes and after.layers.moved_bytes:
        first, last = (link_bytes_per_s / one.layers.moved_bytes for one in (before, after) if one.layers is not None)
        speed = f", at most {first:.2f} and now {last:.2f} steps/s"
    log.info(
        "%s %s a KV pool of %s (%s before): %+.2f GB a step%s",
        layers,
        said,
        format_bytes(after.kv_bytes),
        format_bytes(before.kv_bytes),
        moved / 1e9,
        speed,
    )


def say_no_graphs(needed_bytes: int, budget_bytes: int) -> None:
    log.info(
        "steps are launched without CUDA graphs: these may take %s, which a budget of %s does not have beside all "
        "layers and one sequence; POST /memory with more vram gives them room",
        format_bytes(needed_bytes),
        format_bytes(budget_bytes),
    )


def not_there(budget: int, own: int, free: int) -> DoesNotFitError:
    return DoesNotFitError(
        f"a budget of {format_bytes(budget)} was requested, but less is free on the GPU",
        needed=format_bytes(budget),
        found=f"{format_bytes(own)} that this engine holds, and {format_bytes(free)} free",
        fix="POST /memory with less, or stop other processes that use this GPU (see nvidia-smi)",
        field="vram",
    )
