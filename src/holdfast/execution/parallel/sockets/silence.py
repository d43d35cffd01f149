"""How a connection between machines ends when the other one is gone and nothing says so: its power is out, or the way
there drops all packets. The systems of both sides ask and answer, so a process that computes for long, or has no turn
on a loaded machine, is taken to be gone only where it also leaves what is sent to it unread until nothing more fits.

    nothing comes     QUIET_S, then the other side is asked every ASK_S; gone after UNANSWERED of them in a row
    nothing is taken  what was sent is sent again, and gone when LOST_S have passed without an acknowledgement, or with
                      nothing read on the other side, whose system answers but has no more room
"""

from __future__ import annotations

import socket

QUIET_S, ASK_S, UNANSWERED = 2, 2, 3
LOST_S = QUIET_S + ASK_S * UNANSWERED


def end_when_silent(connection: socket.socket, *, sends: bool) -> None:
    """What is received raises ETIMEDOUT then. `sends`: the other side always takes what is sent here. One that is at a
    long step and takes nothing meanwhile would count as gone; where it receives on the same connection, it notices."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, QUIET_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, UNANSWERED)
    if sends:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)
