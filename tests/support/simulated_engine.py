"""A runner without tensors, to hold schedulers and cache books against: it keeps in every page which history was
written there, and every row proves that it reads its own. Public, so that others can test their plans with it.

What a real runner would compute from the KV of positions 0..p is here one number, `history(tokens[:p+1])`; the
token sampled behind it is a function of that number alone. So an answer must not depend on the company it keeps.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.kvcache import NULL_PAGE, KVGroup, KVLayout, Tier
from holdfast.records import (
    BlockCopy,
    EngineOutput,
    Failure,
    FinishReason,
    Request,
    Row,
    SequenceStart,
    StepFailure,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from holdfast.scheduler.scheduler import Scheduler

NO_MEMORY = Failure(kind="StepMemoryError", message="as if there were no memory", code="HF441")
NOT_FINITE = Failure(kind="NotFiniteError", message="as if it came to NaN", code="HF442")

_MASK = (1 << 64) - 1
POISON = -1


def extend_history(history: int, token: int) -> int:
    return ((history ^ token) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK


def next_token(history: int, vocabulary: int, banned: Sequence[int] = ()) -> int:
    """What the simulated model says after a history."""
    token = (history >> 33) % vocabulary
    while token in banned:
        token = (token + 1) % vocabulary
    return token


def expected_answer(request: Request, vocabulary: int, max_model_len: int) -> tuple[list[int], FinishReason]:
    """The answer of a request served all alone, token by token; of a resumed one, the tokens that are still to come."""
    history = 0
    for token in (*request.prompt_token_ids, *request.output_token_ids):
        history = extend_history(history, token)
    ends = (*request.eos_token_ids, *request.params.stop_ids)
    answer: list[int] = []
    length = len(request.prompt_token_ids) + len(request.output_token_ids)
    longest = min(len(request.prompt_token_ids) + request.max_tokens, max_model_len)
    while True:
        free_to_end = length - len(request.prompt_token_ids) >= request.params.min_tokens
        token = next_token(history, vocabulary, () if free_to_end else ends)
        answer.append(token)
        length += 1
        history = extend_history(history, token)
        if token in ends and free_to_end:
            return answer, FinishReason.STOP
        if length >= longest:
            return answer, FinishReason.LENGTH


@dataclass(slots=True)
class _Slot:
    start: SequenceStart
    histories: list[int]
    """One a known token: what its KV stands for."""
    tables: list[dict[int, int]]

    def learn(self, token: int) -> None:
        self.histories.append(extend_history(self.histories[-1] if self.histories else 0, token))


class FakeStore:
    """A store on disk that forgets at random, and says it has what it has lost."""

    def __init__(self, choice: random.Random, most: int = 60, most_room: int = 6, late: float = 0.0) -> None:
        """`most_room`: pages it takes at once; at any time it may be fewer. `late`: of those that wait to be written,
        how many still do with the next plan."""
        self._choice, self._most, self._most_room, self._late = choice, most, most_room, late
        self.pages: dict[bytes, list[int]] = {}
        self.waiting: dict[bytes, list[int]] = {}
        self.lost: set[bytes] = set()
        self.used = 0
        self.well = True
        self.noted: set[bytes] = set()

    def has(self, keys: Sequence[bytes]) -> int:
        return next((place for place, key in enumerate(keys) if key not in self.pages), len(keys))

    def use(self, keys: Sequence[bytes]) -> None:
        assert self.has(keys) == len(keys)
        self.used += len(keys)

    def used_before(self, keys: Sequence[bytes]) -> int:
        return next((place for place, key in enumerate(keys) if key not in self.noted), len(keys))

    def computed(self, keys: Sequence[bytes]) -> None:
        self.noted.update(keys)

    def takes(self) -> bool:
        for key in [key for key in self.waiting if self._choice.random() >= self._late]:
            self._publish(key, self.waiting.pop(key))
        return self.well

    def room(self) -> int:
        return self._choice.randrange(self._most_room + 1)

    def awaits(self, key: bytes) -> bool:
        return key in self.waiting or key in self.pages

    def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.pages.pop(key, None)
            self.waiting.pop(key, None)

    def write(self, key: bytes, page: list[int]) -> None:
        assert not self.awaits(key), "a page is brought that is there, or waits to be written"
        if self._late:
            self.waiting[key] = page
        else:
            self._publish(key, page)

    def _publish(self, key: bytes, page: list[int]) -> None:
        self.pages[key] = page
        self.lost.discard(key)
        while len(self.pages) > self._most:
            del self.pages[self._choice.choice(list(self.pages))]
        if self._choice.random() < 0.05:
            self.lost.add(key)

    def read(self, key: bytes) -> list[int] | None:
        return None if key in self.lost else self.pages.get(key)


class SimulatedTiers:
    """Pages that move beside steps: each copy is over after some steps, or has failed. What it reads is looked at when
    it is over, and what it writes is unusable until then: whoever disturbs it, or does not wait for it, is caught."""

    def __init__(self, choice: random.Random, store: FakeStore | None, failing: float = 0.1) -> None:
        self._choice, self.store, self._failing = choice, store, failing
        self.host: dict[int, list[int]] = {}
        self._under_way: list[BlockCopy] = []
        self.copied = {Tier.HOST: 0, Tier.DISK: 0}
        self.failed = 0

    def follow(self, plan: StepPlan, runner: SimulatedRunner) -> tuple[list[int], list[int]]:
        """Copies that are over, and copies that failed."""
        for copy in plan.copies:
            if copy.before_step:
                continue
            self._under_way.append(copy)
            if copy.target_tier == Tier.DEVICE:
                runner.poison([copy.target])
            elif copy.target_tier == Tier.HOST:
                self.host[copy.target] = [POISON]
            if copy.source_tier == Tier.DEVICE:
                assert POISON not in runner.pages[copy.source], f"page {copy.source} is stored before it is written"
        finished, failed = list[int](), list[int]()
        for copy in list(self._under_way):
            if self._choice.random() < 0.4 or (not plan.rows and copy is self._under_way[0]):
                self._under_way.remove(copy)
                whole = self._choice.random() >= self._failing and self._move(copy, runner)
                (finished if whole else failed).append(copy.copy_id)
        self.failed += len(failed)
        return finished, failed

    def give_up_reads(self) -> list[int]:
        given_up = [copy for copy in self._under_way if copy.source_tier == Tier.DISK]
        self._under_way = [copy for copy in self._under_way if copy not in given_up]
        return [copy.copy_id for copy in given_up]

    def _move(self, copy: BlockCopy, runner: SimulatedRunner) -> bool:
        if copy.source_tier == Tier.DEVICE:
            page = list(runner.pages[copy.source])
            assert POISON not in page, f"page {copy.source} was given away while it was stored"
        elif copy.source_tier == Tier.HOST:
            page = self.host[copy.source]
            assert POISON not in page, f"page {copy.source} of RAM is read before it was filled"
            self.copied[Tier.HOST] += 1
        else:
            assert self.store is not None
            found = self.store.read(copy.key)
            if found is None:
                return False
            page = found
            self.copied[Tier.DISK] += 1
        if copy.target_tier == Tier.DEVICE:
            assert set(runner.pages[copy.target]) == {POISON}, f"page {copy.target} was written while it was loaded"
            runner.pages[copy.target] = list(page)
        elif copy.target_tier == Tier.HOST:
            self.host[copy.target] = page
        else:
            assert self.store is not None
            self.store.write(copy.key, page)
        return True


class SimulatedRunner:
    """Executes plans in order, at once. Raises AssertionError when a plan breaks the contract of StepPlan, or when a
    position that a row must read holds anything but what this very sequence would have written there."""

    def __init__(
        self, layout: KVLayout, blocks: int, *, slots: int, vocabulary: int, tiers: SimulatedTiers | None = None
    ) -> None:
        self.tiers = tiers
        self.layout = layout
        self.vocabulary = vocabulary
        self.pages = [[POISON] * layout.block_tokens for _ in range(blocks)]
        self.tokens_computed = 0
        self._slots: list[_Slot | None] = [None] * slots
        self._written: set[tuple[int, int]] = set()
        self._spoiled: set[tuple[int, int]] = set()
        """Places (page, offset) of rows that failed, or of rows that read such places."""

    def poison(self, pages: Iterable[int]) -> None:
        """Makes the content of pages that nobody holds unusable."""
        for page in pages:
            self.pages[page] = [POISON] * self.layout.block_tokens
            self._spoiled.difference_update((page, offset) for offset in range(self.layout.block_tokens))

    def execute(self, plan: StepPlan, failing: int | None = None, failure: Failure = NO_MEMORY) -> StepResult:
        """`failing`: the row of this slot is not done, and who reads what it should have written gets nonsense."""
        for copy in plan.copies:
            if not copy.before_step:
                assert self.tiers is not None, "a page goes to a tier that is not there"
                continue
            self.pages[copy.target] = list(self.pages[copy.source])
            spoiled = {offset for page, offset in self._spoiled if page == copy.source}
            self._spoiled = {(page, offset) for page, offset in self._spoiled if page != copy.target}
            self._spoiled |= {(copy.target, offset) for offset in spoiled}
        for start in plan.starts:
            self._begin(start)
        for write in plan.table_writes:
            table = self._slot(write.slot).tables[write.group]
            table.update(enumerate(write.blocks, write.first))
        slots = [row.slot for row in plan.rows]
        assert len(set(slots)) == len(slots), f"step {plan.step_id}: a slot has two rows"
        # As in every layer of a real model: all rows write their KV before any row reads.
        self._written.clear()
        for row in plan.rows:
            self._write(row)
        nonsense = {failing}
        for row in plan.rows:
            if row.slot == failing or any(self._reads_nonsense(row, group) for group in self.layout.groups):
                nonsense.add(row.slot)
                self._spoil(row)
        for row in plan.rows:
            for group in self.layout.groups:
                if row.slot not in nonsense:
                    self._read(row, group)
        self.tokens_computed += plan.token_count
        finished, broken = ([], []) if self.tiers is None else self.tiers.follow(plan, self)
        failures = (
            [] if failing is None else [StepFailure(slot=failing, failure=failure, earlier_too=failure is NOT_FINITE)]
        )
        return StepResult(
            step_id=plan.step_id,
            prompt_logprobs=[self._score(row, row.slot == failing) for row in plan.rows if row.scored],
            token_ids=[self._sample(row, row.slot in nonsense) for row in plan.rows if row.samples],
            failures=failures,
            finished_copies=finished,
            failed_copies=broken,
        )

    def _places(self, slot: _Slot, group: int, first: int, end: int) -> list[tuple[int, int]]:
        size = self.layout.block_tokens
        return [(slot.tables[group][position // size], position % size) for position in range(first, end)]

    def _reads_nonsense(self, row: Row, group: KVGroup) -> bool:
        if not self._spoiled:
            return False
        places = self._places(self._slot(row.slot), group.index, group.first_needed(row.start), row.start + row.count)
        return not self._spoiled.isdisjoint(places)

    def _spoil(self, row: Row) -> None:
        slot = self._slot(row.slot)
        for group in range(len(slot.tables)):
            for page, offset in self._places(slot, group, row.start, row.start + row.count):
                self.pages[page][offset] = POISON
                self._spoiled.add((page, offset))

    def _slot(self, index: int) -> _Slot:
        slot = self._slots[index]
        assert slot is not None, f"slot {index} was never started"
        return slot

    def _begin(self, start: SequenceStart) -> None:
        slot = _Slot(start, [], [{} for _ in self.layout.groups])
        for token in start.token_ids:
            slot.learn(token)
        self._slots[start.slot] = slot

    def _write(self, row: Row) -> None:
        slot, size = self._slot(row.slot), self.layout.block_tokens
        end = row.start + row.count
        assert row.count > 0, f"slot {row.slot}: an empty row"
        assert end <= len(slot.histories), f"slot {row.slot}: position {end - 1} has no token yet"
        for table in slot.tables:
            for position in range(row.start, end):
                place = (table[position // size], position % size)
                assert place[0] != NULL_PAGE, f"slot {row.slot}: position {position} goes to the null page"
                assert place not in self._written, f"slot {row.slot}: position {position} is written twice in a step"
                self._written.add(place)
                self._spoiled.discard(place)
                self.pages[place[0]][place[1]] = slot.histories[position]

    def _read(self, row: Row, group: KVGroup) -> None:
        """Everything the row's first position sees, up to its last position."""
        slot, size = self._slot(row.slot), self.layout.block_tokens
        first, end = group.first_needed(row.start), row.start + row.count
        # Kernels that fetch whole tiles of pages also touch what has left a window: it must be there.
        named = [slot.tables[group.index].get(entry, NULL_PAGE) for entry in range(self.layout.blocks_for(end))]
        assert max(named) < len(self.pages), f"slot {row.slot}: its table names page {max(named)}, which is gone"
        for entry in range(first // size, self.layout.blocks_for(end)):
            begin, stop = max(first, entry * size), min(end, (entry + 1) * size)
            page = slot.tables[group.index][entry]
            found = self.pages[page][begin - entry * size : stop - entry * size]
            assert found == slot.histories[begin:stop], (
                f"{slot.start.request_id} (slot {row.slot}, group {group.index}): page {page} does not hold its "
                f"positions {begin}..{stop - 1}"
            )

    def _score(self, row: Row, failing: bool) -> list[TokenLogprobs]:
        """The token behind each position that is scored, and as its rank which position that was."""
        slot = self._slot(row.slot)
        last = min(row.start + row.count, slot.start.prompt_length - 1)
        assert row.start <= row.score_from < row.score_to <= last, f"slot {row.slot}: scores what it does not compute"
        positions = range(0 if failing else row.score_from, 0 if failing else row.score_to)
        return [TokenLogprobs([slot.start.token_ids[place + 1]], [0.0], place) for place in positions]

    def _sample(self, row: Row, nonsense: bool) -> int:
        slot = self._slot(row.slot)
        end = row.start + row.count
        assert end == len(slot.histories), f"slot {row.slot}: samples at {end}, but knows {len(slot.histories)} tokens"
        free_to_end = end - slot.start.prompt_length >= slot.start.params.min_tokens
        banned = () if free_to_end else slot.start.banned_until_min_tokens
        token = 0 if nonsense else next_token(slot.histories[-1], self.vocabulary, banned)
        slot.learn(token)
        return token


class SimulatedEngine:
    """Drives a scheduler over a SimulatedRunner, planning and executing when told to, and proves every answer.

    A plan is executed as late as possible, when its result is applied: whatever the scheduler has changed since then
    must not disturb it. Pages free at the time of a plan are poisoned before that plan is executed.
    """

    def __init__(self, scheduler: Scheduler, *, vocabulary: int, tiers: SimulatedTiers | None = None) -> None:
        self.scheduler = scheduler
        kv, slots = scheduler.kv, scheduler.limits.max_num_seqs
        self.runner = SimulatedRunner(kv.layout, kv.blocks_total + 1, slots=slots, vocabulary=vocabulary, tiers=tiers)
        self.unfinished: dict[str, Request] = {}
        self.outputs: dict[str, list[EngineOutput]] = {}
        self._plans: deque[tuple[StepPlan, list[int]]] = deque()

    @property
    def plans_in_flight(self) -> int:
        return len(self._plans)

    @property
    def can_plan(self) -> bool:
        return len(self._plans) < self.scheduler.limits.max_steps_in_flight

    def add(self, request: Request, now_s: float = 0.0) -> None:
        self.unfinished[request.request_id] = request
        self.outputs[request.request_id] = []
        news = self.scheduler.add(request, now_s)
        if news is not None:
            self._hear(news)

    def abort(self, request_id: str) -> None:
        assert self.scheduler.abort(request_id), f"{request_id} is unknown to the scheduler"
        del self.unfinished[request_id]

    def plan(self, now_s: float = 0.0) -> StepPlan | None:
        plan = self.scheduler.schedule(now_s)
        if plan is not None:
            limits = self.scheduler.limits
            least = 1 if self.runner.tiers is None else 0
            assert least <= plan.token_count <= limits.max_num_batched_tokens, f"{plan.token_count} tokens in a step"
            assert len(plan.rows) <= limits.max_num_seqs, f"{len(plan.rows)} rows in a step"
            self._plans.append((plan, self.scheduler.kv.free_pages))
        return plan

    def execute(
        self, now_s: float = 0.0, *, failing_row: int | None = None, failure: Failure = NO_MEMORY
    ) -> list[EngineOutput]:
        """Executes and applies the oldest plan; `failing_row` of it cannot be done."""
        plan, free_pages = self._plans.popleft()
        self.runner.poison(free_pages)
        failing = None if failing_row is None or not plan.rows else plan.rows[failing_row % len(plan.rows)].slot
        outputs = self.scheduler.apply(self.runner.execute(plan, failing, failure), now_s)
        for output in outputs:
            self._hear(output)
        return outputs

    def resize(self, blocks: int, saves: int = 0) -> None:
        """As the engine's loop does it: when nothing is in flight. `saves`: steps in which what a smaller pool would
        lose goes to RAM first."""
        while self._plans:
            self.execute()
        if self.runner.tiers is not None:
            self.scheduler.give_up_copies(self.runner.tiers.give_up_reads())
        for _ in range(saves if blocks < len(self.runner.pages) else 0):
            if (saving := self.scheduler.save_before(blocks)) is not None:
                assert not self.scheduler.apply(self.runner.execute(saving), 0.0)
        while (waiting := self.scheduler.wait_for_copies()) is not None:
            assert not self.scheduler.apply(self.runner.execute(waiting), 0.0)
        new = blocks - len(self.runner.pages)
        self.runner.pages += [[POISON] * self.runner.layout.block_tokens for _ in range(new)]
        moving = self.scheduler.resize(blocks)
        if moving is not None:
            assert not self.scheduler.apply(self.runner.execute(moving), 0.0)
        del self.runner.pages[blocks:]

    def finish(self, now_s: float = 0.0) -> None:
        """Runs until nothing is left to do."""
        while self.unfinished or self._plans or self.scheduler.has_copies:
            while self.can_plan and self.plan(now_s) is not None:
                pass
            assert self._plans or not self.unfinished, "requests wait, and there is nothing to do"
            if self._plans:
                self.execute(now_s)

    def _hear(self, output: EngineOutput) -> None:
        request = self.unfinished[output.request_id]
        self.outputs[output.request_id].append(output)
        if output.finish_reason is None:
            return
        del self.unfinished[output.request_id]
        self._check_scores(request)
        if output.failure is None and len(self.answer(output.request_id)) > 0:
            expected = expected_answer(request, self.runner.vocabulary, self.scheduler.limits.max_model_len)
            found = (self.answer(output.request_id), output.finish_reason)
            assert found == expected, f"{output.request_id}: {found}, alone it is {expected}"

    def _check_scores(self, request: Request) -> None:
        """Every token of the prompt but the first is told of, once and in order, before the first token of the answer;
        of a request that failed, some of them."""
        told, due = list[TokenLogprobs](), request.prompt_token_ids[1 + request.prompt_logprobs_sent :]
        for output in self.outputs[request.request_id]:
            told += output.prompt_logprobs or []
            if output.token_ids and request.params.prompt_logprobs is not None:
                assert len(told) == len(due), f"{request.request_id}: the answer begins after {len(told)} scores"
        if request.params.prompt_logprobs is None:
            due = []
        places = [entry.rank for entry in told]
        assert places == list(range(request.prompt_logprobs_sent, request.prompt_logprobs_sent + len(told)))
        assert [entry.token_ids[0] for entry in told] == due[: len(told)]

    def answer(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]
