"""The entry that a server makes of itself among those of this machine. A server that cannot make one still serves."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.checkpoints.sources.stored_models import mark_used
from holdfast.cli.fatal import command_line
from holdfast.cli.servers.registry import UNIX, NodeState, Registration, RunningServer, node_name

log = logging.getLogger("holdfast")

_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # Where it listens, not where we do.


class ServerEntry:
    def __init__(
        self,
        address: tuple[str, int] | str | NodeState,
        *,
        model: str,
        settings: Mapping[str, Any],
        certificate: str | None,
        words: Sequence[str],
    ) -> None:
        """`address`: where it listens; of a node that does not, which it is."""
        import psutil

        node = address if isinstance(address, NodeState) else None
        scheme = "http" if certificate is None else "https"
        url, port = (node_name(address), 0) if isinstance(address, NodeState) else _url(address, scheme)
        given = {name: value if isinstance(value, str) else str(value) for name, value in settings.items()}
        self._registration: Registration | None = None
        try:
            path = Path(model).expanduser()
            self._registration = Registration(
                RunningServer(
                    pid=os.getpid(),
                    created_s=psutil.Process().create_time(),
                    url=url,
                    port=port,
                    model=str(path.resolve()) if path.exists() else model,
                    settings=given,
                    certificate="" if certificate is None else str(Path(certificate).resolve()),
                    log=_log_file(),
                    command=command_line(words),
                    node=node,
                )
            )
            atexit.register(self._remove)
        except OSError as error:
            log.warning("this server is not listed by `holdfast ps`: %s", error)

    def found(self, *, names: Sequence[str], path: Path) -> None:
        """Once the model's files are known."""
        mark_used(path)
        if self._registration is None:
            return
        with contextlib.suppress(OSError):  # It stays as it was listed before.
            server = self._registration.server
            self._registration.update(msgspec.structs.replace(server, names=tuple(names), path=str(path.resolve())))

    def joined(self, joined: bool) -> None:
        """Of a node: whether it has a head now."""
        if self._registration is None or (node := self._registration.server.node) is None or node.joined == joined:
            return
        with contextlib.suppress(OSError):
            known = msgspec.structs.replace(node, joined=joined, since_s=time.time())
            self._registration.update(msgspec.structs.replace(self._registration.server, node=known))

    def _remove(self) -> None:
        if self._registration is not None:
            with contextlib.suppress(OSError):
                self._registration.remove()


def _url(address: tuple[str, int] | str, scheme: str) -> tuple[str, int]:
    """A Unix socket's address is its path."""
    if isinstance(address, str):
        return f"{UNIX}{Path(address).resolve()}", 0
    host, port = _ANY_ADDRESS.get(address[0], address[0]), address[1]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", port


def _log_file() -> str:
    """Where standard error goes, if that is a file of its own."""
    with contextlib.suppress(OSError, ValueError):
        if stat.S_ISREG(os.fstat(2).st_mode):
            return os.readlink("/proc/self/fd/2")
    return ""
