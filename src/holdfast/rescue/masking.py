"""A command that is run, as it may be printed: it stays one that a shell takes, and no key stands in it.

--api-key sk-1 sk-2    becomes    --api-key "${API_KEY:?}" "${API_KEY_2:?}"    which a shell fills in, or stops at

What rescue says goes to journals and tickets as often as to a terminal. Runs and changes nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from holdfast.doctor.report.redact import without_secrets
from holdfast.doctor.report.secret_names import holds_secret
from holdfast.rescue.choose_fix import Started

EXPLAINED = '"${NAME:?}" stands for a key that was given: set NAME before you run the command'
STANDS_FOR = re.compile(r'"\$\{\w+:\?\}"')


def shown(started: Started) -> str:
    hidden = {at: word for at, word, _ in _secrets(started)}
    before = [hidden.get(name) or f"{name}={shlex.quote(value)}" for name, value in started.environment.items()]
    words = [hidden.get(at) or shlex.quote(without_secrets(word, named=False)) for at, word in enumerate(started.argv)]
    return " ".join([*before, *words])


def secret_values(started: Started) -> frozenset[str]:
    """As they were given."""
    return frozenset(value for _, _, value in _secrets(started))


def shown_change(flag: str, value: str | None) -> str:
    if value is None:
        return f"without {flag}"
    hides = bool(value) and holds_secret(flag, value)
    return f"{flag} {_placeholder(flag, 1) if hides else value}".rstrip()


def _secrets(started: Started) -> Iterator[tuple[str | int, str, str]]:
    """Where it stands (a variable's name, or which word), the word that stands for it, and the secret itself."""
    for name, value in started.environment.items():
        if value and holds_secret(name, value):
            yield name, f'{name}="${{{name}:?}}"', value
    command = started.command
    if command is None or started.argv[len(started.argv) - len(command.words) :] != command.words:
        return
    offset = len(started.argv) - len(command.words)
    for at, word in enumerate(started.argv):  # Of env, and of a container.
        name, equals, value = word.partition("=")
        if equals and value and name.isidentifier() and holds_secret(name, value):
            yield at, f'{name}="${{{name}:?}}"', value
    for flag in command.flags:
        start, end = flag.words
        spelled, equals, joined = command.words[start].partition("=")
        if equals and joined and holds_secret(spelled, joined):
            yield offset + start, f"{spelled}={_placeholder(spelled, 1)}", joined
        for number, at in enumerate(range(start + 1, end), start=1):
            if holds_secret(spelled, command.words[at]):
                yield offset + at, _placeholder(spelled, number), command.words[at]


def _placeholder(flag: str, number: int) -> str:
    name = re.sub(r"\W", "_", flag.lstrip("-")).upper()
    name = f"HOLDFAST_{name}" if name == "NODE_SECRET" else name  # The variable that is read anyway.
    return f'"${{{name}{"" if number == 1 else f"_{number}"}:?}}"'
