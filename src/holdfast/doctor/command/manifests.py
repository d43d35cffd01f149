"""A command out of a compose file, a Kubernetes manifest or a Dockerfile: its lists of words as one line for a shell.

Reads the few forms that such files have for a command; no other part of them.
"""

from __future__ import annotations

import json
import re
import shlex
from itertools import takewhile

from holdfast.doctor.command.programs import engine_of_image, program_start, version_of_image
from holdfast.doctor.command.shell import OpenQuote, split
from holdfast.engine_profiles.profile import profile, release

_KEY = re.compile(
    r"^(?P<indent>\s*)(?:- )?(?P<key>image|entrypoint|command|args|ENTRYPOINT|CMD)\b\s*:?\s*(?P<rest>.*)$"
)
_ITEM = re.compile(r"^\s*- (?P<item>.*)$")
_ORDER = ("entrypoint", "command", "args")


def listed(text: str) -> tuple[str, str | None] | None:
    """With the version of the image that is named. None: the text is none of these, and a shell's already."""
    lines = text.splitlines()
    found: dict[str, list[str]] = {}
    image = ""
    for at, line in enumerate(lines):
        key = _KEY.match(line)
        if key is None:
            continue
        name, rest = key["key"], key["rest"].strip()
        if name == "image":
            image = rest.strip("'\"")
            continue
        words = _words(rest, lines[at + 1 :])
        if words is not None:
            found[{"ENTRYPOINT": "entrypoint", "CMD": "args"}.get(name, name)] = words
    if text.lstrip().startswith("[") and not found:
        words = _flow(text.strip())
        found = {} if words is None else {"args": words}
    together = [word for name in _ORDER for word in found.get(name, ())]
    command = _line(together, image) if together else None
    return None if command is None else (command, version_of_image(image))


def _words(rest: str, below: list[str]) -> list[str] | None:
    if rest.startswith("["):
        return _flow(" ".join([rest, *below]))
    if rest in ("", ">", ">-", "|", "|-", "|+"):
        items = _block(below)
        if items:
            return items
    if rest not in (">", ">-", "|", "|-"):
        return None
    first = next((line for line in below if line.strip()), "")
    indent = max(1, len(first) - len(first.lstrip()))
    inside = takewhile(lambda line: not line.strip() or len(line) - len(line.lstrip()) >= indent, below)
    try:
        return [
            word.value for word in split(" ".join(line.strip().rstrip("\\") for line in inside)) if not word.operator
        ]
    except OpenQuote:
        return None


def _flow(text: str) -> list[str] | None:
    """A list in brackets, whatever follows it."""
    try:
        words, _ = json.JSONDecoder().raw_decode(text.replace("'", '"'))
    except (ValueError, RecursionError):
        return None
    return [str(word) for word in words]


def _block(below: list[str]) -> list[str]:
    words = [item["item"].strip() for item in takewhile(bool, map(_ITEM.match, below)) if item is not None]
    return [word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word for word in words]


def _line(words: list[str], image: str) -> str | None:
    """A shell's own `-c` has its command as one word."""
    for at, word in enumerate(words[:-1]):
        if word in ("-c", "-lc") and at > 0 and words[at - 1].rsplit("/", 1)[-1] in ("sh", "bash"):
            return words[at + 1]
    # Kubernetes writes $(NAME) for what it puts in; a shell's ${NAME} stays too.
    text = " ".join(word if "$" in word and " " not in word else shlex.quote(word) for word in words)
    if program_start(words) is not None:
        return text
    engine = engine_of_image(image)
    if engine is None:
        return None
    return f"{profile(engine).start(release(version_of_image(image) or ''), in_image=True)} {text}"
