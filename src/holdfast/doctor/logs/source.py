"""The bytes of a log as UTF-8, block by block: a file, gzip, standard input, UTF-16 or UTF-32, in bounded memory.

Other readers of logs (the bundle) use it too. Splits no lines.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO

from holdfast.errors import ConfigurationError
from holdfast.units import shorten

BLOCK_BYTES = 1024 * 1024
UNREADABLE = "HFD90"
_GZIP_START = b"\x1f\x8b"
_GZIP = 31
"""zlib's word for a stream with a gzip header."""
_PACKED = {
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc {0} | holdfast doctor -"),
    b"\xfd7zXZ\x00": ("xz", "xz -dc {0} | holdfast doctor -"),
    b"BZh": ("bzip2", "bzip2 -dc {0} | holdfast doctor -"),
    b"\x04\x22\x4d\x18": ("lz4", "lz4 -dc {0} | holdfast doctor -"),
    b"PK\x03\x04": ("zip", "unzip -p {0} | holdfast doctor -"),
}
"""By their first bytes: how they are unpacked by hand."""
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
    (codecs.BOM_UTF8, "utf-8"),
)
"""The longer first: two of them begin alike."""
_LOOKED_BYTES = 4096
_ZEROS_SHARE = 0.4
"""Of every second byte, from which on a text is taken for UTF-16 without its mark."""
_HOLE = re.compile(rb"\0{8,}")
"""Of a file that was emptied while its writer went on where it was (logrotate's copytruncate): in no encoding."""


class LogSource:
    """A file, a gz file (however it is called), or `-`: standard input. Read once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.torn = False
        """Its compressed data ends before its end: only a part was read."""

    def blocks(self) -> Iterator[bytes]:
        """In UTF-8. Raises a ConfigurationError (HFD90)."""
        with contextlib.ExitStack() as stack:
            try:
                own = self._name == "-"
                stream: IO[bytes] = sys.stdin.buffer if own else stack.enter_context(Path(self._name).open("rb"))
                raw = iter(lambda: stream.read(BLOCK_BYTES), b"")
                first = next(raw, b"")
                whole = chain([first], raw)
                _refuse_packed(self._name, first)
                yield from as_utf8(self._inflated(whole) if first.startswith(_GZIP_START) else whole)
            except (OSError, zlib.error) as error:
                raise _unreadable(self._name, error) from error

    def from_end(self) -> Iterator[bytes] | None:
        """Its blocks again, the last first; None where that cannot be: standard input, a pipe, gz, no UTF-8."""
        path = Path(self._name)
        try:
            if self._name == "-" or not path.is_file():
                return None
            with path.open("rb") as file:
                first = file.read(_LOOKED_BYTES)
        except OSError as error:
            raise _unreadable(self._name, error) from error
        encoding, mark = encoding_of(first)
        if first.startswith(_GZIP_START) or encoding != "utf-8":
            return None
        return self._from_end(path, mark)

    def _from_end(self, path: Path, begin: int) -> Iterator[bytes]:
        try:
            with path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                while end > begin:
                    start = max(begin, end - BLOCK_BYTES)
                    file.seek(start)
                    yield file.read(end - start)
                    end = start
        except OSError as error:
            raise _unreadable(self._name, error) from error

    def _inflated(self, compressed: Iterable[bytes]) -> Iterator[bytes]:
        """Block by block, so that no huge file is ever held; of one that was cut short or spoiled, what there is."""
        unpack = zlib.decompressobj(_GZIP)
        whole = False
        """The present member has ended, or has not begun."""
        for piece in compressed:
            rest = piece
            while rest:
                try:
                    yield unpack.decompress(rest, BLOCK_BYTES)
                except zlib.error:
                    self.torn = True
                    return
                rest, whole = unpack.unconsumed_tail, unpack.eof
                if unpack.eof:
                    rest, unpack = unpack.unused_data.lstrip(b"\0"), zlib.decompressobj(_GZIP)
        self.torn = not whole


def blocks(name: str) -> Iterator[bytes]:
    """UTF-8 of a log, however it lies there. Raises a ConfigurationError (HFD90)."""
    return LogSource(name).blocks()


def as_utf8(raw: Iterable[bytes]) -> Iterator[bytes]:
    """The same text in UTF-8, without the mark at its start; what is no text stays as it is."""
    pieces = iter(raw)
    first = next(pieces, b"")
    encoding, mark = encoding_of(first)
    first = first[mark:]
    if encoding == "utf-8":
        for piece in chain([first], pieces):
            yield piece.replace(b"\0", b"")
        return
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    for piece in chain([first], pieces):
        yield decoder.decode(piece).encode("utf-8", "replace")
    yield decoder.decode(b"", final=True).encode("utf-8", "replace")


def encoding_of(start: bytes) -> tuple[str, int]:
    """By the first bytes of a text, and how many of them are its mark: PowerShell's `>` writes UTF-16."""
    for mark, encoding in _MARKS:
        if start.startswith(mark):
            return encoding, len(mark)
    looked = _HOLE.sub(b"", start)[:_LOOKED_BYTES]
    zeros = [looked[at::2].count(0) for at in (0, 1)]
    most, least = max(zeros), min(zeros)
    if len(looked) < 4 or most < _ZEROS_SHARE * (len(looked) // 2):
        return "utf-8", 0
    wide = least >= _ZEROS_SHARE * (len(looked) // 2) / 2
    little = looked[0] != 0
    return ("utf-32-" if wide else "utf-16-") + ("le" if little else "be"), 0


def _unreadable(source: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"the log {shorten(source)} cannot be read",
        code=UNREADABLE,
        needed="a file, or - for standard input",
        found=str(error),
        field="log",
        fix="holdfast doctor server.log; kubectl logs POD | holdfast doctor -",
    )


def _refuse_packed(source: str, first: bytes) -> None:
    for start, (name, command) in _PACKED.items():
        if first.startswith(start):
            told = command.format("LOG" if source == "-" else source)
            raise ConfigurationError(
                f"the log {shorten(source)} is compressed with {name}",
                code=UNREADABLE,
                needed="text or gzip",
                found=name,
                field="log",
                fix=told,
            )
