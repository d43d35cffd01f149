"""`holdfast rescue`: a server is started, watched, and started again with what it died of put right.

    judge ─► run and watch ─► ended well, or told to end ─► its exit code
                 ▲                │ died
                 │                ▼
                 └── back-off ── a fix that we know and may take?  no ─► why, the command to keep, its exit code

What is said goes to `say`, beside the program's own output. Knows no terminal and no engine; how a program is run is
in process.py, which fix is taken in choose_fix.py.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.doctor.check_command.check import judge
from holdfast.doctor.findings import Diagnosis, Finding, Fix
from holdfast.doctor.report.redact import without_secrets, without_values
from holdfast.errors import HoldfastError, printable
from holdfast.hardware import nvidia
from holdfast.rescue.choose_fix import FixChoice, RescueLimits, Started, check_keep, choose, read, with_planned
from holdfast.rescue.health import HealthPoll, address_of
from holdfast.rescue.masking import EXPLAINED, STANDS_FOR, secret_values, shown, shown_change
from holdfast.rescue.process import GRACE_S, Ended, Supervised
from holdfast.rescue.signals import Signals, ToldToEnd
from holdfast.rescue.watch import OutputWatcher
from holdfast.units import GIB, format_duration, shorten

NOT_FOUND_EXIT, NOT_RUNNABLE_EXIT = 127, 126
"""As a shell says it."""
MOST_BACK_OFF_S = 60.0
JUDGED_WITHIN_S = 20.0
"""A model on the hub may be asked for; a start waits no longer for that."""
SHOWN_LINES = 3
STILL_ENDING_S = 30.0
HEARD_LATE_S = 1.0
"""Who begins to serve so long after it was told to end has not heard it; sooner, it may just not have been seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the user allows."""

    keep: tuple[str, ...] = ()
    """Flags that stay as they are."""
    max_restarts: int = 5
    back_off_s: float = 2.0
    """Before the first restart; twice as long before each further one, and never more than MOST_BACK_OFF_S."""
    hung_after_s: float = 0.0
    """A server that was ready and has not answered for so long is ended and counts as died; 0: it is only said."""
    fix_first: bool = False
    """What is surely wrong with the command is put right before its first start."""
    confirm: Callable[[str], bool] | None = None
    """Asked before each change; None: none is asked for."""


@dataclass(slots=True)
class Rescue:
    words: Sequence[str]
    orders: Orders
    say: Callable[[str], None]
    sleep: Callable[[float], None] = time.sleep
    _tried: list[Started] = field(default_factory=list)
    _taken: list[Fix] = field(default_factory=list)
    _signals: Signals = field(default_factory=Signals)
    _silence_said: bool = False
    _ended_by_us_at: float | None = None
    _keys: frozenset[str] = frozenset()
    """Of the command; whatever is changed, they stay."""
    _explained: bool = False
    """What stands for a key in a printed command."""
    _served_when_told: bool = False
    """When it was told to end, it served already, and may have answers to finish."""
    _told_again: bool = False
    _kept_said: str = ""
    """What was last said of the command to keep: once is enough."""
    _crashed: set[str] = field(default_factory=set)
    """Commands that died while serving."""

    def run(self) -> int:
        """The exit code of the program's last run, as a shell says it; 128 and the signal, where one came between runs.

        Raises a ConfigurationError for a flag to keep that there is not.
        """
        started = read(self.words)
        check_keep(started, self.orders.keep)
        self._keys = secret_values(started)
        with self._signals:
            try:
                return self._run(started)
            except ToldToEnd as told:
                self._tell(f"{signal.Signals(told.number).name}: no server is running, and none will be started")
                return 128 + told.number

    def _tell(self, line: str) -> None:
        """In words of ours no key of a command stands; a command is written by `shown`."""
        self.say(without_values(line, self._keys))

    def _tell_command(self, text: str) -> None:
        self._tell(text)
        if STANDS_FOR.search(text) and not self._explained:
            self._explained = True
            self._tell(f"  ({EXPLAINED})")

    def _run(self, started: Started) -> int:
        judged = self._judged(started)
        if self.orders.fix_first and judged is not None:
            started = self._put_right(started, judged)
        restarts = 0
        while True:
            self._tried.append(started)
            try:
                ended, diagnosis, served = self._once(started)
            except (FileNotFoundError, NotADirectoryError):
                self._tell(f"command not found: {shorten(started.argv[0]) if started.argv else ''}")
                return NOT_FOUND_EXIT
            except PermissionError:
                self._tell(f"{shorten(started.argv[0])} is not executable")
                return NOT_RUNNABLE_EXIT
            if ended.asked or ended.exit_code == 0:
                worked = (served or not ended.asked) and started.text not in self._crashed
                self._command_to_keep(started, worked=worked)
                return ended.exit_code
            if served:
                self._crashed.add(started.text)
            try:
                last = restarts >= self.orders.max_restarts
                choice = self._after_death(started, ended, diagnosis, judged, served, last=last)
            except Exception as error:
                self._tell(
                    f"the failure was not analyzed, because of a bug in Holdfast ({type(error).__name__}: {error})"
                )
                choice = None
            # One that was ended because it hung is started as it was.
            following = choice.started if choice is not None else started if self._ended_by_us_at is not None else None
            if following is None or restarts >= self.orders.max_restarts:
                if following is not None:
                    self._tell(f"not restarted: the limit of {restarts} restarts is reached (--max-restarts)")
                self._command_to_keep(started, worked=False)
                return ended.exit_code
            restarts += 1
            self._wait(restarts)
            started = following

    # One run

    def _once(self, started: Started) -> tuple[Ended, Diagnosis, bool]:
        """How it ended, what its output tells, and whether it had begun to serve."""
        watch, health = OutputWatcher(self._tell), HealthPoll(address_of(started.command))
        watch.feed(f"$ {started.text}")
        if health.taken:
            self._tell("another server already answers at this address: readiness is read from the log only")
        self._silence_said, self._ended_by_us_at = False, None
        self._served_when_told, self._told_again = False, False
        told_ready = False
        began = time.monotonic()

        def tick(supervised: Supervised) -> None:
            nonlocal told_ready
            if not told_ready and (health.ready or watch.ready):
                told_ready = True
                self._ready(started, time.monotonic() - began)
            if supervised.told_to_end_s is None:
                self._served_when_told = told_ready
            if supervised.told_to_end_s is None or self._ended_by_us_at is not None:
                self._silence(supervised, health.silent_s)
            elif health.asked:  # Else it may serve and we cannot know.
                self._unheard(supervised, supervised.told_to_end_s, served=told_ready)

        supervised = Supervised(
            started.argv,
            {**os.environ, **started.environment},
            watch.feed,
            self._signals,
            say=self._tell,
            server=started.command is not None,
        )
        health.start()
        try:
            ended = supervised.run(tick)
        finally:
            health.stop()
        if ended.signal == signal.SIGKILL and not ended.asked and self._ended_by_us_at is None:
            watch.feed("Killed (exit code 137)")
        return ended, watch.diagnosis(), health.ready or watch.ready

    def _ready(self, started: Started, after_s: float) -> None:
        self._tell(f"ready after {format_duration(after_s)}")
        if self._crashed and self._changed:
            self._tell("it is not yet known whether this avoids the earlier crash")
            self._tell_command(f"serving with: {shown(started)}")
        else:
            self._command_to_keep(started, worked=True)

    def _silence(self, supervised: Supervised, silent_s: float) -> None:
        """A server that was ready and answers no more."""
        if silent_s <= 0:
            self._silence_said = False
            return
        limit_s = self.orders.hung_after_s
        if not self._silence_said and silent_s >= (limit_s or GRACE_S):
            self._silence_said = True
            self._tell(
                f"/health has not answered for {format_duration(silent_s)}"
                + (": stopping the server" if limit_s else "")
            )
            if limit_s:
                self._ended_by_us_at = time.monotonic()
                supervised.end()
        elif self._ended_by_us_at is not None and time.monotonic() - self._ended_by_us_at > GRACE_S:
            supervised.end(at_once=True)

    def _unheard(self, supervised: Supervised, told_s: float, *, served: bool) -> None:
        """A server that loads may lose a request to end, and goes on to serve. It has nothing to finish. One that
        served is waited for, and that is said once."""
        if (self._served_when_told or self._told_again) and told_s >= STILL_ENDING_S and not self._silence_said:
            self._silence_said = True
            self._tell(
                f"the server has not exited {format_duration(told_s)} after the signal: a second signal kills it"
            )
        if self._served_when_told or self._told_again:
            return
        if served and told_s < HEARD_LATE_S:
            self._served_when_told = True
        elif served:
            self._told_again = True
            self._tell("the server became ready although it was signalled while starting: sending SIGTERM again")
            supervised.end()
        elif told_s >= GRACE_S:
            self._told_again = True
            self._tell(f"the server is still starting {format_duration(told_s)} after the signal: killing it")
            supervised.end(at_once=True)

    # Between runs

    def _judged(self, started: Started) -> Diagnosis | None:
        """What would be said of the command before it is run; None: nothing can be."""
        from holdfast.planner.inputs.timeout import within

        command = started.command
        if command is None:
            self._tell("this is not the command of a known server: it is run and watched, but never changed")
            return None
        try:
            judged = within(JUDGED_WITHIN_S, lambda: judge(command, runs_here=True))
        except Exception as error:  # Whatever is wrong with the judging, the command may be right.
            known = isinstance(error, TimeoutError | HoldfastError)
            told = str(error) if known else f"a bug in Holdfast ({type(error).__name__}: {error})"
            self._tell(f"not checked before the start: {printable(told.splitlines()[0])}")
            return None
        for finding in judged.findings:
            self._tell(f"check before the start: {finding.what}")
            if finding.fix is not None:
                self._fix(finding.fix)
        return judged

    def _put_right(self, started: Started, judged: Diagnosis) -> Started:
        """Before the first start, what is surely wrong; each mistake once."""
        for finding in judged.findings:
            choice = choose(started, [finding], self._limits(), tried=[started])
            if choice is not None and finding.confidence == "high" and self._agreed(choice):
                self._tried.append(started)
                started = choice.started
        return started

    def _limits(self) -> RescueLimits:
        there = nvidia.probe().gpus
        return RescueLimits(
            keep=self.orders.keep,
            bold=self.orders.confirm is not None,
            gpus=len(there),
            gpu_gib=min((gpu.total_bytes for gpu in there), default=0) / GIB or None,
        )

    def _after_death(
        self,
        started: Started,
        ended: Ended,
        diagnosis: Diagnosis,
        judged: Diagnosis | None,
        served: bool,
        *,
        last: bool,
    ) -> FixChoice | None:
        """Said why; and what to do next, unless nothing is known or allowed. `last`: it is only said."""
        how = f"signal {signal.Signals(ended.signal).name}" if ended.signal else f"exit code {ended.exit_code}"
        when = "the server died while serving" if served else "the server failed to start"
        self._tell(f"{when}: {how}, after {format_duration(ended.ran_s)}")
        planned = {finding.cause for finding in judged.findings} if judged is not None and not served else set()
        fatal = [finding for finding in diagnosis.findings if finding.cause != "none"]
        fatal.sort(key=lambda finding: finding.cause not in planned)  # Where log and plan agree, both are believed.
        if fatal:
            self._why(fatal[0])
            findings = with_planned(fatal, judged, served)
            choice = choose(started, findings, self._limits(), tried=self._tried, taken=self._taken)
            if choice is not None and last:
                self._tell_command(f"next command to try: {shown(choice.started)}")
                return choice
            if choice is not None:
                return choice if self._agreed(choice) else None
            if fatal[0].fix is None:
                self._tell("no fix is known")
            else:  # Nothing we may do ourselves; what a person can do is said.
                self._tell("not changed automatically" + (" (--keep)" if self.orders.keep else "") + "; suggested fix:")
                self._fix(fatal[0].fix)
        else:
            self._tell("the cause is not known: see the output above")
        if served:
            self._tell(
                "rescue restarts only what it can fix: for other crashes use systemd (Restart=on-failure) or Kubernetes"
            )
        return None

    def _agreed(self, choice: FixChoice) -> bool:
        """Said what changes, once it is decided."""
        changes = ", ".join(shown_change(flag, value) for flag, value in choice.fix.changes.items())
        why = f" ({choice.fix.why})" if choice.fix.why else ""
        price = f"; price: {choice.fix.price}" if choice.fix.price else ""
        if self.orders.confirm is not None and not self.orders.confirm(f"start with {changes}?{why}{price}"):
            self._tell("not changed and not restarted; suggested command:")
            self._tell_command(f"  {shown(choice.started)}")
            return False
        self._tell(f"changed: {changes}{why}{price}")
        self._taken.append(choice.fix)
        return True

    def _why(self, finding: Finding) -> None:
        self._tell(f"{finding.what} [{finding.code}]")
        for evidence in finding.evidence[:SHOWN_LINES]:
            self._tell(f"  seen: {printable(shorten(without_secrets(evidence.line.strip()), 200))}")
        if finding.why:
            self._tell(f"  cause: {finding.why}")

    def _fix(self, fix: Fix) -> None:
        if fix.why:
            self._tell(f"  fix: {fix.why}")
        if fix.command:
            self._tell_command(f"       {fix.command}")

    def _wait(self, restarts: int) -> None:
        pause_s = min(MOST_BACK_OFF_S, self.orders.back_off_s * 2 ** (restarts - 1))
        self._tell(
            f"restarting in {format_duration(pause_s)} (restart {restarts} of at most {self.orders.max_restarts})"
        )
        self.sleep(pause_s)

    @property
    def _changed(self) -> bool:
        return len({one.text for one in self._tried}) > 1

    def _command_to_keep(self, started: Started, *, worked: bool) -> None:
        if self._changed:
            what = "the command to keep" if worked else "last command tried"
            said = f"{what}: {shown(started)}"
            if said != self._kept_said:
                self._kept_said = said
                self._tell_command(said)
