"""What the host's cores beside a GPU are taken to do with experts that wait in RAM, before anything is measured: a
start calibrates it, a plan for another machine cannot."""

from __future__ import annotations

from holdfast.hardware import Processor
from holdfast.hardware.probe import KERNEL_VARIANTS
from holdfast.planner.sizing.default_limits import core_flops

CORE_GB_S = 5.4
"""Of experts that a core reads a second while it computes with them, and others do: 16 cores of an H200's host (AMX)
read 82 to 92 GB/s of Qwen3-30B-A3B in Q4_K for 1 to 32 tokens, 8 of them 49 to 52."""
ASSUMED = Processor(model="", cores=8, features=KERNEL_VARIANTS["avx2"])
"""Where nothing is known of them."""
KERNEL_SHARE = 0.9
"""Of what copies reach over the link, where kernels read it: 51 of 53.5 GB/s on PCIe 5 by one that only reads."""
COPY_SHARE = 0.82
"""Of what the link is stated to do, that copies reach."""


def host_gb_s(host: Processor | None) -> float:
    """That its cores read together; None: not known."""
    return (host or ASSUMED).cores * CORE_GB_S


def host_flops(host: Processor | None) -> float:
    known = host or ASSUMED
    return known.cores * core_flops(known.features)


def host_is_sooner(host: Processor, link_gb_s: float) -> bool:
    """Whether cores compute an expert sooner than a GPU's kernels fetch it over the link, both bound by its bytes."""
    return host_gb_s(host) > link_gb_s * COPY_SHARE * KERNEL_SHARE
