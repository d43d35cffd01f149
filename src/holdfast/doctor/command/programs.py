"""Which word of a command starts which engine, behind wrappers, in containers and as a module of Python. Reads words
only: quotes and lines are shell.py's, flags are parse.py's, and the engines' own words are in their profiles.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.engine_profiles.profile import engines

_TAG = re.compile(r":v?(\d+\.\d+(?:\.\d+)?(?:\.post\d+)?)(?:[-_][\w.-]*)?$")
IN_CONTAINER = ("docker", "podman", "nerdctl")
WRAPPERS = frozenset(
    (
        "sudo", "doas", "nohup", "env", "nice", "exec", "time", "timeout", "numactl", "taskset", "stdbuf", "setsid",
        "srun", "ionice", "chrt", "unbuffer", "uv", "poetry", "conda", "pixi", "mpirun", "tini", "dumb-init",
        "catchsegv", "strace", "nsys", "systemd-run", "torchrun"
    )
)  # fmt: skip
ASSIGNED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


@dataclass(frozen=True, slots=True)
class Start:
    engine: str
    first: int
    """The command's first word."""
    end: int
    """The first word after its program."""
    version: str | None = None


def program_start(words: Sequence[str]) -> Start | None:
    for at, word in enumerate(words):
        bare = word.removeprefix("ExecStart=").lstrip("-@:+!") if word.startswith("ExecStart=") else word
        name = bare.rsplit("/", 1)[-1]
        follows = words[at + 1] if at + 1 < len(words) else ""
        names = (name, f"/{name}") if bare.startswith(("./", "/")) else (name,)
        for engine, how in engines().items():
            expected = how.get("follows", "")
            if any(one in how["programs"] for one in names) and (
                follows == expected if expected == "serve" else follows.startswith(expected)
            ):
                return Start(engine, at, at + 2 if expected == "serve" else at + 1)
        if word == "-m" or name.endswith(".py"):
            found = _module(words, at)
            if found is not None:
                return found
        if name in IN_CONTAINER and follows == "run":
            return _container(words, at)
    return None


def _module(words: Sequence[str], at: int) -> Start | None:
    interpreted = at > 0 and "python" in words[at - 1].rsplit("/", 1)[-1]
    named = at + 1 if words[at] == "-m" else at
    if named >= len(words) or not (interpreted or words[at] != "-m"):
        return None
    first, after = at - 1 if interpreted else at, named + 1
    for engine, how in engines().items():
        if "module" in how and re.search(how["module"], words[named]):
            serve = how.get("module-serve") and list(words[after : after + 1]) == ["serve"]
            return Start(engine, first, after + 1 if serve else after)
    if words[named] == "api_server.py" and any(word.startswith(("--model", "--tensor")) for word in words):
        return Start("vllm", first, after)
    return None


def _container(words: Sequence[str], at: int) -> Start | None:
    for place in range(at + 2, len(words)):
        word = words[place]
        looks_like_image = "/" in word or ":" in word
        if word.startswith("-") or not looks_like_image or words[place - 1] in ("-v", "-p", "--volume", "-e", "--env"):
            continue
        engine = engine_of_image(word)
        if engine is not None:
            inner = program_start(words[place + 1 :])
            return Start(engine, at, place + 1 if inner is None else place + 1 + inner.end, version_of_image(word))
    return None


def engine_of_image(image: str) -> str | None:
    return next((engine for engine, how in engines().items() if re.search(how["image"], image)), None)


def version_of_image(image: str) -> str | None:
    found = _TAG.search(image)
    return None if found is None else found[1]


def split_wrapper(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The wrapping programs with their words, and the assignments before them; other words are not the command's."""
    start = next((at for at, word in enumerate(words) if word.rsplit("/", 1)[-1] in WRAPPERS), len(words))
    assigned = itertools.takewhile(ASSIGNED.match, reversed(words[:start]))
    return list(words[start:]), list(assigned)[::-1]


def container_environment(words: Sequence[str]) -> list[str]:
    """Of `docker run -e NAME=value`."""
    if words[0].rsplit("/", 1)[-1] not in IN_CONTAINER:
        return []
    spaced = [value for flag, value in itertools.pairwise(words) if flag in ("-e", "--env") and ASSIGNED.match(value)]
    return spaced + [word.partition("=")[2] for word in words if word.startswith("--env=")]
