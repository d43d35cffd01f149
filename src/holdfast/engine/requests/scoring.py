"""From what an engine tells of prompts to chances and scores. No tensors, no HTTP.

embeds       cosine of two vectors, which are of length 1
classifies   its activation over the head's products; a score where there is one label
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TypeVar

from holdfast.engine.requests.embedding import floats
from holdfast.errors import RequestError, UnsupportedOptionError
from holdfast.records import EngineInfo

Text = TypeVar("Text")


def chances(products: Sequence[float], activation: str) -> list[float]:
    """`activation`: sigmoid, softmax or identity."""
    if activation == "sigmoid":
        return [_sigmoid(value) for value in products]
    if activation == "softmax":
        largest = max(products)
        weights = [math.exp(value - largest) for value in products]
        total = math.fsum(weights)
        return [weight / total for weight in weights]
    return list(products)


def _sigmoid(value: float) -> float:
    """Without an overflow, however small or large it is."""
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    return math.exp(value) / (1 + math.exp(value))


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Of vectors of length 1."""
    return math.fsum(map(operator.mul, first, second))


def cosines(vectors: Sequence[bytes], places: Sequence[tuple[int, int]]) -> list[float]:
    """Of `vectors` at these places, each of which is decoded once."""
    decoded = [floats(vector) for vector in vectors]
    return [cosine(decoded[one], decoded[other]) for one, other in places]


def pairs(first: Sequence[Text], second: Sequence[Text], fields: tuple[str, str]) -> list[tuple[Text, Text]]:
    """One with each of the others, or each with its own: vLLM's 1 to 1, 1 to N and N to N."""
    for name, texts in zip(fields, (first, second), strict=True):
        if not texts:
            raise RequestError(f"{name} must contain at least one element", needed="at least one text", field=name)
    if len(first) not in (1, len(second)):
        raise RequestError(
            f"Input lengths must be either 1:1, 1:N or N:N; {fields[0]} has {len(first)}, {fields[1]} {len(second)}",
            needed=f"1 or {len(second)} of {fields[0]}",
            found=str(len(first)),
            field=fields[0],
        )
    return [(first[0] if len(first) == 1 else first[place], other) for place, other in enumerate(second)]


def require_embeddings(info: EngineInfo, what: str) -> None:
    if info.labels:
        raise UnsupportedOptionError(
            f"{what} is not supported by this model: it classifies texts and has no embeddings",
            fix="POST /classify, or use an embedding model",
        )


def require_labels(info: EngineInfo, what: str) -> None:
    if not info.labels:
        raise UnsupportedOptionError(
            f"{what} is not supported by this model: it has no classification head",
            needed="a model whose architecture ends with ForSequenceClassification",
            fix="use such a model; this one embeds (POST /v1/embeddings) and generates",
        )


def require_score(info: EngineInfo, what: str, fix: str) -> None:
    """A model that is for embedding can score, and of those that classify the ones with one label. Of a model for chats
    the cosine of hidden states is a number, but tells little of relevance: as in vLLM it must be asked for."""
    if not info.labels and not info.scores:
        raise UnsupportedOptionError(
            f"{what} is not supported by this model: it was trained to generate text, not to score it",
            needed="an embedding model, or a classifier with one label, such as a Qwen3-Reranker",
            found="a model that generates; its embeddings would be compared by their cosine",
            fix=fix,
        )
    if len(info.labels) > 1:
        raise UnsupportedOptionError(
            f"{what} is not supported by this model: it has {len(info.labels)} labels, and a score needs one",
            needed="a classifier with one label, or an embedding model",
            found=f"{len(info.labels)} labels",
            fix="POST /classify",
        )
