"""Which servers are meant, and clients that reach them: those of this machine by their entries, others by address.

Certificates, Unix sockets and the key are settled here. Asks nobody anything.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

    from holdfast.cli.servers.registry import RunningServer

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 5.0
KEY_VARIABLE = "HOLDFAST_API_KEY"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    url: str
    """As it is called."""
    server: RunningServer | None = None
    """Its entry, where it runs on this machine."""

    @property
    def base(self) -> str:
        """What its client asks: through a Unix socket, any host."""
        return self.url if self.server is None or self.server.socket is None else "http://localhost"

    def client(self) -> httpx.Client:
        import httpx

        from holdfast.cli.chat_backends import trust

        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        socket = None if self.server is None else self.server.socket
        transport = None if socket is None else httpx.HTTPTransport(uds=socket)
        verify = trust("" if self.server is None else self.server.certificate)
        return httpx.Client(timeout=TIMEOUT_S, headers=headers, verify=verify, transport=transport)


def addresses_of(urls: Sequence[str]) -> list[ServerAddress]:
    """All are read before the first is asked. None named: those of this machine, which may be none; nodes without an
    API are among them."""
    from holdfast.cli.chat_backends import api_of
    from holdfast.cli.servers.registry import running_servers

    if urls:
        return [ServerAddress(api_of(url, written="URL").removesuffix("/v1/")) for url in urls]
    return [ServerAddress(server.url, server) for server in running_servers()]
