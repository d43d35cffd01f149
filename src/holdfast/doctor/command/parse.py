"""A command that starts a server, read and changed: whose it is, its model, its flags, its environment.

    cd /srv && source venv/bin/activate && HF_HOME=/data nohup vllm serve MODEL --port 80 2>&1 | tee log
    '------------ before -------------'    '-- environment, wrapper, words --'  '----- after ----'

Knows how each engine spells its flags; knows nothing of whether the command is a good one. Which word starts which
engine is in programs.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from holdfast.doctor.command.manifests import listed
from holdfast.doctor.command.programs import IN_CONTAINER, Start, container_environment, program_start, split_wrapper
from holdfast.doctor.command.python_calls import parse_call, written_call
from holdfast.doctor.command.shell import OpenQuote, Word, is_redirect, quoted, split
from holdfast.engine_profiles.profile import MODEL_FLAGS, profile

HIDDEN = '"${API_KEY:?}"'
"""Stands in what is printed for a key: a shell puts it in, and stops where it is not set. A word in its place would be
taken for the key itself."""
_HIDDEN_IN_PYTHON = 'os.environ["API_KEY"]'
_SECRET_FLAGS = ("api-key", "admin-api-key", "hf-token", "ssl-keyfile-password", "ssl-key-password")
_SECRET_VARIABLE = re.compile(r"(?i)(?:_|^)(?:token|key|secret|passw\w*|credentials?)s?$")
_ASSIGNED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_NUMBER = re.compile(r"-\d")
_SHELL_WORDS = frozenset(
    (
        "cd", "source", ".", "export", "conda", "module", "ulimit", "set", "pip", "mkdir", "unset", "trap", "sleep",
        "huggingface-cli"
    )
)  # fmt: skip
"""What stands before a server's command in a script."""
_SHELLS = ("sh", "bash", "zsh", "dash")
_EXEC_START = re.compile(r"^\s*(?:ExecStart|Exec|ENTRYPOINT|CMD|command|entrypoint)\s*[=:]?\s*[-@:+!]*(?=[/\w])")
_LONGEST = 20_000
"""Characters: nobody starts a server with more, and a log's line may be anything."""


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
        secret = [flag for flag in self.flags if flag.name in _SECRET_FLAGS]
        hidden = {at: at == flag.words[0] for flag in secret for at in range(*flag.words)}
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

    def _written(self, at: int, secret: bool | None) -> str:
        """`secret`: whether the word is a secret's flag, or else its value; None: neither."""
        word = self.words[at]
        if at in self.spelled:
            return self.spelled[at]
        if secret is False:
            return HIDDEN
        if secret:
            return f"{word.partition('=')[0]}={HIDDEN}" if "=" in word else word
        return _assigned(word)


def parse_command(text: str, *, strict: bool = False) -> ServerCommand | None:
    """What starts a server in a line of text; None where nothing does. `strict`: a quote that is not closed is an
    error, and everything before the program belongs to the command: a person wrote it, and no log."""
    text = text[:_LONGEST].replace("：", ": ")
    called = parse_call(text)
    if called is not None:
        flags = tuple(
            Flag(name=profile(called.engine).canonical(word.name), values=(word.value,), expression=word.expression)
            for word in called.keywords
        )
        model = next((flag.value for flag in flags if flag.name in MODEL_FLAGS), None) or called.positional
        return ServerCommand(
            engine=called.engine, words=(text,), program=(called.name,), model=model, flags=flags, call=called.name
        )
    manifest = listed(text)
    text = _EXEC_START.sub("", text) if manifest is None else manifest[0]
    try:
        words = split(text)
    except OpenQuote:
        if strict:
            raise
        words = _loosely(text)
    command = _read(text, words, strict)
    return command if command is None or manifest is None else replace(command, version=manifest[1])


def _loosely(text: str) -> list[Word]:
    """Prose with an apostrophe in it: words are what blanks part."""
    return [Word(found[0], found.start(), found.end()) for found in re.finditer(r"\S+", text)]


def _read(text: str, words: list[Word], strict: bool) -> ServerCommand | None:
    for start, end in _segments(words):
        part = words[start:end]
        inner = _in_a_shell(text, part)
        if inner is not None:
            return inner
        found = program_start([word.value for word in part])
        if found is not None:
            return _command(text, words, (start, end), found, strict)
    return None


def _segments(words: list[Word]) -> list[tuple[int, int]]:
    """From and to of each command; a redirect ends one's words too."""
    ends = [at for at, word in enumerate(words) if word.operator]
    return [(start, end) for start, end in zip([0, *(at + 1 for at in ends)], [*ends, len(words)], strict=True)]


def _in_a_shell(text: str, part: list[Word]) -> ServerCommand | None:
    """`bash -c "vllm serve ..."`."""
    for at, word in enumerate(part[1:-1], start=1):
        shell = part[at - 1].value.rsplit("/", 1)[-1]
        if word.value in ("-c", "-lc", "-ec") and shell in _SHELLS:
            inner = parse_command(part[at + 1].value)
            if inner is not None and inner.call is None:
                script = part[at + 1]
                return replace(inner, script=(text[: script.start], text[script.end :]))
    return None


def _command(
    text: str, words: list[Word], segment: tuple[int, int], found: Start, strict: bool
) -> ServerCommand | None:
    start, end = segment
    part = words[start:end]
    first, engine = found.first, found.engine
    # A shell takes no bare bracket: there a log goes on with words of its own, `(code=exited, status=1)`.
    bracket = next((at for at, word in enumerate(part) if at > first and text.startswith("(", word.start)), len(part))
    rest = part[first:bracket]
    program_end = found.end - first
    if program_end > len(rest):
        return None
    values = [word.value for word in rest]
    if first < len(part) and values[0].startswith("ExecStart="):
        values[0] = values[0].partition("=")[2].lstrip("-@:+!")
    wrapper, assigned = split_wrapper([word.value for word in part[:first]])
    environment = {}
    for word in [*assigned, *wrapper, *container_environment(values)]:
        if _ASSIGNED.match(word):
            name, _, value = word.partition("=")
            environment[name] = value
    unknown = {at for at, word in enumerate(rest) if word.unknown}
    model, flags = _flags(engine, values, program_end, unknown)
    before, after = _around(text, words, segment, strict)
    return ServerCommand(
        engine=engine,
        words=tuple(values),
        program=tuple(values[:program_end]),
        model=model,
        flags=flags,
        environment=environment,
        wrapper=tuple(wrapper),
        before=before,
        after=after,
        version=found.version,
        spelled={at: text[word.start : word.end] for at, word in enumerate(rest) if word.expands},
        filled={word.value: text[word.start : word.end] for word in part[:first] if word.expands},
    )


def _around(text: str, words: list[Word], segment: tuple[int, int], strict: bool) -> tuple[str, str]:
    """What else the line does. In a log other words stand there too: only what is plainly a shell's is kept."""
    start, end = segment
    earlier = [words[at].value for at, _ in _segments(words[:start])[:-1] if at < start]
    plain = strict or (bool(earlier) and all(word.rsplit("/", 1)[-1] in _SHELL_WORDS for word in earlier))
    before = text[: words[start].start].lstrip() if start and plain else ""
    if not strict:
        before = before.lstrip("$#+ ")
    follows = words[end] if end < len(words) else None
    piped = follows is not None and (is_redirect(follows) or follows.value in ("|", "|&", "&"))
    after = text[words[end - 1].end :].rstrip() if follows is not None and (strict or piped) else ""
    return before.replace("\\\n", ""), after


def _flags(engine: str, words: list[str], start: int, unknown: set[int]) -> tuple[str | None, tuple[Flag, ...]]:
    model: str | None = None
    flags: list[Flag] = []
    at, known = start, profile(engine)
    while at < len(words):
        word = words[at]
        if not word.startswith("-") or _NUMBER.match(word) or word == "-":
            model = model or word
            at += 1
            continue
        spelled, equals, given = word.partition("=")
        name = known.abbreviated(spelled)
        end = at + 1
        values: list[str] = [given] if equals else []
        if not equals and not known.is_boolean(name):
            most = len(words) if known.takes_many(name) else at + 2
            while end < min(most, len(words)) and (not words[end].startswith("-") or _NUMBER.match(words[end])):
                values.append(words[end])
                end += 1
        hidden = any(place in unknown for place in range(at, end))
        flags.append(Flag(name=name, values=tuple(values), words=(at, end), unknown=hidden))
        at = end
    named = next((flag.value for flag in reversed(flags) if flag.name in MODEL_FLAGS and flag.value), None)
    return named or model, tuple(flags)


def _is_variable(name: str) -> bool:
    return name.isupper() and not name.startswith("-")


def _assigned(word: str) -> str:
    """A word for a shell, without its secret."""
    name, equals, value = word.partition("=")
    if equals and value and _ASSIGNED.match(word) and _SECRET_VARIABLE.search(name):
        return f'{name}="${{{name}:?}}"'
    return quoted(word)


def _change(slots: list[list[str]], command: ServerCommand, name: str, value: str | None) -> None:
    """In place: a slot for each word of the command, empty where it is taken away."""
    wanted = command.canonical(name)
    secret = bool(value) and wanted in _SECRET_FLAGS
    shown = HIDDEN if secret else None if value is None else quoted(value)
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
    """The call anew, its keywords in their order."""
    secret = {flag.name for flag in command.flags if flag.name in _SECRET_FLAGS}
    keywords = {flag.name: _HIDDEN_IN_PYTHON if flag.name in secret else flag.value or "" for flag in command.flags}
    changed = {command.canonical(name) for name in changes}
    raw = [flag.name for flag in command.flags if flag.name in secret or (flag.expression and flag.name not in changed)]
    kept = [name.replace("-", "_") for name in raw]
    environment = {name: value for name, value in changes.items() if _is_variable(name) and value is not None}
    for name, value in changes.items():
        known = command.canonical(name)
        if _is_variable(name):
            continue
        if value is None:
            keywords.pop(known, None)
        else:
            keywords[known] = value or "True"
    model = None if any(name in keywords for name in MODEL_FLAGS) else command.model
    words = {name.replace("-", "_"): value for name, value in keywords.items()}
    return written_call(command.call or "", model, words, kept, environment)
