"""/score, /rerank, /classify and /pooling over HTTP, in vLLM's shapes: of models that embed, and of classifiers."""

from __future__ import annotations

import base64
import math
import struct
import threading

import pytest

from holdfast.engine.fake import FakeEngine
from holdfast.engine.fake.tokenizer import ByteTokenizer
from holdfast.engine.requests.scoring import cosines

DOCUMENTS = ["abc", "de", "xyz"]


def embedding(http, text: str) -> list[float]:
    return http.post("/v1/embeddings", json={"input": text}).json()["data"][0]["embedding"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_scores_are_cosines(http, path, names):
    answer = http.post(path, json={names[0]: "abc", names[1]: DOCUMENTS, "model": "fake"}).json()
    query = embedding(http, "abc")
    found = [embedding(http, text) for text in DOCUMENTS]
    wanted = [sum(one * other for one, other in zip(query, vector, strict=True)) for vector in found]
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(wanted, abs=1e-6)
    assert {entry["object"] for entry in answer["data"]} == {"score"}
    assert answer["usage"]["prompt_tokens"] == 6 + 5 + 6


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ordered(http, path):
    asked = {"query": "abc", "documents": ["xyz", {"text": "abc"}, "de"], "model": "fake"}
    results = http.post(path, json=asked).json()["results"]
    scores = [result["relevance_score"] for result in results]
    assert results[0]["index"] == 1
    assert scores[0] == pytest.approx(1, abs=1e-6)
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 3
    assert results[0]["document"] == {"text": "abc", "multi_modal": None}
    best = http.post(path, json={**asked, "top_n": 1, "return_documents": False}).json()["results"]
    assert best == [{"index": 1, "relevance_score": results[0]["relevance_score"]}]


def test_many_cosines_are_computed_beside_the_event_loop(http, monkeypatch):
    threads = []

    def watched(*given):
        threads.append(threading.current_thread().name.partition("_")[0])
        return cosines(*given)

    monkeypatch.setattr("holdfast.server.endpoints.pooling.scores.cosines", watched)
    answer = http.post("/score", json={"text_1": "abc", "text_2": ["de", "abc"] * 100}).json()
    assert threads == ["tokenize"]
    assert answer["data"][1]["score"] == pytest.approx(1, abs=1e-6)


def test_a_text_of_several_pairs_is_computed_once(launch):
    server = launch(FakeEngine(scores=True))
    with server.client() as http:
        before = len(server.engine.received)
        http.post("/score", json={"text_1": "abc", "text_2": ["de", "de", "xyz"], "max_tokens_per_doc": 2})
        assert [bytes(ids) for ids, _ in server.engine.received[before:]] == [b"abc", b"de", b"xy"]


@pytest.mark.parametrize(
    ("path", "body", "field", "words"),
    [
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1", "1:1, 1:N or N:N"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2", "at least one element"),
        ("/score", {"text_1": "a"}, "queries", "two sides"),
        ("/score", {"text_1": "a", "text_2": [5]}, "text_2", "expected a text"),
        ("/rerank", {"documents": ["a"]}, "query", "query is missing"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n", "top_n"),
        ("/rerank", {"query": "a", "documents": ["b" * 9000]}, "documents", "9000 tokens in the input for embedding"),
        ("/classify", {"input": "a"}, None, "no classification head"),
        ("/pooling", {"input": "a", "task": "classify"}, None, "no classification head"),
        ("/pooling", {"input": "a", "task": "token_embed"}, "task", "Unsupported task"),
    ],
)
def test_what_cannot_be_is_refused_by_name(http, path, body, field, words):
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == field


def test_pooling_has_the_embedding(http):
    whole = embedding(http, "abc")
    answer = http.post("/pooling", json={"input": "abc", "task": "embed"}).json()
    assert answer["data"] == [{"index": 0, "object": "pooling", "data": whole}]
    packed = http.post("/pooling", json={"input": "abc", "encoding_format": "base64"}).json()["data"][0]["data"]
    assert list(struct.unpack("<8f", base64.b64decode(packed))) == pytest.approx(whole)
    assert http.post("/pooling", json={"messages": [{"role": "user", "content": "hi"}]}).status_code == 200


def test_a_model_for_chats_does_not_score_unless_it_is_asked_to(launch):
    """vLLM refuses it without --runner pooling: the cosine of its hidden states says little of relevance."""
    with launch(FakeEngine(model="chatty")).client() as http:
        for path, body in (
            ("/v1/score", {"text_1": "a", "text_2": "b"}),
            ("/v1/rerank", {"query": "a", "documents": ["b"]}),
            ("/invocations", {"query": "a", "documents": ["b"]}),
        ):
            answer = http.post(path, json=body)
            assert answer.status_code == 400
            assert "trained to generate text" in answer.json()["error"]["message"]
            assert "holdfast serve chatty --runner pooling" in answer.json()["error"]["holdfast"]["fix"]
        assert http.post("/v1/embeddings", json={"input": "abc"}).status_code == 200


@pytest.mark.parametrize(
    ("length", "words"), [(64, "takes prompts of up to 63"), (70, "requested 70 tokens in the input")]
)
def test_a_text_beyond_the_context_is_told_in_vllms_words_for_embeddings(launch, length, words):
    with launch(FakeEngine(max_model_len=64)).client() as http:
        told = http.post("/v1/embeddings", json={"input": "a" * length}).json()["error"]["message"]
    assert told.startswith("This model's maximum context length is 64 tokens")
    assert words in told
    assert "for embedding generation. Please reduce the length of the input prompt" in told
    assert "completion" not in told


def test_a_classifier(launch):
    with launch(FakeEngine(labels=["good", "bad"])).client() as http:
        data = http.post("/classify", json={"input": ["abc", "de"]}).json()["data"]
        assert [entry["num_classes"] for entry in data] == [2, 2]
        assert http.post("/invocations", json={"input": ["abc", "de"]}).json()["data"] == data
        assert all(sum(entry["probs"]) == pytest.approx(1) for entry in data)
        assert data[0]["label"] == ("good" if data[0]["probs"][0] > data[0]["probs"][1] else "bad")
        products = http.post("/classify", json={"input": "abc", "use_activation": False}).json()["data"][0]["probs"]
        shares = [math.exp(value) / sum(map(math.exp, products)) for value in products]
        assert data[0]["probs"] == pytest.approx(shares, abs=1e-6)
        assert http.post("/pooling", json={"input": "abc"}).json()["data"][0]["data"] == pytest.approx(shares, abs=1e-6)
        for path, body, words in (
            ("/v1/embeddings", {"input": "abc"}, "no embeddings"),
            ("/score", {"text_1": "a", "text_2": "b"}, "2 labels"),
        ):
            answer = http.post(path, json=body)
            assert answer.status_code == 400
            assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("by_template", [False, True])
def test_no_variable_of_a_template_is_a_fault_of_the_server(launch, by_template):
    with launch(FakeEngine(labels=["relevant"]), scores_by_template=by_template).client() as http:
        for name in ("first", "second", "variables", "self", "conversation", "return_dict", "tokenize", "messages"):
            body = {"text_1": "a", "text_2": "b", "chat_template_kwargs": {name: 1}}
            answer = http.post("/score", json=body)
            known = name in ("first", "second", "variables")
            assert answer.status_code == (200 if known else 400), (name, answer.text)


def test_a_query_costs_a_classifier_no_more_than_the_body_is_long(launch, monkeypatch):
    """However many documents it is paired with, and whatever is cut off of it."""
    encoded: list[int] = []
    threads: set[str] = set()
    encode = ByteTokenizer.encode

    def counted(self: ByteTokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        encoded.append(len(text))
        threads.add(threading.current_thread().name.partition("_")[0])
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(ByteTokenizer, "encode", counted)
    server = launch(FakeEngine(labels=["relevant"]))
    long, short = "q" * 100_000, ["a", "b"] * 128
    with server.client() as http:

        def asked(**more):
            encoded.clear()
            return http.post("/rerank", json={"query": long, "documents": short, **more})

        assert asked(max_tokens_per_query=3).status_code == 200
        assert bytes(server.engine.received[0][0]) == b"qqqa"
        assert sum(encoded) < 2 * len(long)
        for more, words in (
            ({"truncate_prompt_tokens": 5}, "25600256 characters together"),
            ({"max_tokens_per_query": 99_999, "truncate_prompt_tokens": 5}, "characters together"),
            ({}, "maximum context length"),
        ):
            answer = asked(**more)
            assert answer.status_code == 400, answer.text
            assert words in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"] == "query"
            assert sum(encoded) <= 2 * len(long)
        few = http.post("/rerank", json={"query": long, "documents": ["ab"], "truncate_prompt_tokens": 5})
        assert few.status_code == 200
        assert bytes(server.engine.received[-1][0]) == b"qqqab"
        assert http.post("/rerank", json={"query": "q" * 2000, "documents": short[:4]}).status_code == 200
        assert threads == {"tokenize"}  # A small body with many pairs too.


def test_a_cross_encoder_reads_both_texts_at_once(launch):
    server = launch(FakeEngine(labels=["relevant"]))
    with server.client() as http:
        answer = http.post("/rerank", json={"query": "abc", "documents": ["de", "xyz"]}).json()
        assert [bytes(ids) for ids, _ in server.engine.received] == [b"abcde", b"abcxyz"]
        assert answer["usage"]["total_tokens"] == 11
        assert all(0 < result["relevance_score"] < 1 for result in answer["results"])
        raw = http.post("/score", json={"text_1": "abc", "text_2": "de", "use_activation": False}).json()
        scored = http.post("/score", json={"text_1": "abc", "text_2": "de"}).json()["data"][0]["score"]
        assert scored == pytest.approx(1 / (1 + math.exp(-raw["data"][0]["score"])))
