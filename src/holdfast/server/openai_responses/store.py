"""What is kept of responses, so that they can be read back, gone on from and cancelled.

In memory only, and bounded three ways: how many, how many bytes of JSON, and for how long nobody has asked for one.
Where one of the first two is passed, whoever holds the most gives way, so that no key's responses are lost to a key
that holds more: of its own first those that another response went on from, which has all of their conversation, then
the one that was not used for longest. A response keeps the whole conversation before it, so that deleting one, or
losing it to the bounds, breaks no other. Whose key made a response is the only one who finds it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.errors import OverloadedError
from holdfast.footprint.cpu import STORED_RESPONSE_BYTES

MOST_RESPONSES = 1024
MOST_IDLE_S = 24 * 3600.0
OWN_BYTES = 1024
"""Counted for each beside its JSON: the objects that hold it."""
ITEM_BYTES = 256
"""Counted for each item of an output: by its id it is found."""


class _Output(msgspec.Struct):
    """Of a response, unread: the rest of it is passed over."""

    output: list[msgspec.Raw]


class _Id(msgspec.Struct):
    id: str


@dataclass(slots=True)
class StoredResponse:
    owner: str
    response: bytes
    """The response object."""
    items: bytes
    """The conversation before it, as a list of items: its own input at the end."""
    task: asyncio.Task[None] | None = None
    """Of one that runs in the background, until it has ended."""
    background: bool = False
    previous: str | None = None
    """The response that it went on from, and whose conversation it has."""
    continued: bool = False
    """Whether another one that is kept went on from it."""
    used_s: float = 0.0
    output_bytes: dict[str, int] = field(init=False)
    """Of each item of the output, by its id."""

    def __post_init__(self) -> None:
        self.output_bytes = {msgspec.json.decode(item, type=_Id).id: len(item) for item in self._output()}

    @property
    def size_bytes(self) -> int:
        return len(self.response) + len(self.items) + OWN_BYTES + ITEM_BYTES * len(self.output_bytes)

    @property
    def conversation_bytes(self) -> int:
        return len(self.items) + sum(self.output_bytes.values())

    def conversation(self) -> list[dict[str, Any]]:
        """All that was said, the response itself at the end."""
        return [*msgspec.json.decode(self.items), *map(msgspec.json.decode, self._output())]

    def output_items(self, wanted: Collection[str]) -> dict[str, dict[str, Any]]:
        """Of the output those that are wanted, by their ids; nothing else is read."""
        pairs = zip(self.output_bytes, self._output(), strict=True)
        return {name: msgspec.json.decode(item) for name, item in pairs if name in wanted}

    def _output(self) -> list[msgspec.Raw]:
        return msgspec.json.decode(self.response, type=_Output).output


@dataclass
class ResponseStore:
    most: int = MOST_RESPONSES
    most_bytes: int = STORED_RESPONSE_BYTES
    most_idle_s: float = MOST_IDLE_S
    clock: Callable[[], float] = time.monotonic
    size_bytes: int = 0
    closed: bool = False
    _stored: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    """The least recently used first."""
    _places: dict[str, str] = field(default_factory=dict)
    """Of items of outputs: in which response each is."""

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """In place of what is kept under this id. One that is larger than all that may be kept is not."""
        self.remove(response_id)
        if stored.size_bytes > self.most_bytes:
            return
        stored.used_s = self.clock()
        self._stored[response_id] = stored
        self._places.update(dict.fromkeys(stored.output_bytes, response_id))
        self.size_bytes += stored.size_bytes
        before = self._stored.get(stored.previous or "")
        if before is not None and before.owner == stored.owner:
            before.continued = True
        self._make_room()

    def check_room(self, size_bytes: int, owner: str) -> None:
        """For one more in the background: those that run are never dropped. One key's may fill what nobody else uses,
        and otherwise an equal share."""
        running = [one for one in self._stored.values() if one.task is not None]
        running_bytes = sum(one.size_bytes for one in running)
        full = len(running) >= self.most or running_bytes + size_bytes > self.most_bytes
        own_bytes = size_bytes + sum(one.size_bytes for one in running if one.owner == owner)
        others = [one for one in self._stored.values() if one.owner != owner]
        share_bytes = self.most_bytes // (1 + len({one.owner for one in others}))
        crowding = own_bytes > max(share_bytes, self.most_bytes - sum(one.size_bytes for one in others))
        if full or crowding:
            raise OverloadedError(
                "too many responses run in the background",
                needed=f"at most {self.most} with {share_bytes if crowding else self.most_bytes} bytes of conversation",
                found=f"{len(running)} with {own_bytes if crowding else running_bytes} bytes",
                fix="try again later, or leave background out",
            )

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        self._make_room()
        found = self._stored.get(response_id)
        if found is None or found.owner != owner:
            return None
        found.used_s = self.clock()
        self._stored.move_to_end(response_id)
        return found

    def find_items(self, item_ids: Iterable[str], owner: str) -> dict[str, StoredResponse]:
        """Which of these items there are: each with the response that has it in its output."""
        found = {}
        for item_id in item_ids:
            stored = self._stored.get(self._places.get(item_id, ""))
            if stored is not None and stored.owner == owner:
                found[item_id] = stored
        for response_id in {self._places[item_id] for item_id in found}:
            self.get(response_id, owner)  # It was used.
        return found

    def remove(self, response_id: str) -> StoredResponse | None:
        found = self._stored.pop(response_id, None)
        if found is not None:
            self.size_bytes -= found.size_bytes
            for item_id in found.output_bytes:
                self._places.pop(item_id, None)
        return found

    def close(self) -> None:
        """Ends what runs in the background."""
        self.closed = True
        for stored in self._stored.values():
            if stored.task is not None:
                stored.task.cancel()

    def _make_room(self) -> None:
        old_s = self.clock() - self.most_idle_s
        for response_id, stored in [*self._stored.items()]:
            if stored.used_s > old_s:
                break  # All behind it were used later.
            if stored.task is None:
                self.remove(response_id)
        while len(self._stored) > self.most and self._drop_one(lambda stored: 1):
            pass
        while self.size_bytes > self.most_bytes and self._drop_one(lambda stored: stored.size_bytes):
            pass

    def _drop_one(self, weight: Callable[[StoredResponse], int]) -> bool:
        """Of whoever holds the most by `weight`, and has any that may go."""
        held: Counter[str] = Counter()
        for stored in self._stored.values():
            held[stored.owner] += weight(stored)
        idle = [(response_id, stored) for response_id, stored in self._stored.items() if stored.task is None]
        if not idle:
            return False
        owner = max({stored.owner: None for _, stored in idle}, key=lambda name: held[name])
        own = [(response_id, stored) for response_id, stored in idle if stored.owner == owner]
        chosen = next((pair for pair in own if pair[1].continued), own[0])
        self.remove(chosen[0])
        return True
