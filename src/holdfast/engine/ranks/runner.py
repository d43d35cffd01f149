"""A runner of several ranks: every plan goes to the others first, then this rank computes its share of it."""

from __future__ import annotations

from holdfast.engine.core.loop import StepHandle
from holdfast.engine.ranks import messages
from holdfast.engine.ranks.group import RankGroup
from holdfast.execution.runner import Runner
from holdfast.records import StepPlan, TokenMasks


class RankedRunner:
    def __init__(self, runner: Runner, group: RankGroup) -> None:
        self._runner, self._group = runner, group

    @property
    def pids(self) -> list[int]:
        """Of the other ranks."""
        return self._group.pids

    def submit(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepHandle:
        try:  # From the first byte on: a plan that has reached the others and is not followed here is left by all.
            self._group.send_plan(plan)
            return self._runner.submit(plan, masks)
        except BaseException:
            self._group.interrupt()
            raise

    @property
    def most_blocks(self) -> int:
        return self._runner.most_blocks

    def resize_kv(self, blocks: int) -> None:
        self._runner.resize_kv(blocks)  # First: what it cannot have, the others are not asked for.
        self._group.order(messages.ResizePool(blocks))
        self._group.answers(messages.Done)

    def give_up_reads(self) -> list[int]:
        return []

    def abandon_copies(self) -> None:
        """There are no tiers below the pool here."""

    def close(self) -> None:
        self._group.close()
        self._runner.close()
