"""What a plan made before the start offers, beside what the log of the death offers. Chooses and runs nothing."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.doctor.findings import Diagnosis, Finding

KIN = (
    (
        "kv_cache_too_small_for_max_len", "no_memory_for_kv_blocks", "weights_do_not_fit", "tensor_parallel_unused",
        "free_memory_below_utilization", "activation_oom_runtime", "cuda_graph_capture_oom", "sampler_warmup_oom",
        "host_ram_oom",
    ),
    ("bad_flag", "heads_not_divisible", "tensor_parallel_mismatch", "quant_shape_mismatch"),
)  # fmt: skip
"""Causes of a failed start that a plan may call by another name of the same row."""


def with_planned(fatal: Sequence[Finding], judged: Diagnosis | None, served: bool) -> list[Finding]:
    """What a plan had offered for the same cause, or at a start for its kin, stands beside what the log offers."""
    planned = judged.findings if judged is not None else []
    # llama.cpp tells no number: what its log offers is half of what was asked for, and a plan knows better.
    plan_first = judged is not None and judged.engine == "llama.cpp"
    together = []
    for finding in fatal:
        more = [
            fix
            for other in planned
            if _akin(finding, other, served)
            for fix in (other.fix, *other.alternatives)
            if fix is not None
        ]
        own = [fix for fix in (finding.fix, *finding.alternatives) if fix is not None]
        every = [*more, *own] if plan_first else [*own, *more]
        together.append(msgspec.structs.replace(finding, fix=every[0] if every else None, alternatives=every[1:]))
    return together


def _akin(finding: Finding, other: Finding, served: bool) -> bool:
    if finding.cause == other.cause:
        return True
    if served:
        return False
    # A context that is too long for the model is too long for the memory too.
    too_long = other.root_cause == "configuration_overshoot" and other.cause == "bad_flag"
    if finding.cause == "kv_cache_too_small_for_max_len" and too_long:
        return True
    return any(finding.cause in kin and other.cause in kin for kin in KIN)
