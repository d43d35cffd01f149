"""Ports for servers that bind them later, in another process: nobody else is given them meanwhile.

What bind(0) finds is free again as soon as it is closed, and the kernel may hand it to any connection before the server
that was to have it has started. So these lie below the ports that the kernel hands out, and every test process claims
its own by a name in the abstract namespace, which goes when the process goes.
"""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

_LOWEST, _COUNT = 20_000, 10_000
_claims: list[socket.socket] = []


def _candidates() -> range:
    given_out_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    lowest = min(_LOWEST, max(1024, given_out_from - _COUNT))
    return range(lowest, max(lowest + 1, min(lowest + _COUNT, given_out_from)))


def free_port() -> int:
    ports = _candidates()
    # Each process begins elsewhere; a port of one that has just ended is left alone for a while.
    begin = os.getpid() * 37 % len(ports)
    for port in itertools.chain(ports[begin:], ports[:begin]):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0holdfast-test-port-{port}")
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError(f"no free port in {ports}")
