"""The doctor's own codes for `holdfast explain`, out of the causes of its rules. Holdfast's own are not repeated."""

from __future__ import annotations

from functools import cache

from holdfast.doctor.rulebook import rulebook
from holdfast.observability.codes import Code
from holdfast.observability.codes import codes as holdfasts

_OWN = (
    ("HFD90", "a log that was to be read cannot be", "the path, and the right to read it; - is standard input"),
    (
        "HFD91",
        "the archive of `--bundle` cannot be written, or is there already",
        "the folder and the right to write in it, or another name; the diagnosis was printed all the same",
    ),
    ("HFD92", "`holdfast doctor` was given nothing to look at", "a log, or - for standard input"),
)


def code_named(name: str) -> str:
    """The code of a cause by its name in the JSON; any other word as it is."""
    cause = rulebook().causes.get(name.strip().lower().replace("-", "_"))
    return name if cause is None else cause.code


@cache
def codes() -> dict[str, Code]:
    found = {
        cause.code: Code(code=cause.code, kind="doctor", means=f"`{cause.name}`: {cause.means}", helps=cause.helps)
        for cause in rulebook().causes.values()
        if cause.code not in holdfasts()
    }
    found.update({code: Code(code=code, kind="doctor", means=means, helps=helps) for code, means, helps in _OWN})
    return dict(sorted(found.items()))
