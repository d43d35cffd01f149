"""Where LoRA adapters lie: places on the device that steps compute from, copies in RAM behind them, files behind those.

    on a GPU   files ──read──► copies (LRU) ──piece by piece, a few each step──► places [places, elements]
    on a CPU   files ──read───────────────────────────────────────────────────► places ◄──► copies (LRU)

Everything is allocated at the start. Which adapter goes to which place is decided by the scheduler; it asks for one
before anybody starts with it, and is told when it is there. Threads of their own do the reading and, on a CPU, the
copying; steps go on meanwhile, because nobody computes with a place that was asked for. The books are the caller's
thread's alone.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass

import torch

from holdfast.checkpoints.lora.adapter import READ_LIMIT_S, too_slow
from holdfast.config import EngineConfig
from holdfast.errors import EngineError, HoldfastError
from holdfast.execution.lora.bounded_reads import Read, Readers
from holdfast.execution.lora.files import AdapterFiles, Changes
from holdfast.execution.lora.products import SiteFactors
from holdfast.execution.lora.upload import PlaceSender
from holdfast.execution.memory import exact_tensor
from holdfast.footprint.lora import copy_rows
from holdfast.models import ModelSpec
from holdfast.records.lora import AdapterRef
from holdfast.records.outputs import Failure
from holdfast.records.steps import AdapterArrival, AdapterFetch, StepPlan

log = logging.getLogger("holdfast")

READERS = 2
"""Threads: files that come slowly hold up one of them."""
FLAG_WORDS = 4
"""Kernels are compiled anew for pointers that are aligned otherwise."""
ARRIVAL_WAIT_S = 0.005
"""For an adapter, where a step has nothing else to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLimits:
    max_loras: int
    """Places: adapters in one step."""
    max_rank: int
    cached: int
    """Copies in RAM: on a GPU of all that come, on a CPU of those that are in no place."""
    elsewhere: bool = False
    """On another node than the head, which looks at adapters: its files are this node's own."""

    @staticmethod
    def of(config: EngineConfig) -> LoraLimits | None:
        if not config.lora_places:
            return None
        return LoraLimits(
            max_loras=config.lora_places,
            max_rank=config.lora_rank,
            cached=config.lora_copies,
            elsewhere=config.node_rank > 0,
        )


@dataclass(slots=True, eq=False)
class _Fetch:
    """An adapter on its way to a place."""

    place: int
    ref: AdapterRef
    work: Read[Changes | None] | None = None
    """Of a thread; what it changes is told where it was read."""
    row: int | None = None
    """On a GPU: of its copy."""
    touched: frozenset[int] = frozenset()
    """On a CPU: rows of copies that are read or written."""
    sent: int = 0
    """Numbers that are on their way to the device, or there."""
    wanted: bool = True
    """Not where its place was asked for anew, after an engine dropped all of its requests."""


class AdapterPlaces:
    """`places` [places, elements] never moves: kernels and graphs may keep its address. `whole`: the model, where
    `spec` is one rank's part of it."""

    def __init__(
        self,
        spec: ModelSpec,
        limits: LoraLimits,
        dtype: torch.dtype,
        device: torch.device,
        whole: ModelSpec | None = None,
    ) -> None:
        self.limits, self._device = limits, device
        self._files = AdapterFiles(spec, limits.max_rank, dtype, whole, elsewhere=limits.elsewhere)
        self.places = exact_tensor((limits.max_loras, self._files.elements), dtype, device).zero_()
        rows = copy_rows(limits.cached, on_cpu=self._on_cpu)
        self._copies = exact_tensor((rows, self._files.elements), dtype, torch.device("cpu")).zero_()
        self._sender = None if self._on_cpu else PlaceSender(self._copies, self.places)
        self._held: list[AdapterRef | None] = [None] * limits.max_loras
        self._cached: OrderedDict[AdapterRef, int] = OrderedDict()
        self._free = list(range(rows))
        self._fetches: list[_Fetch] = []
        self._readers = Readers[Changes | None](READERS, "adapter")
        self._changes: dict[AdapterRef, Changes] = {}
        """Of each adapter here."""
        views = self._files.views(self.places)
        self._flags = torch.zeros((limits.max_loras, len(views) * FLAG_WORDS), dtype=torch.int32, device=device)
        """[place, words of all sites]: whether the adapter changes each."""
        self._factors = {
            (site.layer, site.product): SiteFactors(a, b, site.rows, set(), self._flags[:, index * FLAG_WORDS])
            for index, (site, a, b) in enumerate(views)
        }

    @property
    def _on_cpu(self) -> bool:
        return self._device.type == "cpu"

    @property
    def nbytes(self) -> int:
        """On the device."""
        return self.places.nbytes + (self._copies.nbytes if self._on_cpu else 0)

    @property
    def held(self) -> tuple[AdapterRef | None, ...]:
        return tuple(self._held)

    @property
    def cached(self) -> tuple[AdapterRef, ...]:
        """Copies in RAM, the least recently used first."""
        return tuple(self._cached)

    def factors(self) -> dict[tuple[int, str], SiteFactors]:
        """Views of the places, by layer and product."""
        return self._factors

    def profile_run(self, on: bool) -> None:
        """While it is on, products are computed as if every place changed them."""
        self._flags.fill_(int(on))
        for factors in self._factors.values():
            factors.used.clear()
            factors.used.update(range(self.limits.max_loras) if on else ())

    def close(self) -> None:
        for fetch in self._fetches:
            if fetch.work is not None:
                fetch.work.cancel()
        self._readers.close()
        if self._sender is not None:
            self._sender.close()

    def follow(self, plan: StepPlan) -> list[AdapterArrival]:
        """Before the plan's rows are computed: begins what it asks for, goes on with what was asked for, and says what
        is there since the last time. Waits a little only where there are no rows."""
        for start in plan.starts:
            if start.adapter is not None and self._held[start.adapter_place] != start.adapter:
                raise EngineError(f"request {start.request_id} was started before its LoRA adapter was there")
        for asked in plan.fetches:
            self._begin(asked)
        if not self._fetches:
            return []
        found = self._advance()
        if found or plan.rows:
            return found
        reading = [fetch.work for fetch in self._fetches if fetch.work is not None]
        if reading:
            wait(reading, ARRIVAL_WAIT_S, FIRST_COMPLETED)
        elif self._sender is not None:
            self._sender.wait()
        return self._advance()

    def _begin(self, asked: AdapterFetch) -> None:
        for before in self._fetches:
            if before.place == asked.place:
                before.wanted = False
        fetch = _Fetch(asked.place, asked.adapter)
        self._fetches.append(fetch)
        here = self._held[asked.place] == asked.adapter
        if self._on_cpu and not here:
            self._exchange(fetch)
        elif here:
            fetch.sent = self._files.elements
        if not here:
            self._held[asked.place] = None
            if self._sender is not None:
                self._sender.follow_steps()

    # --- on a CPU ---

    def _exchange(self, fetch: _Fetch) -> None:
        """Where places are in RAM themselves, a copy is of what is in none of them. There is always a row to spare, and
        what is in the place goes there first. Rows change hands here before a thread has done with them: who comes to
        such a row waits for those who came before."""
        before, row, kept = self._held[fetch.place], self._cached.pop(fetch.ref, None), None
        if self.limits.cached and before is not None and before not in self._cached:
            kept = self._free.pop()
            self._cached[before] = kept
        if row is not None:
            self._free.append(row)
        elif len(self._cached) > self.limits.cached:
            self._free.append(self._cached.popitem(last=False)[1])
        fetch.touched = frozenset(one for one in (row, kept) if one is not None)
        after = [
            other.work
            for other in self._fetches
            if other.work is not None and (other.place == fetch.place or other.touched & fetch.touched)
        ]
        place, ref = fetch.place, fetch.ref
        fetch.work = self._readers.submit(lambda read: self._change_places(read, place, ref, row, kept, after))

    def _change_places(
        self,
        read: Read[Changes | None],
        place: int,
        ref: AdapterRef,
        row: int | None,
        kept: int | None,
        after: list[Read[Changes | None]],
    ) -> Changes | None:
        wait(after)  # All of them began before.
        with torch.inference_mode():
            if kept is not None:
                self._copies[kept].copy_(self.places[place])
            if row is None:
                read.begin()
                return self._files.read(ref, self.places[place], read.writing)
            self.places[place].copy_(self._copies[row])
            return None

    # --- on a GPU ---

    def _find_copy(self, fetch: _Fetch) -> None:
        """Its copy, or a row that it is read into: the least recently used one's where all are taken. None where all
        of them are on their way to places."""
        row = self._cached.get(fetch.ref)
        if row is not None:
            self._cached.move_to_end(fetch.ref)
            fetch.row = row
            return
        if any(other.ref == fetch.ref and other.work is not None for other in self._fetches):
            return  # It is read already, for a place that is not wanted any more.
        if not self._free:
            leaving = {other.row for other in self._fetches}
            oldest = next((ref for ref, row in self._cached.items() if row not in leaving), None)
            if oldest is None:
                return
            self._free.append(self._cached.pop(oldest))
        fetch.row = row = self._free.pop()
        fetch.work = self._readers.submit(lambda read: self._read_copy(read, fetch.ref, row))

    def _read_copy(self, read: Read[Changes | None], ref: AdapterRef, row: int) -> Changes | None:
        read.begin()
        return self._files.read(ref, self._copies[row], read.writing)

    # --- both ---

    def _advance(self) -> list[AdapterArrival]:
        """What is there or has failed since the last time. Pieces for one place at a time, as many as a step bears."""
        found, sending = list[AdapterArrival](), False
        for fetch in tuple(self._fetches):
            failure = self._after_work(fetch)
            if fetch.work is not None:
                continue
            if failure is None and fetch.wanted and self._sender is not None and fetch.sent < self._files.elements:
                if fetch.row is None:
                    self._find_copy(fetch)
                if fetch.row is not None and fetch.work is None and not sending:
                    if not fetch.sent:
                        self._sender.send_flags(self._flags_of(fetch.ref), self._flags[fetch.place])
                    fetch.sent, sending = self._sender.send(fetch.row, fetch.place, fetch.sent), True
                continue
            if failure is None and fetch.wanted and self._sender is not None and not self._sender.arrived(fetch.place):
                continue
            self._fetches.remove(fetch)
            if fetch.wanted:
                self._held[fetch.place] = None if failure is not None else fetch.ref
                self._note_used(fetch.place)
                found.append(AdapterArrival(fetch.place, failure))
        return found

    def _after_work(self, fetch: _Fetch) -> Failure | None:
        """Takes what the thread has done for it, if it is done: why it failed, where it did."""
        if fetch.work is not None and fetch.work.overdue(READ_LIMIT_S):
            log.error("loading LoRA adapter %s timed out after %g s", fetch.ref.name, READ_LIMIT_S)
            self._readers.give_up(fetch.work, too_slow(fetch.ref.name, READ_LIMIT_S))
        if fetch.work is None or not fetch.work.done():
            return None
        work, fetch.work = fetch.work, None
        try:
            changes = work.result()
        except HoldfastError as error:
            failure = Failure.of(error)
        except Exception as error:  # A library's own: the end of those who wait for it, and nobody else's business.
            log.exception("LoRA adapter %s could not be read", fetch.ref.name)
            failure = Failure.of(EngineError(f"the LoRA adapter could not be read: {type(error).__name__}"))
        else:
            if changes is not None:
                self._changes[fetch.ref] = changes
            if fetch.row is not None:
                self._cached[fetch.ref] = fetch.row
            return None
        if fetch.row is not None:
            self._free.append(fetch.row)
        return failure

    def _flags_of(self, ref: AdapterRef) -> torch.Tensor:
        changes = self._changes[ref]
        flags = torch.tensor([int(key in changes) for key in self._factors], dtype=torch.int32, device="cpu")
        return flags.repeat_interleave(FLAG_WORDS)

    def _note_used(self, place: int) -> None:
        here = {*self._held, *self._cached, *(fetch.ref for fetch in self._fetches)}
        self._changes = {ref: changes for ref, changes in self._changes.items() if ref in here}
        held = self._held[place]
        changed_here: Changes = frozenset() if held is None else self._changes[held]
        if self._on_cpu and held is not None:
            self._flags[place] = self._flags_of(held)
        for key, factors in self._factors.items():
            (factors.used.add if key in changed_here else factors.used.discard)(place)
