"""One engine's command and what all of them are written with. Knows no engine and decides nothing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.engine_profiles.profile import Release, profile
from holdfast.planner.fit.search import Plan
from holdfast.planner.inputs.question import Device
from holdfast.units import MIB

ROUNDING = 1e-4
"""Of a hundredth: a budget in whole bytes is a little less than its share."""
SHOWS_GPUS: Mapping[str, str] = {
    "nvidia": "CUDA_VISIBLE_DEVICES",
    "amd": "HIP_VISIBLE_DEVICES",
    "intel": "ZE_AFFINITY_MASK",
}
"""The variable that shows a program some GPUs of a vendor and hides the rest; Apple has none, and one GPU."""
IN_ORDER_OF_BUSES = "CUDA_DEVICE_ORDER=PCI_BUS_ID"
"""As nvidia-smi counts them; CUDA itself counts the fastest first where they differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    engine: str
    text: str
    """Empty: there is none that could be run; the notes say why."""
    nodes: tuple[str, ...] = ()
    """Of several machines, the command for each; `text` is the first of them, the head's. Empty: there is one."""
    available: bool = True
    """False: this version of the engine does not take it, or something has to be made first; the notes say what."""
    notes: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    """Of the notes, why this version of the engine would not run it, whatever is made or fetched first."""
    kv_tokens: int | None = None
    """What the engine's own sizing gives the pool, as it prints it; None: not known beside the plan's."""
    max_model_len: int | None = None
    """What it is told, where its own sizing has a say in that."""
    remedy: int | None = None
    """Of a plan that does not fit: which of its remedies this is of, counted from 1; None: of the plan itself."""
    reasons: tuple[str, ...] = ()
    """What it keeps otherwise than the plan does; among the notes too."""


def line(engine: str, model: str, settings: Mapping[str, object], at: Release = ()) -> str:
    """A command in the engine's words, of our settings and of flags as they are; None: left to the engine."""
    known = profile(engine)
    parts = shlex.split(known.start(at, model=shlex.quote(model) if model else None))
    for name, value in settings.items():
        flag = name if name.startswith("-") else known.spelling(name.replace("_", "-"), new=True)
        if flag is not None and value is not None:
            parts += [flag] if value is True else [flag, str(value)]
    return shlex.join(parts)


def parallel(fit: Plan) -> dict[str, object]:
    """How the model is split; one rank is what every engine takes by itself."""
    ranks = {
        "tensor_parallel_size": fit.tensor_parallel,
        "pipeline_parallel_size": fit.pipeline_parallel,
        "data_parallel_size": fit.question.settings.data_parallel,
        "nnodes": fit.question.settings.nodes,
    }
    return {name: size for name, size in ranks.items() if size > 1}


def named_dtype(fit: Plan) -> str | None:
    """What an engine must be told: what was asked for, or what the GPU computes in where the checkpoint says another.
    None: it finds out by itself."""
    if fit.question.settings.dtype != "auto":
        return fit.dtype
    differs = fit.question.machine.kind == "gpu" and fit.question.model.spec.stored_dtype != fit.dtype
    return "half" if differs and fit.dtype == "float16" else None


def shown_gpus(fit: Plan) -> str:
    """Variables before a command that show the plan's GPUs to the engine, in the order of its ranks, and no other:
    engines take the first ones that they see, or all. Empty where those are all there are, in their own order."""
    used = [rank.device for rank in fit.ranks]
    variable = SHOWS_GPUS.get(_vendor(used[0]))
    if fit.question.machine.kind != "gpu" or variable is None:
        return ""
    # A vendor's driver counts its own.
    there = [device for device in fit.question.machine.all_devices if _vendor(device) == _vendor(used[0])]
    counted = {device.index: str(at) for at, device in enumerate(sorted(there, key=lambda device: device.index))}
    if [device.index for device in used] == list(counted):
        return ""
    names = [counted[device.index] if device.selector is None else device.selector for device in used]
    by_number = variable == SHOWS_GPUS["nvidia"] and all(name.isdecimal() for name in names)
    ordered = f"{IN_ORDER_OF_BUSES} " if by_number and len({device.name for device in there}) > 1 else ""
    return f"{variable}={','.join(names)} {ordered}"


def _vendor(device: Device) -> str:
    return "nvidia" if device.gpu is None else device.gpu.vendor


def total_is_known(device: Device) -> bool:
    """--vram alone says what may be used, and not of how much: no share of it can be named."""
    return device.budget_bytes is None or device.gpu is not None or device.measured


def written_size(nbytes: int) -> str:
    """As --ram and --vram read it back, to the byte."""
    return f"{nbytes // MIB}MiB" if nbytes % MIB == 0 else str(nbytes)
