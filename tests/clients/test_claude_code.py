"""Claude Code itself, as `claude -p`, with its whole prompt and its tools: against a scripted engine, which calls one
of them and then tells what it was answered, and against the built-in model. No network beside the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deadlines import PATIENCE_S

from holdfast.engine.fake import FakeEngine, echo, say
from holdfast.server.app import create_app
from holdfast.server.run import bind, serve
from holdfast.server.settings import ServerSettings

NOTE = "forty-seven apples"
CALL = '<tool_call>\n{{"name": "Read", "arguments": {{"file_path": "{path}"}}}}\n</tool_call>'
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def claude(npm_environment: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """claude(URL, PROMPT, more words): what it printed at its end."""
    installed = npm_environment("claude-code") / "node_modules" / "@anthropic-ai" / "claude-code"
    subprocess.run(["node", "install.cjs"], cwd=installed, check=True)  # Where npm was told to run no scripts.
    home, project = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("project")
    (project / "note.txt").write_text(NOTE)

    def run(url: str, prompt: str, *words: str) -> dict[str, Any]:
        variables = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": "any",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1000",
        }
        command = [str(installed / "bin" / "claude.exe"), "-p", prompt, "--output-format", "json", *words]
        ended = subprocess.run(
            command, cwd=project, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=2 * PATIENCE_S,
        )  # fmt: skip
        assert ended.stdout, ended.stderr
        return dict(json.loads(ended.stdout))

    return run


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[FakeEngine, str]]:
    """A server with parsers of calls and thoughts, and the engine behind it."""
    engine, listener, ready = FakeEngine(max_model_len=500_000), bind("127.0.0.1", 0), threading.Event()
    settings = ServerSettings(
        served_model_names=("fake",), tool_call_parser="hermes", reasoning_parser="qwen3", any_model_name=True
    )
    ends: list[Callable[[], object]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(
            serve(create_app(engine, settings), engine, listener=listener, on_ready=ready.set, handle_signals=False)
        )
        ends.append(lambda: loop.call_soon_threadsafe(task.cancel))
        with contextlib.suppress(asyncio.CancelledError):
            await task

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE_S)
    yield engine, f"http://127.0.0.1:{listener.getsockname()[1]}"
    ends[0]()
    thread.join(PATIENCE_S)


def test_it_runs_the_tool_that_is_called_and_sends_its_result(claude, scripted) -> None:
    engine, url = scripted

    def script(token_ids: list[int]) -> list[int]:
        last = bytes(echo(token_ids)).decode()
        if NOTE in last:
            return list(f"It says: {last}".encode())
        prompt = engine.tokenizer.decode(token_ids)
        folder = prompt.split("working directory: ")[1].splitlines()[0]
        return list(f"<think>I look.</think>I read it.{CALL.format(path=f'{folder}/note.txt')}".encode())

    engine.script = script
    ended = claude(url, "What does note.txt say?")
    assert (ended["is_error"], ended["num_turns"], ended["stop_reason"]) == (False, 2, "end_turn")
    assert ended["result"].startswith("It says: ")
    assert NOTE in ended["result"]
    # What was said before is found in the prefix cache, whatever the client puts in front of it.
    assert ended["usage"]["cache_read_input_tokens"] > 10_000


def test_a_prompt_beyond_the_context_is_understood_as_one(claude, scripted) -> None:
    engine, url = scripted
    engine.script = say("hello")
    engine.max_model_len = 5_000
    try:
        ended = claude(url, "Say hello.")
    finally:
        engine.max_model_len = 500_000
    assert ended["is_error"]
    assert "prompt is too long" in ended["result"].lower()


def test_the_built_in_model_answers(claude, module_server) -> None:
    server = module_server("smollm2", "--kv-cache-memory-bytes", "256MiB", "--max-model-len", "4096").wait_ready()
    words = ["--system-prompt", "You are a helpful assistant.", "--tools", ""]
    ended = claude(server.url, "What is the capital of France? Answer in one sentence.", *words)
    assert not ended["is_error"], ended["result"]
    assert ended["usage"]["output_tokens"] > 0
