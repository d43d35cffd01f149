"""Which servers run on this machine: one small file each in a folder that only its user can read.

    $HOLDFAST_RUNTIME_DIR, else $XDG_RUNTIME_DIR/holdfast, /run/user/UID/holdfast, /tmp/holdfast.UID   (all are read)
        PID.json        held with a lock by the server as long as it lives, so that a pid used again fools nobody

A file that nobody holds was left by a server that was killed; whoever reads the folder removes it. Servers of other
users are found by their command line alone. Starts and stops nothing, and opens no connection.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.config.nodes import DEFAULT_PORT

FOLDER_VARIABLE = "HOLDFAST_RUNTIME_DIR"
MAX_ENTRY_BYTES = 1 << 20
STARTING = ".starting"
UNIX = "unix:"
_PYTHON_FLAG = re.compile(r"-[bBdEhiIOPqsSuvx]+|-[XW].*")
"""Of the interpreter, before the program: neither -m nor -c."""


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """Of a node that has no API: it computes for a head."""

    rank: int
    nodes: int
    head: str
    """Address and port."""
    first: int
    """Of its ranks of the engine."""
    ranks: int
    all_ranks: int
    joined: bool | None = None
    """False: it looks for the head. None: not known."""
    since_s: float = 0.0
    """When that began, by the system's clock."""

    @property
    def named_ranks(self) -> str:
        last = self.first + self.ranks - 1
        return f"rank {self.first}" if self.ranks == 1 else f"ranks {self.first} to {last}"


class RunningServer(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    created_s: float
    """When the process began, by the system's clock: a pid alone may belong to another program by now."""
    url: str
    """Of one on a Unix socket: unix: and its path. Of a node without an API: which it is."""
    port: int
    """0: it listens on a Unix socket, or not at all."""
    model: str = ""
    """As it was asked for; a path is absolute."""
    names: tuple[str, ...] = ()
    """By which clients call it; empty until its files were found."""
    path: str = ""
    """Of its files, once they were found."""
    log: str = ""
    """The file that its output goes to, if it does."""
    settings: dict[str, str] = {}
    """Engine settings that were given, as text."""
    certificate: str = ""
    """Of HTTPS: the file to trust."""
    user: str = ""
    """Whose it is, where it is somebody else's."""
    command: str = ""
    node: NodeState | None = None
    """Where it is one of several machines and not the head."""

    @property
    def socket(self) -> str | None:
        return self.url.removeprefix(UNIX) if self.url.startswith(UNIX) else None

    @property
    def name(self) -> str:
        return self.names[0] if self.names else self.model


class Registration:
    """The entry of this process; it ends with it, or with `remove`."""

    def __init__(self, server: RunningServer) -> None:
        """Raises OSError where no folder can be used."""
        self._path = _writable_folder() / f"{server.pid}.json"
        self._held: list[int] = []
        self.server = server
        self.update(server)

    def update(self, server: RunningServer) -> None:
        """Readers see the old entry or the new one, and always a held one."""
        self.server = server
        fresh = self._path.with_suffix(".new")
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        # The old one stays held: a reader that has it open already would take it for that of a dead server.
        self._held.append(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, msgspec.json.encode(server))
        os.replace(fresh, self._path)

    def remove(self) -> None:
        """May be called again."""
        if self._held:
            self._path.unlink(missing_ok=True)
            while self._held:
                os.close(self._held.pop())


def running_servers() -> list[RunningServer]:
    """In the order of their ports: registered ones, and others that their command lines tell."""
    found = {server.pid: server for server in registered_servers()}
    if not os.environ.get(FOLDER_VARIABLE):
        for server in _unregistered(set(found)):
            found[server.pid] = server
    return sorted(found.values(), key=lambda server: (server.port, server.pid))


def registered_servers() -> list[RunningServer]:
    """Those that listen and have made their entry: of these all is known. What killed ones left is removed."""
    found: dict[int, RunningServer] = {}
    for folder in _candidates():
        if _is_ours(folder):
            for path in folder.glob("*.json"):
                server = _read(path)
                if server is not None:
                    found[server.pid] = server
    return sorted(found.values(), key=lambda server: (server.port, server.pid))


def is_alive(server: RunningServer) -> bool:
    """The very process; one that has ended and waits for its parent is not."""
    import psutil

    try:
        process = psutil.Process(server.pid)
        return abs(process.create_time() - server.created_s) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@contextlib.contextmanager
def starting_alone() -> Iterator[None]:
    """Of several that want to start a server at once, one after the other."""
    descriptor = os.open(_writable_folder() / STARTING, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _candidates() -> list[Path]:
    own = os.environ.get(FOLDER_VARIABLE)
    if own:
        return [Path(own).expanduser()]
    found = [Path(f"/run/user/{os.getuid()}"), Path(tempfile.gettempdir()) / f"holdfast.{os.getuid()}"]
    found[0] /= "holdfast"
    session = os.environ.get("XDG_RUNTIME_DIR")
    return list(dict.fromkeys([Path(session) / "holdfast", *found] if session else found))


def _writable_folder() -> Path:
    """The first that is ours alone. What another user has put in the way in a shared folder is passed over."""
    refused = []
    for folder in _candidates():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
        problem = _problem(folder)
        if problem is None and os.access(folder, os.W_OK):
            return folder
        refused.append(f"{folder} ({problem or 'it cannot be written to'})")
    raise PermissionError(f"no folder for running servers can be used: {', '.join(refused)}")


def _is_ours(folder: Path) -> bool:
    return _problem(folder) is None


def _problem(folder: Path) -> str | None:
    """Why it is not a folder of this user alone."""
    try:
        status = folder.lstat()
    except OSError:
        return "it cannot be made"
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    if status.st_uid != os.getuid():
        return "it belongs to another user"
    if status.st_mode & 0o077:
        return f"other users may enter it: chmod 700 {shlex.quote(str(folder))}"
    return None


def _read(path: Path) -> RunningServer | None:
    """None: nobody holds it, or it says nothing that can be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        try:
            return msgspec.json.decode(os.read(descriptor, MAX_ENTRY_BYTES), type=RunningServer)
        except (msgspec.MsgspecError, OSError):
            return None
    else:
        _remove_left(path, descriptor)
        return None
    finally:
        os.close(descriptor)


def _remove_left(path: Path, descriptor: int) -> None:
    """Where the path is still that of the open file: another reader may have removed it, and a server with the same
    pid may have begun."""
    with contextlib.suppress(OSError):
        if os.path.samestat(path.lstat(), os.fstat(descriptor)):
            path.unlink()


def _unregistered(known: set[int]) -> Iterator[RunningServer]:
    """Servers of other users, and of this one where no folder could be used, by their command lines. One that has
    started a registered server, or was started by any of them, is not counted twice."""
    import psutil

    own = psutil.Process().username()
    seen, above = set(known), {pid for one in known for pid in _ancestors(one)}
    for process in psutil.process_iter(["cmdline", "username", "create_time"]):  # In the order of their pids.
        words = process.info["cmdline"] or []
        place = _serve_place(words)
        if place is None or process.pid in seen | above or seen & _ancestors(process.pid):
            continue
        rest = words[place + 1 :]
        port, node = _value(rest, "--port") or "8000", _node_of(rest)
        number = int(port) if port.isdecimal() and node is None else 0
        model = rest[0] if rest and not rest[0].startswith("-") else ""
        if number or node is not None:
            seen.add(process.pid)
            yield RunningServer(
                pid=process.pid,
                created_s=process.info["create_time"] or time.time(),
                url=f"http://127.0.0.1:{number}" if node is None else node_name(node),
                port=number,
                model=model,
                user="" if process.info["username"] == own else process.info["username"] or "another user",
                node=node,
            )


def node_name(node: NodeState) -> str:
    return f"node {node.rank} of {node.nodes}"


def _value(words: list[str], *flags: str) -> str | None:
    """Behind the last of these flags."""
    found = None
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag.replace("_", "-") in flags:
            found = value if equals else "".join(words[at + 1 : at + 2])
    return found


def _node_of(words: list[str]) -> NodeState | None:
    """By its command line, which does not say whether it has found its head."""

    def number(default: int, *flags: str) -> int:
        written = _value(words, *flags) or ""
        return int(written) if written.isdecimal() else default

    rank, nodes = number(0, "--node-rank", "-r"), number(1, "--nnodes", "-n")
    if rank == 0 or nodes <= rank:
        return None
    sizes = (
        number(1, "--tensor-parallel-size", "-tp", "--tp-size"),
        number(1, "--pipeline-parallel-size", "-pp", "--pp-size"),
    )
    each = sizes[0] * sizes[1] // nodes
    head = f"{_value(words, '--master-addr') or '127.0.0.1'}:{number(DEFAULT_PORT, '--master-port')}"
    return NodeState(rank=rank, nodes=nodes, head=head, first=rank * each, ranks=each, all_ranks=each * nodes)


def _ancestors(pid: int) -> set[int]:
    import psutil

    try:
        return {process.pid for process in psutil.Process(pid).parents()}
    except psutil.Error:
        return set()


def _serve_place(words: list[str]) -> int | None:
    """Where `serve` stands in `python -m holdfast serve` or `holdfast serve`; not in what only starts one of these."""
    at = 0
    if words and re.fullmatch(r"(python|pypy)[\d.]*", Path(words[0]).name):
        at = 1
        while words[at : at + 1] and _PYTHON_FLAG.fullmatch(words[at]):
            at += 2 if words[at] in ("-X", "-W") else 1
        if words[at : at + 2] == ["-m", "holdfast"]:
            at += 1
    is_ours = words[at : at + 1] and Path(words[at]).name == "holdfast"
    return at + 1 if is_ours and words[at + 1 : at + 2] == ["serve"] else None
