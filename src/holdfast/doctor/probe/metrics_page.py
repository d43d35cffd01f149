"""What a running server says of itself, read within bounds: a page of metrics as figures, small JSON answers.

No redirect is followed, nothing is unpacked, no page is larger than PAGE_LIMIT_BYTES. Judges nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import re
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from holdfast.errors import printable
from holdfast.units import MIB, shorten

if TYPE_CHECKING:
    import httpx

PAGE_LIMIT_BYTES = 16 * MIB
PAGE_TIMEOUT_S, CONNECT_TIMEOUT_S = 8.0, 4.0
SERIES_LIMIT = 50_000
OK = 200
Failure = Literal["name", "tls", "refused", "no_route", "no_connection", "silent", "broken"]
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*\})?\s+(\S+)")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')

NAMES: Mapping[str, tuple[str, ...]] = {
    "running": (
        "vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing",
        "tgi_batch_current_size",
    ),
    "waiting": (
        "vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred", "tgi_queue_size",
    ),
    "kv_share": (
        "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "llamacpp:kv_cache_usage_ratio",
    ),
    "preemptions": (
        "vllm:num_preemptions_total", "vllm:num_preemptions", "sglang:num_retracted_requests_total",
        "sglang:num_retracted_reqs_total",
    ),
    "put_back": ("sglang:num_retracted_reqs",),
    "tokens": (
        "vllm:generation_tokens_total", "vllm:generation_tokens", "sglang:generation_tokens_total",
        "llamacpp:tokens_predicted_total", "tgi_request_generated_tokens_sum",
    ),
    "computed": (
        "vllm:iteration_tokens_total_count", "sglang:realtime_tokens_total", "llamacpp:n_decode_total",
        "tgi_batch_inference_success", "tgi_batch_forward_duration_count",
    ),
    "throughput": ("sglang:gen_throughput",),
    "held_tokens": ("sglang:num_used_tokens",),
    "prefix_asked": (
        "vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total", "sglang:prompt_tokens_total",
    ),
    "prefix_found": (
        "vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total", "sglang:cached_tokens_total",
    ),
    "step_seconds": (
        "vllm:inter_token_latency_seconds_sum", "vllm:time_per_output_token_seconds_sum",
        "sglang:inter_token_latency_seconds_sum", "sglang:time_per_output_token_seconds_sum",
        "tgi_request_mean_time_per_token_duration_sum",
    ),
    "steps": (
        "vllm:inter_token_latency_seconds_count", "vllm:time_per_output_token_seconds_count",
        "sglang:inter_token_latency_seconds_count", "sglang:time_per_output_token_seconds_count",
        "tgi_request_mean_time_per_token_duration_count",
    ),
    "prompts": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total", "llamacpp:prompt_tokens_total"),
    "ended": ("vllm:request_generation_tokens_count",),
    "ended_prompts": ("vllm:request_prompt_tokens_sum",),
    "ended_tokens": ("vllm:request_generation_tokens_sum",),
    "kv_tokens": ("sglang:max_total_num_tokens",),
}  # fmt: skip
"""Under which names engines tell a figure; the first that a page has counts. `computed` moves with every step;
`put_back` is of the last seconds and goes back to 0; `ended` are requests that were answered whole."""
TOLD_AT_THE_END = ("sglang", "llama.cpp", "tgi")
"""Engines whose `tokens` move only when a request ends."""
_SHARES = ("kv_share", "kv_tokens")
_WEIGHTY = ("running", "waiting", "kv_share", "preemptions", "tokens")
_ENGINES = (
    ("holdfast:", "holdfast"),
    ("vllm:", "vllm"),
    ("sglang:", "sglang"),
    ("llamacpp:", "llama.cpp"),
    ("tgi_", "tgi"),
)


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One page of metrics."""

    at_s: float
    figures: Mapping[str, float]
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of vLLM's cache_config_info."""
    engine: str | None = None
    no_numbers: tuple[str, ...] = ()
    """Names of figures that matter and are NaN or infinite on this page."""


@dataclass(frozen=True, slots=True)
class Reply:
    """`status` 0: nothing answered, and `said` is why."""

    status: int
    body: bytes = b""
    said: str = ""
    failure: Failure = "broken"
    """Of status 0: on which step it failed."""
    headers: Mapping[str, str] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """Empty where it is no object."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def get(client: httpx.Client, url: str) -> Reply:
    """Never raises for what a server does."""
    import httpx

    until = time.monotonic() + PAGE_TIMEOUT_S
    pieces: list[bytes] = []
    size = 0
    try:
        with client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as response:
            for piece in response.iter_raw():
                size += len(piece)
                pieces.append(piece)
                if size > PAGE_LIMIT_BYTES:
                    return Reply(0, said=f"a response of more than {PAGE_LIMIT_BYTES // MIB} MiB")
                if time.monotonic() > until:
                    return Reply(0, said=f"no complete response within {PAGE_TIMEOUT_S:g} s", failure="silent")
            headers = {name.lower(): value for name, value in response.headers.items()}
            return Reply(response.status_code, b"".join(pieces), headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        failure = _failure(error)
        said = {"silent": f"no answer within {PAGE_TIMEOUT_S:g} s", "no_connection": "connection timed out"}
        return Reply(0, said=said.get(failure) or str(error) or type(error).__name__, failure=failure)


def _failure(error: BaseException) -> Failure:
    """By what the system said, which lies under httpx's own errors."""
    import httpx

    kinds: tuple[tuple[type[BaseException], Failure], ...] = (
        (httpx.ConnectTimeout, "no_connection"),
        (httpx.PoolTimeout, "no_connection"),
        (httpx.TimeoutException, "silent"),
        (socket.gaierror, "name"),
        (ssl.SSLError, "tls"),
        (ConnectionRefusedError, "refused"),
    )
    under: BaseException | None = error
    while under is not None:
        failure = next((name for kind, name in kinds if isinstance(under, kind)), None)
        if failure is not None:
            return failure
        if isinstance(under, OSError) and under.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            return "no_route"
        under = under.__cause__ or under.__context__
    return "refused" if "all connection attempts failed" in str(error).lower() else "broken"


def client_for(key: str | None, verify: ssl.SSLContext | bool = True) -> httpx.Client:
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(
        timeout=httpx.Timeout(PAGE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        headers=headers,
        follow_redirects=False,
        verify=verify,
    )


def read_metrics(body: bytes, at_s: float) -> MetricSample:
    """Figures of all models and ranks together: counts are added up, of shares the highest counts."""
    found: dict[str, float] = {}
    settings: dict[str, str] = {}
    engine: str | None = None
    odd: dict[str, str] = {}
    for count, line in enumerate(body.decode("utf-8", "replace").splitlines()):
        if count > SERIES_LIMIT:
            break
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        name = sample[1]
        known = next((engine_ for prefix, engine_ in _ENGINES if name.startswith(prefix)), None)
        engine = "holdfast" if "holdfast" in (known, engine) else engine or known
        if name == "vllm:cache_config_info":
            settings |= dict(_LABEL.findall(sample[2] or ""))
        with contextlib.suppress(ValueError):
            value = float(sample[3])
            if not math.isfinite(value):
                odd[name] = sample[3]
            else:
                shares = any(name in NAMES[figure] for figure in _SHARES)
                found[name] = max(found.get(name, value), value) if shares else found.get(name, 0.0) + value
    figures = {}
    for figure, names in NAMES.items():
        first = next((name for name in names if name in found), None)
        if first is not None:
            figures[figure] = found[first]
    weighty = {name for figure in _WEIGHTY if figure not in figures for name in NAMES[figure]}
    no_numbers = tuple(f"{name} {printable(shorten(value, 20))}" for name, value in odd.items() if name in weighty)
    return MetricSample(at_s, figures, settings, engine, no_numbers)
