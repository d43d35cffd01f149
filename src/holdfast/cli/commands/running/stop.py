"""`holdfast stop`: ends servers of this machine by their name, port, process id, address or socket. Open answers are
finished first, as the server itself decides; this waits until the process is gone.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.output import say
from holdfast.errors import ConfigurationError, EngineError
from holdfast.units import shorten

if TYPE_CHECKING:
    from holdfast.cli.servers.registry import RunningServer

HELP = """Stop servers on this machine. Requests that are running are finished first (--drain-timeout of the server)."""

USAGE = "holdfast stop NAME|PORT|PID|URL|SOCKET ... [--now]    or: holdfast stop --all"

EXAMPLES = """examples:
  holdfast stop smollm2          the server of that model that `holdfast run` started in the background
  holdfast stop 8000             the server on that port, or with that process id
  holdfast stop --all            every server of this user
  holdfast stop 8000 --now       do not wait for answers that are being written

exit codes: 0 stopped, 1 one did not stop or there is none, 2 it is not clear which one is meant
"""

TIMEOUT_S = 60.0
NOW_S = 1.0
"""Between the signals: a server must have heard the first."""
POLL_S = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("which", nargs="*", metavar="NAME|PORT|PID|URL|SOCKET", help="as `holdfast ps` shows them")
    parser.add_argument("--all", action="store_true", help="every server of this user on this machine")
    parser.add_argument("--now", action="store_true", help="do not let running requests finish")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="S",
        help=f"wait this long, in seconds (default: {TIMEOUT_S:g})",
    )


def run(arguments: argparse.Namespace) -> int:
    from holdfast.cli.servers.registry import running_servers

    if bool(arguments.which) == arguments.all:
        raise ConfigurationError(
            "which server is to stop?",
            needed="a name, port, pid, address or socket, or else --all",
            fix="holdfast ps lists them",
        )
    running = [server for server in running_servers() if not server.user]
    chosen = running if arguments.all else _chosen(arguments.which, running)
    if not chosen:
        say(["no server is running"])
    for server in chosen:
        stop(server, now=arguments.now, timeout_s=arguments.timeout)
        say([f"stopped {server.name} ({server.url}, pid {server.pid})"])
    return 0


def _chosen(which: list[str], running: list[RunningServer]) -> list[RunningServer]:
    """All are found before the first is stopped."""
    from holdfast.cli.servers.background import is_background, is_called

    found: dict[int, RunningServer] = {}
    for word in which:
        number = int(word) if word.isdecimal() else None
        matches = [
            server
            for server in running
            if number in (server.port, server.pid)
            or (number is None and (is_called(server, word) or _is_address(word, server)))
        ]
        by_name = [server for server in matches if number is None and not _is_address(word, server)]
        started = [server for server in by_name if is_background(server)]
        if by_name and not started:
            raise _not_by_name(by_name[0], word)
        matches = started or matches
        if len(matches) > 1:
            listed = ", ".join(f"pid {server.pid} at {server.url}" for server in matches)
            raise ConfigurationError(
                f"{len(matches)} servers are meant by {shorten(word)}: {listed}", fix=f"holdfast stop {matches[0].pid}"
            )
        if not matches:
            known = ", ".join(f"{server.name} ({_place(server)}, pid {server.pid})" for server in running)
            raise EngineError(
                f"no server of yours on this machine is {shorten(word)}",
                found=known or "none is running",
                fix="holdfast ps",
            )
        found[matches[0].pid] = matches[0]
    return list(found.values())


def _not_by_name(server: RunningServer, word: str) -> ConfigurationError:
    """A name that `run` was given may be that of a server which somebody else keeps in a terminal or as a service."""
    return ConfigurationError(
        f"{shorten(word)} is served at {server.url} (pid {server.pid}) by a server that `holdfast run` did not start",
        needed="its pid, port or address, or --all: by name only servers in the background are stopped",
        found=shorten(word),
        fix=f"holdfast stop {server.pid}",
    )


def _place(server: RunningServer) -> str:
    if server.node is not None:
        return server.url
    return f"port {server.port}" if server.socket is None else server.socket


def _is_address(word: str, server: RunningServer) -> bool:
    """Of one on a Unix socket: the path of that, too."""
    if server.socket is not None:
        return Path(word.removeprefix("unix:")).expanduser().resolve() == Path(server.socket)
    return _address(word) == _address(server.url)


def _address(written: str) -> str:
    return (
        written.removeprefix("http://")
        .removeprefix("https://")
        .rstrip("/")
        .removesuffix("/v1")
        .replace("localhost:", "127.0.0.1:")
    )


def stop(server: RunningServer, *, now: bool = False, timeout_s: float = TIMEOUT_S) -> None:
    """Until its process is gone. Raises EngineError where it stays."""
    from holdfast.cli.servers.registry import is_alive

    deadline_s = time.monotonic() + timeout_s
    again_s = time.monotonic() + NOW_S if now else deadline_s
    if is_alive(server):
        _signal(server)
    while is_alive(server):
        if time.monotonic() >= deadline_s:
            raise EngineError(
                f"{server.name} (pid {server.pid}) still runs after {timeout_s:g} s",
                found="it may be finishing requests" if not now else "it does not end at a second signal",
                fix=f"holdfast stop {server.pid} --now" if not now else f"kill -9 {server.pid}",
            )
        if time.monotonic() >= again_s:
            _signal(server)
            again_s = deadline_s
        time.sleep(POLL_S)


def _signal(server: RunningServer) -> None:
    try:
        os.kill(server.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise EngineError(
            f"pid {server.pid} belongs to another user", fix=f"ask its owner, or: sudo kill {server.pid}"
        ) from error
