"""Another memory budget for an engine that serves: the same plan with a KV pool of another size."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from holdfast.config import EngineConfig
from holdfast.engine.process import protocol
from holdfast.engine.startup.build import FoundModel, plan_model
from holdfast.engine.startup.plan_lines import concurrency, planned_terms
from holdfast.errors import EngineError, UnsupportedOptionError
from holdfast.hardware import memory
from holdfast.planner import Plan, settle_pool
from holdfast.records import EngineInfo, Failure, MemoryReport
from holdfast.units import counted, format_bytes

log = logging.getLogger("holdfast")

REPLACED = ("budget", "kv_pool")
"""Decisions that another budget makes anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """An engine as it serves, and its process."""

    config: EngineConfig
    model: FoundModel
    plan: Plan
    info: EngineInfo
    pid: int | None


Send = Callable[[protocol.ToEngine], bool]


class MemoryBudget:
    """Of one engine: changed by asking its process for a pool of another size."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[None] | None = None

    async def change(self, now: Serving, tier: str, budget_bytes: int | None, send: Send) -> Serving:
        """How it serves from then on: so does whatever process is started after this one. `send`: False when there is
        no process to be told."""
        refuse_tier(now.info.memory, tier)
        if now.plan.engine.streamed is not None:
            raise UnsupportedOptionError(
                "the memory budget cannot be changed while layers are streamed",
                fix="restart with another --ram or --vram",
                field=tier,
            )
        config, plan = await asyncio.to_thread(with_budget, now, budget_bytes)
        self._answer = asyncio.get_running_loop().create_future()
        if not send(protocol.ResizeKV(plan.engine.blocks)):
            self.died()
        await self._answer
        pool, blocks = format_bytes(plan.terms["kv_pool"]), counted(plan.engine.blocks - 1, "block")
        log.info("memory budget changed to %s: KV pool %s (%s)", format_bytes(plan.budget_bytes), pool, blocks)
        return replace(now, config=config, plan=plan, info=told(now.info, plan))

    def answered(self, failure: Failure | None) -> None:
        """By the process."""
        if self._answer is not None and not self._answer.done():
            if failure is None:
                self._answer.set_result(None)
            else:
                self._answer.set_exception(failure.error())

    def died(self) -> None:
        self.answered(Failure.of(EngineError("the engine process exited before its memory budget was changed")))


def refuse_tier(report: MemoryReport | None, tier: str) -> None:
    """A budget is changed on the tier that holds the KV pool, and not yet on a GPU."""
    if report is None or report.tier != "ram":
        raise UnsupportedOptionError(
            "the memory budget of a GPU cannot be changed while serving",
            fix="restart with --gpu-memory-utilization or --vram",
            field=tier,
        )
    if tier != "ram":
        raise UnsupportedOptionError(
            f"{tier} is not a budget of this server, which runs on the CPU", needed="ram", found=tier, field=tier
        )


def with_budget(now: Serving, ram: int | None) -> tuple[EngineConfig, Plan]:
    """What was loaded stays as it is, and so do the limits that clients were told. `ram`: None: the share of what is
    free that the config has. Raises DoesNotFitError, or ConfigurationError for a budget that is not there."""
    config, plan, info = now.config, now.plan, now.info
    wanted = replace(config, ram=ram, kv_cache_memory_bytes=None if ram is not None else config.kv_cache_memory_bytes)
    held = replace(
        wanted,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        expand_weights="always" if plan.engine.expand_weights else "never",
        # Layers that are in memory stay there.
        nvme_path=None,
        nvme=None,
    )
    front_bytes = plan.question.settings.front_bytes
    found = plan_model(held, now.model, front_bytes=front_bytes, kernels=plan.engine.compiled, engine_pid=now.pid)
    return wanted, _with_measured(found, info.memory)


def _with_measured(plan: Plan, report: MemoryReport | None) -> Plan:
    """What terms took beyond their plan, all in all, is taken from the pool."""
    terms = [] if report is None else report.terms
    measured = {term.term: term.measured_bytes for term in terms if term.measured_bytes and term.term != "kv_pool"}
    over = sum(measured.values()) - sum(plan.terms.get(name, 0) for name in measured)
    return plan if over <= 0 else settle_pool(plan, memory().total_bytes, measured)


def told(info: EngineInfo, plan: Plan) -> EngineInfo:
    """What the engine says of itself with this plan's budget and pool."""
    report = info.memory
    assert report is not None
    measured = {term.term: term.measured_bytes for term in report.terms}
    terms = [msgspec.structs.replace(term, measured_bytes=measured.get(term.term)) for term in planned_terms(plan)]
    last = {decision.field: decision for decision in plan.decisions if decision.field in REPLACED}

    def kept(lines: Sequence[str]) -> list[str]:
        return [line for line in lines if line.partition(" = ")[0] not in REPLACED]

    return msgspec.structs.replace(
        info,
        blocks=plan.engine.blocks - 1,
        kv_pool_bytes=plan.terms["kv_pool"],
        max_concurrency=concurrency(plan),
        decisions=[
            *(decision.line() for decision in plan.decisions if decision.field in REPLACED),
            *kept(info.decisions),
        ],
        lowered=[*kept(info.lowered), *(decision.line() for decision in last.values() if decision.lowered)],
        memory=msgspec.structs.replace(report, budget_bytes=plan.budget_bytes, terms=terms),
    )
