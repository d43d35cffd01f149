"""Which word of a command starts which engine, behind wrappers, in containers and as a module of Python. Reads words
only: quotes and lines are shell.py's, flags are parse.py's.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

_IMAGES = (
    ("vllm", re.compile(r"vllm")),
    ("sglang", re.compile(r"sglang")),
    ("tgi", re.compile(r"text-generation-inference")),
    ("llama.cpp", re.compile(r"llama\.?-?cpp")),
    ("ollama", re.compile(r"ollama")),
    ("holdfast", re.compile(r"holdfast")),
)
_TAG = re.compile(r":v?(\d+\.\d+(?:\.\d+)?(?:\.post\d+)?)(?:[-_][\w.-]*)?$")
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
IN_CONTAINER = ("docker", "podman", "nerdctl")
WRAPPERS = frozenset(
    (
        "sudo", "doas", "nohup", "env", "nice", "exec", "time", "timeout", "numactl", "taskset", "stdbuf", "setsid",
        "srun", "ionice", "chrt", "unbuffer", "uv", "poetry", "conda", "pixi", "mpirun", "tini", "dumb-init",
        "catchsegv", "strace", "nsys", "systemd-run", "torchrun"
    )
)  # fmt: skip
_ENTRY_POINTS = {
    "sglang": "python3 -m sglang.launch_server",
    "tgi": "text-generation-launcher",
    "llama.cpp": "llama-server",
    "ollama": "ollama serve",
    "holdfast": "holdfast serve",
}
_ASSIGNED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


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
        engine = _PROGRAMS.get(name)
        if engine in ("vllm", "holdfast", "sglang", "ollama") and follows == "serve":
            return Start(engine, at, at + 2)
        if engine == "llama.cpp" and (name != "server" or bare.startswith(("./", "/"))) and follows.startswith("-"):
            return Start(engine, at, at + 1)
        if engine == "tgi":
            return Start(engine, at, at + 1)
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
    first = at - 1 if interpreted else at
    for engine, module in _MODULES:
        if module.search(words[named]):
            after = named + 1
            if engine in ("holdfast", "vllm") and list(words[after : after + 1]) == ["serve"]:
                after += 1
            return Start(engine, first, after)
    if words[named] == "api_server.py" and any(word.startswith(("--model", "--tensor")) for word in words):
        return Start("vllm", first, named + 1)
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
    return next((engine for engine, pattern in _IMAGES if pattern.search(image)), None)


def version_of_image(image: str) -> str | None:
    found = _TAG.search(image)
    return None if found is None else found[1]


def entry_point(engine: str, version: str | None) -> str:
    """What an engine's image runs where nothing else is said."""
    if engine == "vllm":
        return vllm_program(version)
    return _ENTRY_POINTS[engine]


def vllm_program(version: str | None) -> str:
    """`vllm serve` came with 0.5.3."""
    parts = tuple(int(part) for part in re.findall(r"\d+", version or "")[:3])
    return "python -m vllm.entrypoints.openai.api_server" if parts and parts < (0, 5, 3) else "vllm serve"


def split_wrapper(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The wrapping programs with their words, and the assignments before them; other words are not the command's."""
    start = next((at for at, word in enumerate(words) if word.rsplit("/", 1)[-1] in WRAPPERS), None)
    outside = words if start is None else words[:start]
    assigned: list[str] = []
    for word in reversed(outside):
        if not _ASSIGNED.match(word):
            break
        assigned.insert(0, word)
    return ([] if start is None else list(words[start:])), assigned


def container_environment(words: Sequence[str]) -> list[str]:
    """Of `docker run -e NAME=value`."""
    if words[0].rsplit("/", 1)[-1] not in IN_CONTAINER:
        return []
    spaced = [value for flag, value in itertools.pairwise(words) if flag in ("-e", "--env") and _ASSIGNED.match(value)]
    return spaced + [word.partition("=")[2] for word in words if word.startswith("--env=")]
