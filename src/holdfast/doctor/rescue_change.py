"""Which fix is taken, and the words of the command with it: the smallest change of behaviour first.

    0  how memory is managed        3  fewer requests at once     6  numbers in fewer bits, other precision
    1  how much memory is used      4  slower                     7  a feature less
    2  the size of a step           5  a shorter context          never without being asked: another model, its code

Knows no log; runs nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.doctor.commands import ServerCommand, parse_command
from holdfast.doctor.records import Finding, Fix
from holdfast.doctor.spellings import MODEL_FLAGS, canonical

_RANKS: Mapping[int, tuple[str, ...]] = {
    1: (
        "gpu-memory-utilization", "mem-fraction-static", "cuda-memory-fraction", "kv-cache-memory-bytes", "ram", "vram",
        "tensor-parallel-size", "pipeline-parallel-size", "tp", "num-shard", "swap-space", "VLLM_CPU_KVCACHE_SPACE",
        "cpu-offload-gb", "shm-size", "ipc", "max-lora-rank",
    ),
    2: (
        "max-num-batched-tokens", "chunked-prefill-size", "ubatch-size", "batch-size", "max-batch-prefill-tokens",
        "cuda-graph-max-bs", "max-cudagraph-capture-size", "cudagraph-capture-sizes", "cuda-graph-bs",
    ),
    3: ("max-num-seqs", "max-running-requests", "parallel", "max-batch-size", "schedule-conservativeness", "max-loras"),
    4: ("enforce-eager", "disable-cuda-graph", "attention-backend", "flash-attn", "n-gpu-layers", "VLLM_USE_V1"),
    5: ("max-model-len", "context-length", "ctx-size", "max-total-tokens", "max-input-tokens"),
    6: ("dtype", "kv-cache-dtype", "cache-type-k", "cache-type-v"),
}  # fmt: skip
_VARIABLE_RANK, _OTHER_RANK = 0, 7
_NEVER = frozenset(
    (*MODEL_FLAGS, "quantization", "quantize", "trust-remote-code", "revision", "tokenizer", "port", "host")
)
"""Another model, another one's code, another address: not what was asked for."""
_SPLITS = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "tp", "num-shard")
_ASSIGNED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


@dataclass(frozen=True, slots=True)
class Started:
    """What is run."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside our own."""

    @property
    def text(self) -> str:
        """As a shell takes it."""
        before = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*before, shlex.join(self.argv)])

    @property
    def command(self) -> ServerCommand | None:
        return parse_command(self.text)


def read(words: Sequence[str]) -> Started:
    """Variables may stand before the program, as a shell takes them."""
    environment: dict[str, str] = {}
    for at, word in enumerate(words):
        if not _ASSIGNED.match(word):
            return Started(tuple(words[at:]), environment)
        name, _, value = word.partition("=")
        environment[name] = value
    return Started((), environment)


@dataclass(frozen=True, slots=True)
class Choice:
    finding: Finding
    fix: Fix
    started: Started


def choose(
    started: Started,
    findings: Iterable[Finding],
    *,
    keep: Iterable[str],
    tried: Iterable[Started],
    bold: bool = False,
    gpus: int = 0,
) -> Choice | None:
    """Of the first finding that has a fix we may take, the one that changes least. None: there is none.

    `bold`: somebody confirms each, so that what is unsure may be offered too. `gpus`: so many are there to split over.
    """
    command = started.command
    if command is None:
        return None
    kept = {canonical(command.engine, name) for name in keep}
    seen = {one.text for one in tried}
    for finding in findings:
        if finding.confidence == "low" and not bold:
            continue
        fixes = [fix for fix in (finding.fix, *finding.alternatives) if fix is not None and fix.changes]
        forbidden = kept | (frozenset() if bold else _NEVER)
        allowed = [fix for fix in fixes if not _names(command, fix) & forbidden and _possible(command, fix, gpus)]
        for fix in sorted(allowed, key=lambda one: rank(command, one)):
            changed = apply(started, fix.changes)
            if changed is not None and changed.text not in seen:
                return Choice(finding, fix, changed)
    return None


def _possible(command: ServerCommand, fix: Fix, gpus: int) -> bool:
    """More ranks need more GPUs than a command can make."""
    for name, value in fix.changes.items():
        if canonical(command.engine, name) in _SPLITS and value is not None and value.isdecimal():
            now = command.value(name) or "1"
            if int(value) > max(gpus, 1) and not (now.isdecimal() and int(value) < int(now)):
                return False
    return True


def _names(command: ServerCommand, fix: Fix) -> frozenset[str]:
    return frozenset(name if name.isupper() else canonical(command.engine, name) for name in fix.changes)


def rank(command: ServerCommand, fix: Fix) -> int:
    """Of its largest change."""
    return max(_rank(name) for name in _names(command, fix))


def _rank(name: str) -> int:
    for number, names in _RANKS.items():
        if name in names:
            return number
    return _VARIABLE_RANK if name.isupper() else _OTHER_RANK


def apply(started: Started, changes: Mapping[str, str | None]) -> Started | None:
    """The same words but for the changes. None: the command is not one that we can read."""
    command = started.command
    if command is None or started.argv[len(started.argv) - len(command.words) :] != command.words:
        return None
    before = list(started.argv[: len(started.argv) - len(command.words)])
    words, environment = [[word] for word in command.words], dict(started.environment)
    behind: list[str] = []
    in_container = command.words[0].rsplit("/", 1)[-1] in ("docker", "podman", "nerdctl")
    for name, value in changes.items():
        if name.isupper() and not name.startswith("-"):
            environment.pop(name, None)
            if value is not None and in_container:
                words[1] = ["run", "-e", f"{name}={value}"]
            elif value is not None:
                environment[name] = value
            continue
        behind += _set(words, command, name, value)
    return Started((*before, *(word for place in words for word in place), *behind), environment)


def _set(words: list[list[str]], command: ServerCommand, name: str, value: str | None) -> list[str]:
    """In its place, spelled as it was; what is returned goes behind the others: it was not there before."""
    wanted = canonical(command.engine, name)
    new = [] if value is None else [name] if value == "" else [name, value]
    for flag in command.flags:
        if flag.name != wanted:
            continue
        start, end = flag.words
        spelled, equals, _ = command.words[start].partition("=")
        if new:
            new = [f"{spelled}={value}"] if equals and value else [spelled, *new[1:]]
        words[start:end] = [new, *([] for _ in range(end - start - 1))]
        new = []
    return new
