"""Resolves a model name to shapes and stored tensors. Reads headers and configs, never weights.

    an existing path ─► a built-in name ─► a name of the catalogue ─► a hub id: headers by range requests

A hub id whose hub cannot be reached, or denies access, is taken from the catalogue if it is there. Every choice comes
back with its reason. Knows no budget and no machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from holdfast.checkpoints import (
    DEFAULT_MODEL,
    ENGINE_LAYOUTS,
    Checkpoint,
    ModelFiles,
    StoredTensor,
    as_stored,
    describe,
    locate_headers,
    match,
    open_checkpoint,
    require_agreement,
)
from holdfast.checkpoints.sources import builtin
from holdfast.checkpoints.sources.select_files import quantization_of
from holdfast.checkpoints.validation.match import find_tensors, lacking
from holdfast.config.parts.gguf_kinds import kind_of
from holdfast.errors import CheckpointError, ConfigurationError, ModelAccessError, ModelError, ModelNotFoundError
from holdfast.footprint.identity_key import Same
from holdfast.models import ModelSpec, catalogue
from holdfast.models.catalogue import CatalogueEntry
from holdfast.observability.decisions import Decision
from holdfast.planner.inputs.question import PlannedModel
from holdfast.planner.inputs.timeout import within
from holdfast.planner.models.gguf_mixes import description
from holdfast.planner.models.quantize import quantized_as
from holdfast.planner.models.variants import of_entry
from holdfast.planner.sizing.engine_weights import OF_QUANTIZATION, held_or_not
from holdfast.planner.sizing.sharded_weights import require_known_layouts
from holdfast.units import format_bytes, shorten

HUB_FIRST_ANSWER_S = 3.0
"""Without a network nobody waits longer; HF_HUB_ETAG_TIMEOUT allows a slow one more."""
MOST_PATIENCE_S = 600.0
HUB_PATIENCE_S = 10.0
"""For a model that the catalogue knows too: a network that swallows packets must not hold up the answer."""


@dataclass(frozen=True, slots=True)
class Resolved:
    model: PlannedModel
    decisions: tuple[Decision, ...]


def resolve_model(name: str | None = None, *, revision: str | None = None, quantization: str | None = None) -> Resolved:
    """None is the built-in default. Raises ModelError (not there, torn, unknown) or ConfigurationError."""
    wanted = DEFAULT_MODEL if name is None else name
    _require_name(wanted)
    builtin.refuse_revision(wanted, revision)
    try:
        found = _find(wanted, revision)
    except ModelError as error:
        error.field = error.field or "model"
        raise
    if quantization is None:
        return replace(found, decisions=(*found.decisions, *_as_a_tag(wanted, found.model)))
    model = quantized_as(found.model, quantization)
    if model is found.model:
        decision = Decision("quantization", quantization, "the model is stored this way", "model")
    else:
        mixed = description(model.made_as) if model.format == "gguf" and model.made_as else ""
        reason = "planned as if the model were quantized this way; bytes are computed from its shapes"
        reason += f": {mixed}" if mixed else ""
        decision = Decision("quantization", quantization, reason, "set")
    return Resolved(model, (*found.decisions, decision))


def _as_a_tag(wanted: str, model: PlannedModel) -> Iterator[Decision]:
    """`llama3.1:8b`, for those who know the name from Ollama."""
    plain = model.origin == "catalogue" and model.format == "none" and model.spec.quantization is None
    if plain and ":" in wanted and "/" not in wanted:
        reason = f"{wanted} is taken as the unquantized {model.name}; what Ollama downloads for such a tag is"
        reason += " quantized, usually as Q4_K_M: -q Q4_K_M plans that"
        yield Decision("weights", "unquantized", reason, "catalogue")


def _find(wanted: str, revision: str | None) -> Resolved:
    entry = builtin.find(wanted)
    if entry is not None and not Path(wanted).expanduser().exists() and not builtin.is_cached(entry):
        known = catalogue.lookup(entry.title)
        if known is not None:
            return _not_fetched_yet(entry, known)
    if _is_here(wanted):
        return _from_files(locate_headers(wanted, revision=revision))
    return _from_afar(wanted, catalogue.lookup(wanted), revision)


def _from_afar(wanted: str, entry: CatalogueEntry | None, revision: str | None) -> Resolved:
    """By the catalogue's name, or at the hub."""
    if "/" not in wanted:
        # A bare name is no hub id: the catalogue says which ones come near. A missing file is said as such.
        looks_like_a_file = wanted.lower().endswith((".gguf", ".safetensors", ".json"))
        if entry is not None and revision is None:
            return _from_catalogue(entry, f"shapes of {entry.hub_id}, {entry.provenance}")
        if not looks_like_a_file:
            known = catalogue.find(wanted)
            raise ConfigurationError(
                f"revision {shorten(str(revision))!r} of {known.name} is not available: the catalogue has one shape for"
                " it",
                code="HF130",
                needed="a hub id such as owner/name",
                found=known.name,
                fix=f"leave --revision out, or use the hub id {known.hub_id}",
                field="revision",
            )
    if entry is None:
        try:
            return _from_files(locate_headers(wanted, revision=revision, patience_s=_first_answer_s()))
        except ModelAccessError as error:
            near = _without_network(wanted)
            if near is not None:
                error.fix = f"{'' if error.fix is None else f'{error.fix}; '}without the network: {near}"
            raise
    ask = partial(locate_headers, wanted, revision=revision, patience_s=_first_answer_s())
    try:
        return _from_files(_within(HUB_PATIENCE_S, wanted, ask))
    except ModelAccessError as error:
        if revision is not None:
            raise  # The catalogue does not know one revision from another.
        of = "the catalogue" if wanted == entry.hub_id else f"{entry.hub_id}, which the catalogue treats as the same"
        reason = f"the hub cannot be read ({shorten(error.message, 100)}); shapes of {of}, {entry.provenance}"
        return _from_catalogue(entry, reason, name=wanted)


def _without_network(wanted: str) -> str | None:
    """The plan of shapes that the catalogue has for somebody's quantized copy: of TheBloke/Llama-2-13B-chat-GPTQ, say.
    None: it has none, or the name does not tell in what the copy is stored."""
    name, _, kind = wanted.rpartition("/")[2].partition(":")
    base, _, ending = name.rpartition("-")
    known = catalogue.lookup(base)
    method = {"gguf": kind or "Q4_K_M"}.get(ending.lower(), ending.lower())
    if known is None or (kind_of(method) is None and method not in ("awq", "gptq", "fp8")):
        return None
    return f"holdfast plan {known.name} -q {method}"


def _first_answer_s() -> float:
    """As the hub's own library reads it: whole seconds."""
    set_s = os.environ.get("HF_HUB_ETAG_TIMEOUT", "")
    return min(float(set_s), MOST_PATIENCE_S) if set_s.isdecimal() and int(set_s) else HUB_FIRST_ANSWER_S


def _require_name(name: str) -> None:
    """What the system cannot even look for is not there."""
    try:
        Path(name).expanduser().exists()
        found = "an empty name" if not name else None
    except (OSError, RuntimeError, ValueError) as error:
        found = str(getattr(error, "strerror", None) or error)
    if found is not None:
        raise ModelNotFoundError(
            f"no model at {shorten(name)!r}",
            needed="a folder, a .gguf file, a built-in name, a hub id or a catalogue name",
            found=shorten(found),
            field="model",
        )


def _is_here(name: str) -> bool:
    """A path, a built-in name, or a folder with a choice behind a colon."""
    folder, colon, _ = name.rpartition(":")
    return (
        (bool(name) and Path(name).expanduser().exists())
        or builtin.find(name) is not None
        or (bool(colon) and bool(folder) and Path(folder).expanduser().is_dir())
    )


def _within(seconds: float, name: str, ask: Callable[[], ModelFiles]) -> ModelFiles:
    try:
        return within(seconds, ask)
    except TimeoutError as error:
        raise ModelAccessError(
            f"{shorten(name)}: the hub did not respond within {seconds:g} s", code="HF222"
        ) from error


# The catalogue


def _from_catalogue(entry: CatalogueEntry, reason: str, *, name: str | None = None) -> Resolved:
    model = of_entry(Same(entry), name or entry.hub_id)
    return Resolved(model, (Decision("model", entry.name, reason, "catalogue"),))


def _not_fetched_yet(entry: builtin.BuiltinModel, known: CatalogueEntry) -> Resolved:
    """To count a built-in model is no reason to download it."""
    reason = f"built in, but not downloaded yet ({entry.source}); shapes {known.provenance}"
    found = _from_catalogue(known, reason, name=entry.name)
    layout = quantization_of(entry.filename)
    return Resolved(quantized_as(found.model, layout) if layout is not None else found.model, found.decisions)


# Files, here or at the hub


def _from_files(files: ModelFiles) -> Resolved:
    spec = describe(files)
    if files.format == "none":
        reason = "no weights here: counted from the config's shapes, as for dummy weights; stored ones may take less"
        decisions = [_where(files, "config.json"), Decision("weights", "derived", reason, "model")]
        spec = held_or_not(spec, None)
        model = PlannedModel(name=files.name, spec=spec, origin=files.kind, tokenizer=_has_tokenizer(files))
        return Resolved(model, tuple(decisions))
    checkpoint = open_checkpoint(files)
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    decisions = [_where(files, f"headers of {format_bytes(total)} of {files.format}")]
    odd = require_agreement(spec, checkpoint)
    spec, otherwise = as_stored(spec, checkpoint.tensors)
    decisions += [Decision("weights", "as stored", note, "model") for note in (*odd, *otherwise)]
    spec, canonical = _canonical(spec, checkpoint)
    model = PlannedModel(
        name=files.name,
        spec=spec,
        origin=files.kind,
        stored=checkpoint.tensors,
        canonical=canonical,
        format=files.format,
        tokenizer=_has_tokenizer(files),
    )
    require_known_layouts(model)
    return Resolved(model, tuple(decisions))


def _has_tokenizer(files: ModelFiles) -> bool:
    """As serve would find one; of a hub's files only those were looked at that tell sizes."""
    if files.remote or files.tokenizer_json is not None:
        return True
    return files.header is not None and "tokenizer.ggml.tokens" in files.header.metadata


def _where(files: ModelFiles, said: str) -> Decision:
    source = {"builtin": "built in", "file": "path", "folder": "path", "hub": "hub"}[files.kind]
    if files.remote:
        said += f", by range at {shorten(files.revision or 'the hub', 12)}"
    return Decision("model", files.name, f"{said}; {files.chosen}" if files.chosen else said, source)


def _canonical(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[ModelSpec, Mapping[str, StoredTensor] | None]:
    """For what this engine can run; `match` refuses what contradicts the config. A quantized checkpoint that it cannot
    read may be one that others can: the spec then says why this engine does not."""
    if not spec.runnable:
        return spec, None
    if spec.quantization is None:
        unread = any(tensor.layout not in ENGINE_LAYOUTS for tensor in checkpoint.tensors.values())
        return spec, None if unread else match(spec, checkpoint)
    try:
        canonical, missing = find_tensors(spec, checkpoint)
    except CheckpointError as error:
        return replace(spec, unsupported=(f"{OF_QUANTIZATION} {error.message}",)), None
    if missing:
        raise lacking(missing, spec, checkpoint)  # Nobody can read what is not there.
    held = held_or_not(spec, canonical)
    return held, canonical if held.runnable else None
