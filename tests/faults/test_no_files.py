"""A server without file descriptors: its engine comes back when there are some again, and no stream notices."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import zmq.asyncio
from deadlines import PATIENCE_S

from holdfast.config import EngineConfig
from holdfast.engine.process.handle import Child
from holdfast.engine.process.restarts import MAX_FRUITLESS_STARTS
from holdfast.engine.startup.prespawn import EarlyProcess, shortage
from holdfast.errors import CheckpointError, EngineDiedError, NoResourcesError

if not sys.platform.startswith("linux"):
    pytest.skip("prlimit is Linux's", allow_module_level=True)


@contextlib.contextmanager
def no_files() -> Iterator[None]:
    """No further file can be opened by this process while it lasts."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def files_of(server, most: int) -> Iterator[None]:
    """The server may have no more files open than this while it lasts."""
    limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        yield
    finally:
        # Gone, it has no limits, and why it ended is told by what failed before.
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limits)


async def complete(client: httpx.AsyncClient, tokens: int) -> httpx.Response:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return await client.post("/v1/completions", json=body)


@pytest.fixture(scope="module")
def server(module_server, tiny_arguments):
    """Of those tests here that leave it well. It ends in order after all that has happened to it."""
    started = module_server(*tiny_arguments).wait_ready()
    yield started
    assert started.stop() == 0


async def test_pages_answer_without_files(server) -> None:
    """Over connections that are open already; new ones wait until there are files again."""
    before = len(server.log)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        assert (await client.get("/health")).status_code == 200
        with files_of(server, 3):
            for path in ("/health", "/metrics", "/memory", "/v1/models", "/load", "/version"):
                # 503: what a process holds is read from a file.
                assert (await client.get(path)).status_code in ((200, 503) if path == "/memory" else (200,)), path
            assert (await complete(client, 5)).json()["usage"]["completion_tokens"] == 5
    assert "Traceback" not in server.log[before:]


@pytest.mark.parametrize(
    "tries",
    [
        2,
        # More often than an engine that fails for other reasons is tried at all: a dozen seconds of pauses. That tries
        # never end is tested without them in tests/unit/engine/test_client.py.
        pytest.param(MAX_FRUITLESS_STARTS + 1, marks=pytest.mark.long),
    ],
)
async def test_a_restart_without_files_is_tried_until_there_are_some(server, tries: int) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        undisturbed = await complete(client, 40)
        engine, before = psutil.Process(server.engine_pid), len(server.log)
        engine.suspend()  # So that it is not done before there is a lack of files.
        running = asyncio.create_task(complete(client, 40))
        async with asyncio.timeout(PATIENCE_S):
            while server.open_requests() == 0:
                await asyncio.sleep(0.02)
        with files_of(server, 3):
            engine.kill()
            async with asyncio.timeout(PATIENCE_S):
                while server.log[before:].count("could not be started, will retry") < tries:
                    await asyncio.sleep(0.02)
            assert server.process.poll() is None
            assert not running.done()
        answer = await running
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == undisturbed.json()["choices"]
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
    said = server.log[before:]
    assert "Too many open files" in said
    assert "HF411" in said
    assert "Traceback" not in said


async def test_no_socket_is_said(tmp_path: Path) -> None:
    with zmq.asyncio.Context() as context, no_files(), pytest.raises(NoResourcesError, match="will retry") as caught:
        await Child.spawn(context, tmp_path / "0.sock", EngineConfig())
    assert caught.value.code == "HF411"
    assert "ulimit -n" in str(caught.value)


def test_no_process_is_said_and_no_folder_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def popen(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", popen)
    with pytest.raises(NoResourcesError, match="Resource temporarily unavailable"):
        EarlyProcess()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_program_is_no_shortage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(EngineDiedError) as caught:
        EarlyProcess(tmp_path / "0.sock")
    assert not isinstance(caught.value, NoResourcesError)


def test_a_shortage_under_another_error_is_found() -> None:
    error = CheckpointError("a file cannot be read")
    error.__cause__ = OSError(24, "Too many open files")
    assert "ulimit -n" in (shortage(error) or "")
    assert shortage(CheckpointError("torn")) is None
