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


def kept(store: ResponseStore) -> set[str]:
    return {name for name in "abcdefg" if any(store.get(name, owner) for owner in ("", "me", "you"))}


def test_whoever_holds_the_most_gives_way():
    each = made().size_bytes
    store = ResponseStore(most_bytes=4 * each)
    store.put("a", made(owner="you"))
    for name in "bcde":
        store.put(name, made(owner="me"))
    assert kept(store) == set("acde")
    store.put("f", made("x" * (each // 2), owner="me"))
    assert kept(store) == set("aef")
    store.put("g", made("x" * (each * 3 // 2), owner="me"))  # Alone more than is left by others.
    assert "a" in kept(store)
    assert store.size_bytes <= 4 * each
    by_number = ResponseStore(most=3)
    by_number.put("a", made("x" * 5000, owner="you"))
    for name in "bcd":
        by_number.put(name, made(owner="me"))
    assert kept(by_number) == set("acd")


def test_those_that_were_gone_on_from_go_first():
    store = ResponseStore(most=3)
    store.put("a", made())
    store.put("b", made())
    store.put("c", made(previous="b"))
    assert store.get("b", "") is not None
    store.put("d", made())
    assert kept(store) == set("acd")
    theirs = ResponseStore(most=3)
    theirs.put("a", made())
    theirs.put("b", made())
    theirs.put("c", made(owner="me", previous="b"))  # Not its own, so nobody's is.
    theirs.put("d", made())
    assert kept(theirs) == set("bcd")


async def test_what_runs_for_one_key_leaves_others_their_share():
    task = asyncio.create_task(asyncio.sleep(3600))
    size = made().size_bytes
    store = ResponseStore(most_bytes=6 * size)
    for name in "abcd":
        store.put(name, made(owner="me", task=task, background=True))
    store.check_room(2 * size, "me")  # Nobody else is there.
    store.put("e", made(owner="you"))
    store.check_room(size, "me")
    with pytest.raises(OverloadedError, match="too many responses"):
        store.check_room(2 * size, "me")
    store.check_room(2 * size, "you")
    task.cancel()


def test_only_their_owner_finds_them():
    store = ResponseStore()
    store.put("a", made("mine", owner="me"))
    assert store.get("a", "you") is None
    assert store.find_items(["msg_mine"], "you") == {}
    found = store.find_items(["msg_", "msg_mine"], "me")
    assert found == {"msg_mine": store.get("a", "me")}
    assert found["msg_mine"].output_items({"msg_mine"}) == {"msg_mine": {"id": "msg_mine", "text": "mine"}}
    store.remove("a")
    assert store.find_items(["msg_mine"], "me") == {}
    store.put("a", made("mine", owner="me"))
    assert [item["id"] for item in store.get("a", "me").conversation()] == ["i", "msg_mine"]


async def test_what_runs_is_never_dropped():
    task = asyncio.create_task(asyncio.sleep(3600))
    store = ResponseStore(most=1)
    store.check_room(OWN_BYTES, "")
    store.put("a", made(task=task, background=True))
    store.put("b", made())
    assert store.get("a", "") is not None
    with pytest.raises(OverloadedError, match="too many responses"):
        store.check_room(OWN_BYTES, "")
    store.close()
    with pytest.raises(asyncio.CancelledError):
        await task
