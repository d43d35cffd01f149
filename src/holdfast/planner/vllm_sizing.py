"""How vLLM cuts a GPU's memory, by version and runner: its KV pool, its token count, and the words of its refusal.

    requested = total x gpu_memory_utilization          refused when less than that is free
    KV        = requested - weights - peak activation - non-torch [- what it guesses for graphs]

Only what vLLM does is here; what we make of it is in commands.py. Knows no device and no model, only bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import ConfigurationError
from holdfast.planner.kv import KVCost
from holdfast.units import GIB

Runner = Literal["v1", "v2"]
OLDEST, NEWEST = (0, 4), (0, 29)
"""Whose sizing is known; the newest is taken where no version is named."""
UNKNOWN_VERSION = "HF147"
_SPELLING = re.compile(r"(?:[@=:v-]*(\d+)\.(\d+)(?:\.[\w.+-]*)?)?(?:[@,:+ ]*(v[12]))?")


@dataclass(frozen=True, slots=True)
class Vllm:
    version: tuple[int, int] = NEWEST
    runner: Runner = "v2"

    @property
    def default_utilization(self) -> float:
        """Changed in April 2026."""
        return 0.92 if self.version >= (0, 20) else 0.90

    @property
    def subtracts_graphs(self) -> bool:
        """Its first runner guesses their size since 0.21; its second took nothing off before 0.29 and gave the KV pool
        what the graphs then needed."""
        return self.version >= (0, 21) if self.runner == "v1" else self.version >= (0, 29)

    @property
    def default_runner(self) -> Runner:
        return "v2" if self.version >= (0, 26) else "v1"

    @property
    def unknown(self) -> str | None:
        """What to say of a version whose sizing is not known; None: it is."""
        if OLDEST <= self.version <= NEWEST:
            return None
        asked, used = self.version, OLDEST if self.version < OLDEST else NEWEST
        return (
            f"how vLLM {asked[0]}.{asked[1]} sizes memory is not known here: it was taken to do so as"
            f" {used[0]}.{used[1]} does"
        )

    @property
    def name(self) -> str:
        return f"vLLM {self.version[0]}.{self.version[1]} ({self.runner.upper()} runner)"


def parse_vllm(text: str) -> Vllm:
    """What may follow `vllm`: nothing, `==0.26.0`, `@0.11`, `0.26:v1`, `:v1`."""
    found = _SPELLING.fullmatch(text.strip().lower())
    if found is None:
        raise ConfigurationError(
            f"vllm{text} names no version of vLLM",
            code=UNKNOWN_VERSION,
            needed="vllm, or with a version and a runner: vllm==0.26, vllm==0.26:v1",
            found=f"vllm{text}",
            fix=f"--for vllm=={NEWEST[0]}.{NEWEST[1]}, or --for vllm for the newest that is known",
            field="for",
        )
    version = NEWEST if found[1] is None else (int(found[1]), int(found[2]))
    runner = found[3] if found[3] is not None else Vllm(version).default_runner
    return Vllm(version, "v1" if runner == "v1" else "v2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """As vLLM prints them, in bytes."""

    weights: int
    peak_activation: int
    non_torch: int
    graphs: int = 0


def requested_bytes(total_bytes: int, utilization: float) -> int:
    """Rounded up, as it does."""
    return -int(-total_bytes * utilization // 1)


def kv_bytes(requested: int, terms: Terms, vllm: Vllm) -> int:
    """Negative when the weights and the peak are more than the budget."""
    graphs = terms.graphs if vllm.subtracts_graphs else 0
    return requested - terms.weights - terms.peak_activation - terms.non_torch - graphs


def kv_tokens(available: int, kv: KVCost, sequence_tokens: int) -> int:
    """In whole blocks, as it counts and prints them."""
    return kv.tokens(available, sequence_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    max_model_len: int
    needed_bytes: int
    available_bytes: int
    estimated_max_model_len: int

    @property
    def message(self) -> str:
        """In vLLM's own words, so that people find it again in their log."""
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


def refusal(available: int, kv: KVCost, max_model_len: int) -> Refusal | None:
    """None: it would start. The estimate is the longest whole-block length that fits."""
    needed = kv.sequence_bytes(max_model_len)
    if needed <= available:
        return None
    longest = kv.longest(max(0, available), max_model_len)
    return Refusal(
        max_model_len=max_model_len,
        needed_bytes=needed,
        available_bytes=available,
        estimated_max_model_len=longest,
    )
