"""What latency is promised: `--slo ttft=500ms,itl=50ms,e2e.p95=20s`, as objectives."""

from __future__ import annotations

import re

import msgspec

from holdfast.bench.measure.figures import NAMES
from holdfast.errors import ConfigurationError
from holdfast.units import shorten

METRICS = ("ttft", "itl", "tpot", "e2e")
OTHER_NAMES = {"e2el": "e2e", "latency": "e2e"}
_SHAPE = re.compile(
    r"\s*([a-z0-9]+)(?:\.(p\d+(?:[._]\d+)?))?\s*[=:<]+\s*(\d+(?:\.\d+)?)\s*(us|ms|s|)\s*", re.IGNORECASE
)
_UNITS = {"us": 1e-6, "ms": 1e-3, "": 1e-3, "s": 1.0}


class Objective(msgspec.Struct, frozen=True):
    metric: str
    percentile: str
    """As Percentiles calls it."""
    seconds: float


def parse_slo(text: str, *, percentile: str = "p99") -> tuple[Objective, ...]:
    found = []
    for part in text.split(","):
        shape = _SHAPE.fullmatch(part)
        metric = OTHER_NAMES.get(shape[1].lower(), shape[1].lower()) if shape else ""
        rank = (shape[2] or percentile).lower().replace(".", "_") if shape else ""
        if shape is None or metric not in METRICS or rank not in NAMES:
            raise ConfigurationError(
                f"--slo: {shorten(part)!r} is not an objective",
                needed=f"{', '.join(METRICS)}, each with the most time it may take, and perhaps a percentile of"
                f" {', '.join(NAMES)}",
                found=shorten(part),
                fix="--slo ttft=500ms,itl=50ms,e2e.p95=20s",
                field="slo",
            )
        found.append(Objective(metric, rank, float(shape[3]) * _UNITS[shape[4].lower()]))
    return tuple(found)


def limits(objectives: tuple[Objective, ...]) -> dict[str, float] | None:
    """Of a single request: the most seconds of each; None: nothing is promised. Of several percentiles the highest
    counts, since half of all requests may be beyond a median. A request's mean gap is `tpot`; without one, `itl`."""
    found: dict[str, float] = {}
    for objective in sorted(objectives, key=lambda one: (one.metric == "tpot", NAMES.index(one.percentile))):
        found["itl" if objective.metric == "tpot" else objective.metric] = objective.seconds
    return found or None
