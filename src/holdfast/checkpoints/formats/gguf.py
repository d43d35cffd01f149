"""Reads the header of a GGUF file, version 2 or 3, little-endian. Touches no tensor data.

A header is foreign input: every count and length is held against the bytes that are left in the file, and
against limits of our own, before anything is allocated for it.

    magic version tensors keys │ key type value ... │ name dims type offset ... │ padding │ tensor data
                                 metadata             tensor infos                ^ data_start
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from holdfast.checkpoints.bounded_files import open_file, refuse_pointer, spell
from holdfast.checkpoints.files import GGUFHeader, StoredTensor
from holdfast.checkpoints.formats.block_layouts import GGUF_LAYOUTS, RETIRED_GGUF_TYPES
from holdfast.errors import CheckpointError
from holdfast.units import MIB, format_bytes, shorten

MAGIC = b"GGUF"
VOCABULARY = "tokenizer."
"""Keys of arrays of texts that only a tokenizer reads."""
MAX_HEADER_BYTES = 512 * MIB
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_NAME_BYTES = 1 << 16
MAX_STRING_BYTES = 64 * MIB
MAX_ARRAY_ELEMENTS = 1 << 22
"""Of all arrays of one header together; a vocabulary with its merges and scores has well under two million."""
MAX_ARRAY_DEPTH = 3
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = MIB

_CHUNK_BYTES = 4 * MIB
_UINT32, _UINT64 = struct.Struct("<I"), struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
# value type: (struct letter, bytes)
_SCALARS: dict[int, tuple[str, int]] = {
    0: ("B", 1),
    1: ("b", 1),
    2: ("H", 2),
    3: ("h", 2),
    4: ("I", 4),
    5: ("i", 4),
    6: ("f", 4),
    7: ("?", 1),
    10: ("Q", 8),
    11: ("q", 8),
    12: ("d", 8),
}


class _Cursor:
    """Reads forward through a file, keeping what was read; never asks for more than the file has.

    `read(n)` gives the next bytes: n or more where it likes, fewer where it must, none at the end. `vocabulary`: False:
    its texts stay empty.
    """

    def __init__(self, path: Path, size: int, read: Callable[[int], bytes], vocabulary: bool) -> None:
        self.path, self.size, self.read, self.vocabulary = path, size, read, vocabulary
        self.data = bytearray()
        self.position = 0
        self.elements_left = MAX_ARRAY_ELEMENTS

    def wrong(self, message: str, **details: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}", **details)

    def need(self, count: int) -> None:
        """Makes `count` bytes at the position readable."""
        end = self.position + count
        if end <= len(self.data):
            return
        if end > self.size:
            raise self.wrong(
                "the GGUF file is truncated: its header extends beyond the end of the file",
                needed=f"{end} bytes or more",
                found=f"{self.size} bytes",
                fix="download the file again",
            )
        if end > MAX_HEADER_BYTES:
            raise self.wrong("the GGUF header is implausibly large", needed=f"at most {format_bytes(MAX_HEADER_BYTES)}")
        while len(self.data) < end:
            chunk = self.read(end - len(self.data))
            if not chunk:
                raise self.wrong("the file was truncated while it was being read", fix="download the file again")
            self.data += chunk

    def count(self, what: str, *, each_bytes: int, limit: int) -> int:
        """A 64-bit count of things that take at least `each_bytes` each."""
        found = self.uint64()
        possible = min(limit, (self.size - self.position) // each_bytes)
        if found > possible:
            raise self.wrong(f"the GGUF header claims {found} {what}", needed=f"at most {possible} in this file")
        return found

    def uint32(self) -> int:
        self.need(4)
        value: int = _UINT32.unpack_from(self.data, self.position)[0]
        self.position += 4
        return value

    def uint64(self) -> int:
        self.need(8)
        value: int = _UINT64.unpack_from(self.data, self.position)[0]
        self.position += 8
        return value

    def string(self, what: str, limit: int) -> str:
        length = self.uint64()
        if length > limit:
            raise self.wrong(f"{what} of {length} bytes in the GGUF header", needed=f"at most {limit} bytes")
        self.need(length)
        start, self.position = self.position, self.position + length
        try:
            return self.data[start : self.position].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.wrong(f"{what} in the GGUF header is not UTF-8") from error

    def value(self, key: str, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string(f"the text of {key}", MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array(key, depth + 1)
        if kind not in _SCALARS:
            raise self.wrong(f"{key} has the unknown value type {kind}", needed="a type from 0 to 12")
        letter, size = _SCALARS[kind]
        self.need(size)
        if kind == _BOOL:  # a byte other than 0 and 1 is true, whatever a C compiler would make of it
            result: Any = self.data[self.position] != 0
        else:
            result = struct.unpack_from("<" + letter, self.data, self.position)[0]
        self.position += size
        return result

    def _array(self, key: str, depth: int) -> list[Any]:
        if depth > MAX_ARRAY_DEPTH:
            raise self.wrong(f"{key} nests arrays deeper than {MAX_ARRAY_DEPTH}")
        kind = self.uint32()
        if kind not in _SCALARS and kind not in (_STRING, _ARRAY):
            raise self.wrong(f"{key} is an array of the unknown value type {kind}", needed="a type from 0 to 12")
        smallest = {_STRING: 8, _ARRAY: 12}.get(kind) or _SCALARS[kind][1]
        count = self.count(f"elements of {key}", each_bytes=smallest, limit=self.elements_left)
        self.elements_left -= count
        if kind == _STRING and not self.vocabulary and key.startswith(VOCABULARY):
            return self._skipped(count)
        if kind == _STRING:
            return self._strings(key, count)
        if kind == _ARRAY:
            return [self._array(key, depth + 1) for _ in range(count)]
        letter, size = _SCALARS[kind]
        self.need(count * size)
        numbers: list[Any] = list(struct.unpack_from(f"<{count}{letter}", self.data, self.position))
        self.position += count * size
        return numbers

    def _skipped(self, count: int) -> list[str]:
        """As many empty texts: finding where they end takes a sixth of the time of reading them."""
        position, unpack = self.position, _UINT64.unpack_from
        for _ in range(count):
            if position + 8 > len(self.data):
                self.position = position
                self.need(8)
            position += 8 + unpack(self.data, position)[0]
        self.position = position
        self.need(0)
        return [""] * count

    def _strings(self, key: str, count: int) -> list[str]:
        """Vocabularies have hundreds of thousands of entries: the common case stays in one tight loop."""
        texts: list[str] = []
        data, position, unpack = self.data, self.position, _UINT64.unpack_from
        for _ in range(count):
            # Without a bound on the length the fast path still holds: a slice is made only of bytes already read.
            if position + 8 <= len(data):
                end = position + 8 + unpack(data, position)[0]
                if end <= len(data):
                    try:
                        texts.append(data[position + 8 : end].decode("utf-8"))
                    except UnicodeDecodeError as error:
                        raise self.wrong(f"entry {len(texts)} of {key} is not UTF-8") from error
                    position = end
                    continue
            self.position = position
            texts.append(self.string(f"entry {len(texts)} of {key}", MAX_STRING_BYTES))
            position = self.position
        self.position = position
        return texts


def read_header(path: Path, *, part: bool = False, vocabulary: bool = True) -> GGUFHeader:
    """The metadata and where each tensor lies; raises CheckpointError for anything torn, foreign or hostile.

    One part of a split model is refused unless `part` says that the others are read too. `vocabulary`: False for those
    who need no text of it: tokens and merges stay empty.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            read = partial(_read_ahead, file, size)
            return parse_header(path, size, read, part=part, vocabulary=vocabulary)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _read_ahead(file: BinaryIO, size: int, count: int) -> bytes:
    return file.read(min(size, max(_CHUNK_BYTES, count)))


def join_parts(headers: Sequence[GGUFHeader]) -> GGUFHeader:
    """One header of all parts, given in order: the first part's metadata, everybody's tensors."""
    first = headers[0]
    tensors: dict[str, StoredTensor] = {}
    for number, header in enumerate(headers):
        said = (header.metadata.get("split.no"), header.metadata.get("split.count"))
        if said != (number, len(headers)):
            raise CheckpointError(
                f"{header.path}: not the part that its name says",
                needed=f"part {number} of {len(headers)} (split.no, split.count)",
                found=spell(said),
                fix="download the model again",
            )
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{header.path}: the tensor {shorten(name)!r} is in two parts")
            tensors[name] = tensor
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise CheckpointError(
            f"{first.path}: the parts do not hold every tensor", needed=spell(expected), found=str(len(tensors))
        )
    return replace(first, tensors=tensors)


def parse_header(
    path: Path, size: int, read: Callable[[int], bytes], *, part: bool = False, vocabulary: bool = True
) -> GGUFHeader:
    """The same of a file that may lie elsewhere: `size` is all of it, `read(n)` gives about the next n bytes."""
    cursor = _Cursor(path, size, read, vocabulary)
    version = _check_magic(cursor)
    tensor_count = cursor.count("tensors", each_bytes=24, limit=MAX_TENSORS)
    key_count = cursor.count("metadata keys", each_bytes=13, limit=MAX_KEYS)
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string("a metadata key", MAX_NAME_BYTES)
        if not key.isprintable():
            raise cursor.wrong("a metadata key is not printable", found=spell(key))
        if key in metadata:
            raise cursor.wrong(f"the metadata key {shorten(key)!r} appears twice")
        metadata[key] = cursor.value(shorten(key), cursor.uint32())
    if not part:
        _refuse_parts(cursor, metadata)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.wrong("general.alignment cannot be used", needed="a power of two", found=spell(alignment))
    infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise cursor.wrong(f"the tensor {shorten(name)!r} appears twice")
        tensors[name] = _place(cursor, name, shape, kind, offset, data_start, alignment)
    _check_overlaps(cursor, tensors)
    return GGUFHeader(
        path=cursor.path,
        version=version,
        alignment=alignment,
        data_start=data_start,
        metadata=metadata,
        tensors=tensors,
    )


def _check_magic(cursor: _Cursor) -> int:
    if cursor.size < 24:
        raise cursor.wrong("not a GGUF file: too short for a header", found=f"{cursor.size} bytes")
    cursor.need(24)
    if bytes(cursor.data[:4]) != MAGIC:
        refuse_pointer(cursor.path, bytes(cursor.data[:24]))
        raise cursor.wrong(
            "not a GGUF file",
            needed="a file that begins with GGUF",
            found=repr(bytes(cursor.data[:4])),
            fix="download the file again, or name a file or folder that holds a model",
        )
    cursor.position = 4
    version = cursor.uint32()
    if version in (2, 3):
        return version
    if version & 0xFFFF == 0:
        raise cursor.wrong("a big-endian GGUF file is not supported", fix="convert the model again, little-endian")
    raise cursor.wrong(
        f"GGUF version {version} is not supported", needed="version 2 or 3", fix="convert the model again"
    )


def _refuse_parts(cursor: _Cursor, metadata: dict[str, Any]) -> None:
    parts = metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise cursor.wrong(
            "this is one part of a split GGUF, which is not supported",
            needed="a whole file",
            found=f"one of {parts} parts",
            fix="llama-gguf-split --merge FIRST_PART WHOLE.gguf",
        )


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string("a tensor name", MAX_NAME_BYTES)
    if not name.isprintable():
        raise cursor.wrong("a tensor's name is not printable", found=spell(name))
    dimensions = cursor.uint32()
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.wrong(f"tensor {shorten(name)!r} has {dimensions} dimensions", needed=f"1 to {MAX_DIMENSIONS}")
    sizes = [cursor.uint64() for _ in range(dimensions)]
    # GGUF names the fastest-running dimension first.
    return name, tuple(reversed(sizes)), cursor.uint32(), cursor.uint64()


def _place(
    cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int, offset: int, data_start: int, alignment: int
) -> StoredTensor:
    layout, spelled = GGUF_LAYOUTS.get(kind), repr(shorten(name))
    if kind in RETIRED_GGUF_TYPES:
        raise cursor.wrong(
            f"tensor {spelled} has the type {RETIRED_GGUF_TYPES[kind]}, which is no longer supported",
            fix="use a newer file of this model, such as Q4_0",
        )
    if layout is None:
        raise cursor.wrong(f"tensor {spelled} has the unknown type number {kind}")
    if 0 in shape or prod(shape) >= 1 << 62:
        raise cursor.wrong(f"tensor {spelled} has an implausible shape", found=str(shape))
    nbytes = layout.bytes_for(shape)
    if nbytes is None:
        raise cursor.wrong(
            f"tensor {spelled}: its rows are not whole {layout.name} blocks",
            needed=f"rows of a multiple of {layout.block_elements}",
            found=str(shape),
        )
    if offset % alignment:
        raise cursor.wrong(
            f"tensor {spelled} does not follow the file's alignment of {alignment} bytes", found=str(offset)
        )
    if data_start + offset + nbytes > cursor.size:
        raise cursor.wrong(
            f"the file is truncated: tensor {spelled} extends beyond its end",
            needed=f"{data_start + offset + nbytes} bytes or more",
            found=f"{cursor.size} bytes",
            fix="download the file again",
        )
    return StoredTensor(name, shape, layout.name, cursor.path, data_start + offset, nbytes)


def _check_overlaps(cursor: _Cursor, tensors: dict[str, StoredTensor]) -> None:
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise cursor.wrong(f"tensors {shorten(before.name)!r} and {shorten(after.name)!r} overlap")
