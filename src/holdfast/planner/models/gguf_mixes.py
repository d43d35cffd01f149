"""Which type llama.cpp's quantizer gives each matrix under each kind of GGUF file: a kind's name is only what most get.

    TQ1_0, Q4_0, Q6_K, ...    one type, and more bits for embedding and head
    Q4_K_M, IQ3_M, ...        more bits also for values, outputs and the second matrix of some MLPs
    MXFP4_MOE                 experts in MXFP4, all else in Q8_0
    MXFP4, NVFP4              the same of any model: matrices of layers in it, all else in Q8_0

Knows shapes and roles; not bytes, and nothing of how numbers are rounded. Kinds that need an importance matrix are
taken to be made with one, others without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from holdfast.checkpoints import LAYOUTS
from holdfast.config.parts.gguf_kinds import KINDS
from holdfast.models import ModelSpec, TensorSpec

_PLAIN = ("F16", "BF16", "F32")
_FOUR_BIT_FLOATS = ("MXFP4", "MXFP4_MOE", "NVFP4")
_LEAST = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M")
_LEAST_WITH_MORE = ("IQ2_S", "IQ2_M")
NEEDS_IMPORTANCES = frozenset({*_LEAST, "IQ3_XXS", "Q2_K_S"})
"""Kinds that are made with an importance matrix or not at all."""
MADE_BY_PATTERN = ("MXFP4", "NVFP4")
"""Kinds that the quantizer has no name for: tensors are given the type by a pattern of their names."""
_NARROW = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("Q2_0", "Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0"),
    "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
}  # fmt: skip
"""Taken instead where a row is no whole number of the larger blocks."""
_EMBEDDING: Mapping[str, str] = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS"), "Q2_K"),
    **dict.fromkeys(("IQ2_S", "IQ2_M", "IQ3_XXS"), "IQ3_S"),
    **dict.fromkeys(("TQ1_0", "TQ2_0", "Q2_0"), "Q4_K"),
}  # fmt: skip
"""Where the head is a matrix of its own."""


def description(kind: str) -> str:
    """What is in such a file beside what its name says; empty where the name says it all."""
    if kind == "MXFP4_MOE":
        return "a GGUF file with experts in MXFP4, the rest in Q8_0"
    if kind in _FOUR_BIT_FLOATS:
        others = "; NVFP4 of compressed-tensors or ModelOpt is not planned" if kind == "NVFP4" else ""
        return f"a GGUF file with layer matrices in {kind}, the rest in Q8_0{others}"
    return "quantization types mixed as llama.cpp does" if kind not in _PLAIN else ""


def layouts_of(spec: ModelSpec, kind: str) -> Iterator[tuple[TensorSpec, str]]:
    """Each tensor of the text model that a GGUF must have, with its type."""
    tensors = [tensor for tensor in spec.tensors if tensor.part == "text" and not tensor.optional]
    roles = [tensor.name.rpartition(".")[2] for tensor in tensors]
    experts = max((layer.experts.count for layer in spec.layers if layer.experts is not None), default=0)
    count = dict.fromkeys(roles, 0)
    values = sum(role in ("v", "qkv", "kv_b") for role in roles)
    for tensor, role in zip(tensors, roles, strict=True):
        if len(tensor.shape) < 2 or not (tensor.linear or tensor.name in ("embed", "embed_per_layer")):
            yield tensor, "F32"
            continue
        place = _Place(
            role=role,
            # Dense models are counted by their matrices, which not every layer need have; experts by their layers.
            layer=count[role] if not experts or role == "v" else tensor.layer or 0,
            ordinal=count[role],
            layers=values if role == "v" else len(spec.layers),
            shared_heads=spec.heads // spec.kv_heads,
            experts=experts,
            seventy=len(spec.layers) == 80 and spec.heads // spec.kv_heads == 8,
        )
        count[role] += 1
        yield tensor, _narrowed(_wanted(spec, tensor, kind, place), tensor.shape[-1])


@dataclass(frozen=True, slots=True)
class _Place:
    """Of one matrix in the model."""

    role: str
    layer: int
    ordinal: int
    """Among the matrices of its role."""
    layers: int
    shared_heads: int
    """Query heads to a KV head."""
    experts: int
    """0: none."""
    seventy: bool
    """A model like Llama 70B: eighty layers, and eight heads share their values."""

    @property
    def first_eighth(self) -> bool:
        return self.layer < self.layers // 8

    @property
    def last_eighth(self) -> bool:
        return self.layer >= 7 * self.layers // 8

    @property
    def worth_more(self) -> bool:
        """First and last eighth, and every third between: where more bits help most."""
        return self.first_eighth or self.last_eighth or (self.layer - self.layers // 8) % 3 == 2


def _narrowed(layout: str, columns: int) -> str:
    if columns % LAYOUTS[layout].block_elements:
        layout = _NARROW.get(layout, "F16")
    return layout if columns % LAYOUTS[layout].block_elements == 0 else "F16"


def _wanted(spec: ModelSpec, tensor: TensorSpec, kind: str, place: _Place) -> str:
    base = KINDS[kind]
    if base in _PLAIN:
        return base
    if kind in _FOUR_BIT_FLOATS:
        taken = tensor.experts > 0 if kind == "MXFP4_MOE" else tensor.layer is not None
        return base if taken else "Q8_0"
    if tensor.name == "head" or (tensor.name.startswith("embed") and spec.tied_embeddings):
        return _head(kind, base, tensor.shape[-1])
    if tensor.name.startswith("embed"):
        return _EMBEDDING.get(kind, base)
    if tensor.layer is None:
        return base
    return _least(kind, base, place) if kind in _LEAST else _more(kind, base, place)


def _head(kind: str, base: str, columns: int) -> str:
    if base == "Q8_0" or columns % LAYOUTS[base].block_elements:
        return "Q8_0"
    return "Q5_K" if kind in (*_LEAST, "IQ3_XXS") else "Q6_K"


def _least(kind: str, base: str, place: _Place) -> str:
    """Of one and two bits."""
    more = "IQ3_S" if kind in _LEAST_WITH_MORE else "Q2_K"
    match place.role:
        case "k" if place.experts == 8:
            return "Q4_K"
        case "v":
            return "Q4_K" if place.shared_heads >= 4 or place.experts >= 4 else more
        case "down" if place.ordinal < place.layers // 8:
            return more
        case "o" if place.experts == 8:
            return "Q5_K"
        case "o":
            return "IQ2_XXS" if kind in ("IQ1_S", "IQ1_M") else "IQ3_S" if kind in _LEAST_WITH_MORE else base
    return base


_QUERIES = {"IQ3_XS": "IQ3_XXS", "IQ3_XXS": "IQ2_S"}
_FUSED = {"Q3_K_M": "Q4_K", "Q3_K_L": "Q4_K", "IQ3_M": "Q4_K", "Q4_K_M": "Q5_K", "Q5_K_M": "Q6_K"}
"""Queries, keys and values in one matrix, as in the files that are published; the newest quantizer treats them as
values, which comes to the same bytes within a hundredth."""
_OUT = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "IQ3_XXS": "IQ3_S", "IQ3_M": "Q4_K"}
_OUT_OF_EIGHT_EXPERTS = dict.fromkeys(
    ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M", "IQ4_XS", "IQ4_NL"), "Q5_K"
)
_FIRST_DOWN = {"IQ3_M": "Q4_K", "Q2_K_S": "Q4_K", "Q4_K_S": "Q5_K", "IQ4_NL": "Q5_K", "IQ4_XS": "Q5_K"}
"""Of the first eighth of the layers."""


def _more(kind: str, base: str, place: _Place) -> str:
    """Of three bits and more."""
    match place.role:
        case "k" | "v" if place.experts == 8:
            return "Q8_0"
        case "q" | "k":
            return _QUERIES.get(kind, base)
        case "v":
            layout = _values(kind, base, place)
            return "Q5_K" if place.seventy and layout in ("Q3_K", "Q4_K") else layout
        case "qkv":
            return _FUSED.get(kind, base)
        case "o":
            return (_OUT_OF_EIGHT_EXPERTS if place.experts == 8 else _OUT).get(kind, base)
        case "gate" | "up" | "gate_up" if kind == "IQ3_XS" and not (place.first_eighth or place.last_eighth):
            return "IQ3_XXS"
        case "down":
            return _down(kind, base, place)
    return base


def _values(kind: str, base: str, place: _Place) -> str:
    """Small where heads share them, and worth their bits."""
    shared = place.shared_heads >= 4
    if kind == "Q2_K":
        return "Q4_K" if shared else "Q3_K"
    if kind == "IQ3_M" or (kind in ("Q2_K_S", "IQ3_XXS", "IQ3_XS", "IQ3_S") and shared):
        return "Q4_K"
    if kind == "Q3_K_M":
        return "Q5_K" if place.layer < 2 else "Q4_K"
    if kind == "Q3_K_L" or (kind in ("IQ4_NL", "IQ4_XS") and shared) or (kind == "Q4_K_S" and place.layer < 4):
        return "Q5_K"
    return "Q6_K" if kind in ("Q4_K_M", "Q5_K_M") and place.worth_more else base


def _down(kind: str, base: str, place: _Place) -> str:
    if kind == "Q3_K_M":
        return "Q5_K" if place.layer < place.layers // 16 else "Q4_K"
    if kind in ("Q4_K_M", "Q5_K_M") and place.worth_more:
        return "Q6_K"
    if kind == "IQ3_M" and place.experts == 8 and place.worth_more:
        return "Q4_K"
    always = {"Q2_K": "Q3_K", "Q3_K_L": "Q5_K"}.get(kind, base)
    return _FIRST_DOWN.get(kind, always) if place.first_eighth else always
