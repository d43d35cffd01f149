"""A running server, looked at through its own pages: stand-ins that answer as engines do, over real HTTP."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from holdfast.doctor.findings import Diagnosis
from holdfast.doctor.probe.metrics_page import get, read_metrics
from holdfast.doctor.probe.server import examine, origin_of
from holdfast.doctor.probe.server_rules import Looked, StreamLook, findings_of, seen_of
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
            page = pages.get(f"POST {self.path}", (200, ""))
            status = page(0)[0] if callable(page) else page[0]
            self.send_response(status)
            self.end_headers()
            if self.path == "/v1/completions" and status == 200:
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
    assert "and the queue grows" in found.findings[0].what


def _over(seconds: float, pages: list[str]) -> Looked:
    """As if these pages had been told over so many seconds."""
    last = max(1, len(pages) - 1)
    samples = tuple(read_metrics(page.encode(), seconds * at / last) for at, page in enumerate(pages))
    return Looked(address="http://x", engine=samples[0].engine, samples=samples)


def _queue(step_s: float, *, ended: int) -> Looked:
    """64 run and 86 wait with KV nearly empty; a token of each takes `step_s`. KV holds 65,536 tokens."""
    return _over(
        10,
        [
            "\n".join(
                [
                    "vllm:num_requests_running 64",
                    "vllm:num_requests_waiting 86",
                    f"vllm:kv_cache_usage_perc {0.01 + at / 500}",
                    f"vllm:inter_token_latency_seconds_sum {at * 640 * step_s}",
                    f"vllm:inter_token_latency_seconds_count {at * 640}",
                    f"vllm:generation_tokens_total {at * 640}",
                    f"vllm:request_generation_tokens_count {ended}",
                    f"vllm:request_generation_tokens_sum {ended * 500}",
                    f"vllm:request_prompt_tokens_sum {ended * 100}",
                    'vllm:cache_config_info{block_size="16",num_gpu_blocks="4096"} 1.0',
                ]
            )
            for at in range(5)
        ],
    )


def test_a_queue_beside_an_empty_cache_is_the_limit_and_its_number_comes_from_whole_requests() -> None:
    [finding] = findings_of(_queue(0.02, ended=40))
    assert (finding.cause, finding.root_cause) == ("other", "concurrency_misjudged")
    assert "--max-num-seqs" in finding.why
    assert "not memory" in finding.why
    assert finding.fix is not None
    assert finding.fix.changes == {"--max-num-seqs": "87"}, "65,536 tokens, 600 a request, four fifths of it"
    [finding] = findings_of(_queue(0.02, ended=3))
    assert finding.fix is not None
    assert finding.fix.changes == {}, "requests that just began say nothing"
    assert "--max-num-seqs" in finding.fix.why


def test_a_machine_that_computes_all_it_can_is_told_no_larger_limit() -> None:
    [finding] = findings_of(_queue(5.0, ended=40))
    assert (finding.cause, finding.root_cause) == ("other", "not_memory")
    assert "compute-bound" in finding.what
    assert finding.fix is not None
    assert finding.fix.changes == {}


def _llama(decodes: list[int], waiting: int = 0) -> Looked:
    return _over(
        10,
        [
            f"llamacpp:requests_processing 1\nllamacpp:requests_deferred {waiting}\nllamacpp:tokens_predicted_total 7\n"
            f"llamacpp:n_decode_total {count}"
            for count in decodes
        ],
    )


def _sglang(**figures: list[float]) -> Looked:
    return _over(
        10,
        [
            "\n".join(f"sglang:{name} {values[at]}" for name, values in figures.items())
            for at in range(len(next(iter(figures.values()))))
        ],
    )


@pytest.mark.parametrize(
    ("looked", "causes"),
    [
        (_llama([4, 9, 31]), []),
        (_llama([31, 31, 31]), ["timeout_or_hang"]),
        (_llama([100, 300, 600], waiting=3), ["other"]),
        (_over(10, ["llamacpp:requests_processing 1\nllamacpp:tokens_predicted_total 7"] * 3), []),
        (_over(10, [f"tgi_batch_current_size 3\ntgi_request_generated_tokens_sum 5\ntgi_batch_inference_success "
                    f"{count}" for count in (1, 2, 3)]), []),
        (_over(10, ["tgi_batch_current_size 3\ntgi_request_mean_time_per_token_duration_count 8"] * 3), []),
        (_over(10, ["tgi_batch_current_size 3\ntgi_queue_size 2\ntgi_batch_inference_success 8"] * 3),
         ["timeout_or_hang"]),
        (_over(10, [f"tgi_batch_current_size 3\ntgi_queue_size {4 * count}\ntgi_batch_inference_success {count}"
                    for count in (1, 2, 3)]), ["other"]),
        (_sglang(num_running_reqs=[8, 8, 8], generation_tokens_total=[5, 5, 5], gen_throughput=[310, 320, 315]), []),
        (_sglang(num_running_reqs=[8, 8, 8], generation_tokens_total=[5, 5, 5], gen_throughput=[310, 310, 310]),
         ["timeout_or_hang"]),
        (_sglang(num_running_reqs=[8, 7, 8], token_usage=[0.97, 0.96, 0.98], num_retracted_reqs=[0, 2, 0],
                 generation_tokens_total=[5, 6, 7]), ["preemption_thrash"]),
        (_sglang(num_running_reqs=[8, 7, 8], prompt_tokens_total=[10_000, 20_000, 30_000],
                 cached_tokens_total=[9_000, 9_000, 9_000]), ["prefix_caching_unused"]),
    ],
)  # fmt: skip
def test_what_moves_is_well_and_what_does_not_is_named(looked: Looked, causes: list[str]) -> None:
    assert [finding.cause for finding in findings_of(looked)] == causes
    assert list(seen_of(looked))


def test_slower_tokens_beside_many_others_are_load() -> None:
    def looked(running: int, share: float) -> Looked:
        return _over(
            10,
            [
                f"vllm:num_requests_running {running}\nvllm:kv_cache_usage_perc {share}\n"
                f"vllm:inter_token_latency_seconds_sum {100 + 40 * at}\n"
                f"vllm:inter_token_latency_seconds_count {10_000 + 200 * at}\nvllm:generation_tokens_total {at}"
                for at in range(3)
            ],
        )

    assert findings_of(looked(64, 0.3)) == []
    assert [one.cause for one in findings_of(looked(64, 0.9))] == ["throughput_decay"]
    assert [one.cause for one in findings_of(looked(1, 0.3))] == ["throughput_decay"]


def test_figures_that_are_no_numbers_are_not_called_well() -> None:
    found = _looked(
        (200, "vllm:num_requests_running 3\nvllm:kv_cache_usage_perc NaN\nvllm:generation_tokens_total Inf")
    )
    assert not found.healthy
    assert found.findings == []
    assert "vllm:kv_cache_usage_perc NaN" in found.missing[0]
    assert "Inf" in found.missing[0]


@pytest.mark.parametrize(("seconds", "causes"), [(6.0, ["timeout_or_hang"]), (4.0, [])])
def test_requests_without_a_token_hang(seconds: float, causes: list[str]) -> None:
    page = _metrics(running=2.0, waiting=0.0, kv=0.2, tokens=500.0)(0)[1]
    assert [finding.cause for finding in findings_of(_over(seconds, [page] * 3))] == causes


def test_a_cache_of_prefixes_that_finds_nothing_and_a_token_that_takes_longer() -> None:
    found = _looked(
        _metrics(
            asked=lambda count: 90_000.0 + 2_000.0 * count,
            hits=lambda count: 80_000.0 + 20.0 * count,
            seconds=lambda count: 100.0 + 40.0 * count,
            steps=lambda count: 10_000.0 + 200.0 * count,
        )
    )
    assert _causes(found) == ["throughput_decay", "prefix_caching_unused"]
    assert {finding.confidence for finding in found.findings} == {"low"}
    assert "120 of 12,000 prompt tokens" in found.findings[1].evidence[0].line


def test_a_stream_that_arrives_whole_is_held_back_by_somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    # How long this process takes to read what lies there is the machine's affair; the limit itself is tried below.
    monkeypatch.setattr(
        "holdfast.doctor.probe.server.StreamLook",
        lambda arrived, server: StreamLook(arrived[:1] * len(arrived), server),
    )
    assert _causes(_looked(_metrics(running=0.0), stream=True)) == ["stream_buffered"]


@pytest.mark.parametrize(("status", "causes"), [(500, ["other"]), (404, []), (200, [])])
def test_an_answer_that_was_asked_for_and_fails_is_not_called_well(status: int, causes: list[str]) -> None:
    pages: dict[str, Page | Callable[[int], Page]] = {
        "/health": (200, ""), "/v1/models": (200, json.dumps({"data": [{"id": "m"}]})),
        "/metrics": (200, "vllm:num_requests_running 0"), "POST /v1/completions": (status, ""),
    }  # fmt: skip
    with stand_in(pages) as url:
        found = examine(url, seconds=0, stream=True, sleep=lambda seconds: None)
    if status == 200:  # Whether its events are taken for held back is the machine's affair.
        assert any("one streamed answer: 10 events" in one for one in found.seen)
        return
    assert _causes(found) == causes
    assert not found.healthy
    assert str(status) in (found.findings[0].what if causes else found.missing[0])


@pytest.mark.parametrize(
    ("first_s", "gap_s", "causes"),
    [(0.5, 0.001, ["stream_buffered"]), (0.5, 0.01, []), (0.1, 0.001, []), (0.5, 0.03, [])],
)
def test_when_events_count_as_together(first_s: float, gap_s: float, causes: list[str]) -> None:
    stream = StreamLook(arrived_s=tuple(first_s + gap_s * number for number in range(10)), server="")
    looked = Looked(address="http://x", engine="vllm", samples=(), stream=stream)
    assert [finding.cause for finding in findings_of(looked)] == causes


def test_a_server_that_loads_is_not_ready_yet() -> None:
    with stand_in({"/health": (503, '{"status": "loading"}')}) as url:
        found = examine(url, seconds=1, sleep=lambda seconds: None)
    assert _causes(found) == ["not_ready_yet"]
    assert (found.findings[0].cause_confidence, found.findings[0].confidence) == ("high", "medium")
    assert "503" in found.findings[0].evidence[0].line


@pytest.mark.parametrize(
    ("pages", "what"),
    [
        ({"/health": (503, '{"status": "draining", "reason": "x"}'), "/metrics": (401, "")}, "shutting down"),
        ({"/health": (503, '{"status": "dead", "reason": "x"}')}, "its engine is gone"),
        ({"/health": (503, '{"status": "hung", "reason": "x"}')}, "does not respond"),
        ({"/health": (200, '{"status": "sleeping"}')}, "is sleeping"),
        ({"/health": (200, ""), "/is_sleeping": (200, '{"is_sleeping": true}')}, "is sleeping"),
        ({"/health": (502, "Bad Gateway")}, "a proxy answers"),
    ],
)
def test_a_server_that_does_not_serve_is_told_as_it_says(pages: dict[str, Page], what: str) -> None:
    with stand_in({**pages}) as url:
        found = examine(url, seconds=0, sleep=lambda seconds: None)
    assert not found.healthy
    assert _causes(found) == ["not_ready_yet"]
    assert what in found.findings[0].what


@pytest.mark.parametrize(("key", "what"), [(None, "none was given"), ("wrong", "is not valid")])
def test_a_key_that_is_missing_or_wrong_is_said(key: str | None, what: str) -> None:
    closed: dict[str, Page | Callable[[int], Page]] = {
        "/health": (200, ""),
        "/v1/models": (401, ""),
        "/metrics": (401, ""),
    }
    with stand_in(closed) as url:
        found = examine(url, seconds=2, key=key, sleep=lambda seconds: None)
        with_metrics = {**closed, "/metrics": (200, "vllm:num_requests_running 0")}
    assert not found.healthy
    [finding] = found.findings
    assert "401" in finding.what
    assert what in finding.what
    assert finding.fix is not None
    assert "HOLDFAST_API_KEY" in finding.fix.why
    with stand_in(with_metrics) as url:
        found = examine(url, seconds=0, key=key, sleep=lambda seconds: None)
        assert found.healthy
        assert "HOLDFAST_API_KEY" in found.missing[0]
        found = examine(url, seconds=0, key=key, stream=True, sleep=lambda seconds: None)
        assert not found.healthy, "a stream was asked for and refused"


def test_each_way_of_not_being_there_has_its_own_advice() -> None:
    def fix_of(found: Diagnosis) -> str:
        [finding] = found.findings
        assert finding.fix is not None
        assert not found.healthy
        return finding.fix.why

    assert "getent hosts" in fix_of(examine("http://nosuch.invalid:8000"))
    with stand_in({"/health": (200, "")}) as url:
        plain = examine(url.replace("http://", "https://"))
        assert "TLS" in plain.findings[0].what
        assert fix_of(plain) == f"holdfast doctor {url}"
    refused = examine(url)
    assert _causes(refused) == ["not_ready_yet"]
    assert "--retry" in fix_of(refused)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: listener.accept()[0].close())
        thread.start()
        assert "https://" in fix_of(examine(f"127.0.0.1:{listener.getsockname()[1]}"))
        thread.join()


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (httpx.ConnectTimeout("late"), "no_connection"), (httpx.ReadTimeout("late"), "silent"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "no_route"),
    ],
)  # fmt: skip
def test_no_connection_and_no_answer_are_two_things(error: Exception, failure: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise error

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        assert get(client, "http://x/health").failure == failure


def test_redirects_are_said() -> None:
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
