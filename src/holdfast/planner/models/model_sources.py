"""Which model name or file each engine's command gets for a planned model: a name to fetch, a local file, or one that
has to be made first.

A hub id is given only where loading it takes the bytes that were planned. Knows no numbers of the plan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.checkpoints import ENGINE_LAYOUTS
from holdfast.checkpoints.sources import builtin
from holdfast.checkpoints.sources.select_files import quantization_of
from holdfast.checkpoints.validation.match import UNANNOUNCED
from holdfast.checkpoints.validation.stored_dtypes import PACKED_ENDINGS, PLAIN_LAYOUTS
from holdfast.config.parts.quantization import MADE_WHILE_LOADING as MADE_BY_HOLDFAST
from holdfast.models import QuantSpec, catalogue
from holdfast.planner.inputs.question import PlannedModel
from holdfast.planner.models.gguf_mixes import MADE_BY_PATTERN, NEEDS_IMPORTANCES
from holdfast.planner.models.variants import published_as

MADE_WHILE_LOADING: Mapping[str, Mapping[str, str]] = {
    "holdfast": {method: method for method in MADE_BY_HOLDFAST},
    "vllm": {"fp8": "fp8", "nf4": "bitsandbytes"},
    "sglang": {"fp8": "fp8"},
}
"""What an engine makes itself of an unquantized checkpoint, as its --quantization spells it."""
TO_BE_MADE = "./TO-BE-MADE/"
"""Before the name of what nobody has yet: it can be taken for nothing else."""
_QUANTIZED = re.compile(r"(?:[-_.](?:awq|gptq|fp8|int[48]|w\d+a\d+|quantized|dynamic|bnb|[48]bit))+$", re.IGNORECASE)
"""What makers put behind the names of their quantized checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    name: str
    """What the engine is told to load."""
    flags: Mapping[str, object] = field(default_factory=dict)
    ready: bool = True
    """False: something has to be made or fetched before the command can run; the notes say what."""
    notes: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    """What the engine cannot do with it, whatever is made first."""

    @property
    def makes_fp8(self) -> bool:
        """Of an unquantized checkpoint, while it loads it."""
        return self.flags.get("--quantization") == "fp8"


def served_name(model: PlannedModel) -> str:
    """What an engine can fetch: a short name of the catalogue's is known to nobody else. A hub id is what was asked
    for, even where the catalogue knows its shapes by another one's."""
    entry = catalogue.lookup(model.name) if model.origin == "catalogue" and "/" not in model.name else None
    return model.name if entry is None else entry.hub_id


def to_be_made(model: PlannedModel, ending: str) -> str:
    """Named after the model itself: what another quantizer made of it is not in there."""
    stem = served_name(model).rstrip("/").rpartition("/")[2].partition(":")[0].removesuffix(".gguf")
    return f"{TO_BE_MADE}{_QUANTIZED.sub('', stem)}-{ending}"


def holdfast_source(model: PlannedModel) -> ModelSource:
    entry = _builtin(model)
    if entry is not None:
        return ModelSource(name=entry.name)
    if model.made_as is None:
        said = (*without_weights(model), *_without_tokenizer(model))
        return ModelSource(name=served_name(model), ready=not said, notes=said, lacks=_unread_layouts(model))
    if model.format == "gguf":
        name, note = _made(model)
        return ModelSource(
            name=name, ready=False, notes=(f"Holdfast makes no GGUF: {note}",), lacks=_unread_layouts(model)
        )
    return _published_or_made(model, "holdfast")


def _unread_layouts(model: PlannedModel) -> tuple[str, ...]:
    """Of what is stored in blocks; how packed matrices of safetensors lie, their spec says."""
    if model.spec.quantization is not None or not model.spec.runnable:
        return ()
    if model.format != "gguf" and any(name.endswith(PACKED_ENDINGS) for name in model.stored or ()):
        return (f"Holdfast does not read it: {UNANNOUNCED}",)
    layouts = {tensor.layout for tensor in (model.stored or {}).values()}
    unknown = ", ".join(sorted(layouts - set(ENGINE_LAYOUTS)))
    return (f"Holdfast does not support {unknown} yet",) if unknown else ()


def torch_source(model: PlannedModel, engine: str) -> ModelSource:
    """For vLLM and SGLang, which take checkpoints of the hub, and a GGUF as a file."""
    entry = _builtin(model)
    if entry is not None:
        return _of_builtin(entry)
    if model.made_as is None:
        return _stored(model, engine)
    return _published_or_made(model, engine)


def _published_or_made(model: PlannedModel, engine: str) -> ModelSource:
    """Of a model that is planned as if it were quantized."""
    assert model.made_as is not None
    published = published_as(model)
    if published is not None:
        return ModelSource(name=served_name(published), notes=(f"published in {model.made_as.upper()}",))
    flag = MADE_WHILE_LOADING[engine].get(model.made_as)
    if flag is None:
        name, note = _made(model)
        return ModelSource(name=name, ready=False, notes=(note,))
    bare = without_weights(model.unquantized or model)
    return ModelSource(name=served_name(model), flags={"--quantization": flag}, ready=not bare, notes=bare)


def _stored(model: PlannedModel, engine: str) -> ModelSource:
    if model.format != "gguf":
        return ModelSource(name=served_name(model), ready=not without_weights(model), notes=without_weights(model))
    file = _file(model)
    if model.origin != "hub":
        return ModelSource(name=file)
    repository = model.name.partition(":")[0]
    if engine == "vllm":
        layout = quantization_of(file)
        return ModelSource(name=model.name if layout is None or ":" in model.name else f"{repository}:{layout}")
    return ModelSource(
        name=to_be_made(model, file), ready=False, notes=(f"it needs a GGUF as a local file: download {file} first",)
    )


def without_weights(model: PlannedModel) -> tuple[str, ...]:
    """Of a folder that holds a config alone, why no command can run yet."""
    bare = model.origin == "folder" and model.format == "none"
    return (f"{model.name} has a config but no weights: add them first",) if bare else ()


def _without_tokenizer(model: PlannedModel) -> tuple[str, ...]:
    """Of what Holdfast does not start without."""
    if model.tokenizer:
        return ()
    said = f"{model.name} has no tokenizer, and serve does not start without one (HF230): add its tokenizer.json,"
    return (f"{said} set one with --tokenizer, or add --skip-tokenizer-init if only token ids go in and out",)


def llama_source(model: PlannedModel, dtype: str) -> ModelSource:
    """`dtype`: what plain weights were counted in."""
    entry = _builtin(model)
    if entry is not None:
        found = _of_builtin(entry)
        return ModelSource(name="", flags={"-m": found.name}, ready=found.ready, notes=found.notes)
    if model.format == "gguf" and model.made_as is None:
        file = _file(model)
        if model.origin == "hub":
            return ModelSource(name="", flags={"-hf": model.name.partition(":")[0], "-hff": file})
        return ModelSource(name="", flags={"-m": file})
    if model.made_as is not None and model.format == "gguf":
        kind, note = model.made_as, _made(model)[1]
    elif model.spec.quantization is None:
        kind = PLAIN_LAYOUTS[dtype]
        note = f"llama.cpp reads GGUF: convert to or download a GGUF {kind} first"
    elif model.spec.quantization.method == "mxfp4":
        kind = "MXFP4"
        note = "llama.cpp reads GGUF: convert first with its convert_hf_to_gguf.py, which keeps MXFP4 as it is;"
        note += " published ones have the rest in Q8_0, and are smaller"
    else:
        method, kind = model.spec.quantization.method.upper(), near_gguf(model.spec.quantization)
        note = f"llama.cpp does not read {method}; the closest is a GGUF {kind}, whose size differs: plan with"
        note += f" --quantization {kind} of the unquantized model"
    return ModelSource(name="", flags={"-m": to_be_made(model, f"{kind}.gguf")}, ready=False, notes=(note,))


def near_gguf(quantization: QuantSpec) -> str:
    """The GGUF type that is nearest to what llama.cpp does not read."""
    return "Q8_0" if quantization.bits == 8 else "Q4_K_M"


def _made(model: PlannedModel) -> tuple[str, str]:
    assert model.made_as is not None
    if model.format == "gguf":
        note = f"convert to or download a GGUF {model.made_as} first"
        if model.made_as in NEEDS_IMPORTANCES:
            note += "; llama-quantize makes it only with an importance matrix"
        elif model.made_as in MADE_BY_PATTERN:
            note += f": llama-quantize --tensor-type 'blk={model.made_as.lower()}' with Q8_0 makes it"
        return to_be_made(model, f"{model.made_as}.gguf"), note
    kind = model.made_as.upper()
    return to_be_made(model, kind), f"it needs a checkpoint in {kind}: quantize this one first, or use one that is"


def _file(model: PlannedModel) -> str:
    """Of a GGUF whose header was read: its own path here, or its name at the hub."""
    paths = sorted({str(tensor.path) for tensor in (model.stored or {}).values()})
    return paths[0] if paths else model.name


def _builtin(model: PlannedModel) -> builtin.BuiltinModel | None:
    if model.format != "gguf" or model.origin not in ("builtin", "catalogue"):
        return None
    return builtin.find(model.name)


def _of_builtin(entry: builtin.BuiltinModel) -> ModelSource:
    ready = builtin.is_cached(entry)
    notes = () if ready else (f"not downloaded yet: run holdfast pull {entry.name}",)
    return ModelSource(name=str(builtin.cached_path(entry)), ready=ready, notes=notes)
