"""The doctor's own codes for `holdfast explain`, out of the causes of its rules. Holdfast's own are not repeated."""

from __future__ import annotations

from functools import cache

from holdfast.doctor.rules.load import Cause, rulebook
from holdfast.observability.codes import Code
from holdfast.observability.codes import codes as holdfasts

_OWN = (
    ("HFD90", "a log cannot be read", "check the path and the read permission; - is standard input"),
    (
        "HFD91",
        "the archive of `--bundle` cannot be written, or exists already",
        "check the folder and its write permission, or use another name; the diagnosis was printed anyway",
    ),
    ("HFD92", "`holdfast doctor` was given no log, server or command", "pass a log, or - for standard input"),
)


_ROOTS = {
    "configuration_overshoot": ("settings ask for more memory than there is", "the settings that the finding names"),
    "kv_blowout": ("the KV cache of the requested context is what does not fit", "a shorter context, or KV in FP8"),
    "concurrency_misjudged": ("more requests at once than memory holds", "fewer at once, or more replicas"),
    "does_not_fit": ("no setting makes this model fit this GPU", "quantized weights, more GPUs, a smaller model"),
    "not_memory": ("memory is not the cause", "what the finding names"),
}
"""What the report and the JSON's `root_cause` say of a cause."""


def cause_named(name: str) -> Code | None:
    """A cause by its name in the JSON, as it is found in a log; its code may be Holdfast's own."""
    bare = name.strip().lower().replace("-", "_")
    if bare in _ROOTS:
        means, helps = _ROOTS[bare]
        return Code(code=bare, kind="doctor", means=f"root cause: {means}", helps=helps)
    cause = rulebook().causes.get(bare)
    return None if cause is None else _of(cause)


def _of(cause: Cause) -> Code:
    return Code(code=cause.code, kind="doctor", means=f"`{cause.name}`: {cause.means}", helps=cause.helps)


@cache
def codes() -> dict[str, Code]:
    found = {cause.code: _of(cause) for cause in rulebook().causes.values() if cause.code not in holdfasts()}
    found.update({code: Code(code=code, kind="doctor", means=means, helps=helps) for code, means, helps in _OWN})
    return dict(sorted(found.items()))
