"""What was seen of a running server, as rules read it: figures over the seconds it was looked at, and how a finding out
of them is written. Judges nothing and asks nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.doctor.build_finding import Confidence, found
from holdfast.doctor.findings import Evidence, Finding, Fix, RootCause
from holdfast.doctor.probe.metrics_page import MetricSample
from holdfast.engine_profiles.profile import profile


@dataclass(frozen=True, slots=True)
class StreamLook:
    arrived_s: tuple[float, ...]
    """Of each event, after the request."""
    server: str
    """As the answer's header names who sent it: a proxy, often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    address: str
    engine: str | None
    samples: tuple[MetricSample, ...]
    stream: StreamLook | None = None

    @property
    def seconds(self) -> float:
        return self.samples[-1].at_s - self.samples[0].at_s if len(self.samples) > 1 else 0.0

    @property
    def no_numbers(self) -> tuple[str, ...]:
        """NaN and infinite figures that matter, of the last page."""
        return self.samples[-1].no_numbers if self.samples else ()

    def seen(self, figure: str) -> list[float]:
        return [sample.figures[figure] for sample in self.samples if figure in sample.figures]

    def last(self, figure: str) -> float | None:
        return next(iter(reversed(self.seen(figure))), None)

    def grown(self, figure: str) -> float:
        """Of a counter, while it was looked at; 0 where it is not told, or was set back."""
        seen = self.seen(figure)
        return max(0.0, seen[-1] - seen[0]) if len(seen) > 1 else 0.0

    def evidence(self, *figures: str) -> list[Evidence]:
        """First and last of each."""
        lines = []
        for figure in figures:
            seen = self.seen(figure)
            if seen:
                moved = f"{seen[0]:g}" if len(seen) == 1 or seen[0] == seen[-1] else f"{seen[0]:g} -> {seen[-1]:g}"
                lines.append(Evidence(line=f"{figure}: {moved} within {self.seconds:.0f} s", source=self.address))
        return lines


def finding_of(
    cause: str,
    root: RootCause,
    confidence: Confidence,
    looked: Looked,
    *,
    what: str,
    why: str,
    figures: tuple[str, ...] = (),
    fix: Fix | None = None,
    alternatives: tuple[Fix, ...] = (),
    evidence: list[Evidence] | None = None,
) -> Finding:
    numbers = {figure: value for figure in figures if (value := looked.last(figure)) is not None}
    return found(
        cause,
        root,
        confidence,
        what=what,
        why=why,
        numbers=numbers | {"seconds": round(looked.seconds, 1)},
        evidence=looked.evidence(*figures) if evidence is None else evidence,
        fixes=[*([] if fix is None else [fix]), *alternatives],
    )


def flag_of(looked: Looked, ours: str) -> str:
    return profile(looked.engine or "vllm").spelling(ours) or f"--{ours}"
