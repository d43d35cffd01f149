"""From a config to the engine of a front, with one process or several: plans of each, and who starts what. No torch."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

from holdfast.config import EngineConfig
from holdfast.engine.data_parallel.engine import DataParallelEngine
from holdfast.engine.data_parallel.router import ROUTER_BYTES
from holdfast.engine.process.client import ProcessEngine
from holdfast.engine.requests.front_parts import FrontParts
from holdfast.engine.startup.build import FoundModel, Progress, plan_model
from holdfast.engine.startup.plan_lines import log_plan
from holdfast.engine.startup.prespawn import EarlyProcess
from holdfast.hardware import processor
from holdfast.planner import Plan
from holdfast.planner.serve.shares.engines import threads_share
from holdfast.text.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("holdfast")

QUEUED = 1 << 20
"""Of one engine behind a front that has several: the front's own limit is the one that counts."""


def plan_engines(
    config: EngineConfig, model: FoundModel, *, front_bytes: int, engine_pids: Collection[int] = ()
) -> list[Plan]:
    """One for each engine, before anything is loaded. The front's memory is counted once, over all of them."""
    count = config.data_parallel_size
    front_bytes += ROUTER_BYTES if count > 1 else 0
    plans = [
        plan_model(_own_config(config, number), model, front_bytes=front_bytes, engine_pids=engine_pids, number=number)
        for number in range(count)
    ]
    if count > 1:
        log.info("%d engines, each with the whole model; the memory plan is of one of them", count)
    log_plan(model.files.name, plans[0])
    return plans


def open_engine(
    config: EngineConfig,
    model: FoundModel,
    tokenizer: Tokenizer | None,
    plans: Sequence[Plan],
    *,
    on_progress: Progress,
    early: EarlyProcess | None = None,
) -> ProcessEngine | DataParallelEngine:
    """Nothing is started yet. `early`: a process that waits already; the first engine takes it over."""
    if len(plans) == 1:
        return ProcessEngine(config, model, tokenizer, plan=plans[0], on_progress=on_progress, early=early)
    parts = FrontParts.of(config, tokenizer, model.spec)
    progress = _AllProgress(on_progress, len(plans))
    engines = [
        ProcessEngine(
            replace(_own_config(config, number), max_queued_requests=QUEUED),
            model,
            tokenizer,
            plan=plan,
            on_progress=progress.of(number),
            early=early if number == 0 else None,
            parts=parts.lent(number),
        )
        for number, plan in enumerate(plans)
    ]
    return DataParallelEngine(config, engines, parts)


def _own_config(config: EngineConfig, number: int) -> EngineConfig:
    """Of one engine. On a CPU it has its own part of the cores."""
    if config.data_parallel_size == 1 or config.device != "cpu":
        return config
    return replace(config, threads=threads_share(config, processor().cores, number))


class _AllProgress:
    """Of engines that load at the same time: one bar, over the tensors of all; ready when all are."""

    def __init__(self, shown: Progress, count: int) -> None:
        self._shown = shown
        self._at: list[tuple[str, int, int]] = [("", 0, 0)] * count

    def of(self, number: int) -> Progress:
        def progress(stage: str, done: int, total: int) -> None:
            self._at[number] = (stage, done, total)
            same = [one for one in self._at if one[0] == stage]
            if stage != "ready":
                self._shown(stage, sum(one[1] for one in same), sum(one[2] for one in same))
            elif len(same) == len(self._at):
                self._shown("ready", 0, 0)

        return progress
