"""The records of this package: one stored tensor, one GGUF header, the files that make up a model. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from holdfast.checkpoints.formats.quantized_tensors import Packing


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """How a quantizer stored a matrix: the tensors it was spread over, by their names after the module's."""

    packing: Packing
    parts: Mapping[str, StoredTensor] = field(repr=False)
    """Of experts that lie one by one: those of the first, and {expert} in their names. Of a stack: those of all."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str
    """As the checkpoint spells it."""
    shape: tuple[int, ...]
    """Row-major: [out, in] for a linear weight, in both formats."""
    layout: str
    """A key of formats.block_layouts.LAYOUTS."""
    path: Path
    offset: int
    """Of its first byte in the file."""
    nbytes: int
    packed: PackedMatrix | None = None
    """Of a matrix that a quantizer took: this tensor has its codes, and its bytes are those of all parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFHeader:
    path: Path
    version: int
    alignment: int
    data_start: int
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, StoredTensor] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Where everything of one model lies; small files are already read."""

    name: str
    """As the user named it; the built-in's own name when none was named."""
    kind: Literal["builtin", "file", "folder", "hub"]
    path: Path
    """The GGUF file, or the folder."""
    weights: tuple[Path, ...]
    """Empty when format is none."""
    format: Literal["safetensors", "gguf", "none"]
    """none: a folder with a config but no weights, good for load_format=dummy."""
    config: dict[str, Any] | None = field(default=None, repr=False)
    generation_config: dict[str, Any] | None = field(default=None, repr=False)
    tokenizer_json: Path | None = None
    tokenizer_config: dict[str, Any] | None = field(default=None, repr=False)
    chat_template: str | None = field(default=None, repr=False)
    """From chat_template.jinja, else from tokenizer_config.json, else from the GGUF header."""
    trained_to_embed: bool = False
    """By sentence-transformers' modules.json, or a GGUF header's type of pooling."""
    pooling: str = "last"
    """How they ask for one vector of a text: `last` (token), `mean`, `cls`, or what else in the field's words."""
    header: GGUFHeader | None = None
    """With format gguf."""
    tensors: Mapping[str, StoredTensor] | None = field(default=None, repr=False)
    """With format safetensors, where the headers were read already."""
    remote: bool = False
    """Only headers were read: `path` and `weights` are names at the hub, and there are no bytes to load here."""
    revision: str | None = None
    """The commit, where the hub was asked."""
    chosen: str = ""
    """Which of the files at that place were taken, over which others, for people to read."""
