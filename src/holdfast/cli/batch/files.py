"""The two files of a batch: lines in, and answers appended so that a run that was killed can go on.

Owns what a line is, which lines have an answer, and when an answer is safe on disk. Knows nothing of what lines say.

    input    line 1 | line 2 | ...                 read once to count it and to compare, and once to be asked
    output   whole lines, each beginning with the number and the digest of the line it answers | a torn last one
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.units import format_bytes, shorten

UNUSABLE, ANOTHER_BATCH, IN_USE, NOT_WRITTEN = "HF170", "HF171", "HF172", "HF173"

MOST_LINE_BYTES = (16 << 20) + (64 << 10)
"""The largest body a server takes by default, and what stands around it. Longer lines are not even kept."""
PIECE_BYTES = 1 << 20
_BEGINNING = re.compile(rb'\{"id":"batch_req_([1-9][0-9]{0,17})_([0-9a-f]{16})"')
_BEGINNING_BYTES = 64
GOOD_END = b'"error":null}\n'
"""Of an answer that is no refusal."""
ANSWERED, REFUSED = 1, 2
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Some editors begin a file with it; it is no part of the first line."""


@dataclass(frozen=True, slots=True)
class InputLine:
    number: int
    """From 1, as editors count; empty lines count and are not asked."""
    digest: int
    """Of what it says and of the model it is asked of: an answer to something else is not taken for its answer."""
    text: bytes | None
    """None: longer than `MOST_LINE_BYTES`."""

    @property
    def answer_id(self) -> str:
        return f"batch_req_{self.number}_{self.digest:016x}"


def read_lines(path: Path, model: str) -> Iterator[InputLine]:
    """Never holds more than one line."""
    key = blake2b(model.encode(), digest_size=16).digest()
    number = 0
    with path.open("rb") as file:
        while text := file.readline(MOST_LINE_BYTES):
            number += 1
            digest = blake2b(text.rstrip(b"\r\n"), digest_size=8, key=key)
            whole = text.endswith(b"\n") or len(text) < MOST_LINE_BYTES
            piece = text
            while not piece.endswith(b"\n") and (piece := file.readline(PIECE_BYTES)):
                digest.update(piece.rstrip(b"\r\n"))
            text = (text.removeprefix(_BYTE_ORDER_MARK) if number == 1 else text).strip()
            if text:
                yield InputLine(number, int.from_bytes(digest.digest()), text if whole else None)


class Input:
    """A file of lines that can be read again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _said(f"the input {path} cannot be read"):
            if not path.is_file():
                raise ConfigurationError(
                    f"the input {path} is not a file",
                    code=UNUSABLE,
                    needed="a regular file of JSON lines, since it is read twice",
                    found="a folder or a pipe" if path.exists() else "no such file",
                    fix="-i FILE",
                    field="input_file",
                )
            path.open("rb").close()

    def digests(self, model: str) -> array[int]:
        """One for each line, 0 for an empty one: 8 bytes a line."""
        found = array("Q")
        for line in read_lines(self.path, model):
            while len(found) < line.number - 1:
                found.append(0)
            found.append(line.digest)
        return found


class Output:
    """Held by one run at a time. `append` from any number of tasks of one loop; `close` ends it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._gathered: list[bytes] = []
        self._written: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._broken: HoldfastError | None = None
        """Why nothing more is written: what came behind a torn line would be lost with it."""
        self._file = -1
        with _said(f"the output {path} cannot be written"):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._end_bytes = os.fstat(self._file).st_size
        """Of the last line that is whole."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise ConfigurationError(
                f"another run is writing to {path}",
                code=IN_USE,
                fix="wait for it, or choose another file: -o FILE",
                field="output_file",
            ) from error

    def resume(self, digests: array[int]) -> bytearray:
        """Drops a torn last line and returns `ANSWERED` or `REFUSED` at the number of each line that has its answer.
        Raises when the file holds anything but answers to these lines, and changes nothing then."""
        answered = bytearray(len(digests) + 1)
        end_bytes = 0
        with _said(f"the output {self._path} cannot be read"), self._path.open("rb") as file:
            while text := file.readline(PIECE_BYTES):
                beginning, end, length = text[:_BEGINNING_BYTES], text[-len(GOOD_END) :], len(text)
                while not text.endswith(b"\n") and (text := file.readline(PIECE_BYTES)):
                    end, length = (end + text)[-len(GOOD_END) :], length + len(text)
                if not text.endswith(b"\n"):
                    break
                number = self._line_of(beginning, digests)
                if answered[number]:
                    raise self._foreign(f"two responses to line {number}")
                answered[number] = ANSWERED if end == GOOD_END else REFUSED
                end_bytes += length
        os.ftruncate(self._file, end_bytes)
        self._end_bytes = end_bytes
        return answered

    def _line_of(self, beginning: bytes, digests: array[int]) -> int:
        found = _BEGINNING.match(beginning)
        if found is None:
            raise self._foreign(f"a line that begins with {shorten(beginning.decode(errors='replace'), 40)!r}")
        number, digest = int(found[1]), int(found[2], 16)
        if number > len(digests) or digests[number - 1] != digest:
            raise self._foreign(f"a response to a different line {number}, or from another model")
        return number

    def _foreign(self, found: str) -> ConfigurationError:
        return ConfigurationError(
            f"the output {self._path} does not belong to this batch; it was not changed",
            code=ANOTHER_BATCH,
            needed="a new file, or the output of the same input and the same model, to resume",
            found=found,
            fix="choose another file: -o FILE, or remove this one",
            field="output_file",
        )

    async def append(self, line: bytes) -> None:
        """Returns when the line is on disk. Lines that come while others are being written go together; once one
        could not be written, none is."""
        if self._broken is not None:
            raise self._broken
        loop = asyncio.get_running_loop()
        self._gathered.append(line)
        if self._written is None:
            self._written = loop.create_future()
        written = self._written
        if self._writer is None or self._writer.done():
            self._writer = loop.create_task(self._write_gathered())
        # Shielded: whoever leaves early does not take the others' future along.
        await asyncio.shield(written)

    async def _write_gathered(self) -> None:
        while (written := self._written) is not None:
            data = b"".join(self._gathered)
            self._gathered, self._written = [], None
            try:
                if self._broken is None:
                    await asyncio.to_thread(self._write, data)
            except OSError as error:
                self._broken = self._failed(error, len(data))
            if self._broken is not None:
                written.set_exception(self._broken)
                written.exception()  # Looked at: nobody may be left who waits.
            else:
                written.set_result(None)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except OSError:
            # What was written of it is told to nobody as kept. Where even this fails, the next run drops a torn line.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end_bytes)
            raise
        self._end_bytes += len(data)

    def _failed(self, error: OSError, size_bytes: int) -> HoldfastError:
        return HoldfastError(
            f"the output {self._path} cannot be written: {error.strerror}",
            code=NOT_WRITTEN,
            needed=f"space for {format_bytes(size_bytes)}",
            fix="check the disk, then run the same command: it resumes where this run ended",
        )

    async def finish(self) -> None:
        """What was appended is on disk, or whoever waits for it was told."""
        if self._writer is not None:
            await self._writer

    def close(self) -> None:
        os.close(self._file)


@contextlib.contextmanager
def _said(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"{what}: {error.strerror}", code=UNUSABLE, fix="check the file's name and permissions"
        ) from error
