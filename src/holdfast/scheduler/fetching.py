"""Who waits for pages from RAM or from disk, and whether that is sooner than computing them. Pure, like the scheduler:
times come from its caller, and rates from what these times show.

A sequence that waits for pages keeps its place in line and has no slot. Those behind it may start meanwhile. It holds
the pages that come, but any who runs takes them when there are no others: then what has come stays cached as long as it
may, and the sequence tries once more, and then computes. So nobody waits for ever, and nobody for who waits.
"""

from __future__ import annotations

from holdfast.kvcache import FoundBelow, KVCache, Prefix, Tier
from holdfast.scheduler.sequence import Sequence

MOST_FETCHES = 2
"""Of one sequence, each time that it is in line."""
KEPT = 0.8
"""Of what was measured before, with every new measurement."""
DOUBTED = 0.99
"""Of the seconds that something was seen to take, each time that it was not done because of them. A tier that is slow
for ever is tried so rarely that it costs less than 5%."""
SEEN = 0.75
"""Of the time that pages seem to take, for which somebody must have seen that they were on their way."""
PREFILL_TOKENS = 64
"""Of a step, from which on it shows how fast prompts are computed."""


class SeenRate:
    """Something a second, as far as it was seen."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    @property
    def per_s(self) -> float | None:
        """None: it is not known."""
        return self._amount / self._seconds if self._seconds > 0 and self._amount > 0 else None

    def note(self, amount: float, seconds: float) -> None:
        if seconds > 0 and amount > 0:
            self._amount, self._seconds = self._amount * KEPT + amount, self._seconds * KEPT + seconds

    def note_at_least(self, amount: float, seconds: float) -> None:
        """It may have been over long before anybody looked: that shows no more than that it is not slower."""
        if self.per_s is not None and seconds > 0 and amount / seconds > self.per_s:
            self.note(amount, seconds)

    def doubt(self) -> None:
        """Nothing was done because of it, and so it will not be measured again: each time it counts as a bit faster,
        until it is tried once more."""
        self._seconds *= DOUBTED


class Fetching:
    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self.sequences: list[Sequence] = []
        """In the order in which they began to wait."""
        self.prefill = SeenRate()
        """Tokens of prompts a second."""
        self.loads = {Tier.HOST: SeenRate(), Tier.DISK: SeenRate()}
        """Bytes a second."""
        self._since_s: dict[Tier, float] = {}
        """Since when something has been on its way that was not counted yet."""
        self._looked_s: dict[Tier, float] = {}
        """When somebody looked last, and nothing had come since then."""
        self._counted = {Tier.HOST: 0, Tier.DISK: 0} if kv.tiers is None else dict(kv.tiers.loaded_pages)
        self._applied_s = 0.0
        self.computed_instead_total = 0
        """How often a prefix was computed that could have been fetched, because that was sooner."""

    # --- answers ---

    def awaits(self, sequence: Sequence) -> bool:
        fetch = sequence.book.fetch
        return fetch is not None and fetch.waiting > 0

    def line(self, waiting: list[Sequence]) -> list[Sequence]:
        """Those of them who need not wait for pages."""
        return [one for one in waiting if not self.awaits(one)] if self.sequences else waiting

    def choose(self, sequence: Sequence, prefix: Prefix, ahead_tokens: int) -> FoundBelow | None:
        """What it had best wait for; None: nothing. `prefix`: what the pool has. `ahead_tokens`: of prompts that are
        computed before anything of this one."""
        kv, size = self._kv, self._kv.layout.block_tokens
        if kv.tiers is None or sequence.fetches >= MOST_FETCHES or sequence.book.fetch is not None:
            return None
        if (len(sequence.cacheable) - 1) // size * size <= prefix.tokens:
            return None
        best, most_saved_s = None, 0.0
        for disk in (False, True) if kv.tiers.stored is not None else (False,):
            found = kv.find_below(sequence.book, sequence.cacheable, disk=disk)
            if found is None or (gained := found.blocks * size - prefix.tokens) <= 0:
                continue
            saved_s = self._saved_s(found, gained, ahead_tokens)
            if saved_s is None:  # Not known yet: it is tried.
                best = found
            elif saved_s > most_saved_s:
                best, most_saved_s = found, saved_s
            elif best is None:
                self.computed_instead_total += 1
                for tier in found.missing:
                    self.loads[tier].doubt()
        return best

    def _saved_s(self, found: FoundBelow, gained_tokens: int, ahead_tokens: int) -> float | None:
        """Against computing so many tokens behind those ahead; None: a rate is not known."""
        assert self._kv.tiers is not None
        seconds = 0.0
        for tier, pages in found.missing.items():
            rate = self.loads[tier].per_s
            if rate is None:
                return None
            queued = self._kv.tiers.loading(tier)
            seconds = max(seconds, (pages + queued) * self._kv.layout.page_bytes / rate)
        computed = self.prefill.per_s
        return None if computed is None else (gained_tokens + ahead_tokens) / computed - seconds

    # --- changes ---

    def begin(self, sequence: Sequence, found: FoundBelow, prefix: Prefix) -> None:
        self._kv.begin_fetch(sequence.book, found, prefix)
        sequence.fetches += 1
        self.sequences.append(sequence)

    def end(self, sequence: Sequence) -> None:
        """It starts, or it is no more."""
        if sequence in self.sequences:
            self.sequences.remove(sequence)

    def drop_youngest(self, but: Sequence | None = None, behind: Sequence | None = None) -> bool:
        """The last in order who waits for pages, or for a slot with them, gives them back. False: there is none.
        `behind`: only one who is later in order than this."""
        found = [one for one in self.sequences if one is not but and (behind is None or one.order > behind.order)]
        if not found:
            return False
        self.drop(max(found, key=lambda one: one.order))
        return True

    def drop(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self._kv.free(sequence.book)

    def drop_all(self) -> None:
        """Not for lack of pages: it does not count for those who waited."""
        while self.sequences:
            self.sequences[-1].fetches -= 1
            self.drop(self.sequences[-1])

    # --- what was seen ---

    def note_planned(self, now_s: float) -> None:
        if self._kv.tiers is not None:
            for tier in self.loads:
                if self._kv.tiers.in_flight(tier):
                    self._since_s.setdefault(tier, now_s)

    def note_applied(self, step_tokens: int, planned_s: float, now_s: float) -> None:
        """A step is over; planned ahead of another, it began when that was over."""
        tiers = self._kv.tiers
        if tiers is None:
            return
        if step_tokens >= PREFILL_TOKENS:
            self.prefill.note(step_tokens, now_s - max(planned_s, self._applied_s))
        self._applied_s = now_s
        for tier, rate in self.loads.items():
            come = tiers.loaded_pages[tier] - self._counted[tier]
            if tier not in self._since_s:
                continue
            if not come:
                self._looked_s[tier] = now_s
                continue
            amount, since_s = come * self._kv.layout.page_bytes, self._since_s.pop(tier)
            seconds, waited_s = now_s - since_s, self._looked_s.pop(tier, since_s) - since_s
            self._counted[tier] += come
            if tiers.in_flight(tier) or waited_s >= SEEN * seconds:  # It was busy all the time.
                rate.note(amount, seconds)
            else:
                rate.note_at_least(amount, seconds)
            if tiers.in_flight(tier):
                self._since_s[tier] = now_s
