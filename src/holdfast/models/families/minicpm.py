"""MiniCPM 1, 2 and 4: llama's tensors with scales on embedding, residuals and logits."""

from __future__ import annotations

from holdfast.models.families.llama import plain_tensors
from holdfast.models.fields import MAX_EXPERTS
from holdfast.models.source import ModelDescription, build_spec, read_shape
from holdfast.models.spec import ModelSpec

FAMILY = "minicpm"


def describe(source: ModelDescription) -> ModelSpec:
    if source.fields.integer("num_experts", low=0, high=MAX_EXPERTS, default=0):
        raise source.fields.wrong("num_experts", "0 (MiniCPM's mixtures are not known)", "more")
    shape = read_shape(source, tied=True, max_position=None if source.gguf else 2048)
    tensors = plain_tensors(source, shape)
    features = ("scaled embeddings, residuals and logits",)
    return build_spec(source, shape, family=FAMILY, tensors=tensors.found, features=features)
