"""Streams and metrics pages in the shapes of engines that bench was never driven against here: SGLang, TGI and Ollama.

Written by hand after what these engines send; no byte of them was recorded. What differs: where the usage is, whether a
first event has a role alone, empty texts and nulls in between, a space behind `data:` or none.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from holdfast.bench.client.answers import TimedAnswer, read_answer
from holdfast.bench.client.wire import RawAnswer, StreamConnection
from holdfast.bench.load.prompts import BenchRequest
from holdfast.bench.measure.samples import METRICS
from holdfast.doctor.probe.metrics_page import read_metrics

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
CHUNK = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def choice(delta: dict[str, object], finish: str | None = None, **more: object) -> dict[str, object]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **more}


def sglang(*, every_usage: bool) -> bytes:
    """A role with an empty text first, nulls in each delta, and behind the end a usage without choices. With
    `continuous_usage_stats` each event has the usage until then."""

    def event(choices: list[dict[str, object]], done: int | None) -> bytes:
        usage = None if done is None else {"prompt_tokens": 9, "completion_tokens": done, "total_tokens": 9 + done}
        return b"data: %s\n\n" % json.dumps(CHUNK | {"choices": choices, "usage": usage}).encode()

    nulls = {"reasoning_content": None, "tool_calls": None}
    texts = ["a", "b", "c"]
    return b"".join(
        [
            event(
                [choice({"role": "assistant", "content": "", **nulls}, matched_stop=None)], 0 if every_usage else None
            ),
            *(
                event(
                    [choice({"role": None, "content": text, **nulls}, matched_stop=None)], at if every_usage else None
                )
                for at, text in enumerate(texts, 1)
            ),
            event(
                [choice({"role": None, "content": None, **nulls}, "stop", matched_stop=2)], 3 if every_usage else None
            ),
            event([], 3),
            b"data: [DONE]\n\n",
        ]
    )


def tgi(*, behind_data: bytes, in_the_last: bool) -> bytes:
    """Every event has a role and a text; the usage is in the last with a choice, or behind it, by version."""
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    events = [
        CHUNK
        | {"system_fingerprint": "3.0", "choices": [choice({"role": "assistant", "content": text})], "usage": None}
        for text in ("a", "b")
    ]
    last = CHUNK | {"choices": [choice({"role": "assistant", "content": "c"}, "length")]}
    events += [last | {"usage": usage}] if in_the_last else [last, CHUNK | {"choices": [], "usage": usage}]
    lines = [json.dumps(one, separators=(",", ":")).encode() for one in events]
    return b"".join(b"data:" + behind_data + line + b"\n\n" for line in [*lines, b"[DONE]"])


def ollama(*, zeros: bool) -> bytes:
    """A role with every text, an empty one at the end; asked for a usage, some versions have one of zeros before."""
    nothing = {"usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}} if zeros else {}
    events = [
        CHUNK | {"choices": [choice({"role": "assistant", "content": text}, end)]} | nothing
        for text, end in (("a", None), ("b", None), ("c", None), ("", "stop"))
    ]
    usage = {"usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}}
    events.append(CHUNK | {"choices": []} | usage)
    return b"".join(b"data: %s\n\n" % json.dumps(one).encode() for one in events) + b"data: [DONE]\n\n"


class Transport(asyncio.Transport):
    def write(self, data: bytes) -> None:  # type: ignore[override]
        pass

    def close(self) -> None:
        pass


async def read(body: bytes, piece: int) -> TimedAnswer:
    connection, raw = StreamConnection(), RawAnswer()
    connection.connection_made(Transport())
    asking = asyncio.create_task(connection.ask(b"", raw, timeout_s=60, cancel_after=None))
    await asyncio.sleep(0)
    for at in range(0, len(HEAD + body), piece):
        connection.data_received((HEAD + body)[at : at + piece])
    await asyncio.sleep(0)
    if not asking.done():
        connection.connection_lost(None)
    await asking
    return read_answer(raw, BenchRequest(0, b"", 5), intended_s=raw.sent_s)


@pytest.mark.parametrize(
    "body",
    [
        sglang(every_usage=False),
        sglang(every_usage=True),
        tgi(behind_data=b"", in_the_last=True),
        tgi(behind_data=b" ", in_the_last=False),
        ollama(zeros=False),
        ollama(zeros=True),
    ],
    ids=["sglang", "sglang, usage in each", "tgi", "tgi, usage behind", "ollama", "ollama, zeros before"],
)
async def test_a_stream_in_the_shape_of_another_engine(body: bytes) -> None:
    for piece in (1, 11, 10_000):
        found = await read(body, piece)
        assert found.good
        assert (found.prompt_tokens, found.output_tokens, found.counted) == (9, 3, True)
        assert len(found.gaps) // 4 in (2, 3)  # Three tokens; an end of its own may count as an event.


SGLANG_PAGE = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m"} 3.0
sglang:num_queue_reqs{engine_type="unified",model_name="m"} 2.0
sglang:token_usage{engine_type="unified",model_name="m"} 0.25
sglang:generation_tokens_total{engine_type="unified",model_name="m"} 70.0
"""
TGI_PAGE = """# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 3
tgi_queue_size 2
tgi_request_generated_tokens_sum 70
tgi_request_generated_tokens_count 7
"""


@pytest.mark.parametrize(("name", "page"), [("SGLang", SGLANG_PAGE), ("TGI", TGI_PAGE)])
def test_a_metrics_page_in_the_shape_of_another_engine(name: str, page: str) -> None:
    found = read_metrics(page.encode(), 0.0)
    assert (found.engine or "").casefold() == name.casefold()
    figures = {name: found.figures[name] for name in METRICS if name in found.figures}
    assert (figures["running"], figures["waiting"], figures["tokens"]) == (3, 2, 70)
    assert figures.get("kv_share") == (0.25 if name == "SGLang" else None)
