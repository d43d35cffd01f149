"""What the host's cores beside a GPU are taken to do with experts that wait in RAM, before anything is measured: a
start calibrates it, a plan for another machine cannot."""

from __future__ import annotations

CORE_GB_S = 4.4
"""Of memory that a core reads a second while others do: 16 of an H200's host read 70."""
CORE_FLOPS = 45e9
"""Of a core with AVX2 in products of quantized experts; AMX and VNNI do twice and more (`default_limits`)."""
ASSUMED_CORES = 8
"""Where nothing is known of them."""
KERNEL_SHARE = 0.65
"""Of what copies reach over the link, where kernels read it: 35 of 53 GB/s on PCIe 5."""
COPY_SHARE = 0.82
"""Of what the link is stated to do, that copies reach."""


def host_gb_s(cores: int | None) -> float:
    """That so many cores read together; None: not known."""
    return (cores or ASSUMED_CORES) * CORE_GB_S


def host_flops(cores: int | None) -> float:
    return (cores or ASSUMED_CORES) * CORE_FLOPS


def host_is_sooner(cores: int | None, link_gb_s: float) -> bool:
    """Whether cores compute an expert sooner than a GPU's kernels read it over the link, both bound by its bytes."""
    return host_gb_s(cores) > link_gb_s * COPY_SHARE * KERNEL_SHARE
