"""Other models to plan instead of one: quantized variants of it, and smaller ones. Out of the catalogue, or derived.

Fits nothing and ranks nothing by fit; entries that cannot be described are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter

from holdfast.errors import HoldfastError
from holdfast.footprint.identity_key import Same
from holdfast.footprint.layouts import is_quantized
from holdfast.models import QuantSpec, catalogue
from holdfast.models.catalogue import CatalogueEntry
from holdfast.models.registry import describe_config
from holdfast.planner.inputs.question import PlannedModel
from holdfast.planner.models.quantize import as_plain, quantized_as
from holdfast.planner.sizing.engine_weights import held_or_not

GGUF_TYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M")
LOW_GGUF_TYPES = ("Q3_K_M", "IQ3_XXS", "IQ2_XXS")
"""Below four bits, most first: for where nothing else fits."""
TWO_BIT_GGUF_TYPES = ("IQ2_XXS",)
HOLDFAST_GGUF_TYPES = ("Q8_0", "Q4_1", "Q4_0")
"""What the engine computes with as it is stored."""

VARIANT_ENDS = ("-awq", "-gptq", "-gptq-int4", "-gptq-int8", "-fp8", "-int8", "-w4a16")
"""Names of entries that are another entry, quantized."""
_LETTERS = re.compile("[a-z]+")
_SIZE = re.compile(r"-(?:\d+x)?[a-z]?\d+(?:\.\d+)?[mb](?=-|$)")
_VERSION = re.compile(r"[a-z]+-?(\d+(?:\.\d+)*)(?=-|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    model: PlannedModel
    label: str
    """For people: AWQ (hugging-quants/...), NF4 made while loading."""
    method: str
    published: bool
    """A checkpoint that can be fetched; else one that has to be made, or is made while loading."""
    made_of: str | None = None
    """The model that it is made of, where that is another than was planned."""


def entry_of(model: PlannedModel) -> CatalogueEntry | None:
    return catalogue.lookup(model.name)


def is_plain(model: PlannedModel) -> bool:
    """Not quantized yet."""
    if model.spec.quantization is not None:
        return False
    return not any(is_quantized(tensor.layout) for tensor in (model.stored or {}).values())


def published_variants(model: PlannedModel) -> Iterator[Variant]:
    """Quantized checkpoints of the same model that the catalogue knows, most bits first."""
    found = _quantized_entries(model) if is_plain(model) else ()
    for stored, other in sorted(found, key=lambda one: -one[0].bits):
        label = f"{stored.method.upper()} ({other.name})"
        yield Variant(model=other, label=label, method=stored.method, published=True)


def published_as(model: PlannedModel) -> PlannedModel | None:
    """Of a model that is planned as if it were quantized: a checkpoint that the catalogue knows to be stored so."""
    wanted = model.spec.quantization
    if wanted is None or model.made_as is None:
        return None
    for stored, other in _quantized_entries(model):
        if (stored.method, stored.bits, stored.group_size) == (wanted.method, wanted.bits, wanted.group_size):
            return other
    return None


def _quantized_entries(model: PlannedModel) -> Iterator[tuple[QuantSpec, PlannedModel]]:
    base = entry_of(model)
    for entry in catalogue.entries():
        if base is not None and entry.quantized and entry.name.startswith(base.name + "-"):
            other = planned(entry)
            if other is not None and other.spec.quantization is not None and _same_shape(model, other):
                yield other.spec.quantization, other


def derived_variants(model: PlannedModel, methods: tuple[str, ...]) -> Iterator[Variant]:
    """The same shapes, quantized."""
    labels = {
        "fp8": "FP8, quantized while loading",
        "int4": "INT4, quantized by Holdfast while loading",
        "nf4": "NF4 (4 bits), quantized by vLLM while loading",
    }
    for method in methods:
        try:
            other = quantized_as(model, method)
        except HoldfastError:
            continue
        if other is model:
            continue
        label = labels.get(method, f"{method} (a GGUF of it)")
        yield Variant(model=other, label=label, method=method, published=False)


def lower_variants(model: PlannedModel) -> Iterator[Variant]:
    """A GGUF of fewer bits than engines are usually given, most bits first; of a quantized model, made of what it was
    made of."""
    if is_plain(model):
        yield from derived_variants(model, LOW_GGUF_TYPES)
        return
    plain = unquantized(model)
    if plain is None:
        return
    for variant in derived_variants(plain, ("Q4_K_M", *LOW_GGUF_TYPES)):
        if plain.name == model.name:
            yield variant
        else:
            label = f"{variant.method} (a GGUF of {plain.name})"
            yield replace(variant, label=label, made_of=plain.name)


def unquantized(model: PlannedModel) -> PlannedModel | None:
    """What a GGUF could be made of instead of this quantized model; None: not known. FP8 is unpacked first."""
    quantization = model.spec.quantization
    if model.made_as is not None or (quantization is not None and quantization.method == "fp8"):
        return as_plain(model)
    return base_of(model)


def base_of(model: PlannedModel) -> PlannedModel | None:
    """The unquantized model that this quantized one was made of: itself where it is only planned as if it were
    quantized, else the catalogue's."""
    entry = entry_of(model)
    if model.made_as is not None:
        # A GGUF has the text model alone, and what it is made of a vision tower too.
        whole = planned(entry) if entry is not None and model.format == "gguf" else None
        return whole if whole is not None and whole.name == model.name and is_plain(whole) else as_plain(model)
    if entry is None or model.origin == "file":
        return None
    ending = next((end for end in VARIANT_ENDS if entry.name.endswith(end)), None)
    base = None if ending is None else catalogue.lookup(entry.name.removesuffix(ending))
    other = None if base is None else planned(base)
    return other if other is not None and is_plain(other) and _same_shape(model, other) else None


def smaller_models(model: PlannedModel, most_bytes: int) -> Iterator[PlannedModel]:
    """Of the same series (llama-3.1) first, the largest first; then of the same kin (llama) and maker, then of others,
    the newest first. Quantized ones only where the maker publishes nothing else."""
    base = entry_of(model)
    name, maker = (model.spec.family, "") if base is None else (base.name, _maker(base))
    own = model.spec.parameters  # A sum over all tensors.
    smaller = [entry for entry in _small_enough(most_bytes) if (entry.parameters or 0) < own]

    def nearness(entry: CatalogueEntry) -> tuple[object, ...]:
        near = (_series(entry.name) != _series(name), _kin(entry.name) != _kin(name), _maker(entry) != maker)
        newest = tuple(-number for number in _version(entry.name)) if not near[1] else ()
        return (*near, newest, -(entry.parameters or 0))

    for entry in sorted(smaller, key=nearness):
        other = planned(entry)
        if other is not None:
            yield other


def longer_models(model: PlannedModel, tokens: int, most_bytes: int) -> Iterator[PlannedModel]:
    """Made for so many tokens at least, and small enough for `most_bytes`: of the same kin and near its size first."""
    base = entry_of(model)
    name = model.spec.family if base is None else base.name
    stored_bytes = 2 if model.made_as is None else 0.25  # They are quantized as this one; two bits are the least.
    others, own = _small_enough(most_bytes, stored_bytes), model.spec.parameters

    def nearness(entry: CatalogueEntry) -> tuple[object, ...]:
        times = (entry.parameters or 1) / own
        return (_kin(entry.name) != _kin(name), max(times, 1 / times))

    for entry in sorted(others, key=nearness):
        other = planned(entry)
        if other is not None and other.spec.max_position >= tokens:
            yield other


def _small_enough(most_bytes: int, plain_bytes: float = 2) -> list[CatalogueEntry]:
    """Entries of models whose weights may fit, but for quantized variants of other entries. `plain_bytes`: of a
    parameter that is not quantized."""
    return [
        entry
        for entry in catalogue.entries()
        if entry.parameters is not None
        and entry.parameters * (0.5 if entry.quantized else plain_bytes) <= most_bytes
        and not entry.name.endswith(VARIANT_ENDS)
    ]


def _kin(name: str) -> str:
    found = _LETTERS.match(name.lower())
    return found[0] if found is not None else ""


def _series(name: str) -> str:
    """The name up to its size: llama-3.1 of llama-3.1-70b."""
    return _SIZE.split(name.lower(), maxsplit=1)[0]


def _version(name: str) -> tuple[int, ...]:
    """As many numbers for every name, so that 3 is older than 3.2."""
    found = _VERSION.match(name.lower())
    numbers = [] if found is None else [int(part) for part in found[1].split(".")]
    return tuple([*numbers, 0, 0, 0][:3])


def _maker(entry: CatalogueEntry) -> str:
    return entry.hub_id.partition("/")[0]


def planned(entry: CatalogueEntry) -> PlannedModel | None:
    """None: this version cannot describe it."""
    try:
        return of_entry(Same(entry), entry.hub_id)
    except HoldfastError:
        return None


@lru_cache(maxsize=64)
def of_entry(key: Same[CatalogueEntry], name: str) -> PlannedModel:
    """The same for every GPU that it is compared on: what is counted of it is counted once."""
    entry = key.held
    return PlannedModel(
        name=name,
        spec=held_or_not(describe_config(entry.config), None),
        origin="catalogue",
        published_parameters=entry.parameters,
        unchecked=entry.checked is None,
    )


def _same_shape(model: PlannedModel, other: PlannedModel) -> bool:
    sizes = attrgetter("hidden_size", "vocab_size", "heads", "kv_heads")
    return len(model.spec.layers) == len(other.spec.layers) and bool(sizes(model.spec) == sizes(other.spec))
