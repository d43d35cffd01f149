"""What is kept of responses, so that they can be read back, gone on from and cancelled.

In memory only, and bounded three ways: how many, how many bytes of JSON, and for how long nobody has asked for one. The
one that was not used for longest goes first. A response keeps the whole conversation before it, so that deleting one,
or losing it to the bounds, breaks no other. Whose key made a response is the only one who finds it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.errors import OverloadedError
from holdfast.footprint.cpu import STORED_RESPONSE_BYTES

MOST_RESPONSES = 1024
MOST_IDLE_S = 24 * 3600.0
OWN_BYTES = 1024
"""Counted for each beside its JSON: the objects that hold it."""


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
    used_s: float = 0.0

    @property
    def size_bytes(self) -> int:
        return len(self.response) + len(self.items) + OWN_BYTES

    def conversation(self) -> list[dict[str, Any]]:
        """All that was said, the response itself at the end."""
        return [*msgspec.json.decode(self.items), *msgspec.json.decode(self.response)["output"]]


@dataclass
class ResponseStore:
    most: int = MOST_RESPONSES
    most_bytes: int = STORED_RESPONSE_BYTES
    most_idle_s: float = MOST_IDLE_S
    clock: Callable[[], float] = time.monotonic
    size_bytes: int = 0
    _stored: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    """The least recently used first."""

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """In place of what is kept under this id. One that is larger than all that may be kept is not."""
        self.remove(response_id)
        if stored.size_bytes > self.most_bytes:
            return
        stored.used_s = self.clock()
        self._stored[response_id] = stored
        self.size_bytes += stored.size_bytes
        self._make_room()

    def check_room(self, size_bytes: int) -> None:
        """For one more in the background: those that run are never dropped."""
        running = [one.size_bytes for one in self._stored.values() if one.task is not None]
        if len(running) >= self.most or sum(running) + size_bytes > self.most_bytes:
            raise OverloadedError(
                "too many responses run in the background",
                needed=f"at most {self.most} with {self.most_bytes} bytes of conversation",
                found=f"{len(running)} with {sum(running)} bytes",
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

    def item(self, item_id: str, owner: str) -> dict[str, Any] | None:
        """One of the items that responses had as their output."""
        needle = msgspec.json.encode(item_id)
        for response_id, stored in reversed(self._stored.items()):
            if stored.owner != owner or needle not in stored.response:
                continue
            for item in msgspec.json.decode(stored.response)["output"]:
                if item.get("id") == item_id:
                    self.get(response_id, owner)
                    return dict(item)
        return None

    def remove(self, response_id: str) -> StoredResponse | None:
        found = self._stored.pop(response_id, None)
        if found is not None:
            self.size_bytes -= found.size_bytes
        return found

    def close(self) -> None:
        """Ends what runs in the background."""
        for stored in self._stored.values():
            if stored.task is not None:
                stored.task.cancel()

    def _make_room(self) -> None:
        old_s = self.clock() - self.most_idle_s
        for response_id, stored in [*self._stored.items()]:
            full = len(self._stored) > self.most or self.size_bytes > self.most_bytes
            if not full and stored.used_s > old_s:
                return  # All behind it were used later.
            if stored.task is None:
                self.remove(response_id)
