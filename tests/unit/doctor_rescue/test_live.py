"""A running server, looked at through its own pages: stand-ins that answer as engines do, over real HTTP."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from holdfast.doctor.live import examine, origin_of
from holdfast.doctor.live_page import read_metrics
from holdfast.doctor.live_rules import Looked, StreamLook, findings_of
from holdfast.doctor.records import Diagnosis
from holdfast.errors import ConfigurationError

Page = tuple[int, str]


@contextlib.contextmanager
def stand_in(pages: dict[str, Page | Callable[[int], Page]]) -> Iterator[str]:
    """Answers with what is written; a callable gets how often it was asked before."""
    asked: dict[str, int] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path, (404, ""))
            count = asked[self.path] = asked.get(self.path, -1) + 1
            status, body = page(count) if callable(page) else page
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/health")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            if self.path == "/v1/completions":
                time.sleep(0.5)
                self.wfile.write(b"".join(b"data: {}\n\n" for _ in range(10)))

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _metrics(**moving: Callable[[int], float] | float) -> Callable[[int], Page]:
    names = {
        "running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting",
        "kv": "vllm:kv_cache_usage_perc", "preempted": "vllm:num_preemptions_total",
        "tokens": "vllm:generation_tokens_total", "asked": "vllm:prefix_cache_queries_total",
        "hits": "vllm:prefix_cache_hits_total",
        "seconds": "vllm:inter_token_latency_seconds_sum", "steps": "vllm:inter_token_latency_seconds_count",
    }  # fmt: skip

    def page(count: int) -> Page:
        rows = [
            f'{names[name]}{{model_name="m"}} {value(count) if callable(value) else value}'
            for name, value in moving.items()
        ]
        return 200, "\n".join(["# HELP x", *rows])

    return page


def _looked(metrics: Callable[[int], Page] | Page, *, stream: bool = False) -> Diagnosis:
    models = json.dumps({"data": [{"id": "m", "owned_by": "vllm"}]})
    pages: dict[str, Page | Callable[[int], Page]] = {
        "/health": (200, ""), "/v1/models": (200, models), "/version": (200, '{"version": "0.11.0"}'),
        "/metrics": metrics,
    }  # fmt: skip
    with stand_in(pages) as url:
        return examine(url, seconds=6, stream=stream, sleep=lambda seconds: None)


def _causes(found: Diagnosis) -> list[str]:
    return [finding.cause for finding in found.findings]


def test_a_busy_server_is_healthy() -> None:
    found = _looked(_metrics(running=8.0, waiting=0.0, kv=0.6, preempted=3.0, tokens=lambda count: 100.0 * count))
    assert found.healthy
    assert (found.engine, found.engine_version, found.phase) == ("vllm", "0.11.0", "serve")


def test_preemptions_that_go_on_are_thrash_with_a_number_to_set() -> None:
    found = _looked(
        _metrics(
            running=40.0, waiting=12.0, kv=0.99, preempted=lambda count: 5.0 * count, tokens=lambda count: 9.0 * count
        )
    )
    assert _causes(found) == ["preemption_thrash"]
    finding = found.findings[0]
    assert (finding.root_cause, finding.confidence) == ("concurrency_misjudged", "high")
    assert finding.fix is not None
    assert finding.fix.changes == {"--max-num-seqs": "36"}


def test_a_full_cache_with_a_queue_is_told_before_it_thrashes() -> None:
    found = _looked(_metrics(running=9.0, waiting=lambda count: 1.0 + count, kv=0.98, tokens=lambda count: 9.0 * count))
    assert _causes(found) == ["preemption_thrash"]
    assert "more and more" in found.findings[0].what


def test_a_queue_beside_an_empty_cache_is_not_blamed_on_memory() -> None:
    found = _looked(_metrics(running=8.0, waiting=30.0, kv=0.1, tokens=lambda count: 9.0 * count))
    [finding] = found.findings
    assert (finding.cause, finding.root_cause) == ("other", "concurrency_misjudged")
    assert "not memory" in finding.why


def test_requests_without_a_token_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.doctor.live_rules.STUCK_S", 0.0)
    found = _looked(_metrics(running=2.0, waiting=0.0, kv=0.2, tokens=500.0))
    assert _causes(found) == ["timeout_or_hang"]


def test_a_cache_of_prefixes_that_finds_nothing_and_a_token_that_takes_longer() -> None:
    found = _looked(
        _metrics(
            asked=90_000.0,
            hits=900.0,
            seconds=lambda count: 100.0 + 40.0 * count,
            steps=lambda count: 10_000.0 + 200.0 * count,
        )
    )
    assert _causes(found) == ["throughput_decay", "prefix_caching_unused"]
    assert {finding.confidence for finding in found.findings} == {"low"}


def test_a_stream_that_arrives_whole_is_held_back_by_somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    # How long this process takes to read what lies there is the machine's affair; the limit itself is tried below.
    monkeypatch.setattr("holdfast.doctor.live_rules.TOGETHER_S", 60.0)
    assert _causes(_looked(_metrics(running=0.0), stream=True)) == ["stream_buffered"]


@pytest.mark.parametrize(
    ("first_s", "gap_s", "causes"),
    [(0.5, 0.001, ["stream_buffered"]), (0.5, 0.01, []), (0.1, 0.001, []), (0.5, 0.03, [])],
)
def test_when_events_count_as_together(first_s: float, gap_s: float, causes: list[str]) -> None:
    stream = StreamLook(arrived_s=tuple(first_s + gap_s * number for number in range(10)), server="")
    looked = Looked(address="http://x", engine="vllm", health=200, said="", samples=(), stream=stream)
    assert [finding.cause for finding in findings_of(looked)] == causes


def test_a_server_that_loads_is_not_ready_yet() -> None:
    with stand_in({"/health": (503, '{"status": "loading"}')}) as url:
        found = examine(url, seconds=1, sleep=lambda seconds: None)
    assert _causes(found) == ["not_ready_yet"]
    assert found.findings[0].confidence == "high"
    assert "503" in found.findings[0].evidence[0].line


def test_nobody_there_and_redirects_are_said() -> None:
    assert _causes(examine("127.0.0.1:9", seconds=0)) == ["not_ready_yet"]
    with stand_in({"/health": (302, "")}) as url:
        found = examine(url, seconds=0, sleep=lambda seconds: None)
    assert _causes(found) == ["other"]
    assert not found.healthy


@pytest.mark.parametrize(
    ("page", "engine", "figures"),
    [
        ("sglang:num_running_reqs 3\nsglang:num_queue_reqs 4\nsglang:token_usage 0.5\n", "sglang",
         {"running": 3.0, "waiting": 4.0, "kv_share": 0.5}),
        ("llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\n", "llama.cpp",
         {"running": 1.0, "waiting": 2.0}),
        ("tgi_queue_size 7\ntgi_batch_current_size 2\n", "tgi", {"waiting": 7.0, "running": 2.0}),
        ('vllm:num_requests_running{a="1"} 3\nvllm:num_requests_running{a="2"} 4\nholdfast:memory_bytes 9\n',
         "holdfast", {"running": 7.0}),
        ('vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} NaN\n', "vllm",
         {"kv_share": 0.2}),
        ("\x00\xff{}} 1e999 nonsense\nvllm:num_requests_running", None, {}),
    ],
)  # fmt: skip
def test_pages_of_every_engine_are_read(page: str, engine: str | None, figures: dict[str, float]) -> None:
    sample = read_metrics(page.encode(), 0.0)
    assert (sample.engine, dict(sample.figures)) == (engine, figures)


def test_addresses() -> None:
    assert origin_of("8000") == "http://127.0.0.1:8000"
    assert origin_of("localhost:8000/v1/") == "http://localhost:8000"
    assert origin_of("https://[::1]:9/metrics") == "https://[::1]:9"
    with pytest.raises(ConfigurationError):
        origin_of("ftp://somewhere")
