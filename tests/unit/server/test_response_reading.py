"""What is stored of a conversation counts as if it had been sent, and is read once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.engine.fake import FakeEngine
from holdfast.errors import RequestError
from holdfast.server.openai_responses import read as module
from holdfast.server.openai_responses.store import ResponseStore, StoredResponse
from holdfast.server.request.workers.template_workers import TemplateWorkers
from holdfast.server.request.workers.tokenize_pool import TokenizePool
from holdfast.server.settings import ServerSettings


class Asked(Exception):
    """What a chat would have been made of."""


def said(name: str, text: str) -> dict[str, Any]:
    return {"type": "message", "id": name, "role": "assistant", "content": [{"type": "output_text", "text": text}]}


async def read(monkeypatch: pytest.MonkeyPatch, store: ResponseStore, most_bytes: int = 4000, **body: Any) -> Any:
    """The chat, and the size that it is told to have."""

    async def chat_request(chat: dict[str, Any], size_bytes: int, *rest: Any, **others: Any) -> None:
        raise Asked(chat, size_bytes)

    monkeypatch.setattr(module, "chat_request", chat_request)
    settings = ServerSettings(served_model_names=("fake",), max_body_bytes=most_bytes)
    raw = msgspec.json.encode(body)
    with pytest.raises(Asked) as caught:
        await module.read_response_request(
            raw, FakeEngine(), settings, workers=TemplateWorkers(), pool=TokenizePool(), store=store
        )
    chat, size_bytes = caught.value.args
    return chat, size_bytes - len(raw)


@pytest.fixture
def store() -> ResponseStore:
    made = ResponseStore()
    items = msgspec.json.encode([{"type": "message", "id": "msg_0", "role": "user", "content": "q" * 1000}])
    response = msgspec.json.encode({"tools": ["t" * 9000], "output": [said("msg_1", "a" * 500), said("msg_2", "b")]})
    made.put("resp_1", StoredResponse(owner="", response=response, items=items))
    return made


async def test_the_size_of_a_conversation_is_that_of_all_of_it(monkeypatch, store):
    chat, beside = await read(monkeypatch, store, input="hello", previous_response_id="resp_1")
    assert [one["role"] for one in chat["messages"]] == ["user", "assistant", "user"]
    assert 1500 < beside < 2000
    chat, beside = await read(monkeypatch, store, input=[{"id": "msg_1"}, {"type": "item_reference", "id": "msg_2"}])
    assert chat["messages"] == [{"role": "assistant", "content": "a" * 500 + "\nb"}]
    assert 500 < beside < 800
    assert (await read(monkeypatch, store, input="hello"))[1] == 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": "hello", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"id": "msg_1"}]}, "input"),
    ],
)
async def test_it_is_no_larger_than_a_body(monkeypatch, store, body, field):
    with pytest.raises(RequestError, match="too large") as caught:
        await read(monkeypatch, store, 500, **body)
    assert (caught.value.field, caught.value.needed) == (field, "at most 500 bytes of JSON")


async def test_an_item_is_referred_to_once(monkeypatch, store):
    with pytest.raises(RequestError, match=r"input\[2\] refers to 'msg_1' again") as caught:
        await read(monkeypatch, store, input=[{"id": "msg_1"}, {"id": "msg_2"}, {"id": "msg_1"}])
    assert caught.value.field == "input[2].id"


async def test_a_response_is_read_once_for_all_of_its_items(monkeypatch, store):
    reads = []
    true_read = StoredResponse._output
    monkeypatch.setattr(StoredResponse, "_output", lambda stored: reads.append(stored) or true_read(stored))
    await read(monkeypatch, store, input=[{"id": "msg_1"}, {"id": "msg_2"}])
    assert len(reads) == 1
