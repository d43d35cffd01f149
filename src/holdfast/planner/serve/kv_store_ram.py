"""What a store of KV pages on disk takes of the RAM beside a GPU, part by part, or a refusal where there is none for
it. Its size on the disk is not looked at here."""

from __future__ import annotations

from dataclasses import replace

from holdfast.config import EngineConfig
from holdfast.errors import DoesNotFitError
from holdfast.footprint import lora
from holdfast.footprint.cpu import KV_INDEX_BYTES, KV_STORE_USUAL_BYTES, kv_store_terms
from holdfast.hardware import Memory
from holdfast.observability.decisions import Decision
from holdfast.planner.fit.expert_placement import exchange_bytes, ram_bytes
from holdfast.planner.fit.result import Plan
from holdfast.planner.sizing.host_ram import host_budget, server_bytes
from holdfast.units import GIB, format_bytes


def store_terms(config: EngineConfig, page_bytes: int) -> dict[str, int]:
    """Of a store that is full, beside a GPU: its pages pass through pinned buffers each way. Nothing: there is none."""
    if config.kv_store is None:
        return {}
    return kv_store_terms(config.kv_store_size or KV_STORE_USUAL_BYTES, page_bytes, ways=2)


def with_kv_store(plan: Plan, config: EngineConfig, machine: Memory, front_bytes: int) -> Plan:
    """`machine`: without anything of this server yet."""
    page = plan.engine.layout.page_bytes
    terms = store_terms(config, page)
    if not terms:
        return plan
    others = _others(plan, config, front_bytes)
    # --ram is what tiers may take; this is on top, as the server's processes are.
    free = host_budget(machine.available_bytes) if config.ram is None else machine.available_bytes
    room, wanted = free - others, sum(terms.values())
    if wanted > room:
        left = room - (wanted - terms["index"])
        smaller = max(0, left) // KV_INDEX_BYTES * page // GIB
        raise DoesNotFitError(
            "RAM has no room for the buffers and the index of the KV store",
            needed=f"{format_bytes(wanted)} ({_parts(terms)}) beside {format_bytes(others)} of the server",
            found=f"{format_bytes(machine.available_bytes)} free ({machine.limited_by})",
            fix=f"--kv-store-size {smaller}GiB" if smaller else "leave --kv-store out, or stop what else takes RAM",
            field="kv_store_size" if smaller else "kv_store",
        )
    decision = Decision("kv_store_ram", format_bytes(wanted), f"host RAM of the KV store: {_parts(terms)}", "planner")
    return replace(plan, decisions=(*plan.decisions, decision))


def _others(plan: Plan, config: EngineConfig, front_bytes: int) -> int:
    """Of RAM: processes, structured output, adapters, weights that wait there, and KV pages."""
    spec, places, streamed = plan.question.model.spec, plan.engine.expert_places, plan.engine.streamed
    adapters = lora.held_bytes(spec, dtype=plan.dtype, places=config.lora_copies, max_rank=config.lora_rank)
    pinned = 0 if streamed is None else streamed.pinned_bytes
    pinned += 0 if places is None else ram_bytes(places, exchange_bytes(plan, places))
    server = server_bytes(
        spec,
        plan.limits.max_num_seqs,
        front_bytes=front_bytes,
        adapters_bytes=adapters if config.lora_copies else 0,
        structured_output=not config.skip_tokenizer_init,
    )
    return server + pinned + plan.engine.kv_ram_bytes


def _parts(terms: dict[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in terms.items())
