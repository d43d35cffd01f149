"""`holdfast doctor URL`: a running server, looked at for some seconds through what it tells of itself.

    /health, /v1/models, /version ...   who it is, and whether it is ready
    /metrics, every second              requests, KV, preemptions, tokens: what they are, and how they move
    one streamed request                only where it was asked for: whether tokens arrive one by one

What the figures mean is in server_rules.py. Changes nothing on the server.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.doctor.build_finding import ADVICE, judged
from holdfast.doctor.findings import Diagnosis, Finding
from holdfast.doctor.probe.metrics_page import (
    CONNECT_TIMEOUT_S,
    OK,
    PAGE_TIMEOUT_S,
    MetricSample,
    Reply,
    client_for,
    get,
    read_metrics,
)
from holdfast.doctor.probe.server_rules import Looked, StreamLook, findings_of, seen_of
from holdfast.errors import ConfigurationError, printable
from holdfast.units import shorten

if TYPE_CHECKING:
    import httpx

EVERY_S = 1.0
DEFAULT_SECONDS, MOST_SECONDS = 10.0, 3600.0
STREAMED_TOKENS = 24
STREAM_LIMIT_S = 30.0
STREAM_LIMIT_BYTES = 1 << 20
KEY_WANTED = (401, 403)
KEY_VARIABLE = "HOLDFAST_API_KEY"
_METRICS_FLAGS = {"llama.cpp": " (start it with --metrics)", "sglang": " (start it with --enable-metrics)"}
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "holdfast": "holdfast"}


def origin_of(url: str) -> str:
    """`8000`, `localhost:8000` and any address of the server are that server."""
    import httpx

    text = url.strip()
    if text.isdecimal():
        text = f"127.0.0.1:{text}"
    if "://" not in text:
        text = f"http://{text}"
    try:
        address = httpx.URL(text)
        if address.scheme not in ("http", "https") or not address.host:
            raise httpx.InvalidURL("no host")
    except httpx.InvalidURL as error:
        raise ConfigurationError(
            f"{shorten(url)} is not the address of a server",
            needed="http://HOST:PORT",
            found=shorten(str(error)),
            fix="holdfast doctor http://127.0.0.1:8000",
        ) from error
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{address.scheme}://{host}" + (f":{address.port}" if address.port is not None else "")


def examine(
    url: str,
    *,
    seconds: float = DEFAULT_SECONDS,
    key: str | None = None,
    stream: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> Diagnosis:
    """Takes about `seconds`. A server that does not answer is a finding, not an error."""
    address = origin_of(url)
    with client_for(key) as client:
        health = _health(client, address)
        if health.status == 0:
            return _unreached(address, health)
        models = get(client, f"{address}/v1/models")
        engine, version = _identity(client, address, models)
        samples, metrics = _samples(client, address, min(seconds, MOST_SECONDS), sleep)
        sleeping = health.status == OK and asleep(health, get(client, f"{address}/is_sleeping"))
        streamed, streaming = None, OK
        first = _first_model(models)
        model = str(first.get("id")) if first else None
        if stream and health.status == OK:
            streamed, streaming = (None, 0) if model is None else _streamed(client, address, model)
    engine = next((sample.engine for sample in samples if sample.engine is not None), engine)
    said = "sleeping" if sleeping else _said(health)
    looked = Looked(address=address, engine=engine, samples=tuple(samples), stream=streamed)
    answers = (("GET /health", health.status), ("GET /v1/models", models.status), ("GET /metrics", metrics))
    refused = [
        (asked, status) for asked, status in (*answers, ("POST /v1/completions", streaming)) if status in KEY_WANTED
    ]
    if sleeping or health.status not in (OK, *KEY_WANTED):
        line = f"GET {address}/health: {health.status} {said}".rstrip()
        findings = [_finding("health", address, [line], {said: 1, "status": health.status})]
    # With its metrics read, a list of models that is kept back takes nothing from the answer.
    elif refused and (not samples or stream or health.status in KEY_WANTED):
        findings = [key_wanted(address, refused, given=bool(key))]
    elif streaming >= 500:
        line = f"POST {address}/v1/completions, one short streamed answer: {streaming}"
        findings = [_finding("stream_failed", address, [line], {"status": streaming}), *findings_of(looked)]
    else:
        findings = findings_of(looked)
    well = health.status == OK and not looked.no_numbers and streaming == OK
    return Diagnosis(
        engine=engine,
        engine_version=version,
        command=None,
        phase="serve" if health.status == OK else None,
        healthy=well and all(one.cause in ADVICE for one in findings),
        findings=findings,
        missing=list(_missing(looked, refused, streaming, model)),
        seen=list(seen_of(looked)),
    )


def _missing(looked: Looked, refused: Sequence[tuple[str, int]], streaming: int, model: str | None) -> Iterator[str]:
    paths = [asked for asked, _ in refused]
    if not looked.samples and "GET /metrics" not in paths:
        yield f"metrics: {looked.address}/metrics has none{_METRICS_FLAGS.get(looked.engine or '', '')}"
    if looked.samples and "GET /v1/models" in paths:
        yield f"the server's key in {KEY_VARIABLE}: without it {looked.address}/v1/models cannot be read"
    if streaming == 0 and not refused:
        late = f"none started within {PAGE_TIMEOUT_S:g} s; it may wait in the queue"
        yield f"a streamed answer: {late if model is not None else 'the server lists no model to request one from'}"
    elif streaming != OK and streaming not in KEY_WANTED and streaming < 500:
        yield f"a streamed answer: POST {looked.address}/v1/completions returns {streaming}"
    if looked.no_numbers:
        yield f"valid metrics: {looked.address}/metrics has {', '.join(looked.no_numbers)}, which were ignored"


def _health(client: httpx.Client, address: str) -> Reply:
    """An engine without /health is asked for its models instead."""
    reply = get(client, f"{address}/health")
    if reply.status in (404, 405):
        models = get(client, f"{address}/v1/models")
        return models if models.status else reply
    return reply


def _said(reply: Reply) -> str:
    words = reply.json()
    for name in ("status", "reason", "message"):
        if isinstance(words.get(name), str):
            return printable(shorten(str(words[name]), 200))
    error = words.get("error")
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return printable(shorten(error["message"], 200))
    return printable(shorten(reply.body.decode("utf-8", "replace"), 200))


def _identity(client: httpx.Client, address: str, models: Reply) -> tuple[str | None, str | None]:
    """Engine and version, by what each tells: vLLM, Holdfast /version, llama.cpp /props, TGI /info, SGLang."""
    owner = _OWNERS.get(str(_first_model(models).get("owned_by", "")).lower())
    asked = {
        "llama.cpp": (("/props", "build_info"),),
        "tgi": (("/info", "version"),),
        "sglang": (("/get_server_info", "version"), ("/server_info", "version")),
    }.get(owner or "", (("/version", "version"), ("/info", "version")))
    for path, name in asked:
        told = get(client, f"{address}{path}").json()
        if isinstance(told.get(name), str):
            tgi = "docker_label" in told or "model_id" in told
            return owner or ("tgi" if tgi else None), printable(shorten(told[name], 60))
    return owner, None


def _samples(
    client: httpx.Client, address: str, seconds: float, sleep: Callable[[float], None]
) -> tuple[list[MetricSample], int]:
    """One a second, and the last status; a page that fails is left out, and two in a row end it."""
    samples: list[MetricSample] = []
    began, failed, status = time.monotonic(), 0, OK
    count = max(2, int(seconds / EVERY_S) + 1)
    for number in range(count):
        reply = get(client, f"{address}/metrics")
        status = reply.status
        if reply.status == OK:
            samples.append(read_metrics(reply.body, time.monotonic() - began))
            failed = 0
        else:
            failed += 1
        if failed > 1 or status in KEY_WANTED or time.monotonic() - began > seconds + PAGE_TIMEOUT_S:
            break
        if number < count - 1:
            sleep(max(0.0, began + (number + 1) * EVERY_S - time.monotonic()))
    return samples, status


def _unreached(address: str, reply: Reply) -> Diagnosis:
    missing = [] if reply.failure in ("name", "tls", "no_route") else ["the server's log: holdfast doctor LOG"]
    return Diagnosis(
        engine=None,
        engine_version=None,
        command=None,
        phase=None,
        healthy=False,
        findings=[unreachable(address, reply)],
        missing=missing,
    )


# Whether a stream is one


def _first_model(models: Reply) -> dict[str, Any]:
    """Empty where none is listed."""
    listed = models.json().get("data")
    return listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}


def _streamed(client: httpx.Client, address: str, model: str) -> tuple[StreamLook | None, int]:
    """When the events of one short answer arrived, and its status; None: none came, and 0: not even a status."""
    import httpx

    asked = {"model": model, "prompt": "One, two, three,", "max_tokens": STREAMED_TOKENS, "stream": True}
    body, kind = json.dumps(asked).encode(), {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    began, arrived, size = time.monotonic(), [], 0
    try:
        with client.stream("POST", f"{address}/v1/completions", content=body, headers=kind) as response:
            if response.status_code != OK:
                return None, response.status_code
            headers = {name.lower(): value for name, value in response.headers.items()}
            for piece in response.iter_raw():
                size += len(piece)
                arrived += [time.monotonic() - began] * piece.count(b"data:")
                if size > STREAM_LIMIT_BYTES or time.monotonic() - began > STREAM_LIMIT_S:
                    break
    except httpx.HTTPError:
        return None, 0
    return StreamLook(tuple(arrived), printable(shorten(headers.get("server", ""), 60))), OK


# Why it cannot be looked at: rules/data/probe_address.toml


def _finding(
    about: str, address: str, lines: Sequence[str], numbers: Mapping[str, float], named: str | None = None
) -> Finding:
    """The first of its rules that holds."""
    scheme, _, rest = address.partition("://")
    words = {
        "address": address,
        "other": f"{'http' if scheme == 'https' else 'https'}://{rest}",
        # Ends by itself, within ten minutes.
        "wait": f"curl -sf -o /dev/null --retry 120 --retry-delay 5 --retry-all-errors {address}/health",
        "variable": KEY_VARIABLE,
        "connect_timeout_s": CONNECT_TIMEOUT_S,
    }
    return next(judged(about, numbers, words, source=address, named=named, lines=lines))


def unreachable(address: str, reply: Reply) -> Finding:
    """Nobody answered; `reply.failure` is how."""
    line = f"GET {address}/health: {printable(shorten(reply.said, 200))}"
    plain = "wrong version number" in reply.said.lower().replace("_", " ")
    return _finding("unreachable", address, [line], {"plain_http": plain}, reply.failure)


def key_wanted(address: str, refused: Sequence[tuple[str, int]], *, given: bool) -> Finding:
    """`refused`: what was asked, as GET /path, and the status of its answer."""
    how = "with the key given" if given else "no key was given"
    lines = [
        f"{asked} of {address}: {status} {'Unauthorized' if status == 401 else 'Forbidden'} ({how})"
        for asked, status in refused
    ]
    return _finding("key", address, lines, {"given": given, "status": refused[0][1]})


def asleep(health: Reply, told: Reply) -> bool:
    """By Holdfast's /health, or by /is_sleeping, which vLLM has too."""
    return health.json().get("status") == "sleeping" or (told.status == OK and told.json().get("is_sleeping") is True)
