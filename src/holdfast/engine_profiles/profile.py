"""An engine's profile: its flags, how it spells our settings, and since which release it has what.

Everything is read from data/*.toml, an engine's own files when it is first looked at: `engines.toml` says how each is
started, `ENGINE.toml` what is known of it, and `ENGINE_flags.toml` has the long lists of its flags, which a plan never
needs. Judges no command and counts no bytes.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

Release = tuple[int, ...]
"""0.5.3.post1 is 0, 5, 3, 1."""
MODEL_FLAGS = ("model", "model-path", "model-id", "hf-repo", "model-tag")
PEERS = ("vllm", "sglang", "llama.cpp", "tgi")
"""Whose flags are looked for in a command of another, in this order."""
NEAR = 0.75
"""How like a known flag an unknown one must be to be taken for it."""
NEAR_WITHOUT_HYPHENS = 0.82
"""The same, of names without their hyphens, which make any two alike."""
BOOLEAN_STARTS = (
    "enable-", "disable-", "no-", "trust-remote-code", "enforce-eager", "async-scheduling", "headless",
)  # fmt: skip
"""How flags that take no value begin, in the engines that do not say otherwise."""
_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class FlagHistory:
    """Since and until which release the engine takes a flag; None: as long as releases are known."""

    since: Release | None
    until: Release | None
    replaced_by: str | None
    """Of a flag that the newest release does not take."""
    defaults: tuple[str, ...]
    """As a dump of everything prints them."""


class Profile:
    """What is known of one engine. An engine that has no file has an empty one: nothing is known of it."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.data = _read(engine.replace(".", "_"))
        self.name: str = self.data.get("name", engine)
        self._flags: Mapping[str, Any] = self.data.get("flags", {})
        self._firsts: dict[str, dict[str, Release]] = {}

    @property
    def package(self) -> str:
        """As pip calls it."""
        return str(self.data.get("package", self.engine))

    @property
    def defaults(self) -> Mapping[str, float]:
        """Our settings where a command leaves them out, as far as they are the same in all releases."""
        found: Mapping[str, float] = self.data.get("defaults", {})
        return found

    # How it is started

    def start(self, at: Release = (), *, model: str | None = None, in_image: bool = False) -> str:
        """The words that a command begins with, and the model where it is named; of no release the newest, of an engine
        that is not known vLLM's. `in_image`: what its container image runs."""
        row = engines().get(self.engine, engines()["vllm"])
        old = row.get("start-before")
        if old is not None and () < at < release_of(old["release"]):
            row = old
        start = row["image-start"] if in_image and "image-start" in row else row["start"]
        return " ".join(filter(None, (start, row["model"], model))) if model and "model" in row else str(start)

    # Its flags

    def canonical(self, spelled: str) -> str:
        """-tp, --tp, tensor_parallel_size: one name."""
        name = spelled.lstrip("-").replace("_", "-")
        return str(self._flags.get("aliases", {}).get(name, name))

    def spelling(self, setting: str, *, new: bool = False) -> str | None:
        """The engine's flag or variable for our setting; None where it has none. `new`: as a command that is not there
        yet has it, where that is shorter."""
        if setting.isupper():
            return setting
        if self.data.get("settings-as-ours"):
            return f"--{setting}"
        words = self.data.get("settings", {}).get(setting, "").split()
        if not words:
            return None
        word = words[-1] if new else words[0]
        return word if word.isupper() or word.startswith("-") else f"--{word}"

    def setting_of(self, spelled: str) -> str | None:
        """Our setting that one of its flags is for: what `spelling` spells so."""
        name = self.canonical(spelled)
        if self.data.get("settings-as-ours"):
            return name if self.takes(name) else None
        return next((one for one in self.data.get("settings", {}) if self._is_spelled(one, name)), None)

    def _is_spelled(self, setting: str, name: str) -> bool:
        return self.canonical(self.spelling(setting) or "") == name

    def is_boolean(self, flag: str) -> bool:
        return flag in self._flags.get("booleans", ()) or flag.startswith(
            tuple(self._flags.get("boolean-starts", BOOLEAN_STARTS))
        )

    def takes_many(self, flag: str) -> bool:
        """All words up to the next flag."""
        return flag in self._flags.get("many-values", ())

    def value_rule(self, flag: str) -> Mapping[str, Any] | None:
        """What its value must be: `kind`, and what that kind needs."""
        rule: Mapping[str, Any] | None = self.data.get("values", {}).get(flag)
        return rule

    @property
    def planned(self) -> list[str]:
        """Our settings that a plan for it reads from its command."""
        return str(self.data.get("plan", {}).get("settings", "")).split()

    @cached_property
    def _lists(self) -> Mapping[str, Any]:
        return _read(f"{self.engine.replace('.', '_')}_flags")

    @property
    def read_from(self) -> str:
        """The release whose flags are listed."""
        return str(self._lists.get("read-from", ""))

    @cached_property
    def listed(self) -> tuple[str, ...]:
        return tuple(self._lists.get("flags", "").split())

    @cached_property
    def known(self) -> frozenset[str]:
        """Flags as they are listed and under their one name; empty: they are not known."""
        return frozenset(name for flag in self.listed for name in (flag, self.canonical(flag)))

    def flag(self, name: str) -> FlagHistory:
        return FlagHistory(
            self._first("since", self._lists).get(name),
            self._first("until", self._lists).get(name),
            self._lists.get("replaced", {}).get(name),
            tuple(self._lists.get("defaults", {}).get(name, ())),
        )

    def instead(self, flag: str, value: str | None) -> dict[str, str] | None:
        """What a flag that is no longer taken is written as now, with that value; None: it is not known."""
        named = self._lists.get("instead", {}).get(flag.lstrip("-"), {}).get(value or "")
        if named is None:
            return None
        words = named.split()
        return dict(zip(words[::2], words[1::2], strict=True))

    def takes(self, flag: str, version: str | None = None) -> bool | None:
        """Whether that release has the flag, under its one name; of no version the newest. None: it is in no list."""
        if not self.listed:
            return None
        row, at = self.flag(flag), release(version or "")
        if not at:
            return True if flag in self.known else False if row.replaced_by else None
        if (row.since and at < row.since) or (row.until and at[: len(row.until)] > row.until):
            return False
        return True if flag in self.known or row.replaced_by else None

    def beginnings(self, spelled: str) -> list[str]:
        """The one names of the flags that it may be the beginning of; none where it is whole, or must be."""
        name = self.canonical(spelled)
        if not self.data.get("abbreviations") or not spelled.startswith("--") or self.takes(name) is not None:
            return []
        return sorted({self.canonical(flag) for flag in self.listed if flag.startswith(name)})

    def abbreviated(self, spelled: str) -> str:
        """The one flag that a beginning is of, under its one name; else as it is."""
        able = self.beginnings(spelled)
        return able[0] if len(able) == 1 else self.canonical(spelled)

    def nearest(self, spelled: str) -> str | None:
        """The flag that an unknown one was meant for; None: it is known, or was once, or nothing is like it."""
        import difflib

        name = self.canonical(spelled)
        if not self.listed or self.takes(name) is not None:
            return None
        known = {flag.replace("-", ""): flag for flag in self.listed if len(flag) > 2}
        near = difflib.get_close_matches(name.replace("-", ""), known, n=1, cutoff=NEAR_WITHOUT_HYPHENS)
        return known[near[0]] if near else None

    # Its releases

    @property
    def newest_read(self) -> str:
        """The release whose architectures are listed; nothing where they are not."""
        return str(_architectures().get(self.engine, {}).get("newest", ""))

    def serves(self, architecture: str) -> bool | None:
        """Whether the newest release that was read serves it, by the name in its messages; None: it is not known."""
        row = _architectures().get(self.engine)
        if row is None:
            return None
        return architecture in " ".join((row.get("names", ""), *row.get("since", {}).values())).split()

    def class_of(self, model_type: str) -> str:
        """The listed class that runs a type of a config (Qwen3MoeForCausalLM of qwen3_moe); else as it is."""
        row, plain = _architectures().get(self.engine, {}), model_type.replace("_", "").lower()
        listed = " ".join((row.get("names", ""), *row.get("since", {}).values())).split()
        able = {f"{plain}forcausallm", f"{plain}forconditionalgeneration"}
        return next((name for name in listed if name.lower() in able), model_type)

    def serves_since(self, architecture: str) -> str | None:
        """The first release with it; None: it is not known."""
        return self._listed("since", architecture)

    def served_until(self, architecture: str) -> str | None:
        """The last release with it; None: the newest that was read has it, or it is not known."""
        return self._listed("until", architecture)

    def _listed(self, table: str, architecture: str) -> str | None:
        rows = _architectures().get(self.engine, {}).get(table, {})
        return next((at for at, names in rows.items() if architecture in names.split()), None)

    def since(self, table: str, name: str) -> Release | None:
        """The first release with it, of a table of such: architectures, stages, quantization-stored."""
        return self._first(table, self.data).get(name)

    def feature(self, name: str) -> Release:
        """The first release that has it."""
        return self._span(name)[0]

    def has(self, feature: str, at: Release) -> bool:
        first, *before = self._span(feature)
        return at >= first and not (before and at >= before[0])

    def _span(self, feature: str) -> list[Release]:
        return [release_of(written) for written in self.data["features"][feature].split(" to ")]

    def by_release(self, table: str, at: Release) -> Any:
        """What holds at a release."""
        return next(value for first, value in self.data["by-release"][table].items() if at >= release_of(first))

    def _first(self, table: str, rows: Mapping[str, Any]) -> dict[str, Release]:
        if table not in self._firsts:
            listed: Mapping[str, str] = rows.get(table, {})
            self._firsts[table] = {name: release_of(at) for at, names in listed.items() for name in names.split()}
        return self._firsts[table]


@cache
def profile(engine: str) -> Profile:
    return Profile(engine)


def other_engine(spelled: str, engine: str) -> Profile | None:
    """The engine that has a flag which this one has not; None: none of those whose flags are listed."""
    others = (profile(name) for name in PEERS if name != engine)
    return next((one for one in others if one.takes(one.canonical(spelled))), None)


def translated(spelled: str, engine: str) -> str | None:
    """Another engine's flag as this one spells the same setting; None: it has no such setting."""
    other = other_engine(spelled, engine)
    setting = None if other is None else other.setting_of(spelled)
    flag = None if setting is None else profile(engine).spelling(setting)
    listed = profile(engine).listed
    return flag if flag and (not listed or profile(engine).takes(profile(engine).canonical(flag))) else None


@cache
def engines() -> Mapping[str, Mapping[str, Any]]:
    """How each is started and recognized, in the order in which they are tried."""
    return _read("engines")


def release(version: str) -> Release:
    """Of what a log or a person says: 0.11.0rc1 and v0.11.0+cu128 are 0.11.0; what has no number is older than
    everything."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[+a-uw-z-]", version.lstrip("v"))[0])[:3])


@cache
def release_of(written: str) -> Release:
    """Of a release as the profiles write it."""
    return tuple(map(int, re.findall(r"\d+", written)))


def spelled_release(at: Release) -> str:
    patch, after = ".".join(map(str, at[:3])), at[3:]
    return f"{patch}.post{after[0]}" if after else patch


@cache
def _architectures() -> dict[str, Any]:
    return _read("architectures")


def _read(name: str) -> dict[str, Any]:
    file = _DATA / f"{name}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
