"""Where traffic is read from, line by line and within bounds: a file, standard input, or an address.

    file       a regular one, of any size, read as a stream
    -          standard input, as a stream
    address    at most MAX_ADDRESS_BYTES within DEADLINE_S, all told; redirects only within its own origin

Knows nothing of what the lines mean.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from holdfast.errors import ConfigurationError
from holdfast.planner.inputs.timeout import within
from holdfast.units import MIB, shorten

if TYPE_CHECKING:
    import httpx

UNREADABLE = "HF160"
MAX_LINE_BYTES = 4 * MIB
ENDLESS_LINE_BYTES = 256 * MIB
"""A line that is too long is left out; one that has not ended by then never will."""
MAX_ADDRESS_BYTES = 64 * MIB
CONNECT_TIMEOUT_S, DEADLINE_S = 5.0, 30.0
MAX_REDIRECTS = 4


@contextlib.contextmanager
def lines_of(source: str) -> Iterator[Iterator[bytes]]:
    """Lines without their ends; one that is too long comes cut, and does not parse."""
    with contextlib.ExitStack() as stack:
        file: IO[bytes]
        if source.startswith(("http://", "https://")):
            file = io.BytesIO(_fetched(source))
        elif source == "-":
            if sys.stdin is None:
                raise unreadable(source, "standard input is closed")
            file = sys.stdin.buffer
        else:
            file = stack.enter_context(_opened(source))
        try:
            yield _split(file, source)
        except OSError as error:
            raise unreadable(source, error.strerror or str(error)) from error


def unreadable(source: str, said: str) -> ConfigurationError:
    return ConfigurationError(
        f"traffic: {shorten(source)} cannot be read",
        code=UNREADABLE,
        needed="a file of JSON lines, or the URL of a server's /metrics",
        found=shorten(said, 200),
        fix="--traffic http://127.0.0.1:8000/metrics, or set it directly: --concurrency 16 --prompt 1000 --output 300",
        field="traffic",
    )


def _opened(source: str) -> IO[bytes]:
    """Without waiting: a pipe that nobody writes to would hold up who opens it."""
    try:
        opened = os.open(source, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        raise unreadable(source, getattr(error, "strerror", None) or str(error)) from error
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise unreadable(source, "not a regular file; - reads standard input")
    return os.fdopen(opened, "rb")


def _split(file: IO[bytes], source: str) -> Iterator[bytes]:
    length = 0
    while line := file.readline(MAX_LINE_BYTES):
        if not length:
            yield line.strip()
        length = 0 if line.endswith(b"\n") else length + len(line)
        if length > ENDLESS_LINE_BYTES:
            raise unreadable(source, f"a line that does not end: more than {ENDLESS_LINE_BYTES >> 20} MiB")


# Addresses


def _fetched(url: str) -> bytes:
    import httpx

    try:
        address = httpx.URL(url)
        if address.path in ("", "/"):
            address = address.copy_with(path="/metrics")
        return within(DEADLINE_S, lambda: _body(address, url))
    except TimeoutError as error:
        raise unreadable(url, str(error)) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise unreadable(url, f"{type(error).__name__}: {error}") from error


def _body(address: httpx.URL, url: str) -> bytes:
    import httpx

    until = time.monotonic() + DEADLINE_S
    # Nothing is unpacked: a small answer could become an endless one.
    headers = {"Accept-Encoding": "identity"}
    with httpx.Client(timeout=httpx.Timeout(DEADLINE_S, connect=CONNECT_TIMEOUT_S), headers=headers) as client:
        request = client.build_request("GET", address)
        for _ in range(MAX_REDIRECTS + 1):
            response = client.send(request, stream=True)
            with contextlib.closing(response):
                if response.next_request is None:
                    return _read(response, url, until)
                request = response.next_request
            if _origin(request.url) != _origin(address):
                raise unreadable(url, f"redirected to another server, {shorten(str(request.url))}: use that one")
    raise unreadable(url, f"redirected more than {MAX_REDIRECTS} times")


def _origin(address: httpx.URL) -> tuple[str, str, int | None]:
    return address.scheme, address.host, address.port


def _read(response: httpx.Response, url: str, until: float) -> bytes:
    if response.status_code != 200:
        raise unreadable(url, f"{response.status_code} {response.reason_phrase}")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise unreadable(url, "a compressed response, although an uncompressed one was requested")
    pieces: list[bytes] = []
    size = 0
    for piece in response.iter_raw():
        size += len(piece)
        if size > MAX_ADDRESS_BYTES:
            raise unreadable(url, f"more than {MAX_ADDRESS_BYTES >> 20} MiB")
        if time.monotonic() > until:
            raise unreadable(url, f"no complete response within {DEADLINE_S:g} s")
        pieces.append(piece)
    return b"".join(pieces)
