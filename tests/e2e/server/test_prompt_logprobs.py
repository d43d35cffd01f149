"""What is told of prompts: no request makes the front larger than the plan says, nor keeps others from going on."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from deadlines import PATIENCE_S

from holdfast.engine.fake import FakeEngine
from holdfast.engine.fake.tokenizer import VOCABULARY
from holdfast.errors import OverloadedError
from holdfast.footprint.cpu import TOLD_ENTRIES, TOLD_ENTRY_BYTES
from holdfast.records import Logprob
from holdfast.server.request.logprob_budget import LogprobBudget
from holdfast.server.response.logprobs import CompletionLogprobsWriter, PromptLogprobs

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KIND = 20
LONGEST = TOLD_ENTRIES // (KIND + 1)
"""Tokens of a prompt that may be told with so many each."""

SERVER = """
import asyncio
from holdfast.engine.fake import FakeEngine, say
from holdfast.server.app import create_app
from holdfast.server.run import bind, serve
from holdfast.server.settings import ServerSettings

engine = FakeEngine(say("x"), max_model_len=10_000_000)
engine._look_up = lambda prompt, salt: 0  # Its cache in miniature keeps every prefix.
listener = bind("127.0.0.1", 0)
app = create_app(engine, ServerSettings(served_model_names=("fake",)))
ready = lambda: print(listener.getsockname()[1], flush=True)
asyncio.run(serve(app, engine, listener=listener, on_ready=ready, handle_signals=False))
"""


def test_the_whole_vocabulary_where_the_server_allows_it(launch: Any) -> None:
    body = {"prompt": "abc", "max_tokens": 1, "prompt_logprobs": -1}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "prompt_logprobs": -1}
    with httpx.Client(base_url=launch(max_logprobs=-1, vocabulary=600).url, timeout=PATIENCE_S) as http:
        for path, asked in ((COMPLETIONS, body), (CHAT, chat)):
            told = http.post(path, json=asked).json()
            assert len((told.get("prompt_logprobs") or told["choices"][0]["prompt_logprobs"])[1]) == VOCABULARY
        for wrong in ({"prompt": ["a", "b"]}, {"prompt": "a" * 9000}, {"prompt_logprobs": 21}, {"logprobs": -1}):
            assert http.post(COMPLETIONS, json={**body, **wrong}).status_code == 400
    with httpx.Client(base_url=launch().url, timeout=PATIENCE_S) as http:
        assert http.post(COMPLETIONS, json=body).json()["error"]["param"] == "prompt_logprobs"


@pytest.fixture
def front() -> Iterator[tuple[int, str]]:
    """Pid and URL of a server in a process of its own, whose memory is nobody else's."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None
    yield process.pid, f"http://127.0.0.1:{int(process.stdout.readline())}"
    process.kill()
    process.communicate()


def held_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def read_through(http: httpx.Client, body: dict[str, object]) -> tuple[int, bytes]:
    """Length and end of an answer that is too large to be kept."""
    length, tail = 0, b""
    with http.stream("POST", COMPLETIONS, json=body) as answer:
        assert answer.status_code == 200, answer.read()[:1000]
        for piece in answer.iter_raw():
            length += len(piece)
            tail = (tail + piece)[-1000:]
        assert length == int(answer.headers["content-length"])
    return length, tail


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("echoed", [False, True])
def test_the_largest_request_stays_within_the_plan_while_others_go_on(front: tuple[int, str], echoed: bool) -> None:
    pid, url = front
    asked = {"echo": True, "logprobs": KIND} if echoed else {"prompt_logprobs": KIND}
    tokens = LONGEST // 2 if echoed else LONGEST
    begun, stopped = threading.Event(), threading.Event()

    def follow() -> None:
        endless = {"prompt": "a", "max_tokens": 1_000_000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + COMPLETIONS, json=endless, timeout=PATIENCE_S) as answer:
            for _ in answer.iter_lines():
                begun.set()
                if stopped.is_set():
                    return

    def tokens_sent(http: httpx.Client) -> float:
        """Of all answers. By the server's count: how soon the follower reads them is another matter."""
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total{"))

    with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
        read_through(http, {"prompt": [97] * 50, "max_tokens": 1, **asked})
        before_bytes = held_bytes(pid, "VmRSS")
        follower = threading.Thread(target=follow)
        follower.start()
        assert begun.wait(PATIENCE_S)
        before = tokens_sent(http)
        length, tail = read_through(http, {"prompt": [97] * tokens, "max_tokens": 1, "n": 8, **asked})
        meanwhile = tokens_sent(http) - before - 8
        grown_bytes = held_bytes(pid, "VmHWM") - before_bytes
        stopped.set()
        follower.join(PATIENCE_S)
    assert json.loads(b"{" + tail[tail.rindex(b'"usage"') :])["usage"]["completion_tokens"] == 8
    assert length > 8 * tokens * KIND * 50
    assert grown_bytes < TOLD_ENTRIES * TOLD_ENTRY_BYTES < length
    # It is told in hundreds of pieces, and each leaves a turn to the others.
    assert meanwhile > 100


@pytest.mark.parametrize(
    ("body", "field", "needed"),
    [
        ({"prompt": [5] * (LONGEST + 1), "prompt_logprobs": KIND, "n": 32}, "prompt_logprobs", (LONGEST + 1) * 21),
        ({"prompt": [[5] * 5000] * 3, "prompt_logprobs": KIND}, "prompt_logprobs", 15_000 * 21),
        ({"prompt": [5] * 7000, "echo": True, "logprobs": KIND}, "logprobs", 7000 * 21 * 2),
        ({"prompt": [5] * 13_000, "echo": True, "logprobs": KIND, "stream": True}, "logprobs", 13_000 * 21),
        ({"messages": [{"role": "user", "content": "x" * LONGEST}], "prompt_logprobs": KIND}, "prompt_logprobs", None),
    ],
)
def test_more_than_there_is_room_for_is_refused_with_numbers(launch, body, field, needed) -> None:
    server = launch(FakeEngine(max_model_len=100_000))
    with server.client() as http:
        refused = http.post(CHAT if "messages" in body else COMPLETIONS, json=body)
        assert refused.status_code == 400, refused.text[:500]
        error = refused.json()["error"]
        assert error["param"] == field
        assert error["holdfast"]["code"] == "HF300"
        assert error["holdfast"]["found"] == f"at most {TOLD_ENTRIES}"
        if needed is not None:
            assert error["holdfast"]["needed"] == f"{needed} logprobs"
        # What the fix says is taken.
        fewer = int(error["holdfast"]["fix"].split("at most ")[1].split(",")[0])
        again = http.post(
            CHAT if "messages" in body else COMPLETIONS, json={**body, "n": 1, field: fewer, "max_tokens": 1}
        )
        assert again.status_code == 200, again.text[:500]
    # Of what was refused, the engine heard nothing.
    assert {params.prompt_logprobs for _, params in server.engine.received} == {fewer}


async def test_room_is_given_in_the_order_of_asking() -> None:
    room, order = LogprobBudget(10, most_waiting=2), []

    async def hold(name: str, entries: int, until: asyncio.Event) -> None:
        async with room.hold(entries):
            order.append(name)
            await until.wait()

    first, rest = asyncio.Event(), asyncio.Event()
    tasks = [asyncio.create_task(hold("first", 8, first))]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(hold("large", 9, rest)))
    await asyncio.sleep(0)
    small = asyncio.create_task(hold("small", 1, rest))
    await asyncio.sleep(0)
    # One that would fit stands behind one that does not; a third finds the queue full, and who wants nothing waits not.
    assert order == ["first"]
    with pytest.raises(OverloadedError):
        await hold("late", 1, rest)
    rest.set()
    await hold("nothing", 0, rest)
    rest.clear()
    first.set()
    await asyncio.gather(tasks[0])
    await asyncio.sleep(0)
    assert order == ["first", "nothing", "large", "small"]
    rest.set()
    await asyncio.gather(*tasks, small)
    assert room.free == 10


async def test_who_leaves_while_waiting_leaves_the_room_to_others() -> None:
    room = LogprobBudget(10)
    holding = room.hold(10)
    await holding.__aenter__()

    async def pass_through(entries: int) -> None:
        async with room.hold(entries):
            pass

    leaving, told, staying = (asyncio.create_task(pass_through(size)) for size in (10, 5, 5))
    await asyncio.sleep(0)
    leaving.cancel()
    await holding.__aexit__(None, None, None)  # Before the one that leaves has noticed.
    told.cancel()  # Just when its turn has come.
    await asyncio.wait_for(staying, PATIENCE_S)
    assert [leaving.cancelled(), told.cancelled()] == [True, True]
    assert room.free == 10


async def test_pieces_make_the_whole() -> None:
    """However it comes: every entry once and in order, no minus infinity, offsets that go on in the answer."""
    entries = [{7: Logprob(-float("inf"), 9, "é\n"), 8: Logprob(-0.5, 1, "b")}, *[{9: Logprob(-1.0, 1, "ccc")}] * 700]
    told = PromptLogprobs(listed=True, echoed_first="aa")
    await told.take([None])
    await told.take(entries)
    await told.take([])
    assert told.listed is not None
    listed = json.loads(b"".join(told.listed.behind()))
    assert len(listed) == 702
    assert listed[:2] == [
        None,
        {
            "7": {"logprob": -9999.0, "rank": 9, "decoded_token": "é\n"},
            "8": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
        },
    ]
    answer = CompletionLogprobsWriter()
    answer.add([{5: Logprob(-2.0, 1, "end")}])
    shown = json.loads(b"".join(answer.behind(told.echoed)))
    assert [len(column) for column in shown.values()] == [703] * 4
    assert shown["tokens"][:3] == ["aa", "é\n", "ccc"]
    assert shown["token_logprobs"][:2] == [None, -9999.0]
    # What was chosen is first, as in vLLM, though others are likelier.
    assert [*shown["top_logprobs"][1].items()] == [("é\n", -9999.0), ("b", -0.5)]
    assert shown["text_offset"][:4] == [0, 2, 4, 7]
    assert shown["text_offset"][-1] == 4 + 3 * 700
