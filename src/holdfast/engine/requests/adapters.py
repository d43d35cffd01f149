"""The adapters that an engine serves beside its model, by name: looked at when they are loaded, in the front's process.

What it hands out is a name, a number and where the files lie; tensors are read where they are computed with. Numbers
are never given twice, so that nobody computes with what was loaded for another. Cached prefixes are named by the files.
Where other machines compute too, it hands out a digest of the files as well, by which they know theirs to be the same.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.checkpoints.lora.adapter import Adapter, changed, find_folder, read_adapter, stamp
from holdfast.checkpoints.lora.same_files import digest, shared_path
from holdfast.config import EngineConfig
from holdfast.errors import AdapterError, ConfigurationError, RequestError, UnsupportedOptionError
from holdfast.models import ModelSpec
from holdfast.records import AdapterRef, LoRARequest
from holdfast.units import shorten

log = logging.getLogger("holdfast")

MOST_ADAPTERS = 4096
"""Known by name at a time; each takes a few hundred bytes until somebody asks for it."""
MAX_NAME_CHARS = 256
OTHER_KIND = "HFW09"
_INSTRUCTED = frozenset(("instruct", "chat", "it", "sft", "dpo", "rlhf", "assistant"))
_NO_MATTER = frozenset(
    (
        "base",
        "pt",
        "hf",
        "gguf",
        "fp16",
        "bf16",
        "f16",
        "f32",
        "q8",
        "q6",
        "q5",
        "q4",
        "q3",
        "q2",
        "k",
        "m",
        "s",
        "l",
        "0",
        "1",
        "awq",
        "gptq",
        "int4",
        "int8",
    )
)


@dataclass(frozen=True, slots=True)
class Loaded:
    ref: AdapterRef
    base: str
    """What it says it was trained on."""
    parent: str | None
    """The name of the model that it was loaded for, where somebody said so."""
    loaded_s: int
    """Since 1970."""


class Adapters:
    """`model`: what the served model is called. `allowed`: folders that runtime loads may come from; None: any."""

    def __init__(self, spec: ModelSpec, model: str, config: EngineConfig, allowed: Sequence[Path] | None = ()) -> None:
        self._spec, self._model, self._config = spec, model, config
        self._allowed = None if allowed is None else [place for folder in allowed for place in _places(folder)]
        self._by_name: dict[str, Loaded] = {}
        self._numbers = itertools.count(1)
        self._books = threading.Lock()

    @property
    def enabled(self) -> bool:
        return self._config.enable_lora

    @property
    def most_at_once(self) -> int:
        return self._config.lora_places

    @property
    def listed(self) -> list[Loaded]:
        return list(self._by_name.values())

    @property
    def classifies(self) -> bool:
        """The model answers with no token."""
        return self._spec.classifier is not None

    def named(self, name: str) -> AdapterRef | None:
        found = self.known(name)
        return None if found is None else found.ref

    def known(self, name: str) -> Loaded | None:
        return self._by_name.get(name)

    def allow(self, folder: str) -> None:
        """A folder named when the server was started: it may be loaded from again."""
        if self._allowed is not None:
            self._allowed += _places(Path(folder))

    def load(
        self, name: str, path: str, *, anywhere: bool = False, in_place: bool = False, parent: str | None = None
    ) -> AdapterRef:
        """Looks at its files and knows it from now on. `anywhere`: its path comes from whoever started the process.
        `in_place`: another of this name is replaced; requests that run with it go on with it."""
        return self.add(self.examine(name, path, anywhere=anywhere, in_place=in_place, parent=parent))

    def examine(
        self, name: str, path: str, *, anywhere: bool = False, in_place: bool = False, parent: str | None = None
    ) -> Loaded:
        """The first half of `load`, which reads files: it has a number then, and nobody can ask for it yet. May be
        called by any thread."""
        self._require()
        if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise AdapterError(
                "a LoRA adapter needs a name", needed=f"1 to {MAX_NAME_CHARS} printable characters", field="lora_name"
            )
        if name in self._by_name and not in_place:
            raise AdapterError(
                f"the LoRA adapter {shorten(name)!r} has already been loaded",
                fix="unload it first, or load_inplace: true",
                field="lora_name",
            )
        self._check_room(name)
        ref, adapter = self._look(name, path, next(self._numbers), None if anywhere else self._allowed)
        return Loaded(ref, adapter.base, parent, int(time.time()))

    def add(self, examined: Loaded) -> AdapterRef:
        """The second half of `load`: from now on its name stands for it."""
        self._by_name[examined.ref.name] = examined
        return examined.ref

    def unload(self, name: str) -> AdapterRef:
        """Requests that run with it go on."""
        found = self._by_name.pop(name, None)
        if found is None:
            raise AdapterError(f"the LoRA adapter {shorten(name)!r} is not loaded", field="lora_name")
        return found.ref

    def resolve(self, request: LoRARequest) -> AdapterRef:
        """Of Python's LoRARequest: loaded when it is first named. Its number stands for one adapter, as in vLLM, where
        a script may give it another name each time. May be called by any thread."""
        self._require()
        known = self._of_number(request.lora_int_id)
        if known is None:  # A new number is a new adapter, also under a name that another had.
            self._check_room(request.lora_name)
            ref, adapter = self._look(request.lora_name, request.lora_path, request.lora_int_id, None)
            with self._books:
                known = self._of_number(request.lora_int_id)
                if known is None:  # Nobody else was there first.
                    self._by_name[request.lora_name] = Loaded(ref, adapter.base, None, int(time.time()))
                    return ref
        if Path(request.lora_path).resolve() != Path(known.path):
            raise AdapterError(
                f"lora_int_id {request.lora_int_id} and {shorten(request.lora_name)!r} are of different LoRA adapters",
                needed="the same id and path in every LoRARequest of an adapter",
                field="lora_request",
            )
        if stamp(Path(known.path)) == known.stamp:
            return known
        if not request.load_inplace:
            raise changed(known.name)
        ref, adapter = self._look(known.name, request.lora_path, known.number, None)
        self._by_name[known.name] = Loaded(ref, adapter.base, None, int(time.time()))
        return ref

    def _of_number(self, number: int) -> AdapterRef | None:
        return next((one.ref for one in self.listed if one.ref.number == number), None)

    def one_each(
        self, requested: LoRARequest | Sequence[LoRARequest | None] | None, count: int
    ) -> list[AdapterRef | None]:
        """For so many prompts: one for all, or one or none for each."""
        if requested is None or isinstance(requested, LoRARequest):
            return [None if requested is None else self.resolve(requested)] * count
        if not isinstance(requested, list | tuple) or not all(
            one is None or isinstance(one, LoRARequest) for one in requested
        ):
            raise RequestError("lora_request contains something other than LoRARequest", field="lora_request")
        if len(requested) != count:
            raise RequestError(
                f"got {count} prompts and {len(requested)} lora_requests",
                needed="one for all prompts, or one for each",
                field="lora_request",
            )
        return [None if one is None else self.resolve(one) for one in requested]

    def _check_room(self, name: str) -> None:
        if name not in self._by_name and len(self._by_name) >= MOST_ADAPTERS:
            raise AdapterError(
                f"{MOST_ADAPTERS} LoRA adapters are loaded, which is the limit",
                fix="unload some adapters",
                field="lora_name",
            )

    def _require(self) -> None:
        if not self.enabled:
            raise UnsupportedOptionError("LoRA is not enabled", fix="--enable-lora", field="lora_name")

    def _look(self, name: str, path: str, number: int, allowed: Sequence[Path] | None) -> tuple[AdapterRef, Adapter]:
        folder = find_folder(path, allowed)
        adapter = read_adapter(
            folder, self._spec, name=name, model=self._model, max_rank=self._config.lora_rank, allowed=allowed
        )
        said = trained_on_another(adapter.base, self._model)
        if said is not None:
            log.warning("LoRA adapter %s: %s", shorten(name), said)
        if self._config.nnodes == 1:
            return AdapterRef(name, number, str(folder), adapter.stamp), adapter
        told, same = shared_path(path, folder), digest(folder, name, adapter.stamp)
        return AdapterRef(name, number, str(folder), adapter.stamp, told, same), adapter


def trained_on_another(base: str, model: str) -> str | None:
    """A warning where one of the two is the other made to follow instructions."""
    (stem, instructed), (served, serves) = _told_by_name(base), _told_by_name(model)
    if not base or stem != served or instructed == serves:
        return None
    return (
        f"it was trained on {shorten(base)}, but {shorten(model)} is served: one of them is instruction-tuned and "
        f"the other is not, so the output may be worse than that of either [{OTHER_KIND}]"
    )


def _told_by_name(name: str) -> tuple[tuple[str, ...], bool]:
    """What is left of a model's name without what tells base and instruct apart, and whether it is the latter."""
    last = name.rstrip("/").rsplit("/", 1)[-1].lower().removesuffix(".gguf")
    words = [word for word in re.split(r"[^a-z0-9.]+", last) if word]
    return tuple(word for word in words if word not in _INSTRUCTED | _NO_MATTER), bool(_INSTRUCTED & set(words))


def check_lora_dtype(config: EngineConfig, dtype: str) -> None:
    if config.enable_lora and config.lora_dtype not in ("auto", dtype):
        raise ConfigurationError(
            f"lora_dtype must equal the compute dtype, which is {dtype}",
            needed=f"lora_dtype {dtype}, or auto",
            found=config.lora_dtype,
            fix="leave --lora-dtype out",
            field="lora_dtype",
        )


@dataclass(frozen=True, slots=True)
class LoraModule:
    """As --lora-modules names one."""

    name: str
    path: str
    base_model_name: str | None = None


def read_module(written: str) -> LoraModule:
    """`name=path`, or vLLM's JSON with name, path and base_model_name."""
    if not written.lstrip().startswith("{"):
        name, equals, path = written.partition("=")
        if not equals or not name or not path:
            raise _wrong_module(written)
        return LoraModule(name, path)
    try:
        found = msgspec.json.decode(written)
    except msgspec.DecodeError as error:
        raise _wrong_module(written) from error
    fields = {"name", "path", "base_model_name"}
    if not isinstance(found, dict) or not {"name", "path"} <= found.keys() <= fields:
        raise _wrong_module(written)
    if not all(isinstance(value, str) for value in found.values() if value is not None):
        raise _wrong_module(written)
    return LoraModule(**found)


def _wrong_module(written: str) -> ConfigurationError:
    return ConfigurationError(
        f"--lora-modules: {shorten(written)!r} is not valid",
        needed='NAME=FOLDER, or {"name": ..., "path": ...}',
        found=shorten(written),
        fix="--lora-modules sql=./adapters/sql",
        field="lora_modules",
    )


def load_modules(adapters: Adapters, written: Sequence[str], names: Sequence[str]) -> None:
    """Those that are named at start; `names`: what the model itself is called."""
    for module in map(read_module, written):
        if module.name in names:
            raise ConfigurationError(
                f"--lora-modules: {module.name!r} is the name of the base model", field="lora_modules"
            )
        if module.base_model_name not in (None, *names):
            raise ConfigurationError(
                f"--lora-modules: {module.name} is for {module.base_model_name}, which is not served",
                needed=", ".join(names),
                found=module.base_model_name,
                field="lora_modules",
            )
        try:
            adapters.load(module.name, module.path, anywhere=True, parent=module.base_model_name)
        except AdapterError as error:
            raise ConfigurationError(
                f"--lora-modules: {error.message}",
                code=error.code,
                needed=error.needed,
                found=error.found,
                fix=error.fix,
                field="lora_modules",
            ) from error
        adapters.allow(module.path)


def _places(folder: Path) -> list[Path]:
    """The folder with all links followed; of a snapshot in the hub's cache, whose files are links, also that of its
    files."""
    found = folder.resolve()
    snapshots = [one for one in (found, *found.parents) if one.name == "snapshots"]
    return [found, *(one.parent / "blobs" for one in snapshots if one.parent.name.startswith("models--"))]
