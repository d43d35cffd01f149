"""Diagnoses logs: reads sources or live lines, collects evidence, returns a `Diagnosis`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import msgspec

from holdfast.doctor.diagnosis.rank import diagnosis
from holdfast.doctor.diagnosis.services import Services, logs_apart, of_different_servers
from holdfast.doctor.evidence.log_state import LogState
from holdfast.doctor.findings import Diagnosis, Evidence
from holdfast.doctor.logs.line import Line, read_lines
from holdfast.doctor.logs.reverse import NEWEST_BYTES, OLDEST_BYTES, Order, Turned
from holdfast.doctor.logs.sampling import LOOKED_BYTES, Sift, worth_reading
from holdfast.doctor.logs.source import LogSource
from holdfast.doctor.logs.unfold import Unfolded
from holdfast.doctor.logs.unwrap import BELOW, LOOKED, is_open_error, whole
from holdfast.units import MIB

_TORN = "the rest of {}: the file is truncated, its compressed data ends early"
_TURNED = "{} has its newest line first: it was read from its end"
_FOLDED = "the lines of {} were wrapped at {} columns: they were joined again"
_LEFT_OUT = (
    "the middle of {}: its newest line comes first, and of a log that is not a plain file only the newest"
    f" {NEWEST_BYTES // MIB} MiB and the oldest {OLDEST_BYTES // MIB} MiB can be held and reversed"
    " (pass a plain file, or the oldest line first: journalctl without -r)"
)


class LiveDiagnosis:
    """Lines in as they come, a diagnosis of what was seen so far whenever it is wanted. Bounded in memory."""

    def __init__(self, source: str = "output") -> None:
        self._log = LogState(source)
        self._number = 0
        self._open: Line | None = None
        """An error that may go on below; it was taken as it stood, for the next line may never come."""
        self._opened_in = (self._log.run, False)
        """The run, and whether it was ready."""
        self._below: list[str] = []

    def feed(self, line: str) -> None:
        self._number += 1
        for part in filter(None, line.split("\r")):
            if self._open is not None:
                self._below.append(part[:LOOKED])
                if len(self._below) == BELOW:
                    self._close()
            if self._log.settings.listing or worth_reading(part):
                lines = read_lines(part[:LOOKED_BYTES], self._number)
                for one in lines:
                    self._log.feed(one)
                if len(lines) == 1 and is_open_error(lines[0]):
                    self._close()
                    self._open, self._opened_in = lines[0], (self._log.run, self.ready)

    def _close(self) -> None:
        """Read whole what was broken: a program that prints for a terminal breaks its lines on a pipe too."""
        if self._open is None:
            return
        joined = whole(self._open, "\n".join(self._below))
        if joined is not self._open and self._opened_in == (self._log.run, self.ready):
            self._log.feed(joined)  # Later it would be taken for an error of a server that was ready.
        self._open = None
        self._below.clear()

    @property
    def ready(self) -> bool:
        """The server that writes these lines has begun to serve."""
        return self._log.run.ready

    def diagnosis(self) -> Diagnosis:
        self._close()
        return diagnosis(self._log)


def diagnose_lines(lines: Iterable[str], source: str) -> Diagnosis:
    watch = LiveDiagnosis(source)
    for line in lines:
        watch.feed(line.rstrip("\n"))
    return watch.diagnosis()


def diagnose(sources: Sequence[str]) -> Diagnosis:
    """Logs, judged together unless they are of different engines or models: paths of files (gz too), `-` for standard
    input. Raises a ConfigurationError (HFD90)."""
    services = Services()
    alone: dict[str, Services] = {}
    logs: dict[str, _Log] = {}
    torn = []
    for name in sources:
        called = "standard input" if name == "-" else name
        alone[called] = Services()
        # A log is read once, for it may be a pipe: whose server it is of is known at its end.
        readers = (services, alone[called]) if len(sources) > 1 else (services,)
        source, sift = LogSource(name), Sift(_to_all(readers))
        logs[called] = _Log(source)
        blocks = iter(logs[called].blocks())
        first = next(blocks, b"")
        for reader in readers:
            reader.open(called, first)
        for block in chain([first], blocks):
            sift.feed(block)
        sift.close()
        torn += [_TORN.format(called)] if source.torn else []
    apart = len(alone) > 1 and of_different_servers(alone)
    found = logs_apart(alone) if apart else services.diagnosis()
    found.missing.extend(torn)
    for name, read in logs.items():
        found.seen.extend(read.told(name))
        found.missing.extend([_LEFT_OUT.format(name)] if read.turned.left_out_bytes else [])
    for finding in found.findings:
        finding.evidence[:] = [logs[one.source].place(one) if one.source in logs else one for one in finding.evidence]
    return found


def _to_all(readers: Sequence[Services]) -> Callable[[Line], None]:
    def feed(line: Line) -> None:
        for reader in readers:
            reader.feed(line)

    return feed


class _Log:
    """The right way round, and its lines as they were written."""

    def __init__(self, source: LogSource) -> None:
        self.turned = Turned(source)
        self.unfolded: Unfolded | None = None

    def blocks(self) -> Iterable[bytes]:
        blocks = self.turned.blocks()
        whole = chain([next(blocks, b"")], blocks)  # Known with the first block: whether its lines were cut.
        if self.turned.fold is None:
            return whole
        self.unfolded = Unfolded(self.turned.fold)
        return self.unfolded.blocks(whole)

    def place(self, one: Evidence) -> Evidence:
        """With the number of its line in the file."""
        number = one.number if self.unfolded is None or one.number is None else self.unfolded.number(one.number)
        return msgspec.structs.replace(one, number=None if number is None else self.turned.number(number))

    def told(self, name: str) -> list[str]:
        """What was done with it before it was read."""
        turned = [_TURNED.format(name)] if self.turned.order is not Order.OLDEST_FIRST else []
        return turned + ([_FOLDED.format(name, self.turned.fold.columns)] if self.turned.fold is not None else [])
