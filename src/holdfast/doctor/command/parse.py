"""A command that starts a server, read: whose it is, its model, its flags, its environment.

Knows how each engine spells its flags; knows nothing of whether the command is a good one. Which word starts which
engine is in programs.py; how a command is written again is in server_command.py.
"""

from __future__ import annotations

import re
from dataclasses import replace

from holdfast.doctor.command.manifests import listed
from holdfast.doctor.command.programs import ASSIGNED, Start, container_environment, program_start, split_wrapper
from holdfast.doctor.command.python_calls import parse_call
from holdfast.doctor.command.server_command import Flag, ServerCommand
from holdfast.doctor.command.shell import OpenQuote, Word, is_redirect, split
from holdfast.engine_profiles.profile import MODEL_FLAGS, profile

__all__ = ["Flag", "ServerCommand", "parse_command"]
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


def parse_command(text: str, *, strict: bool = False) -> ServerCommand | None:
    """What starts a server in a line of text; None where nothing does. `strict`: a quote that is not closed is an
    error, and everything before the program belongs to the command: a person wrote it, and no log."""
    text = text[:_LONGEST].replace("：", ": ")
    called = parse_call(text)
    if called is not None:
        return called
    manifest = listed(text)
    text = _EXEC_START.sub("", text) if manifest is None else manifest[0]
    try:
        words = split(text)
    except OpenQuote:
        if strict:
            raise
        # Prose with an apostrophe in it: words are what blanks part.
        words = [Word(found[0], found.start(), found.end()) for found in re.finditer(r"\S+", text)]
    command = _read(text, words, strict)
    return command if command is None or manifest is None else replace(command, version=manifest[1])


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
        if ASSIGNED.match(word):
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
