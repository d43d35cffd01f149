"""Whatever bytes come, a header reader answers or raises CheckpointError: no crash, no hang, no big allocation."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.checkpoints import gguf, safetensors
from holdfast.errors import CheckpointError
from holdfast.units import MIB

# Far above what tiny files need, far below what a hostile count would ask for.
MEMORY_LIMIT_BYTES = 32 * MIB


HOSTILE_NUMBERS = st.sampled_from([0, 1, 2, 255, 1 << 16, 1 << 24, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 64) - 1])


Edit = tuple[str, int, int, bytes]
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "count", "insert", "cut", "drop"]),
        st.integers(0, 4095),
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
        else:
            del raw[position : position + 1 + len(more)]
    return bytes(raw)


def answers_or_refuses(read: Callable[[Path], Any], path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        read(path)
    except CheckpointError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MEMORY_LIMIT_BYTES


FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(edits=EDITS)
def test_spoiled_gguf(tmp_path: Path, good_gguf: bytes, edits: list[Edit]) -> None:
    answers_or_refuses(gguf.read_header, tmp_path / "a.gguf", spoiled(good_gguf, edits))


@FUZZ
@given(edits=EDITS)
def test_spoiled_safetensors(tmp_path: Path, good_safetensors: bytes, edits: list[Edit]) -> None:
    answers_or_refuses(safetensors.read_header, tmp_path / "a.safetensors", spoiled(good_safetensors, edits))


def test_a_gguf_cut_anywhere_is_refused(tmp_path: Path, good_gguf: bytes) -> None:
    path = tmp_path / "a.gguf"
    for end in range(len(good_gguf)):
        path.write_bytes(good_gguf[:end])
        with pytest.raises(CheckpointError):
            gguf.read_header(path)


def test_a_safetensors_cut_anywhere_is_refused(tmp_path: Path, good_safetensors: bytes) -> None:
    path = tmp_path / "a.safetensors"
    for end in range(len(good_safetensors)):
        path.write_bytes(good_safetensors[:end])
        with pytest.raises(CheckpointError):
            safetensors.read_header(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
ENTRY = st.fixed_dictionaries({}, optional={"dtype": JSON | st.just("F32"), "shape": JSON, "data_offsets": JSON})


@settings(FUZZ, max_examples=100)
@given(header=st.dictionaries(st.text(max_size=8), JSON | ENTRY, max_size=5))
def test_safetensors_headers_of_any_json(tmp_path: Path, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    raw = struct.pack("<Q", len(text)) + text + bytes(64)
    answers_or_refuses(safetensors.read_header, tmp_path / "a.safetensors", raw)
