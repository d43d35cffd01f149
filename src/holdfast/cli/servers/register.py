"""The entry that a server makes of itself among those of this machine. A server that cannot make one still serves."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.checkpoints.sources.stored_models import mark_used
from holdfast.cli.fatal import command_line
from holdfast.cli.servers.registry import UNIX, Registration, RunningServer

log = logging.getLogger("holdfast")

_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # Where it listens, not where we do.


class ServerEntry:
    def __init__(
        self,
        address: tuple[str, int] | str,
        *,
        model: str,
        settings: Mapping[str, Any],
        certificate: str | None,
        words: Sequence[str],
    ) -> None:
        import psutil

        url, port = _url(address, "http" if certificate is None else "https")
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
