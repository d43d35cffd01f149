"""A command of `holdfast serve` that was refused, written again so that it starts: misspelt flags are renamed, and each
flag that cannot be honoured is changed as its error advises, or left out, until nothing is refused any more.

    words ─► what is refused ─► without it ─► parsed, settled and, where the model is here, planned again ─┐
                 ▲─────────────────────────── refused for something else ───────────────────────────────┘

Loads nothing and fetches nothing. Where no command is found that passes, there is none: half a fix is not printed. Nor
is one without the model, or without a key or a certificate, that was asked for.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast.cli.fatal import command_line
from holdfast.config import EngineConfig
from holdfast.config.setting import flag_name
from holdfast.engine_profiles.profile import other_engine, translated
from holdfast.errors import ConfigurationError, HoldfastError, ModelError

ROUNDS = 20
"""More mistakes than that are in no command."""
RENAMED = 0.75
"""How alike a flag and the one that may be meant must be for it to be renamed."""
GUARDS = ("api-key", "api-key-file", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs", "ssl-ciphers")
"""Without one of these a server is more open than was asked for."""
GUARD_NEAR = 0.6
MACHINES = ("--nnodes", "--node-rank", "--master-addr", "--headless", "--distributed-executor-backend")
"""What a command with one of these should be, other machines decide too: without it, it would pass and mean another."""
_VALUE = re.compile(r"(?:did you mean )?(--[a-z][\w-]*) ([^\s,;:?]+)\??(?:[,;:]| |$)")
"""What a fix begins with where another value helps."""

_NO_MODEL = re.compile(r"[\d.]+[kmgb%]?|on|off|true|false|auto|none|all")
"""What no model is called, and values of flags are."""


@dataclass(frozen=True, slots=True)
class WorkingCommand:
    command: str
    also: tuple[str, ...]
    """What else was refused, beside the error at hand, each setting once."""


Parse = Callable[[list[str]], tuple[Any, argparse.Namespace]]
"""From the words after `holdfast` to the command's module and its arguments. Raises ConfigurationError."""


def working_command(error: HoldfastError, words: Sequence[str], parse: Parse) -> WorkingCommand | None:
    """`words`: as they were typed after `holdfast`, and refused with `error`."""
    if any(_flag_of(word) in MACHINES for word in words):
        return None
    text, refused, also = command_line(words), error, list[HoldfastError]()
    added = set[str]()
    for _ in range(ROUNDS):
        changed = _put_right(text, refused)
        if changed is None or changed == text or _guards(changed, refused) != _guards(text, refused):
            return None
        added |= _added(text, refused)
        text = changed
        found = refused_start(shlex.split(text)[1:], parse)
        if found is None:
            kept = _keeps_model(text, words, parse) and not _guesses_model(text, words, parse)
            return WorkingCommand(text, tuple(one.message for one in also)) if kept else None
        # Of one setting once: the next value for it is ours, and that less is free by now is no other mistake. Nor is
        # what is wrong with the example value of a flag that nobody wrote.
        settings = _settings(found)
        if _about(found) not in map(_about, also) and not (settings and added.issuperset(settings)):
            also.append(found)
        refused = found
    return None


def _added(text: str, error: HoldfastError) -> set[str]:
    """Flags that the error's advice brings, with a value of its own."""
    if isinstance(error, ConfigurationError) and error.unknown:
        return set()
    written = {_flag_of(word) for word in shlex.split(text)}
    return {flag for flag, value in _changes(error).items() if value is not None and flag not in written}


def _about(error: HoldfastError) -> tuple[str, ...]:
    """What tells one mistake from another: the settings that it is in; of none, what is said of it."""
    return tuple(_settings(error)) or (error.message,)


def _settings(error: HoldfastError) -> list[str]:
    """As flags, however the error spells them."""
    names = getattr(error, "settings", ()) or ([error.field] if error.field else [])
    return [name if name.startswith("-") else flag_name(name) for name in names]


def _put_right(text: str, error: HoldfastError) -> str | None:
    from holdfast.doctor.command.parse import parse_command

    changes = _changes(error)
    if isinstance(error, ConfigurationError) and error.unknown:
        words = _respelled(shlex.split(text)[1:], error)
        text = command_line(words)
        written = {_flag_of(word) for word in words}
        changes = {flag: value for flag, value in changes.items() if flag in written}
    parsed = parse_command(text)
    return None if parsed is None else parsed.with_changes(changes)


def _respelled(words: list[str], error: ConfigurationError) -> list[str]:
    """With the flags that were meant in the place of those that there are not, unless they are set already: then the
    value that was spelled rightly is kept, or the first. One like no other goes alone where every bare word has a use:
    what stands behind it is the model."""
    taken = {_flag_of(word) for word in words}
    bare = [word for word in error.unknown if not word.startswith("-")]
    alone = {_flag_of(word) for word in error.unknown} if not bare else set()
    found: list[str] = []
    for at, word in enumerate(words):
        flag, (_, equals, value) = _flag_of(word), word.partition("=")
        meant = _meant(flag, error)
        before = _flag_of(words[at - 1]) if at and "=" not in words[at - 1] else ""
        if before in alone and before.startswith("-") and _meant(before, error) is None and _is_value(before, word):
            continue  # It goes with its flag, and would be taken for a model without.
        if meant is not None and meant not in taken:
            taken.add(meant)
            found.append(meant + equals + value)
        elif flag not in alone:
            found.append(word)
    return found


def _is_value(flag: str, word: str) -> bool:
    """Whether a word behind a flag that there is not can only be that flag's, and no model."""
    if _NO_MODEL.fullmatch(word.lower()):
        return True
    other = other_engine(flag, "holdfast")
    rule = None if other is None else other.value_rule(other.canonical(flag))
    return rule is not None and word in (*rule.get("choices", ()), *rule.get("also", ()))


def _meant(flag: str, error: HoldfastError) -> str | None:
    near = error.meant.get(flag) if isinstance(error, ConfigurationError) else None
    if near is None:
        return None
    alike = difflib.SequenceMatcher(None, flag.lstrip("-"), near.lstrip("-")).ratio()
    same = translated(flag, "holdfast") == near
    return near if same or alike >= RENAMED or near[2:] in GUARDS else None


def _flag_of(word: str) -> str:
    return word.partition("=")[0].replace("_", "-") if word.startswith("-") else word


def _guards(text: str, error: HoldfastError) -> list[str]:
    """Flags that keep others out, or may be meant to, each with its first value."""
    from holdfast.doctor.report.secret_names import is_secret

    words, found = shlex.split(text)[1:], list[str]()
    for at, word in enumerate(words):
        flag, (_, equals, value) = _flag_of(word), word.partition("=")
        flag = _meant(flag, error) or flag
        near = difflib.get_close_matches(flag[2:], GUARDS, n=1, cutoff=GUARD_NEAR)
        if flag.startswith("--") and (near or flag.startswith("--ssl-") or is_secret(flag)):
            # A key is hidden by the time that its flag is spelled rightly.
            shown = "" if flag == "--api-key" else value if equals else "".join(words[at + 1 : at + 2])
            found.append(f"{flag} {shown}")
    return found


def _keeps_model(text: str, words: Sequence[str], parse: Parse) -> bool:
    """Whether there is a model in it, where there was one."""
    return _named_model(list(words), parse) is None or _named_model(shlex.split(text)[1:], parse) is not None


def _guesses_model(text: str, words: Sequence[str], parse: Parse) -> bool:
    """Whether its model is a word that stood behind a flag that there is not, and is like no model's name: it may as
    well be that flag's value."""
    from holdfast.checkpoints.sources import builtin
    from holdfast.checkpoints.sources.resolve import short_name

    model = _named_model(shlex.split(text)[1:], parse)
    if model is None or "/" in model or Path(model).exists() or builtin.find(model) or short_name(model):
        return False
    try:
        parse(list(words))
    except ConfigurationError as error:
        unknown = {_flag_of(one) for one in error.unknown}
        return any(
            word == model and "=" not in before and _flag_of(before) in unknown for before, word in pairwise(words)
        )
    return False


def _named_model(words: list[str], parse: Parse) -> str | None:
    try:
        _, arguments = parse(words)
    except ConfigurationError as error:
        # As it was read but for these. Behind a flag that is only misspelt stands its value, not a model.
        rest = _respelled(words, error)
        if rest == words:
            rest = [word for word in words if _flag_of(word) not in {_flag_of(one) for one in error.unknown}]
        return None if rest == words else _named_model(rest, parse)
    return arguments.model_positional or getattr(arguments, "model", None)


def _changes(error: HoldfastError) -> dict[str, str | None]:
    """Flags with their new values, or None for those that are to go."""
    advised = _VALUE.match(error.fix or "")
    flags = _settings(error)
    if advised is not None and len(flags) < 2:
        value = advised[2]
        return {advised[1]: "" if value in ("or", "for", "to") else value}
    return dict.fromkeys(flags)


def refused_start(words: list[str], parse: Parse) -> HoldfastError | None:
    """Why these words would not start a server, as far as that can be known without loading."""
    from holdfast.engine.startup.build import find_model, plan_model
    from holdfast.engine.startup.select_device import settle_device
    from holdfast.footprint.cpu import front_bytes
    from holdfast.records.sampling import WHOLE_VOCABULARY

    try:
        serve, arguments = parse(words)
        engine, server = serve.read_settings(arguments)
        engine = settle_device(engine)
        if _is_here(engine):
            model = find_model(engine, progress=False)
            plan_model(engine, model, front_bytes=front_bytes(engine.max_logprobs == WHOLE_VOCABULARY))
            serve.server_settings(engine, server, model)
    except ModelError:
        return None  # Nothing that a flag could change.
    except HoldfastError as error:
        return error
    return None


def _is_here(config: EngineConfig) -> bool:
    from holdfast.checkpoints import DEFAULT_MODEL
    from holdfast.checkpoints.sources import builtin

    name = config.model or DEFAULT_MODEL
    entry = builtin.find(name)
    return Path(name).expanduser().exists() or (entry is not None and builtin.is_cached(entry))


def with_working_command(error: ConfigurationError, words: Sequence[str], parse: Parse) -> None:
    """Adds to the error what else is refused, and below its fix the command that passes."""
    found = working_command(error, words, parse)
    if found is None:
        return
    _advise_its_value(error, found.command)
    error.message += "".join(f"\n  also refused: {line.splitlines()[0]}" for line in found.also)
    error.fix = found.command if error.fix is None else f"{error.fix}\n  run:    {found.command}"


def command_instead(error: HoldfastError, words: Sequence[str], parse: Parse) -> str | None:
    """Of a flag that was refused: the command without everything that would be."""
    if not isinstance(error, ConfigurationError) or error.field is None:
        return None
    found = working_command(error, words, parse)
    if found is None:
        return None
    _advise_its_value(error, found.command)
    return found.command


def _advise_its_value(error: HoldfastError, command: str) -> None:
    """Not two numbers for one flag: less may be free when the command is tried than when the error was raised."""
    from holdfast.doctor.command.parse import parse_command

    advised, parsed = _VALUE.match(error.fix or ""), parse_command(command)
    if error.fix is None or advised is None or parsed is None:
        return
    value = parsed.value(advised[1].removeprefix("--"))
    if value is not None:
        error.fix = error.fix[: advised.start(2)] + value + error.fix[advised.end(2) :]
