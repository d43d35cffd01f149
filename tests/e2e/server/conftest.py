"""Servers of a fake engine (tests/support/fake_server.py): one for each test that wants its own, and shared ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fake_server import FakeServer

from holdfast.engine.fake import FakeEngine

Launch = Callable[..., FakeServer]


@pytest.fixture
def launch() -> Iterator[Launch]:
    """launch(engine, wait=True, **settings) -> FakeServer"""
    running: list[FakeServer] = []

    def start(engine: FakeEngine | None = None, *, wait: bool = True, **settings: Any) -> FakeServer:
        server = FakeServer(engine or FakeEngine(), settings)
        running.append(server)
        return server.start(wait=wait)

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def server(launch: Launch) -> FakeServer:
    return launch()


@pytest.fixture(scope="session")
def http() -> Iterator[httpx.Client]:
    """A server shared by all tests that leave no trace on it."""
    shared = FakeServer(FakeEngine(scores=True), {}).start()
    with shared.client() as client:
        yield client
    shared.stop()


@pytest.fixture(scope="session")
def strict() -> Iterator[httpx.Client]:
    """The same with --strict-fields."""
    shared = FakeServer(FakeEngine(), {"strict_fields": True}).start()
    with shared.client() as client:
        yield client
    shared.stop()


@pytest.fixture(scope="module")
def agents() -> Iterator[FakeServer]:
    """A server with a key and with parsers for calls and thoughts; a test sets what its engine says."""
    settings = {"api_key": ("k", "other"), "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    shared = FakeServer(FakeEngine(), settings).start()
    yield shared
    shared.stop()
