"""A line of a log without what others put before it: colours, times, hosts, pods, ranks, pids, levels.

Knows the dress of a line, nothing of what it says.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

LONGEST = 4000
"""Characters of a line that are looked at: a prompt that was logged may be a megabyte."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b[()][A-B0-2]")
_TIME = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]+ [\w.@/:-]+(?:\[\d+\])?: ",  # journald, syslog
        rf"{_TIME} [\w.-]+ [\w.@/:-]+\[\d+\]: ",  # journald -o short-iso
        rf"{_TIME} (?:stdout|stderr) [FP] ",  # containerd's files
        r"\[pod/[\w./-]+\] ",  # kubectl logs --prefix
        r"[\w.-]{1,60} +\| ",  # docker compose
        rf"\[?{_TIME}\]?:?[ \t]+(?:- )?",
        r"[A-Z][a-z]{2} [ \d]\d +\d\d:\d\d:\d\d(?:\.\d+)? \| ",
        r"\[(?:Info|Warning|Error|Debug)\] \(\w+\) ",
        r"\d\d:\d\d:\d\d[-.]\d+ ",
        r"\[\d+(?:\.\d+)?s?\] ",
        r"\d+\.\d\d\.\d{3}\.\d{3} [EWID] ",  # llama-server's own clock
        r"\[(?:rank|TP|DP)\d+\]:(?=\S|\s)",
    )
)
_PROCESS = re.compile(r"\(?\b((?:APIServer|EngineCore|VllmWorker|Worker|RayWorker|pid=|ApiServer)[\w.:=+, -]*)\) ?")
_RANK = re.compile(r"\[(?:rank|TP|DP)(\d+)\]: ?")
_SGLANG = re.compile(rf"\[{_TIME}((?: (?:TP|DP|PP|EP|ATTN_DP|PORT)\d+)*)\] ")
_LEVEL = re.compile(
    r"(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b:?(?: \d\d-\d\d \d\d:\d\d:\d\d)?(?: \[?[\w./]+:\d+\])? ?"
    r"(?:\d{4}-\S+ \S+)?"
)
_VLLM_LEVEL = re.compile(r"\b(INFO|WARNING|ERROR|DEBUG|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[?[\w./]+:\d+\] ?")
_PYTHON_LEVEL = re.compile(r"[\w.]+ - (DEBUG|INFO|WARNING|ERROR|CRITICAL) - ")


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


def bare(raw: str) -> str:
    """Without colours and other escapes."""
    return _ANSI.sub("", raw) if "\x1b" in raw else raw


def read_line(raw: str, number: int) -> Line:
    whole = bare(raw[:LONGEST]).rstrip()
    text = _unwrapped(whole)
    process, level, style = "", "", ""
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
    stamped = _VLLM_LEVEL.search(text)
    if stamped is not None:
        level, text, style = stamped[1], text[stamped.end() :], "vllm"
    else:
        told = _PYTHON_LEVEL.match(text) or _LEVEL.match(text.lstrip()[:120])
        if told is not None:
            level = told[1]
            text = text[len(text) - len(text.lstrip()) :] if told.re is _PYTHON_LEVEL else text.lstrip()
            text = text[told.end() :]
    return Line(number, whole, text, process, "WARNING" if level == "WARN" else level, style)


def _unwrapped(whole: str) -> str:
    """What Docker's JSON files and structured logs carry."""
    if not whole.startswith("{") or not whole.endswith("}"):
        return whole
    try:
        document = json.loads(whole)
    except (ValueError, RecursionError):
        return whole
    if not isinstance(document, dict):
        return whole
    for key in ("log", "MESSAGE", "message", "msg", "textPayload", "fields"):
        inner = document.get(key)
        if isinstance(inner, dict):
            inner = inner.get("message")
        if isinstance(inner, str):
            level = document.get("level") or document.get("severity")
            return f"{level} {inner}" if isinstance(level, str) and level.isupper() else inner.rstrip("\n")
    return whole
