"""Which variant of the compiled CPU kernels this machine uses, and why. Runs none, and needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from holdfast.errors import ConfigurationError
from holdfast.hardware import probe

OFF_SWITCH = "HOLDFAST_NATIVE"
"""Set to 0: the compiled kernels are not used."""
FORCED_VARIANT = "HOLDFAST_CPU_KERNELS"
"""Names the variant to use, instead of the first that the CPU can run."""
CANNOT_RUN = "HF113"

FOLDER = Path(__file__).parents[1] / "execution" / "native"
MODULE = "holdfast.execution.native._kernels_"


@dataclass(frozen=True, slots=True)
class KernelChoice:
    variant: str
    reason: str
    source: str
    """As a decision has it."""


@cache
def compiled_kernels() -> bool:
    """As far as it can be told without torch, whose threads they also need."""
    return why_no_kernels() is None


def why_no_kernels() -> str | None:
    """Why the compiled kernels cannot be used here; None: nothing speaks against it."""
    choice = kernel_choice()
    return choice if isinstance(choice, str) else None


@cache
def kernel_choice() -> KernelChoice | str:
    """The variant to load, or why there is none. A variant that is forced and cannot run is a ConfigurationError."""
    if os.environ.get(OFF_SWITCH) == "0":
        return f"{OFF_SWITCH}=0 is set"
    return choose(os.environ.get(FORCED_VARIANT, ""), probe.processor().features, built_variants())


def runnable_variants() -> list[str]:
    """Those this installation brought and this CPU can run, the faster first."""
    return _runnable(probe.processor().features, built_variants())


def choose(forced: str, features: frozenset[str], built: Iterable[str]) -> KernelChoice | str:
    """`built`: the variants this installation brought."""
    there = [name for name in probe.KERNEL_VARIANTS if name in built]
    runnable = _runnable(features, there)
    if forced and forced not in runnable:
        raise ConfigurationError(
            f"{FORCED_VARIANT}={forced}: {_why_not(forced, features, there)}",
            code=CANNOT_RUN,
            found=f"this machine can run {', '.join(runnable) or 'none'}",
            fix=f"{FORCED_VARIANT}={runnable[0]}, or leave it out" if runnable else f"leave {FORCED_VARIANT} out",
        )
    if not runnable:
        return f"they were not built when Holdfast was installed: there is no _kernels module in {FOLDER}"
    if forced:
        return KernelChoice(
            forced, f"{FORCED_VARIANT} is set; this machine can run {', '.join(runnable)}", "environment"
        )
    fastest = _runnable(features, probe.KERNEL_VARIANTS)[0]
    missing = "" if fastest in there else f"; {fastest} was not built"
    return KernelChoice(runnable[0], f"the fastest this CPU can run of {', '.join(there)}{missing}", "hardware")


@cache
def processor() -> probe.Processor:
    """As the chosen kernels use it: where those are the portable ones, it has no dot products."""
    found = probe.processor()
    try:
        choice = kernel_choice()
    except ConfigurationError:
        return found
    if isinstance(choice, str) or probe.KERNEL_VARIANTS[choice.variant]:
        return found
    return replace(found, features=found.features - probe.DOT_PRODUCT_FEATURES)


def _runnable(features: frozenset[str], names: Iterable[str]) -> list[str]:
    return [name for name in names if probe.KERNEL_VARIANTS[name] <= features]


def _why_not(forced: str, features: frozenset[str], there: list[str]) -> str:
    if forced not in probe.KERNEL_VARIANTS:
        return f"no such kernels; there are {', '.join(probe.KERNEL_VARIANTS)}"
    missing = sorted(probe.KERNEL_VARIANTS[forced] - features)
    if missing:
        return f"this CPU has no {' '.join(missing)}"
    return f"this installation has only {', '.join(there) or 'none'}"


def built_variants() -> list[str]:
    """Told from file names: importing one would import torch with its package."""
    return [
        name
        for name in probe.KERNEL_VARIANTS
        if any((FOLDER / f"_kernels_{name}{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)
    ]
