"""/v1/embeddings, /tokenize, /detokenize, /load and /reset_prefix_cache over HTTP, in vLLM's and OpenAI's shapes."""

from __future__ import annotations

import base64
import json
import math
import socket
import struct

import openai
import pytest

from holdfast.engine.fake import FakeEngine
from holdfast.server.endpoints.pooling.embeddings import binary
from holdfast.server.request.logprob_budget import LogprobBudget

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


def error_of(response) -> dict:
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize(
    ("given", "count", "tokens"),
    [("abc", 1, 3), (["abc", "de"], 2, 5), ([97, 98], 1, 2), ([[97], [98, 99]], 2, 3)],
)
def test_every_way_to_write_an_input(http, given, count, tokens):
    answer = http.post("/v1/embeddings", json={"input": given, "model": "alias", "user": "somebody"}).json()
    assert (answer["object"], answer["model"]) == ("list", "fake")
    assert [entry["index"] for entry in answer["data"]] == list(range(count))
    assert {len(entry["embedding"]) for entry in answer["data"]} == {8}
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == tokens
    assert answer["usage"]["completion_tokens"] == 0


def test_base64_holds_the_same_numbers(http):
    plain = http.post("/v1/embeddings", json={"input": "abc"}).json()["data"][0]["embedding"]
    packed = http.post("/v1/embeddings", json={"input": "abc", "encoding_format": "base64"}).json()["data"][0]
    assert list(struct.unpack("<8f", base64.b64decode(packed["embedding"]))) == pytest.approx(plain)


@pytest.mark.parametrize(("dtype", "letter"), [("float32", "f"), ("float16", "e")])
def test_vllms_bytes_hold_the_same_numbers(http, dtype, letter):
    asked = {"input": ["abc", "de"], "embed_dtype": dtype, "endianness": "big"}
    plain = [one["embedding"] for one in http.post("/v1/embeddings", json=asked).json()["data"]]
    answer = http.post("/v1/embeddings", json={**asked, "encoding_format": "bytes"})
    assert answer.headers["content-type"] == "application/octet-stream"
    said = json.loads(answer.headers["metadata"])
    assert (len(said["data"]), said["usage"]["prompt_tokens"], said["model"]) == (2, 5, "fake")
    for item, vector in zip(said["data"], plain, strict=True):
        part = answer.content[item["start"] : item["end"]]
        assert list(struct.unpack(f">{item['shape'][0]}{letter}", part)) == pytest.approx(vector, rel=1e-3)
    alone = http.post("/v1/embeddings", json={**asked, "encoding_format": "bytes_only"})
    assert (alone.content, "metadata" in alone.headers) == (answer.content, False)
    many = http.post("/v1/embeddings", json={"input": ["a"] * 600, "encoding_format": "bytes"})
    assert (many.status_code, many.json()["error"]["param"]) == (400, "encoding_format")


@pytest.mark.parametrize(("endianness", "mark"), [("little", "<"), ("big", ">"), ("native", "=")])
@pytest.mark.parametrize(("dtype", "letter"), [("float32", "f"), ("float16", "e"), ("bfloat16", "H")])
def test_base64_of_vllms_dtypes_and_orders(http, endianness, mark, dtype, letter):
    asked = {"input": "abc", "embed_dtype": dtype, "endianness": endianness}
    plain = http.post("/v1/embeddings", json=asked).json()["data"][0]["embedding"]
    answer = http.post("/v1/embeddings", json={**asked, "encoding_format": "base64"})
    assert "x-holdfast-ignored-fields" not in answer.headers
    values = list(struct.unpack(f"{mark}8{letter}", base64.b64decode(answer.json()["data"][0]["embedding"])))
    if dtype == "bfloat16":
        values = [struct.unpack(">f", struct.pack(">HH", value, 0))[0] for value in values]
    assert values == pytest.approx(plain, rel=2**-8)


def test_a_dtype_that_cannot_be_had_is_refused(http):
    error = error_of(http.post("/v1/embeddings", json={"input": "abc", "embed_dtype": "fp8_e4m3"}))
    assert error["param"] == "embed_dtype"


@pytest.mark.parametrize("name", ["use_activation", "normalize"])
def test_vectors_of_another_length_are_refused(http, name):
    for path in ("/v1/embeddings", "/pooling"):
        assert error_of(http.post(path, json={"input": "abc", name: False}))["param"] == name
        assert http.post(path, json={"input": "abc", name: True}).status_code == 200


def test_binary_numbers_are_rounded_and_bounded():
    vector = struct.pack("<4f", 1e30, -1e30, 1.00390625, 1.01171875)
    assert struct.unpack("<4e", binary(vector, "float16", "little"))[:2] == (65504.0, -65504.0)
    # Half of the last place: to the even one, down and up.
    assert struct.unpack(">4H", binary(vector, "bfloat16", "big"))[2:] == (0x3F80, 0x3F82)
    # What is no number stays none, of either sign.
    assert binary(struct.pack("<2I", 0xFFFFFFFF, 0x7F800001), "bfloat16", "big") == struct.pack(">2H", 0xFFFF, 0x7FC0)


def test_fewer_dimensions_are_the_first_at_length_one(http):
    whole = http.post("/v1/embeddings", json={"input": "abc"}).json()["data"][0]["embedding"]
    for count in (1, 3, 8):
        asked = {"input": "abc", "dimensions": count}
        vector = http.post("/v1/embeddings", json=asked).json()["data"][0]["embedding"]
        length = math.hypot(*whole[:count])
        assert vector == pytest.approx([number / length for number in whole[:count]], rel=1e-6)
        packed = http.post("/v1/embeddings", json={**asked, "encoding_format": "base64"}).json()["data"][0]
        assert list(struct.unpack(f"<{count}f", base64.b64decode(packed["embedding"]))) == pytest.approx(vector)


def test_a_conversation_is_embedded_as_its_prompt(server):
    with server.client() as http:
        answer = http.post("/v1/embeddings", json={"messages": MESSAGES, "encoding_format": "float"}).json()
        prompt = http.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False}).json()["tokens"]
        assert server.engine.received[-1][0] == prompt
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        same = http.post("/v1/embeddings", json={"input": prompt}).json()
        assert same["data"] == answer["data"]


def test_inputs_are_cut_when_asked(launch):
    server = launch(FakeEngine(max_model_len=10))
    with server.client() as http:
        asked = {"input": ["a" * 5 + "b" * 50, "c"], "truncate_prompt_tokens": -1}
        assert http.post("/v1/embeddings", json=asked).json()["usage"]["prompt_tokens"] == 10
        assert server.engine.received[0][0] == [98] * 9


def test_the_openai_client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="fake", input=["first", "second"])
    assert [len(entry.embedding) for entry in answer.data] == [8, 8]
    assert answer.data[0].embedding != answer.data[1].embedding
    assert answer.usage.prompt_tokens == 11
    line = server.wait_for_lines(1)[0]
    assert (line["prompt_tokens"], line["completion_tokens"], line["status"]) == (11, 0, 200)
    assert line["id"].startswith("embd-")


def test_more_inputs_than_places_are_done_in_turns(launch):
    server = launch(FakeEngine(max_num_seqs=2, max_queued_requests=1), max_queued_requests=1)
    with server.client() as http:
        answer = http.post("/v1/embeddings", json={"input": [f"text {place}" for place in range(50)]})
        assert answer.status_code == 200
        assert len(answer.json()["data"]) == 50
    assert server.engine.unfinished == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"), ({"input": ""}, "input"), ({"input": []}, "input"), ({"input": [""]}, "input"),
        ({"input": ["a", 1]}, "input[1]"), ({"input": [1, "a"]}, "input[1]"), ({"input": [-1]}, "input[0]"),
        ({"input": [[1], [-1]]}, "input[1][0]"), ({"input": {"a": 1}}, "input"), ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 9}, "dimensions"), ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "priority": 3}, "priority"),
        ({"input": "a", "dimensions": 0}, "dimensions"), ({"messages": []}, "messages"),
        ({"input": "x" * 5000}, None), ({"input": [99999]}, "input"),
    ],
)  # fmt: skip
def test_what_cannot_be_embedded(http, body, param):
    error = error_of(http.post("/v1/embeddings", json=body))
    assert param is None or error["param"] == param


def test_a_client_that_leaves_frees_its_places(launch):
    server = launch()
    server.call(server.engine.pause)
    content = json.dumps({"input": ["a", "b"]}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(
            b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)
        )
        server.until(lambda: len(server.engine.received) == 2)
    server.until(lambda: len(server.engine.aborted) == 2)
    assert server.wait_for_lines(1)[0]["status"] == 499


def test_vectors_have_room_of_their_own(launch, monkeypatch):
    monkeypatch.setattr("holdfast.server.endpoints.pooling.prompt_vectors.TOLD_ENTRIES", 2)
    with launch().client() as http:
        assert http.post("/v1/embeddings", json={"input": ["a"] * 10}).status_code == 200
        error = error_of(http.post("/v1/embeddings", json={"input": ["a"] * 11}))
        assert "at most 10" in error["holdfast"]["needed"]


def test_tokens_there_and_back(http):
    answer = http.post("/tokenize", json={"model": "fake", "prompt": "häh"}).json()
    assert answer == {"count": 4, "max_model_len": 4096, "tokens": list("häh".encode()), "token_strs": None}
    assert http.post("/detokenize", json={"model": "fake", "tokens": answer["tokens"]}).json() == {"prompt": "häh"}
    shown = http.post("/tokenize", json={"prompt": "a<|end|>", "return_token_strs": True}).json()
    assert shown["token_strs"] == ["<0x61>", "<|end|>"]


def test_messages_become_the_prompt_of_the_chat(server):
    with server.client() as http:
        answer = http.post("/tokenize", json={"messages": MESSAGES}).json()
        http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1})
        assert answer["tokens"] == server.engine.received[-1][0]
        closed = http.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False}).json()
        assert answer["count"] > closed["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": 5}, "prompt"), ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
        ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"), ("/detokenize", {"tokens": [10_000]}, "tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_tokenized(http, path, body, param):
    assert error_of(http.post(path, json=body))["param"] == param


def test_unknown_models(http):
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/embeddings", {"input": "a"}),
    ):
        response = http.post(path, json={**body, "model": "another"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_load_counts_open_requests(launch):
    server = launch()
    server.call(server.engine.pause)
    with server.client() as http:
        assert http.get("/load").json() == {"server_load": 0}
        with http.stream("POST", "/v1/completions", json={"prompt": "abc", "stream": True}):
            assert http.get("/load").json() == {"server_load": 1}
            server.call(server.engine.resume)


def test_the_prefix_cache_is_forgotten(launch):
    with launch().client() as http:

        def cached() -> int:
            usage = http.post("/v1/completions", json={"prompt": "x" * 40, "max_tokens": 1}).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        assert [cached(), cached()] == [0, 32]
        assert http.post("/reset_prefix_cache").json() == {"success": True}
        assert cached() == 0
        assert error_of(http.post("/reset_prefix_cache?reset_external=true"))["param"] == "reset_external"


def test_room_is_given_back_when_all_is_sent(monkeypatch, launch):
    """Also by a request that fails, and with room for one request at a time."""
    monkeypatch.setattr("holdfast.server.endpoints.pooling.prompt_vectors.TOLD_ENTRIES", 4)
    monkeypatch.setattr(
        "holdfast.server.app.LogprobBudget", lambda entries, most_waiting: LogprobBudget(4, most_waiting)
    )
    with launch().client() as http:
        for _ in range(3):
            assert http.post("/v1/embeddings", json={"input": ["a"] * 20}).status_code == 200
            assert http.post("/v1/embeddings", json={"input": [[99999]] * 20}).status_code == 400
