"""The models on this machine: in the hub's cache, in our own, and folders or files that were served. Fetches nothing.

    CACHE/models/NAME.gguf                          built in, or put there by hand
    HUB/models--OWNER--NAME/snapshots/COMMIT/FILE ─► ../../blobs/HASH
    CACHE/used.json                                 when each was served last, by the path of its files

Also says which files are to go where one is removed; only what lies in a cache is. Reads names, sizes and a few small
files, no weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.checkpoints.bounded_files import read_json, read_small
from holdfast.checkpoints.sources import builtin
from holdfast.checkpoints.sources.cache import cache_folder
from holdfast.checkpoints.sources.select_files import gguf_choices, quantization_of
from holdfast.errors import ModelError

Kind = Literal["builtin", "cache", "hub", "path"]
USES_KEPT = 500
_HUB_PREFIX = "models--"
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    name: str
    """As serve, run, show and rm take it."""
    kind: Kind
    format: str
    """GGUF Q4_K_M, safetensors BF16, safetensors awq."""
    size_bytes: int
    used_s: float | None
    """Since 1970; None: not known."""
    path: Path
    """The GGUF file, or the folder with config.json."""
    complete: bool = True
    remove: tuple[Path, ...] = ()
    """What is deleted with it; empty for what is not ours to delete."""


def hub_cache() -> Path:
    """Where the hub's library keeps its downloads; importing it takes longer than reading the folder."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def stored_models() -> list[StoredModel]:
    """The last used first."""
    uses = _uses()
    found = [*_in_our_cache(uses), *_in_hub_cache(uses)]
    found += _by_path(uses, found)
    return sorted(found, key=lambda model: (-(model.used_s or 0), model.name))


def mark_used(path: Path) -> None:
    """That a model was served from there. A cache that cannot be written to is left as it is."""
    with contextlib.suppress(OSError):
        uses = {**_uses(), str(path.resolve()): time.time()}
        newest = dict(sorted(uses.items(), key=lambda use: use[1])[-USES_KEPT:])
        file = cache_folder() / "used.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_name(f".used.{os.getpid()}")
        fresh.write_text(json.dumps(newest))
        os.replace(fresh, file)


def license_of(folder: Path) -> str | None:
    """As the repository's README says it."""
    raw = read_small(folder / "README.md") if (folder / "README.md").is_file() else None
    head = (raw or b"").decode("utf-8", "replace").split("---")
    lines = head[1].splitlines() if len(head) > 2 and not head[0].strip() else []
    named = {line.partition(":")[0].strip(): line.partition(":")[2].strip(" \"'") for line in lines if ":" in line}
    said = named.get("license_name") or named.get("license")
    return said or ("see " + str(folder / "LICENSE") if (folder / "LICENSE").is_file() else None)


def size_of(paths: Iterable[Path]) -> int:
    """Of the files there, each once, whatever links to it."""
    return _bytes(paths, follow_symlinks=True)


def freed_by(paths: Iterable[Path]) -> int:
    """Of the files that go with these paths: not of those that a link among them points to."""
    return _bytes(paths, follow_symlinks=False)


def _bytes(paths: Iterable[Path], *, follow_symlinks: bool) -> int:
    files: dict[tuple[int, int], int] = {}
    for path in paths:
        inside = path.rglob("*") if path.is_dir() and not path.is_symlink() else (path,)
        for file in inside:
            with contextlib.suppress(OSError):
                status = file.stat(follow_symlinks=follow_symlinks)
                if stat.S_ISREG(status.st_mode):
                    files[(status.st_dev, status.st_ino)] = status.st_size
    return sum(files.values())


def _uses() -> dict[str, float]:
    try:
        found = read_json(cache_folder() / "used.json") or {}
    except ModelError:
        return {}
    return {path: float(when) for path, when in found.items() if isinstance(when, int | float)}


def _last_use(path: Path, uses: dict[str, float]) -> float | None:
    recorded = uses.get(str(path.resolve()))
    if recorded is not None:
        return recorded
    with contextlib.suppress(OSError):
        return path.stat().st_atime
    return None


def _in_our_cache(uses: dict[str, float]) -> Iterator[StoredModel]:
    folder = cache_folder() / "models"
    known = {entry.filename: entry for entry in builtin.BUILTINS}
    for path in sorted(folder.glob("*.gguf")):
        entry = known.get(path.name)
        stamp = path.with_name(path.name + ".sha256")
        yield StoredModel(
            name=entry.name if entry is not None else str(path),
            kind="builtin" if entry is not None else "cache",
            format=_gguf_format(path.name),
            size_bytes=size_of([path]),
            used_s=_last_use(path, uses),
            path=path,
            complete=entry is None or path.stat().st_size == entry.size,
            remove=(path, stamp) if stamp.exists() else (path,),
        )


def _in_hub_cache(uses: dict[str, float]) -> Iterator[StoredModel]:
    for repository in sorted(hub_cache().glob(f"{_HUB_PREFIX}*--*")):
        snapshot = _snapshot(repository)
        if snapshot is None:
            continue
        name = repository.name.removeprefix(_HUB_PREFIX).replace("--", "/", 1)
        names = [file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*") if not file.is_dir()]
        ggufs = gguf_choices(names)
        plain = any(file.endswith(".safetensors") for file in names)
        if plain or not ggufs:
            yield _hub_model(repository, snapshot, name, uses)
        else:
            for label, files in ggufs.items():
                alone = len(ggufs) == 1
                paths = [snapshot / file for file in files]
                yield StoredModel(
                    name=name if alone else f"{name}:{label}",
                    kind="hub",
                    format=_gguf_format(files[0]),
                    size_bytes=size_of(paths),
                    used_s=_last_use(paths[0], uses),
                    path=paths[0],
                    complete=all(path.exists() for path in paths),
                    remove=(repository,) if alone else _links_and_blobs(repository, paths),
                )


def _hub_model(repository: Path, snapshot: Path, name: str, uses: dict[str, float]) -> StoredModel:
    weights = list(snapshot.glob("*.safetensors"))
    used = _last_use(snapshot, uses)
    if str(snapshot.resolve()) not in uses:
        used = max((_last_use(path, uses) or 0 for path in weights), default=used)
    return StoredModel(
        name=name,
        kind="hub",
        format=_folder_format(snapshot),
        size_bytes=size_of([repository / "blobs", snapshot]),
        used_s=used,
        path=snapshot,
        complete=bool(weights) and all(path.exists() for path in weights),
        remove=(repository,),
    )


def _snapshot(repository: Path) -> Path | None:
    """That of the branch main, else the newest."""
    with contextlib.suppress(OSError):
        commit = (repository / "refs" / "main").read_text().strip()
        if commit and "/" not in commit and (repository / "snapshots" / commit).is_dir():
            return repository / "snapshots" / commit
    there = [path for path in (repository / "snapshots").glob("*") if path.is_dir()]
    return max(there, key=lambda path: path.stat().st_mtime, default=None)


def _links_and_blobs(repository: Path, paths: list[Path]) -> tuple[Path, ...]:
    """Of one model among several of a repository: its links, and the blobs that no other link needs."""
    chosen = {path.resolve() for path in paths}
    links = [link for link in repository.glob("snapshots/*/**/*") if not link.is_dir()]
    going = [link for link in links if link.resolve() in chosen and link.name in {path.name for path in paths}]
    needed = {_blob(repository, link) for link in links if link not in going}
    blobs = {blob for link in going if (blob := _blob(repository, link)) is not None and blob not in needed}
    return (*going, *sorted(blobs))


def _blob(repository: Path, link: Path) -> Path | None:
    """Among the repository's own; None: the file is elsewhere, a person has put a link to it here."""
    if not link.is_symlink():
        return None
    blob = link.parent.resolve() / link.readlink()
    return blob if blob.parent.resolve() == repository.resolve() / "blobs" else None


def _by_path(uses: dict[str, float], found: list[StoredModel]) -> Iterator[StoredModel]:
    """What was served from elsewhere and is still there."""
    caches = (cache_folder().resolve(), hub_cache().resolve())
    for written, when in uses.items():
        path = Path(written)
        if path.exists() and not any(path.is_relative_to(cache) for cache in caches):
            yield StoredModel(
                name=written,
                kind="path",
                format=_gguf_format(path.name) if path.is_file() else _folder_format(path),
                size_bytes=size_of([path]),
                used_s=when,
                path=path,
            )


def _gguf_format(filename: str) -> str:
    layout = quantization_of(filename) if filename.endswith(".gguf") else None
    return f"GGUF {layout}" if layout else "GGUF"


def _folder_format(folder: Path) -> str:
    try:
        config: dict[str, Any] = read_json(folder / "config.json") or {}
    except ModelError:
        config = {}
    quantized = config.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    dtype = config.get("dtype") or config.get("torch_dtype")
    how = method or _DTYPES.get(str(dtype), "")
    return f"safetensors {how}".strip()
