"""Bytes, token counts and durations: parsed from what people write, printed as people read."""

from __future__ import annotations

import re
import reprlib
import time

from holdfast.errors import ConfigurationError, printable

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_BYTE_UNITS = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 10**3,
    "m": MIB, "mib": MIB, "mb": 10**6,
    "g": GIB, "gib": GIB, "gb": 10**9,
    "t": TIB, "tib": TIB, "tb": 10**12,
}  # fmt: skip
_NEARLY_A_SIZE = re.compile(r"\s*-?(\d+(?:\.\d+)?(?:[eE]\+?\d{1,2})?)\s*([kKmMgGtTpP])[A-Za-z]*\s*")
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int, *, field: str = "size") -> int:
    """`22GiB`, `22G` (binary, as every tool of this field means it), `22GB` (decimal), `1048576`."""
    if isinstance(text, int):
        return text
    found = _NUMBER.fullmatch(text)
    if found is None or found[2].lower() not in _BYTE_UNITS:
        raise ConfigurationError(
            f"{field}: {shorten(text)!r} is not a size",
            needed="a number with an optional unit: 512MiB, 22GiB, 22GB",
            fix=_size_meant(text, field),
            field=field,
        )
    return int(float(found[1]) * _BYTE_UNITS[found[2].lower()])


def _size_meant(text: str, field: str) -> str:
    """Its number is kept: another one, or none, would be another request."""
    found = _NEARLY_A_SIZE.fullmatch(text)
    size = float(found[1]) * (KIB if found[2].lower() == "p" else 1) if found is not None else 0.0
    if found is None or not 0 < size < 1e6:
        return "write it as 22GiB, or in bytes"
    meant = f"{size:.10g}{found[2].upper().replace('P', 'T')}iB"
    return f"{field} {meant}" if field.startswith("--") else f"write it as {meant}"


def parse_tokens(text: str | int, *, field: str = "tokens") -> int:
    """vLLM's spelling: `32k` is 32,000 and `32K` is 32,768; likewise m and M."""
    if isinstance(text, int):
        return text
    units = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20}
    found = _NUMBER.fullmatch(text)
    if found is None or found[2] not in units:
        raise ConfigurationError(
            f"{field}: {shorten(text)!r} is not a number of tokens",
            needed="a number: 8192, 32k (32,000) or 32K (32,768)",
            fix="write it as 8192 or 32K",
            field=field,
        )
    return int(float(found[1]) * units[found[2]])


_SPAN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|sec|m|min|h|d|)\s*")
_SECONDS = {"": 1.0, "s": 1.0, "sec": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str | int | float, *, field: str = "duration") -> float:
    """Seconds: `90`, `90s`, `1.5m`, `500ms`, `1h`, `7d`."""
    if not isinstance(text, str):
        return float(text)
    found = _SPAN.fullmatch(text)
    if found is None:
        raise ConfigurationError(
            f"{field}: {shorten(text)!r} is not a duration",
            needed="a number with an optional unit: 90, 90s, 1.5m, 500ms, 1h, 7d",
            fix="write it as 90s or 5m",
            field=field,
        )
    return float(found[1]) * _SECONDS[found[2]]


def shorten(value: object, limit_chars: int = 80) -> str:
    """What a message may repeat of what it was given: a hostile value must not come back whole, nor be spelled out,
    nor steer a terminal."""
    shown = value if isinstance(value, str) else reprlib.repr(value)
    shown = printable(shown[: limit_chars + 1])
    return shown if len(shown) <= limit_chars else shown[:limit_chars] + "..."


def counted(number: int | float, noun: str) -> str:
    """`1 sequence`, `2.5 sequences`: to one place, and without one that says nothing."""
    shown = f"{number:,.1f}".removesuffix(".0")
    return f"{shown} {noun}" if shown == "1" else f"{shown} {noun}s"


def format_bytes(count: int | float) -> str:
    sign, size = ("-" if count < 0 else ""), abs(float(count))
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{sign}{size / unit:.2f} {name}"
    return f"{sign}{size:.0f} B"


def format_duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def format_ago(when_s: float | None) -> str:
    """How long ago a time of the clock is, in one unit, as people say it."""
    if when_s is None:
        return "-"
    left_s = max(0.0, time.time() - when_s)
    for unit, length_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(left_s // length_s)
        if count:
            return f"{counted(count, unit)} ago"
    return "just now"
