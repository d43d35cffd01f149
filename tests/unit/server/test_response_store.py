"""What is kept of responses is bounded by number, bytes and time, and belongs to one key."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from holdfast.errors import OverloadedError
from holdfast.server.openai_responses.store import OWN_BYTES, ResponseStore, StoredResponse


def made(text: str = "a", owner: str = "", **members) -> StoredResponse:
    response = msgspec.json.encode({"output": [{"id": f"msg_{text}", "text": text}]})
    return StoredResponse(owner=owner, response=response, items=b'[{"id":"i"}]', **members)


def test_the_least_recently_used_give_way_by_number():
    store = ResponseStore(most=2)
    store.put("a", made())
    store.put("b", made())
    assert store.get("a", "") is not None
    store.put("c", made())
    assert [store.get(name, "") is not None for name in "abc"] == [True, False, True]


def test_and_by_bytes():
    each = made().size_bytes
    store = ResponseStore(most_bytes=3 * each)
    for name in "abcd":
        store.put(name, made())
    assert store.size_bytes == 3 * each
    assert store.get("a", "") is None
    store.put("e", made("x" * 3 * each))  # Larger than all that may be kept.
    assert store.get("e", "") is None
    store.put("d", made("x" * each))  # What is put in place of another counts once.
    assert store.get("d", "") is not None
    assert store.size_bytes <= 3 * each
    for name in "abcd":
        store.remove(name)
    assert store.size_bytes == 0


def test_and_by_time_since_they_were_used():
    now_s = 0.0
    store = ResponseStore(most_idle_s=10, clock=lambda: now_s)
    store.put("a", made())
    store.put("b", made())
    now_s = 6.0
    assert store.get("a", "") is not None
    now_s = 12.0
    assert store.get("b", "") is None
    assert store.get("a", "") is not None


def test_only_their_owner_finds_them():
    store = ResponseStore()
    store.put("a", made("mine", owner="me"))
    assert store.get("a", "you") is None
    assert store.item("msg_mine", "you") is None
    assert store.item("msg_mine", "me") == {"id": "msg_mine", "text": "mine"}
    assert store.item("msg_", "me") is None
    assert [item["id"] for item in store.get("a", "me").conversation()] == ["i", "msg_mine"]


async def test_what_runs_is_never_dropped():
    task = asyncio.create_task(asyncio.sleep(3600))
    store = ResponseStore(most=1)
    store.check_room(OWN_BYTES)
    store.put("a", made(task=task, background=True))
    store.put("b", made())
    assert store.get("a", "") is not None
    with pytest.raises(OverloadedError, match="too many responses"):
        store.check_room(OWN_BYTES)
    store.close()
    with pytest.raises(asyncio.CancelledError):
        await task
