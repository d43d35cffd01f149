"""Reads the headers of safetensors files, single or sharded by an index. Touches no tensor data.

8 bytes: length │ JSON: name -> dtype, shape, [begin, end) in the data │ tensor data
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast.checkpoints.files import StoredTensor
from holdfast.checkpoints.layouts import LAYOUTS, SAFETENSORS_LAYOUTS
from holdfast.errors import CheckpointError
from holdfast.models.fields import shorten
from holdfast.units import MIB, format_bytes

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 * MIB
"""The format's own limit."""
MAX_DIMENSIONS = 8
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Where each tensor of one file lies; raises CheckpointError for anything torn, foreign or hostile."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(
                    f"{path}: torn, or not a safetensors file: its header goes on beyond its end",
                    needed=f"{8 + length} bytes or more",
                    found=f"{size} bytes",
                    fix="download the file again",
                )
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: the safetensors header is absurdly large",
                    needed=f"at most {format_bytes(MAX_HEADER_BYTES)}",
                    found=format_bytes(length),
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    entries = _parse(path, raw)
    entries.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry, 8 + length, size) for name, entry in entries.items()}
    _check_overlaps(path, tensors)
    return tensors


def read_headers(paths: tuple[Path, ...]) -> dict[str, StoredTensor]:
    """All tensors of the files together; a name may stand in one of them only."""
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        for name, tensor in read_header(path).items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {name!r} stands in two files", found=f"{tensors[name].path.name} and {path.name}"
                )
            tensors[name] = tensor
    return tensors


def shards_of_index(index: Path) -> tuple[Path, ...]:
    """The files an index names, each checked to be there, beside it."""
    try:
        with open(index, "rb") as file:
            raw = file.read(MAX_HEADER_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read: {error.strerror}") from error
    if len(raw) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{index}: the index is absurdly large",
            needed=f"at most {format_bytes(MAX_HEADER_BYTES)}",
            found=format_bytes(index.stat().st_size),
        )
    weight_map = _parse(index, raw).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing", needed="a table of tensor names to file names")
    names = set()
    for name in weight_map.values():
        # A name with a folder in it could point anywhere on the machine.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: a shard has a name that cannot be used", found=shorten(name))
        names.add(name)
    shards = tuple(index.parent / name for name in sorted(names))
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent}: {len(missing)} of the {len(shards)} files of this model are missing",
            needed=f"every file in {index.name}",
            found=shorten("no " + ", ".join(missing)),
            fix="download the model again",
        )
    return shards


def pickles_in(names: Iterable[str]) -> list[str]:
    """Those that are weights in pickle form; training_args.bin is none and lies in many good repositories."""
    return [name for name in names if name.endswith(_PICKLE_SUFFIXES) and name != "training_args.bin"]


def pickles_refused(where: str, names: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{where}: pickle files are refused, because opening one runs the code inside it",
        code="HF232",
        needed="*.safetensors or a .gguf file",
        found=shorten(", ".join(names)),
        fix="convert it to safetensors where you trust it: "
        "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OUT)",
    )


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a name stands there twice")
        return table

    try:
        parsed = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its JSON cannot be read", found=shorten(str(error))) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: its JSON is not a table", found=type(parsed).__name__)
    return parsed


def _tensor(path: Path, name: str, entry: Any, data_start: int, file_size: int) -> StoredTensor:
    def wrong(needed: str, found: object) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {shorten(name)!r} cannot be used", needed=needed, found=shorten(found))

    if not isinstance(entry, dict):
        raise wrong("a table with dtype, shape and data_offsets", entry)
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
            f"{path}: the file is torn: tensor {shorten(name)!r} ends beyond it",
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
            raise CheckpointError(f"{path}: tensors {before.name!r} and {after.name!r} overlap")
