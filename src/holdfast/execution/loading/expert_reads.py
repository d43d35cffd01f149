"""Experts' matrices read before their turn: they are many and small, and a GPU need not wait for each. On a CPU bytes
are read when they are asked for, to where they stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.files import StoredTensor

AHEAD_BYTES, READERS = 32 << 20, 4
"""Of matrices that are read before their turn, and threads that read them."""


class ExpertReads:
    """`ahead`: whether anything is read before its turn."""

    def __init__(self, checkpoint: Checkpoint | None, *, ahead: bool) -> None:
        self._checkpoint, self.ahead_bytes = checkpoint, AHEAD_BYTES if ahead and checkpoint is not None else 0
        self.readers = ThreadPoolExecutor(READERS, "reader")
        self.coming: dict[str, Future[Any]] = {}
        """What is being read, by the checkpoint's names."""

    def read(self, stored: str) -> Any:
        """All bytes of this name of the checkpoint's."""
        assert self._checkpoint is not None
        coming = self.coming.pop(stored, None)
        return self._checkpoint.read(stored) if coming is None else coming.result()

    def read_of_stack(self, part: StoredTensor, expert: int) -> Any:
        """One expert's of a tensor that has those of all."""
        assert self._checkpoint is not None
        coming = self.coming.pop(_of_stack(part, expert), None)
        if coming is not None:
            return coming.result()
        return self._checkpoint.read(part.name, part=expert, parts=part.shape[0])

    def in_turn(self, stored: StoredTensor | None, experts: Sequence[int]) -> Iterator[int]:
        """These experts of a stack, by their numbers; some that come after the one whose turn it is are being read."""
        asked = 0
        for turn, expert in enumerate(experts):
            while asked < len(experts) and self._begin(stored, experts[asked], asked - turn):
                asked += 1
            yield expert
        self.coming.clear()  # Parts that nobody asked for.

    def _begin(self, stored: StoredTensor | None, expert: int, before: int) -> bool:
        """Begins to read one expert's matrix, where there is room for it beside so many that are read before it."""
        if stored is None or not self.ahead_bytes:
            return False
        parts = self.parts(stored, expert)
        if before and (before + 1) * sum(nbytes for nbytes, _ in parts.values()) > self.ahead_bytes:
            return False
        self.coming |= {part: self.readers.submit(read) for part, (_, read) in parts.items()}
        return True

    def parts(self, stored: StoredTensor, expert: int) -> Mapping[str, tuple[int, Callable[[], Any]]]:
        """What holds one expert's matrix, by the names under which it is asked for: how many bytes, and how to read
        them."""
        checkpoint = self._checkpoint
        assert checkpoint is not None
        parts = [stored] if stored.packed is None else list(stored.packed.parts.values())
        alone = [part.name.replace("{expert}", str(expert)) for part in parts if "{expert}" in part.name]
        found = {one: (checkpoint.tensors[one].nbytes, partial(checkpoint.read, one)) for one in alone}
        if stored.packed is not None and not alone:
            for part in parts:
                read = partial(checkpoint.read, part.name, part=expert, parts=part.shape[0])
                found[_of_stack(part, expert)] = part.nbytes // part.shape[0], read
        return found


def _of_stack(part: StoredTensor, expert: int) -> str:  # Called so while it is being read.
    return f"{part.name}[{expert}]"
