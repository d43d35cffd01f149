"""Lines of a batch asked of the real application with the public fake engine behind it: each gets one answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.batch.files import InputLine, read_lines
from holdfast.cli.batch.runner import BatchRunner
from holdfast.engine.fake import FakeEngine, say
from holdfast.errors import EngineDiedError
from holdfast.server.app import create_app
from holdfast.server.settings import ServerSettings

CHAT = "/v1/chat/completions"


def chat(custom_id: str, content: str = "hello", **options: Any) -> dict[str, Any]:
    body = {"model": "fake", "messages": [{"role": "user", "content": content}], **options}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


class Batch:
    def __init__(self, folder: Path, engine: FakeEngine, **settings: Any) -> None:
        self._folder = folder
        self.engine = engine
        self.answers: list[dict[str, Any]] = []
        self.told: list[bool] = []
        self.lost: list[str] = []
        self._app = create_app(engine, ServerSettings(served_model_names=("fake",), **settings))

    def lines(self, *lines: object) -> list[InputLine]:
        written = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        (self._folder / "in.jsonl").write_bytes(b"\n".join(written))
        return list(read_lines(self._folder / "in.jsonl", "fake"))

    async def run(self, lines: list[InputLine], concurrency: int = 4) -> dict[str | None, dict[str, Any]]:
        async def append(line: bytes) -> None:
            assert line.endswith(b"\n")
            assert line.count(b"\n") == 1
            self.answers.append(json.loads(line))

        await self.engine.start()
        self.runner = BatchRunner(
            self._app,
            self.engine,
            append,
            urls=(CHAT, "/v1/completions"),
            on_answer=self.told.append,
            on_lost=self.lost.append,
        )
        await self.runner.run(iter(lines), concurrency)
        return {answer["custom_id"]: answer for answer in self.answers}


async def test_answers_have_openais_shape(tmp_path) -> None:
    batch = Batch(tmp_path, FakeEngine())
    lines = batch.lines(
        chat("a", "line\nbreaks \u2028 and 🎉"),
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"model": "fake", "prompt": "abc"}},
    )
    answers = await batch.run(lines)
    assert list(answers["a"]) == ["id", "custom_id", "response", "error"]
    assert answers["a"]["id"] == lines[0].answer_id
    assert answers["a"]["error"] is None
    assert answers["a"]["response"]["status_code"] == 200
    assert answers["a"]["response"]["request_id"]
    body = answers["a"]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == "line\nbreaks \u2028 and 🎉"
    assert body["object"] == "chat.completion"
    assert answers["b"]["response"]["body"]["choices"][0]["text"] == "abc"
    assert batch.told == [True, True]


async def test_a_bad_line_gets_an_error_and_loses_nothing(tmp_path) -> None:
    batch = Batch(tmp_path, FakeEngine())
    lines = batch.lines(
        chat("good 1"),
        b'{"custom_id": "torn", "method": ',
        b"[1, 2]",
        b"\xff\xfe",
        b"[" * 50_000,
        {"custom_id": "no body", "method": "POST", "url": CHAT},
        {**chat("extra"), "headers": {}},
        {**chat("get"), "method": "GET"},
        {**chat("elsewhere"), "url": "/v1/audio/speech"},
        {**chat("query"), "url": CHAT + "?a=1"},
        {**chat("number"), "custom_id": 7},
        {**chat("list"), "body": [1]},
        chat("stream", stream=True),
        chat("unsupported", logits_processors=["x"]),
        chat("too long", "x" * 5000),
        chat("other model", model="gpt-9"),
        chat("good 2"),
    )
    await batch.run(lines)
    assert sorted(answer["id"] for answer in batch.answers) == sorted(line.answer_id for line in lines)
    by_line = {answer["id"]: answer for answer in batch.answers}
    statuses = [by_line[line.answer_id]["response"]["status_code"] for line in lines]
    assert statuses == [200] + [400] * 14 + [404] + [200]
    for line in lines[1:-1]:
        answer = by_line[line.answer_id]
        assert answer["error"]["message"] == answer["response"]["body"]["error"]["message"]
        assert answer["error"]["code"] == answer["response"]["body"]["error"]["code"]
        # As vLLM's lines have it.
        assert answer["error"]["error"]["message"] == answer["error"]["message"]
        assert answer["error"]["error"]["code"] == answer["response"]["status_code"]
    named = {answer["custom_id"] for answer in batch.answers}
    assert {"no body", "extra", "get", "elsewhere", "query", "list", "stream", "too long", "good 2"} <= named
    assert by_line[lines[1].answer_id]["custom_id"] is None
    refused = [by_line[line.answer_id]["error"] for line in lines[1:-1]]
    # For these the command exits with 1; a request that is refused is answered.
    assert batch.runner.malformed == [one["code"] for one in refused].count("invalid_line") > 0
    assert "context" in by_line[lines[14].answer_id]["error"]["message"]


async def test_no_more_lines_are_asked_than_allowed(tmp_path) -> None:
    engine = FakeEngine(say("abc"))
    batch = Batch(tmp_path, engine)
    most = 0
    asked = engine.generate

    async def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal most
        stream = await asked(*arguments, **options)
        most = max(most, engine.unfinished)
        return stream

    engine.generate = counted  # type: ignore[method-assign]
    await batch.run(batch.lines(*(chat(str(number)) for number in range(50))), concurrency=3)
    assert most == 3
    assert len(engine.finished) == 50


async def test_a_fault_of_the_server_is_no_answer(tmp_path) -> None:
    def broken(prompt):
        if b"bad" in bytes(token for token in prompt if token < 256):
            raise ZeroDivisionError
        return say("fine")(prompt)

    batch = Batch(tmp_path, FakeEngine(broken))
    answers = await batch.run(batch.lines(chat("a"), chat("b", "bad"), chat("a", top_p=9)))
    assert [answer["custom_id"] for answer in batch.answers] == ["a", "a"]
    assert "b" not in answers
    (lost,) = batch.lost
    assert lost.startswith("line 2 ('b') has no response, status 500: ")
    assert sorted(batch.told) == [False, True]
    assert batch.runner.repeated == 1


async def test_a_full_engine_is_waited_for(tmp_path) -> None:
    """Many answers a line: far more than the engine holds at once."""
    engine = FakeEngine(say("abc"), max_num_seqs=4, max_queued_requests=4)
    batch = Batch(tmp_path, engine, max_queued_requests=4)
    lines = batch.lines(*(chat(str(number), n=8) for number in range(6)), chat("too many", n=9))
    answers = await batch.run(lines, concurrency=7)
    assert answers["too many"]["response"]["status_code"] == 400
    assert [answers[str(number)]["response"]["status_code"] for number in range(6)] == [200] * 6


async def test_an_engine_that_is_given_up_ends_the_run_and_its_lines_stay_unanswered(tmp_path) -> None:
    engine = FakeEngine(say("abcdef"))
    batch = Batch(tmp_path, engine)
    engine.pause()
    running = asyncio.create_task(batch.run(batch.lines(*(chat(str(number)) for number in range(9))), concurrency=2))
    await engine.until(lambda: len(engine.received) == 2)
    engine.die()
    with pytest.raises(EngineDiedError):
        await running
    assert batch.answers == []


async def test_a_run_that_is_stopped_aborts_what_it_asked(tmp_path) -> None:
    engine = FakeEngine(say("abcdef"))
    batch = Batch(tmp_path, engine)
    engine.pause()
    running = asyncio.create_task(batch.run(batch.lines(*(chat(str(number)) for number in range(9))), concurrency=2))
    await engine.until(lambda: len(engine.received) == 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(engine.aborted) == 2
    assert batch.answers == []
