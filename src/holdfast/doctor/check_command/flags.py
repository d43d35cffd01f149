"""Whether a command's flags exist and its values are possible, as far as that is known without a plan.

Which flags there are is said by doctor/command/known_flags.toml, and for Holdfast by its own settings. Knows no model
and no machine.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping
from functools import cache

from holdfast.config import EngineConfig, ServerConfig
from holdfast.config.engine import REFUSED as ENGINE_REFUSED
from holdfast.config.server import REFUSED as SERVER_REFUSED
from holdfast.config.unsupported import asks_nothing
from holdfast.doctor.build_finding import changed, found
from holdfast.doctor.command.flag_aliases import canonical
from holdfast.doctor.command.known_flags import NEAR, beginnings, document, gone, release, since, until
from holdfast.doctor.command.parse import Flag, ServerCommand
from holdfast.doctor.findings import Evidence, Finding, Fix
from holdfast.units import shorten

HOLDFAST_ONLY = ("config", "background", "json", "help", "lora-modules")
DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
KV_DTYPES: Mapping[str, tuple[str, ...]] = {
    "vllm": ("auto", "fp8", "fp8_", "bfloat16", "float16", "nvfp4", "turboquant", "int8_", "int4_", "ultraquant"),
    "sglang": ("auto", "fp8_e5m2", "fp8_e4m3", "bf16", "bfloat16", "fp4_e2m1"),
}
"""Beginnings of what they take."""
_LLAMA_KV = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
LLAMA_CHOICES: Mapping[str, tuple[str, ...]] = {
    "flash-attn": ("auto", "on", "off"), "cache-type-k": _LLAMA_KV, "cache-type-v": _LLAMA_KV,
    "rope-scaling": ("none", "linear", "yarn"), "split-mode": ("layer", "none", "row", "tensor"),
}  # fmt: skip
"""What llama.cpp's flags of a few values take, as its --help has them."""
_MEANT_SO: Mapping[str, tuple[str, ...]] = {"flash-attn": ("enabled", "true", "1", "disabled", "false", "0", "-1")}
"""Taken too, and not in its --help."""
WHOLE = (
    "max-model-len", "max-num-seqs", "tensor-parallel-size", "pipeline-parallel-size", "context-length", "ctx-size",
    "parallel", "max-running-requests", "port", "n-gpu-layers",
)  # fmt: skip
AT_LEAST_ONE = ("tensor-parallel-size", "pipeline-parallel-size", "max-num-seqs", "max-running-requests")
_SPLITS = AT_LEAST_ONE[:2]
LENGTHS = ("max-model-len", "context-length", "ctx-size")
MOST = 1 << 30
MOST_DIGITS = 20
"""That are looked at: with so many it is beyond MOST, whatever follows."""
NAMED = 4
"""Flags that a beginning may stand for, as many as are named."""
SHORT_CHARS = 5
"""Of a flag of llama.cpp with one dash."""
USUAL_SEQUENCES = "256"
"""vLLM's, where none are set."""
_REFUSED = {name.replace("_", "-"): why for name, why in {**ENGINE_REFUSED, **SERVER_REFUSED}.items()}
_SAID_AS_WORDS = {"max-model-len": ("auto",), "n-gpu-layers": ("auto", "all")}


@cache
def known_flags(engine: str) -> frozenset[str]:
    """Under their one name each; empty: they are not known."""
    if engine == "holdfast":
        fields = (*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerConfig))
        named = [name for field in fields for name in (field.name, *field.metadata["flags"])]
        own = {canonical(engine, name) for name in named} | {name.lstrip("-") for name in named}
        return frozenset(own | set(HOLDFAST_ONLY) | set(_REFUSED))
    row = document().get(engine)
    if row is None:
        return frozenset()
    return frozenset(name for flag in row["flags"].split() for name in (flag, canonical(engine, flag)))


def list_of(engine: str) -> str:
    return str(document().get(engine, {}).get("of", ""))


def flag_findings(command: ServerCommand, version: str | None) -> list[Finding]:
    if command.call is not None:
        return []
    return [*_unknown(command, version), *_values(command)]


def _evidence(command: ServerCommand, flag: Flag) -> list[Evidence]:
    start, end = flag.words
    return [Evidence(line=shorten(" ".join(command.words[start:end]), 200), source="command")]


def _unknown(command: ServerCommand, version: str | None) -> Iterator[Finding]:
    known, engine = known_flags(command.engine), command.engine
    if not known:
        return
    for flag in command.flags:
        start = flag.words[0]
        spelled = command.words[start].partition("=")[0]
        name = flag.name
        if engine == "holdfast" and name in _REFUSED:
            if asks_nothing(name.replace("-", "_"), flag.value if flag.values else True):
                continue
            yield found(
                "bad_flag",
                "not_memory",
                "high",
                what=f"Holdfast refuses {spelled}",
                why=_REFUSED[name],
                evidence=_evidence(command, flag),
                fixes=[changed(command, {spelled: None}, f"without {spelled}")],
            )
            continue
        early = since(engine, name)
        if early is not None and version is not None and () < release(version) < early:
            yield _not_yet(command, flag, spelled, early, version)
            continue
        short = engine == "llama.cpp" and spelled.startswith("--") and 0 < len(spelled) - 2 <= SHORT_CHARS
        if short and spelled.lstrip("-") in known and name != spelled.lstrip("-"):
            value = " ".join(flag.values) or ""
            yield found(
                "bad_flag",
                "not_memory",
                "high",
                what=f"llama.cpp knows no {spelled}; {spelled[1:]} is meant",
                why="its short flags have one dash; the command ends at once",
                evidence=_evidence(command, flag),
                fixes=[changed(command, {spelled: None, f"--{name}": value or "on"}, f"--{name} is its long form")],
            )
            continue
        if name in known or (name.startswith("no-") and name[3:] in known) or spelled.startswith("-O"):
            continue
        if "." in name and name.split(".")[0] in known:  # A field of a setting that is an object.
            continue
        instead, last = gone(engine, name), until(engine, name)
        if instead is not None:
            if version is None or last is None or release(version) > last:
                yield _once_taken(command, flag, spelled, instead, version)
            continue
        yield _never_taken(command, flag, spelled, known)


def _never_taken(command: ServerCommand, flag: Flag, spelled: str, known: frozenset[str]) -> Finding:
    engine, several = command.engine, beginnings(command.engine, spelled)[:NAMED]
    near = difflib.get_close_matches(flag.name, sorted(known), n=1, cutoff=NEAR)
    fixes = [changed(command, {spelled: None}, f"without {spelled}")]
    if several:
        fixes.insert(0, Fix(why="write the one that is meant whole"))
    elif near:
        meant: dict[str, str | None] = {spelled: None, f"--{near[0]}": flag.value or ""}
        fixes.insert(0, changed(command, meant, f"--{near[0]} is what it has"))
    read_from = "" if engine == "holdfast" else f" ({list_of(engine)})"
    what = f"{engine} knows no {shorten(spelled)}" + (f"; --{near[0]} is near" if near else "")
    why = f"it is not among the flags of {engine}{read_from}"
    if several:
        what = f"{shorten(spelled)} is the beginning of several flags: {', '.join(f'--{one}' for one in several)}"
        why = f"a beginning is taken where it stands for one flag alone{read_from}"
    return found(
        "bad_flag",
        "not_memory",
        "high" if near and engine == "holdfast" else "medium" if near or several else "low",
        what=what,
        why=f"{why}: the command ends at once with a usage error",
        evidence=_evidence(command, flag),
        fixes=fixes,
    )


def _once_taken(command: ServerCommand, flag: Flag, spelled: str, instead: str, version: str | None) -> Finding:
    last = until(command.engine, flag.name)
    shown = list_of(command.engine) if version is None else version
    why = instead if instead.startswith("leave") else f"in its place: {instead}"
    until_when = "" if last is None else f" (the last that did: {'.'.join(map(str, last))})"
    changes: dict[str, str | None] = {spelled: None}
    if instead == "--hf-overrides" and _is_object(flag.value):
        changes["--hf-overrides"] = json.dumps({flag.name.replace("-", "_"): json.loads(flag.value or "{}")})
    return found(
        "bad_flag",
        "not_memory",
        "medium" if version is None else "high",
        what=f"{command.engine} {shown} no longer takes {spelled}",
        why=f"older versions took it{until_when}; "
        + (f"this is {version}" if version else "the version is not known here"),
        evidence=_evidence(command, flag),
        fixes=[changed(command, changes, why)],
    )


def _not_yet(command: ServerCommand, flag: Flag, spelled: str, first: tuple[int, ...], version: str) -> Finding:
    changes: dict[str, str | None] = {spelled: None}
    if flag.name == "attention-backend" and flag.value:
        changes["VLLM_ATTENTION_BACKEND"] = flag.value
    return found(
        "bad_flag",
        "not_memory",
        "high",
        what=f"{command.engine} {version} does not take {spelled} yet",
        why=f"it came with {'.'.join(map(str, first))}: the command ends at once with a usage error",
        evidence=_evidence(command, flag),
        fixes=[changed(command, changes, f"as {version} takes it")],
    )


def _is_object(value: str | None) -> bool:
    try:
        return isinstance(json.loads(value or ""), dict)
    except (ValueError, RecursionError):
        return False


def _values(command: ServerCommand) -> Iterator[Finding]:
    for flag in command.flags:
        name, value = flag.name, flag.value
        spelled = command.words[flag.words[0]].partition("=")[0]
        if flag.unknown:
            continue
        if name in LENGTHS and value is not None and value.isdecimal() and int(value[:MOST_DIGITS]) > MOST:
            yield _bad(
                command,
                flag,
                f"{spelled} {shorten(value, 30)} is longer than any model reads",
                "without it the model's own context is taken; with it",
                {spelled: None},
            )
        elif name in WHOLE and (value is None or not _is_whole(name, value)):
            one = {spelled: "1"} if name in _SPLITS else {}
            yield _bad(command, flag, f"{spelled} wants a whole number", f"found {value or 'nothing'}", {**one})
        elif name == "dtype" and command.engine != "llama.cpp" and value not in DTYPES:
            near = difflib.get_close_matches((value or "").replace("fp", "float"), DTYPES, n=1)
            dtype = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}.get(
                value or "", near[0] if near else "auto"
            )
            yield _bad(
                command,
                flag,
                f"{spelled} {shorten(value or '')} is no number type that {command.engine} takes",
                f"it takes {', '.join(DTYPES)}",
                {spelled: dtype},
            )
        elif name == "kv-cache-dtype" and not (value or "").startswith(KV_DTYPES.get(command.engine, ("",))):
            yield _bad(
                command,
                flag,
                f"{spelled} {shorten(value or '')} is not what {command.engine} keeps KV in",
                "auto keeps it in what is computed in",
                {spelled: "auto"},
            )
        elif name in ("gpu-memory-utilization", "mem-fraction-static") and not _is_share(value):
            share = _as_share(value)
            yield _bad(
                command,
                flag,
                f"{spelled} {shorten(value or '')} is no share of the memory",
                "a share is more than 0 and at most 1",
                {spelled: share},
            )

    yield from _choices(command)
    yield from _step(command)


def _choices(command: ServerCommand) -> Iterator[Finding]:
    """Of llama.cpp. Types of KV and ways to split have come with new versions and forks; of flash-attn's none has."""
    if command.engine != "llama.cpp":
        return
    for flag in command.flags:
        able, value = LLAMA_CHOICES.get(flag.name), flag.value
        # Without a value it is as old versions took it: only the version tells whether that is a mistake.
        if able is None or not value or flag.unknown or value in (*able, *_MEANT_SO.get(flag.name, ())):
            continue
        spelled = command.words[flag.words[0]].partition("=")[0]
        near = difflib.get_close_matches(value.lower(), able, n=1)
        default = "auto" if "auto" in able else None
        meant = near[0] if near else default
        fixes = [
            changed(
                command,
                {spelled: meant},
                f"it takes {', '.join(able)}" + ("" if near or default is None else "; auto is its default"),
            )
        ]
        yield found(
            "bad_flag",
            "not_memory",
            "high" if flag.name == "flash-attn" else "medium",
            what=f"{spelled} does not take {shorten(value)}: its values are {', '.join(able)}",
            why="the command ends at once",
            evidence=_evidence(command, flag),
            fixes=fixes,
        )


def _step(command: ServerCommand) -> Iterator[Finding]:
    """vLLM's: a step must hold a token of each sequence."""
    tokens = command.value("max-num-batched-tokens") or ""
    sequences = command.value("max-num-seqs") or USUAL_SEQUENCES
    if command.engine != "vllm" or not (tokens.isdecimal() and sequences.isdecimal()) or int(tokens) >= int(sequences):
        return
    flag = next(one for one in reversed(command.flags) if one.name == "max-num-batched-tokens")
    yield _bad(
        command,
        flag,
        f"a step of {int(tokens):,} tokens cannot hold {int(sequences):,} sequences",
        "vLLM wants max_num_batched_tokens to be no less",
        {"--max-num-seqs": tokens},
    )


def _bad(command: ServerCommand, flag: Flag, what: str, why: str, changes: dict[str, str | None]) -> Finding:
    fixes = [changed(command, changes, "as it takes it")] if changes else []
    return found(
        "bad_flag",
        "not_memory",
        "high",
        what=what,
        why=f"{why}; the command ends at once",
        evidence=_evidence(command, flag),
        fixes=fixes,
    )


def _is_whole(name: str, value: str) -> bool:
    if value.lower() in _SAID_AS_WORDS.get(name, ()):
        return True
    digits = value.lstrip("-")
    if name in AT_LEAST_ONE and digits.isdecimal() and not 0 < int(value[:MOST_DIGITS]) <= MOST:
        return False
    if name == "max-model-len" and digits[-1:] in "kKmMgG":  # vLLM and Holdfast read 32k and 32K.
        digits = digits[:-1].replace(".", "", 1)
    return digits.isdecimal() and int(digits[:MOST_DIGITS]) <= MOST


def _is_share(value: str | None) -> bool:
    try:
        return value is not None and 0 < float(value) <= 1
    except ValueError:
        return False


def _as_share(value: str | None) -> str:
    """90 and 90% are meant as 0.9."""
    try:
        number = float((value or "").rstrip("%"))
    except ValueError:
        return "0.9"
    return f"{number / 100:g}" if 1 < number <= 100 else "0.9"
