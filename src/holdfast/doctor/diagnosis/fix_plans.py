"""A fix tried with the planner, where the log names a model of the catalogue and tells how large the GPU is.

Asks no network: a model that is not in the catalogue is not planned. What the engine itself measured outranks a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from holdfast.doctor.command.parse import ServerCommand
from holdfast.doctor.diagnosis.catalogue_sizes import QUANTIZED_NAME
from holdfast.doctor.findings import Fix
from holdfast.engine_profiles.profile import profile
from holdfast.errors import HoldfastError
from holdfast.units import GIB, format_bytes

if TYPE_CHECKING:
    from holdfast.doctor.findings import Diagnosis
    from holdfast.planner.fit.search import Plan

CAUSES = ("weights_do_not_fit", "no_memory_for_kv_blocks", "kv_cache_too_small_for_max_len", "tensor_parallel_unused")
UNMEASURED = ("weights_do_not_fit", "no_memory_for_kv_blocks")
"""Causes whose log tells no room for KV: there the plan's own word is the only one."""
BESIDE_OTHERS = ("other_process_on_gpu", "free_memory_below_utilization")
"""Causes whose fix is a share that leaves others theirs."""
_PLANNED = (
    "max_model_len", "max_num_seqs", "kv_cache_dtype", "max_num_batched_tokens", "tensor_parallel_size",
    "pipeline_parallel_size",
)  # fmt: skip
_ENGINES = ("vllm", "sglang", "holdfast")
_MOST_GPUS, _TIMES = 16, (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    engine: str
    model: str | None
    command: ServerCommand | None
    total_gib: float | None
    max_model_len: int | None
    utilization: float | None


def checked(case: Case, cause: str, fixes: list[Fix]) -> list[Fix]:
    """The same fixes, with what was planned of them: a parallel size is raised to the first that fits. One that a rule
    calls planned is left out where it was not."""
    name = _known(case)
    if cause in BESIDE_OTHERS and case.engine == "vllm":
        if name is None:
            return [fix for fix in fixes if fix.basis != "planned"]
        return [fix for one in fixes if (fix := _beside_others(case, one)) is not None]
    if cause not in CAUSES or name is None:
        return fixes
    held = [_checked(case, name, fix) for fix in fixes]
    held = [fix for fix in held if cause not in UNMEASURED or not _cannot(case, name, fix)]
    return [*_published(case), *held] if cause == "weights_do_not_fit" else held


def _judged(case: Case, command: ServerCommand) -> Diagnosis | None:
    """As `doctor --command` judges it for such GPUs; None: it cannot."""
    from holdfast.doctor.check_command.check import judge
    from holdfast.doctor.check_command.to_question import CommandMachine

    assert case.total_gib is not None
    ranks = command.value("tensor-parallel-size") or "1"
    try:
        return judge(command, machine=CommandMachine(vram=f"{int(case.total_gib * GIB)}x{ranks}"))
    except HoldfastError:
        return None


def _published(case: Case) -> list[Fix]:
    """A quantized copy of the same model that is planned to fit the GPUs that were used: none has to be bought."""
    if case.command is None or case.command.call is not None or case.engine != "vllm" or case.command.model is None:
        return []
    found = _judged(case, case.command)
    offered = [] if found is None else [fix for one in found.findings for fix in (one.fix, *one.alternatives)]
    copies = [fix for fix in offered if fix is not None and _is_copy(case.command.model, fix)]
    return copies[:1]


def _is_copy(model: str, fix: Fix) -> bool:
    other = fix.changes.get("--model")
    return fix.basis == "planned" and other is not None and other.split("/")[-1].startswith(model.split("/")[-1])


def _beside_others(case: Case, fix: Fix) -> Fix | None:
    """A share that leaves other processes theirs, with a context that its KV cache holds; None: it holds none."""
    from holdfast.doctor.command.parse import parse_command

    share, length = (profile(case.engine).spelling(name) for name in ("gpu-memory-utilization", "max-model-len"))
    command = None if fix.command is None or share not in fix.changes else parse_command(fix.command)
    found = None if command is None or length is None else _judged(case, command)
    if command is None or found is None or length is None:
        return None if fix.basis == "planned" else fix
    if not found.findings:
        return msgspec.structs.replace(fix, basis="planned")
    for one in (found.findings[0].fix, *found.findings[0].alternatives):
        if one is not None and one.basis == "planned" and list(one.changes) == [length]:
            why = f"{fix.why}, with {one.changes[length]} tokens of context (planned)"
            changes = {**fix.changes, **one.changes}
            return msgspec.structs.replace(fix, command=one.command, changes=changes, why=why, basis="planned")
    return None


def _known(case: Case) -> str | None:
    from holdfast.models import catalogue

    if case.model is None or case.total_gib is None or case.engine not in _ENGINES:
        return None
    entry = catalogue.lookup(case.model)
    if entry is None or (QUANTIZED_NAME.search(case.model) and not entry.quantized):
        return None
    return entry.name


def _checked(case: Case, name: str, fix: Fix) -> Fix:
    from holdfast.planner.advice.search import first_that_fits

    parallel = profile(case.engine).spelling("tensor-parallel-size")
    if parallel is None or case.command is None or list(fix.changes) != [parallel]:
        return fix
    asked = int(float(fix.changes[parallel] or 1))

    def plan(size: int) -> Plan | None:
        found, divided = _fit(case, name, size), _divided(case, {parallel: str(size)})
        return found if found is not None and (found.fits if divided is None else divided) else None

    best = first_that_fits((asked * times for times in _TIMES if asked * times <= _MOST_GPUS), plan)
    if best is None:
        return fix
    size, found = best
    changes: dict[str, str | None] = {parallel: str(size)}
    told = f"{format_bytes(found.weights_bytes)} of weights fit {size} GPUs of {case.total_gib:.2f} GiB each"
    return msgspec.structs.replace(
        fix,
        changes=changes,
        command=case.command.with_changes(changes),
        why=f"{fix.why} (planned: {told})",
        price=fix.price if size == asked else f"{size} GPUs",
        basis="planned",
    )


def _cannot(case: Case, name: str, fix: Fix) -> bool:
    """Whether a plan says that it does not fit with this change either; what a plan does not know is not held against
    it."""
    if case.engine == "sglang":
        return _divided(case, fix.changes) is False
    if case.engine != "vllm" or case.command is None or case.command.call is not None:
        return False
    given = {flag.lstrip("-").replace("-", "_"): value for flag, value in fix.changes.items() if value is not None}
    share = float(given.get("gpu_memory_utilization") or case.utilization or 0)
    changed: dict[str, object] = {name: value for name, value in given.items() if name in _PLANNED}
    if not changed and share == (case.utilization or 0):
        return False
    gpus = int(str(changed.get("tensor_parallel_size") or case.command.value("tensor-parallel-size") or 1))
    found = _fit(replace(case, utilization=share or None), name, gpus, **changed)
    return found is not None and not found.fits


def _divided(case: Case, changes: Mapping[str, str | None]) -> bool | None:
    """Whether SGLang's static share holds weights and one sequence with these changes; None: it is not known."""
    from holdfast.doctor.check_command.gpu_split import split_of
    from holdfast.doctor.check_command.to_question import CommandMachine, question_for
    from holdfast.doctor.command.parse import parse_command

    if case.engine != "sglang" or case.command is None or case.total_gib is None or not changes:
        return None
    command = parse_command(case.command.with_changes(changes))
    if command is None or command.call is not None:
        return None
    ranks = command.value("tensor-parallel-size") or "1"
    machine = CommandMachine(vram=f"{int(case.total_gib * GIB)}x{ranks}")
    try:
        split = split_of(command, question_for(command, machine, None))
    except HoldfastError:
        return None
    return None if split is None else split.pool_bytes >= split.needed_bytes


def _fit(case: Case, name: str, gpus: int, **changed: object) -> Plan | None:
    from holdfast.config.plan import PlanConfig
    from holdfast.planner.api import question_of
    from holdfast.planner.fit.search import fit

    assert case.total_gib is not None
    settings: dict[str, object] = {"vram": f"{int(case.total_gib * GIB * (case.utilization or 0.9))}x{gpus}"}
    if case.max_model_len is not None:
        settings["max_model_len"] = case.max_model_len
    try:
        asked = {"tensor_parallel_size": gpus, **settings, **changed}
        return fit(question_of(PlanConfig.from_arguments(model=name, **asked)))
    except HoldfastError:
        return None
