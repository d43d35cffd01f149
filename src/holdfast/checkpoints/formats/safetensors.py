"""Reads the headers of safetensors files, single or sharded by an index. Touches no tensor data.

8 bytes: length │ JSON: name -> dtype, shape, [begin, end) in the data │ tensor data
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from holdfast.checkpoints.bounded_files import open_file, parse_table, read_small, refuse_pointer, spell
from holdfast.checkpoints.files import StoredTensor
from holdfast.checkpoints.formats.block_layouts import LAYOUTS, SAFETENSORS_LAYOUTS
from holdfast.errors import CheckpointError
from holdfast.units import MIB, format_bytes, shorten

MAX_HEADER_BYTES = 100 * MIB
"""The format's own limit."""
MAX_TENSORS = 1 << 18
MAX_SHARDS = 1 << 12
MAX_DIMENSIONS = 8


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Where each tensor of one file lies; raises CheckpointError for anything torn, foreign or hostile."""
    try:
        with open_file(path) as file:
            return parse_header(path, os.fstat(file.fileno()).st_size, file.read)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def parse_header(path: Path, size: int, read: Callable[[int], bytes]) -> dict[str, StoredTensor]:
    """The same of a file that may lie elsewhere: `size` is all of it, `read(n)` gives its next n bytes."""
    start = read(8) if size >= 8 else b""
    refuse_pointer(path, start)
    if start.startswith(b"GGUF"):
        raise CheckpointError(
            f"{path}: a GGUF file under the name of a safetensors file",
            needed="safetensors, as the name says",
            found="a file that begins with GGUF",
            fix=f"rename it to {path.stem}.gguf and name that file as the model",
        )
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > size - 8:
        raise CheckpointError(
            f"{path}: truncated, or not a safetensors file: its header extends beyond its end",
            needed=f"{8 + length} bytes or more",
            found=f"{size} bytes",
            fix="download the file again",
        )
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: the safetensors header is implausibly large",
            needed=f"at most {format_bytes(MAX_HEADER_BYTES)}",
            found=format_bytes(length),
        )
    raw = read(length)
    if len(raw) < length:
        raise CheckpointError(f"{path}: the file was truncated while it was being read", fix="download the file again")
    entries = parse_table(raw, str(path), unique=True)
    entries.pop("__metadata__", None)
    if len(entries) > MAX_TENSORS:
        raise CheckpointError(
            f"{path}: implausibly many tensors", needed=f"at most {MAX_TENSORS}", found=str(len(entries))
        )
    tensors = {name: _tensor(path, name, entry, 8 + length, size) for name, entry in entries.items()}
    _check_overlaps(path, tensors)
    return tensors


def read_headers(paths: tuple[Path, ...]) -> dict[str, StoredTensor]:
    """All tensors of the files together; a name may stand in one of them only."""
    return merge(read_header(path) for path in paths)


def merge(headers: Iterable[dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for header in headers:
        for name, tensor in header.items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {shorten(name)!r} is in two files",
                    found=f"{tensors[name].path.name} and {tensor.path.name}",
                )
            tensors[name] = tensor
    return tensors


def shards_of_index(index: Path) -> tuple[Path, ...]:
    """The files an index names, each checked to be there, beside it."""
    raw = read_small(index, MAX_HEADER_BYTES)
    names = parse_index(raw or b"", index)
    check_all_there(index, names, {name for name in names if (index.parent / name).is_file()})
    return tuple(index.parent / name for name in names)


def parse_index(raw: bytes, index: Path) -> tuple[str, ...]:
    """The names of the shards, in order, each once."""
    weight_map = parse_table(raw, str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: weight_map is missing", needed="an object that maps tensor names to file names"
        )
    names = set()
    for name in weight_map.values():
        # A name with a folder in it could point anywhere on the machine.
        good = isinstance(name, str) and name.isprintable() and Path(name).name == name
        if not good or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: a shard has a name that cannot be used", found=spell(name))
        names.add(name)
    if len(names) > MAX_SHARDS:
        raise CheckpointError(
            f"{index}: implausibly many shards", needed=f"at most {MAX_SHARDS}", found=str(len(names))
        )
    return tuple(sorted(names))


def check_all_there(index: Path, names: tuple[str, ...], there: Collection[str]) -> None:
    missing = [name for name in names if name not in there]
    if missing:
        raise CheckpointError(
            f"{index.parent}: {len(missing)} of the {len(names)} files of this model are missing",
            needed=f"every file in {index.name}",
            found=shorten("no " + ", ".join(missing)),
            fix="download the model again",
        )


def _tensor(path: Path, name: str, entry: Any, data_start: int, file_size: int) -> StoredTensor:
    def wrong(needed: str, found: object) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {shorten(name)!r} cannot be used", needed=needed, found=spell(found))

    if not name.isprintable():
        raise wrong("a printable name", name)
    if not isinstance(entry, dict):
        raise wrong("an object with dtype, shape and data_offsets", entry)
    dtype = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_LAYOUTS:
        raise wrong("a dtype of " + ", ".join(sorted(SAFETENSORS_LAYOUTS)), dtype)
    if not _whole_numbers(shape) or len(shape) > MAX_DIMENSIONS:
        raise wrong(f"a shape of at most {MAX_DIMENSIONS} whole numbers", shape)
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong("data_offsets [begin, end)", offsets)
    begin, end = offsets
    expected = LAYOUTS[dtype].bytes_for(tuple(shape))
    if end - begin != expected:
        raise wrong(f"{expected} bytes for {dtype} {shape}", f"{end - begin} bytes")
    if data_start + end > file_size:
        raise CheckpointError(
            f"{path}: the file is truncated: tensor {shorten(name)!r} extends beyond its end",
            needed=f"{data_start + end} bytes or more",
            found=f"{file_size} bytes",
            fix="download the file again",
        )
    return StoredTensor(name, tuple(shape), dtype, path, data_start + begin, end - begin)


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)


def _check_overlaps(path: Path, tensors: dict[str, StoredTensor]) -> None:
    ordered = sorted((tensor for tensor in tensors.values() if tensor.nbytes), key=lambda tensor: tensor.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise CheckpointError(f"{path}: tensors {shorten(before.name)!r} and {shorten(after.name)!r} overlap")
