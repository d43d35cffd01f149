"""Whether a command's flags exist and its values are possible, as far as that is known without a plan.

Which flags there are and what they take is in the engine's profile, and for Holdfast in its own settings. Knows no
model and no machine.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from holdfast.config import EngineConfig, ServerConfig
from holdfast.config.engine import REFUSED as ENGINE_REFUSED
from holdfast.config.server import REFUSED as SERVER_REFUSED
from holdfast.config.tuning import TUNING, taken_value
from holdfast.config.unsupported import asks_nothing
from holdfast.doctor.build_finding import Confidence, changed, found
from holdfast.doctor.command.parse import Flag, ServerCommand
from holdfast.doctor.findings import Evidence, Finding, Fix
from holdfast.engine_profiles.profile import (
    NEAR,
    FlagHistory,
    Profile,
    Release,
    other_engine,
    profile,
    release,
    translated,
)
from holdfast.units import shorten

HOLDFAST_ONLY = ("config", "background", "json", "help", "lora-modules")
MOST = 1 << 30
MOST_DIGITS = 20
"""That are looked at: with so many it is beyond MOST, whatever follows."""
NAMED = 4
"""Flags that a beginning may stand for, as many as are named."""
SHORT_CHARS = 5
"""Of a flag of llama.cpp with one dash."""
_DTYPES_MEANT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_REFUSED = {name.replace("_", "-"): why for name, why in {**ENGINE_REFUSED, **SERVER_REFUSED}.items()}


@cache
def known_flags(engine: str) -> frozenset[str]:
    """Under their one name each; empty: they are not known."""
    if engine != "holdfast":
        return profile(engine).known
    fields = (*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerConfig))
    named = [name for field in fields for name in (field.name, *field.metadata["flags"])]
    own = {profile(engine).canonical(name) for name in named} | {name.lstrip("-") for name in named}
    return frozenset(own | set(HOLDFAST_ONLY) | set(_REFUSED) | {name.replace("_", "-") for name in TUNING})


def flag_findings(command: ServerCommand, version: str | None) -> list[Finding]:
    if command.call is not None:
        return []
    known = known_flags(command.engine)
    findings = [_unknown(command, flag, known, version) for flag in command.flags] if known else []
    findings += [_value(command, flag) or _no_value(command, flag, version) for flag in command.flags]
    return [one for one in (*findings, _step(command)) if one is not None]


def _bad(
    command: ServerCommand, flag: Flag, confidence: Confidence, what: str, why: str, fixes: Sequence[Fix]
) -> Finding:
    words = " ".join(command.words[slice(*flag.words)])
    evidence = [Evidence(line=shorten(words, 200), source="command")]
    return found("bad_flag", "not_memory", confidence, what=what, why=why, evidence=evidence, fixes=fixes)


def _spelled(command: ServerCommand, flag: Flag) -> str:
    return command.words[flag.words[0]].partition("=")[0]


# Flags


def _unknown(command: ServerCommand, flag: Flag, known: frozenset[str], version: str | None) -> Finding | None:
    engine, name, spelled = profile(command.engine), flag.name, _spelled(command, flag)
    if engine.engine == "holdfast" and name in _REFUSED:
        given = flag.value if flag.values else True
        if asks_nothing(name.replace("-", "_"), given) or taken_value(name.replace("-", "_"), given) is not None:
            return None
        without = changed(command, {spelled: None}, f"without {spelled}")
        return _bad(command, flag, "high", f"Holdfast refuses {spelled}", _REFUSED[name], [without])
    history, at = engine.flag(name), release(version or "")
    if history.since is not None and version is not None and () < at < history.since:
        return _not_yet(command, flag, spelled, history.since, version)
    short = spelled[2:] if engine.data.get("short-flags") and spelled.startswith("--") else ""
    if 0 < len(short) <= SHORT_CHARS and short in known and name != short:
        long = changed(
            command, {spelled: None, f"--{name}": " ".join(flag.values) or "on"}, f"--{name} is its long form"
        )
        what, why = f"llama.cpp has no {spelled}; {spelled[1:]} is meant", "its short flags have one dash"
        return _bad(command, flag, "high", what, f"{why}; the command ends at once", [long])
    field_of = name.split(".")[0] if "." in name else ""  # Of a setting that is an object.
    if {name, name.removeprefix("no-"), field_of} & known or spelled.startswith("-O"):
        return None
    if history.replaced_by is not None:
        taken = version is not None and history.until is not None and at <= history.until
        return None if taken else _once_taken(command, flag, spelled, history, version)
    other = other_engine(spelled, engine.engine)
    if other is not None:
        return _of_another(command, flag, spelled, other)
    several = engine.beginnings(spelled)[:NAMED]
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=NEAR)
    read_from = "" if engine.engine == "holdfast" else f" ({engine.read_from})"
    what, why = f"{engine.engine} has no {shorten(spelled)}", f"it is not among the flags of {engine.engine}"
    confidence: Confidence = "low"
    fixes = [changed(command, {spelled: None}, f"without {spelled}")]
    if several:
        what = f"{shorten(spelled)} is the beginning of several flags: {', '.join(f'--{one}' for one in several)}"
        why, confidence = "a beginning is taken where it stands for one flag alone", "medium"
        fixes.insert(0, Fix(why="write the one that is meant whole"))
    elif near:
        what, confidence = f"{what}; did you mean --{near[0]}?", "medium"
        meant = {spelled: None, f"--{near[0]}": flag.value or ""}
        fixes.insert(0, changed(command, meant, f"--{near[0]} is what it has"))
    if near and engine.engine == "holdfast":
        confidence = "high"
    why = f"{why}{read_from}: the command ends at once with a usage error"
    return _bad(command, flag, confidence, what, why, fixes)


def _of_another(command: ServerCommand, flag: Flag, spelled: str, other: Profile) -> Finding:
    """A flag of `other`, written as this engine spells the same setting, where it has that."""
    engine, same = profile(command.engine), translated(spelled, command.engine)
    if command.engine == "holdfast" and same is not None and same[2:] not in known_flags("holdfast"):
        same = None
    changes: dict[str, str | None] = {spelled: None}
    why = f"without {spelled}: none of {engine.name} is the same"
    if same is not None:
        changes[same] = "" if engine.is_boolean(same.lstrip("-")) else flag.value or ""
        why = f"{same} is what {engine.name} calls it"
    what = f"{engine.engine} has no {shorten(spelled)}: it is a flag of {other.name}"
    ends = "the command ends at once with a usage error"
    return _bad(command, flag, "high" if same else "medium", what, ends, [changed(command, changes, why)])


def _once_taken(command: ServerCommand, flag: Flag, spelled: str, history: FlagHistory, version: str | None) -> Finding:
    instead, last = history.replaced_by or "", history.until
    changes: dict[str, str | None] = {spelled: None}
    if instead == "--hf-overrides" and _is_object(flag.value):
        changes[instead] = json.dumps({flag.name.replace("-", "_"): json.loads(flag.value or "{}")})
    changes |= profile(command.engine).instead(flag.name, flag.value) or {}
    until_when = "" if last is None else f" (the last that did: {'.'.join(map(str, last))})"
    this = f"this is {version}" if version else "the version is not known here"
    what = f"{command.engine} {version or profile(command.engine).read_from} no longer takes {spelled}"
    fix = changed(command, changes, instead if instead.startswith("leave") else f"in its place: {instead}")
    confidence: Confidence = "high" if version else "medium"
    return _bad(command, flag, confidence, what, f"older versions took it{until_when}; {this}", [fix])


def _is_object(value: str | None) -> bool:
    try:
        return isinstance(json.loads(value or ""), dict)
    except (ValueError, RecursionError):
        return False


def _not_yet(command: ServerCommand, flag: Flag, spelled: str, first: Release, version: str) -> Finding:
    changes: dict[str, str | None] = {spelled: None}
    if flag.name == "attention-backend" and flag.value:
        changes["VLLM_ATTENTION_BACKEND"] = flag.value
    what = f"{command.engine} {version} does not take {spelled} yet"
    why = f"it came with {'.'.join(map(str, first))}: the command ends at once with a usage error"
    return _bad(command, flag, "high", what, why, [changed(command, changes, f"as {version} takes it")])


# Values


def _value(command: ServerCommand, flag: Flag) -> Finding | None:
    rule, value, spelled = profile(command.engine).value_rule(flag.name), flag.value or "", _spelled(command, flag)
    if rule is None or flag.unknown:
        return None
    kind, shown = rule["kind"], f"{spelled} {shorten(value)}"
    if kind == "choice":
        return _choice(command, flag, rule)
    changes: dict[str, str | None] = {}
    if kind == "length" and value.isdecimal() and int(value[:MOST_DIGITS]) > MOST:
        what = f"{spelled} {shorten(value, 30)} is longer than any model reads"
        why, changes = "without it the model's own context is taken; with it", {spelled: None}
    elif kind in ("length", "whole") and not _is_whole(rule, value):
        what, why = f"{spelled} wants a whole number", f"found {value or 'nothing'}"
        changes = {spelled: rule["instead"]} if "instead" in rule else {}
    elif kind == "dtype" and value not in rule["choices"]:
        near = difflib.get_close_matches(value.replace("fp", "float"), rule["choices"], n=1)
        what, why = f"{shown} is no number type that {command.engine} takes", f"it takes {', '.join(rule['choices'])}"
        changes = {spelled: _DTYPES_MEANT.get(value, near[0] if near else "auto")}
    elif kind == "kv-dtype" and not value.startswith(tuple(rule["begins"])):
        what, why = f"{shown} is not what {command.engine} keeps KV in", "auto keeps it in what is computed in"
        changes = {spelled: "auto"}
    elif kind == "share" and not 0 < _number(value) <= 1:
        percent = _number(value.rstrip("%"))  # 90 and 90% are meant as 0.9.
        what, why = f"{shown} is no share of the memory", "a share is more than 0 and at most 1"
        changes = {spelled: f"{percent / 100:g}" if 1 < percent <= 100 else "0.9"}
    else:
        return None
    fixes = [changed(command, changes, "as it takes it")] if changes else []
    return _bad(command, flag, "high", what, f"{why}; the command ends at once", fixes)


def _no_value(command: ServerCommand, flag: Flag, version: str | None) -> Finding | None:
    """A flag that once stood alone, and has a value since: it takes the next word for it."""
    rule, spelled = profile(command.engine).value_rule(flag.name) or {}, _spelled(command, flag)
    since, build = rule.get("value-since"), "".join(filter(str.isdigit, version or ""))
    misspelt = spelled.startswith("--") and spelled[2:] != flag.name
    if since is None or flag.values or flag.unknown or misspelt or (build and int(build[:MOST_DIGITS]) < since):
        return None
    what = f"{spelled} has no value: builds since b{since} take the next word for it ({', '.join(rule['choices'])})"
    why = "the command ends at once with a usage error, or the next flag is lost"
    fix = changed(command, {spelled: rule["alone"]}, f"what {spelled} alone meant; older builds take no value there")
    return _bad(command, flag, "high" if build else "medium", what, why, [fix])


def _choice(command: ServerCommand, flag: Flag, rule: Mapping[str, Any]) -> Finding | None:
    able, value, spelled = rule["choices"], flag.value, _spelled(command, flag)
    if not value or value in (*able, *rule.get("also", ())):
        return None
    takes = ", ".join(able)
    near = difflib.get_close_matches(value.lower(), able, n=1)
    default = "auto" if "auto" in able else None
    why = f"it takes {takes}" + ("" if near or default is None else "; auto is its default")
    fix = changed(command, {spelled: near[0] if near else default}, why)
    what = f"{spelled} does not take {shorten(value)}: its values are {takes}"
    return _bad(command, flag, "high" if rule.get("final") else "medium", what, "the command ends at once", [fix])


def _step(command: ServerCommand) -> Finding | None:
    """vLLM's: a step must hold a token of each sequence."""
    tokens, history = command.value("max-num-batched-tokens") or "", profile(command.engine).flag("max-num-seqs")
    sequences = command.value("max-num-seqs") or "".join(history.defaults)
    if command.engine != "vllm" or not (tokens.isdecimal() and sequences.isdecimal()) or int(tokens) >= int(sequences):
        return None
    flag = next(one for one in reversed(command.flags) if one.name == "max-num-batched-tokens")
    what = f"a step of {int(tokens):,} tokens cannot hold {int(sequences):,} sequences"
    why = "vLLM wants max_num_batched_tokens to be no less; the command ends at once"
    return _bad(command, flag, "high", what, why, [changed(command, {"--max-num-seqs": tokens}, "as it takes it")])


def _is_whole(rule: Mapping[str, Any], value: str) -> bool:
    if value.lower() in rule.get("words", ()):
        return True
    digits = value.lstrip("-")
    if "least" in rule and digits.isdecimal() and not rule["least"] <= int(value[:MOST_DIGITS]) <= MOST:
        return False
    if rule.get("suffixes") and digits[-1:] in "kKmMgG":  # 32k and 32K.
        digits = digits[:-1].replace(".", "", 1)
    return digits.isdecimal() and int(digits[:MOST_DIGITS]) <= MOST


def _number(value: str) -> float:
    """Not a number: nan."""
    try:
        return float(value)
    except ValueError:
        return float("nan")
