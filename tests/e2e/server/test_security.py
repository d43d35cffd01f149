"""The door under attack: keys, headers, bodies, browsers, and what errors tell."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import ssl

import httpx
import pytest
from certificates import self_signed
from deadlines import PATIENCE_S

from holdfast.config import ServerConfig
from holdfast.engine.fake import FakeEngine
from holdfast.errors import ConfigurationError, EngineError, RequestError, SleepingError
from holdfast.server.http import connection as head
from holdfast.server.http.errors import describe
from holdfast.server.http.tls import tls_of

ENDPOINTS = [
    ("GET", "/v1/models"), ("GET", "/v1/models/fake"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/metrics"),
    ("GET", "/memory"), ("GET", "/load"), ("POST", "/reset_prefix_cache"), ("POST", "/sleep"),
    ("POST", "/wake_up"), ("GET", "/is_sleeping"), ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/nowhere"),
    ("DELETE", "/v1/models"), ("GET", "//v1/models"), ("GET", "/health/"), ("GET", "/health/../v1/models"),
]  # fmt: skip


@pytest.mark.parametrize("authorization", [None, "Bearer", "Bearer wrong", "secret", "Basic secret"])
def test_no_path_but_health_without_a_key(launch, authorization):
    with launch(api_key=("other", "secret")).client() as http:
        headers = {} if authorization is None else {"Authorization": authorization}
        for method, path in ENDPOINTS:
            response = http.request(method, path, headers=headers)
            assert response.status_code == 401, (method, path)
            assert response.json()["error"]["code"] == "invalid_api_key"
        for path in ("/health", "/ping", "/version"):
            assert http.get(path, headers=headers).status_code == 200
        for key in ("secret", "other"):
            assert http.get("/v1/models", headers={"Authorization": f"bearer {key}"}).status_code == 200


def test_metrics_may_be_public_and_who_needs_the_key_is_told(launch, caplog):
    caplog.set_level(logging.INFO, "holdfast.server")
    with launch(api_key="secret").client() as http:
        assert "--public-metrics" in http.get("/metrics").json()["error"]["message"]
        assert "Prometheus needs it too" in caplog.text
    caplog.clear()
    with launch(api_key="secret", public_metrics=True).client() as http:
        assert "Prometheus" not in caplog.text
        for path in ("/metrics", "/metrics/", "/version"):
            assert http.get(path).status_code == 200
        for path in ("/memory", "/load", "/docs", "/openapi.json", "/metrics/x"):
            assert http.get(path).status_code == 401
        # What a client said is in none of them.
        headers = {"Authorization": "Bearer secret"}
        secret = {"prompt": "a most private prompt", "user": "a most private user", "cache_salt": "a most private salt"}
        assert http.post("/v1/completions", json=secret, headers=headers).status_code == 200
        assert "private" not in http.get("/metrics").text


def test_keys_of_a_file_change_while_the_server_runs(launch, tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.server.http.api_keys.LOOK_S", 0.0)
    file = tmp_path / "keys"
    file.write_text("first\n")
    with launch(api_key_file=file).client() as http:

        def status(key: str) -> int:
            return http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code

        assert (status("first"), status("second")) == (200, 401)
        file.write_text("the second one\nsecond\n")
        assert (status("first"), status("second")) == (401, 200)


def test_headers_beyond_the_limit(http):
    small = http.get("/version", headers={"X-Long": "x" * 1000})
    assert small.status_code == 200
    refused = http.get("/version", headers={"X-Long": "x" * head.MAX_HEAD_BYTES})
    assert refused.status_code == 431
    many = http.get("/version", headers={f"X-{index}": "y" * 30 for index in range(2500)})
    assert many.status_code == 431
    assert http.get("/version", params={"q": "z" * 50_000}).status_code == 200
    assert http.get("/version", params={"q": "z" * (head.MAX_HEAD_BYTES - 100)}).status_code == 431


def test_a_head_beyond_the_limit_is_the_last_of_its_connection(server):
    """Also where it came whole, and all of it was read."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * head.MAX_HEAD_BYTES + b"\r\n\r\n")
        answer = b""
        while more := connection.recv(65536):
            answer += more
    assert answer.startswith(b"HTTP/1.1 431")
    assert b"connection: close" in answer.lower()


def test_headers_that_never_end_are_cut_off(server):
    """Held neither in memory nor as a connection: the parser alone would take them for ever."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX-Endless: ")
        sent, answer = 0, b""
        try:
            while sent < 64 * head.MAX_HEAD_BYTES:
                connection.sendall(b"x" * 65536)
                sent += 65536
            answer = connection.recv(1000)
        except OSError:
            pass
        assert sent < 64 * head.MAX_HEAD_BYTES or answer.startswith(b"HTTP/1.1 431")
    with server.client() as http:
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("begun", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_headers_that_do_not_come_are_not_waited_for(launch, monkeypatch, begun):
    monkeypatch.setattr(head, "HEAD_TIMEOUT_S", 0.3)
    server = launch()
    with contextlib.ExitStack() as open_ones:
        with server.loop_held():
            connection = open_ones.enter_context(
                socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
            )
            connection.sendall(begun)
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_a_long_answer_outlives_the_patience_for_headers(launch, monkeypatch):
    monkeypatch.setattr(head, "HEAD_TIMEOUT_S", 0.2)
    server = launch(FakeEngine(token_delay_s=0.05))
    body = json.dumps({"prompt": "a" * 20, "max_tokens": 20, "stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with contextlib.ExitStack() as open_ones:
        # The patience begins when the server takes the connection: by then all is there.
        with server.loop_held():
            connection = open_ones.enter_context(
                socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
            )
            # Some clients send a line's end behind a body.
            connection.sendall(request + body + b"\r\n")
        answer = b""
        while b"[DONE]" not in answer and (more := connection.recv(65536)):
            answer += more
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" in answer
    assert b"HTTP/1.1 408" not in answer


def test_no_page_of_another_origin_may_read(http):
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    preflight = http.options("/v1/chat/completions", headers=asked)
    assert preflight.status_code == 405
    assert not [name for name in preflight.headers if name.startswith("access-control")]
    simple = http.get("/v1/models", headers={"Origin": "https://evil.example"})
    assert not [name for name in simple.headers if name.startswith("access-control")]


def test_pages_that_were_named_may_read(launch):
    origin = "https://ours.example"
    with launch(allowed_origins=(origin,), api_key="secret").client() as http:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        allowed = http.options("/v1/chat/completions", headers={**asked, "Origin": origin})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == origin
        refused = http.options("/v1/chat/completions", headers={**asked, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in refused.headers
        # Without the key a page gets no further than anybody else, and may read why.
        without = http.get("/v1/models", headers={"Origin": origin})
        assert (without.status_code, without.headers["access-control-allow-origin"]) == (401, origin)


@pytest.mark.parametrize(
    "message", ["cannot open /srv/somebody/models/secret.gguf: no such file", "C:\\models\\x.gguf"]
)
def test_a_fault_of_the_engine_tells_no_paths(launch, message):
    def broken(prompt):
        raise EngineError(message, found="/etc/holdfast/private/model.gguf", fix="see /var/log/holdfast.log")

    with launch(FakeEngine(broken)).client() as http:
        for stream in (False, True):
            text = http.post("/v1/completions", json={"prompt": "x", "stream": stream}).text
            assert "engine_error" in text
            assert not any(part in text for part in ("somebody", "secret", "private", "/var/log", "models"))


@pytest.mark.parametrize(
    "told", ["POST /wake_up", "GET /v1/models lists the names", "a/b, 3/4 and https://a.example/x"]
)
def test_paths_of_the_api_are_told(told):
    assert describe(SleepingError("x", fix=told))[1]["holdfast"]["fix"] == told


def test_https(launch, tmp_path):
    key, cert = self_signed(tmp_path)
    server = launch(tls=tls_of(ServerConfig(ssl_keyfile=key, ssl_certfile=cert)), max_body_bytes=1000)
    trusted = ssl.create_default_context(cafile=cert)
    url = f"https://127.0.0.1:{server.port}"
    with httpx.Client(base_url=url, verify=trusted, timeout=PATIENCE_S) as https:
        assert https.get("/health").json() == {"status": "ready"}
        assert "[DONE]" in https.post("/v1/completions", json={"prompt": "abc", "stream": True}).text
        assert https.post("/tokenize", content=b"x" * 1_000_000).status_code == 413, "and it comes to read that"
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as strange, pytest.raises(httpx.ConnectError):
        strange.get("/health")
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as plain, pytest.raises(httpx.HTTPError):
        plain.get("/health")


def test_https_asks_for_a_certificate(launch, tmp_path):
    key, cert = self_signed(tmp_path)
    config = ServerConfig(ssl_keyfile=key, ssl_certfile=cert, ssl_ca_certs=cert, ssl_cert_reqs=2)
    server = launch(tls=tls_of(config))
    url, trusted = f"https://127.0.0.1:{server.port}", ssl.create_default_context(cafile=cert)
    with httpx.Client(base_url=url, verify=trusted, timeout=PATIENCE_S) as nobody, pytest.raises(httpx.HTTPError):
        nobody.get("/health")
    trusted.load_cert_chain(cert, key)
    with httpx.Client(base_url=url, verify=trusted, timeout=PATIENCE_S) as known:
        assert known.get("/health").status_code == 200


def test_tls_that_cannot_be_is_refused_at_start(tmp_path):
    key, cert = self_signed(tmp_path)
    (tmp_path / "torn").write_text("-----BEGIN CERTIFICATE-----\nnothing\n")
    for wrong in (
        {"ssl_keyfile": str(tmp_path / "nowhere"), "ssl_certfile": cert},
        {"ssl_keyfile": key, "ssl_certfile": str(tmp_path / "torn")},
        {"ssl_keyfile": cert, "ssl_certfile": cert},
        {"ssl_keyfile": key, "ssl_certfile": cert, "ssl_ca_certs": str(tmp_path / "torn")},
        {"ssl_keyfile": key, "ssl_certfile": cert, "ssl_ciphers": "NONE-SUCH"},
    ):
        with pytest.raises(ConfigurationError) as caught:
            tls_of(ServerConfig(**wrong))
        assert caught.value.code == "HF153"


def test_nothing_is_fetched_for_a_client(http):
    """Addresses in a request are never followed, whatever they hide in."""
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/secret"
        parts = [
            {"type": "image_url", "image_url": {"url": url}}, {"type": "input_audio", "input_audio": {"data": url}},
            {"type": "video_url", "video_url": {"url": url}}, {"type": "file", "file": {"file_id": url}},
        ]  # fmt: skip
        for part in parts:
            body = {"messages": [{"role": "user", "content": [part]}]}
            for path in ("/v1/chat/completions", "/tokenize"):
                response = http.post(path, json=body)
                assert response.status_code == 400
                assert part["type"] in response.json()["error"]["message"]
        for extra in ({"chat_template": url}, {"documents": [{"url": url}]}, {"model": url}):
            body = {"messages": [{"role": "user", "content": "hi"}], **extra}
            # Documents are text for the template.
            expected = (200,) if "documents" in extra else (400, 404)
            assert http.post("/v1/chat/completions", json=body).status_code in expected
        reference = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": url}}}
        body = {"messages": [{"role": "user", "content": "hi"}], "response_format": reference}
        assert http.post("/v1/chat/completions", json=body).status_code == 400
        with pytest.raises(BlockingIOError):
            trap.accept()


BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ 'x' * 999999999 }}", "{{ '%999999999d' % 1 }}", "{% set x = [1] * 99999999 %}{{ x }}",
    "{{ 9 ** 999999999 }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
]  # fmt: skip


@pytest.mark.parametrize("template", BOMBS)
def test_a_template_of_a_client_ends(template):
    """With the real renderer, as a server does it that was told to trust such templates."""
    from holdfast.text.templates.template import compile_template

    with pytest.raises(RequestError):
        compile_template(template).render(
            [{"role": "user", "content": "hi"}],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            continue_final_message=False,
            variables={},
        )
