"""Both header readers: right about good files, and clear about torn, foreign and hostile ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as gguf_library
import numpy
import pytest

from holdfast.checkpoints import (
    LAYOUTS,
    Checkpoint,
    ModelFiles,
    match,
    open_checkpoint,
    spec_of,
)
from holdfast.checkpoints.bounded_files import read_json, read_small
from holdfast.checkpoints.formats import gguf, safetensors
from holdfast.checkpoints.sources.select_files import INDEX_NAME
from holdfast.errors import CheckpointError


def test_layout_sizes_equal_the_reference_library() -> None:
    for kind, (elements, size) in gguf_library.GGML_QUANT_SIZES.items():
        layout = LAYOUTS[kind.name]
        assert (layout.block_elements, layout.block_bytes) == (elements, size)
        assert gguf.GGUF_LAYOUTS[int(kind)] is layout


def test_a_gguf_header(gguf_file: Path) -> None:
    header = gguf.read_header(gguf_file)
    assert header.metadata == {
        "general.architecture": "llama",
        "llama.block_count": 3,
        "a.float": 0.5,
        "a.truth": True,
        "a.big": -5,
        "tokens": ["a", "", "Ġé"],
        "numbers": [1, -2, 3],
        "nested": [[8, 9], [8, 9]],
    }
    plain, quantized = header.tensors["plain"], header.tensors["quantized"]
    assert (plain.shape, plain.layout, plain.nbytes) == ((2, 3), "F32", 24)
    assert (quantized.shape, quantized.layout, quantized.nbytes) == ((2, 32), "Q8_0", 68)
    assert plain.offset == header.data_start
    assert header.data_start % header.alignment == 0


def test_a_file_of_the_reference_writer(tmp_path: Path) -> None:
    path = tmp_path / "written.gguf"
    writer = gguf_library.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_token_list(["a", "b", "Ġc"])
    writer.add_token_types([1, 3, 1])
    writer.add_rope_freq_base(5e5)
    plain, half = numpy.arange(12, dtype="<f4").reshape(3, 4), numpy.arange(6, dtype="<f2").reshape(2, 3)
    quantized = gguf_library.quantize(numpy.ones((5, 64), "<f4"), gguf_library.GGMLQuantizationType.Q4_1)
    writer.add_tensor("plain", plain)
    writer.add_tensor("half", half)
    writer.add_tensor("q", quantized, raw_dtype=gguf_library.GGMLQuantizationType.Q4_1)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    header = gguf.read_header(path)
    assert header.alignment == 64
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "b", "Ġc"]
    assert header.metadata["llama.rope.freq_base"] == 5e5
    assert (header.tensors["q"].shape, header.tensors["q"].layout) == ((5, 64), "Q4_1")
    with Checkpoint(header.tensors, "gguf") as checkpoint:
        assert checkpoint.read("plain").tobytes() == plain.tobytes()
        assert checkpoint.read("half").tobytes() == half.tobytes()
        assert checkpoint.read("q").tobytes() == quantized.tobytes()
        kept = numpy.zeros(quantized.nbytes + 2, numpy.uint8)
        checkpoint.read_into("q", kept[1:-1])
        assert kept.tobytes() == b"\0" + quantized.tobytes() + b"\0"


@pytest.mark.parametrize("chunk_bytes", [1, 40, 1 << 20])
def test_a_vocabulary_that_nobody_reads_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(gguf, "_CHUNK_BYTES", chunk_bytes)
    path = tmp_path / "written.gguf"
    writer = gguf_library.GGUFWriter(path, "llama")
    writer.add_array("llama.classifier.output_labels", ["no", "yes"])
    writer.add_token_list(["a", "", "Ġc" * 30])
    writer.add_token_types([1, 3, 1])
    writer.add_tensor("plain", numpy.zeros((3, 4), "<f4"))
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    whole, without = gguf.read_header(path), gguf.read_header(path, vocabulary=False)
    assert without.metadata == {**whole.metadata, "tokenizer.ggml.tokens": ["", "", ""]}
    assert (without.tensors, without.data_start) == (whole.tensors, whole.data_start)
    path.write_bytes(
        path.read_bytes().replace(struct.pack("<Q", 90) + "Ġ".encode(), struct.pack("<Q", 1 << 62) + b"aa")
    )
    with pytest.raises(CheckpointError, match="truncated"):
        gguf.read_header(path, vocabulary=False)


def test_the_real_model_matches_its_spec(default_model: ModelFiles) -> None:
    spec = spec_of(default_model)
    assert (spec.parameters, len(spec.layers), spec.eos_token_ids) == (134_515_008, 30, (2,))
    with open_checkpoint(default_model) as checkpoint:
        found = match(spec, checkpoint)
        assert len(found) == len(spec.tensors) == len(checkpoint.tensors)
        norm = checkpoint.read("output_norm.weight").view("<f4")
    assert norm.shape == (576,)
    assert numpy.isfinite(norm).all()


GGUF_SPOILS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("not a GGUF", lambda raw: b"PK\x03\x04" + raw[4:]),
    ("too short", lambda raw: raw[:10]),
    ("version 1 ", lambda raw: raw[:4] + struct.pack("<I", 1) + raw[8:]),
    ("big-endian", lambda raw: raw[:4] + struct.pack(">I", 3) + raw[8:]),
    ("claims 1099511627776 tensors", lambda raw: raw[:8] + struct.pack("<Q", 1 << 40) + raw[16:]),
    ("claims 1099511627776 metadata", lambda raw: raw[:16] + struct.pack("<Q", 1 << 40) + raw[24:]),
    ("a metadata key of", lambda raw: raw[:24] + struct.pack("<Q", 1 << 62) + raw[32:]),
    ("truncated: tensor 'quantized'", lambda raw: raw[:-1]),
    ("is truncated: its header", lambda raw: raw[:300]),
    ("unknown type number 99", lambda raw: raw.replace(struct.pack("<IQ", 8, 32), struct.pack("<IQ", 99, 32))),
    ("alignment", lambda raw: raw.replace(struct.pack("<IQ", 8, 32), struct.pack("<IQ", 8, 33))),
    ("overlap", lambda raw: raw.replace(struct.pack("<IQ", 8, 32), struct.pack("<IQ", 8, 0))),
    ("whole Q8_0 blocks", lambda raw: raw.replace(struct.pack("<IQQI", 2, 32, 2, 8), struct.pack("<IQQI", 2, 8, 8, 8))),
    ("an implausible", lambda raw: raw.replace(struct.pack("<IQQ", 2, 3, 2), struct.pack("<IQQ", 2, 1 << 60, 1 << 60))),
    ("implausible shape", lambda raw: raw.replace(struct.pack("<IQQ", 2, 3, 2), struct.pack("<IQQ", 2, 3, 0))),
    ("dimensions", lambda raw: raw.replace(struct.pack("<IQQ", 2, 3, 2), struct.pack("<IQQ", 200, 3, 2))),
    ("not UTF-8", lambda raw: raw.replace(b"llama", b"\xff\xfeama", 1)),
    ("unknown value type 77", lambda raw: raw.replace(struct.pack("<II", 4, 3), struct.pack("<II", 77, 3), 1)),
    ("claims", lambda raw: raw.replace(struct.pack("<IIQ", 9, 8, 3), struct.pack("<IIQ", 9, 8, 1 << 50))),
    ("array of the unknown", lambda raw: raw.replace(struct.pack("<IIQ", 9, 8, 3), struct.pack("<IIQ", 9, 50, 3))),
    ("appears twice", lambda raw: raw.replace(b"a.truth", b"a.float")),
]  # fmt: skip


@pytest.mark.parametrize(("message", "spoil"), GGUF_SPOILS)
def test_spoiled_gguf_files_are_refused(gguf_file: Path, message: str, spoil: Callable[[bytes], bytes]) -> None:
    raw = gguf_file.read_bytes()
    changed = spoil(raw)
    assert changed != raw
    gguf_file.write_bytes(changed)
    with pytest.raises(CheckpointError, match=message):
        gguf.read_header(gguf_file)


def test_arrays_nested_without_end_are_refused(tmp_path: Path) -> None:
    key = struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000
    path = tmp_path / "deep.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key)
    with pytest.raises(CheckpointError, match="deeper"):
        gguf.read_header(path)


def test_one_part_of_a_split_gguf_is_refused_with_the_way_to_merge(tmp_path: Path) -> None:
    key = struct.pack("<Q", 11) + b"split.count" + struct.pack("<IH", 2, 4)
    path = tmp_path / "part.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key)
    with pytest.raises(CheckpointError, match="--merge"):
        gguf.read_header(path)


def write_safetensors(path: Path, header: Any, data: bytes = bytes(16)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_safetensors_header(tmp_path: Path) -> None:
    path = write_safetensors(
        tmp_path / "a.safetensors", {"__metadata__": {"a": "b"}, "x": entry(), "y": entry("BF16", [2, 2], [8, 16])}
    )
    tensors = safetensors.read_header(path)
    assert set(tensors) == {"x", "y"}
    assert (tensors["y"].layout, tensors["y"].shape, tensors["y"].nbytes) == ("BF16", (2, 2), 8)
    assert tensors["y"].offset - tensors["x"].offset == 8


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1]",
        b'{"x": 1e999}',
        b"[" * 100_000,
        b'{"x": {}, "x": {}}',
        {"x": 5},
        {"x": entry("F33")},
        {"x": entry(["F32"])},
        {"x": entry(shape=[-2])},
        {"x": entry(shape=[True, 2])},
        {"x": entry(shape=[1] * 9)},
        {"x": entry(shape=[1 << 70])},
        {"x": entry(offsets=[8, 0])},
        {"x": entry(offsets=[0, 8, 16])},
        {"x": entry(offsets=[0, 4])},
        {"x": entry(shape=[6], offsets=[0, 24])},
        {"x": entry(), "y": entry(offsets=[4, 12])},
    ],
)
def test_spoiled_safetensors_files_are_refused(tmp_path: Path, header: Any) -> None:
    with pytest.raises(CheckpointError):
        safetensors.read_header(write_safetensors(tmp_path / "a.safetensors", header))


@pytest.mark.parametrize("raw", [b"", b"abc", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 3) + b"{}"])
def test_torn_safetensors_files_are_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="truncated"):
        safetensors.read_header(path)


def test_a_gguf_file_under_the_name_of_safetensors_is_refused_with_its_own(gguf_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(gguf_file.read_bytes())
    with pytest.raises(CheckpointError, match="a GGUF file under the name") as refused:
        safetensors.read_header(path)
    assert "model.gguf" in str(refused.value.fix)


@pytest.mark.parametrize(
    "read",
    [safetensors.read_header, gguf.read_header, read_small, read_json],
    ids=["safetensors", "gguf", "small", "json"],
)
def test_what_git_leaves_without_lfs_is_refused_with_what_fetches_the_file(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 4976698672\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer") as refused:
        read(path)
    assert f"git -C {tmp_path} lfs pull" in str(refused.value.fix)


@pytest.mark.parametrize(
    "index",
    [
        "{}",
        "[]",
        '{"weight_map": []}',
        '{"weight_map": {"x": "../../secret.safetensors"}}',
        '{"weight_map": {"x": "/etc/a.safetensors"}}',
        '{"weight_map": {"x": "model.bin"}}',
        '{"weight_map": {"x": 5}}',
        '{"weight_map": {"x": "not-there.safetensors"}}',
    ],
)
def test_bad_indices_are_refused(tmp_path: Path, index: str) -> None:
    path = tmp_path / INDEX_NAME
    path.write_text(index)
    with pytest.raises(CheckpointError):
        safetensors.shards_of_index(path)


def test_an_absurdly_large_index_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 1000)
    index = tmp_path / INDEX_NAME
    index.write_text('{"weight_map": {}}' + " " * 1000)
    with pytest.raises(CheckpointError, match="implausibly large"):
        safetensors.shards_of_index(index)
