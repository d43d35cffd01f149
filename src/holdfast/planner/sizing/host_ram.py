"""How much RAM beside a GPU layers may take: pinned memory cannot be swapped out, so it is never all that is free."""

from __future__ import annotations

from holdfast.footprint.structured_output import FEW_CORES, forms_bytes
from holdfast.models import ModelSpec
from holdfast.units import GIB

HOST_ENGINE_BYTES = 3 * GIB
"""Of the engine's process in RAM beside pinned memory: torch with CUDA and its libraries, kernels being compiled. An
assumption on the safe side."""
HOST_SHARE = 0.9
"""Of the RAM that is free, where --ram is not set: what is left is for the page cache and for neighbours."""


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
