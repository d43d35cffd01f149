"""A grammar worker: a process that compiles grammars, follows answers and fills masks, within limits that the system
holds it to. It may be killed at any time; nobody shares memory with it but the marker of what it does.

    asked ─► consumed at once, answered ─► masks filled, those of quick grammars first, listening between two of them

One thread, so that what it died of is what it was doing. Forked by `service`, once for every connection.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.errors import EngineError, GrammarError, HoldfastError
from holdfast.records import Failure
from holdfast.records.structured import StructuredOutputsParams
from holdfast.text.structured import wire
from holdfast.text.structured.llguidance_backend import BEYOND_LIMITS, Grammars, Matcher
from holdfast.units import MIB, format_bytes

STACK_BYTES = 32 * MIB
"""The library descends by recursion, some 16 KiB for each reference of a schema to the next."""
ADDRESSES_BYTES = 512 * MIB
"""Beyond the limit of memory: addresses that no memory lies behind."""
LOOKED_AT_S = 0.001
"""What took longer may have grown: its memory is looked at."""
TOGETHER_S = 0.0005
"""Masks that come within it are sent together."""
RENEW_S = 0.5
"""Of processor time, until the system's limit of it is moved on."""
OUT_OF_MEMORY = 77
"""Exit code, where Python itself noticed."""


@dataclass(slots=True)
class _Following:
    matcher: Matcher
    length: int
    """Tokens of its answer so far."""
    cost_s: float = 0.0
    """Of a mask, the newest counting most."""
    grown_bytes: int = 0


class Worker:
    def __init__(self, connection: socket.socket, grammars: Grammars) -> None:
        self._connection, self._grammars = connection, grammars
        self._inbox = wire.Inbox()
        self._followed: dict[int, _Following] = {}
        self._to_fill: list[int] = []
        self._limits = wire.WorkerLimits(0, 1, 0)
        self._marker: wire.Marker | None = None
        self._born_bytes = _own_bytes()
        self._renew_s = 0.0
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._unsaid: list[wire.FromWorker] = []
        self._unsaid_s = 0.0

    def run(self) -> None:
        self._say(wire.Hello(os.getpid()))
        self._receive_limits()
        while True:
            message = self._inbox.to_worker()
            if message is not None:
                self._obey(message)
            elif self._to_fill and not self._poll.poll(0):
                self._fill(self._quickest())
            elif not self._hear():
                return

    def _say(self, message: wire.FromWorker) -> None:
        self._unsaid.append(message)
        self._flush()

    def _flush(self) -> None:
        if self._unsaid:
            self._connection.sendall(b"".join(map(wire.pack, self._unsaid)))
            self._unsaid.clear()

    def _hear(self) -> bool:
        received = self._connection.recv(1 << 18)
        self._inbox.put(received)
        return bool(received)

    def _receive_limits(self) -> None:
        received, descriptors, _, _ = socket.recv_fds(self._connection, 1 << 16, 1)
        self._inbox.put(received)
        while (limits := self._inbox.to_worker()) is None:
            if not self._hear():
                raise SystemExit(0)
        assert isinstance(limits, wire.WorkerLimits)
        if descriptors:
            self._marker = wire.Marker(descriptors[0])
        self._limits = limits
        with contextlib.suppress(OSError):
            os.nice(limits.niceness)
        _limit_memory(limits.memory_bytes)

    def _obey(self, message: wire.ToWorker) -> None:
        if isinstance(message, wire.Advance):
            self._advance(message)
        elif isinstance(message, wire.Open):
            self._open(message)
        elif isinstance(message, wire.Close):
            for number in message.numbers:
                self._followed.pop(number, None)
            self._to_fill = [number for number in self._to_fill if number in self._followed]
            if not self._followed:
                self._grammars.forget()
        elif isinstance(message, wire.Check):
            self._check(message.params)
        elif isinstance(message, wire.Accepts):
            self._accepts(message)

    def _guarded(self, number: int, work: Callable[[], None], *, opening: bool = False) -> Failure | None:
        """Does it under the processor's limit and with the marker set; whatever goes wrong ends this answer alone."""
        # Of this thread, the only one: with a limit set, the clock of the process may stand still for long.
        used_s = time.thread_time()
        if used_s >= self._renew_s:
            self._renew_s = used_s + RENEW_S
            most_s = math.ceil(self._renew_s) + self._limits.cpu_s
            _, hard = resource.getrlimit(resource.RLIMIT_CPU)
            most_s = most_s if hard == resource.RLIM_INFINITY else min(most_s, hard)
            resource.setrlimit(resource.RLIMIT_CPU, (most_s, hard))
        if self._marker is not None:
            self._marker.begin(number, opening=opening)
        try:
            work()
        except HoldfastError as error:
            return Failure.of(error)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException as error:  # The library may panic, which is no Exception.
            return Failure.of(EngineError(f"the grammar matcher failed: {type(error).__name__}"))
        finally:
            if self._marker is not None:
                self._marker.done()
        return None

    def _check(self, params: StructuredOutputsParams) -> None:
        began_s, before = time.thread_time(), _own_bytes()
        slowest_s = 0.0

        def check() -> None:
            nonlocal slowest_s
            slowest_s = self._grammars.check(params).slowest_s

        failure = self._guarded(0, check, opening=True)
        cost = wire.GrammarCost(time.thread_time() - began_s, slowest_s, max(_own_bytes() - before, 0))
        self._say(cost if failure is None else wire.GrammarRefused(failure))

    def _accepts(self, asked: wire.Accepts) -> None:
        fits = False

        def look() -> None:
            nonlocal fits
            fits = self._grammars.accepts(asked.text, asked.params)

        self._guarded(0, look, opening=True)
        self._say(wire.Accepted(fits))

    def _open(self, asked: wire.Open) -> None:
        before = _own_bytes()

        def follow() -> None:
            matcher = self._grammars.matcher(asked.params)
            if not matcher.consume_all(asked.token_ids):
                raise matcher.error or EngineError("the output so far does not match the grammar")
            self._followed[asked.number] = _Following(matcher, len(asked.token_ids))

        failure = self._guarded(asked.number, follow, opening=True)
        if failure is not None:
            self._say(wire.Opened(asked.number, len(asked.token_ids), failure=failure))
            return
        held = max(_own_bytes() - before, 0)
        complete = self._followed[asked.number].matcher.complete
        if not complete:
            self._to_fill.append(asked.number)
        self._say(wire.Opened(asked.number, len(asked.token_ids), held, complete))
        self._spare_memory()

    def _advance(self, asked: wire.Advance) -> None:
        advanced = wire.Advanced([], {}, [])
        for number, token, wanted in asked.tokens:
            following = self._followed.get(number)
            if following is None:
                continue  # It was closed, or has failed and said so.
            following.length += 1
            failure = self._consume(number, following.matcher, token)
            if failure is not None:
                advanced.failed[number] = failure
                del self._followed[number]
                self._to_fill = [one for one in self._to_fill if one != number]
            elif following.matcher.complete:
                advanced.complete.append(number)
            else:
                advanced.others.append(number)
                if wanted and number not in self._to_fill:
                    self._to_fill.append(number)
        self._say(advanced)

    def _consume(self, number: int, matcher: Matcher, token: int) -> Failure | None:
        def consume() -> None:
            if matcher.consume(token):
                return
            error: HoldfastError | None = matcher.error
            if error is None or error.code != BEYOND_LIMITS:
                error = EngineError("a token was sampled that the grammar does not allow")
            raise error

        return self._guarded(number, consume)

    def _quickest(self) -> int:
        number = min(self._to_fill, key=lambda one: self._followed[one].cost_s)
        self._to_fill.remove(number)
        return number

    def _fill(self, number: int) -> None:
        following, mask = self._followed[number], b""
        if following.cost_s > TOGETHER_S:
            self._flush()  # Nobody waits for it with a mask that is there.
        began_s, before = time.thread_time(), _own_bytes() if following.cost_s > LOOKED_AT_S else 0

        def fill() -> None:
            nonlocal mask
            mask = following.matcher.mask()
            if (error := following.matcher.error) is not None:
                raise error

        failure = self._guarded(number, fill)
        spent_s = time.thread_time() - began_s
        following.cost_s = max(spent_s, following.cost_s / 2)
        grown = max(_own_bytes() - before, 0) if before else 0
        following.grown_bytes += grown
        if failure is None and following.grown_bytes > self._limits.memory_bytes // 2:
            failure = Failure.of(too_much_memory(self._limits.memory_bytes // 2))
        if failure is not None:
            del self._followed[number]
        now_s = time.monotonic()
        if not self._unsaid:
            self._unsaid_s = now_s
        self._unsaid.append(wire.Filled(number, following.length, mask, spent_s, grown, failure))
        if not self._to_fill or now_s - self._unsaid_s > TOGETHER_S:
            self._flush()
        if grown:
            self._spare_memory()

    def _spare_memory(self) -> None:
        """Grammars that are compiled for nobody go when the limit comes near."""
        if _own_bytes() - self._born_bytes > self._limits.memory_bytes // 2:
            self._grammars.forget()


def too_much_memory(limit_bytes: int) -> GrammarError:
    return GrammarError(
        f"the grammar needs more than {format_bytes(limit_bytes)} of memory",
        code=BEYOND_LIMITS,
        fix="use a simpler grammar",
        field="structured_outputs",
    )


def _own_bytes() -> int:
    """Without pages of files, which were there before and only become visible. Counted page by page, which takes some
    0.2 ms: the sums that the system keeps at hand are off by megabytes on machines of many cores."""
    try:
        with open("/proc/self/smaps_rollup", "rb") as rollup:
            return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith(b"Anonymous:"))
    except (OSError, StopIteration):
        return 0


def _limit_memory(more_bytes: int) -> None:
    """Of heap and mappings, and of the stack. Beyond it an allocation fails, and the library ends the process."""
    used = dict.fromkeys(("VmData", "VmSize"), 0)
    with open("/proc/self/status") as status:
        for line in status:
            name, _, value = line.partition(":")
            if name in used:
                used[name] = int(value.split()[0]) * 1024
    _lower(resource.RLIMIT_DATA, used["VmData"] + more_bytes)
    _lower(resource.RLIMIT_AS, used["VmSize"] + more_bytes + STACK_BYTES + ADDRESSES_BYTES)
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    most = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _lower(what: int, limit: int) -> None:
    _, hard = resource.getrlimit(what)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(what, (limit, limit))
