"""How much RAM beside a GPU layers and KV pages may take: pinned memory cannot be swapped out, so it is never all that
is free."""

from __future__ import annotations

from holdfast.footprint.structured_output import FEW_CORES, forms_bytes
from holdfast.models import ModelSpec
from holdfast.units import GIB, MIB

HOST_ENGINE_BYTES = 3 * GIB
"""Of the engine's process in RAM beside pinned memory: torch with CUDA and its libraries, kernels being compiled. An
assumption on the safe side."""
HOST_SHARE = 0.9
"""Of the RAM that is free, where --ram is not set: what is left is for the page cache and for neighbours."""

LEFT_FREE_BYTES = 512 * MIB
"""Of the RAM that is free while a server runs and pins more of it: its processes take some now and then."""

KV_RAM_SHARE = 0.25
"""Of the RAM that a server leaves free, for KV pages where nothing was said: nobody asked for it, it cannot be swapped
out, and another server that starts beside this one finds three quarters of it."""
KV_RAM_POOLS = 2
"""Times the KV pool, at most: an older prefix is asked for again ever more rarely."""
LEAST_KV_RAM_BYTES = 256 * MIB
"""Less is not worth a tier."""


def usual_kv_ram(left_bytes: int, pool_bytes: int) -> int:
    """For KV pages that leave a GPU, where nothing was said. `left_bytes`: of RAM, by all else that the server takes of
    it. 0: none."""
    found = min(int(left_bytes * KV_RAM_SHARE), KV_RAM_POOLS * pool_bytes)
    return found if found >= min(LEAST_KV_RAM_BYTES, KV_RAM_POOLS * pool_bytes) else 0


def server_bytes(
    spec: ModelSpec,
    sequences: int,
    *,
    front_bytes: int,
    adapters_bytes: int = 0,
    cores: int = FEW_CORES,
    structured_output: bool = True,
) -> int:
    """Of a server on a GPU in RAM, without layers: both processes, structured output, and copies of adapters."""
    forms = forms_bytes(spec.vocab_size, sequences, cores) if structured_output else 0
    return HOST_ENGINE_BYTES + front_bytes + forms + adapters_bytes


def host_budget(free_bytes: int) -> int:
    """Of the whole server, where --ram does not say what tiers may take."""
    return int(free_bytes * HOST_SHARE)


def may_be_pinned(free_at_first: int, free_now: int, engines: int = 1) -> int:
    """Of RAM while a server runs, for KV pages: of what was free when it began to pin, a tenth stays so, and some for
    each engine of it, which do not see what the others are about to take. Others may have taken RAM meanwhile."""
    stays = free_at_first - host_budget(free_at_first) + engines * LEFT_FREE_BYTES
    return max(0, free_now - stays)
