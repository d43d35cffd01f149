"""Whatever bytes come, a header reader answers or raises CheckpointError: no crash, no hang, no big allocation.

Spoiled good files, spoiled real headers, and files built to hurt. CI runs a slice; `long` runs the same for minutes.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.checkpoints import ModelFiles, from_path
from holdfast.checkpoints.bounded_files import MAX_JSON_TABLES
from holdfast.checkpoints.formats import gguf, safetensors
from holdfast.errors import CheckpointError
from holdfast.units import MIB

# Far above what tiny files need, far below what a hostile count would ask for.
MEMORY_LIMIT_BYTES = 32 * MIB
LONG_EXAMPLES = 8_000

HOSTILE_NUMBERS = st.sampled_from(
    [0, 1, 2, 7, 8, 9, 32, 255, 1 << 16, 1 << 24, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 60, 1 << 63, (1 << 64) - 1]
)
FUZZ = settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LONG_FUZZ = settings(FUZZ, max_examples=LONG_EXAMPLES)


def for_long(test: Callable[..., None]) -> Callable[..., None]:
    """About a minute on an idle core, far more on a busy one."""
    return pytest.mark.long(pytest.mark.timeout(3600)(test))


Edit = tuple[str, int, int, bytes]
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "count", "insert", "cut", "drop", "copy"]),
        st.integers(0, 1 << 22),
        HOSTILE_NUMBERS,
        st.binary(max_size=24),
    ),
    min_size=1,
    max_size=4,
)


def spoiled(good: bytes, edits: list[Edit]) -> bytes:
    raw = bytearray(good)
    for change, place, number, more in edits:
        position = place % max(1, len(raw))
        if change == "flip" and raw:
            raw[position] ^= 1 << number % 8
        elif change == "count":
            raw[position : position + 8] = struct.pack("<Q", number)
        elif change == "insert":
            raw[position:position] = more
        elif change == "cut":
            del raw[position:]
        elif change == "copy":  # doubles names and entries
            raw[position:position] = raw[position : position + number % 512]
        else:
            del raw[position : position + 1 + len(more)]
    return bytes(raw)


def answers_or_refuses(
    read: Callable[[Path], Any], path: Path, raw: bytes, *, size: int = 0, limit_bytes: int = MEMORY_LIMIT_BYTES
) -> None:
    """`size`: the file goes on so far, without taking room on the disk."""
    path.write_bytes(raw)
    os.truncate(path, max(size, len(raw)))
    tracemalloc.start()
    try:
        read(path)
    except CheckpointError as error:
        # A message that cannot be printed would crash whoever prints it.
        str(error).encode()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < limit_bytes


def spoil_gguf(tmp_path: Path, good_gguf: bytes, edits: list[Edit]) -> None:
    answers_or_refuses(gguf.read_header, tmp_path / "a.gguf", spoiled(good_gguf, edits))


def spoil_safetensors(tmp_path: Path, good_safetensors: bytes, edits: list[Edit]) -> None:
    answers_or_refuses(safetensors.read_header, tmp_path / "a.safetensors", spoiled(good_safetensors, edits))


test_spoiled_gguf = FUZZ(given(edits=EDITS)(spoil_gguf))
test_spoiled_safetensors = FUZZ(given(edits=EDITS)(spoil_safetensors))
test_spoiled_gguf_for_long = for_long(LONG_FUZZ(given(edits=EDITS)(spoil_gguf)))
test_spoiled_safetensors_for_long = for_long(LONG_FUZZ(given(edits=EDITS)(spoil_safetensors)))


# Real headers


@dataclass(frozen=True)
class Header:
    raw: bytes = field(repr=False)
    size: int
    """Of the whole file."""


@pytest.fixture(scope="session")
def real_gguf(default_model: ModelFiles) -> Header:
    """The default model's."""
    header = default_model.header
    assert header is not None
    with open(header.path, "rb") as file:
        return Header(file.read(header.data_start), header.path.stat().st_size)


@pytest.fixture(scope="session")
def real_safetensors(default_model: ModelFiles) -> Header:
    """The same tensors in a header as transformers writes it."""
    assert default_model.header is not None
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in default_model.header.tensors.items():
        count = 2 * tensor.shape[0] * (tensor.shape[1] if len(tensor.shape) > 1 else 1)
        entries[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + count]}
        end += count
    text = json.dumps(entries, separators=(",", ":")).encode()
    return Header(struct.pack("<Q", len(text)) + text, 8 + len(text) + end)


# Real files are long: one flipped bit makes a text of 64 MiB, or a header of 80, that is really there and is read. The
# file's bytes, the text's and what is parsed of them may then be held at once.
REAL_LIMIT_BYTES = 320 * MIB


def spoil_real_gguf(tmp_path: Path, real_gguf: Header, edits: list[Edit]) -> None:
    raw, size = spoiled(real_gguf.raw, edits), real_gguf.size
    answers_or_refuses(gguf.read_header, tmp_path / "a.gguf", raw, size=size, limit_bytes=REAL_LIMIT_BYTES)


def spoil_real_safetensors(tmp_path: Path, real_safetensors: Header, edits: list[Edit]) -> None:
    raw, size = spoiled(real_safetensors.raw, edits), real_safetensors.size
    answers_or_refuses(
        safetensors.read_header, tmp_path / "a.safetensors", raw, size=size, limit_bytes=REAL_LIMIT_BYTES
    )


test_spoiled_real_gguf = settings(FUZZ, max_examples=5)(given(edits=EDITS)(spoil_real_gguf))
test_spoiled_real_safetensors = settings(FUZZ, max_examples=examples(100))(given(edits=EDITS)(spoil_real_safetensors))
test_spoiled_real_gguf_for_long = for_long(settings(FUZZ, max_examples=200)(given(edits=EDITS)(spoil_real_gguf)))
test_spoiled_real_safetensors_for_long = for_long(LONG_FUZZ(given(edits=EDITS)(spoil_real_safetensors)))


def test_the_real_headers_are_good_before_they_are_spoiled(
    tmp_path: Path, real_gguf: Header, real_safetensors: Header
) -> None:
    for name, read, header in (
        ("a.gguf", lambda path: gguf.read_header(path).tensors, real_gguf),
        ("a.safetensors", safetensors.read_header, real_safetensors),
    ):
        path = tmp_path / name
        path.write_bytes(header.raw)
        os.truncate(path, header.size)
        assert len(read(path)) == 272


# Built to hurt


def counted(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


NAMES = st.sampled_from([b"a", b"b", b"", b"general.alignment", b"split.count", b"\xff\xfe", b"\x1b[2J", b"\0"])
STRINGS = st.builds(counted, NAMES, st.none() | HOSTILE_NUMBERS)
SCALARS = st.builds(
    lambda kind, raw: struct.pack("<I", kind) + raw,
    st.integers(0, 14) | HOSTILE_NUMBERS.map(lambda number: number & 0xFFFFFFFF),
    st.binary(max_size=12),
)


def array(kind: int, count: int, raw: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + raw


ARRAYS = st.recursive(
    st.builds(array, st.integers(0, 14), HOSTILE_NUMBERS, st.binary(max_size=32)),
    lambda inner: st.builds(lambda items: array(9, len(items), b"".join(items)), st.lists(inner, max_size=3)),
    max_leaves=8,
)
KEYS = st.builds(
    bytes.__add__,
    STRINGS,
    SCALARS | ARRAYS.map(lambda raw: struct.pack("<I", 9) + raw) | STRINGS.map(lambda raw: struct.pack("<I", 8) + raw),
)
TENSORS = st.builds(
    lambda name, dimensions, kind, offset: (
        name
        + struct.pack("<I", len(dimensions))
        + struct.pack(f"<{len(dimensions)}Q", *dimensions)
        + struct.pack("<IQ", kind, offset)
    ),
    STRINGS,
    st.lists(HOSTILE_NUMBERS, max_size=5),
    st.integers(0, 45),
    HOSTILE_NUMBERS,
)


def build_gguf(keys: list[bytes], tensors: list[bytes], counts: tuple[int | None, int | None], tail: int) -> bytes:
    tensor_count, key_count = (
        len(listed) if count is None else count for listed, count in zip((tensors, keys), counts, strict=True)
    )
    head = b"GGUF" + struct.pack("<IQQ", 3, tensor_count, key_count)
    return head + b"".join(keys) + b"".join(tensors) + bytes(tail)


GGUFS = st.builds(
    build_gguf,
    st.lists(KEYS, max_size=4),
    st.lists(TENSORS, max_size=4),
    st.tuples(st.none() | HOSTILE_NUMBERS, st.none() | HOSTILE_NUMBERS),
    st.integers(0, 4096),
)
# Sparse files, so that a count is not refused for the file's size alone.
SIZES = st.sampled_from([0, MIB, 1 << 36])


def hurt_gguf(tmp_path: Path, raw: bytes, size: int) -> None:
    answers_or_refuses(gguf.read_header, tmp_path / "a.gguf", raw, size=size, limit_bytes=GGUF_LIMIT_BYTES)


GGUF_LIMIT_BYTES = 400 * MIB
"""In a file of 64 GiB one string or array of the largest permitted size can be real: it is read, and bounded."""

test_hostile_gguf = FUZZ(given(raw=GGUFS, size=SIZES)(hurt_gguf))
test_hostile_gguf_for_long = for_long(LONG_FUZZ(given(raw=GGUFS, size=SIZES)(hurt_gguf)))

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | HOSTILE_NUMBERS
    | st.floats()
    | st.text(st.characters(exclude_categories=[]), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
DTYPES = st.sampled_from(["F32", "F4", "F6_E2M3", "BF16", "BOOL", "Q4_0", "f32", "\ud800"])
SHAPES = st.lists(HOSTILE_NUMBERS | st.integers(0, 8), max_size=4)
OFFSETS = st.lists(HOSTILE_NUMBERS | st.integers(0, 64), min_size=2, max_size=2)
ENTRIES = st.fixed_dictionaries(
    {}, optional={"dtype": DTYPES | JSON, "shape": SHAPES | JSON, "data_offsets": OFFSETS | JSON}
)
TENSOR_NAMES = st.text(st.characters(exclude_categories=[]), max_size=4) | st.sampled_from(["a", "b", "__metadata__"])


def hurt_safetensors(tmp_path: Path, header: list[tuple[str, Any]], size: int) -> None:
    # Pairs, not a table: a name may stand there twice.
    text = "{" + ", ".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in header) + "}"
    raw = struct.pack("<Q", len(text)) + text.encode()
    answers_or_refuses(safetensors.read_header, tmp_path / "a.safetensors", raw + bytes(64), size=size)


PAIRS = st.lists(st.tuples(TENSOR_NAMES, ENTRIES | JSON), max_size=5)
test_hostile_safetensors = FUZZ(given(header=PAIRS, size=SIZES)(hurt_safetensors))
test_hostile_safetensors_for_long = for_long(LONG_FUZZ(given(header=PAIRS, size=SIZES)(hurt_safetensors)))


@settings(FUZZ, max_examples=examples(40))
@given(index=st.dictionaries(st.just("weight_map") | st.text(max_size=3), JSON | st.dictionaries(TENSOR_NAMES, JSON)))
def test_indices_of_any_json(tmp_path: Path, index: dict[str, Any]) -> None:
    raw = json.dumps(index).encode()
    answers_or_refuses(safetensors.shards_of_index, tmp_path / "model.safetensors.index.json", raw)


def with_length(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf_of(count_tensors: int, count_keys: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, count_tensors, count_keys) + rest


KEY = counted(b"k")
# name: (bytes, size of the file, so that its size alone refutes nothing)
BOMBS: dict[str, tuple[bytes, int]] = {
    "length.safetensors": (struct.pack("<Q", 1 << 63) + b"{}", 1 << 40),
    "long.safetensors": (struct.pack("<Q", 100 * MIB + 1) + b"{}", 1 << 40),
    "deep.safetensors": (with_length(b'{"a":' * 1_000_000), 0),
    "deep-list.safetensors": (with_length(b'{"a":' + b"[" * 900_000), 0),
    "lists.safetensors": (with_length(b'{"a":[' + b"[]," * (MAX_JSON_TABLES + 1) + b"[]]}"), 0),
    "numbers.safetensors": (with_length(b'{"a":[' + b"1," * 5_000_000 + b"1]}"), 0),
    "digits.safetensors": (with_length(b'{"a":{"dtype":"F32","shape":[' + b"9" * 1_000_000 + b"]}}"), 0),
    "utf16.safetensors": (with_length('{"a": 1}'.encode("utf-16")), 0),
    "not-utf8.safetensors": (with_length(b'{"\xff\xfe": {}}'), 0),
    "tensors.gguf": (gguf_of(1 << 60, 0, b""), 1 << 40),
    "keys.gguf": (gguf_of(0, 1 << 60, b""), 1 << 40),
    "key.gguf": (gguf_of(0, 1, struct.pack("<Q", 1 << 63)), 1 << 40),
    "text.gguf": (gguf_of(0, 1, KEY + struct.pack("<IQ", 8, 1 << 62)), 1 << 40),
    "array.gguf": (gguf_of(0, 1, KEY + struct.pack("<IIQ", 9, 0, 1 << 60)), 1 << 40),
    "strings.gguf": (gguf_of(0, 1, KEY + struct.pack("<IIQ", 9, 8, 1 << 60)), 1 << 40),
    "arrays.gguf": (gguf_of(0, 1, KEY + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000), 1 << 40),
    "wide.gguf": (gguf_of(0, 1, KEY + struct.pack("<IIQ", 9, 9, 1 << 40)), 1 << 40),
    "dimensions.gguf": (gguf_of(1, 0, KEY + struct.pack("<I4QIQ", 4, *[1 << 63] * 4, 0, 0)), 1 << 40),
}

READER = """
import resource, sys
from pathlib import Path
from holdfast.checkpoints.formats import gguf, safetensors
from holdfast.errors import CheckpointError

room = int(sys.argv[1])
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + room
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for name in sys.argv[2:]:
    path = Path(name)
    read = gguf.read_header if path.suffix == ".gguf" else safetensors.read_header
    try:
        read(path)
        print(path.name, "read")
    except CheckpointError as error:
        print(path.name, error.code)
"""


def test_bombs_are_refused_in_little_memory(tmp_path: Path) -> None:
    """A process that may not take 96 MiB more than it has refuses every one of them."""
    for name, (raw, size) in BOMBS.items():
        (tmp_path / name).write_bytes(raw)
        os.truncate(tmp_path / name, max(size, len(raw)))
    files = [str(tmp_path / name) for name in BOMBS]
    done = subprocess.run(
        [sys.executable, "-c", READER, str(96 * MIB), *files], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} HF230" for name in BOMBS]


@pytest.mark.parametrize("name", ["a.gguf", "model.safetensors", "config.json"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(CheckpointError):
            from_path(path, name="x")


# Cut anywhere


def test_a_gguf_cut_anywhere_is_refused(tmp_path: Path, good_gguf: bytes) -> None:
    path = tmp_path / "a.gguf"
    for end in range(0, len(good_gguf), 3):
        path.write_bytes(good_gguf[:end])
        with pytest.raises(CheckpointError):
            gguf.read_header(path)


def test_a_safetensors_cut_anywhere_is_refused(tmp_path: Path, good_safetensors: bytes) -> None:
    path = tmp_path / "a.safetensors"
    for end in range(len(good_safetensors)):
        path.write_bytes(good_safetensors[:end])
        with pytest.raises(CheckpointError):
            safetensors.read_header(path)
