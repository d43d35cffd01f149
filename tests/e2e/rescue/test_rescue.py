"""`holdfast rescue`, whole: real processes, signals, terminals. What needs a GPU is a stand-in: stand_in_vllm.py."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deadlines import PATIENCE_S
from free_ports import free_port

from holdfast.cli.main import main
from holdfast.doctor.probe.server import examine
from holdfast.rescue.process import SAME_REQUEST_S

pytestmark = pytest.mark.usefixtures("forked_starts")

STAND_IN = Path(__file__).parents[2] / "support" / "stand_in_vllm.py"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
"""Of the catalogue: judging it asks nobody."""
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def path_with_vllm(tmp_path: Path) -> str:
    """A PATH on which the stand-in is called vllm."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n" + STAND_IN.read_text())
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


@pytest.fixture
def start(path_with_vllm: str) -> Iterator[Start]:
    running: list[subprocess.Popen[bytes]] = []

    def started(*words: str, options: tuple[str, ...] = (), **variables: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "rescue", "--back-off", "0", *options, "--", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PATH": path_with_vllm, **variables},
            start_new_session=True,
        )
        running.append(process)
        return process

    yield started
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def port() -> int:
    return free_port()


def _ended(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out.decode(), err.decode()


def _said_until(process: subprocess.Popen[bytes], mark: str) -> str:
    """What it says on standard error up to and with a line that has `mark`. Each start takes its time."""
    assert process.stderr is not None
    said = ""
    while mark not in said:
        ready, _, _ = select.select([process.stderr], [], [], PATIENCE_S)
        assert ready, said
        piece = os.read(process.stderr.fileno(), 65536)
        assert piece, said
        said += piece.decode()
    return said


def test_a_context_that_does_not_fit_is_cut_and_the_server_started_again(start: Start, port: int) -> None:
    command = f"vllm serve {MODEL} --max-model-len 131072 --port {port}"
    process = start(*command.split())
    said = _said_until(process, "the command to keep")
    assert "the server failed to start: exit code 1" in said
    assert "changed: --max-model-len 48544" in said or re.search(r"changed: --max-model-len 48\d\d\d", said)
    kept = said.split("the command to keep: ")[1].splitlines()[0]
    length = int(kept.split("--max-model-len ")[1].split()[0])
    assert kept == f"vllm serve {MODEL} --max-model-len {length} --port {port}"
    assert length <= 48544
    assert urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S).status == 200
    process.send_signal(signal.SIGTERM)
    code, out, err = _ended(process)
    assert code == 128 + signal.SIGTERM
    assert out.splitlines() == [f"stand-in: {text.removeprefix('vllm ')}" for text in (command, kept)]
    assert "SIGTERM passed on" in err
    assert "the command to keep" not in err  # It has been said.


def test_what_must_be_kept_is_kept_and_the_exit_code_is_the_programs(start: Start) -> None:
    options = ("--keep", "max-model-len", "--keep", "kv-cache-dtype,gpu-memory-utilization")
    code, out, err = _ended(start("vllm", "serve", MODEL, "--max-model-len", "131072", options=options))
    assert code == 1
    assert out.count("stand-in:") == 1
    assert "not changed automatically (--keep); suggested fix:" in err


def test_what_is_surely_wrong_is_put_right_before_the_first_start_where_that_is_wanted(start: Start, port: int) -> None:
    command = f"vllm serve {MODEL} --max-model-len 8192 --dtype fp16 --port {port}"
    process = start(*command.split(), options=("--fix-first",))
    assert "changed: --dtype float16" in _said_until(process, "ready after")
    process.send_signal(signal.SIGTERM)
    _, out, _ = _ended(process)
    assert out.count("stand-in:") == 1
    assert "--dtype float16" in out


def test_restarts_are_bounded(start: Start) -> None:
    """One that never learns: each time it asks for a little less than it was given."""
    process = start(
        "vllm",
        "serve",
        MODEL,
        "--max-model-len",
        "131072",
        options=("--max-restarts", "2"),
        STAND_IN_HOLDS="16",
        STAND_IN_LEARNS="0",
    )
    code, out, err = _ended(process)
    assert code == 1
    assert out.count("stand-in:") == 3
    assert "the limit of 2 restarts is reached" in err
    assert f"last command tried: vllm serve {MODEL}" in err


def test_a_crash_while_serving_is_told_apart_and_needs_the_opposite_move(start: Start, port: int) -> None:
    process = start(
        *f"vllm serve {MODEL} --max-model-len 8192 --gpu-memory-utilization 0.95 --port {port}".split(),
        STAND_IN_CRASH="1",
    )
    said = _said_until(process, "serving with: ")
    assert "the server died while serving: exit code 1" in said
    assert "the command to keep" not in said
    share = float(said.split("--gpu-memory-utilization ")[-1].split()[0])
    assert share < 0.95  # Never more of the card, where it ran out while serving.
    process.send_signal(signal.SIGINT)
    assert _ended(process)[0] in (128 + signal.SIGINT, 1, 130)


@pytest.mark.long
def test_a_server_that_hangs_is_ended_and_started_again(start: Start, port: int) -> None:
    process = start(
        *f"vllm serve {MODEL} --max-model-len 8192 --port {port}".split(),
        STAND_IN_HANG="1",
        options=("--hung-after", "1", "--max-restarts", "1"),
    )
    code, out, err = _ended(process)
    assert code == 128 + signal.SIGTERM
    assert out.count("stand-in:") == 2
    assert err.count("/health has not answered for") == 2
    assert "the server died while serving: signal SIGTERM" in err


def test_nobody_to_ask_means_no(start: Start) -> None:
    code, out, err = _ended(start("vllm", "serve", MODEL, "--max-model-len", "131072", options=("--ask",)))
    assert (code, out.count("stand-in:")) == (1, 1)
    assert "changed:" not in err
    assert "suggested command:" in err


def test_exit_codes_are_those_of_a_shell(start: Start) -> None:
    """One as it is started; the others in one process, which imports all of it once."""
    assert _ended(start("sh", "-c", "exit 7"))[0] == 7
    others = (["sh", "-c", "kill -9 $$"], ["no-such-program"], ["/etc/passwd"])
    each = f"from holdfast.cli.main import main; print(*(main(['rescue', '--', *words]) for words in {others!r}))"
    said = subprocess.run([sys.executable, "-c", each], capture_output=True, text=True, timeout=PATIENCE_S)
    assert said.stdout.split() == ["137", "127", "126"], said.stderr


def test_output_passes_unchanged(start: Start) -> None:
    process = start("sh", "-c", r"printf 'a\r\n\377\0b'; printf 'c\033[0m' >&2; sleep 0.3; printf 'no end'")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert out == b"a\r\n\xff\x00bno end"
    assert b"c\x1b[0m" in err
    assert process.returncode == 0


def test_the_second_request_to_end_kills(start: Start) -> None:
    process = start("sh", "-c", "trap 'echo heard' TERM INT; echo up; while :; do sleep 0.05; done")
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    # As `timeout` sends it, to a process and to its group, that is one request; here both are there when it looks.
    process.send_signal(signal.SIGSTOP)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        process.send_signal(number)
    assert process.stdout.readline() == b"heard\n"
    time.sleep(SAME_REQUEST_S)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert _ended(process)[0] == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    "seconds", ["1.5", pytest.param("3600", marks=pytest.mark.long)], ids=["serves late", "never serves"]
)
def test_a_request_to_end_that_a_loading_server_loses_is_not_lost(start: Start, port: int, seconds: str) -> None:
    process = start(*f"vllm serve {MODEL} --max-model-len 8192 --port {port}".split(), STAND_IN_DEAF=seconds)
    said = _said_until(process, "Starting to load model")
    process.send_signal(signal.SIGTERM)
    code, _, err = _ended(process)
    again, killed = "sending SIGTERM again" in said + err, "killing it" in said + err
    assert (again, killed, code) in (
        [(True, False, 128 + signal.SIGTERM), (False, True, 128 + signal.SIGKILL)]
        if seconds == "1.5"  # On a very slow machine it is killed before it serves.
        else [(False, True, 128 + signal.SIGKILL)]
    )


def test_a_program_sees_a_terminal_where_we_have_one() -> None:
    master, slave = pty.openpty()
    program = "test -t 0 && test -t 1 && test -t 2 && echo all; read a; echo $a"
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "rescue", "--", "sh", "-c", program],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    until = time.monotonic() + PATIENCE_S

    def wait_for(words: bytes) -> None:
        said = b""
        while words not in said:
            assert select.select([master], [], [], max(0.0, until - time.monotonic()))[0], said
            said += os.read(master, 65536)

    wait_for(b"all\r\n")
    os.write(master, b"typed\n")
    wait_for(b"typed\r\ntyped\r\n")
    assert process.wait(PATIENCE_S) == 0
    os.close(master)


def test_ctrl_c_is_the_servers_affair(path_with_vllm: str, port: int) -> None:
    """Typed at a terminal, to a server that is well: its own last words and exit code, and no diagnosis of them."""
    master, slave = pty.openpty()
    command = f"vllm serve {MODEL} --max-model-len 8192 --port {port}".split()
    process = subprocess.Popen(
        ["setsid", "--ctty", sys.executable, "-m", "holdfast", "rescue", "--", *command],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "PATH": path_with_vllm},
    )
    os.close(slave)
    said, typed, until = b"", False, time.monotonic() + PATIENCE_S
    while True:
        assert select.select([master], [], [], max(0.0, until - time.monotonic()))[0], said
        try:
            said += os.read(master, 65536)
        except OSError:  # Nobody holds the other end any more.
            break
        if b"ready after" in said and not typed:
            typed = os.write(master, b"\x03") > 0
    assert process.wait(PATIENCE_S) == 128 + signal.SIGINT
    after = said.split(b"ready after")[1]
    assert b"SIGINT passed on" in after
    assert b"KeyboardInterrupt" in after
    assert after.count(b"holdfast rescue:") == 1
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S)
    os.close(master)


def test_holdfast_itself_with_too_little_memory_is_given_enough(start: Start, port: int) -> None:
    command = f"-m holdfast serve smollm2 --ram 300MiB --max-model-len 512 --port {port}".split()
    process = start(sys.executable, *command)
    said = _said_until(process, "the command to keep")
    assert "check before the start: it does not fit" in said
    assert "the server failed to start: exit code 2" in said
    assert re.search(r"changed: --ram \d+MiB", said)
    looked = examine(f"http://127.0.0.1:{port}", seconds=1)
    assert (looked.engine, looked.healthy, looked.phase) == ("holdfast", True, "serve")
    process.send_signal(signal.SIGTERM)
    assert _ended(process)[0] == 0
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S)


def test_usage(start: Start, path_with_vllm: str, monkeypatch, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = _ended(start())
    assert code == 2
    assert "no command to run" in err
    monkeypatch.setenv("PATH", path_with_vllm)
    capfd.readouterr()
    assert main(["rescue", "--keep", "max-num-seq", "--", "vllm", "serve", MODEL]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "--keep max-num-seqs" in err
    assert main(["rescue", "--max-restarts", "many", "--", "true"]) == 2
