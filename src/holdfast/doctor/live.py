"""`holdfast doctor URL`: a running server, looked at for some seconds through what it tells of itself.

    /health, /v1/models, /version ...   who it is, and whether it is ready
    /metrics, every second              requests, KV, preemptions, tokens: what they are, and how they move
    one streamed request                only where it was asked for: whether tokens arrive one by one

What the figures mean is in live_rules.py. Changes nothing on the server.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.doctor.live_page import OK, PAGE_TIMEOUT_S, Reply, Sample, client_for, get, read_metrics
from holdfast.doctor.live_rules import Looked, StreamLook, findings_of, seen_of
from holdfast.doctor.records import Diagnosis, Evidence, Fix
from holdfast.doctor.said import ADVICE, found
from holdfast.errors import ConfigurationError, printable
from holdfast.units import shorten

if TYPE_CHECKING:
    import httpx

EVERY_S = 1.0
DEFAULT_SECONDS, MOST_SECONDS = 10.0, 3600.0
STREAMED_TOKENS = 24
STREAM_LIMIT_S = 30.0
STREAM_LIMIT_BYTES = 1 << 20
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
            needed="http://HOST:PORT", found=shorten(str(error)), fix="holdfast doctor http://127.0.0.1:8000",
        ) from error  # fmt: skip
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
            return _silent(address, health)
        models = get(client, f"{address}/v1/models")
        engine, version = _identity(client, address, models)
        samples = list(_samples(client, address, min(seconds, MOST_SECONDS), sleep))
        streamed = _streamed(client, address, models) if stream and health.status == OK else None
    told = next((sample.engine for sample in samples if sample.engine is not None), None)
    looked = Looked(
        address=address, engine=told or engine, health=health.status, said=_said(health), samples=tuple(samples),
        models=models.status, stream=streamed,
    )  # fmt: skip
    findings = findings_of(looked)
    missing = []
    if not samples:
        missing.append(f"metrics: {address}/metrics tells none{_how_to_tell(told or engine)}")
    return Diagnosis(
        engine=told or engine, engine_version=version, command=None, phase="serve" if health.status == OK else None,
        healthy=all(one.cause in ADVICE for one in findings) and health.status == OK, findings=findings,
        missing=missing, seen=list(seen_of(looked)),
    )  # fmt: skip


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
    listed = models.json().get("data")
    first: Any = listed[0] if isinstance(listed, list) and listed else {}
    owner = _OWNERS.get(str(first.get("owned_by", "")).lower()) if isinstance(first, dict) else None
    asked = {
        "llama.cpp": (("/props", "build_info"),), "tgi": (("/info", "version"),),
        "sglang": (("/get_server_info", "version"), ("/server_info", "version")),
    }.get(owner or "", (("/version", "version"), ("/info", "version")))  # fmt: skip
    for path, name in asked:
        told = get(client, f"{address}{path}").json()
        if isinstance(told.get(name), str):
            tgi = "docker_label" in told or "model_id" in told
            return owner or ("tgi" if tgi else None), printable(shorten(told[name], 60))
    return owner, None


def _samples(client: httpx.Client, address: str, seconds: float, sleep: Callable[[float], None]) -> list[Sample]:
    """One a second; a page that fails is left out, and two in a row end it."""
    samples: list[Sample] = []
    began, failed = time.monotonic(), 0
    count = max(2, int(seconds / EVERY_S) + 1)
    for number in range(count):
        reply = get(client, f"{address}/metrics")
        if reply.status == OK:
            samples.append(read_metrics(reply.body, time.monotonic() - began))
            failed = 0
        else:
            failed += 1
        if failed > 1 or time.monotonic() - began > seconds + PAGE_TIMEOUT_S:
            break
        if number < count - 1:
            sleep(max(0.0, began + (number + 1) * EVERY_S - time.monotonic()))
    return samples


def _how_to_tell(engine: str | None) -> str:
    return {"llama.cpp": " (start it with --metrics)", "sglang": " (start it with --enable-metrics)"}.get(
        engine or "", ""
    )


def _silent(address: str, reply: Reply) -> Diagnosis:
    """Nothing listens, or it listens and says nothing."""
    evidence = [Evidence(line=f"GET {address}/health: {printable(shorten(reply.said, 200))}", source=address)]
    if reply.refused:
        finding = found(
            "not_ready_yet", "not_memory", "medium", what=f"nothing listens at {address}", evidence=evidence,
            why="the server is still loading, has ended, or listens elsewhere: most engines open their port only when"
            " the model is loaded, or on 127.0.0.1 inside a container",
            fixes=[Fix(why=f"wait for it: until curl -sf {address}/health; do sleep 2; done; if its process is gone,"
                       " look at its log with holdfast doctor LOG")],
        )  # fmt: skip
    else:
        finding = found(
            "timeout_or_hang", "not_memory", "medium", evidence=evidence,
            what=f"{address} takes the connection and does not answer",
            why="the server hangs, or its front is busy: /health is answered by an engine that is well in milliseconds",
            fixes=[Fix(why="read the end of its log (holdfast doctor LOG); py-spy dump --pid PID shows where it is")],
        )  # fmt: skip
    missing = ["the server's log: holdfast doctor LOG"]
    return Diagnosis(
        engine=None, engine_version=None, command=None, phase=None, healthy=False, findings=[finding], missing=missing
    )


# Whether a stream is one


def _streamed(client: httpx.Client, address: str, models: Reply) -> StreamLook | None:
    """When the events of one short answer arrived; None: it could not be asked."""
    import httpx

    listed = models.json().get("data")
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], dict):
        return None
    asked = {"model": listed[0].get("id"), "prompt": "One, two, three,", "max_tokens": STREAMED_TOKENS, "stream": True}
    body, kind = json.dumps(asked).encode(), {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    began, arrived, size = time.monotonic(), [], 0
    try:
        with client.stream("POST", f"{address}/v1/completions", content=body, headers=kind) as response:
            if response.status_code != OK:
                return None
            headers = {name.lower(): value for name, value in response.headers.items()}
            for piece in response.iter_raw():
                size += len(piece)
                arrived += [time.monotonic() - began] * piece.count(b"data:")
                if size > STREAM_LIMIT_BYTES or time.monotonic() - began > STREAM_LIMIT_S:
                    break
    except httpx.HTTPError:
        return None
    return StreamLook(tuple(arrived), printable(shorten(headers.get("server", ""), 60)))
