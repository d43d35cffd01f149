"""Addresses of machines as people name them: where others reach this one, where a name leads. Connects to nobody."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from holdfast.config.nodes import WRONG_NODES
from holdfast.errors import ConfigurationError

ELSEWHERE = ("192.0.2.1", 9)
"""An address of nobody, to ask the system by which of its own it would go out. Nothing is sent."""


def refuse_unreachable(name: str) -> None:
    """Of the head: a name that means this machine itself on this machine, as Debian writes it into /etc/hosts, and
    would be an address where no other node finds it. An address that is written as one is taken as it is."""
    if _is_address(name) or name.lower() in ("localhost", "localhost.localdomain", "ip6-localhost"):
        return
    found = resolved(name)
    if not found or not all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in found):
        return
    own = outgoing_address() or "ADDRESS, an address of this machine,"
    raise ConfigurationError(
        f"{name} is {found[0]} on this machine, which no other node can reach",
        code=WRONG_NODES,
        needed="an address of the head that other machines reach",
        found=f"{name} is {', '.join(found)}, mostly by a line of /etc/hosts",
        fix=f"--master-addr {own} on all nodes, or --node-addr {own} on the head; or remove {name} from the line of"
        f" {found[0]} in /etc/hosts",
        field="master_addr",
    )


def resolved(name: str) -> list[str]:
    """Addresses that a name has here; none where it is unknown."""
    with contextlib.suppress(OSError, UnicodeError):
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    return []


def outgoing_address() -> str | None:
    """Of this machine, by which it reaches others."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect(ELSEWHERE)
        found = str(way.getsockname()[0])
        return None if ipaddress.ip_address(found).is_loopback else found
    return None


def named_place(name: str, port: int) -> str:
    """For people: with the address, where a name was given."""
    found = [] if _is_address(name) else resolved(name)
    return f"{name}{f' ({found[0]})' if found else ''} port {port}"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
