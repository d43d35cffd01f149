"""A LoRA adapter as PEFT stores it, held against the model it shall adapt. Reads headers only, and no torch.

    adapter_config.json        r, lora_alpha, use_rslora, target_modules, rank_pattern, alpha_pattern
    adapter_model.safetensors  base_model.model.MODULE.lora_A.weight [rank, in], ….lora_B.weight [out, rank]

What an adapter adds to a module is scale · B·A·x. Its messages name files, never folders: they may reach a client.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast.checkpoints.bounded_files import OutsideError, open_file, parse_table, read_small
from holdfast.checkpoints.files import StoredTensor
from holdfast.checkpoints.formats.safetensors import parse_header
from holdfast.checkpoints.lora.adapter_config import AdapterConfig, read_config
from holdfast.errors import AdapterError, CheckpointError
from holdfast.models import ModelSpec, TensorSpec
from holdfast.units import shorten

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
NOT_ALLOWED, ANOTHER_BASE, NOT_THERE, PICKLED, TOO_WIDE, CHANGED, NOT_FINITE, TOO_SLOW = (
    "HF371",
    "HF372",
    "HF373",
    "HF374",
    "HF375",
    "HF376",
    "HF377",
    "HF378",
)
READ_LIMIT_S = 60.0
"""That a rank has for one adapter's files. What takes longer hangs: a disk reads gigabytes meanwhile."""
READABLE = ("F32", "F16", "BF16")
_FACTOR = re.compile(r"(?:base_model\.model\.)?(?P<module>[\w.]+)\.lora_(?P<factor>[AB])\.weight")
_INDEX = re.compile(r"[0-9]+")
_VOCABULARY = re.compile(r"(?:base_model\.model\.)?(?:[\w.]+\.)?(?P<module>lm_head|embed_tokens|wte|embed_out)\b.*")


@dataclass(frozen=True, slots=True)
class Factors:
    """Both factors of one matrix of the model."""

    a: StoredTensor
    b: StoredTensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    name: str
    folder: Path
    """With all links followed."""
    base: str
    """The model it says it was trained on; empty: it does not say."""
    factors: Mapping[str, Factors] = field(repr=False)
    """By the spec's names: layers.3.q"""
    stamp: str
    """Changes when its files do."""

    @property
    def rank(self) -> int:
        return max(factors.rank for factors in self.factors.values())


def find_folder(path: str, allowed: Sequence[Path] | None) -> Path:
    """The folder with all links followed, if it lies in one that is allowed (None: anywhere). Whether there is
    something elsewhere is not told."""
    refused = AdapterError(
        "there is no such folder among those that adapters may be loaded from",
        code=NOT_ALLOWED,
        needed="the absolute path of a folder inside one that was allowed at startup",
        fix="check the path; if it is right, start the server with --lora-folders FOLDER",
        field="lora_path",
    )
    try:
        folder = Path(path).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        if allowed is not None:
            raise refused from None
        raise AdapterError(f"there is no folder {shorten(path)}", code=NOT_ALLOWED, field="lora_path") from None
    if allowed is not None and not _within(folder, allowed):
        raise refused
    if not os.path.isdir(folder):  # Unlike Path's, it takes a folder that may not be looked into for none.
        raise AdapterError(
            "an adapter is a folder",
            code=NOT_THERE,
            needed=f"{CONFIG} and {WEIGHTS} in it",
            found="a file",
            field="lora_path",
        )
    return folder


def read_adapter(
    folder: Path, spec: ModelSpec, *, name: str, model: str, max_rank: int, allowed: Sequence[Path] | None = None
) -> Adapter:
    """`folder` from `find_folder`; `model`: what the served model is called. Raises AdapterError for what is no PEFT
    adapter, needs what is not there, or was made for another model."""
    config = read_config(_small(folder / CONFIG, allowed), CONFIG)
    tensors = _header(folder, allowed)
    base = f"{name}, an adapter of {shorten(config.base) or 'an unnamed model'}"
    _check_vocabulary(folder, tensors, spec, base, model, allowed)
    factors = _match(tensors, spec, config, base, model)
    found = Adapter(name=name, folder=folder, base=config.base, factors=factors, stamp=stamp(folder))
    if found.rank > max_rank:
        raise AdapterError(
            f"{name} has rank {found.rank}, but the maximum is {max_rank}",
            code=TOO_WIDE,
            needed=f"--max-lora-rank {found.rank}",
            found=str(max_rank),
            fix=f"--max-lora-rank {found.rank}",
            field="max_lora_rank",
        )
    return found


def stamp(folder: Path) -> str:
    """Of its two files as they are now."""
    try:
        states = [os.stat(folder / file) for file in (CONFIG, WEIGHTS)]
    except OSError:
        raise AdapterError(
            "the adapter's files are gone",
            code=CHANGED,
            needed=f"{CONFIG} and {WEIGHTS}",
            fix="unload it, or restore them",
            field="lora_path",
        ) from None
    return stamp_of(states)


def stamp_of(states: Sequence[os.stat_result]) -> str:
    """Of both files, in that order."""
    # Not the time of writing alone: copies may keep that (cp -p, rsync -t), and nobody sets the time of change.
    return "-".join(
        f"{state.st_ino:x}.{state.st_size:x}.{state.st_mtime_ns:x}.{state.st_ctime_ns:x}" for state in states
    )


def changed(name: str) -> AdapterError:
    return AdapterError(
        f"the files of {name} have changed since they were loaded",
        code=CHANGED,
        needed="the same files",
        fix="unload it and load it again; from Python LoRARequest(..., load_inplace=True)",
        field="model",
    )


def not_finite(name: str, dtype: str) -> AdapterError:
    return AdapterError(
        f"{name} contains non-finite values in {dtype}",
        code=NOT_FINITE,
        needed="finite factors",
        fix="train it again: with such values every output is empty or noise",
        field="model",
    )


def too_slow(name: str, limit_s: float) -> AdapterError:
    return AdapterError(
        f"the files of {name} could not be read within {limit_s:g} s",
        code=TOO_SLOW,
        needed="a disk or file server that responds",
        fix="copy the adapter to a local disk",
        field="model",
    )


def _within(path: Path, allowed: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in allowed)


def _outside(file: str) -> AdapterError:
    """A link out of an allowed folder is no way out of it."""
    return AdapterError(
        f"{file} is outside the folders that adapters may be loaded from",
        code=NOT_ALLOWED,
        needed="a file in a folder that was allowed at startup, not a link out of it",
        fix="copy the file into the adapter's folder, or allow the folder it is in: --lora-folders FOLDER",
        field="lora_path",
    )


def _small(path: Path, allowed: Sequence[Path] | None) -> bytes:
    try:
        raw = read_small(path, within=allowed)
    except OutsideError:
        raise _outside(path.name) from None
    except CheckpointError as error:
        raise AdapterError(f"{path.name} cannot be read", code=NOT_THERE, field="lora_path") from error
    if raw is None:
        raise AdapterError(
            f"there is no {path.name} in that folder",
            code=NOT_THERE,
            needed=f"a PEFT adapter: {CONFIG} and {WEIGHTS}",
            field="lora_path",
        )
    return raw


def _header(folder: Path, allowed: Sequence[Path] | None) -> dict[str, StoredTensor]:
    path = folder / WEIGHTS
    try:
        with open_file(path, allowed) as file:
            # Under its own name: what is said of it may reach a client, who need not know where it lies.
            tensors = parse_header(Path(WEIGHTS), os.fstat(file.fileno()).st_size, file.read)
    except FileNotFoundError:
        if (folder / PICKLE).exists():
            raise AdapterError(
                f"{PICKLE} is a pickle: opening one runs the code inside it",
                code=PICKLED,
                needed=WEIGHTS,
                fix="save the adapter with safe_serialization=True if you trust it",
                field="lora_path",
            ) from None
        raise AdapterError(f"there is no {WEIGHTS} in that folder", code=NOT_THERE, field="lora_path") from None
    except OutsideError:
        raise _outside(WEIGHTS) from None
    except CheckpointError as error:
        said = error.message.replace(str(path), WEIGHTS)
        raise AdapterError(said, code=NOT_THERE, needed=error.needed, found=error.found, field="lora_path") from error
    except OSError as error:
        raise AdapterError(f"{WEIGHTS} cannot be read: {error.strerror}", code=NOT_THERE, field="lora_path") from error
    return {name: replace(tensor, path=path) for name, tensor in tensors.items()}


def _check_vocabulary(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    spec: ModelSpec,
    base: str,
    model: str,
    allowed: Sequence[Path] | None,
) -> None:
    for name, tensor in tensors.items():
        found = _VOCABULARY.fullmatch(name)
        if found is None:
            continue
        rows = tensor.shape[0] if name.endswith((f"{found['module']}.weight", ".lora_B.weight")) else spec.vocab_size
        if rows != spec.vocab_size:
            raise _another(f"it has a vocabulary of {rows:,} tokens", f"{spec.vocab_size:,}", base, model)
        raise AdapterError(
            f"{base}: it changes {found['module']}, but only the layers between embedding and head can be adapted",
            code=NOT_THERE,
            needed="factors for layers only",
            found=shorten(name),
            fix="merge it into the model, or train it without the embedding and the head",
            field="lora_path",
        )
    beyond = next((index for index in _added_ids(folder, allowed) if index >= spec.vocab_size), None)
    if beyond is not None:
        raise _another(f"its tokenizer has a token {beyond:,}", f"ids below {spec.vocab_size:,}", base, model)


def _added_ids(folder: Path, allowed: Sequence[Path] | None) -> list[int]:
    """Of tokens that the adapter's own tokenizer adds, where one lies in its folder."""
    ids: list[int] = []
    for file, table in (("added_tokens.json", None), ("tokenizer_config.json", "added_tokens_decoder")):
        try:
            raw = read_small(folder / file, within=allowed)
            found: Any = {} if raw is None else parse_table(raw, file)
        except OutsideError:
            raise _outside(file) from None
        except CheckpointError:
            continue  # It is not what answers are made with.
        if table is not None:
            found = found.get(table)
            # Of the longest only the beginning: Python reads no number of thousands of digits.
            ids += [int(key[:18]) for key in found if _INDEX.fullmatch(key)] if isinstance(found, dict) else []
        else:
            ids += [value for value in found.values() if type(value) is int]
    return ids


def _another(what: str, needed: str, base: str, model: str) -> AdapterError:
    return AdapterError(
        f"{base}, does not match {model}: {what}",
        code=ANOTHER_BASE,
        needed=f"{needed}, as {model} has it",
        found=what,
        fix="serve the model that the adapter was trained on",
        field="lora_path",
    )


def _match(
    tensors: Mapping[str, StoredTensor], spec: ModelSpec, config: AdapterConfig, base: str, model: str
) -> dict[str, Factors]:
    modules = adaptable(spec)
    halves: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        found = _FACTOR.fullmatch(name)
        if found is None:
            raise AdapterError(
                f"{base}: {shorten(name)} is not a LoRA factor",
                code=NOT_THERE,
                needed="MODULE.lora_A.weight and MODULE.lora_B.weight",
                found=shorten(name),
                field="lora_path",
            )
        halves.setdefault(found["module"], {})[found["factor"]] = tensor
    if not halves:
        raise AdapterError(f"{base}: there are no factors in {WEIGHTS}", code=NOT_THERE, field="lora_path")
    factors: dict[str, Factors] = {}
    for module, pair in halves.items():
        target = modules.get(module)
        if target is None:
            sample = ", ".join(list(modules)[:3])
            raise _another(f"it changes {shorten(module)}", f"modules such as {sample}", base, model)
        if not config.targets(module):
            raise AdapterError(
                f"{base}: {shorten(module)} is not among its target_modules",
                code=NOT_THERE,
                found=shorten(str(config.target_modules)),
                field="lora_path",
            )
        factors[target.name] = _factors(module, pair, target, config, base, model)
    return factors


def adaptable(spec: ModelSpec) -> dict[str, TensorSpec]:
    """The matrices that can be adapted, by the module's name in safetensors: those of layers, without experts."""
    return {
        tensor.hf_name.removesuffix(".weight"): tensor
        for tensor in spec.tensors
        if tensor.linear
        and tensor.layer is not None
        and tensor.part == "text"
        and len(tensor.shape) == 2
        and ".experts." not in tensor.name
        and ".shared." not in tensor.name
    }


def _factors(
    module: str, pair: Mapping[str, StoredTensor], target: TensorSpec, config: AdapterConfig, base: str, model: str
) -> Factors:
    a, b = pair.get("A"), pair.get("B")
    if a is None or b is None:
        raise AdapterError(f"{base}: {module} has only one of its two factors", code=NOT_THERE, field="lora_path")
    rows, columns = target.shape
    good = len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1] >= 1
    if not good or (b.shape[0], a.shape[1]) != (rows, columns):
        raise _another(
            f"its {module} is A {list(a.shape)} and B {list(b.shape)}",
            f"A [rank, {columns}] and B [{rows}, rank]",
            base,
            model,
        )
    for tensor in (a, b):
        if tensor.layout not in READABLE:
            raise AdapterError(
                f"{base}: {shorten(tensor.name)} is stored as {tensor.layout}",
                code=NOT_THERE,
                needed=", ".join(READABLE),
                found=tensor.layout,
                field="lora_path",
            )
    rank = a.shape[0]
    alpha = config.alpha(module)
    return Factors(a, b, alpha / (math.sqrt(rank) if config.use_rslora else rank))
