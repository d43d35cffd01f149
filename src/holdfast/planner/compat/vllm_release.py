"""How vLLM cuts a GPU's memory, by version and runner: its KV pool, its token count, and the words of its refusal.

    requested = total x gpu_memory_utilization          refused when less than that is free
    KV        = requested - weights - peak activation - non-torch [- what it guesses for graphs]

Only what vLLM does is here; what we make of it is in commands.py. Knows no device and no model, only bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from holdfast.errors import ConfigurationError
from holdfast.planner.sizing.kv_cost import KVCost
from holdfast.units import GIB

Runner = Literal["v0", "v1", "v2"]
"""V0 and V1 are engines; V2 is the second model runner of the V1 engine."""
OLDEST, NEWEST = (0, 4), (0, 29)
"""Whose sizing and features are known; the newest is taken where no version is named."""
UNKNOWN_VERSION = "HF147"
Release = tuple[int, ...]
"""Version, patch, and what came after it: 0.5.3.post1 is 0, 5, 3, 1."""
ANY_PATCH = 99
_SPELLING = re.compile(r"(?:[@=:v-]*(\d+)\.(\d+)(?:\.(\d+)?(\.(?:post)?\d+)?[\w.+-]*)?)?(?:[@,:+ ]*(v[012]))?")
_RUNS: Mapping[Runner, tuple[tuple[int, int], tuple[int, int]]] = {
    "v0": (OLDEST, (0, 10)),
    "v1": ((0, 8), (99, 0)),
    "v2": ((0, 26), (99, 0)),
}
"""First and last version that has it."""


@dataclass(frozen=True, slots=True)
class Vllm:
    version: tuple[int, int] = NEWEST
    runner: Runner = "v2"
    patch: int | None = None
    """None: whichever is the newest of that version."""
    after: str = ""
    """What is released after a patch is called: .post1, or .1."""

    @property
    def release(self) -> str:
        return ".".join(map(str, self.version if self.patch is None else (*self.version, self.patch))) + self.after

    @property
    def at(self) -> Release:
        """To compare with the first release that does something; of no patch its newest."""
        after = int(self.after.removeprefix(".").removeprefix("post") or 0)
        return (*self.version, ANY_PATCH if self.patch is None else self.patch, after)

    @property
    def default_utilization(self) -> float:
        """Changed in April 2026."""
        return 0.92 if self.version >= (0, 20) else 0.90

    @property
    def subtracts_graphs(self) -> bool:
        """Its first runner guesses their size since 0.21; its second took nothing off before 0.29 and gave the KV pool
        what the graphs then needed, as its V0 engine always did."""
        first = {"v1": (0, 21), "v2": (0, 29)}.get(self.runner)
        return first is not None and self.version >= first

    @property
    def default_runner(self) -> Runner:
        return "v2" if self.version >= (0, 26) else "v1" if self.version >= (0, 8) else "v0"

    @property
    def unknown(self) -> str | None:
        """What to say of a version that is newer than those whose sizing is known; None: it is not."""
        if self.version <= NEWEST:
            return None
        asked = self.version
        return (
            f"how vLLM {asked[0]}.{asked[1]} sizes memory is not known: it is assumed to be as in"
            f" {NEWEST[0]}.{NEWEST[1]}"
        )

    @property
    def name(self) -> str:
        part = "runner" if self.version >= (0, 26) else "engine"
        return f"vLLM {self.release} ({self.runner.upper()} {part})"


def spelled(release: Release) -> str:
    patch, after = ".".join(map(str, release[:3])), release[3:]
    return f"{patch}.post{after[0]}" if after else patch


def parse_vllm(text: str) -> Vllm:
    """What may follow `vllm`: nothing, `==0.26.0`, `@0.11`, `0.26:v1`, `:v1`."""
    found = _SPELLING.fullmatch(text.strip().lower())
    if found is None:
        raise ConfigurationError(
            f"vllm{text} is not a version of vLLM",
            code=UNKNOWN_VERSION,
            needed="vllm, or with a version and a runner: vllm==0.26, vllm==0.26:v1",
            found=f"vllm{text}",
            fix=f"--for vllm=={NEWEST[0]}.{NEWEST[1]}, or --for vllm for the newest that is known",
            field="for",
        )
    version = NEWEST if found[1] is None else (int(found[1]), int(found[2]))
    if version < OLDEST:
        raise ConfigurationError(
            f"vLLM {version[0]}.{version[1]} is older than any known version",
            code=UNKNOWN_VERSION,
            needed=f"vLLM {OLDEST[0]}.{OLDEST[1]} or later",
            found=f"vllm{text}",
            fix=f"--for vllm=={OLDEST[0]}.{OLDEST[1]}, the oldest whose models, features and sizing are known",
            field="for",
        )
    runner = cast(Runner, found[5] or Vllm(version).default_runner)
    first, last = _RUNS[runner]
    if not first <= version <= last:
        raise ConfigurationError(
            f"vLLM {version[0]}.{version[1]} has no {runner.upper()}",
            code=UNKNOWN_VERSION,
            needed="the V0 engine to 0.10, the V1 engine since 0.8, the V2 runner since 0.26",
            found=f"vllm{text}",
            fix=f"--for vllm=={version[0]}.{version[1]}",
            field="for",
        )
    return Vllm(version, runner, None if found[3] is None else int(found[3]), found[4] or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseTerms:
    """As vLLM prints them, in bytes."""

    weights: int
    peak_activation: int
    non_torch: int
    graphs: int = 0


def requested_bytes(total_bytes: int, utilization: float) -> int:
    """Rounded up, as it does."""
    return -int(-total_bytes * utilization // 1)


def kv_bytes(requested: int, terms: ReleaseTerms, vllm: Vllm) -> int:
    """Negative when the weights and the peak are more than the budget."""
    graphs = terms.graphs if vllm.subtracts_graphs else 0
    return requested - terms.weights - terms.peak_activation - terms.non_torch - graphs


def kv_tokens(available: int, kv: KVCost, sequence_tokens: int) -> int:
    """In whole blocks, as it counts and prints them."""
    return kv.tokens(available, sequence_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRefusal:
    max_model_len: int
    needed_bytes: int
    available_bytes: int
    estimated_max_model_len: int
    held_tokens: int | None = None
    """Of its V0 engine, which names tokens instead of bytes."""

    @property
    def message(self) -> str:
        """In vLLM's own words, so that people find it again in their log."""
        if self.held_tokens is not None:
            return (
                f"The model's max seq len ({self.max_model_len}) is larger than the maximum number of tokens that can"
                f" be stored in KV cache ({self.held_tokens})."
            )
        estimate = ""
        if self.estimated_max_model_len > 0:
            estimate = (
                f" Based on the available memory, the estimated maximum model length is {self.estimated_max_model_len}."
            )
        return (
            f"To serve at least one request with the models's max seq len ({self.max_model_len}),"
            f" ({self.needed_bytes / GIB:.2f} GiB KV cache is needed, which is larger than the available KV cache"
            f" memory ({self.available_bytes / GIB:.2f} GiB).{estimate}"
        )


def refusal(available: int, kv: KVCost, max_model_len: int, vllm: Vllm | None = None) -> ReleaseRefusal | None:
    """None: it would start. The estimate is the longest whole-block length that fits. Of no version the newest."""
    needed = kv.sequence_bytes(max_model_len)
    if needed <= available:
        return None
    longest = kv.longest(max(0, available), max_model_len)
    return ReleaseRefusal(
        max_model_len=max_model_len,
        needed_bytes=needed,
        available_bytes=available,
        estimated_max_model_len=longest,
        held_tokens=kv_tokens(available, kv, max_model_len) if vllm is not None and vllm.runner == "v0" else None,
    )
