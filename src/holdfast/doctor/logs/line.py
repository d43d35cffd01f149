"""Strips log prefixes: colours, timestamps, hosts, pods, ranks, pids, levels. Knows nothing of the message itself."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

LONGEST = 4000
"""Characters of a line that are looked at: a prompt that was logged may be a megabyte."""
PARTS = 400
"""Lines of one that was printed on one line, or carried in JSON."""
NESTED = 3
"""Wraps in wraps that are taken off: Docker's JSON around a program's JSON."""

PREFIXED = 200
"""Characters in which whoever wrote a line names itself."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b[()][A-B0-2]")
_TIME = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_WORD = r"[\w.@/:-]+"
_SERVICES = (
    r"\[pod/(?P<pod>[\w./-]+)\] ",  # kubectl logs --prefix
    r"(?P<supervised>[\w.-]{1,60}) (?:stdout|stderr) \| ",  # supervisord
    r"(?P<composed>[\w.-]{1,60})(?:@[\w.-]{1,60})? +\| ?",  # docker compose; docker service logs name the node too
)
"""Prefixes that name the one of several programs that a line is of."""
_SERVICE = re.compile("|".join((*_SERVICES, r"(?P<exited>[\w.-]{1,60}) exited with code \d+")))
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        rf"[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)? [\w.-]+ {_WORD}(?:\[\d+\])?: ",  # journald, syslog
        rf"{_TIME} [\w.-]+ {_WORD}\[\d+\]: ",  # journald -o short-iso
        rf"[A-Z][a-z]{{2}} {_TIME} [A-Z]{{3,5}} [\w.-]+ {_WORD}\[\d+\]: ",  # journald -o short-full
        rf"\d{{10}}\.\d{{6}} [\w.-]+ {_WORD}\[\d+\]: ",  # journald -o short-unix
        rf"<\d{{1,3}}>1 {_TIME} \S+ \S+ \S+ \S+ (?:-|\[[^\]]*\]) ",  # syslog over the network
        rf"{_TIME} [\w-]+\[[\w.-]+\]: ",  # Heroku and its like
        rf"{_TIME} [\w.-]+/[\w.-]+/[\w-]+ ",  # awslogs: prefix/container/task
        rf"{_TIME} (?:stdout|stderr) [FP] ",  # containerd's files
        *_SERVICES,
        rf"\[?{_TIME}\]?:?[ \t]+(?:- )?",
        r"[A-Z][a-z]{2} [ \d]\d +\d\d:\d\d:\d\d(?:\.\d+)? \| ",
        r"\[(?:Info|Warning|Error|Debug)\] \(\w+\) ",
        r"\d\d:\d\d:\d\d[-.]\d+ ",
        r"\[\d+(?:\.\d+)?s?\] ",
        r"\d+\.\d\d\.\d{3}\.\d{3} [EWID] ",  # llama-server's own clock
        r"[EWIF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w./-]+:\d+\] ",  # glog, klog
    )
)
_CLOCK_ERROR = re.compile(r"(?:^|[ |])\d+\.\d\d\.\d{3}\.\d{3} E ")
"""llama-server's clock with the letter of an error."""
_PROCESS = re.compile(
    r"\(?\b((?:APIServer|EngineCore|VllmWorker|Worker|RayWorker|pid=|ApiServer)[\w.:=+, -]*)\) ?"
    r"|\(\w[\w.:-]* pid=\d+(?:, ip=[\w.:]+)?\) ?|\(raylet\) "
)
_RANK = re.compile(r"\[(?:rank|default|TP|DP|PP|EP)\d+\]:(?: (?! )|(?=\s|\S))")
_SGLANG = re.compile(rf"\[{_TIME}((?: (?:TP|DP|PP|EP|ATTN_DP|PORT)\d+)*)\] ")
_LEVEL = re.compile(
    r"(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b:?(?: \d\d-\d\d \d\d:\d\d:\d\d)?(?: \[?[\w./]+:\d+\])? ?"
    r"(?:\d{4}-\S+ \S+)?"
)
_VLLM_LEVEL = re.compile(r"\b(INFO|WARNING|ERROR|DEBUG|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[?[\w./]+:\d+\] ?")
_NAMED_LEVELS = (
    re.compile(r"[\w.]+ - (DEBUG|INFO|WARNING|ERROR|CRITICAL) - "),
    re.compile(r"\| (TRACE|DEBUG|INFO|SUCCESS|WARNING|ERROR|CRITICAL) +\| [\w.<>]+:[\w.<>]+:\d+ - "),  # loguru
    re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL):[\w.]+:(?=\S)"),  # Python's own
)
_OWN = re.compile(r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) holdfast[\w.]*: ")
_MESSAGES = ("log", "MESSAGE", "message", "msg", "event", "textPayload", "jsonPayload", "fields", "text")
_TRACES = ("exc_info", "exception", "stack_trace", "error.stack_trace", "traceback", "stack", "error")
_LEVELS = ("level", "severity", "levelname", "log.level", "log_level")
_TRACEBACK = re.compile(r'Traceback \(most recent call last\)|File "[^"]+", line \d+')


class Line(NamedTuple):
    number: int
    whole: str
    """As it stood there, without its colours."""
    text: str
    """What was said, with the prefixes gone; indentation kept."""
    process: str
    level: str
    style: str
    """The engine that stamps its lines so; empty: nobody's in particular."""
    service: str = ""
    """The one of several programs that it is of, as compose, kubectl and supervisord name it before the line."""
    near: str = ""
    """Lines above and below an error that bear no stamp, level or process, and may be parts of it."""


def service_of(raw: str) -> str:
    """As the prefix of a line names it; empty: none does."""
    found = _SERVICE.match(bare(raw[:LONGEST]))
    return "" if found is None else next(name for name in found.groups() if name)


def bare(raw: str) -> str:
    """Without colours and other escapes."""
    return _ANSI.sub("", raw) if "\x1b" in raw else raw


def read_lines(raw: str, number: int) -> list[Line]:
    """The lines that one line of a file is: JSON carries many, and so does a traceback that was printed on one."""
    first, *more = _parts(raw, NESTED)
    line = _read(first, number)
    lines = [line]
    for part in more[: PARTS - 1]:
        following = _read(part, number)
        lines.append(
            following._replace(
                process=following.process or line.process, service=line.service, style=following.style or line.style
            )
        )
    return lines


def _parts(raw: str, deep: int) -> list[str]:
    if deep == 0 or ("{" not in raw and "\\n" not in raw):
        return [raw]
    opened = raw.find("{")
    if opened >= 0 and raw.rstrip().endswith("}") and _undressed(raw[:opened])[0].strip() == "":
        told = _unwrapped(raw[opened:].rstrip())
        if told is not None:
            return [part for one in told.rstrip("\n").split("\n") for part in _parts(one, deep - 1)]
    if "\\n" in raw and _TRACEBACK.search(raw) is not None:
        return raw.replace("\\r\\n", "\\n").replace('\\"', '"').split("\\n")
    return [raw]


def read_line(raw: str, number: int) -> Line:
    """The first of them."""
    return read_lines(raw, number)[0]


def _read(raw: str, number: int) -> Line:
    whole = bare(raw[:LONGEST]).rstrip()
    text, process = _undressed(whole)
    level, style = "", ""
    stamped = _VLLM_LEVEL.search(text)
    named = next((found for found in (pattern.match(text) for pattern in _NAMED_LEVELS) if found), None)
    if stamped is not None:
        level, text, style = stamped[1], text[stamped.end() :], "vllm"
    elif named is not None:
        level, text = named[1], text[named.end() :]
    else:
        told = _LEVEL.match(text.lstrip()[:120])
        if told is not None:
            level, text = told[1], text.lstrip()[told.end() :]
    if not level and " E " in whole and _CLOCK_ERROR.search(whole[: len(whole) - len(text)]) is not None:
        level = "ERROR"
    if _OWN.search(whole[:PREFIXED]) is not None:
        style = "holdfast"
    return Line(number, whole, text, process, "WARNING" if level == "WARN" else level, style, service_of(whole))


def _undressed(whole: str) -> tuple[str, str]:
    """Without what others put before it; and the process, where they name it."""
    text, process = whole, ""
    for _ in range(4):
        before = text
        sglang = _SGLANG.match(text)
        if sglang is not None:
            process = process or sglang[1].strip()
            text = text[sglang.end() :]
        for prefix in _PREFIXES:
            found = prefix.match(text)
            if found is not None:
                text = text[found.end() :]
        named = _PROCESS.match(text) or _RANK.match(text)
        if named is not None:
            process = process or named[0].strip()
            text = text[named.end() :]
        if text == before:
            break
    return text, process


def _unwrapped(whole: str) -> str | None:
    """What Docker's JSON files and structured logs carry: the message, and the traceback beside it."""
    try:
        document = json.loads(whole)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    message = _said(document, _MESSAGES)
    if message is None:
        return None
    level = next((document[key] for key in _LEVELS if isinstance(document.get(key), str)), "")
    known = level.upper() in ("WARNING", "ERROR", "CRITICAL", "FATAL")
    trace = _said(document, _TRACES)
    stamped = message if not known or message.startswith(level.upper()) else f"{level.upper()} {message}"
    return stamped if trace is None or _TRACEBACK.search(trace) is None else f"{stamped}\n{trace}"


def _said(document: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    for key in keys:
        inner = document.get(key)
        if isinstance(inner, dict):
            inner = next((inner[one] for one in ("message", "stack_trace") if isinstance(inner.get(one), str)), None)
        if isinstance(inner, str):
            return inner
    return None
