"""The host's cores timed while a GPU's link copies, and the link meanwhile: both read the same memory, and either is
slower beside the other.

    the thread that launches steps    starts ──► waits ─────► copies, copies, copies, copies ──► goes on
    another, with the cores           loads ───► is alone ──► times one thing, the next ──► is done

The link has one owner, who brings the copies; the other one only says when. Whichever fails, or is interrupted, leaves
neither waiting. Knows nothing of layers, nor what follows of the rates.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.errors import HoldfastError

WINDOW_S, WINDOW_COPIES = 0.1, 2
"""That one thing is timed for, and copies that end meanwhile, at least."""
MOST_WINDOW_S = 5.0
"""For them to end; where they do not the GPU hangs."""
MOST_COPYING_S = 20.0
"""In all, whatever the other thread does."""
BEAT_S = 0.2
"""A start is watched: who waits says as often as that it does."""


@dataclass(frozen=True, slots=True)
class Together:
    """What was measured at once."""

    host_s: float
    """Of the work that was timed."""
    link_bytes_per_s: float


def wait_beating(event: threading.Event, patience_s: float, beat: Callable[[], None]) -> bool:
    """Whether it is set within that time."""
    ends_s = time.monotonic() + patience_s
    while not event.wait(max(0.0, min(BEAT_S, ends_s - time.monotonic()))):
        if time.monotonic() >= ends_s:
            return False
        beat()
    return True


class BesideCopies:
    """For one measurement, by two threads."""

    def __init__(self) -> None:
        self.why_not = "the start was over before it could be measured"
        """There are no copies, or no more of them."""
        self._calm, self._asked, self._first = threading.Event(), threading.Event(), threading.Event()
        self._done, self._over = threading.Event(), threading.Event()
        self._arrived: list[tuple[float, int]] = []
        """Seconds that copies took so far, and their bytes, whenever some have arrived."""

    # The thread that launches steps.

    def copy(self, bring: Callable[[], tuple[float, int]], patience_s: float, beat: Callable[[], None]) -> None:
        """Until the other thread is done, which has so long to ask for copies. `bring`: copies something, and returns
        the seconds and bytes of all copies so far when it has arrived. `beat`: called again and again."""
        try:
            self._calm.set()
            if not wait_beating(self._asked, patience_s, beat):
                self.why_not = f"nothing was there to be timed within {patience_s:g} s"
                return
            ends_s = time.monotonic() + MOST_COPYING_S
            while not self._done.is_set():
                if time.monotonic() > ends_s:
                    self.why_not = f"it took more than {MOST_COPYING_S:g} s"
                    return
                self._arrived.append(bring())
                self._first.set()
                beat()
        except (HoldfastError, RuntimeError) as error:
            self.why_not = f"copies failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        except BaseException:
            self.why_not = "it was interrupted"
            raise
        finally:
            self.give_up()

    @property
    def asked(self) -> bool:
        """The other thread has something to time, or is done."""
        return self._asked.is_set()

    @property
    def over(self) -> bool:
        """There are no copies any more."""
        return self._over.is_set()

    def give_up(self) -> None:
        """There are no copies from now on; who waits for some goes on. By any thread."""
        for event in (self._over, self._calm, self._first):
            event.set()

    # The thread that has the cores.

    def calm(self) -> bool:
        """Once nothing is computed nor copied, until copies are asked for. False: there will be none."""
        self._calm.wait()
        return not self._over.is_set()

    def begin(self) -> bool:
        """Asks for copies, and waits for the first of them."""
        self._asked.set()
        self._first.wait()
        return not self._over.is_set()

    def timed(self, work: Callable[[], float]) -> Together | None:
        """`work` computes, and returns the seconds that count. None: copies ended before that, or were not timed by the
        link. What arrives between two looks was copied meanwhile, all of it."""
        began_s, first, taken_s = time.monotonic(), len(self._arrived), list[float]()
        while True:
            taken_s.append(work())
            arrived, over_s = self._arrived[first:], time.monotonic() - began_s
            if self._over.is_set():
                return None
            if over_s >= WINDOW_S and len(arrived) > WINDOW_COPIES:
                break
            if over_s >= MOST_WINDOW_S:
                self.why_not = f"{len(arrived)} copies ended in {over_s:.0f} s"
                return None
        copying_s, nbytes = (last - earlier for last, earlier in zip(arrived[-1], arrived[0], strict=True))
        if copying_s <= 0 or nbytes <= 0:
            self.why_not = "the link's copies were not timed"
            return None
        return Together(statistics.median(taken_s), nbytes / copying_s)

    def end(self) -> None:
        """No more copies. Also where none were asked for."""
        self._done.set()
        self._asked.set()
