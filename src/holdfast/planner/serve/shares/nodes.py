"""Several machines (nodes) for one model: what a plan for all of them means for each, held against what each has.

The plan that is made before anybody is asked takes all nodes to be as large as the head, and divides nothing. When
nodes have joined, `fit_nodes` knows better: the KV pool becomes as large as the node with the least room allows, and a
node that cannot hold its ranks is refused by name before anything is loaded. Knows no sockets and no processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from holdfast.config import EngineConfig
from holdfast.errors import DoesNotFitError
from holdfast.footprint.cpu import BOOK_BYTES
from holdfast.hardware import Memory
from holdfast.observability.decisions import Decision
from holdfast.planner.fit.result import Plan, Rank
from holdfast.planner.serve.refusals import Attempt, PlanRefusal, SettingsChange, cpu_candidates, with_remedies
from holdfast.planner.serve.settle import coming_bytes, longest_context, settle_pool
from holdfast.planner.sizing.terms import Term
from holdfast.units import counted, format_bytes

OF_THE_HEAD = ("front", "logits", "grammars")
OF_EACH_NODE = ("libraries", "exchange")


@dataclass(frozen=True, slots=True)
class NodeMemory:
    free_bytes: int
    name: str = "this machine"
    """For people."""


def all_nodes(machine: Memory, nodes: int) -> Memory:
    """As large as this one, each of them."""
    if nodes == 1:
        return machine
    return replace(
        machine,
        total_bytes=machine.total_bytes * nodes,
        available_bytes=machine.available_bytes * nodes,
        limited_by=f"{machine.limited_by}; {nodes} nodes as large as this one",
    )


def node_terms(plan: Plan, node: int, nodes: int) -> dict[str, int]:
    """What the ranks of a node take, but for the pool."""
    return {name: _part(plan, name, size, node, nodes) for name, size in plan.terms.items() if name != "kv_pool"}


def node_loading(plan: Plan, node: int, nodes: int) -> dict[str, int]:
    """The same at the peak of loading: what a rank reads at a time lies where that rank is."""
    return {term.name: _part(plan, term.name, term.nbytes, node, nodes) for term in plan.ranks[0].loading}


def _part(plan: Plan, name: str, nbytes: int, node: int, nodes: int) -> int:
    """Of a term of all ranks. What no rank has for itself, the first one has."""
    engine, ranks = plan.engine, ranks_of(plan, node, nodes)
    if name == "weights":
        return sum(engine.rank_weights[rank] for rank in ranks)
    if name in OF_EACH_NODE:
        return nbytes
    if name in OF_THE_HEAD:
        return nbytes if node == 0 else 0
    if node > 0:
        return sum(engine.rank_terms[rank].get(name, 0) for rank in ranks)
    return nbytes - sum(terms.get(name, 0) for terms in engine.rank_terms[len(ranks) :])


def ranks_of(plan: Plan, node: int, nodes: int) -> range:
    each = plan.engine.rank_count // nodes
    return range(node * each, (node + 1) * each)


def page_bytes(plan: Plan, node: int, nodes: int) -> int:
    """Of a page, what the ranks of a node hold."""
    return sum(plan.engine.layout_of(rank).page_bytes for rank in ranks_of(plan, node, nodes))


def node_shares(plan: Plan) -> tuple[Rank, ...]:
    """Of several nodes that are all alike, what each holds, as if it were a device of its own; else the plan's own
    ranks."""
    nodes = plan.question.settings.nodes
    if nodes == 1 or plan.own is None:
        return plan.ranks
    return tuple(_share(plan, node, nodes) for node in range(nodes))


def _share(plan: Plan, node: int, nodes: int) -> Rank:
    (rank,), page, own = plan.ranks, page_bytes(plan, node, nodes), plan.engine
    device = replace(
        rank.device,
        index=node,
        total_bytes=rank.device.total_bytes // nodes,
        free_bytes=rank.device.free_bytes // nodes,
        budget_bytes=None if rank.device.budget_bytes is None else rank.device.budget_bytes // nodes,
    )
    sure = {term.name: term.uncertainty for term in rank.terms}
    terms, loading = node_terms(plan, node, nodes), node_loading(plan, node, nodes)
    whole = own.layout.page_bytes
    return replace(
        rank,
        device=device,
        budget_bytes=rank.budget_bytes // nodes,
        terms=tuple(Term(name, size, sure.get(name, 0.0)) for name, size in terms.items() if size),
        loading=tuple(Term(name, size, sure.get(name, 0.0)) for name, size in loading.items() if size),
        kv=replace(
            rank.kv,
            growing_bytes=rank.kv.growing_bytes * page // whole,
            windows=tuple((window, size * page // whole) for window, size in rank.kv.windows),
        ),
        null_bytes=page,
        most_kv_bytes=None if rank.most_kv_bytes is None else rank.most_kv_bytes * page // whole,
        held_bytes=None if rank.held_bytes is None else rank.held_bytes * page // whole,
    )


def held_by_each(plan: Plan) -> Plan:
    """A plan of all nodes together, as each of them can hold its part where all are alike: the first has the API too,
    and layers are not even. One that does not fit where a node cannot: what is short is short of that node."""
    nodes = plan.question.settings.nodes
    if nodes == 1 or plan.own is None:
        return plan
    rooms = [_pages_held(plan, node, one) for node, one in enumerate(node_shares(plan))]
    least = min(range(nodes), key=rooms.__getitem__)
    _, short = shortest_node(plan)
    if short > 0 or not plan.fits:
        longest = min(plan.longest_tokens, longest_context(plan, max(0, rooms[least])))
        return replace(plan, fits=False, short_bytes=short if short > 0 else plan.short_bytes, longest_tokens=longest)
    return plan if rooms[least] >= plan.engine.blocks else _with_pool(plan, rooms[least], least)


def _pages_held(plan: Plan, node: int, share: Rank) -> int:
    books = BOOK_BYTES if node == 0 else 0
    room = share.budget_bytes - sum(term.nbytes for term in share.terms) + plan.engine.blocks * books
    return room // (share.null_bytes + books)


def shortest_node(plan: Plan) -> tuple[int, int]:
    """Which of several that are alike lacks most of what it has to hold, and how many bytes: not positive where none
    does."""
    shorts = [max(plan.needed_bytes(one) - one.left_bytes, one.loading_short_bytes) for one in node_shares(plan)]
    node = max(range(len(shorts)), key=shorts.__getitem__)
    return node, shorts[node]


def _with_pool(plan: Plan, blocks: int, node: int) -> Plan:
    """With the pool that this node can hold its part of."""
    (rank,), page, limits = plan.ranks, plan.engine.layout.page_bytes, plan.limits
    value = f"{format_bytes(blocks * page)} ({counted(blocks - 1, 'block')} and the null page)"
    reason = f"node {node} holds no more; all together would hold {counted(plan.engine.blocks - 1, 'block')}"
    said = (Decision(one.field, value, reason, one.source, lowered=True) if one.field == "kv_pool" else one
            for one in plan.decisions)  # fmt: skip
    length = limits.max_model_len if plan.length_is_set else longest_context(plan, blocks)
    return replace(
        plan,
        own=replace(plan.engine, blocks=blocks, most_blocks=blocks),
        ranks=(replace(rank, most_kv_bytes=(blocks - 1) * page),),
        limits=replace(limits, max_model_len=length),
        longest_tokens=min(plan.longest_tokens, length),
        decisions=tuple(said),
    )


def fit_nodes(plan: Plan, config: EngineConfig, machines: Sequence[NodeMemory]) -> Plan:
    """The plan with a pool that every node can hold, or a NodeRefusal with the node that cannot."""
    nodes, limits = len(machines), plan.limits
    blocks, least = plan.engine.blocks, 0
    for node, machine in enumerate(machines):
        if _loading(plan, node, nodes) > _budget(plan, config, machine, node, nodes):
            raise _does_not_load(plan, config, machine, node, nodes)
        room = _room(plan, config, machine, node, nodes)
        held = max(0, room) // (page_bytes(plan, node, nodes) + (BOOK_BYTES if node == 0 else 0))
        if held < blocks:
            blocks, least = held, node
    length = longest_context(plan, blocks)
    if length == 0 or (length < limits.max_model_len and plan.length_is_set):
        raise _does_not_fit(plan, config, machines[least], least, nodes, length)
    if blocks == plan.engine.blocks:
        return plan
    settled = settle_pool(plan, blocks * plan.engine.layout.page_bytes + plan.reserve_bytes)
    reason = f"node {least} ({machines[least].name}) holds no more; the plan was {counted(plan.engine.blocks, 'block')}"
    known = len(plan.decisions)
    said = tuple(replace(one, reason=reason) if one.field == "kv_pool" else one for one in settled.decisions[known:])
    return replace(settled, decisions=(*plan.decisions, *said))


def available_everywhere(plan: Plan, config: EngineConfig, free: Sequence[int], given_back: Sequence[int]) -> int:
    """After loading, for the pool and what stays free, as if all nodes were one: as much as the node with the least
    room allows. `free`: of each node; `given_back`: what steps will need again."""
    nodes, page, least = len(free), plan.engine.layout.page_bytes, None
    for node, (room, back) in enumerate(zip(free, given_back, strict=True)):
        held = max(0, room - back - _stays_free(plan, config, room, node, nodes)) // page_bytes(plan, node, nodes)
        least = held if least is None else min(least, held)
    assert least is not None
    return least * page + plan.reserve_bytes


def _stays_free(plan: Plan, config: EngineConfig, free_bytes: int, node: int, nodes: int) -> int:
    if config.ram is not None:
        return 0
    if node == 0:
        return plan.reserve_bytes // nodes
    return int(free_bytes * (1 - config.gpu_memory_utilization))


def _room(plan: Plan, config: EngineConfig, machine: NodeMemory, node: int, nodes: int) -> int:
    """For a node's part of the pool, and on the head its books, before anything is loaded."""
    terms = node_terms(plan, node, nodes)
    books = plan.engine.blocks * BOOK_BYTES if node == 0 else 0
    room = machine.free_bytes - _stays_free(plan, config, machine.free_bytes, node, nodes) - _coming(terms, node)
    return books + (room if config.ram is None else min(room, config.ram - sum(terms.values())))


def _coming(terms: Mapping[str, int], node: int) -> int:
    """When nodes join: on the head the API and one rank run, elsewhere no rank does."""
    return coming_bytes(terms) if node == 0 else sum(terms.values())


def _loading(plan: Plan, node: int, nodes: int) -> int:
    return _coming(node_loading(plan, node, nodes), node)


def _budget(plan: Plan, config: EngineConfig, machine: NodeMemory, node: int, nodes: int) -> int:
    """What may be used of a node beside what runs there already."""
    budget = machine.free_bytes - _stays_free(plan, config, machine.free_bytes, node, nodes)
    if config.ram is None:
        return budget
    terms = node_terms(plan, node, nodes)
    return min(budget, config.ram - sum(terms.values()) + _coming(terms, node))


def _named_ranks(plan: Plan, node: int, nodes: int) -> str:
    ranks = ranks_of(plan, node, nodes)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


class NodeRefusal(PlanRefusal):
    """Of one node. Its own change is one that this node, and so every other, would hold."""

    def __init__(
        self,
        message: str,
        node: int,
        machine: NodeMemory,
        *,
        needed: str,
        found: str,
        fix: str,
        changes: Sequence[SettingsChange] = (),
    ) -> None:
        message = f"node {node} ({machine.name}) {message}"
        super().__init__(message, needed=needed, found=found, fix=fix, changes=changes, field="nnodes")
        self.node, self.machine = node, machine


def with_node_remedies(
    refusal: NodeRefusal, plan: Plan, config: EngineConfig, machines: Sequence[NodeMemory], again: Attempt
) -> DoesNotFitError:
    """The refusal with the changes of settings that make every node, with the memory that it has, hold its part.
    `again`: plans with other settings, taking all nodes to be as large as the head."""

    def attempt(tried: EngineConfig) -> Plan:
        return fit_nodes(again(tried), tried, machines)

    least = min(machine.free_bytes for machine in machines)
    machine = Memory(total_bytes=least, available_bytes=least, limited_by="the smallest node")
    position = plan.question.model.spec.max_position
    told = with_remedies(refusal, config, position, attempt, partial(cpu_candidates, machine=machine))
    fix = told.fix
    if fix != refusal.fix:
        where = f"the {format_bytes(refusal.machine.free_bytes)} free on node {refusal.node}"
        fix = f"{fix}, or more nodes, or free memory there: settings are planned for {where}"
    return DoesNotFitError(
        told.message, code=told.code, needed=told.needed, found=told.found, fix=fix, field=refusal.field
    )


def _does_not_load(plan: Plan, config: EngineConfig, machine: NodeMemory, node: int, nodes: int) -> NodeRefusal:
    needed, budget = _loading(plan, node, nodes), _budget(plan, config, machine, node, nodes)
    held = node_loading(plan, node, nodes)
    return NodeRefusal(
        f"cannot hold {_named_ranks(plan, node, nodes)} while they load",
        node,
        machine,
        needed=f"{format_bytes(needed)}: {format_bytes(held['weights'])} of weights, {format_bytes(held['staging'])} of"
        " staging (what is read at a time), and what processes take",
        found=f"{format_bytes(machine.free_bytes)} free there, of which {format_bytes(max(0, budget))} may be used:"
        f" {format_bytes(max(0, needed - budget))} short",
        fix="more nodes, or free memory there",
    )


def _does_not_fit(
    plan: Plan, config: EngineConfig, machine: NodeMemory, node: int, nodes: int, longest: int
) -> NodeRefusal:
    """`longest`: the context that would be held; 0: none."""
    ranks, limits = ranks_of(plan, node, nodes), plan.limits
    length = limits.max_model_len if plan.length_is_set else 1
    pages = 1 + plan.engine.layout.peak_blocks(length, limits.max_num_batched_tokens)
    pool = pages * page_bytes(plan, node, nodes)
    needed = _coming(node_terms(plan, node, nodes), node) + pool
    budget = _budget(plan, config, machine, node, nodes)
    weights = sum(plan.engine.rank_weights[rank] for rank in ranks)
    return NodeRefusal(
        f"cannot hold {_named_ranks(plan, node, nodes)}",
        node,
        machine,
        changes=({"max_model_len": longest},) if longest else (),
        needed=f"{format_bytes(needed)}: {format_bytes(weights)} of weights, {format_bytes(pool)} of KV for a context"
        f" of {length:,}, and what steps take",
        found=f"{format_bytes(machine.free_bytes)} free there, of which {format_bytes(max(0, budget))} may be used:"
        f" {format_bytes(max(0, needed - budget))} short",
        fix="more nodes, a smaller --max-model-len, or free memory there",
    )
