"""Chances, cosines and pairs, and which model can do what; no engine."""

from __future__ import annotations

import array
import math
import struct

import pytest

from holdfast.engine.requests import scoring
from holdfast.engine.requests.embedding import floats
from holdfast.engine.requests.scoring import chances, cosine, pairs
from holdfast.errors import CheckpointError, RequestError
from holdfast.models import describe_config

CONFIG = {
    "architectures": ["LlamaForSequenceClassification"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
}


def test_activations() -> None:
    assert chances([0.0], "sigmoid") == [0.5]
    assert chances([-1e6, 1e6], "sigmoid") == [0.0, 1.0]
    assert chances([1e6, 1e6], "softmax") == [0.5, 0.5]
    assert chances([3.5, -1.0], "identity") == [3.5, -1.0]
    assert cosine([0.6, 0.8], [0.8, 0.6]) == pytest.approx(0.96)
    assert sum(chances([0.1, 2.0, -3.0], "softmax")) == pytest.approx(1)
    assert chances([1.0], "sigmoid")[0] == pytest.approx(1 / (1 + math.exp(-1)))


def test_a_vector_of_several_pairs_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []

    def counted(vector: bytes) -> array.array[float]:
        decoded.append(vector)
        return floats(vector)

    monkeypatch.setattr(scoring, "floats", counted)
    vectors = [struct.pack("<2f", *values) for values in ((0.6, 0.8), (0.8, 0.6), (1.0, 0.0))]
    found = scoring.cosines(vectors, [(0, 1), (0, 2), (0, 0)])
    assert found == pytest.approx([0.96, 0.6, 1.0])
    assert decoded == vectors


def test_pairs() -> None:
    assert pairs(["q"], ["a", "b"], ("x", "y")) == [("q", "a"), ("q", "b")]
    assert pairs(["p", "q"], ["a", "b"], ("x", "y")) == [("p", "a"), ("q", "b")]
    for first, second, field in ((["p", "q"], ["a"], "x"), ([], ["a"], "x"), (["p"], [], "y")):
        with pytest.raises(RequestError) as caught:
            pairs(first, second, ("x", "y"))
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("more", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"id2label": {"0": "LABEL_0"}}, ("LABEL_0",), "sigmoid"),
        (
            {"id2label": {"1": "bad", "0": "good"}, "problem_type": "multi_label_classification"},
            ("good", "bad"),
            "sigmoid",
        ),
        ({"id2label": {"0": "reward"}, "problem_type": "regression"}, ("reward",), "identity"),
    ],
)
def test_what_a_config_says_of_its_head(more: dict[str, object], labels: tuple[str, ...], activation: str) -> None:
    spec = describe_config(CONFIG | more)
    assert spec.classifier is not None
    assert spec.runnable
    assert (spec.classifier.labels, spec.classifier.activation) == (labels, activation)
    names = {tensor.name: tensor.shape for tensor in spec.tensors}
    assert names["score"] == (len(labels), 32)
    assert "head" not in names


def test_labels_that_are_not_numbered_are_refused() -> None:
    with pytest.raises(CheckpointError, match="id2label"):
        describe_config(CONFIG | {"id2label": {"0": "good", "2": "bad"}})
