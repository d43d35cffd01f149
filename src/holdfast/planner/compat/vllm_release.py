"""How each vLLM version and runner sizes its KV pool and counts tokens, and the message with which it refuses.

    requested = total x gpu_memory_utilization          refused when less than that is free
    KV        = requested - weights - peak activation - non-torch [- its estimate for CUDA graphs]

Only what vLLM does is here; commands.py uses it. Knows no device and no model, only bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, cast

from holdfast.engine_profiles.profile import Release, profile, release_of
from holdfast.errors import ConfigurationError
from holdfast.planner.sizing.kv_cost import KVCost
from holdfast.units import GIB

Runner = Literal["v0", "v1", "v2"]
"""V0 and V1 are engines; V2 is the second model runner of the V1 engine."""
OLDEST, NEWEST = (cast(tuple[int, int], release_of(profile("vllm").data[key])) for key in ("oldest", "newest"))
UNKNOWN_VERSION = "HF147"
ANY_PATCH = 99
_SPELLING = re.compile(r"(?:[@=:v-]*(\d+)\.(\d+)(?:\.(\d+)?(\.(?:post)?\d+)?[\w.+-]*)?)?(?:[@,:+ ]*(v[012]))?")


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
    def oldest(self) -> Release:
        """Of no patch its first: what that release takes, all of the version take."""
        return (*self.version, self.patch or 0, *self.at[3:])

    def has(self, feature: str) -> bool:
        return profile("vllm").has(feature, self.at)

    def value(self, table: str) -> Any:
        """What holds at this release, of a table by release."""
        return profile("vllm").by_release(table, self.at)

    def in_part(self, first: Release) -> bool:
        """Whether only some releases of the version have what came with that one, and none was named."""
        return self.patch is None and self.version == first[:2] and any(first[2:])

    @property
    def default_utilization(self) -> float:
        return float(self.value("default-utilization"))

    @property
    def default_runner(self) -> Runner:
        return cast(Runner, self.value("default-runner"))

    @property
    def subtracts_graphs(self) -> bool:
        """Otherwise it gives the KV pool what the graphs then need, as its V0 engine always did."""
        return self.runner != "v0" and self.has(f"{self.runner}-reserves-graphs")

    @property
    def unknown(self) -> str | None:
        """What to say of a version that is newer than those whose sizing is known; None: it is not."""
        if self.version <= NEWEST:
            return None
        asked, known = (".".join(map(str, version)) for version in (self.version, NEWEST))
        return f"how vLLM {asked} sizes memory is not known: it is assumed to be as in {known}"

    @property
    def name(self) -> str:
        part = "runner" if self.has("model-runner-v2") else "engine"
        return f"vLLM {self.release} ({self.runner.upper()} {part})"


def parse_vllm(text: str) -> Vllm:
    """What may follow `vllm`: nothing, `==0.26.0`, `@0.11`, `0.26:v1`, `:v1`."""
    found = _SPELLING.fullmatch(text.strip().lower())
    newest, oldest = (".".join(map(str, version)) for version in (NEWEST, OLDEST))
    if found is None:
        needed = "vllm, or with a version and a runner: vllm==0.26, vllm==0.26:v1"
        fix = f"--for vllm=={newest}, or --for vllm for the newest that is known"
        raise _unknown(text, f"vllm{text} is not a version of vLLM", needed, fix)
    version = NEWEST if found[1] is None else (int(found[1]), int(found[2]))
    asked = ".".join(map(str, version))
    if version < OLDEST:
        fix = f"--for vllm=={oldest}, the oldest whose models, features and sizing are known"
        raise _unknown(text, f"vLLM {asked} is older than any known version", f"vLLM {oldest} or later", fix)
    runner = cast(Runner, found[5] or Vllm(version).default_runner)
    first, last = map(release_of, profile("vllm").data["runners"][runner])
    if not first <= version <= last:
        needed = "the V0 engine to 0.10, the V1 engine since 0.8, the V2 runner since 0.26"
        raise _unknown(text, f"vLLM {asked} has no {runner.upper()}", needed, f"--for vllm=={asked}")
    return Vllm(version, runner, None if found[3] is None else int(found[3]), found[4] or "")


def _unknown(text: str, message: str, needed: str, fix: str) -> ConfigurationError:
    return ConfigurationError(message, code=UNKNOWN_VERSION, needed=needed, found=f"vllm{text}", fix=fix, field="for")


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


def refusal(available: int, kv: KVCost, max_model_len: int, vllm: Vllm | None = None) -> str | None:
    """In vLLM's own words, so that people find it again in their log; None: it would start. The estimate is the longest
    whole-block length that fits. Of no version the newest."""
    needed, longest = kv.sequence_bytes(max_model_len), kv.longest(max(0, available), max_model_len)
    if needed <= available:
        return None
    if vllm is not None and vllm.runner == "v0":
        held = kv.tokens(available, max_model_len)
        more = "is larger than the maximum number of tokens that can be stored in KV cache"
        return f"The model's max seq len ({max_model_len}) {more} ({held})."
    estimate = f" Based on the available memory, the estimated maximum model length is {longest}." if longest else ""
    return (
        f"To serve at least one request with the models's max seq len ({max_model_len}), ({needed / GIB:.2f} GiB KV"
        f" cache is needed, which is larger than the available KV cache memory ({available / GIB:.2f} GiB).{estimate}"
    )
