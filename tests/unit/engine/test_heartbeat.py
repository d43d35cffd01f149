"""The engine's loop is heard while there is nothing to do, and while a step is long; not when it hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from deadlines import PATIENCE_S

from holdfast.engine.process import protocol
from holdfast.engine.process.main import BEAT_S, _Heart, _serve
from holdfast.records import EngineStats, KVStoreUse


class Core:
    """Works at whatever a test lets it."""

    def __init__(self) -> None:
        self.work: Callable[[], None] | None = None
        self.store: KVStoreUse | None = None

    @property
    def has_work(self) -> bool:
        return self.work is not None

    def step(self) -> list[Any]:
        work, self.work = self.work, None
        if work is not None:
            work()
        return []

    def stats(self) -> EngineStats:
        return EngineStats(kv_store=self.store)

    def kv_store_use(self) -> KVStoreUse | None:
        return self.store

    def check_ranks(self) -> None:
        pass

    def balance_kv(self) -> None:
        pass

    def pop_balanced(self) -> None:
        return None

    def breathe(self) -> None:
        pass

    def pop_breathed(self) -> None:
        return None


class Loop:
    def __init__(self) -> None:
        self.core = Core()
        self._context = zmq.Context()
        engine, self.front = (self._context.socket(zmq.PAIR) for _ in range(2))
        self.front.rcvtimeo = self.front.sndtimeo = int(PATIENCE_S * 1000)  # A loop that has failed hears nothing.
        engine.bind("inproc://loop")
        self.front.connect("inproc://loop")
        self.heart = _Heart(engine)
        self.thread = threading.Thread(target=self._run, args=(engine,))
        self.thread.start()

    def _run(self, engine: zmq.Socket[bytes]) -> None:
        with engine:
            _serve(self.core, engine, self.heart)  # type: ignore[arg-type]

    def hear(self) -> protocol.FromEngine:
        return protocol.decode_from_engine(self.front.recv())

    def say(self, message: protocol.ToEngine) -> None:
        self.front.send(protocol.encode(message))

    def end(self) -> None:
        self.say(protocol.Stop())
        self.thread.join(PATIENCE_S)
        self.close()

    def close(self) -> None:
        assert not self.thread.is_alive()
        self._context.destroy(linger=0)


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.end()


def test_it_is_heard_while_there_is_nothing_to_do(loop: Loop) -> None:
    assert [loop.hear() for _ in range(3)] == [protocol.Beat()] * 3


def test_what_others_made_of_a_shared_kv_store_is_told_while_there_is_nothing_to_do(loop: Loop) -> None:
    for held in (8, 3):
        loop.core.store = KVStoreUse(held_bytes=held)
        while not isinstance(heard := loop.hear(), protocol.StepOutputs):
            pass
        assert heard.stats.kv_store == loop.core.store
    assert [loop.hear() for _ in range(2)] == [protocol.Beat()] * 2  # And not again.


def test_a_long_step_is_heard_between_its_layers_and_a_hung_one_is_not(loop: Loop) -> None:
    go_on, hung = threading.Event(), threading.Event()

    def layers() -> None:
        for _ in range(4):
            threading.Event().wait(BEAT_S * 1.1)
            loop.heart.beat()
        hung.set()
        go_on.wait(PATIENCE_S)

    loop.core.work = layers
    loop.say(protocol.Abort([]))  # Wakes it.
    assert hung.wait(PATIENCE_S)
    heard = 0
    while loop.front.poll(int(BEAT_S * 3000)):
        assert loop.hear() == protocol.Beat()
        heard += 1
    assert heard >= 4
    go_on.set()
    while not isinstance(loop.hear(), protocol.StepOutputs):
        pass


def test_steps_of_which_nothing_came_are_not_told() -> None:
    """While pages wait for a slow disk there are hundreds a second."""
    loop, left, over = Loop(), iter(range(50)), threading.Event()

    def nothing() -> None:
        if next(left, None) is None:
            over.set()
        else:
            loop.core.work = nothing

    loop.core.work = nothing
    loop.say(protocol.Abort([]))  # Wakes it, and is told itself.
    assert over.wait(PATIENCE_S)
    loop.say(protocol.Stop())
    loop.thread.join(PATIENCE_S)
    told = 0
    while loop.front.poll(0):
        told += isinstance(loop.hear(), protocol.StepOutputs)
    loop.close()
    assert told <= 2
