"""What a server on a GPU takes of the host's RAM besides layers: structured output, KV pages, copies of adapters. What
was set is refused, with numbers, where there is no room for it; what was not set takes a modest share of what is left.
"""

from __future__ import annotations

import os
from dataclasses import replace

from holdfast.config import EngineConfig
from holdfast.errors import DoesNotFitError
from holdfast.footprint import lora
from holdfast.footprint.gpu import node_lines_bytes
from holdfast.footprint.streamed import ENTRY_BYTES, PAGE_BYTES, TABLE_BYTES, page_tables_bytes
from holdfast.footprint.structured_output import FEW_CORES, forms_bytes
from holdfast.hardware import Memory
from holdfast.models.stages import rank_spec
from holdfast.observability.decisions import Decision
from holdfast.planner.fit.expert_placement import exchange_bytes, ram_bytes
from holdfast.planner.fit.result import Plan
from holdfast.planner.sizing.host_ram import HOST_ENGINE_BYTES, KV_RAM_POOLS, KV_RAM_SHARE, host_budget, usual_kv_ram
from holdfast.planner.sizing.terms import Term
from holdfast.units import counted, format_bytes


def with_host_memory(plan: Plan, config: EngineConfig, machine: Memory, front_bytes: int) -> Plan:
    """The plan with what structured output, KV blocks and copies of adapters take of host RAM, or a refusal where there
    is none for them. `front_bytes`: of the process in front of the engine's; 0: the engine is in a process of its
    user's, where nothing is pinned that was not asked for."""
    spec, forms = plan.question.model.spec, 0
    if not config.skip_tokenizer_init:
        forms = forms_bytes(spec.vocab_size, plan.limits.max_num_seqs, os.cpu_count() or FEW_CORES)
        said = "maximum host RAM for structured output; a request whose grammar does not fit waits"
        decision = Decision("structured_outputs", format_bytes(forms), said, "planner")
        plan = replace(plan, decisions=(*plan.decisions, decision))
    lines = _node_lines_bytes(plan, config)
    if lines:
        plan = _with_node_lines(plan, machine, lines, front_bytes + forms)
    pinned = _pinned_bytes(plan) + lines
    others = front_bytes + forms + pinned
    one = _one_adapter_bytes(plan, config) if config.lora_copies else 0
    room, beside = _room(config, machine, others, pinned)
    plan = _with_kv_ram(plan, config, machine, room, beside, config.lora_copies * one, default=front_bytes > 0)
    others += plan.engine.kv_ram_bytes
    return _with_adapters(plan, config, machine, one, others) if config.lora_copies else plan


def _one_adapter_bytes(plan: Plan, config: EngineConfig) -> int:
    """A copy of it: each rank has one of its part. Of several nodes, on the one whose ranks have most."""
    spec, engine, each = plan.question.model.spec, plan.engine, plan.engine.rank_count // config.nnodes
    parts = (rank_spec(spec, *engine.part_of(rank)) for rank in range(engine.rank_count))
    held = [lora.held_bytes(own, dtype=plan.dtype, places=1, max_rank=config.lora_rank) for own in parts]
    return max(sum(held[first : first + each]) for first in range(0, len(held), each))


def _room(config: EngineConfig, machine: Memory, others: int, pinned: int) -> tuple[int, str]:
    """Of RAM for KV blocks, and beside what. `pinned`: of layers and experts, which --ram is for as well."""
    free = host_budget(machine.available_bytes) if config.ram is None else machine.available_bytes
    room = free - HOST_ENGINE_BYTES - others
    if config.ram is not None and config.ram - pinned < room:
        return config.ram - pinned, f"of --ram {format_bytes(config.ram)}"
    return room, "beside the server and what else is pinned" if pinned else "beside the server"


def _node_lines_bytes(plan: Plan, config: EngineConfig) -> int:
    engine = plan.engine
    return node_lines_bytes(engine.stream_bytes, engine.answer_bytes, plan.tensor_parallel, config.nnodes)


def _with_node_lines(plan: Plan, machine: Memory, lines: int, others: int) -> Plan:
    if others + HOST_ENGINE_BYTES + lines > machine.available_bytes:
        raise DoesNotFitError(
            "what stages hand on to one another through RAM does not fit there",
            needed=f"{format_bytes(lines)}, pinned, beside {format_bytes(others + HOST_ENGINE_BYTES)} of the server",
            found=f"{format_bytes(machine.available_bytes)} free ({machine.limited_by})",
            fix="a smaller --max-num-batched-tokens",
            field="max_num_batched_tokens",
        )
    said = "host RAM of each node through which stages hand on to one another; pinned while it serves"
    return replace(plan, decisions=(*plan.decisions, Decision("node_lines", format_bytes(lines), said, "planner")))


def _pinned_bytes(plan: Plan) -> int:
    """Of layers and experts in RAM."""
    places, streamed = plan.engine.expert_places, plan.engine.streamed
    pinned = 0 if streamed is None else streamed.pinned_bytes
    return pinned + (0 if places is None else ram_bytes(places, exchange_bytes(plan, places)))


def _with_adapters(plan: Plan, config: EngineConfig, machine: Memory, one: int, others: int) -> Plan:
    free, asked = max(0, machine.available_bytes - others), config.lora_copies * one
    if asked > free:
        fewer = free // one
        raise DoesNotFitError(
            f"{counted(config.lora_copies, 'adapter')} of rank {config.lora_rank} do not fit in host RAM, where copies"
            " of them are kept",
            needed=f"{format_bytes(asked)}, {format_bytes(one)} each, and {format_bytes(others)} for the API server,"
            " structured output, and layers, experts or KV blocks in RAM",
            found=f"{format_bytes(machine.available_bytes)} free ({machine.limited_by})",
            fix=f"--max-cpu-loras {fewer}"
            if fewer >= config.lora_places
            else "fewer --max-loras, or a smaller --max-lora-rank",
            field="max_cpu_loras",
        )
    where = "host RAM" if config.nnodes == 1 else "host RAM of the node with most"
    said = f"{where} for {counted(config.lora_copies, 'adapter')}, {format_bytes(one)} each"
    return replace(plan, decisions=(*plan.decisions, Decision("max_cpu_loras", format_bytes(asked), said, "planner")))


def _with_kv_ram(
    plan: Plan, config: EngineConfig, machine: Memory, room: int, beside: str, adapters_bytes: int, *, default: bool
) -> Plan:
    """Pinned memory cannot be swapped out: no more of it than leaves the machine its share. `room`: of RAM for it."""
    asked, page = config.kv_ram_bytes, plan.engine.layout.page_bytes
    if asked is None:
        return _with_usual_kv_ram(plan, config, room - adapters_bytes) if default else plan
    if not asked:
        return plan
    if not page <= asked <= room:
        raise DoesNotFitError(
            "there is not so much RAM for KV blocks",
            needed=f"{format_bytes(asked)}, pinned; one block has {format_bytes(page)}",
            found=f"{format_bytes(machine.available_bytes)} free ({machine.limited_by}), of which "
            f"{format_bytes(max(0, room))} are left {beside}",
            fix=f"--kv-ram {max(0, room) >> 30}GiB" if room >> 30 else "leave --kv-ram out",
            field="kv_ram",
        )
    said = f"KV blocks that leave the GPU, as set; {asked // page:,} of them, pinned while the server serves"
    return _counted(plan, asked, Decision("kv_ram", format_bytes(asked), said, "set"))


def _with_usual_kv_ram(plan: Plan, config: EngineConfig, left_bytes: int) -> Plan:
    """`left_bytes`: of RAM, beside all that is planned of it."""
    streamed, page, pool = plan.engine.streamed, plan.engine.layout.page_bytes, plan.terms["kv_pool"]
    if streamed is not None and not streamed.on_disk and config.cpu_compute == "auto":
        left_bytes -= streamed.pinned_bytes  # The host's cores may have a copy of what they compute.
    chosen = min(usual_kv_ram(left_bytes, pool), _most_by_tables(plan))
    if chosen < page:
        said = f"{format_bytes(max(0, left_bytes))} of RAM are left beside the server: KV blocks that leave the GPU go"
        return replace(plan, decisions=(*plan.decisions, Decision("kv_ram", "none", said, "measured")))
    share = f"{KV_RAM_SHARE:g} of {format_bytes(left_bytes)} of RAM that are left beside the server"
    why = share if chosen < KV_RAM_POOLS * pool else f"{KV_RAM_POOLS} times the KV pool, less than {share}"
    said = f"{why}, for {chosen // page:,} KV blocks that leave the GPU; pinned while it serves; --kv-ram 0: none"
    return _counted(plan, chosen, Decision("kv_ram", format_bytes(chosen), said, "measured"))


def _spare_bytes(plan: Plan) -> int:
    """Of VRAM: what is unused, and what the pool has beyond one sequence of full length."""
    engine, limits = plan.engine, plan.limits
    least = 1 + engine.layout.peak_blocks(limits.max_model_len, limits.max_num_batched_tokens)
    unused = max(0, plan.budget_bytes - sum(plan.terms.values()))
    return unused + max(0, engine.blocks - least) * engine.layout.page_bytes


def _most_by_tables(plan: Plan) -> int:
    """So much may be pinned that the GPU's page tables for it leave a sequence of full length its room."""
    return max(0, _spare_bytes(plan) - 2 * TABLE_BYTES) // ENTRY_BYTES * PAGE_BYTES


def _counted(plan: Plan, kv_ram_bytes: int, decision: Decision) -> Plan:
    """With the tables by which the GPU finds it, as far as the pool can spare them: what else is lacking is said when
    it is measured."""
    (rank,), engine = plan.ranks, plan.engine
    before = {term.name: term.nbytes for term in rank.terms}.get("page_tables", 0)
    pinned = 0 if engine.streamed is None else engine.streamed.pinned_bytes
    pinned += 0 if engine.expert_places is None else engine.expert_places.pinned_bytes
    more = min(page_tables_bytes(pinned + kv_ram_bytes) - before, _spare_bytes(plan))
    unused = max(0, plan.budget_bytes - sum(plan.terms.values()))
    blocks = engine.blocks + -max(0, more - unused) // engine.layout.page_bytes
    terms = (*(term for term in rank.terms if term.name != "page_tables"), Term("page_tables", before + more))
    return replace(
        plan,
        ranks=(replace(rank, terms=terms),),
        own=replace(engine, kv_ram_bytes=kv_ram_bytes, blocks=blocks, most_blocks=max(blocks, engine.most_blocks)),
        decisions=(*plan.decisions, decision),
    )
