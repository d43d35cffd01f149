"""A command that starts a server, read and changed: whose it is, its model, its flags, its environment.

Knows how each engine spells its flags; knows nothing of whether the command is a good one.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.doctor.spellings import BOOLEAN_STARTS, BOOLEANS, MANY_VALUED, MODEL_FLAGS, canonical

_ENVIRONMENT = re.compile(r"[A-Z_][A-Z0-9_]*=")
_NUMBER = re.compile(r"-\d")
_IMAGES = (
    ("vllm", re.compile(r"vllm")),
    ("sglang", re.compile(r"sglang")),
    ("tgi", re.compile(r"text-generation-inference")),
    ("llama.cpp", re.compile(r"llama\.?-?cpp")),
    ("ollama", re.compile(r"ollama")),
    ("holdfast", re.compile(r"holdfast")),
)
_MODULES = (
    ("vllm", re.compile(r"vllm\.entrypoints\.|vllm/entrypoints/")),
    ("sglang", re.compile(r"sglang\.launch_server|sglang\.srt")),
    ("llama.cpp", re.compile(r"llama_cpp\.server")),
    ("holdfast", re.compile(r"^holdfast$")),
)
_PROGRAMS = {
    "vllm": "vllm",
    "holdfast": "holdfast",
    "llama-server": "llama.cpp",
    "server": "llama.cpp",
    "llama-cli": "llama.cpp",
    "sglang": "sglang",
    "ollama": "ollama",
    "text-generation-launcher": "tgi",
}
_CALLS = (("vllm", re.compile(r"\b(?:Async)?LLM\(")), ("sglang", re.compile(r"\b(?:sgl\.)?Engine\(")))
_OPERATORS = {"&&", "||", ";", "|", "&", ">", ">>", "2>&1", "2>"}
_LONGEST = 20_000
"""Characters: nobody starts a server with more, and a log's line may be anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    name: str
    """As the engine's help spells it, without dashes: max-model-len, n-gpu-layers."""
    values: tuple[str, ...] = ()
    expression: bool = False
    """Of Python, which is kept as it is."""
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

    def value(self, name: str) -> str | None:
        """Of the last flag of that name, however it was spelled."""
        wanted = canonical(self.engine, name)
        return next((flag.value for flag in reversed(self.flags) if flag.name == wanted), None)

    def has(self, name: str) -> bool:
        wanted = canonical(self.engine, name)
        return any(flag.name == wanted for flag in self.flags)

    def with_changes(self, changes: Mapping[str, str | None]) -> str:
        """The command with flags (`--max-model-len`) and variables (`NAME`) set, or taken away where None."""
        if self.call is not None:
            return _called(self, changes)
        slots, environment = [[word] for word in self.words], dict(self.environment)
        for name, value in changes.items():
            if not _is_variable(name):
                _change(slots, self, name, value)
            elif value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        before = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        return " ".join([*before, *(shlex.quote(word) for slot in slots for word in slot)])


def parse_command(text: str) -> ServerCommand | None:
    """What starts a server in a line of text; None where nothing does."""
    text = text[:_LONGEST].replace("：", ": ")
    called = _parse_call(text)
    if called is not None:
        return called
    try:
        words = shlex.split(text, comments=False)
    except ValueError:
        words = text.split()
    start = _start(words)
    if start is None:
        return None
    engine, first, program_end = start
    environment = _environment(words[:first])
    rest = words[first:]
    for at, word in enumerate(rest):
        if word in _OPERATORS:
            rest = rest[:at]
            break
    program_end -= first
    if program_end > len(rest):
        return None
    model, flags = _flags(engine, rest, program_end)
    return ServerCommand(
        engine=engine,
        words=tuple(rest),
        program=tuple(rest[:program_end]),
        model=model,
        flags=flags,
        environment=environment,
    )


def _start(words: list[str]) -> tuple[str, int, int] | None:
    """The engine, the first word of the command, and the first after its program."""
    for at, word in enumerate(words):
        name = word.rsplit("/", 1)[-1]
        follows = words[at + 1] if at + 1 < len(words) else ""
        engine = _PROGRAMS.get(name)
        if engine in ("vllm", "holdfast", "sglang", "ollama") and follows == "serve":
            return engine, at, at + 2
        if engine == "llama.cpp" and (name != "server" or word.startswith(("./", "/"))) and follows.startswith("-"):
            return engine, at, at + 1
        if engine == "tgi":
            return engine, at, at + 1
        if word == "-m" or name.endswith(".py"):
            found = _module(words, at)
            if found is not None:
                return found
        if name in ("docker", "podman", "nerdctl") and follows == "run":
            return _container(words, at)
    return None


def _module(words: list[str], at: int) -> tuple[str, int, int] | None:
    interpreted = at > 0 and "python" in words[at - 1].rsplit("/", 1)[-1]
    named = at + 1 if words[at] == "-m" else at
    if named >= len(words) or not (interpreted or words[at] != "-m"):
        return None
    for engine, module in _MODULES:
        if module.search(words[named]):
            after = named + 1
            if engine in ("holdfast", "vllm") and words[after : after + 1] == ["serve"]:
                after += 1
            return engine, at - 1 if interpreted else at, after
    if words[named] == "api_server.py" and any(word.startswith(("--model", "--tensor")) for word in words):
        return "vllm", at - 1 if interpreted else at, named + 1
    return None


def _container(words: list[str], at: int) -> tuple[str, int, int] | None:
    for place in range(at + 2, len(words)):
        word = words[place]
        looks_like_image = "/" in word or ":" in word
        if word.startswith("-") or not looks_like_image or words[place - 1] in ("-v", "-p", "--volume", "-e", "--env"):
            continue
        for engine, image in _IMAGES:
            if image.search(word):
                inner = _start(words[place + 1 :])
                return engine, at, place + 1 if inner is None else place + 1 + inner[2]
    return None


def _environment(words: list[str]) -> dict[str, str]:
    found = {}
    for word in words:
        if _ENVIRONMENT.match(word):
            name, _, value = word.partition("=")
            found[name] = value
    return found


def _flags(engine: str, words: list[str], start: int) -> tuple[str | None, tuple[Flag, ...]]:
    model: str | None = None
    flags: list[Flag] = []
    at = start
    while at < len(words):
        word = words[at]
        if not word.startswith("-") or _NUMBER.match(word) or word == "-":
            model = model or word
            at += 1
            continue
        spelled, equals, given = word.partition("=")
        name = canonical(engine, spelled)
        end = at + 1
        values: list[str] = [given] if equals else []
        if not equals and not _is_boolean(engine, name):
            most = len(words) if name in MANY_VALUED else at + 2
            while end < min(most, len(words)) and (not words[end].startswith("-") or _NUMBER.match(words[end])):
                values.append(words[end])
                end += 1
        flags.append(Flag(name=name, values=tuple(values), words=(at, end)))
        at = end
    named = next((flag.value for flag in reversed(flags) if flag.name in MODEL_FLAGS and flag.value), None)
    return named or model, tuple(flags)


def _is_boolean(engine: str, name: str) -> bool:
    return name in BOOLEANS.get(engine, ()) or (engine != "llama.cpp" and name.startswith(BOOLEAN_STARTS))


def _is_variable(name: str) -> bool:
    return name.isupper() and not name.startswith("-")


def _change(slots: list[list[str]], command: ServerCommand, name: str, value: str | None) -> None:
    """In place: a slot for each word of the command, empty where it is taken away."""
    wanted = canonical(command.engine, name)
    placed = False
    for flag in command.flags:
        if flag.name != wanted:
            continue
        start, end = flag.words
        spelled, joined, _ = command.words[start].partition("=")
        for at in range(start, end):
            slots[at] = []
        if value is not None and not placed:
            slots[start] = [spelled] if not value else [f"{spelled}={value}"] if joined else [spelled, value]
            placed = True
    if value is not None and not placed:
        flag_word = name if name.startswith("-") else f"--{wanted}"
        slots.append([flag_word, value] if value else [flag_word])


# Python that starts an engine


def _parse_call(text: str) -> ServerCommand | None:
    for engine, pattern in _CALLS:
        found = pattern.search(text)
        if found is None:
            continue
        name = found[0].rstrip("(")
        body = _balanced(text, found.end() - 1)
        try:
            tree = ast.parse(name + body, mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue
        if not isinstance(tree, ast.Call):
            continue
        flags = tuple(
            Flag(
                name=canonical(engine, word.arg),
                values=(_literal(word.value),),
                expression=not isinstance(word.value, ast.Constant),
            )
            for word in tree.keywords
            if word.arg is not None
        )
        positional = next((_literal(word) for word in tree.args), None)
        model = next((flag.value for flag in flags if flag.name in MODEL_FLAGS), None) or positional
        return ServerCommand(engine=engine, words=(text,), program=(name,), model=model, flags=flags, call=name)
    return None


def _balanced(text: str, start: int) -> str:
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return text[start : at + 1]
    return text[start:]


def _literal(value: ast.expr) -> str:
    if isinstance(value, ast.Constant):
        return str(value.value)
    return ast.unparse(value)


def _called(command: ServerCommand, changes: Mapping[str, str | None]) -> str:
    """The call anew, its keywords in their order."""
    keywords = {flag.name: flag.value or "" for flag in command.flags}
    kept = {flag.name for flag in command.flags if flag.expression} - {
        canonical(command.engine, name) for name in changes
    }
    environment = {name: value for name, value in changes.items() if _is_variable(name) and value is not None}
    for name, value in changes.items():
        if _is_variable(name):
            continue
        known = canonical(command.engine, name)
        if value is None:
            keywords.pop(known, None)
        else:
            keywords[known] = value or "True"
    shown = [] if command.model is None or any(name in keywords for name in MODEL_FLAGS) else [repr(command.model)]
    shown += [
        f"{name.replace('-', '_')}={value if name in kept else _python(value)}" for name, value in keywords.items()
    ]
    before = "".join(f"os.environ[{name!r}] = {value!r}; " for name, value in environment.items())
    return f"{before}{command.call}({', '.join(shown)})"


def _python(value: str) -> str:
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return repr(value)
    return value
