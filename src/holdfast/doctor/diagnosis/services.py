"""Several programs in one log, told apart by the prefixes of compose, kubectl and supervisord, and judged each alone;
and several logs, which are of one server unless their engines or models say otherwise.

What one of them says is no evidence of another: not of its engine, its phase or its end. Lines without a prefix go with
the first program. Knows no rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

import msgspec

from holdfast.doctor.diagnosis.rank import diagnosis
from holdfast.doctor.evidence.log_state import LogState
from holdfast.doctor.findings import Diagnosis, Finding
from holdfast.doctor.logs.line import Line, service_of

SERVICES_HELD = 32
PREFIXED_SHARE = 0.6
"""Of the lines at the beginning of a log, from which on a prefix is one: a table or a level has such a bar too."""
LOOKED_LINES = 400
_SURE = {"high": 0, "medium": 1, "low": 2}
_HEALTHY = "{}: started and serves, as far as the log tells"
_QUIET = "{}: no failure in its lines that is known"


class Services:
    """Lines in, one diagnosis of all out. Holds a bounded number of programs; further ones are not read."""

    def __init__(self) -> None:
        self._logs: dict[str, LogState] = {}
        self._source = ""
        self._apart = False

    def open(self, source: str, beginning: bytes) -> None:
        """Lines of this source follow, of which these are the first."""
        self._source = source
        lines = [line for line in beginning[:65536].decode("utf-8", "replace").splitlines() if line.strip()]
        named = [bool(service_of(line)) for line in lines[:LOOKED_LINES]]
        self._apart = sum(named) >= PREFIXED_SHARE * len(named) > 0

    def feed(self, line: Line) -> None:
        service = line.service if self._apart else ""
        if not service and self._logs:
            service = next(iter(self._logs))
        log = self._logs.get(service)
        if log is None:
            if len(self._logs) == SERVICES_HELD:
                return
            log = self._logs[service] = LogState(self._source)
        elif log.source != self._source:
            log.open(self._source)
        log.feed(line)

    def diagnosis(self) -> Diagnosis:
        """Of one, that one. Of several: what failed first, the surest before others; who is well is only seen."""
        if len(self._logs) <= 1:
            return diagnosis(next(iter(self._logs.values()), LogState(self._source)))
        return side_by_side({name: diagnosis(log) for name, log in self._logs.items()})

    @property
    def identity(self) -> tuple[str | None, str | None]:
        """Engine and model of the one program in it; of several, neither."""
        if len(self._logs) != 1:
            return None, None
        (log,) = self._logs.values()
        return log.engine, log.settings.model


def of_different_servers(sources: Mapping[str, Services]) -> bool:
    """Whether two of the logs name different engines, or different models: what is not told is not held against it."""
    engines, models = zip(*(one.identity for one in sources.values()), strict=True)
    return any(len({one for one in told if one is not None}) > 1 for told in (engines, models))


def logs_apart(sources: Mapping[str, Services]) -> Diagnosis:
    """Each log judged alone, and called by its file."""
    short = {source: PurePath(source).name for source in sources}
    unique = len(set(short.values())) == len(short)
    return side_by_side({short[name] if unique else name: one.diagnosis() for name, one in sources.items()})


def side_by_side(every: Mapping[str, Diagnosis]) -> Diagnosis:
    """Programs that have nothing to do with each other: what failed first, the surest before others; who is well is
    only seen."""
    known = {name: one for name, one in every.items() if one.engine is not None or _named(one)}
    if not known:
        return next(iter(every.values()))
    failed = {name: one for name, one in known.items() if not one.healthy and one.findings}
    # A program that is no inference server and complains is no answer, where a server has one.
    serving = {name: one for name, one in failed.items() if one.engine is not None}
    if not serving and not any(one.engine is not None for one in known.values()):
        serving = failed
    ordered = sorted(serving, key=lambda name: (not _named(serving[name]), _SURE[serving[name].findings[0].confidence]))
    first = known[ordered[0]] if ordered else next(one for one in known.values())
    advice = [name for name, one in known.items() if one.healthy and one.findings]
    servers = {name: one for name, one in known.items() if one.engine is not None}
    quiet = [name for name, one in every.items() if name not in known and not one.findings]
    return msgspec.structs.replace(
        first,
        command=first.command if len(servers) == 1 else None,
        healthy=not ordered and all(one.healthy for one in servers.values()),
        findings=[_of(name, finding) for name in (*ordered, *advice) for finding in known[name].findings],
        missing=[f"{name}: {text}" for name in (ordered or known) for text in known[name].missing],
        seen=[
            *(_HEALTHY.format(name) for name, one in known.items() if one.healthy),
            *(_QUIET.format(name) for name in quiet),
        ],
        programs={name: _program(one) for name, one in servers.items()} if len(servers) > 1 else {},
    )


def _program(one: Diagnosis) -> str:
    """Its engine, version and phase."""
    version = f" {one.engine_version}" if one.engine_version else ""
    return f"{one.engine}{version}" + (f", phase: {one.phase}" if one.phase else "")


def _named(one: Diagnosis) -> bool:
    """A failure that a rule knows."""
    return bool(one.findings) and (one.findings[0].cause != "other" or one.findings[0].confidence != "low")


def _of(service: str, finding: Finding) -> Finding:
    return msgspec.structs.replace(finding, what=f"{service}: {finding.what}")
