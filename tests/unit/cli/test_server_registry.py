"""The servers of this machine: entries that live as long as their process, in a folder of one user."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from deadlines import PATIENCE_S

from holdfast.cli.commands.running.stop import _chosen, stop
from holdfast.cli.main import main
from holdfast.cli.servers import background, registry
from holdfast.cli.servers.background import is_called
from holdfast.cli.servers.registry import Registration, RunningServer, is_alive, running_servers
from holdfast.errors import ConfigurationError, EngineError

HOLDER = """
import os, sys, time, psutil
from holdfast.cli.servers.registry import Registration, RunningServer
entry = RunningServer(pid=os.getpid(), created_s=psutil.Process().create_time(), url="http://127.0.0.1:" + sys.argv[1],
                      port=int(sys.argv[1]), model=sys.argv[2], names=(sys.argv[2],))
held = Registration(entry)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def holders() -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that hold an entry each, as servers do: `one` on port 1, `two` on port 2."""
    started = [
        subprocess.Popen([sys.executable, "-c", HOLDER, port, name], stdout=subprocess.PIPE, text=True)
        for port, name in (("1", "one"), ("2", "two"))
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait(PATIENCE_S)


def server(**fields: object) -> RunningServer:
    own = RunningServer(pid=os.getpid(), created_s=psutil.Process().create_time(), url="http://127.0.0.1:7", port=7)
    return msgspec.structs.replace(own, **fields)


def test_entries_end_with_their_process(holders: list[subprocess.Popen[str]], folder: Path) -> None:
    assert [(one.pid, one.name) for one in running_servers()] == [
        (holders[0].pid, "one"),
        (holders[1].pid, "two"),
    ]
    assert folder.stat().st_mode & 0o777 == 0o700
    holders[0].kill()
    holders[0].wait(PATIENCE_S)
    assert (folder / f"{holders[0].pid}.json").exists()  # It could not remove its own.
    assert [one.name for one in running_servers()] == ["two"]
    assert not (folder / f"{holders[0].pid}.json").exists()


def test_an_entry_is_changed_and_removed(folder: Path) -> None:
    held = Registration(server())
    # A second lock by the same process would be granted nothing: readers are other open files.
    assert [one.names for one in running_servers()] == [()]
    held.update(server(names=("name",)))
    assert [one.names for one in running_servers()] == [("name",)]
    held.remove()
    held.remove()
    assert running_servers() == []
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("happens", ["changed", "begun again"])
def test_an_entry_that_is_replaced_while_it_is_read_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, happens: str
) -> None:
    """Between the opening of the file and the question whether it is held."""
    held = [Registration(server())]
    flock = fcntl.flock

    def interrupted(descriptor: int, how: int) -> None:
        patch.setattr(fcntl, "flock", flock)
        if happens == "changed":
            held[0].update(server(names=("name",)))
        else:  # Its server ended, and one with the same pid has begun.
            held[0].remove()
            held.append(Registration(server(names=("name",))))
        flock(descriptor, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", interrupted)
        running_servers()
    assert [one.names for one in running_servers()] == [("name",)]
    held[-1].remove()


def test_another_users_folder_is_not_trusted(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(PermissionError, match="not a folder"):
        Registration(server())
    folder.unlink()
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    (folder / "1.json").write_text("{}")
    assert running_servers() == []
    with pytest.raises(PermissionError, match=f"other users may enter it: chmod 700 {folder}"):
        Registration(server())


def test_a_pid_that_is_used_again_is_not_the_server() -> None:
    assert is_alive(server())
    assert not is_alive(server(created_s=time.time() - 1_000_000))


@pytest.mark.parametrize("words", [["1"], ["PID"], ["http://localhost:1/v1"]])
def test_stop_by_port_pid_and_address(
    holders: list[subprocess.Popen[str]], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stop", *(word.replace("PID", str(holders[0].pid)) for word in words)]) == 0
    assert f"stopped one (http://127.0.0.1:1, pid {holders[0].pid})" in capsys.readouterr().out
    assert holders[0].wait(PATIENCE_S) == -15
    assert [one.name for one in running_servers()] == ["two"]


def test_by_name_only_what_run_started_in_the_background_is_stopped(
    holders: list[subprocess.Popen[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["stop", "one"]) == 2
    said = capsys.readouterr().err
    assert "`holdfast run` did not start" in said
    assert f"holdfast stop {holders[0].pid}" in said
    assert len(running_servers()) == 2, "somebody's server in a terminal"
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path))
    ours = server(model="one", log=str(tmp_path.resolve() / "logs" / "1.log"))
    theirs = server(model="one", pid=1, port=9, log="/var/log/one.log")
    assert _chosen(["one"], [theirs, ours]) == [ours]
    with pytest.raises(ConfigurationError, match="2 servers are meant"):
        _chosen(["one"], [ours, msgspec.structs.replace(ours, pid=2, port=8)])


def test_stop_by_the_path_of_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    on_a_socket = server(url=f"unix:{tmp_path.resolve()}/s.sock", port=0, model="m")
    for word in ("s.sock", f"{tmp_path}/link/s.sock", on_a_socket.url):
        assert _chosen([word], [server(pid=1), on_a_socket]) == [on_a_socket]
    with pytest.raises(EngineError, match="no server of yours") as caught:
        _chosen(["other.sock"], [on_a_socket])
    assert caught.value.found == f"m ({tmp_path.resolve()}/s.sock, pid {os.getpid()})"


def test_stop_all_none_and_unclear_ones(
    holders: list[subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stop", "three"]) == 1
    assert "one (port 1" in capsys.readouterr().err
    assert main(["stop"]) == 2
    assert main(["stop", "one", "--all"]) == 2
    assert main(["stop", "--all"]) == 0
    assert [process.wait(PATIENCE_S) for process in holders] == [-15, -15]
    assert main(["stop", "--all"]) == 0
    assert "no server is running" in capsys.readouterr().out


def test_one_that_does_not_end_is_said_with_what_helps() -> None:
    deaf = [
        sys.executable,
        "-c",
        "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)",
    ]
    process = subprocess.Popen(deaf, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        created_s = psutil.Process(process.pid).create_time()
        with pytest.raises(EngineError, match="still runs") as caught:
            stop(server(pid=process.pid, created_s=created_s), timeout_s=0.1)
        assert caught.value.fix == f"holdfast stop {process.pid} --now"
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def test_a_server_is_known_by_all_names_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    by_path = server(model=str(tmp_path / "m.gguf"), names=("m.gguf",))
    assert is_called(by_path, "m.gguf")
    assert is_called(by_path, "./m.gguf")
    assert not is_called(by_path, "other.gguf")
    assert is_called(server(model="smollm2"), "SmolLM2-135M-Instruct")
    assert is_called(server(model="llama3.1:8b"), "meta-llama/Llama-3.1-8B-Instruct")


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("/usr/bin/python -m holdfast serve x", 3),
        ("/usr/bin/python3.12 -u -X dev -m holdfast serve x", 6),
        ("/venv/bin/python /venv/bin/holdfast serve", 2),
        ("holdfast serve x", 1),
        ("holdfast chat", None),
        ("vim holdfast serve", None),
        ("timeout 60 holdfast serve x", None),
        ("sudo holdfast serve x", None),
        ("uv run holdfast serve x", None),
        ("docker run image holdfast serve x", None),
        ("python /venv/bin/holdfast rescue -- holdfast serve x", None),
        ("python -c code holdfast serve", None),
        ("python wrapper.py holdfast serve", None),
    ],
)
def test_servers_are_recognized_by_their_command_line(words: str, place: int | None) -> None:
    assert registry._serve_place(words.split()) == place
    assert registry._serve_place([]) is None


def test_a_server_and_what_started_it_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process looks like a server that started another, which is registered or not."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        words = {os.getpid(): ["holdfast", "serve", "outer"], child.pid: ["holdfast", "serve", "inner"]}
        processes = [psutil.Process(pid) for pid in words]
        for process in processes:
            process.info = {"cmdline": words[process.pid], "username": "u", "create_time": 1.0}
        monkeypatch.setattr(psutil, "process_iter", lambda fields: processes)

        def found(*known: int) -> list[str]:
            return [one.model for one in registry._unregistered(set(known))]

        try:
            assert found(child.pid) == []
            assert found(os.getpid()) == []
            assert found() == ["outer"]
        finally:
            child.communicate(b"\n")


@pytest.fixture
def usual_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where HOLDFAST_RUNTIME_DIR is not set, without the servers that this machine happens to run."""
    monkeypatch.setattr(registry, "_candidates", lambda: [folder])
    monkeypatch.delenv("HOLDFAST_RUNTIME_DIR")
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))


def command_line_only(monkeypatch: pytest.MonkeyPatch, found: Callable[[], RunningServer]) -> None:
    monkeypatch.setattr(registry, "_unregistered", lambda known: iter([found()]))


@pytest.mark.usefixtures("usual_folder")
def test_what_ends_before_its_entry_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text("a line\nholdfast: there is no such model\n")
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(2)"]) as process:
        command_line_only(monkeypatch, lambda: server(pid=process.pid, model="nope"))
        with pytest.raises(background.BackgroundStartError) as caught:
            background._registered(process, log)
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"holdfast: there is no such model\n  log:    {log}\n"


@pytest.mark.usefixtures("usual_folder")
def test_settings_of_a_server_without_an_entry_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the same model with the same settings that another `run` is about to start."""
    command_line_only(monkeypatch, lambda: server(model="m"))
    assert [one.model for one in running_servers()] == ["m"]
    monkeypatch.setattr(background, "_spawn", lambda *_: (_ for _ in ()).throw(background.BackgroundStartError(7)))
    with pytest.raises(background.BackgroundStartError):
        background.ensure_server("m", {"dtype": "float32"}, lambda line: None)


@pytest.mark.usefixtures("usual_folder")
@pytest.mark.parametrize("during", ["_registered", "_ready"])
def test_ctrl_c_ends_a_server_that_is_being_started(monkeypatch: pytest.MonkeyPatch, during: str) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with subprocess.Popen(["sleep", "600"]) as process:
        monkeypatch.setattr(background, "_spawn", lambda *_: process)
        monkeypatch.setattr(background, "_registered", lambda *_: server(pid=process.pid))
        monkeypatch.setattr(background, during, interrupted)
        try:
            with pytest.raises(KeyboardInterrupt):
                background.ensure_server("m", {}, lambda line: None)
            assert process.returncode == -15
        finally:
            process.kill()


def test_a_background_server_listens_where_it_is_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where variables for other servers say: over a socket nobody would find it."""
    for name in ("UDS", "HOST", "PORT", "DTYPE"):
        monkeypatch.setenv(f"HOLDFAST_{name}", "x")
    given: list[dict[str, str]] = []
    monkeypatch.setattr(background.subprocess, "Popen", lambda words, *, env, **_: given.append(env))
    background._spawn("m", {}, tmp_path / "log")
    assert {name for name in given[0] if name.startswith("HOLDFAST_")} >= {"HOLDFAST_DTYPE", "HOLDFAST_RUNTIME_DIR"}
    assert not {"HOLDFAST_UDS", "HOLDFAST_HOST", "HOLDFAST_PORT"} & set(given[0])


def test_the_log_of_a_running_server_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path))
    logs = [tmp_path / "logs" / f"{number:02}.log" for number in range(background.LOGS_KEPT + 2)]
    logs[0].parent.mkdir()
    for number, log in enumerate(logs):
        log.touch()
        os.utime(log, (number, number))
    held = Registration(server(log=str(logs[0].resolve())))  # It has been silent for long.
    fresh = background._log_path("m")
    held.remove()
    assert sorted((tmp_path / "logs").iterdir()) == [logs[0], *logs[-background.LOGS_KEPT + 1 :]]
    assert fresh.parent == tmp_path / "logs"
