"""A runner's pages in tiers below its pool: who moves them, if there are such tiers. Decides nothing, and launches no
steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

from holdfast.execution.gpu.launched_step import GpuStep
from holdfast.execution.tiers.gpu import GpuPageCopies
from holdfast.records import StepPlan


class PageTiers(ABC):
    _page_copies: GpuPageCopies | None = None
    host_pages: Callable[[], int]
    host_settled: Callable[[], bool]

    @abstractmethod
    def _here(self) -> AbstractContextManager[None]: ...

    @abstractmethod
    def _send_beside_pages(self) -> None:
        """What steps say and are told goes past the copy engines from now on, which may be busy with pages."""

    def use_tiers(self, copies: GpuPageCopies) -> None:
        """What moves pages between the pool and tiers below it; before the first step that asks for it."""
        with self._here():
            self._send_beside_pages()
        self._page_copies, self.host_pages, self.host_settled = copies, copies.host_pages, copies.host_settled

    def _launch_stores(self, plan: StepPlan, step: GpuStep) -> None:
        """After the rows of the plan are launched; its result will tell of pages."""
        if self._page_copies is not None:
            self._page_copies.launch_stores(plan)
            step.over, step.host_pages = self._copies_over, self._page_copies.host_pages
            step.loading_s = self._page_copies.loading_s

    def _copies_over(self, wait: bool) -> tuple[list[int], list[int]]:
        with self._here():
            return ([], []) if self._page_copies is None else self._page_copies.over(wait)

    def give_up_reads(self) -> list[int]:
        """Of pages that come from a disk: nobody waits for it. Returns copies that will never be over."""
        return [] if self._page_copies is None else self._page_copies.give_up_reads()

    def abandon_copies(self) -> None:
        """Pages on their way between tiers are nobody's from now on."""
        with self._here():
            if self._page_copies is not None:
                self._page_copies.abandon()
