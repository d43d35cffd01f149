"""What a log shows, gathered line by line: engine, version, settings, phases, tracebacks, numbers and what rules saw.

Bounded however long the log is. Judges nothing: rank.py does, once the log has ended.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from holdfast.doctor.evidence.error_lines import DIED, ERROR, FRAME, HEADER, MARKERS, MILD, OF_REQUEST, PROSE, is_drawn
from holdfast.doctor.evidence.holdfast_errors import BELOW_LINES, RULE, below, own_rule
from holdfast.doctor.evidence.server_args import ServerArgs
from holdfast.doctor.evidence.throughput_lines import Statistics
from holdfast.doctor.evidence.traces import Trace
from holdfast.doctor.findings import Evidence
from holdfast.doctor.logs.line import Line
from holdfast.doctor.rules.formulas import holds
from holdfast.doctor.rules.load import Mark, Rule, captured, rulebook

FRAMES_HELD = 200
EVENTS_HELD = 200
EVIDENCE_HELD = 4
RUNS_HELD = 8
VOTES = 3
"""Times that one mark tells whose log it is: what is said every ten seconds tells no more than what is said once."""
NEAR_LINES = 12
"""Between a message and the traceback that belongs to it."""


PHASES = ("args", "download", "load", "profile", "capture", "warmup", "serve", "request")
STARTING = PHASES[:6]
OWN = "holdfast"
SECOND = "second"
"""The tag of an engine in a process that had one before."""
RECOVERED = "engine_recovered"
"""The rule that says of a failure that the server recovered from it."""
DIED_SERVING = "died_serving"
"""The tag of a run whose last words only a server that had begun to serve says."""
STOPPED = "stopped"
"""The tag of a server that was told to end: what it says from then on is no failure."""


def further(phase: str, reached: str | None) -> bool:
    """Ranks interleave: one that still loads does not take the others back."""
    return reached is None or PHASES.index(phase) >= PHASES.index(reached)


@dataclass(slots=True)
class Event:
    """What a rule saw: once, with the number of times it was said in this run."""

    rule: Rule
    line: int
    numbers: dict[str, float]
    words: dict[str, str]
    evidence: list[Evidence]
    phase: str | None
    """The last that the log had told before."""
    ready: bool
    process: str
    trace: Trace | None = None
    times: int = 1
    tags: frozenset[str] = frozenset()
    """Of the run, up to here."""
    sure: bool = True
    """A line of it has the words with which the rule leaves no choice."""


@dataclass(slots=True)
class Run:
    """From one start of the server to the next."""

    start: int = 1
    source: str = ""
    phase: str | None = None
    ready: bool = False
    events: dict[str, Event] = field(default_factory=dict)
    passed_over: dict[str, Event] = field(default_factory=dict)
    """What rules saw that are of another engine, or of a start, after it: better than nothing, if nothing else is."""
    begun: int = 0
    """Starts in it: more than one where the ones before came as far as loading and said nothing of their end."""
    beyond_args: bool = False
    """The last of them has begun to load."""
    tags: set[str] = field(default_factory=set)
    unexplained: list[Evidence] = field(default_factory=list)
    unexplained_phase: str | None = None
    """Of the first of them."""
    near: list[str] = field(default_factory=list)
    """Lines beside them that may be parts of them."""
    wrappers: list[Evidence] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    named: bool = False
    """An error was seen that has a name and no rule."""
    first_named: int | None = None
    last_named: int | None = None
    """The lines of the first and the last of them."""
    last_error: int | None = None
    """The last that was logged as an error, or has a name, and that no rule knows."""
    died: bool = False
    """The last words are those of a process that ends."""
    last_words: Evidence | None = None
    """Such an error of a server that was ready, with no sign of life after it."""

    @property
    def failed(self) -> bool:
        """It came to an end of its own, as far as the log tells."""
        fatal = any(event.rule.kind == "fatal" and event.ready == self.ready for event in self.events.values())
        return fatal or bool(self.wrappers) or ((self.named or bool(self.passed_over)) and not self.ready)

    @property
    def waits(self) -> bool:
        """It listens, and loads a model when one is requested: none was yet."""
        return "listening" in self.tags and not self.beyond_args and not self.failed and not self.unexplained

    @property
    def torn_off(self) -> Trace | None:
        """A traceback whose error is not in the log."""
        return next((trace for trace in reversed(self.traces) if not trace.ended), None)


class LogState:
    def __init__(self, source: str) -> None:
        self.source = source
        self.engines: Counter[str] = Counter()
        self.spoke: set[str] = set()
        """Engines that were known by a line of their own, not by a name in a text."""
        self._votes: Counter[int] = Counter()
        self.version: str | None = None
        self.settings = ServerArgs()
        self.statistics = Statistics()
        self.numbers: dict[str, float] = {}
        self.words: dict[str, str] = {}
        self.runs: list[Run] = [Run(source=source)]
        self.failed_starts = 0
        """Runs that failed and that another start followed."""
        self.lines = 0
        self._book = rulebook()
        self._page = self._book.page("")
        """The rules that could match the current line."""
        self._traces: dict[str, Trace] = {}
        self._waiting: list[Event] = []
        self._own: Event | None = None
        """The last error of Holdfast's, whose other lines may follow."""

        self.final_runs: list[Run] = [self.runs[-1]]
        """The last of each source."""

    def open(self, source: str) -> None:
        """Lines of another source follow."""
        self.source = source
        self.runs = [*self.runs[-RUNS_HELD:], Run(source=source)]
        self.final_runs.append(self.run)
        self._traces.clear()
        self._waiting.clear()

    @property
    def run(self) -> Run:
        return self.runs[-1]

    def judged_runs(self) -> list[Run]:
        """The last start of each source, and those before it that broke while they served."""
        broken = [run for run in self.runs if run.ready and run.wrappers]
        return [run for run in self.runs if run in broken or run in self.final_runs]

    def without_open_start(self) -> LogState:
        """Where the log ends in the middle of another start: as it was before that one, so that what the ones before
        died of is judged. Else itself. Nothing is changed."""
        final = self.run
        before = [run for run in self.runs[:-1] if run.source == final.source]
        if final.ready or final.failed or final.unexplained or final.torn_off is not None or not before:
            return self
        if not before[-1].failed:
            return self
        log = copy.copy(self)
        log.runs = self.runs[:-1]
        log.final_runs = [before[-1] if run is final else run for run in self.final_runs]
        return log

    def _begin(self, line: Line) -> None:
        self.failed_starts += self.run.failed
        run = Run(start=line.number, source=self.source)
        self.final_runs = [run if one is self.run else one for one in self.final_runs]
        self.runs = [*self.runs[-RUNS_HELD:], run]

    @property
    def engine(self) -> str | None:
        """That of whom most was seen; Ollama runs llama.cpp inside, and what that says is Ollama's."""
        most = max(self.engines, key=lambda name: self.engines[name], default=None)
        return "ollama" if "ollama" in self.engines and most in ("llama.cpp", "ollama") else most

    def feed(self, line: Line) -> bool:
        """Whether the line meant anything."""
        self.lines = max(self.lines, line.number)
        self._page = self._book.page(line.whole)
        if line.style:
            self.engines[line.style] += line.style == OWN or line.style not in self.engines
            self.spoke.add(line.style)
        if any(pattern.search(line.text) for pattern in self._page.quoted):
            return False
        if HEADER in line.text:
            self._trace(line, fresh=True)
            self._rules(line)
            return True
        if FRAME.match(line.text):
            self._frame(line)
            return True
        if not self._page.tells and not self.settings.listing:
            return self._other(line, wrapped=False)
        if any(pattern.search(line.text) for pattern in self._page.benign):
            return False
        if self._own is not None and self._below(line):
            return True
        told = self._marks(line)
        self.settings.rank(line.process)
        if self.settings.read(line.text, self.engine):
            told = True
            if self.settings.command is not None:
                self.engines[self.settings.command.engine] += 2
        told = self.statistics.read(line.text) or told
        if self._rules(line):
            return True
        return self._other(line) or told

    # Tracebacks

    def _trace(self, line: Line, *, fresh: bool) -> Trace:
        trace = self._traces.get(line.process)
        if trace is None or fresh or line.number - trace.last > NEAR_LINES:
            trace = Trace(last=line.number)
            if len(self._traces) > FRAMES_HELD:
                self._traces.clear()
            self._traces[line.process] = trace
            self.run.traces = [*(one for one in self.run.traces if not one.ended), trace][-RUNS_HELD:]
            for event in self._waiting:
                bare = event.trace is None or not event.trace.marks
                if bare and line.number - event.line <= NEAR_LINES and event.process == line.process:
                    event.trace = trace
            self._waiting = [event for event in self._waiting if line.number - event.line <= NEAR_LINES]
        trace.last = line.number
        trace.code_next = not fresh
        return trace

    def _near(self, line: Line) -> Trace | None:
        """The traceback that this line belongs to, or ends."""
        trace = self._traces.get(line.process)
        return trace if trace is not None and line.number - trace.last <= NEAR_LINES else None

    def _is_code(self, line: Line) -> bool:
        """Of a traceback, printed line by line with a level before each."""
        trace = self._near(line)
        if trace is None or trace.ended or ERROR.match(line.text):
            return False
        code = trace.code_next or line.text.startswith("    ") or MARKERS.match(line.text) is not None
        trace.code_next = False
        return code

    def _frame(self, line: Line) -> None:
        trace = self._trace(line, fresh=False)
        trace.torn = trace.torn or ('File "' in line.text and ", in " not in line.text)
        for mark in self._page.frames:
            if len(trace.marks) < FRAMES_HELD and mark.pattern.search(line.text):
                trace.marks.append(mark)
                if mark.engine:
                    self.engines[mark.engine] += 1
                    self.spoke.add(mark.engine)
        if len(self.run.events) < EVENTS_HELD:
            self._rules(line, frames=True)

    # Lines

    def _marks(self, line: Line) -> bool:
        told = False
        for mark in self._page.marks:
            # A pattern that is anchored to the line's beginning is not in the whole of one that compose prefixed.
            found = mark.pattern.search(line.text) or mark.pattern.search(line.whole)
            if found is None:
                continue
            told = True
            numbers, words = captured(found)
            if mark.begin and self._over():
                self._begin(line)
            elif mark.again and self.run.ready:
                self._begin(line)
                self.run.tags.add(SECOND)
            for name in mark.forgives:
                self.run.events.pop(name, None)
            if mark.recovers:
                coded = [one.rule for one in self.run.events.values() if one.rule.code and one.rule.kind == "fatal"]
                for rule in coded:
                    self._recovered(rule.id, line)
            if mark.engine and line.style in ("", "vllm", mark.engine):
                self._vote(mark)
            if mark.begin and not mark.restarted and (mark.phase or None) == "args":
                self.run.begun += self.run.begun == 0 or self.run.beyond_args
                self.run.beyond_args = False
            self.run.beyond_args |= mark.phase in STARTING[2:]
            if "version" in words and mark.engine:
                self.version = words.pop("version").lstrip("v").rstrip(".,)")
            if mark.phase and (mark.begin or further(mark.phase, self.run.phase)):
                self.run.phase = mark.phase
            if mark.ready:
                self.run.last_words, self.run.died = None, False
            if mark.ready and not self.run.ready:
                self._came_up()
            if mark.tag:
                self.run.tags.add(mark.tag)
            self.numbers.update(numbers)
            if "model_file" in words:
                self.settings.values.setdefault("model", words.pop("model_file"))
            self.words.update(words)
        return told

    def _vote(self, mark: Mark) -> None:
        self._votes[id(mark)] += 1
        self.spoke |= set() if mark.prose else {mark.engine}
        if self._votes[id(mark)] <= VOTES:
            self.engines[mark.engine] += 5 if mark.begin else 1

    def _recovered(self, name: str, line: Line) -> None:
        """The server got over a failure by itself: it stays as advice, with the line that says so."""
        failed, said = self.run.events.pop(name, None), self._book.rule(RECOVERED)
        if failed is None:
            return
        event = self.run.events.setdefault(f"{name} {RECOVERED}", failed)
        if event is not failed:
            event.times += failed.times
            event.words = failed.words
        event.rule = msgspec.structs.replace(failed.rule, kind=said.kind, what=said.what, why=said.why)
        event.evidence = [*event.evidence[: EVIDENCE_HELD - 1], self._evidence(line)]

    def _came_up(self) -> None:
        """What went wrong before did not matter; but a server that died serving, and answers what it had begun, was up
        before the log begins."""
        if DIED_SERVING in self.run.tags:
            self.run.ready = True
            for event in self.run.events.values():
                event.ready = True
            return
        self.run.ready, self.run.named, self.run.unexplained_phase = True, False, None
        self.run.first_named = self.run.last_named = self.run.last_error = None
        for seen in (self.run.unexplained, self.run.near, self.run.wrappers, self.run.traces):
            seen.clear()

    def _over(self) -> bool:
        """Whether the run came to anything; what only warns may come before the first line of a start."""
        failed = any(event.rule.kind == "fatal" for event in self.run.events.values())
        return self.run.ready or failed or self.run.failed

    def _rules(self, line: Line, *, frames: bool = False) -> bool:
        engine = self.engine
        matched = False
        for rule in self._page.rules:
            foreign = rule.engines and engine is not None and engine not in rule.engines and self.engines[engine] > 1
            foreign = foreign and rule.id != RULE  # Its code leaves no doubt.
            if rule.severe and line.level in MILD:
                continue
            found = rule.match(line.text)
            if found is not None and (foreign or self._past(rule)):
                self._pass_over(rule, line, found)
                continue
            elsewhere = rule.only_in and self.run.phase is not None and self.run.phase not in rule.only_in
            if found is None or elsewhere or (frames and rule.out_of_memory):
                continue
            numbers, words = captured(found)
            if not holds(rule.when, numbers):
                continue
            said = own_rule(words["code"]) if rule.id == RULE else rule
            if said is not None:
                self._event(said, line, numbers, words)
                matched = True
        return matched

    def _pass_over(self, rule: Rule, line: Line, found: re.Match[str]) -> None:
        numbers, words = captured(found)
        sure = rule.kind == "fatal" and not rule.out_of_memory and rule.confidence == "high"
        if sure and len(self.run.passed_over) < EVENTS_HELD and holds(rule.when, numbers):
            self.run.passed_over.setdefault(rule.id, self._made(rule, line, numbers, words))

    def _past(self, rule: Rule) -> bool:
        """Words of a start, after it: a client's, or a model's. Ollama loads models while it serves."""
        start = rule.phase_fixed and rule.kind == "fatal" and rule.phase in STARTING
        return start and self.run.ready and "ollama" not in rule.engines and self.engine != "ollama"

    def _below(self, line: Line) -> bool:
        """What stands below an error of Holdfast's."""
        event, told = self._own, below(line.text)
        if event is None or told is None or line.number - event.line > BELOW_LINES:
            return False
        event.words.setdefault(*told)
        event.evidence.append(self._evidence(line))
        return True

    def _evidence(self, line: Line) -> Evidence:
        return Evidence(line=line.whole.strip(), number=line.number, source=self.source)

    def _event(self, rule: Rule, line: Line, numbers: dict[str, float], words: dict[str, str]) -> None:
        evidence = self._evidence(line)
        event = self.run.events.get(rule.id)
        named = ("llama.cpp",) if set(rule.engines) == {"llama.cpp", "ollama"} else rule.engines
        for name in named if len(named) == 1 else ():  # Ollama's runner has llama.cpp's words: its own lines tell it.
            self.engines[name] += 1
            self.spoke.add(name)
        sure = not rule.sure or any(pattern.search(line.whole) for pattern in rule.sure)
        sure = sure and PROSE.match(line.whole) is None
        if event is not None:
            event.times += 1
            event.sure = event.sure or sure
            event.numbers = {**numbers, **event.numbers}
            event.words = {**words, **event.words}
            same = any(one.line[-200:] == evidence.line[-200:] for one in event.evidence)
            if len(event.evidence) < EVIDENCE_HELD and not same:
                event.evidence.append(evidence)
            if event.trace is None:
                self._bind(event, line)
            return
        event = self._made(rule, line, numbers, words)
        event.sure = sure
        self._bind(event, line)
        if len(self.run.events) < EVENTS_HELD:
            self.run.events[rule.id] = event
        self._own = event if rule.code else self._own

    def _made(self, rule: Rule, line: Line, numbers: dict[str, float], words: dict[str, str]) -> Event:
        return Event(
            rule=rule,
            line=line.number,
            numbers=numbers,
            words=words,
            evidence=[self._evidence(line)],
            phase=self.run.phase,
            ready=self.run.ready,
            process=line.process,
            tags=frozenset(self.run.tags),
        )

    def _bind(self, event: Event, line: Line) -> None:
        """To the traceback it ends, or else to the one that follows."""
        trace = self._near(line)
        if trace is not None:
            event.trace = trace
            trace.ended = trace.ended or event.rule.kind != "hint"
        if (event.trace is None or not event.trace.marks) and len(self._waiting) < EVENTS_HELD:
            event.line, event.process = line.number, line.process
            self._waiting.append(event)

    def _other(self, line: Line, *, wrapped: bool = True) -> bool:
        """An error that no rule knows, or one that only wraps another."""
        text = line.text.strip()
        if (STOPPED in self.run.tags and self.run.ready) or self._is_code(line):
            return False
        evidence = self._evidence(line)
        trace = self._near(line)
        if wrapped and any(pattern.search(text) for pattern in self._page.wrappers):
            if len(self.run.wrappers) < EVIDENCE_HELD:
                self.run.wrappers.append(evidence)
            if trace is not None:
                trace.ended = True
            return True
        severe = line.level in ("ERROR", "CRITICAL", "FATAL") and not is_drawn(line.text)
        error = ERROR.search(text)
        if error is not None and error["name"] and line.level in MILD:
            return False
        if severe or error is not None:
            named = error is not None
            self.run.named = self.run.named or named
            if trace is not None and named:
                trace.ended = True
            ended = trace is not None or severe or DIED.search(text) is not None
            if error is not None and ended and self.run.ready and not OF_REQUEST.search(error[0]):
                self.run.last_words = self.run.last_words or evidence
            self.run.died = self.run.died or DIED.search(text) is not None
            if named:
                self.run.first_named = self.run.first_named or line.number
                self.run.last_named = line.number
            self.run.last_error = line.number
            if not self.run.unexplained:
                told = None if trace is None else trace.phase
                self.run.unexplained_phase = told or ("serve" if self.run.ready else self.run.phase)
            if len(self.run.unexplained) < EVIDENCE_HELD:
                self.run.unexplained.append(evidence)
                self.run.near.append(line.near)
            return True
        return False
