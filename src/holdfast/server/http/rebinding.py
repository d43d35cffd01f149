"""Web pages that reach a server of this machine under a name of their own (DNS rebinding): not to change anything.

    page of evil.example ─► DNS: evil.example is 127.0.0.1 now ─► POST with Host and Origin evil.example: same origin

The browser sees one origin, so that CORS does not help; but it says in Host which name was meant, and in Origin that a
page asks. Knows no key and no endpoint.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from holdfast.server.http.errors import FORBIDDEN, HttpFailure
from holdfast.units import shorten

HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing, and of which a page's own requests have no Origin."""


def check_host(method: str, headers: Mapping[bytes, bytes], allowed_origins: Collection[str]) -> None:
    """Of a server that only this machine reaches and that asks for no key. Programs send no Origin and are not asked
    for a name; addresses cannot be rebound."""
    origin = headers.get(b"origin")
    if method in HARMLESS or origin is None:
        return
    page, host = origin.decode("latin-1"), headers.get(b"host", b"").decode("latin-1")
    if "*" in allowed_origins or page in allowed_origins or _is_own_name(host):
        return
    raise HttpFailure(
        FORBIDDEN,
        f"a web page asks this server as {shorten(host)!r}, a name that is not this machine's (DNS rebinding); if it is"
        f" yours: serve with --allowed-origins '[\"{shorten(page)}\"]', or with --api-key",
        kind="permission_error",
        code="unknown_host",
    )


def _is_own_name(host: str) -> bool:
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost") or name == socket.gethostname().lower():
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
