"""Which fix is taken, and the words of the command with it: the smallest change of behaviour first.

    0  how memory is managed        3  fewer requests at once     6  numbers in fewer bits, other precision
    1  how much memory is used      4  slower                     7  a feature less
    2  the size of a step           5  a shorter context          never without being asked: another model, its code

A value that the log or a plan has worked out comes before one that is only larger; a kind of change that did not help
twice comes after the others. A flag that guards the server (keys, certificates, its address) is never taken away, and
one that is misspelt is corrected. Knows no log; runs nothing.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.doctor.check_command.flags import known_flags
from holdfast.doctor.check_command.remedies import fixes_of, with_fixes
from holdfast.doctor.command.parse import Flag, ServerCommand, parse_command
from holdfast.doctor.findings import Diagnosis, Finding, Fix
from holdfast.engine_profiles.profile import MODEL_FLAGS, NEAR
from holdfast.errors import ConfigurationError
from holdfast.units import shorten

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
_RANK_OF = {name: number for number, names in _RANKS.items() for name in names}
_VARIABLE_RANK, _OTHER_RANK = 0, 7
_NEVER = frozenset((*MODEL_FLAGS, "quantization", "quantize", "trust-remote-code", "revision", "tokenizer", "port"))
"""Another model, another one's code, another address: not what was asked for."""
_GUARDS = re.compile(r"api-?key|ssl|tls|cert|auth|cors|allow|host\Z|uds\Z|root-path|password|token\Z|middleware")
"""In the name of a flag: who may reach the server, and how."""
_SHARES = frozenset(("gpu-memory-utilization", "mem-fraction-static", "cuda-memory-fraction"))
USUAL_SHARE = 0.9
SAME_KIND = 2
"""So often one kind of change is made before the next kind has its turn."""
_SPLITS = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "tp", "num-shard")
_ASSIGNED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
KIN = (
    (
        "kv_cache_too_small_for_max_len", "no_memory_for_kv_blocks", "weights_do_not_fit", "tensor_parallel_unused",
        "free_memory_below_utilization", "activation_oom_runtime", "cuda_graph_capture_oom", "sampler_warmup_oom",
        "host_ram_oom",
    ),
    ("bad_flag", "heads_not_divisible", "tensor_parallel_mismatch", "quant_shape_mismatch"),
)  # fmt: skip
"""Causes of a failed start that a plan may call by another name of the same row."""


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
class FixChoice:
    finding: Finding
    fix: Fix
    started: Started


@dataclass(frozen=True, slots=True, kw_only=True)
class RescueLimits:
    """What may be changed, and on what."""

    keep: tuple[str, ...] = ()
    """Flags that stay as they are."""
    bold: bool = False
    """Somebody confirms each change, so that what is unsure may be offered too."""
    gpus: int = 0
    """So many are there to split over."""
    gpu_gib: float | None = None
    """What each of them has; None: not known."""


def choose(
    started: Started,
    findings: Iterable[Finding],
    limits: RescueLimits,
    *,
    tried: Iterable[Started],
    taken: Iterable[Fix] = (),
) -> FixChoice | None:
    """Of the first finding that has a fix we may take, the one that changes least. None: there is none.

    `tried`: no command is run twice. `taken`: the changes that were made so far, none of which was enough.
    """
    command = started.command
    if command is None:
        return None
    forbidden = {command.canonical(name) for name in limits.keep} | (frozenset() if limits.bold else _NEVER)
    seen = {one.text for one in tried}
    kinds = [_names(command, fix) for fix in taken]
    for finding in findings:
        if finding.confidence == "low" and not limits.bold:
            continue
        corrected = [_corrected(command, fix) for fix in fixes_of(finding) if fix.changes]

        def order(fix: Fix, finding: Finding = finding) -> tuple[bool, bool, int]:
            repeated = kinds.count(_names(command, fix)) >= SAME_KIND
            return repeated, not _worked_out(command, finding, fix, limits), rank(command, fix)

        for fix in sorted(corrected, key=order):
            allowed = not _names(command, fix) & forbidden and _harmless(command, fix)
            changed = apply(started, fix.changes) if allowed and _possible(command, fix, limits.gpus) else None
            if changed is not None and changed.text not in seen:
                return FixChoice(finding, fix, changed)
    return None


def check_keep(started: Started, keep: Iterable[str]) -> None:
    """Raises a ConfigurationError for a flag that the engine does not have: what was meant would be changed."""
    command = started.command
    known = frozenset[str]() if command is None else known_flags(command.engine)
    if command is None or not known:
        return
    there = known | {flag.name for flag in command.flags}
    for name in keep:
        if name.isupper() or command.canonical(name) in there:
            continue
        near = difflib.get_close_matches(command.canonical(name), sorted(there), n=1)
        raise ConfigurationError(
            f"--keep: {command.engine} has no flag {shorten(name)}",
            needed="a flag of the command's",
            fix=f"--keep {near[0]}" if near else "the flag as the command has it",
            field="keep",
        )


def _corrected(command: ServerCommand, fix: Fix) -> Fix:
    """Instead of without a flag that is misspelt: with the one that is near it."""
    wrong = {name: found for name, value in fix.changes.items() if value is None and (found := _near(command, name))}
    if not wrong or len(fix.changes) > len(wrong):
        return fix
    changes: dict[str, str | None] = {}
    for name, (flag, meant) in wrong.items():
        changes |= {name: None, f"--{meant}": " ".join(flag.values)}
    return Fix(changes=changes, why=f"{', '.join(wrong)} is misspelt: the flag is --{next(iter(wrong.values()))[1]}")


def _near(command: ServerCommand, name: str) -> tuple[Flag, str] | None:
    """The flag of that name, and the known one that it was meant to be; None: it is known, or there is none."""
    wanted, known = command.canonical(name), known_flags(command.engine)
    flag = next((flag for flag in command.flags if flag.name == wanted), None)
    if flag is None or wanted in known:
        return None
    near = difflib.get_close_matches(wanted, sorted(known), n=1, cutoff=NEAR)
    return (flag, near[0]) if near else None


def _harmless(command: ServerCommand, fix: Fix) -> bool:
    """Nothing that guards the server is taken away or changed, unless it is only spelled right."""
    gone = {command.canonical(name) for name, value in fix.changes.items() if value is None}
    near = {found[1] for name in gone if (found := _near(command, name)) is not None}
    set_anew = {command.canonical(name) for name, value in fix.changes.items() if value is not None}
    guards = {name for name in gone | set_anew if _GUARDS.search(name)}
    return not guards or (near <= set_anew and guards <= near | {name for name in gone if _near(command, name)})


def _worked_out(command: ServerCommand, finding: Finding, fix: Fix, limits: RescueLimits) -> bool:
    """A larger share of the card is a guess, unless it is as much as the context lacks."""
    names = _names(command, fix)
    if finding.cause != "kv_cache_too_small_for_max_len" or not names <= _SHARES:
        return True
    needed, there = (finding.numbers.get(name) for name in ("needed_gib", "available_gib"))
    if needed is None or there is None or limits.gpu_gib is None:
        return False
    try:
        (name, value), *_ = fix.changes.items()
        gained = (float(value or 0) - float(command.value(name) or USUAL_SHARE)) * limits.gpu_gib
    except ValueError:
        return False
    return gained >= needed - there


def _possible(command: ServerCommand, fix: Fix, gpus: int) -> bool:
    """More ranks need more GPUs than a command can make."""
    for name, value in fix.changes.items():
        if command.canonical(name) in _SPLITS and value is not None and value.isdecimal():
            now = command.value(name) or "1"
            if int(value) > max(gpus, 1) and not (now.isdecimal() and int(value) < int(now)):
                return False
    return True


def _names(command: ServerCommand, fix: Fix) -> frozenset[str]:
    return frozenset(name if name.isupper() else command.canonical(name) for name in fix.changes)


def rank(command: ServerCommand, fix: Fix) -> int:
    """Of its largest change."""
    names = _names(command, fix)
    return max(_RANK_OF.get(name, _VARIABLE_RANK if name.isupper() else _OTHER_RANK) for name in names)


def apply(started: Started, changes: Mapping[str, str | None]) -> Started | None:
    """The same words but for the changes. None: the command is not one that we can read."""
    command = started.command
    if command is None or started.argv[len(started.argv) - len(command.words) :] != command.words:
        return None
    before = list(started.argv[: len(started.argv) - len(command.words)])
    words, environment = [[word] for word in command.words], dict(started.environment)
    behind: list[str] = []
    in_container = command.words[0].rsplit("/", 1)[-1] in ("docker", "podman", "nerdctl")
    renamed = _rename(words, command, changes)
    for name, value in changes.items():
        if name in renamed:
            continue
        if name.isupper() and not name.startswith("-"):
            environment.pop(name, None)
            if value is not None and in_container:
                words[1] = ["run", "-e", f"{name}={value}"]
            elif value is not None:
                environment[name] = value
            continue
        behind += _set(words, command, name, value)
    return Started((*before, *(word for place in words for word in place), *behind), environment)


def _rename(words: list[list[str]], command: ServerCommand, changes: Mapping[str, str | None]) -> set[str]:
    """A flag that is taken away for the one that it was meant to be keeps its place and its words."""
    done: set[str] = set()
    for name, value in changes.items():
        found = _near(command, name) if value is None else None
        if found is None or f"--{found[1]}" not in changes:
            continue
        flag, right = found[0], f"--{found[1]}"
        _, equals, behind = command.words[flag.words[0]].partition("=")
        words[flag.words[0]] = [f"{right}{equals}{behind}"]
        done |= {name, right}
    return done


def _set(words: list[list[str]], command: ServerCommand, name: str, value: str | None) -> list[str]:
    """In its place, spelled as it was; what is returned goes behind the others: it was not there before."""
    wanted = command.canonical(name)
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


# What a plan made before the start offers, with what the log of the death offers


def with_planned(fatal: Sequence[Finding], judged: Diagnosis | None, served: bool) -> list[Finding]:
    """What a plan had offered for the same cause, or at a start for its kin, stands beside what the log offers."""
    together = []
    for finding in fatal:
        planned = [] if judged is None else [one for one in judged.findings if _akin(finding, one, served)]
        more, own = [fix for other in planned for fix in fixes_of(other)], fixes_of(finding)
        # llama.cpp tells no number: what its log offers is half of what was asked for, and a plan knows better.
        plan_first = judged is not None and judged.engine == "llama.cpp"
        together.append(with_fixes(finding, [*more, *own] if plan_first else [*own, *more]))
    return together


def _akin(finding: Finding, other: Finding, served: bool) -> bool:
    if served or finding.cause == other.cause:
        return finding.cause == other.cause
    # A context that is too long for the model is too long for the memory too.
    too_long = other.root_cause == "configuration_overshoot" and other.cause == "bad_flag"
    if finding.cause == "kv_cache_too_small_for_max_len" and too_long:
        return True
    return any(finding.cause in kin and other.cause in kin for kin in KIN)
