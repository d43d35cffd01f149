"""Bytes of a hub's files by HTTP range, within bounds: so many bytes and seconds in all, never a whole file of weights.

Knows nothing of formats. A server that ignores ranges is cut off as soon as what was asked for has come.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from types import TracebackType

import httpx

from holdfast.errors import CheckpointError
from holdfast.units import MIB, format_bytes, shorten

MAX_TOTAL_BYTES = 256 * MIB
"""Of everything one call may fetch; the headers of the largest models are under 32 MiB together."""
MAX_TOTAL_S = 300.0
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class RangeRefused(Exception):
    """The server said no. `response` and `hub_code` are what the hub's own errors carry."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.hub_code = response.headers.get("X-Error-Code")
        said = response.headers.get("X-Error-Message") or response.reason_phrase
        super().__init__(f"{response.status_code}: {shorten(said, 200)}")


@dataclass(frozen=True, slots=True)
class Piece:
    data: bytes
    """Fewer than were asked for only where the file ends."""
    file_bytes: int | None
    """Of the whole file; None when the server does not say."""
    url: str
    """Where it came from in the end: the next piece can be asked for there at once."""


class RangeClient:
    """Safe to use from several threads; closed at the end of a `with`."""

    def __init__(self, headers: dict[str, str], *, endpoint: str, timeout_s: float) -> None:
        self._headers, self._home = headers, _origin(httpx.URL(endpoint))
        self._client = httpx.Client(follow_redirects=True, timeout=timeout_s)
        self._bytes_left, self._deadline_s = MAX_TOTAL_BYTES, time.monotonic() + MAX_TOTAL_S
        self._lock = threading.Lock()

    def __enter__(self) -> RangeClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def whole(self, url: str, *, limit_bytes: int) -> bytes:
        """A small file; raises CheckpointError when it has more than `limit_bytes`."""
        data = self._fetch(url, first=None, count=limit_bytes + 1).data
        if len(data) > limit_bytes:
            raise CheckpointError(f"{_bare(url)}: implausibly large", needed=f"at most {format_bytes(limit_bytes)}")
        return data

    def piece(self, url: str, first: int, count: int) -> Piece:
        return self._fetch(url, first=first, count=count)

    def _fetch(self, url: str, *, first: int | None, count: int) -> Piece:
        self._spend(0, url)
        # A token is for the hub alone: the addresses it sends us on to carry a signature of their own.
        own = self._headers if _origin(httpx.URL(url)) == self._home else {}
        headers = {**own, "Accept-Encoding": "identity"}
        if first is not None:
            headers["Range"] = f"bytes={first}-{first + count - 1}"
        with self._client.stream("GET", url, headers=headers) as response:
            if response.status_code == 416:  # nothing there: the file ends before
                return Piece(b"", _total_of(response), str(response.url))
            if response.status_code not in (200, 206):
                raise RangeRefused(response)
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise CheckpointError(f"{_bare(url)}: the server sends it compressed, so byte ranges are unusable")
            skip = first or 0
            if response.status_code == 206:
                _check_range(response, first or 0)
                skip = 0
            data = self._body(response, url, skip + count)[skip : skip + count]
            return Piece(data, _total_of(response), str(response.url))

    def _body(self, response: httpx.Response, url: str, count: int) -> bytes:
        data = bytearray()
        for chunk in response.iter_raw():
            self._spend(len(chunk), url)
            data += chunk
            if len(data) >= count:
                break
        return bytes(data)

    def _spend(self, count: int, url: str) -> None:
        with self._lock:
            self._bytes_left -= count
            spent = self._bytes_left < 0
        if spent or time.monotonic() > self._deadline_s:
            raise CheckpointError(
                f"{_bare(url)}: its headers are implausibly large, or arrive too slowly",
                needed=f"at most {format_bytes(MAX_TOTAL_BYTES)} and {MAX_TOTAL_S:.0f} s for all of them",
            )


def _check_range(response: httpx.Response, first: int) -> None:
    found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if found is None or int(found[1]) != first:
        raise CheckpointError(
            f"{_bare(str(response.url))}: the server sent a different byte range than requested",
            needed=f"bytes from {first}",
            found=shorten(response.headers.get("Content-Range", "no Content-Range")),
        )


def _total_of(response: httpx.Response) -> int | None:
    if response.status_code == 200:
        length = response.headers.get("Content-Length", "")
        return int(length) if length.isdecimal() else None
    total = response.headers.get("Content-Range", "").rpartition("/")[2]
    return int(total) if total.isdecimal() else None


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _bare(url: str) -> str:
    """Without the query, which may hold a signature."""
    return url.partition("?")[0]
