"""Which flags an engine takes, and since and until which release, as known_flags.toml has them. Judges no command."""

from __future__ import annotations

import difflib
import re
import tomllib
from functools import cache
from importlib import resources
from typing import Any

from holdfast.doctor.command.flag_aliases import canonical

Release = tuple[int, ...]
_TAKE_BEGINNINGS = ("vllm", "sglang")
"""Their parser is argparse, left as it is."""
NEAR = 0.75
"""How like a known flag an unknown one must be to be taken for it."""


@cache
def document() -> dict[str, Any]:
    return tomllib.loads(
        (resources.files("holdfast.doctor") / "command" / "known_flags.toml").read_text(encoding="utf-8")
    )


def release(version: str) -> Release:
    """0.11.0rc1 and v0.11.0+cu128 are 0.11.0; what has no number is older than everything."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[+a-uw-z-]", version.lstrip("v"))[0])[:3])


def gone(engine: str, flag: str) -> str | None:
    """What stands in the place of a flag that the newest release does not take."""
    told: str | None = document().get(engine, {}).get("gone", {}).get(flag)
    return told


@cache
def _releases(engine: str, which: str) -> dict[str, Release]:
    rows = document().get(engine, {}).get(which, {})
    return {flag: release(version) for version, flags in rows.items() for flag in flags.split()}


def since(engine: str, flag: str) -> Release | None:
    return _releases(engine, "since").get(flag)


def until(engine: str, flag: str) -> Release | None:
    return _releases(engine, "until").get(flag)


def takes(engine: str, flag: str, version: str | None) -> bool | None:
    """Whether that release has the flag, under its one name; the newest that is known, where none is told. None: the
    flag is in no list."""
    row = document().get(engine)
    if row is None:
        return None
    listed = {name for one in _flags(engine) for name in (one, canonical(engine, one))}
    if version is None or not release(version):
        return True if flag in listed else False if gone(engine, flag) else None
    at, first, last = release(version), since(engine, flag), until(engine, flag)
    if (first is not None and at < first) or (last is not None and at[: len(last)] > last):
        return False
    return True if flag in listed or gone(engine, flag) else None


@cache
def _flags(engine: str) -> tuple[str, ...]:
    return tuple(document()[engine]["flags"].split())


def beginnings(engine: str, spelled: str) -> list[str]:
    """The one names of the flags that it may stand for; none where it is whole, or the engine takes no beginnings."""
    name = canonical(engine, spelled)
    if engine not in _TAKE_BEGINNINGS or not spelled.startswith("--") or takes(engine, name, None) is not None:
        return []
    return sorted({canonical(engine, flag) for flag in _flags(engine) if flag.startswith(name)})


def abbreviated(engine: str, spelled: str) -> str:
    """The one flag that a beginning stands for, under its one name; else as it is."""
    able = beginnings(engine, spelled)
    return able[0] if len(able) == 1 else canonical(engine, spelled)


def nearest(engine: str, spelled: str) -> str | None:
    """The flag that an unknown one was meant for; None: it is known, or was once, or nothing is like it."""
    name = canonical(engine, spelled)
    if document().get(engine) is None or takes(engine, name, None) is not None:
        return None
    known = [flag for flag in _flags(engine) if len(flag) > 2]
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=NEAR)), None)
