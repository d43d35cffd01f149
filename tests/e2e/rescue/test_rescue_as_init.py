"""`holdfast rescue` as the process that everything stands on: signals at any time, output that nobody takes, other
people's processes, its own death. Real processes; nothing here waits for a clock.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deadlines import PATIENCE_S
from free_ports import free_port

pytestmark = pytest.mark.usefixtures("forked_starts")

STAND_IN = Path(__file__).parents[2] / "support" / "stand_in_vllm.py"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
"""Of the catalogue: judging it asks nobody."""
RESCUE = [sys.executable, "-m", "holdfast", "rescue"]
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Any command, with the stand-in on its PATH as vllm."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n" + STAND_IN.read_text())
    program.chmod(0o755)
    running: list[subprocess.Popen[bytes]] = []

    def started(*words: str, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE, **variables: str) -> object:
        environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", **variables}
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment)
        running.append(process)
        return process

    yield started  # type: ignore[misc]
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _until(stream: object, mark: bytes) -> bytes:
    """What comes up to and with `mark`; unbuffered."""
    descriptor, said, until = stream.fileno(), b"", time.monotonic() + PATIENCE_S  # type: ignore[attr-defined]
    while mark not in said:
        assert select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0], said
        piece = os.read(descriptor, 65536)
        assert piece, said
        said += piece
    return said


def _gone(pid: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while _state(pid) not in ("", "Z"):
        assert time.monotonic() < until, pid
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _alone() -> list[str]:
    """As the first process of a world of its own, where only what is handled is heard; empty: that is not allowed."""
    words = ["unshare", "-Urpf", "--mount-proc", "--kill-child"]
    try:
        return (
            words if subprocess.run([*words, "true"], capture_output=True, timeout=PATIENCE_S).returncode == 0 else []
        )
    except OSError:
        return []


@pytest.mark.parametrize("first", [False, True], ids=["a process", "the first process"])
def test_a_request_to_end_between_two_runs_starts_nothing(start: Start, first: bool) -> None:
    before = _alone() if first else []
    if first and not before:
        pytest.skip("namespaces are not allowed here")
    process = start(*before, *RESCUE, "--back-off", "600", "--", *f"vllm serve {MODEL} --max-model-len 131072".split())
    _until(process.stderr, b"restarting in")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]) if first else process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert out.count(b"stand-in:") == 1
    assert b"SIGTERM: no server is running, and none will be started" in err


def test_output_that_cannot_be_written_ends_nothing(start: Start) -> None:
    """A full disk. The server serves, and ends when it is told to."""
    port = free_port()
    with open("/dev/full", "wb") as full:
        process = start(
            *RESCUE, "--", *f"vllm serve {MODEL} --max-model-len 8192 --port {port}".split(), stdout=full.fileno()
        )
        said = _until(process.stderr, b"ready after")
        assert b"the server's output cannot be passed on (No space left on device)" in said
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S).status == 200
        process.send_signal(signal.SIGTERM)
        assert b"SIGTERM passed on" in _until(process.stderr, b"passed on")
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
        assert (
            start(*RESCUE, "--", "sh", "-c", "exit 7", stdout=full.fileno(), stderr=full.fileno()).wait(PATIENCE_S) == 7
        )


def test_a_reader_that_does_not_block_gets_all(start: Start) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETFL, fcntl.fcntl(writer, fcntl.F_GETFL) | os.O_NONBLOCK)
    process = start(*RESCUE, "--", "sh", "-c", "head -c 300000 /dev/zero", stdout=writer)
    os.close(writer)
    with open(reader, "rb") as stream:
        assert len(stream.read()) == 300_000
    assert process.wait(PATIENCE_S) == 0


def test_what_was_there_before_is_left_alone(start: Start) -> None:
    """An entry point that starts a helper and then becomes the supervisor."""
    script = f"sleep 1000 & echo $!; exec {' '.join(RESCUE)} -- sh -c 'exit 3'"
    process = start("sh", "-c", script)
    sidecar = int(_until(process.stdout, b"\n"))
    assert process.wait(PATIENCE_S) == 3
    assert _state(sidecar) not in ("", "Z")
    os.kill(sidecar, signal.SIGTERM)


def test_a_server_does_not_outlive_a_supervisor_that_is_killed(start: Start) -> None:
    process = start(*RESCUE, "--", "sh", "-c", "sleep 1000 & echo $!; wait")
    child = int(_until(process.stdout, b"\n"))
    process.kill()
    process.wait(PATIENCE_S)
    _gone(child)


def test_a_misspelt_key_is_corrected_and_never_shown(start: Start) -> None:
    port = free_port()
    command = f"vllm serve {MODEL} --max-model-len 8192 --api-keyy sk-private-1 --port {port}"
    process = start(*RESCUE, "--back-off", "0", "--", *command.split(), STAND_IN_KNOWS_NOT="--api-keyy")
    said = _until(process.stderr, b"the command to keep")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert out.decode().splitlines()[-1] == f"stand-in: {command.removeprefix('vllm ').replace('keyy', 'key')}"
    ours = [line for line in (said + err).decode().splitlines() if line.startswith("holdfast rescue:")]
    assert not [line for line in ours if "sk-private-1" in line]
    assert "check before the start: vllm has no --api-keyy; did you mean --api-key?" in "\n".join(ours), (
        "words are no keys"
    )
    kept = f'vllm serve {MODEL} --max-model-len 8192 --api-key "${{API_KEY:?}}" --port {port}'
    told = [line for line in ours if "the command to keep" in line]
    assert [line.endswith(f"the command to keep: {kept}") for line in told] == [True], "once, as a shell takes it"
