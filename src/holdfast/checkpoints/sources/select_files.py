"""Which of a folder's or repository's files are the model: safetensors over GGUF, GGUF by quantization, never pickles.

Works on names alone, so that a folder here and a repository far away are judged alike. Opens nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import CheckpointError
from holdfast.units import shorten

INDEX_NAME = "model.safetensors.index.json"
EMBEDDING_MARK = "modules.json"
"""sentence-transformers': it is beside models that were trained to embed."""
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_QUANTIZATION = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|NVFP4|BF16|FP?16|FP?32))$", re.IGNORECASE)
_GGUF_HELPERS = ("mmproj", "imatrix", "ggml-vocab")
"""Beside models of the same name lie projectors of images, statistics and bare vocabularies."""


@dataclass(frozen=True, slots=True)
class FileChoice:
    format: Literal["safetensors", "gguf", "none"]
    weights: tuple[str, ...]
    """In the order of their parts; for safetensors an index, where there is one, has the last word."""
    reason: str
    """One line a person can read: what was taken, over what."""


def choose_weights(names: Collection[str], where: str, wanted: str | None = None) -> FileChoice:
    """`names` relative, with forward slashes; `wanted` a quantization or a GGUF file's name.

    Raises CheckpointError when there are several to choose from, only pickles, or not what was wanted.
    """
    ggufs = _gguf_models(names)
    if wanted is not None:
        chosen = _wanted_gguf(ggufs, where, wanted)
        return FileChoice("gguf", chosen, _reason(f"{_spell(chosen)}, selected with {wanted}", names, chosen))
    plain = _plain_safetensors(names, where)
    if plain:
        return FileChoice("safetensors", plain, _reason(_spell(plain), names, plain))
    top = {base: parts for base, parts in ggufs.items() if "/" not in base} or ggufs
    if len(top) == 1:
        (parts,) = top.values()
        chosen = part_names(parts[0], where=where, there=parts.__contains__)
        return FileChoice("gguf", chosen, _reason(_spell(chosen), names, chosen))
    if top:
        raise _several(top, where)
    pickles = pickles_in(names)
    if pickles:
        raise pickles_refused(where, pickles)
    return FileChoice("none", (), "no weights")


def pickles_in(names: Iterable[str]) -> list[str]:
    """Those that are weights in pickle form; what a trainer leaves behind lies in many good repositories."""
    return [name for name in names if name.endswith(_PICKLE_SUFFIXES) and name.rpartition("/")[2] not in _NO_WEIGHTS]


def pickles_refused(where: str, names: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{where}: pickle files are refused, because opening one runs the code inside it",
        code="HF232",
        needed="*.safetensors or a .gguf file",
        found=shorten(", ".join(names)),
        fix="convert it to safetensors if you trust it: "
        "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OUT)",
    )


def quantization_of(name: str) -> str | None:
    """`Q4_K_M` of model-Q4_K_M-00001-of-00002.gguf; None when the name does not say."""
    found = _QUANTIZATION.search(_base(name).rpartition("/")[2])
    return None if found is None else found[1].upper()


def gguf_choices(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The GGUF models among the files, by what each is asked for with: owner/name:LABEL."""
    models = _gguf_models(names)
    return dict(zip(_labels(models), models.values(), strict=True))


def _plain_safetensors(names: Collection[str], where: str) -> tuple[str, ...]:
    found = sorted(name for name in names if "/" not in name and name.endswith(".safetensors"))
    if "model.safetensors" in found and INDEX_NAME not in names:
        return ("model.safetensors",)  # what lies beside it are variants and parts of other programs
    models = [name for name in found if not name.startswith("adapter_")]
    if found and not models:
        raise CheckpointError(
            f"{where}: an adapter, not a model",
            needed="the weights of a whole model",
            found=shorten(", ".join(found)),
            fix="use the base model that adapter_config.json names",
        )
    # Some publishers put the whole model a second time into consolidated.safetensors, under other names.
    return tuple([name for name in models if not name.startswith("consolidated")] or models)


def _gguf_models(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The files of each model, by name without part and suffix, or that of one file that is a whole model."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        file = name.rpartition("/")[2].lower()
        if file.endswith(".gguf") and not any(word in file for word in _GGUF_HELPERS):
            models.setdefault(_base(name), []).append(name)
    return {base: tuple(parts) for base, parts in models.items()}


def _base(name: str) -> str:
    part = _PART.fullmatch(name)
    return part[1] if part is not None else name[: -len(".gguf")]


def _wanted_gguf(models: dict[str, tuple[str, ...]], where: str, wanted: str) -> tuple[str, ...]:
    if not models:
        raise CheckpointError(
            f"{where}: {shorten(wanted)!r} was requested, but there is no GGUF file to choose",
            fix=f"leave it out: {where}",
        )
    if wanted.lower().endswith(".gguf"):
        found = [base for base, parts in models.items() if any(_same_file(name, wanted) for name in parts)]
    else:
        label = wanted.upper()
        found = [base for base, parts in models.items() if quantization_of(parts[0]) in (label, f"UD-{label}")]
        # Where both are there, the plain one was meant.
        found = [base for base in found if quantization_of(models[base][0]) == label] or found
    if len(found) == 1:
        parts = models[found[0]]
        return part_names(parts[0], where=where, there=parts.__contains__)
    if found:
        raise _several({base: models[base] for base in found}, where)
    raise CheckpointError(
        f"{where}: no GGUF file for {shorten(wanted)!r}",
        needed="one of " + shorten(", ".join(_labels(models)), 400),
        fix=f"{where}:{_labels(models)[0]}",
    )


def _same_file(name: str, wanted: str) -> bool:
    return name == wanted or name.rpartition("/")[2].lower() == wanted.lower()


def part_names(name: str, *, where: str, there: Callable[[str], bool]) -> tuple[str, ...]:
    """All parts of the model that this file is one of, in order; itself when it is whole.

    Raises CheckpointError when `there` does not know one of them.
    """
    part = _PART.fullmatch(name)
    if part is None:
        return (name,)
    count = int(part[3])
    expected = [f"{part[1]}-{number:05}-of-{part[3]}.gguf" for number in range(1, count + 1)]
    missing = [other for other in expected if not there(other)]
    if missing or name not in expected:
        raise CheckpointError(
            f"{where}: {len(missing)} of the {count} parts of this GGUF are missing",
            found=shorten("no " + ", ".join(missing[:3])),
            fix="download the model again",
        )
    return tuple(expected)


def _labels(models: dict[str, tuple[str, ...]]) -> list[str]:
    """How each can be asked for: by quantization where that is enough, else by its file."""
    named = [(quantization_of(parts[0]), parts[0]) for parts in models.values()]
    quantizations = [label for label, _ in named]
    return [label if label and quantizations.count(label) == 1 else file for label, file in named]


def _several(models: dict[str, tuple[str, ...]], where: str) -> CheckpointError:
    labels = _labels(models)
    return CheckpointError(
        f"{where}: several GGUF models ({len(models)}), and none was selected",
        found=shorten(", ".join(labels), 400),
        fix=f"select one of them: {where}:{labels[0]}",
    )


def _spell(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _reason(taken: str, names: Collection[str], chosen: tuple[str, ...]) -> str:
    suffixes = (".safetensors", ".gguf")
    others = sorted(name for name in names if name.endswith(suffixes) and name not in chosen) + sorted(
        pickles_in(names)
    )
    return taken if not others else f"{taken}; left out: " + shorten(", ".join(others), 160)
