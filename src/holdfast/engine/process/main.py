"""The engine process: loads the model, then steps, reading messages between steps.

Started by the front end as `python -m holdfast.engine.process.entry ADDRESS`; ends on request, or when the front end is
gone (its standard input closes). All messages are in `protocol`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import signal
import threading
import time
import traceback
from typing import TYPE_CHECKING

import zmq

from holdfast.config import EngineConfig
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.process import protocol
from holdfast.engine.process.fault_injection import fail_loading, with_faults
from holdfast.engine.startup.preload_torch import import_torch
from holdfast.engine.startup.prespawn import cannot_start, shortage
from holdfast.errors import (
    DISK_FAILED,
    RANK_WITHOUT_MEMORY,
    DoesNotFitError,
    EngineDiedError,
    HoldfastError,
    UnsupportedOptionError,
)
from holdfast.observability.line_format import log_as
from holdfast.observability.nonblocking_output import unblock_output

if TYPE_CHECKING:
    from holdfast.engine.core.kept_kv import KVKeeper
    from holdfast.engine.startup.build import FoundModel
    from holdfast.records import EngineStats

log = logging.getLogger("holdfast")

IDLE_POLL_MS = 500
BEAT_S = 0.4
"""Between two heartbeats that come on top of what is said anyway: between the layers of a long step."""


def run(address: str) -> int:
    unblock_output()
    log_as("engine")
    # They may reach the whole terminal group, or unit; the front decides.
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(one, signal.SIG_IGN)
    _end_with_parent()
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.linger = 2000
        socket.bind(address)
        _import_ahead()
        begin = protocol.decode_to_engine(socket.recv())
        if not isinstance(begin, protocol.Init):
            raise SystemExit("the first message must be Init")
        level = logging.DEBUG if begin.debug else logging.INFO
        log_as("engine" if begin.engine is None else f"engine {begin.engine}", level)
        heart = _Heart(socket)
        try:
            config = EngineConfig(**begin.config)  # type: ignore[arg-type]
            core, keeper = _build(config, begin, socket, heart)
        except Exception as error:
            if shortage(error) is not None:
                error = cannot_start(error)
            elif not isinstance(error, HoldfastError):
                traceback.print_exc()
            socket.send(protocol.encode(protocol.StartFailed(protocol.pack_failure(error))))
            return 1
        gc.freeze()  # What is there now stays: only what steps make is looked through.
        gc.enable()
        try:
            _serve_and_close(core, socket, heart, keeper)
        except HoldfastError:
            return 1
    return 0


def _serve_and_close(
    core: EngineCore, socket: zmq.Socket[bytes], heart: _Heart, keeper: KVKeeper | None = None
) -> None:
    """A lost node or rank, one without memory, or a disk that fails, is no fault of this program: it is said in a line,
    and where it was noticed is for whoever looks for that. All else may be one, and keeps its traceback."""
    try:
        _serve(core, socket, heart, keeper)
    except HoldfastError as error:  # Whoever waits for an answer shall hear of it.
        socket.send(protocol.encode(protocol.StepFailed(protocol.pack_failure(error))))
        if isinstance(error, EngineDiedError) or error.code in (DISK_FAILED, RANK_WITHOUT_MEMORY):
            log.warning("%s; this engine ends [%s]", error.message, error.code)
            log.debug("where this was noticed", exc_info=True)
        else:
            log.error("%s; this engine ends [%s]", error.message, error.code, exc_info=True)
        raise
    finally:
        core.close()


def _import_ahead() -> None:
    """What every engine needs, while the front still finds the model and plans. What cannot be imported is said when
    it is needed."""
    with contextlib.suppress(ImportError):
        import_torch()
        importlib.import_module("holdfast.execution.runner")
        importlib.import_module("holdfast.execution.weights.load")
        importlib.import_module("holdfast.engine.startup.build")


def _build(
    config: EngineConfig, begin: protocol.Init, socket: zmq.Socket[bytes], heart: _Heart
) -> tuple[EngineCore, KVKeeper | None]:
    from holdfast.engine.core.kept_kv import open_tier_file
    from holdfast.engine.core.kv_store import files_stamp
    from holdfast.engine.core.pool_memory import breathe_in_ram
    from holdfast.engine.core.structured_outputs import make_structured_outputs
    from holdfast.engine.startup.build import build_core, find_model

    def progress(stage: str, done: int, total: int) -> None:
        socket.send(protocol.encode(protocol.Loading(stage, done, total)))

    fail_loading()
    model = find_model(config, text=False)  # The front has the tokenizer, and gives requests their defaults.
    loaded_from, tier_file = files_stamp(config, model.files), open_tier_file(config, begin.kept)
    core, info = build_core(config, model, progress, begin.plan, heart.beat, tier_file, again=begin.again)
    keeper = _keeper(config, model, begin, core, loaded_from, tier_file)
    if not core.on_device:
        breathe_in_ram(core, config)
    if (address := begin.grammar_address) is not None:
        core.structured_output = make_structured_outputs(
            core.scheduler.limits, model.spec, lambda: address, on_device=core.on_device
        )
    core.runner = with_faults(core.runner)
    socket.send(protocol.encode(protocol.Ready(info, core.stats())))
    return core, keeper


def _keeper(
    config: EngineConfig,
    model: FoundModel,
    begin: protocol.Init,
    core: EngineCore,
    loaded_from: bytes,
    tier_file: int | None,
) -> KVKeeper | None:
    """What keeps prefixes while the engine sleeps, with those that were kept before; None: nothing does."""
    from holdfast.engine.core.kept_kv import KVKeeper, kv_identity

    if not config.enable_sleep_mode or not config.enable_prefix_caching or begin.plan is None:
        return None
    identity = kv_identity(config, model.files, model.spec, begin.plan, core, loaded_from)
    if identity is None:
        return None
    keeper = KVKeeper(core, core.runner, identity, tier_file)
    if begin.kept is not None:
        keeper.restore(begin.kept)
    return keeper


class _Heart:
    """Says that the loop goes round. It is the loop that beats, and what runs in it: a thread of its own would go on
    beating when the loop hangs."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._message = protocol.encode(protocol.Beat())
        self._last_s = 0.0

    def beat(self) -> None:
        """Cheap enough to be called after every layer."""
        now_s = time.monotonic()
        if now_s - self._last_s >= BEAT_S:
            self._last_s = now_s
            with contextlib.suppress(zmq.Again):  # The front reads nothing, and does not wait for beats then.
                self._socket.send(self._message, zmq.NOBLOCK)


def _serve(core: EngineCore, socket: zmq.Socket[bytes], heart: _Heart, keeper: KVKeeper | None = None) -> None:
    resizes = _Resizes(core, socket)
    told: EngineStats | None = None
    while True:
        if not core.has_work:
            socket.poll(IDLE_POLL_MS)
        heart.beat()
        changed = False
        while (heard := _hear(socket)) is not None:
            if isinstance(heard, protocol.Add):
                for request in heard.requests:
                    core.add(request)
            elif isinstance(heard, protocol.Abort):
                for request_id in heard.request_ids:
                    core.abort(request_id)
            elif isinstance(heard, protocol.ResetPrefixCache):
                core.scheduler.reset_prefix_cache()
            elif isinstance(heard, protocol.ResizeKV | protocol.SetVram):
                resizes.ask(heard)
            elif isinstance(heard, protocol.KeepKV):
                resizes.go_on(wait=False)
                socket.send(protocol.encode(protocol.Kept(None if keeper is None else keeper.keep(heart.beat))))
                _await_stop(socket, heart)
                return
            elif isinstance(heard, protocol.Stop):
                return
            changed = True
        resizes.go_on()
        if core.has_work or changed:  # After the last request was aborted nothing steps, but the numbers have changed.
            outputs, stats = core.step(), core.stats()
            if outputs or changed or stats != told:  # Pages may wait for a disk for long, and nothing happen meanwhile.
                socket.send(protocol.encode(protocol.StepOutputs(outputs, stats)))
                told = stats
        else:
            core.check_ranks()
            core.balance_kv()
            core.breathe()
            # Of a store that another process writes or prunes.
            if (use := core.kv_store_use()) is not None and (told is None or use != told.kv_store):
                told = core.stats()
                socket.send(protocol.encode(protocol.StepOutputs([], told)))
        if (breathed := core.pop_breathed()) is not None:
            socket.send(protocol.encode(protocol.StepOutputs([], core.stats())))
            socket.send(protocol.encode(protocol.Breathed(breathed)))
        if (balanced := core.pop_balanced()) is not None:
            socket.send(protocol.encode(protocol.Balanced(balanced)))


def _await_stop(socket: zmq.Socket[bytes], heart: _Heart) -> None:
    """Pages are the next process's by now: a step would save others over them, or write emptied ones to disk."""
    while not isinstance(_hear(socket), protocol.Stop):
        heart.beat()
        socket.poll(IDLE_POLL_MS)


class _Resizes:
    """Of the pool, as the front asks for them: answers go on while pages go to RAM, and the pool is resized then."""

    def __init__(self, core: EngineCore, socket: zmq.Socket[bytes]) -> None:
        self._core, self._socket = core, socket
        self._asked: protocol.ResizeKV | protocol.SetVram | None = None

    def ask(self, asked: protocol.ResizeKV | protocol.SetVram) -> None:
        self.go_on(wait=False)  # Who asked before is answered before.
        try:
            self._core.prepare_resize(asked.asked if isinstance(asked, protocol.SetVram) else asked.blocks)
        except (DoesNotFitError, UnsupportedOptionError) as error:
            self._answer(protocol.Resized(asked.number, protocol.pack_failure(error)))
            return
        self._asked = asked
        self.go_on()

    def go_on(self, *, wait: bool = True) -> None:
        """`wait`: for pages that go to RAM."""
        if (asked := self._asked) is not None and not (wait and not self._core.may_resize):
            self._asked = None
            self._answer(_resized(self._core, asked))

    def _answer(self, answer: protocol.Resized) -> None:
        numbers = protocol.StepOutputs([], self._core.stats())  # Whoever asked sees what it did.
        self._socket.send(protocol.encode(numbers))
        self._socket.send(protocol.encode(answer))


def _resized(core: EngineCore, asked: protocol.ResizeKV | protocol.SetVram) -> protocol.Resized:
    """Of anything but a refusal this process ends, as of a step that fails: the front starts another, and requests go
    on there."""
    granted = None
    try:
        if isinstance(asked, protocol.SetVram):
            granted = core.set_vram(asked.asked)
        else:
            core.set_pool(asked.blocks)
    except (DoesNotFitError, UnsupportedOptionError) as error:
        return protocol.Resized(asked.number, protocol.pack_failure(error))
    return protocol.Resized(asked.number, granted=granted, stood_still_s=core.stood_still_s)


def _hear(socket: zmq.Socket[bytes]) -> protocol.ToEngine | None:
    try:
        return protocol.decode_to_engine(socket.recv(zmq.NOBLOCK))
    except zmq.Again:
        return None


def _end_with_parent() -> None:
    def watch() -> None:
        # The front holds the other end and writes nothing: end of file means that it is gone, however it went.
        while os.read(0, 4096):
            pass
        os._exit(3)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
