"""Loads a classifier: stored scores, or rows of the head for tokens. It is small, and whole on every rank that has it.
Knows no layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from holdfast.checkpoints.checkpoint import piece_of
from holdfast.checkpoints.files import StoredTensor
from holdfast.execution.layers.linear import DenseLinear, QuantizedLinear
from holdfast.execution.native import BlockMatrix
from holdfast.models import ModelSpec, TensorSpec
from holdfast.models.spec import ShardPiece

TOKEN_ROWS = "token_rows"
"""Of the vocabulary, those that a classifier is made of: the name that a rank's loader knows them by."""


class ClassifierLoader(Protocol):
    """What is asked of whoever loads the layers."""

    spec: ModelSpec
    tensors: dict[str, TensorSpec]
    dtype: torch.dtype
    device: torch.device

    def has(self, name: str) -> bool: ...

    def vector(self, name: str) -> torch.Tensor: ...


def load_classifier(
    loader: ClassifierLoader, embed: DenseLinear | QuantizedLinear | BlockMatrix
) -> torch.Tensor | None:
    """Stored, or made of rows of the head for tokens, which is not kept."""
    wanted = loader.spec.classifier
    if wanted is None or not wanted.token_ids:
        return loader.vector("score") if loader.has("score") else None
    if TOKEN_ROWS in loader.tensors:
        rows = loader.vector(TOKEN_ROWS)
    else:
        places = torch.tensor(wanted.token_ids, device=loader.device)
        rows = torch.empty((len(places), loader.spec.hidden_size), dtype=loader.dtype, device=loader.device)
        if loader.spec.tied_embeddings:
            embed.select(places, rows)
        else:
            torch.index_select(loader.vector("head"), 0, places, out=rows)
    return rows[1:].float() - rows[:1].float() if wanted.two_way else rows.float()


def token_rows(whole: ModelSpec, found: dict[str, StoredTensor]) -> dict[str, tuple[TensorSpec, StoredTensor | None]]:
    """For a rank, which has a part of the vocabulary or none: the rows that a classifier is made of, wherever they lie,
    as a piece of its own; empty: it is not made of any."""
    wanted = whole.classifier
    if wanted is None or not wanted.token_ids:
        return {}
    name = "embed" if whole.tied_embeddings else "head"
    tensor = next(one for one in whole.tensors if one.name == name)
    piece = ShardPiece(axis=0, ranges=tuple((row, row + 1) for row in wanted.token_ids), whole=tensor.shape)
    rows = replace(tensor, name=TOKEN_ROWS, shape=(len(wanted.token_ids), tensor.shape[1]), piece=piece)
    return {TOKEN_ROWS: (rows, piece_of(found[name], rows) if name in found else None)}
