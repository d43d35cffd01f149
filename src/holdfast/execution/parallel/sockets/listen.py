"""Sockets that listen at an address of this machine, IPv4 or IPv6. Knows nothing of who calls."""

from __future__ import annotations

import socket

OPEN_PORTS = (
    "let the nodes through to one another at all TCP ports of net.ipv4.ip_local_port_range, of which the system chooses"
    " those that ranks listen at; a smaller range, set with sysctl on all nodes, is enough"
)
"""What helps ranks that do not reach one another."""


def listen_at(host: str, port: int = 0, *, backlog: int | None = None) -> socket.socket:
    """At that address alone; `host` may be a name. Port 0: one that the system chooses."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=backlog)
