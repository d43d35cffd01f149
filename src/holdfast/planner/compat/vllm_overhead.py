"""What vLLM calls non-torch memory: libraries' own allocations, buffers between GPUs, and of some releases the context.

    one GPU            80 MiB, and 220 since 0.20
    unified memory     2.2 GiB: what it cannot tell from what other processes take of the machine's RAM
    several, by PCIe   250 MiB of NCCL's buffers in host memory's reach; no all-reduce of its own beyond two
    several, NVLink    0.74 GiB of two ranks, 1.84 of four, 2.10 of eight, as logs print it; Infinity Fabric alike

Knows no model. The formula it is part of is in vllm_release.py.
"""

from __future__ import annotations

from holdfast.hardware.gpus import Gpu
from holdfast.planner.compat.vllm_release import Vllm
from holdfast.planner.sizing.terms import CONTEXT_BYTES, UNIFIED_BYTES
from holdfast.units import GIB, MIB

PCIE_BYTES = 170 * MIB
"""Beside what one GPU has: 0.20 to 0.30 GiB in all are printed for 2080 Ti, 3090, 4090 and L40S, two to sixteen."""
LINKED_BYTES = ((2, int(0.66 * GIB)), (4, int(1.76 * GIB)), (8, int(2.02 * GIB)))
"""Up to so many ranks, beside what one GPU has: H20 x 2, H100 x 4, A100 x 8; MI250 x 8 printed 1.78 GiB in all."""
BLACKWELL_BYTES = int(1.48 * GIB)
"""Of workstation cards by PCIe, which reach each other's memory: RTX PRO 6000 x 4."""


def links_bytes(gpu: Gpu | None, ranks: int, vllm: Vllm) -> int:
    """Of one rank; 0: it has no other."""
    if ranks == 1:
        return 0
    link = None if gpu is None else gpu.peer_link
    if link is not None and "bridge" not in link.name:
        return next((size for most, size in LINKED_BYTES if ranks <= most), LINKED_BYTES[-1][1])
    major = 0 if gpu is None or gpu.compute_capability is None else gpu.compute_capability[0]
    reach = major >= 10 and gpu is not None and "GeForce" not in gpu.name
    return BLACKWELL_BYTES if reach and vllm.has("peer-buffers-on-blackwell") else PCIE_BYTES


def non_torch_bytes(gpu: Gpu | None, ranks: int, vllm: Vllm) -> int:
    alone = int(vllm.value("non-torch-mib")) * MIB
    if gpu is not None and gpu.unified and gpu.vendor == "nvidia":
        alone = UNIFIED_BYTES
    elif vllm.runner == "v1" and vllm.has("counts-context"):
        alone += CONTEXT_BYTES
    return alone + links_bytes(gpu, ranks, vllm)
