"""A server for a model: one that runs already, or one started in the background, which outlives who started it.

    find among running ones ─► else start `holdfast serve` in a session of its own, output to a log file ─► wait for it

Waits until it is ready. Knows nothing of chats.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.checkpoints.sources import builtin
from holdfast.checkpoints.sources.cache import cache_folder
from holdfast.checkpoints.sources.resolve import short_name
from holdfast.checkpoints.sources.stored_models import StoredModel
from holdfast.cli.servers.registry import RunningServer, is_alive, registered_servers, starting_alone
from holdfast.config.setting import environment_name, flag_name
from holdfast.errors import ConfigurationError, EngineError, printable

USUAL_PORT = 8000
LOGS_KEPT = 10
POLL_S = 0.1
HEALTH_TIMEOUT_S = 5.0
OK = 200
LOG_TAIL_BYTES = 8192
LINES_SHOWN = 15
STOP_S = 10.0
ELSEWHERE = ("uds", "host", "port")
"""Settings of servers that a person starts: one in the background listens where it is asked to."""

Say = Callable[[str], None]


class BackgroundStartError(Exception):
    """The server ended before it was ready; what it said has been shown."""

    def __init__(self, code: int) -> None:
        self.code = code


def is_called(server: RunningServer, name: str) -> bool:
    """Whether that is what it serves: by one of its names, as it was asked for, or by its files."""
    wanted = identity(name)
    return wanted in {identity(known) for known in (server.model, *server.names) if known} | {server.path}


def is_background(server: RunningServer) -> bool:
    """Whether `holdfast run` started it: it writes to a log among those. Others are somebody's terminal or service."""
    return bool(server.log) and Path(server.log).parent == _log_folder().resolve()


def identity(name: str) -> str:
    """One word for all names of a model."""
    path = Path(name).expanduser()
    with contextlib.suppress(OSError):
        if path.exists():
            return str(path.resolve())
    entry = builtin.find(name)
    if entry is not None:
        return entry.name
    known = short_name(name)
    return known.hub_id if known is not None else name


def serving(running: Sequence[RunningServer], model: StoredModel) -> list[RunningServer]:
    """Those among `running` that have it open, or are about to."""
    places = [path.resolve() for path in (model.path, *model.remove)]
    return [
        server
        for server in running
        if is_called(server, model.name) or any(server.path and Path(server.path).is_relative_to(at) for at in places)
    ]


def ensure_server(model: str, settings: Mapping[str, Any], say: Say) -> RunningServer:
    """One that is ready. `settings`: engine settings that were given, as text. Raises BackgroundStartError; Ctrl-C
    while it waits ends a server that was started here."""
    with contextlib.ExitStack() as on_interrupt:
        try:
            with starting_alone():
                # Chats speak over an address and a port. Of a server without an entry the settings are not known.
                mine = (one for one in registered_servers() if one.socket is None and one.node is None)
                server = next((one for one in mine if is_called(one, model)), None)
                if server is not None:
                    _require_same(server, model, settings)
                    say(f"using {server.url} (pid {server.pid}), which serves {printable(model)} already")
                    started, log = None, Path(server.log) if server.log else None
                else:
                    log = _log_path(model)
                    say(f"starting a server for {printable(model)}; its log: {log}")
                    started = on_interrupt.enter_context(_ended_by_ctrl_c(_spawn(model, settings, log)))
                    server = _registered(started, log)
        except OSError as error:
            raise EngineError(
                f"a server cannot be started in the background: {error}",
                fix=f"holdfast serve {model}, and in another terminal: holdfast chat --url 8000",
            ) from error
        return _ready(server, started, log)


@contextlib.contextmanager
def _ended_by_ctrl_c(started: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """From its first moment: nobody else would know of it."""
    try:
        yield started
    except KeyboardInterrupt:
        started.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(STOP_S)
        raise


def _require_same(server: RunningServer, model: str, settings: Mapping[str, Any]) -> None:
    """A server that runs keeps its settings; others that are asked for must not be silently left aside."""
    for name, value in settings.items():
        if server.settings.get(name) != _text(value):
            had = server.settings.get(name)
            raise ConfigurationError(
                f"{model} is served already, at {server.url}, with other settings",
                needed=f"{flag_name(name)} {_text(value)}",
                found=f"{flag_name(name)} {had}" if had else f"no {flag_name(name)}",
                fix=f"holdfast stop {server.pid}, then run it again; or leave {flag_name(name)} out",
                field=name,
            )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def _spawn(model: str, settings: Mapping[str, Any], log: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "holdfast", "serve", model, "--port", str(_port()), "--disable-access-log"]
    for name, value in settings.items():
        words += [flag_name(name), *value] if isinstance(value, list) else [f"{flag_name(name)}={value}"]
    moving = {environment_name(name) for name in ELSEWHERE}
    environment = {name: value for name, value in os.environ.items() if name not in moving}
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
            env=environment,
        )
    finally:
        os.close(descriptor)


def _port() -> int:
    """The usual one where it is free, else any (0)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", USUAL_PORT))
        except OSError:
            return 0
    return USUAL_PORT


def _log_folder() -> Path:
    return cache_folder() / "logs"


def _log_path(model: str) -> Path:
    """A new file; of older ones the last few are kept, and those that running servers write to."""
    folder = _log_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    open_ones = {server.log for server in registered_servers()}
    closed = (path for path in folder.glob("*.log") if str(path.resolve()) not in open_ones)
    for old in sorted(closed, key=lambda path: path.stat().st_mtime)[: -LOGS_KEPT + 1]:
        old.unlink(missing_ok=True)
    name = re.sub(r"[^\w.-]+", "-", model.rstrip("/").rpartition("/")[2])[:60] or "model"
    return folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{os.getpid()}.log"


def _registered(started: subprocess.Popen[bytes], log: Path) -> RunningServer:
    """Once it listens; its model may take longer. Its command line alone says neither."""
    while True:
        server = next((one for one in registered_servers() if one.pid == started.pid), None)
        if server is not None:
            return server
        if started.poll() is not None:
            raise _failed(started.returncode, log)
        time.sleep(POLL_S)


def _ready(server: RunningServer, started: subprocess.Popen[bytes] | None, log: Path | None) -> RunningServer:
    import httpx

    from holdfast.cli.chat_backends import trust

    with (
        _StatusLine(log) as status,
        httpx.Client(base_url=server.url, timeout=HEALTH_TIMEOUT_S, verify=trust(server.certificate)) as client,
    ):
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if client.get("/health").status_code == OK:
                    break
            if (started is not None and started.poll() is not None) or not is_alive(server):
                status.clear()
                raise _failed(1 if started is None else started.returncode, log)
            status.show()
            time.sleep(POLL_S)
    return next((one for one in registered_servers() if one.pid == server.pid), server)


def _failed(code: int | None, log: Path | None) -> BackgroundStartError:
    """Shows the error that ended it, as `holdfast serve` itself would have."""
    lines = _tail(log)
    block = [at for at, line in enumerate(lines) if line.startswith("holdfast: ")]
    for line in lines[block[-1] :] if block else lines[-LINES_SHOWN:]:
        print(printable(line), file=sys.stderr)
    if log is not None:
        print(f"  log:    {log}", file=sys.stderr, flush=True)
    return BackgroundStartError(code if code is not None and code > 0 else 1)


def _tail(log: Path | None) -> list[str]:
    if log is None:
        return []
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


class _StatusLine:
    """The last line of a log, on one line of a terminal."""

    def __init__(self, log: Path | None) -> None:
        self._log = log if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else None
        self._shown = ""

    def __enter__(self) -> _StatusLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def show(self) -> None:
        lines = _tail(self._log)
        line = printable(lines[-1])[: shutil.get_terminal_size().columns - 1] if lines else ""
        if line != self._shown:
            sys.stderr.write(f"\r\033[K{line}")
            sys.stderr.flush()
            self._shown = line

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
            self._shown = ""
