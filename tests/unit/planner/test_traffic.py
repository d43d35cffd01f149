"""Lengths and peaks out of logs and metrics, torn and hostile ones included."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from deadlines import PATIENCE_S
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigurationError
from holdfast.observability.metrics.engines import EngineSource
from holdfast.observability.metrics.registry import ServingMetrics
from holdfast.planner.api import plan
from holdfast.planner.inputs import traffic_reader
from holdfast.planner.inputs.peak_concurrency import Overlaps
from holdfast.planner.inputs.traffic import Lengths, read_traffic
from holdfast.records import EngineStats


def write(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def row(prompt: int, output: int, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": output, **more}


def test_p99_and_not_the_maximum(tmp_path: Path) -> None:
    rows = [row(100, 50)] * 990 + [row(4000, 10)] * 5 + [row(10, 2000)] * 5
    traffic, decisions = read_traffic(write(tmp_path / "log", *rows))
    assert (traffic.prompt_tokens, traffic.output_tokens, traffic.length) == (100, 50, 150)
    assert traffic.requests == 1000
    assert "1,000 requests" in decisions[0].reason
    assert (traffic.concurrency, decisions[1].source) == (1, "default")
    assert "--concurrency" in decisions[1].reason


def test_a_refused_request_is_no_traffic(tmp_path: Path) -> None:
    """Ours are logged with the prompt that was too long. One whose client left had its place like any other."""
    lines = [
        row(100, 50, status=200),
        row(90_000, 0, status=400),
        row(80_000, 0, status_code=429),
        row(7, 2, status=499),
    ]
    traffic, decisions = read_traffic(write(tmp_path / "log", *lines))
    assert (traffic.requests, traffic.length) == (2, 150)
    assert "left out: 2 refused requests" in decisions[0].reason
    with pytest.raises(ConfigurationError, match="no request") as refused:
        read_traffic(write(tmp_path / "log", row(90_000, 0, status=400)))
    assert refused.value.found == "1 refused request"


def test_whether_a_peak_is_known(tmp_path: Path) -> None:
    timed = row(10, 5, time="2026-11-15T05:00:10.000+00:00", duration_s=4.0)
    assert read_traffic(write(tmp_path / "log", timed))[0].peak_known
    assert not read_traffic(write(tmp_path / "log", row(10, 5)))[0].peak_known
    assert read_traffic(write(tmp_path / "log", row(10, 5)), concurrency=3)[0].peak_known


def test_the_p99_of_sums_is_less_than_the_sum_of_p99s(tmp_path: Path) -> None:
    rows = [row(1000, 10)] * 50 + [row(10, 1000)] * 50
    traffic, _ = read_traffic(write(tmp_path / "log", *rows))
    assert (traffic.prompt_tokens, traffic.output_tokens, traffic.length) == (1000, 1000, 1010)


def test_our_access_log_among_a_servers_other_words(tmp_path: Path) -> None:
    lines = [
        "INFO holdfast 0.1.0",
        {"time": "2026-11-15T05:00:10.000+00:00", "path": "/v1/models", "prompt_tokens": None, "duration_s": 0.1},
        row(10, 5, time="2026-11-15T05:00:10.000+00:00", duration_s=4.0),
        row(20, 5, time="2026-11-15T05:00:11.000+00:00", duration_s=2.5),
        row(30, None, time="2026-11-15T05:00:12.000+00:00", duration_s=1.5),
        row(40, 5, time="2026-11-15T05:00:30.000+00:00", duration_s=1.0),
        '{"prompt_tokens": 12, "comple',
        row(-3, 5), row(True, 5), row("7", 5), row(10**12, 5), row(0, 0),
    ]  # fmt: skip
    traffic, decisions = read_traffic(write(tmp_path / "log", *lines))
    assert traffic.requests == 4
    assert traffic.concurrency == 2
    assert traffic.prompt_tokens == 40
    said = decisions[0].reason
    assert "1 truncated line," in said
    assert "5 lines with impossible numbers" in said
    assert "2 other lines" in said


@pytest.mark.parametrize(
    ("first", "second", "peak"),
    [
        ({"start_time": 0, "end_time": 10}, {"start_time": 9, "end_time": 12}, 2),
        ({"start_time": 0, "end_time": 10}, {"start_time": 10, "end_time": 12}, 1),
        ({"timestamp": 1.7e12, "duration_ms": 3000}, {"timestamp": 1.7e12 + 1000, "duration_ms": 3000}, 2),
        ({"time": "2026-01-01T00:00:03Z", "duration_s": 2}, {"time": "2026-01-01T01:00:02.5+01:00", "duration": 1}, 2),
        ({"time": "yesterday", "duration_s": 2}, {"time": 5}, 1),
    ],
)
def test_moments_as_people_write_them(tmp_path: Path, first: dict[str, Any], second: dict[str, Any], peak: int) -> None:
    traffic, _ = read_traffic(write(tmp_path / "log", row(1, 1, **first), row(1, 1, **second)))
    assert traffic.concurrency == peak


def test_usage_as_answers_have_it(tmp_path: Path) -> None:
    traffic, _ = read_traffic(write(tmp_path / "log", {"usage": {"prompt_tokens": 70, "completion_tokens": 7}}))
    assert traffic.length == 77


def test_what_is_stated_outranks_what_is_found(tmp_path: Path) -> None:
    traffic, decisions = read_traffic(write(tmp_path / "log", row(5, 5, time=1, duration_s=1)), concurrency=9)
    assert (traffic.concurrency, decisions[1].source) == (9, "set")


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(row(3, 4)).encode())))
    assert read_traffic("-")[0].length == 7


@pytest.mark.parametrize(
    "content", ["", "\n\n", "just words\n", "[1, 2]\n", '{"prompt_tokens": -1}\n', "{" * 100_000, "\0\xff"]
)
def test_a_log_that_tells_of_no_request(tmp_path: Path, content: str) -> None:
    (tmp_path / "log").write_text(content)
    with pytest.raises(ConfigurationError) as caught:
        read_traffic(str(tmp_path / "log"))
    assert (caught.value.code, caught.value.field) == ("HF161", "traffic")


@pytest.mark.parametrize(
    "source",
    ["no/such/file", "", "/", "a\0b", "http://127.0.0.1:9/metrics", "http://[bad", "http://", "/dev/zero", "/dev/null"],
)
def test_what_cannot_be_read(source: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_traffic(source)
    assert (caught.value.code, caught.value.field) == ("HF160", "traffic")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match="not a regular file"):
        read_traffic(str(tmp_path / "pipe"))


def test_a_line_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/zero") as zeros:
        monkeypatch.setattr(sys, "stdin", zeros)
        with pytest.raises(ConfigurationError, match="that does not end") as caught:
            read_traffic("-")
    assert caught.value.code == "HF160"


def test_a_long_log_with_absurd_lines_is_read_in_little_memory(tmp_path: Path) -> None:
    path, dice = tmp_path / "log", random.Random(5)
    with path.open("w") as file:
        for number in range(10_000):
            file.write(json.dumps(row(dice.randrange(1, 10**6), 9, time=float(number), duration_s=2.5)) + "\n")
        file.write('{"prompt_tokens": "' + "x" * (20 << 20) + '"}\n')
        file.write(json.dumps(row(5, 5, time=10_000.0, duration_s=1)) + "\n")
    tracemalloc.start()
    traffic, decisions = read_traffic(str(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert traffic.requests == 10_001
    assert traffic.concurrency == 3
    assert "1 truncated" in decisions[0].reason
    assert traffic.prompt_tokens == pytest.approx(990_000, rel=0.008)
    assert peak < 32 << 20


@given(st.lists(st.integers(0, 1 << 27), min_size=1, max_size=200))
def test_percentiles_are_never_too_short_and_hardly_too_long(lengths: list[int]) -> None:
    counted = Lengths()
    for length in lengths:
        counted.add(length)
    true = sorted(lengths)[max(0, -(-99 * len(lengths) // 100) - 1)]
    assert true <= counted.percentile(0.99) <= true * 1.001 + 1


def brute_peak(spans: list[tuple[float, float]]) -> int:
    moments = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    running = highest = 0
    for _, change in moments:
        running += change
        highest = max(highest, running)
    return highest


spans = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=120)


@given(spans)
def test_overlaps_are_exact_within_what_is_kept(found: list[tuple[int, int]]) -> None:
    counted = Overlaps()
    for start, length in found:
        counted.add(start, start + length)
    assert counted.peak() == brute_peak([(start, start + length) for start, length in found])


@given(spans, st.integers(2, 40), st.integers(1, 40))
def test_with_little_kept_a_peak_is_never_missed(found: list[tuple[int, int]], kept: int, slots: int) -> None:
    counted = Overlaps(kept_limit=kept, slot_limit=slots)
    for start, length in found:
        counted.add(start, start + length)
    assert counted.peak() >= brute_peak([(start, start + length) for start, length in found])


def test_a_long_log_in_order_is_exact_with_one_request_of_all_its_time() -> None:
    counted, dice = Overlaps(kept_limit=64), random.Random(1)
    found = sorted(((start, start + dice.uniform(0.5, 8)) for start in range(3000)), key=lambda span: span[1])
    found.append((0.0, 4000.0))
    for span in found:
        counted.add(*span)
    assert 0 <= counted.peak() - brute_peak(found) <= 1


# Metrics


def scraped(prompts: list[int], outputs: list[int], running: int = 0) -> bytes:
    stats = EngineStats(running=running, waiting=1 if running else 0)
    metrics = ServingMetrics("m", engines=[EngineSource(lambda: stats, lambda: None)])
    for tokens in prompts:
        metrics.request_prompt_tokens[0].observe(tokens)
    for tokens in outputs:
        metrics.request_generation_tokens[0].observe(tokens)
    return metrics.render()


class Served(BaseHTTPRequestHandler):
    content = b""
    gone = threading.Event()

    def log_message(self, format: str, *values: Any) -> None:
        pass

    def do_GET(self) -> None:
        ways = {
            "/on": "/metrics",
            "/away": f"http://localhost:{self.headers['Host'].rpartition(':')[2]}/metrics",
            "/round": "/round",
        }
        if self.path in ways:
            self.send_response(302)
            self.send_header("Location", ways[self.path])
            self.end_headers()
            return
        if self.path in ("/endless", "/packed"):
            self.send_response(200)
            if self.path == "/packed":
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(bytes(1 << 16))
        if self.path == "/silent":
            self.gone.wait()
            return
        found = {"/metrics": self.content, "/log": b'{"prompt_tokens": 8, "completion_tokens": 1}'}.get(self.path)
        self.send_response(200 if found is not None else 404)
        self.end_headers()
        self.wfile.write(found or b"no")


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(traffic_reader, "DEADLINE_S", PATIENCE_S)
    Served.content = scraped([120] * 980 + [3000] * 15 + [90_000] * 5, [40] * 1000, running=11)
    Served.gone.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Served) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        Served.gone.set()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("path", ["", "/", "/metrics"])
def test_a_servers_histograms(address: str, path: str) -> None:
    traffic, decisions = read_traffic(address + path)
    assert (traffic.prompt_tokens, traffic.output_tokens, traffic.requests) == (5000, 50, 1000)
    assert traffic.concurrency == 12
    assert "11 run" not in decisions[1].reason
    assert "12 running or waiting now" in decisions[1].reason
    assert "--concurrency" in decisions[1].reason


def test_json_lines_at_an_address(address: str) -> None:
    assert read_traffic(address + "/log")[0].length == 9


def test_an_address_that_says_no(address: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read") as caught:
        read_traffic(address + "/nothing")
    assert "404" in str(caught.value)


def test_redirects_stay_with_the_server_that_was_named(address: str) -> None:
    assert read_traffic(address + "/on")[0].requests == 1000


@pytest.mark.parametrize(
    ("path", "said"),
    [("/away", "another server"), ("/round", "redirected more"), ("/endless", "64 MiB"), ("/packed", "packed")],
)
def test_an_address_that_leads_astray(address: str, path: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        read_traffic(address + path)
    assert caught.value.code == "HF160"


def test_a_server_that_never_answers_is_left(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_reader, "DEADLINE_S", 0.2)
    with pytest.raises(ConfigurationError, match=r"0\.2 s|Timeout") as caught:
        read_traffic(address + "/silent")
    assert caught.value.code == "HF160"


BUCKETS = """# HELP vllm:request_prompt_tokens x
# TYPE vllm:request_prompt_tokens histogram
vllm:request_prompt_tokens_bucket{{le="100"}} {low}
vllm:request_prompt_tokens_bucket{{le="200"}} {high}
vllm:request_prompt_tokens_bucket{{le="{edge}"}} {last}
vllm:num_requests_running {gauge}
process_start_time_seconds {gauge}
vllm:e2e_request_latency_seconds_sum {gauge}
"""
STRANGE = ("NaN", "+Inf", "-Inf", "-1", "1e308")
NUMBERS = {"low": "4", "high": "10", "edge": "+Inf", "last": "10", "gauge": "2"}


@pytest.mark.parametrize("strange", STRANGE)
def test_gauges_that_are_no_numbers_are_left_out(tmp_path: Path, strange: str) -> None:
    (tmp_path / "m").write_text(BUCKETS.format(**NUMBERS | {"gauge": strange}))
    traffic, _ = read_traffic(str(tmp_path / "m"))
    assert (traffic.prompt_tokens, traffic.requests, traffic.concurrency) == (200, 10, 1)


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("place", ["low", "high", "last"])
def test_histograms_that_are_no_numbers_are_refused(tmp_path: Path, strange: str, place: str) -> None:
    (tmp_path / "m").write_text(BUCKETS.format(**NUMBERS | {place: strange}))
    with pytest.raises(ConfigurationError) as caught:
        read_traffic(str(tmp_path / "m"))
    assert (caught.value.code, caught.value.fix is not None) == ("HF160", True)


@pytest.mark.parametrize("strange", ["NaN", "-Inf", "-1", "x"])
def test_edges_that_are_no_lengths_are_refused(tmp_path: Path, strange: str) -> None:
    (tmp_path / "m").write_text(BUCKETS.format(**NUMBERS | {"edge": strange}))
    with pytest.raises(ConfigurationError) as caught:
        read_traffic(str(tmp_path / "m"))
    assert caught.value.code == "HF160"


def test_metrics_in_a_file_and_lengths_beyond_the_last_edge(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(scraped([10**6] * 10, [7] * 10))
    traffic, _ = read_traffic(str(tmp_path / "m"), concurrency=3)
    assert (traffic.prompt_tokens, traffic.output_tokens, traffic.concurrency) == (100_000, 10, 3)


def test_average_running_from_the_times_of_a_process(tmp_path: Path) -> None:
    text = scraped([10], [10]).decode() + "process_start_time_seconds 1.0\nvllm:e2e_request_latency_seconds_sum 9e9\n"
    (tmp_path / "m").write_text(text)
    traffic, _ = read_traffic(str(tmp_path / "m"))
    assert 3 <= traffic.concurrency <= 6


def test_metrics_tell_no_peak(tmp_path: Path) -> None:
    text = "# HELP x\n" + 'vllm:request_prompt_tokens_bucket{le="100.0"} 5.0\nvllm:num_requests_running 0.0\n'
    path = tmp_path / "metrics"
    path.write_text(text)
    assert not read_traffic(str(path))[0].peak_known
    assert read_traffic(str(path), concurrency=9)[0].peak_known


def test_metrics_of_a_server_that_answered_nothing(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(scraped([], []))
    with pytest.raises(ConfigurationError, match="no request"):
        read_traffic(str(tmp_path / "m"))


def test_torn_metrics(tmp_path: Path) -> None:
    (tmp_path / "m").write_text('# HELP x\nvllm:request_prompt_tokens_bucket{le="1 3\n')
    with pytest.raises(ConfigurationError) as caught:
        read_traffic(str(tmp_path / "m"))
    assert caught.value.code in ("HF160", "HF161")


def histograms(finite: dict[int, int], total: int, *, name: str = "request_prompt_tokens") -> str:
    rows = [f'vllm:{name}_bucket{{le="{edge}"}} {count}' for edge, count in finite.items()]
    return "\n".join([*rows, f'vllm:{name}_bucket{{le="+Inf"}} {total}', f"vllm:{name}_count {total}", ""])


def test_a_p99_beyond_the_last_edge_is_no_number(tmp_path: Path) -> None:
    """Half of the prompts are longer than any edge: they may be as long as the context, and it is said."""
    text = histograms({1000: 50}, 100) + histograms({10: 100}, 100, name="request_generation_tokens")
    found, decisions = read_traffic(saved(tmp_path, text))
    assert (found.prompt_tokens, found.output_tokens, found.at_least) == (1000, 10, True)
    assert decisions[0].value == ">= 1,010 tokens"
    assert "beyond the last histogram bucket" in decisions[0].reason
    answer = plan("qwen2.5-7b", gpu="h100-80", traffic=saved(tmp_path, text))
    assert answer.question.traffic is not None
    assert answer.question.traffic.length == 32_768
    assert "HFW36" in [warning.code for warning in answer.warnings]
    within, _ = read_traffic(saved(tmp_path, histograms({1000: 99, 2000: 100}, 100)))
    assert (within.prompt_tokens, within.at_least) == (1000, False)


def test_answers_of_unknown_length_are_warned_of(tmp_path: Path) -> None:
    lines = "\n".join(['{"prompt_tokens": 100}'] * 3 + ['{"prompt_tokens": 100, "completion_tokens": 7}'])
    answer = plan("qwen2.5-7b", gpu="h100-80", traffic=saved(tmp_path, lines))
    [said] = [warning for warning in answer.warnings if warning.code == "HFW37"]
    assert "3 of them are counted without output" in said.message
    no_outputs = plan("qwen2.5-7b", gpu="h100-80", traffic=saved(tmp_path, histograms({1000: 100}, 100)))
    assert "HFW37" in [warning.code for warning in no_outputs.warnings]
    told = plan("qwen2.5-7b", gpu="h100-80", traffic=saved(tmp_path, '{"prompt_tokens": 9, "completion_tokens": 7}'))
    assert "HFW37" not in [warning.code for warning in told.warnings]


@pytest.mark.parametrize(
    "before", ["", "\n\n", "# a comment of somebody's\n", "\ufeff", "\ufeff# HELP x y\n", "up 1\n"]
)
def test_metrics_are_known_by_what_they_are(tmp_path: Path, before: str) -> None:
    found, _ = read_traffic(saved(tmp_path, before + histograms({1000: 100}, 100)))
    assert (found.prompt_tokens, found.requests) == (1000, 100)


def test_a_log_with_a_mark_before_it_is_read(tmp_path: Path) -> None:
    found, _ = read_traffic(saved(tmp_path, '\ufeff\n{"prompt_tokens": 5, "completion_tokens": 6}\n'))
    assert found.length == 11


def saved(folder: Path, text: str) -> str:
    path = folder / f"traffic-{len(list(folder.iterdir()))}"
    path.write_text(text, encoding="utf-8")
    return str(path)
