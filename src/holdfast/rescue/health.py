"""Whether the server that was started answers, asked now and then beside it. Never ends anything itself."""

from __future__ import annotations

import contextlib
import http.client
import ssl
import threading
import time
from dataclasses import dataclass

from holdfast.doctor.command.parse import ServerCommand
from holdfast.engine_profiles.profile import profile

LOADING_EVERY_S, SERVING_EVERY_S = 0.25, 5.0
"""Often at first: one that answers and dies soon after had begun to serve."""
TIMEOUT_S = 5.0
READ_LIMIT_BYTES = 64 * 1024
OK, NOT_FOUND = 200, 404
_ANYWHERE = ("0.0.0.0", "::", "", "*")


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    secure: bool = False

    @property
    def text(self) -> str:
        return f"http{'s' if self.secure else ''}://{self.host}:{self.port}"


def address_of(command: ServerCommand | None) -> Address | None:
    """Where its command says that it will listen; None: that is not known, or no port of this machine."""
    if command is None or command.value("uds") is not None:
        return None
    usual = profile(command.engine).defaults.get("port")
    if usual is None:
        return None
    if command.words[0].rsplit("/", 1)[-1] in ("docker", "podman", "nerdctl"):
        return None
    port, host = command.value("port"), command.value("host") or "127.0.0.1"
    if port is not None and not port.isdecimal():
        return None
    number = int(usual) if port is None else int(port)
    secure = any(command.has(flag) for flag in ("ssl-certfile", "ssl-cert-file"))
    return Address("127.0.0.1" if host in _ANYWHERE else host, number, secure) if number else None


def answers(address: Address) -> bool:
    """/health says 200; where there is none, /v1/models does."""
    for path in ("/health", "/v1/models"):
        status = _status(address, path)
        if status != NOT_FOUND:
            return status in (OK, 401, 403)
    return False


def _status(address: Address, path: str) -> int:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=TIMEOUT_S)
    if address.secure:
        # Whose certificate it is does not matter here: nothing is told to it, and only that it answers counts.
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(address.host, address.port, timeout=TIMEOUT_S, context=trusting)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read(READ_LIMIT_BYTES)
        return response.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        with contextlib.suppress(OSError):
            connection.close()


class HealthPoll:
    """Asked by a thread of its own from `start` to `stop`. Read at any time."""

    def __init__(self, address: Address | None) -> None:
        # Somebody who answers there before we have started anything is not the one we start.
        self.taken = address is not None and answers(address)
        self._address = None if self.taken else address
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.ready = False
        """It has answered once."""
        self._silent_since: float | None = None

    @property
    def asked(self) -> bool:
        """It is known where to ask, and nobody else answers there."""
        return self._address is not None

    @property
    def silent_s(self) -> float:
        """How long it has not answered since it was ready; 0: it does, or was not ready yet."""
        since = self._silent_since
        return 0.0 if since is None else time.monotonic() - since

    def start(self) -> None:
        if self._address is not None:
            self._thread = threading.Thread(target=self._ask, args=(self._address,), name="health", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _ask(self, address: Address) -> None:
        while not self._stopped.wait(SERVING_EVERY_S if self.ready else LOADING_EVERY_S):
            asked_at = time.monotonic()
            if answers(address):
                self.ready, self._silent_since = True, None
            elif self.ready and self._silent_since is None:
                self._silent_since = asked_at
