"""What `holdfast bench` says of an address that gives no answer: a way out for each step on which it fails."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import self_signed

from holdfast.cli.main import main


@contextlib.contextmanager
def listening(context: ssl.SSLContext | None, said: bytes = b"") -> Iterator[int]:
    """A port at which each connection gets `said`, and is closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError), connection:
                    spoken = context.wrap_socket(connection, server_side=True) if context else connection
                    spoken.recv(4096)
                    spoken.sendall(said)
                    spoken.close()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["bench", *words, "--quiet"])
    return code, capsys.readouterr().err.partition("fix:")[2]


def test_a_certificate_that_is_not_trusted_is_told_with_its_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, certificate = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with listening(context) as port:
        code, fix = refusal([f"https://127.0.0.1:{port}"], capsys)
        assert (code, "--certificate FILE" in fix, "--insecure" in fix) == (3, True, True)
        code, fix = refusal([f"https://127.0.0.1:{port}", "--model", "named"], capsys)
        assert (code, "--certificate FILE" in fix) == (3, True)
        code, fix = refusal([f"http://127.0.0.1:{port}"], capsys)
        assert (code, f"https://127.0.0.1:{port}" in fix) == (3, True)


def test_tls_to_a_server_without_it_and_a_key_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    with listening(None, b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n") as port:
        code, fix = refusal([f"https://127.0.0.1:{port}"], capsys)
        assert (code, f"http://127.0.0.1:{port}" in fix) == (3, True)
        code, fix = refusal([f"http://127.0.0.1:{port}"], capsys)
        assert (code, "HOLDFAST_API_KEY" in fix, "holdfast serve" in fix) == (3, True, False)


@pytest.mark.parametrize(
    "address", ["http:/127.0.0.1:8000", "ftp://host:21", "127.0.0.1", "127.0.0.1:80x", "localhost"]
)
def test_a_mistyped_address_is_not_taken_for_a_model(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, fix = refusal([address], capsys)
    assert (code, "http://127.0.0.1:8000" in fix) == (2, True)
