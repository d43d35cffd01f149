"""A command that starts a server, as it was read, and written again with other flags or variables.

    cd /srv && source venv/bin/activate && HF_HOME=/data nohup vllm serve MODEL --port 80 2>&1 | tee log
    '------------ before -------------'    '-- environment, wrapper, words --'  '----- after ----'

Keeps everything that is not changed as it was written, and hides keys. Reads no text: that is parse.py's.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.doctor.command.programs import ASSIGNED, IN_CONTAINER
from holdfast.doctor.command.shell import quoted
from holdfast.doctor.report.secret_names import is_misspelt_key
from holdfast.engine_profiles.profile import MODEL_FLAGS, profile

_SECRET_FLAGS = {
    "api-key": "API_KEY",
    "admin-api-key": "ADMIN_API_KEY",
    "hf-token": "HF_TOKEN",
    "node-secret": "HOLDFAST_NODE_SECRET",
    "ssl-keyfile-password": "SSL_KEYFILE_PASSWORD",
    "ssl-key-password": "SSL_KEY_PASSWORD",
}
"""With the variable that stands for it in what is printed: a shell puts it in, and stops where it is not set. A word in
its place would be taken for the key itself, and one variable for all of them would give each the same value."""
_SECRET_VARIABLE = re.compile(r"(?i)(?:_|^)(?:token|key|secret|passw\w*|credentials?)s?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    name: str
    """As the engine's help spells it, without dashes: max-model-len, n-gpu-layers."""
    values: tuple[str, ...] = ()
    expression: bool = False
    """Of Python, which is kept as it is."""
    unknown: bool = False
    """A shell puts its value in."""
    words: tuple[int, int] = (0, 0)
    """From and to, among the command's words."""

    @property
    def value(self) -> str | None:
        return self.values[0] if self.values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    engine: str
    words: tuple[str, ...]
    """All of it, without the environment before it."""
    program: tuple[str, ...]
    """The words up to the first flag or the model: `vllm serve`, `python -m vllm.entrypoints.openai.api_server`."""
    model: str | None = None
    flags: tuple[Flag, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    call: str | None = None
    """The name that is called, where it was Python that started it: LLM, sgl.Engine."""
    spelled: Mapping[int, str] = field(default_factory=dict)
    """Words that a shell fills in, as they were written, by their place."""
    filled: Mapping[str, str] = field(default_factory=dict)
    """And the same of words before the program, by what they are here."""
    wrapper: tuple[str, ...] = ()
    """Programs that run it: nohup, env, sudo -E."""
    before: str = ""
    after: str = ""
    """Other commands of the same line, with their operators; what becomes of its output."""
    script: tuple[str, str] | None = None
    """All of it is one word of another command (`bash -c`): the text before that word, and behind."""
    version: str | None = None
    """Of the engine, where an image is named with it."""

    def canonical(self, name: str) -> str:
        """A flag's one name, however its engine lets it be spelled."""
        return profile(self.engine).canonical(name)

    def value(self, name: str) -> str | None:
        """Of the last flag of that name, however it was spelled; None too where only a shell knows it."""
        wanted = self.canonical(name)
        return next((flag.value for flag in reversed(self.flags) if flag.name == wanted and not flag.unknown), None)

    def has(self, name: str) -> bool:
        wanted = self.canonical(name)
        return any(flag.name == wanted for flag in self.flags)

    def with_changes(self, changes: Mapping[str, str | None]) -> str:
        """The command with flags (`--max-model-len`) and variables (`NAME`) set, or taken away where None. For people:
        keys and tokens are hidden, and their place is kept."""
        if self.call is not None:
            return _called(self, changes)
        secret = [flag for flag in self.flags if flag.name in _SECRET_FLAGS or is_misspelt_key(flag.name)]
        hidden = {at: flag for flag in secret for at in range(*flag.words)}
        slots = [[self._written(at, hidden.get(at))] for at in range(len(self.words))]
        environment = dict(self.environment)
        wrapper = list(self.wrapper)
        for name, value in changes.items():
            if not _is_variable(name):
                _change(slots, self, name, value)
            else:
                environment.pop(name, None)
                wrapper = [word for word in wrapper if not word.startswith(f"{name}=")]
                if value is not None and self.words[0].rsplit("/", 1)[-1] in IN_CONTAINER:
                    slots[1].append(f"-e {quoted(f'{name}={value}')}")
                elif value is not None and wrapper:
                    place = wrapper.index("env") + 1 if "env" in wrapper else len(wrapper)
                    wrapper[place:place] = [*(() if "env" in wrapper else ("env",)), f"{name}={value}"]
                elif value is not None:
                    environment[name] = value
        inside = {word.partition("=")[0] for word in wrapper}
        named = [] if self.words[0].rsplit("/", 1)[-1] in IN_CONTAINER else environment.items()
        first = [f"{name}={value}" for name, value in named if name not in inside]
        words = [self.filled.get(word) or _assigned(word) for word in (*first, *wrapper)]
        words += [word for slot in slots for word in slot]
        text = f"{self.before}{' '.join(words)}{self.after}"
        return text if self.script is None else f"{self.script[0]}{quoted(text)}{self.script[1]}"

    def _written(self, at: int, secret: Flag | None) -> str:
        """`secret`: the flag with a secret that the word belongs to."""
        word = self.words[at]
        if at in self.spelled:
            return self.spelled[at]
        if secret is None:
            return _assigned(word)
        if at > secret.words[0]:
            return _hidden(secret.name)
        return f"{word.partition('=')[0]}={_hidden(secret.name)}" if "=" in word else word


def _hidden(flag: str) -> str:
    """Of a misspelt key as of the key."""
    return f'"${{{_SECRET_FLAGS.get(flag, "API_KEY")}:?}}"'


def _is_variable(name: str) -> bool:
    return name.isupper() and not name.startswith("-")


def _assigned(word: str) -> str:
    """A word for a shell, without its secret."""
    name, equals, value = word.partition("=")
    if equals and value and ASSIGNED.match(word) and _SECRET_VARIABLE.search(name):
        return f'{name}="${{{name}:?}}"'
    return quoted(word)


def _change(slots: list[list[str]], command: ServerCommand, name: str, value: str | None) -> None:
    """In place: a slot for each word of the command, empty where it is taken away."""
    wanted = command.canonical(name)
    secret = bool(value) and wanted in _SECRET_FLAGS
    shown = _hidden(wanted) if secret else None if value is None else quoted(value)
    placed = False
    for flag in command.flags:
        start, end = flag.words
        if flag.name != wanted or not slots[start]:  # Empty: another spelling of it was taken away.
            continue
        spelled, joined, _ = command.words[start].partition("=")
        for at in range(start, end):
            slots[at] = []
        if value is not None and not placed:
            if secret and joined:
                slots[start] = [f"{spelled}={shown}"]
            else:
                joint = [quoted(f"{spelled}={value}")] if joined else [quoted(spelled), shown or ""]
                slots[start] = joint if value else [quoted(spelled)]
            placed = True
    if value is not None and not placed:
        flag_word = name if name.startswith("-") else f"--{wanted}"
        slots.append([flag_word, shown or ""] if value else [flag_word])


def _called(command: ServerCommand, changes: Mapping[str, str | None]) -> str:
    """The call anew, its keywords in their order; what is no plain value stays Python as it was written."""
    keywords = {flag.name: flag.value or "" if flag.expression else _python(flag.value or "") for flag in command.flags}
    keywords |= {name: f'os.environ["{_SECRET_FLAGS[name]}"]' for name in keywords if name in _SECRET_FLAGS}
    environment = ""
    for name, value in changes.items():
        if _is_variable(name):
            environment += "" if value is None else f"os.environ[{name!r}] = {value!r}; "
        elif value is None:
            keywords.pop(command.canonical(name), None)
        else:
            keywords[command.canonical(name)] = _python(value or "True")
    model = None if any(name in keywords for name in MODEL_FLAGS) else command.model
    shown = [] if model is None else [repr(model)]
    shown += [f"{name.replace('-', '_')}={value}" for name, value in keywords.items()]
    return f"{environment}{command.call}({', '.join(shown)})"


def _python(value: str) -> str:
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return repr(value)
    return value
