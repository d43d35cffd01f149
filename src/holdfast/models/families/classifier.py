"""Decoders with a classification head in place of the one for tokens: XForSequenceClassification of a config.json.

Also vLLM's way to serve rerankers that answer with a token, such as the original Qwen3-Reranker, as classifiers: a
config (hf_overrides) with `classifier_from_token`. Owns their labels and their head's tensor; which decoder such a name
means: `models.runnable`. Knows nothing of how scores are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.models.fields import Fields
from holdfast.models.spec import ClassifierSpec, LabelActivation, ModelSpec, TensorSpec

MAX_LABELS = 65_536
MAX_TOKENS = 256
FROM_TOKENS = "classifier_from_token"
TOKEN_IDS = "classifier_token_ids"
"""The same as ids, which whoever has the tokenizer puts beside them."""
TWO_WAY, ROWS = "from_2_way_softmax", "no_post_processing"
_BY_PROBLEM: Mapping[str, LabelActivation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


def with_classifier(spec: ModelSpec, config: Mapping[str, Any], architecture: str) -> ModelSpec:
    """The decoder of `spec` with the head that `config` describes. There is none for tokens in such a checkpoint: where
    one is computed with, it is the embedding."""
    fields = Fields(config, where="config.json")
    if config.get(FROM_TOKENS) is not None:
        return replace(spec, architecture=architecture, classifier=_of_tokens(config, fields))
    labels = _labels(config, fields)
    problem = fields.text("problem_type", default="")
    activation = _BY_PROBLEM.get(problem) or ("sigmoid" if len(labels) == 1 else "softmax")
    score = TensorSpec(
        name="score", shape=(len(labels), spec.hidden_size), hf_name="score.weight", gguf_name="", wide=True
    )
    kept = tuple(tensor for tensor in spec.tensors if tensor.name not in ("head", "head_bias"))
    return replace(
        spec,
        architecture=architecture,
        tied_embeddings=True,
        tensors=(*kept, score),
        classifier=ClassifierSpec(labels=labels, activation=activation),
    )


def _of_tokens(config: Mapping[str, Any], fields: Fields) -> ClassifierSpec:
    """vLLM's two methods. Its older name of the first is a field of its own."""
    tokens = config[FROM_TOKENS]
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise fields.wrong(FROM_TOKENS, "a list of tokens", tokens)
    method = TWO_WAY if config.get("is_original_qwen3_reranker") else fields.text("method", default="")
    if method not in (TWO_WAY, ROWS) or len(tokens) > MAX_TOKENS:
        raise fields.wrong("method", f"{TWO_WAY} or {ROWS}, with at most {MAX_TOKENS} tokens", method)
    if method == TWO_WAY and len(tokens) != 2:
        raise fields.wrong(FROM_TOKENS, "two tokens, the second of which is the answer yes", tokens)
    labels = ("LABEL_0",) if method == TWO_WAY else tuple(tokens)
    return ClassifierSpec(
        labels=labels,
        activation="sigmoid" if len(labels) == 1 else "softmax",
        token_ids=tuple(config.get(TOKEN_IDS, ())),
        two_way=method == TWO_WAY,
    )


def _labels(config: Mapping[str, Any], fields: Fields) -> tuple[str, ...]:
    """By number, as transformers names them: it writes `id2label` whenever there are not two."""
    named = config.get("id2label")
    if named is None:
        count = fields.integer("num_labels", low=1, high=MAX_LABELS, default=2)
        return tuple(f"LABEL_{number}" for number in range(count))
    wanted = "an object from 0, 1, ... to names"
    if not isinstance(named, Mapping) or not 1 <= len(named) <= MAX_LABELS:
        raise fields.wrong("id2label", wanted, named)
    found = [named.get(str(number)) for number in range(len(named))]
    if not all(isinstance(name, str) for name in found):
        raise fields.wrong("id2label", wanted, named)
    return tuple(str(name) for name in found)
