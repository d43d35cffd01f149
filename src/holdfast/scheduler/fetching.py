"""Who waits for pages from RAM or from disk, and whether that is sooner than computing them. Pure, like the scheduler:
times come from its caller, and rates from what these times show.

A sequence that waits for pages keeps its place in line and has no slot. Those behind it may start meanwhile. It holds
the pages that come, but any who runs takes them when there are no others: then what has come stays cached as long as it
may, and the sequence tries once more, and then computes. So nobody waits for ever, and nobody for who waits.

What is fetched takes pages that nobody uses, which may hold all that others in line wait for. So whose prompt is in the
pool starts before a fetch begins, whoever is before it in line; each is passed in this way by PASSED others at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from statistics import median_low

from holdfast.kvcache import FoundBelow, KVCache, LowerTiers, Prefix, Tier
from holdfast.scheduler.limits import SchedulerLimits
from holdfast.scheduler.prefill_cost import PrefillCost, PromptWork, pairs
from holdfast.scheduler.sequence import Sequence, Status

PASSED = 16
"""Others that start before somebody in line, in all, because they were in the pool."""
LOOKED, LOOKED_WHOLE = 64, 4
"""Of those in line, who are asked in one plan whether they begin in the pool, and those of them who are found not to be
in it as a whole, which takes a look at each block."""
MOST_FETCHES = 2
"""Of one sequence, each time that it is in line."""
KEPT, MEASURED_S = 0.8, 0.05
"""Of a rate, with so many more seconds that were measured, in however many pieces: a quarter of a second decides. While
much comes somebody looks every millisecond, and what a link does not do for a few says little."""
KNOWN_S = 0.1
"""That must have been measured before a rate counts as known. The first pages of all may come ten times as slowly as
those behind them, and many who come back at once are decided on by then."""
TRIED = 0.04
"""Of the seconds that computing took because a tier was slower: so many may be lost by trying it once more. A tier
that is slow for ever, or hangs, costs no more than that."""
PROBED_S, MOST_LOST_S = 0.25, 1.0
"""Of which the first must have been saved up to try a part of what is lost by it as a whole: less would not show much
beside steps. The other is the most that one who tries may lose by what is known, but for a single block."""
SEEN = 0.75
"""Of the time that pages seem to take, for which somebody must have seen that they were on their way."""
PREFILL_TOKENS = 64
"""Of a step, from which on it shows how fast prompts are computed."""
SMALL_STEPS = 5
"""The last so many in which hardly anything is: their median is what such a step takes, whichever of them compiled a
kernel, captured a graph, or was over before the host looked."""
PAUSE_S = 0.1
"""Between a step and the plan of the next, from which on there was nothing to do."""
LOST_S = 1.0
"""From which on pages that did not come at all show that their tier is slow: as if one had come in so long, whatever
it was. Nobody knows how slow it is, and what seems to stand still is never worth trying again."""


class SeenRate:
    """Something a second, as far as it was seen."""

    def __init__(self) -> None:
        self._rate = self._weight = self._measured_s = 0.0
        self.credit_s = self.charged_s = 0.0
        """`credit_s`: that may be lost by seeing once more how fast it is. `charged_s`: taken of it for what comes."""

    @property
    def per_s(self) -> float | None:
        """None: it is not known."""
        return self._rate / self._weight if self._measured_s >= KNOWN_S and self._weight > 0 else None

    def earn(self, seconds: float) -> None:
        """No more than one may lose, however long it has been slow."""
        self.credit_s = min(self.credit_s + seconds, max(self.credit_s, MOST_LOST_S))

    def charge(self, seconds: float) -> None:
        self.credit_s -= seconds
        self.charged_s += seconds

    def settle(self, amount: float, seconds: float, believed_per_s: float | None) -> None:
        """This has come: of what was taken for it at the rate that was believed, what it did not need is given back."""
        spared_s = 0.0 if believed_per_s is None else min(self.charged_s, amount / believed_per_s - seconds)
        if spared_s > 0:
            self.charged_s -= spared_s
            self.earn(spared_s)

    def note(self, amount: float, seconds: float) -> None:
        if seconds > 0 and amount > 0:
            kept = KEPT ** (seconds / MEASURED_S)
            self._rate = self._rate * kept + amount / seconds * (1 - kept)
            self._weight = self._weight * kept + 1 - kept
            self._measured_s += seconds

    def note_at_least(self, amount: float, seconds: float) -> None:
        """It may have been over long before anybody looked: that shows no more than that it is not slower."""
        if self.per_s is not None and seconds > 0 and amount / seconds > self.per_s:
            self.note(amount, seconds)


@dataclass(slots=True)
class _Coming:
    """Something that is on its way, and was not counted yet."""

    since_s: float
    looked_s: float | None = None
    """When somebody looked last, and nothing had come since then."""
    rate: SeenRate | None = None
    """That it shows: as steps were that were over since. None: none was."""
    mixed: bool = False
    """It shows none: some of these steps read layers beside it, and some did not."""


class Fetching:
    def __init__(self, kv: KVCache, limits: SchedulerLimits) -> None:
        self._kv, self._limits = kv, limits
        self.sequences: list[Sequence] = []
        """In the order in which they began to wait."""
        self.prefill = PrefillCost(limits.max_num_batched_tokens)
        self.loads = {Tier.HOST: SeenRate(), Tier.DISK: SeenRate()}
        """Bytes a second."""
        self.disk_beside_steps = SeenRate()
        """Where steps read layers from the disk of pages: bytes a second meanwhile."""
        self._coming: dict[Tier, _Coming] = {}
        self._counted = {Tier.HOST: 0, Tier.DISK: 0} if kv.tiers is None else dict(kv.tiers.loaded_pages)
        self._lost = {Tier.HOST: 0, Tier.DISK: 0} if kv.tiers is None else dict(kv.tiers.lost_pages)
        self._small_s = deque[float](maxlen=SMALL_STEPS)
        self._applied_s = self._step_s = self._loading_s = 0.0
        """`_step_s`: how long steps without prompts take of late. `_loading_s`: in which the link brought pages from
        RAM that were not counted yet."""
        self._untold, self._untold_since_s, self._untold_applied_s = PromptWork(), 0.0, 0.0
        """Of steps that were applied while they may still have been computed, when the first of them began, and when
        the last was applied."""
        self._probing: tuple[FoundBelow, Tier, bool, float] | None = None
        """What was chosen last although it is slower, to see how fast its tier is, whether that is beside others, and
        what may be lost by it."""
        self._probes: dict[Tier, bool] = {}
        """Those that are on their way, with the same: the rate that was charged pays or is paid back, whatever runs
        when they come."""
        self.computed_instead_total = 0
        """How often a prefix was computed that could have been fetched, because that was sooner."""

    # --- answers ---

    def awaits(self, sequence: Sequence) -> bool:
        fetch = sequence.book.fetch
        return fetch is not None and fetch.waiting > 0

    def line(self, waiting: list[Sequence]) -> list[Sequence]:
        """Those of them who need not wait for pages."""
        return [one for one in waiting if not self.awaits(one)] if self.sequences else waiting

    def whole_behind(self, sequence: Sequence, line: list[Sequence]) -> tuple[Sequence, Prefix] | None:
        """The next behind this one who need not compute more than a block, and wait for nothing; None: there is none,
        or somebody was passed often enough."""
        kv, looks, passing = self._kv, 0, False
        for one in islice(line, LOOKED):
            if one is sequence:
                passing = True
            elif passing and one.order[0] == sequence.order[0] and self._may_pass(one, sequence):
                prefix = kv.find_prefix(one.book, one.cacheable)
                if len(one.tokens) - prefix.tokens <= kv.layout.block_tokens:
                    return one, prefix
                one.looked_whole, looks = True, looks + 1
            if one.passed >= PASSED or looks == LOOKED_WHOLE:
                break
        return None

    def _may_pass(self, one: Sequence, sequence: Sequence) -> bool:
        if one.looked_whole or one.rows_in_flight or one.request.adapter not in (None, sequence.request.adapter):
            return False
        return self._kv.begins_in_pool(one.book, one.cacheable)

    def choose(self, sequence: Sequence, prefix: Prefix, running: Iterable[Sequence]) -> FoundBelow | None:
        """What it had best wait for; None: nothing. `prefix`: what the pool has. `running`: whose prompts are computed
        before anything of this one, and whose steps it waits for until it sees that pages have come."""
        kv, size = self._kv, self._kv.layout.block_tokens
        if kv.tiers is None or sequence.fetches >= MOST_FETCHES or sequence.book.fetch is not None:
            return None
        if (len(sequence.cacheable) - 1) // size * size <= prefix.tokens:
            return None
        others, before = list(running), prefix.tokens // size

        def computed_s(found: FoundBelow) -> float | None:
            return self._computed_s(sequence, found, found.blocks * size - prefix.tokens, others)

        def saved_s(found: FoundBelow) -> float | None:
            computing_s, fetching_s = computed_s(found), self._fetched_s(sequence, found, others)
            return None if computing_s is None or fetching_s is None else computing_s - fetching_s

        best, most_s, slower, self._probing = None, 0.0, False, None
        for tier in (Tier.HOST, Tier.DISK) if kv.tiers.stored is not None else (Tier.HOST,):
            found = kv.find_below(sequence.book, sequence.cacheable, disk=tier is Tier.DISK)
            if found is None or found.blocks <= before:
                continue
            saves_s = saved_s(found)
            if saves_s is None:  # Not known yet: it is tried, and nothing slower added to it.
                best, most_s = found, computed_s(found) or 0.0
            elif saves_s > most_s:
                best, most_s = found, saves_s
            elif tier in found.missing:
                probe = self._probe(sequence, tier, found, before, others, most_s, saved_s, behind_slower=slower)
                if probe is not None:
                    return probe
                self._compute_instead(sequence, tier, found, before, others)
                slower = True
            before = found.blocks
        return best

    def _probe(
        self,
        sequence: Sequence,
        tier: Tier,
        found: FoundBelow,
        before: int,
        others: list[Sequence],
        most_s: float,
        saved_s: Callable[[FoundBelow], float | None],
        *,
        behind_slower: bool,
    ) -> FoundBelow | None:
        """Nothing that is not done is measured: now and then what seems slower is done all the same, for as many of the
        first blocks behind `before` as may be lost by it; once that is MOST_LOST_S for one of them, however slow it is.
        `most_s`: what is saved by what is done else. `behind_slower`: it would wait for another tier, too."""
        assert self._kv.tiers is not None
        rate = self._rate_of(tier, beside=bool(others))
        lost_s, blocks = most_s - (saved_s(found) or 0.0), found.blocks - before
        # What is on its way already will tell.
        if self._kv.tiers.loading(tier) or rate.credit_s <= 0 or rate.credit_s < min(lost_s, PROBED_S):
            return None
        if lost_s > rate.credit_s:
            blocks = max(
                1, int(blocks * rate.credit_s / lost_s / 2)
            )  # What it waits for steps is lost for few as well.
            tokens = sequence.cacheable[: (before + blocks) * self._kv.layout.block_tokens + 1]
            shorter = self._kv.find_below(sequence.book, tokens, disk=tier is Tier.DISK)
            if shorter is None or shorter.blocks <= before or tier not in shorter.missing:
                return None
            found, lost_s = shorter, most_s - (saved_s(shorter) or 0.0)
            if rate.credit_s < (lost_s if behind_slower else min(lost_s, MOST_LOST_S)):
                return None
        self._probing = found, tier, bool(others), max(0.0, lost_s)
        return found

    def _compute_instead(
        self, sequence: Sequence, tier: Tier, found: FoundBelow, before: int, others: list[Sequence]
    ) -> None:
        """Of what a tier is too slow for, which counts once for each time that it is in line."""
        if tier in sequence.computes:
            return
        self.computed_instead_total += not sequence.computes
        sequence.computes.add(tier)
        gained = (found.blocks - before) * self._kv.layout.block_tokens
        computed_s = self._computed_s(sequence, found, gained, others) or 0.0
        self._rate_of(tier, beside=bool(others)).earn(TRIED * computed_s)

    def _fetched_s(self, sequence: Sequence, found: FoundBelow, running: list[Sequence]) -> float | None:
        """Until it may start, as far as rates are known; None: none is. Of one that was sent back to make room it does
        not count who is before it: those were sent back too, and to compute any of them anew takes the time of all who
        run."""
        assert self._kv.tiers is not None
        seconds, known = 0.0, not found.missing
        for tier, pages in found.missing.items():
            rate = self._per_s(tier, beside=bool(running))
            if rate is None:
                continue
            known = True
            queued = 0 if sequence.status is Status.PREEMPTED else self._kv.tiers.loading(tier)
            seconds = max(seconds, (pages + queued) * self._kv.layout.page_bytes / rate)
        if not known:
            return None
        # Beside others it is seen when a step is over that pages have come. Who was sent back is in no such hurry as
        # those are who would stand still while it is computed.
        seen_late = bool(running) and sequence.status is not Status.PREEMPTED
        return seconds + (self._step_s * self._limits.max_steps_in_flight if seen_late else 0.0)

    def _rate_of(self, tier: Tier, *, beside: bool) -> SeenRate:
        """`beside`: steps, which may read layers from the same disk."""
        assert self._kv.tiers is not None
        shared = beside and tier is Tier.DISK and self._kv.tiers.limits.disk_share < 1
        return self.disk_beside_steps if shared else self.loads[tier]

    def _per_s(self, tier: Tier, *, beside: bool) -> float | None:
        """As it was seen; of the disk beside steps, until then, the share that pages have of what it does alone."""
        assert self._kv.tiers is not None
        seen, alone = self._rate_of(tier, beside=beside).per_s, self.loads[tier].per_s
        return seen if seen is not None or alone is None else alone * self._kv.tiers.limits.disk_share

    def _computed_s(self, sequence: Sequence, found: FoundBelow, gained: int, running: list[Sequence]) -> float | None:
        """What it takes to compute it, behind prompts that are; None: nothing was seen yet."""
        end = found.blocks * self._kv.layout.block_tokens
        work = self._spared(end - gained, end, len(sequence.tokens))
        for other in running:
            if other.pending > 1:
                work += self._spared(other.scheduled, other.scheduled + other.pending, other.scheduled + other.pending)
        return self.prefill.seconds(work)

    def worth_saving(self, sequence: Sequence) -> bool:
        """Whether its pages are worth the way to RAM and back, were it sent back now. Not known: yes."""
        book, layout = sequence.book, self._kv.layout
        end = book.indexed * layout.block_tokens
        computed_s = self.prefill.seconds(self._spared(0, end, max(end, len(sequence.tokens))))
        rate = self.loads[Tier.HOST].per_s
        return rate is None or computed_s is None or 2 * book.held * layout.page_bytes / rate <= computed_s

    def _spared(self, start: int, end: int, whole: int) -> PromptWork:
        """If positions from `start` to `end` of so many need not be computed: steps too, where that makes fewer."""
        size = self._limits.max_num_batched_tokens
        steps = -(-(whole - start) // size) - -(-(whole - end) // size)
        return PromptWork(steps, end - start, pairs(self._kv.layout, start, end))

    # --- changes ---

    def begin(self, sequence: Sequence, found: FoundBelow, prefix: Prefix) -> None:
        self._kv.begin_fetch(sequence.book, found, prefix)
        if self._probing is not None and self._probing[0] is found:
            _, tier, beside, lost_s = self._probing
            self._forget_charged(tier)  # Of one that was given up before anything of it was asked for.
            self._rate_of(tier, beside=beside).charge(lost_s)
            self._probes[tier] = beside
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
                    self._coming.setdefault(tier, _Coming(now_s))

    def note_applied(
        self,
        rows: Iterable[tuple[int, int]],
        planned_s: float,
        now_s: float,
        loading_s: float = 0.0,
        *,
        tells: bool = True,
        pinning: bool = False,
    ) -> None:
        """A step with these rows (their first position, and how many) is over; planned ahead of another, it began when
        that was over. `loading_s`: in which the link brought pages from RAM meanwhile; 0: nobody knows. `tells`: its
        result says something that had to be computed first. `pinning`: more RAM was pinned meanwhile. Launches wait for
        that, so how long the step took says nothing: a tiny one may take a second."""
        tiers = self._kv.tiers
        if tiers is None:
            return
        rows = list(rows)
        if pinning:
            self._untold, self._applied_s = PromptWork(), now_s
        else:
            self._note_work(rows, max(planned_s, self._applied_s), now_s, tells)
        self._loading_s += loading_s
        self._note_loads(tiers, now_s, beside=bool(rows))

    def _note_work(self, rows: list[tuple[int, int]], began_s: float, now_s: float, tells: bool) -> None:
        """A GPU's step of which nothing is sampled is applied as soon as it is launched: that was over in no time says
        nothing, and what it takes is seen with the next that tells."""
        tokens = sum(count for _, count in rows)
        if not tells:
            if not self._untold.tokens:
                self._untold_since_s = began_s
            self._untold += self._work_of(rows, tokens)
            self._untold_applied_s = now_s
            return
        self._applied_s = now_s
        if began_s > self._untold_applied_s + PAUSE_S:  # Nobody knows when in between it was over.
            self._untold = PromptWork()
        if self._untold.tokens and tokens:
            work, self._untold = self._untold + self._work_of(rows, tokens), PromptWork()
            self.prefill.note(work, now_s - self._untold_since_s)
        elif 0 < tokens < PREFILL_TOKENS or tokens == len(rows) > 0:
            self._small_s.append(now_s - began_s)
            self._step_s = median_low(self._small_s)
            self.prefill.note_small(self._step_s)
        elif tokens:
            self.prefill.note(self._work_of(rows, tokens), now_s - began_s)

    def _work_of(self, rows: list[tuple[int, int]], tokens: int) -> PromptWork:
        seen = sum(pairs(self._kv.layout, start, start + count) for start, count in rows)
        return PromptWork(1, tokens, seen)

    def _note_loads(self, tiers: LowerTiers, now_s: float, *, beside: bool) -> None:
        """`beside`: a step that computed something is over."""
        for tier in self.loads:
            come, lost = tiers.loaded_pages[tier] - self._counted[tier], tiers.lost_pages[tier] - self._lost[tier]
            self._lost[tier] += lost
            if (coming := self._coming.get(tier)) is None:
                if tier is Tier.HOST:
                    self._loading_s = 0.0  # Of nothing that is counted here.
                continue
            rate = self._rate_of(tier, beside=beside)
            coming.rate, coming.mixed = coming.rate or rate, coming.mixed or coming.rate not in (None, rate)
            if come:
                self._counted[tier] += come
                self._note_come(tier, coming, come * self._kv.layout.page_bytes, now_s)
                del self._coming[tier]
            elif tiers.in_flight(tier):
                coming.looked_s = now_s
            else:
                if lost and now_s - coming.since_s >= LOST_S:
                    self._note_lost(tier, coming.rate, now_s - coming.since_s)
                del self._coming[tier]
            if not tiers.in_flight(tier):
                self._forget_charged(tier)
            elif come:
                self._coming[tier] = _Coming(now_s)

    def _note_come(self, tier: Tier, coming: _Coming, amount: float, now_s: float) -> None:
        assert self._kv.tiers is not None
        assert coming.rate is not None
        seconds, in_flight = now_s - coming.since_s, self._kv.tiers.in_flight(tier)
        waited_s = 0.0 if coming.looked_s is None else coming.looked_s - coming.since_s
        if (charged := self._probes.get(tier)) is not None:
            believed = self._per_s(tier, beside=charged)
            self._rate_of(tier, beside=charged).settle(amount, seconds, believed)
        if tier is Tier.HOST and self._loading_s:  # Without what it waited for steps to begin, and to be seen.
            coming.rate.note(amount, self._loading_s)
            self._loading_s = 0.0
        elif coming.mixed:
            return
        elif in_flight or waited_s >= SEEN * seconds:  # It was busy all the time.
            coming.rate.note(amount, seconds)
        else:
            coming.rate.note_at_least(amount, seconds)

    def _note_lost(self, tier: Tier, seen: SeenRate, seconds: float) -> None:
        """Nothing came, which is slow whatever ran meanwhile."""
        seen.note(self._kv.layout.page_bytes, LOST_S)
        charged = self._probes.get(tier)
        payer = seen if charged is None else self._rate_of(tier, beside=charged)
        payer.credit_s -= max(0.0, seconds - payer.charged_s)

    def _forget_charged(self, tier: Tier) -> None:
        """Nothing is on its way from there."""
        if (charged := self._probes.pop(tier, None)) is not None:
            self._rate_of(tier, beside=charged).charged_s = 0.0
