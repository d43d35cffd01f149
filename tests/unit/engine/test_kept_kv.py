"""Prefixes of a GPU that wait in RAM while the engine sleeps: which are found again, by books of another process. The
device is simulated: it holds no bytes."""

from __future__ import annotations

import errno
import mmap
import os
import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from deadlines import PATIENCE_S

from holdfast.config import EngineConfig
from holdfast.engine.core.kept_kv import KVKeeper, open_tier_file
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.process import main, protocol
from holdfast.engine.process.kept_kv import KeptFiles
from holdfast.kvcache import KVCache, KVLayout, TierLimits, form_groups
from holdfast.records import Request, SamplingParams, SleepingKV, StepPlan, StepResult
from holdfast.scheduler import Scheduler, SchedulerLimits

PROMPTS, TOKENS, FOUND, HEAD_DIM = 6, 64, 48, 4
LAYERS = {"full": (None,), "windowed": (None, 32)}


class FakeRunner:
    def __init__(self, ready: int) -> None:
        self.ready, self.most_blocks, self.failed = ready, 100, False

    def host_pages(self) -> int:
        return self.ready

    def host_settled(self) -> bool:
        return self.failed

    def submit(self, plan: StepPlan, masks: object = None) -> SimpleNamespace:
        result = StepResult(
            step_id=plan.step_id,
            token_ids=[7 for row in plan.rows if row.samples],
            finished_copies=[copy.copy_id for copy in plan.copies if not copy.before_step],
            host_pages=self.ready,
        )
        return SimpleNamespace(late=(), result=lambda: result)


def make(windows: tuple[int | None, ...], ready: int = 200) -> EngineCore:
    groups, places = form_groups(windows)
    layout = KVLayout(
        groups=groups, block_tokens=16, layers_per_page=places, kv_heads=1, head_dim=HEAD_DIM, element_bytes=4
    )
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=80, max_model_len=80)
    scheduler = Scheduler(limits, KVCache(layout, 80, True, TierLimits(spare_pages=0)))
    return EngineCore(scheduler, FakeRunner(ready))  # type: ignore[arg-type]


def cached(core: EngineCore, name: str, first: int) -> int:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    core.add(Request(request_id=name, prompt_token_ids=list(range(first, first + TOKENS)), params=params))
    found = 0
    while core.has_work:
        found = max([found, *(output.cached_tokens for output in core.step())])
    return found


def kept_by(core: EngineCore, identity: bytes = b"one", held: bytes = b"") -> SleepingKV | None:
    """`held`: by the tier before."""
    file = open_tier_file(EngineConfig.from_arguments(device="cuda", enable_sleep_mode=True), None)
    assert file is not None
    os.write(file, held)
    return KVKeeper(core, core.runner, identity, file).keep(lambda: None)


def keeper_of(woken: EngineCore, kept: SleepingKV | None) -> KVKeeper:
    """Of the process that comes next."""
    file = open_tier_file(EngineConfig.from_arguments(device="cuda", enable_sleep_mode=True), kept)
    return KVKeeper(woken, woken.runner, b"one", file)


class FakePool:
    """Of a CPU, in RAM. `broken_after`: pages, with which whoever restores it dies."""

    def __init__(self, page_bytes: int, broken_after: int | None = None) -> None:
        self._page_bytes, self._left = page_bytes, broken_after
        self.memory = bytearray(100 * page_bytes)

    def page_view(self, page: int) -> memoryview:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise KeyboardInterrupt
        return memoryview(self.memory)[page * self._page_bytes : (page + 1) * self._page_bytes]

    def drop_page(self, page: int) -> None:
        self.page_view(page)[:] = bytes(self._page_bytes)


def on_cpu(core: EngineCore, broken_after: int | None = None) -> KVKeeper:
    core.runner.kv = FakePool(core.scheduler.kv.layout.page_bytes, broken_after)  # type: ignore[attr-defined]
    return KVKeeper(core, core.runner, b"one", None)


@pytest.mark.parametrize("windows", LAYERS.values(), ids=LAYERS.keys())
def test_what_the_pool_and_ram_hold_is_found_again(windows: tuple[int | None, ...]) -> None:
    core = make(windows)
    for number in range(PROMPTS):
        assert cached(core, str(number), 1000 * number) == 0
    kept = kept_by(core)
    assert kept is not None
    core.scheduler.kv.check_invariants()
    woken = make(windows)
    assert woken.scheduler.kv.tiers is not None
    keeper_of(woken, kept).restore(kept)
    woken.scheduler.kv.check_invariants()
    assert kept.held_bytes == len(woken.scheduler.kv.tiers.host) * woken.scheduler.kv.layout.page_bytes
    for number in range(PROMPTS):
        assert cached(woken, f"again {number}", 1000 * number) == FOUND
    woken.scheduler.kv.check_invariants()
    assert cached(woken, "another", 50_000) == 0


def test_pages_of_another_model_and_of_files_that_are_gone_are_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    core = make((None,))
    cached(core, "first", 0)
    kept = kept_by(core)
    assert kept is not None
    for identity, there in (
        (b"two", kept),
        (b"one", SleepingKV(identity=b"one", pages_path="/", index_path="/nowhere", held_bytes=1)),
    ):
        woken = make((None,))
        KVKeeper(woken, woken.runner, identity, 0).restore(there)
        assert cached(woken, "again", 0) == 0
    assert "could not be read" in caplog.text


def test_pages_that_are_not_pinned_in_time_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.engine.core.kept_kv.PIN_S", 0.0)
    core = make((None,))
    for number in range(PROMPTS):
        cached(core, str(number), 1000 * number)
    kept = kept_by(core)
    assert kept is not None
    woken = make((None,), ready=2)
    keeper_of(woken, kept).restore(kept)
    assert woken.scheduler.kv.tiers is not None
    assert len(woken.scheduler.kv.tiers.host) == 2
    woken.runner.ready = 200  # type: ignore[attr-defined]
    cached(woken, "something", 77_000)
    assert len(woken.scheduler.kv.tiers.host) > 20
    woken.scheduler.kv.check_invariants()
    woken.scheduler.reset_prefix_cache()
    assert len(woken.scheduler.kv.tiers.host) == 0


def test_nobody_waits_for_pages_that_could_not_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.engine.core.kept_kv.PIN_S", PATIENCE_S)
    core = make((None,))
    cached(core, "first", 0)
    kept = kept_by(core)
    assert kept is not None
    woken = make((None,), ready=2)
    woken.runner.failed = True  # type: ignore[attr-defined]
    began_s = time.monotonic()
    keeper_of(woken, kept).restore(kept)
    assert time.monotonic() - began_s < PATIENCE_S / 2
    assert woken.scheduler.kv.tiers is not None
    assert len(woken.scheduler.kv.tiers.host) == 2
    woken.scheduler.kv.check_invariants()


def test_pages_that_could_not_be_pinned_are_given_back_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody could read them, and RAM is what is short then; whoever comes next must not take holes for pages."""
    monkeypatch.setattr("tests.unit.engine.test_kept_kv.HEAD_DIM", 1024)
    core = make((None,))
    cached(core, "first", 0)
    cached(core, "second", 1000)
    page_bytes = core.scheduler.kv.layout.page_bytes
    kept = kept_by(core, held=b"x" * (200 * page_bytes))
    assert kept is not None
    ready = 3
    assert kept.held_bytes > 2 * ready * page_bytes
    woken = make((None,), ready)
    woken.runner.failed = True  # type: ignore[attr-defined]
    keeper_of(woken, kept).restore(kept)
    assert woken.scheduler.kv.tiers is not None
    assert len(woken.scheduler.kv.tiers.host) == ready
    assert os.stat(kept.pages_path).st_blocks * 512 == ready * page_bytes
    assert "are given up: they could not be pinned" in caplog.text
    again = make((None,))
    keeper_of(again, kept).restore(kept)
    assert again.scheduler.kv.tiers is not None
    assert len(again.scheduler.kv.tiers.host) == ready
    again.scheduler.kv.check_invariants()


def test_a_cache_that_holds_nothing_keeps_nothing() -> None:
    assert kept_by(make((None,))) is None


async def test_the_front_holds_the_files_and_lets_them_go() -> None:
    core = make((None,))
    cached(core, "first", 0)
    kept, files, told = kept_by(core), KeptFiles(), list[object]()
    assert kept is not None

    def send(message: protocol.ToEngine) -> bool:
        told.append(message)
        files.answered(protocol.Kept(kept))
        return True

    await files.ask(send)
    assert told == [protocol.KeepKV()]
    assert files.kept is not None
    assert (files.kept.identity, files.held_bytes) == (b"one", kept.held_bytes)
    assert os.path.exists(files.kept.pages_path)
    gone = files.kept.index_path
    files.drop()
    assert (files.kept, files.held_bytes, os.path.exists(gone)) == (None, 0, False)
    await files.ask(lambda message: False)  # Nobody is there.
    missing = SleepingKV(identity=b"", pages_path="/nowhere", index_path="/nowhere", held_bytes=1)
    files.answered(protocol.Kept(missing))
    assert files.kept is None


def test_pages_of_a_tier_that_could_not_be_opened_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier is another file then, and its pages hold nothing."""
    core = make((None,))
    cached(core, "first", 0)
    kept, woken = kept_by(core), make((None,))
    assert kept is not None
    keeper_of(woken, None).restore(kept)
    assert cached(woken, "again", 0) == 0


def test_a_process_that_dies_while_it_takes_pages_leaves_none_to_the_next() -> None:
    """They are taken out of the file one by one: what is left there of them is empty."""
    core = make((None,))
    cached(core, "first", 0)
    kept = on_cpu(core).keep(lambda: None)
    assert kept is not None
    with pytest.raises(KeyboardInterrupt):
        on_cpu(make((None,)), broken_after=2).restore(kept)
    woken = make((None,))
    on_cpu(woken).restore(kept)
    assert cached(woken, "again", 0) == 0
    woken.scheduler.kv.check_invariants()


def test_of_a_tier_only_pages_with_content_stay_in_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has all of its memory from its start on, and whoever puts an engine to sleep wants memory back."""
    monkeypatch.setattr("tests.unit.engine.test_kept_kv.HEAD_DIM", 1024)
    core = make((None,))
    cached(core, "first", 0)
    page_bytes = core.scheduler.kv.layout.page_bytes
    assert page_bytes > 4 * mmap.PAGESIZE
    whole = b"".join(bytes([number]) * page_bytes for number in range(1, 201))
    kept = kept_by(core, held=whole)
    assert kept is not None
    with open(kept.pages_path, "rb") as pages, open(kept.index_path, "rb") as index:
        assert os.fstat(pages.fileno()).st_blocks * 512 == kept.held_bytes
        for _, _, page in msgspec.msgpack.decode(index.read()):
            assert os.pread(pages.fileno(), page_bytes, page * page_bytes) == bytes([page + 1]) * page_bytes


def test_an_engine_that_cannot_keep_pages_sleeps_without_them(caplog: pytest.LogCaptureFixture) -> None:
    """It would die else, and be started again, only to be put to sleep."""
    core = make((None,))
    cached(core, "first", 0)
    keeper = on_cpu(core)

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "memfd_create", refuse)
        assert keeper.keep(lambda: None) is None
    assert "too many open files" in caplog.text


def test_nothing_is_stepped_once_pages_were_given_away() -> None:
    """A step would write pages of the pool that are empty by now to a store on disk, or save others over kept ones."""
    core, submitted = make((None,)), list[StepPlan]()
    cached(core, "first", 0)
    assert core.scheduler.kv.tiers is not None
    core.scheduler.kv.tiers.spare_wanted = 80  # As if there were no time to save all.
    keeper, submit = on_cpu(core), core.runner.submit

    def noted(plan: StepPlan, masks: object = None) -> SimpleNamespace:
        submitted.append(plan)
        return submit(plan, masks)  # type: ignore[arg-type, return-value]

    core.runner.submit = noted  # type: ignore[method-assign, assignment]
    said: list[protocol.ToEngine | None] = [protocol.KeepKV(), None, protocol.ResetPrefixCache(), None, protocol.Stop()]
    heard = list[object]()

    def receive(flags: int) -> bytes:
        if (message := said.pop(0)) is None:
            raise zmq.Again
        return protocol.encode(message)

    socket = SimpleNamespace(
        poll=lambda timeout_ms: None,
        recv=receive,
        send=lambda message: heard.append(protocol.decode_from_engine(message)),
    )
    main._serve(core, socket, SimpleNamespace(beat=lambda: None), keeper)  # type: ignore[arg-type]
    assert [type(one) for one in heard] == [protocol.Kept]
    assert submitted == []
