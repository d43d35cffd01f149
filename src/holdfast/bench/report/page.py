"""A result as one HTML page that needs nothing else: tables, checks and plots, dark or light as the
reader's system is."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from holdfast.bench.measure.figures import NAMES
from holdfast.bench.report.plots import Plot, Series, svg
from holdfast.bench.report.text import ROWS, load_line, safe_line, server_line
from holdfast.bench.result import BenchResult
from holdfast.units import MIB

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --dim: #60646c; --paper: #fcfcfd; --line: #d9d9e0; --band: #e8f1fb;
  --good: #18794e; --bad: #c62a2f; --a: #0b68cb; --b: #b1431a; --c: #18794e; --d: #793aaf; }
@media (prefers-color-scheme: dark) { :root { --ink: #edeef0; --dim: #b0b4ba; --paper: #111113; --line: #363a3f;
  --band: #10243e; --good: #3dd68c; --bad: #ff9592; --a: #70b8ff; --b: #ffa057; --c: #3dd68c; --d: #d19dff; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 84rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.verdict { border-left: .4rem solid; padding: .3rem 1rem; } .pass { color: var(--good); } .fail { color: var(--bad); }
.verdict p { color: var(--ink); margin: .2rem 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .7rem; text-align: right; }
th:first-child, td:first-child, td.words { text-align: left; } td.words { max-width: 40rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem 2rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
svg text { fill: var(--dim); font-size: 11px; } text.x { text-anchor: middle; } text.y { text-anchor: end; }
.grid { stroke: var(--line); } .mark { stroke: var(--dim); stroke-dasharray: 4 3; } .peak { fill: var(--band); }
path { fill: none; stroke-width: 1.6; } path.s0 { stroke: var(--a); } path.s1 { stroke: var(--b); }
path.s2 { stroke: var(--c); } path.s3 { stroke: var(--d); stroke-dasharray: 5 3; }
circle.s0 { fill: var(--a); } circle.s1 { fill: var(--b); }
.legend { color: var(--dim); font-size: .85rem; margin: 0; } .legend span { margin-right: 1.2rem; }
.legend span::before { content: "■ "; }
.legend .s0::before { color: var(--a); } .legend .s1::before { color: var(--b); }
.legend .s2::before { color: var(--c); } .legend .s3::before { color: var(--d); } .dim { color: var(--dim); }
"""


def page(result: BenchResult) -> str:
    title = f"{result.target.model} at {result.target.url}"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>holdfast bench: {escape(title)}</title><style>{STYLE}</style></head><body>",
        f'<h1>{escape(title)}</h1><p class="dim">{escape(load_line(result))}; {escape(result.date)},'
        f" holdfast {escape(result.holdfast)}{', ' + escape(result.engine) if result.engine else ''}</p>",
        _verdict(result),
        "<h2>Latencies and throughput at peak</h2>",
        _latencies(result),
        _rates(result),
        "<h2>Over time</h2>",
        f'<div class="plots">{"".join(filter(None, map(svg, over_time(result))))}</div>',
        "<h2>Against load</h2>",
        f'<div class="plots">{"".join(filter(None, map(svg, against_load(result))))}</div>',
        "<h2>Checks</h2>",
        _table(
            ("check", "", "measured", "limit", "why"),
            [
                (check.name, "ok" if check.passed else "FAIL", check.measured, check.limit, check.reason)
                for check in result.verdict.checks
            ],
        ),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _verdict(result: BenchResult) -> str:
    verdict = result.verdict
    word, kind = ("PASS", "pass") if verdict.passed else ("FAIL", "fail")
    if result.interrupted:  # Neither: what was to be judged did not take place.
        word, kind = "NONE", "none"
    lines = (verdict.reason, safe_line(result), *verdict.advice)
    said = "".join(f"<p>{escape(line)}</p>" for line in lines if line)
    return f'<div class="verdict {kind}"><strong>{word}</strong>{said}</div>'


def _latencies(result: BenchResult) -> str:
    rows = []
    for name, words in ROWS:
        found = getattr(result.peak, name)
        if found is not None and not (name == "lag" and result.load["loop"] == "closed"):
            values = (found.mean, *(found.at(rank) for rank in NAMES), found.max)
            rows.append((words, *(f"{1e3 * value:,.2f}" for value in values)))
    return _table(("milliseconds", "mean", *(name.replace("_", ".") for name in NAMES), "max"), rows)


def _rates(result: BenchResult) -> str:
    peak = result.peak
    said = [
        f"{peak.completed:,} requests answered, {peak.failed:,} failed, {peak.cancelled:,} cancelled",
        f"{peak.output_tokens_per_s:,.1f} output tokens/s, {peak.requests_per_s:,.2f} requests/s",
    ]
    if peak.good_requests_per_s is not None:
        said.append(f"goodput under the SLO: {peak.good_requests_per_s:,.2f} requests/s")
    said += [f"{error.count:,} x {error.kind} {error.example}" for error in peak.errors]
    said += [server_line(result)]
    return "".join(f"<p>{escape(line)}</p>" for line in said if line)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(word)}</th>" for word in head)
    body = "".join(
        "<tr>" + "".join(f"<td{' class=words' if len(cell) > 40 else ''}>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def over_time(result: BenchResult) -> list[Plot]:
    line, samples = result.timeline, result.samples
    at = [(place + 0.5) * line.bin_s for place in range(len(line.in_flight))]
    seen = [sample.at_s for sample in samples]

    touched = any(sample.kv_touched_bytes for sample in samples)

    def in_ms(values: Sequence[float | None]) -> list[float | None]:
        return [None if value is None else 1e3 * value for value in values]

    def sampled(name: str, scale: float = 1.0) -> list[float | None]:
        values = [getattr(sample, name) for sample in samples]
        return [None if value is None else value * scale for value in values]

    drawn = [
        ("Output tokens/s", "tokens/s", [Series("output tokens/s", at, line.output_tokens_per_s)]),
        (
            "Requests",
            "requests",
            [
                Series("in flight", at, line.in_flight),
                Series("running (server)", seen, sampled("running")),
                Series("waiting (server)", seen, sampled("waiting")),
            ],
        ),
        (
            "Time to first token",
            "ms",
            [Series("p50", at, in_ms(line.ttft_p50_s)), Series("p99", at, in_ms(line.ttft_p99_s))],
        ),
        ("Between tokens", "ms", [Series("p50", at, in_ms(line.itl_p50_s)), Series("p99", at, in_ms(line.itl_p99_s))]),
        (
            "Memory",
            "MiB",
            [
                Series("RAM", seen, sampled("ram_bytes", 1 / MIB)),
                Series("VRAM", seen, sampled("vram_bytes", 1 / MIB)),
                Series(
                    "RAM without KV cache",
                    seen,
                    sampled("steady_ram_bytes", 1 / MIB) if touched else [None] * len(seen),
                ),
            ],
        ),
        ("KV cache in use", "%", [Series("KV cache", seen, sampled("kv_share", 100.0))]),
        ("Power", "W", [Series("power", seen, sampled("power_w"))]),
    ]
    return [
        Plot(title=title, x_label="seconds", y_label=unit, series=series, shaded=result.window_s)
        for title, unit, series in drawn
    ]


def against_load(result: BenchResult) -> list[Plot]:
    points = result.points
    at_once = [float(point.at_once) for point in points]
    knee = [(float(result.knee.at_once), "knee")] if result.knee is not None else []
    held = [
        (_in_flight_at(result, sample.at_s), sample)
        for sample in result.samples
        if sample.ram_bytes or sample.vram_bytes
    ]
    loads = [load for load, _ in held]

    def mib(name: str) -> list[float | None]:
        values = [getattr(sample, name) for _, sample in held]
        return [None if value is None else value / MIB for value in values]

    edges, counts = (
        [1e3 * edge for edge, _ in result.itl_histogram],
        [float(count) for _, count in result.itl_histogram],
    )
    plots = [
        Plot(
            title="Output tokens/s by requests at once",
            x_label="requests at once",
            y_label="tokens/s",
            series=[Series("output tokens/s", at_once, [point.output_tokens_per_s for point in points])],
            marks=knee,
        ),
        Plot(
            title="Time to first token by requests at once",
            x_label="requests at once",
            y_label="ms",
            series=[
                Series("p50", at_once, [_ms(point.ttft_p50_s) for point in points]),
                Series("p99", at_once, [_ms(point.ttft_p99_s) for point in points]),
            ],
            marks=knee,
        ),
        Plot(
            title="Memory by requests at once",
            x_label="requests in flight",
            y_label="MiB",
            series=[Series("RAM", loads, mib("ram_bytes"), True), Series("VRAM", loads, mib("vram_bytes"), True)],
        ),
        Plot(
            title="Times between tokens",
            x_label="ms",
            y_label="events",
            series=[Series("events up to", edges, counts)],
            log_x=True,
        ),
    ]
    return [plot for plot in (*_against_rate(result), *plots) if len(plot.series[0].x) > 1]


def _against_rate(result: BenchResult) -> list[Plot]:
    """Of a search for the knee by rates."""
    points, turn = result.rate_points, result.rate_knee
    rates = [point.rate for point in points]
    marks = [] if turn is None else [(turn.rate, f"knee at {turn.rate:g} requests/s")]
    drawn = [
        (
            "Requests answered by requests offered",
            "requests/s",
            [
                Series("answered", rates, [point.answered_per_s for point in points]),
                Series("offered", rates, [point.offered_per_s for point in points]),
            ],
        ),
        (
            "Time to first token by requests/s",
            "ms",
            [
                Series("p50", rates, [_ms(point.ttft_p50_s) for point in points]),
                Series("p99", rates, [_ms(point.ttft_p99_s) for point in points]),
            ],
        ),
    ]
    return [
        Plot(title=title, x_label="requests/s", y_label=unit, series=series, marks=marks)
        for title, unit, series in drawn
    ]


def _ms(value: float | None) -> float | None:
    return None if value is None else 1e3 * value


def _in_flight_at(result: BenchResult, at_s: float) -> float:
    line = result.timeline
    place = min(max(int(at_s / line.bin_s), 0), len(line.in_flight) - 1)
    return line.in_flight[place]
