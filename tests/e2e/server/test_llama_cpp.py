"""What users of llama.cpp's server send: its own completion, its names of fields, paths without /v1, any model name."""

from __future__ import annotations

import json

import openai
import pytest

from holdfast.engine.fake import FakeEngine
from holdfast.records import RequestTiming
from holdfast.server.http.paths import ALIASES
from holdfast.server.response.llama_cpp import timings

HELLO = [{"role": "user", "content": "hi"}]


def test_a_completion_of_its_own(server):
    asked = {
        "prompt": "abcdef", "n_predict": 3, "temperature": -1, "repeat_penalty": 1.1, "seed": -1, "stop": ["z"],
        "cache_prompt": True, "id_slot": 0, "mirostat": 0, "mirostat_tau": 5.0, "typical_p": 1.0, "xtc_threshold": 0.1,
        "logit_bias": [[5, -1.5], [6, False], ["xy", -2]], "return_tokens": True, "n_probs": 2,
    }  # fmt: skip
    with server.client() as http:
        answered = http.post("/completion", json=asked)
        assert answered.status_code == 200, answered.text
        told = answered.json()
        prompt, params = server.engine.received[-1]
    assert "x-holdfast-ignored-fields" not in answered.headers
    assert (bytes(prompt), params.max_tokens, params.repetition_penalty) == (b"abcdef", 3, 1.1)
    assert (params.logit_bias, params.greedy, params.stop) == ({5: -1.5, 6: -100.0, 120: -2.0, 121: -2.0}, True, ["z"])
    assert (told["content"], told["tokens"], told["stop"], told["stop_type"]) == ("abc", [97, 98, 99], True, "limit")
    assert (told["tokens_predicted"], told["tokens_evaluated"], told["prompt"]) == (3, 6, "abcdef")
    assert told["generation_settings"]["n_predict"] == 3
    assert [one["id"] for one in told["completion_probabilities"]] == [97, 98, 99]
    assert len(told["completion_probabilities"][0]["top_logprobs"]) == 2
    counted = {"prompt_n": 6, "predicted_n": 3, "cache_n": 0}
    assert told["timings"].items() >= counted.items()
    assert told["timings"]["predicted_ms"] >= 0


def test_how_a_completion_has_ended(http):
    told = http.post("/completion", json={"prompt": "abc", "n_predict": -1}).json()
    assert (told["content"], told["stop_type"], told["stopping_word"], told["tokens"]) == ("abc", "eos", "", [])
    told = http.post("/completion", json={"prompt": "abc", "stop": "b"}).json()
    assert (told["content"], told["stop_type"], told["stopping_word"]) == ("a", "word", "b")
    told = http.post("/completion", json={"prompt": {"prompt_string": "abc"}, "stop": "b"}).json()
    assert (told["content"], told["prompt"]) == ("a", "abc")
    pictured = {"prompt": [{"prompt_string": "a", "multimodal_data": ["iVBO"]}]}
    refused = http.post("/completion", json=pictured)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "multimodal_data")
    several = http.post("/completion", json={"prompt": ["ab", {"prompt_string": "c"}], "n_predict": 1}).json()
    assert [(one["index"], one["content"], one["tokens_evaluated"]) for one in several] == [(0, "a", 2), (1, "c", 1)]


def test_a_stream_of_its_own(http):
    text = http.post("/completion", json={"prompt": "abc", "stream": True, "n_predict": 2}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    # As llama.cpp has it: the last event has figures and no text.
    assert [(event["content"], event["stop"]) for event in events] == [("a", False), ("b", False), ("", True)]
    assert [event["tokens"] for event in events] == [[97], [98], []]
    assert [event["tokens_predicted"] for event in events] == [1, 2, 2]
    assert not any("timings" in event for event in events[:2])
    assert events[2]["timings"]["predicted_n"] == 2
    assert "[DONE]" not in text


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"n_predict": -3}, "n_predict"), ({"mirostat": 2}, "mirostat"), ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"repeat_penalty": 50}, "repeat_penalty"), ({"n_probs": 99}, "n_probs"), ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"logit_bias": [["a", "b"]]}, "logit_bias"), ({"logit_bias": [["a" * 201, 1]]}, "logit_bias"),
        ({"logit_bias": [[1]]}, "logit_bias"),
        ({"logit_bias": [[1.5, 1]]}, "logit_bias"), ({"prompt": None}, "prompt"), ({"grammar": "("}, "grammar"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named_as_it_was_sent(http, extra, param):
    refused = http.post("/completion", json={"prompt": "a", **extra})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert "max_tokens" not in refused.json()["error"]["message"]


def test_a_prompt_that_is_only_to_be_kept(http):
    """llama.cpp's n_predict 0 warms its cache."""
    told = http.post("/completion", json={"prompt": "abc", "n_predict": 0, "return_tokens": True}).json()
    assert (told["content"], told["tokens"], told["tokens_predicted"], told["tokens_evaluated"]) == ("", [], 0, 3)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
def test_what_its_clients_call_otherwise_counts_on_all_paths(launch, path):
    """A small model has a limit of its own where nobody says one; -1 says that there is none."""
    server = launch(chat_max_tokens=7)
    prompt = {"messages": HELLO} if "chat" in path else {"prompt": "hi"}
    expected = {None: 16 if path == "/v1/completions" else 7, 3: 3, -1: None}
    with server.client() as http:
        for count, most in expected.items():
            sent = {**prompt, "repeat_penalty": 1.3} | ({} if count is None else {"n_predict": count})
            answered = http.post(path, json=sent)
            assert "x-holdfast-ignored-fields" not in answered.headers, answered.text
            params = server.engine.received[-1][1]
            assert (params.max_tokens, params.repetition_penalty) == (most, 1.3)
        if path != "/completion":
            http.post(path, json={**prompt, "max_tokens": -1})
            assert server.engine.received[-1][1].max_tokens is None
            told = http.post(path, json={**prompt, "max_tokens": 2, "n_predict": 3})
            assert told.headers["x-holdfast-ignored-fields"] == "n_predict"
            assert server.engine.received[-1][1].max_tokens == 2


@pytest.mark.parametrize(("name", "kind"), [("regex", "regex"), ("ebnf", "grammar")])
def test_constraints_by_the_names_of_sglang_are_kept(server, name, kind):
    text = "[ab]+" if name == "regex" else 'root ::= "a"'
    with server.client() as http:
        answered = http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2, name: text})
    assert answered.status_code == 200, answered.text
    assert server.engine.received[-1][1].structured_outputs.kind == kind


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_members_that_its_clients_ask_for_in_openais_answers(http, path):
    asked = {"messages": HELLO} if "chat" in path else {"prompt": "hi"}
    wanted = {"timings_per_token": True, "return_progress": True, "verbose": True, "max_tokens": 5}
    answered = http.post(path, json={**asked, **wanted})
    told = answered.json()
    assert "x-holdfast-ignored-fields" not in answered.headers
    tokens = told["usage"]["prompt_tokens"]
    # An answer is the message again, and the end token.
    assert told["timings"].items() >= {"prompt_n": tokens - told["timings"]["cache_n"], "predicted_n": 3}.items()
    assert "hi" in told["__verbose"]["prompt"]
    assert told["__verbose"]["generation_settings"]["n_predict"] == 5
    lines = http.post(path, json={**asked, **wanted, "stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line not in ("", "data: [DONE]")]
    shown = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert [(one["total"], one["processed"]) for one in shown] == [(tokens, tokens // 2), (tokens, tokens)]
    assert [event["timings"]["predicted_n"] for event in events if "timings" in event] == [1, 2, 3]
    assert [event["__verbose"]["prompt"] for event in events if "__verbose" in event] == [told["__verbose"]["prompt"]]
    plain = http.post(path, json=asked).json()
    assert not {"timings", "__verbose"} & plain.keys()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
def test_a_chats_tokens_are_counted_as_its_answer_counts_them(http, path):
    chat = {"messages": HELLO, "temperature": 0, "max_tokens": 1, "stop": ["x"]}
    counted = http.post(f"{path}/input_tokens", json=chat).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": counted["input_tokens"]}
    assert counted["input_tokens"] == http.post(path, json=chat).json()["usage"]["prompt_tokens"]
    assert http.post(f"{path}/input_tokens", json={"messages": 3}).status_code == 400


def test_models_tell_their_other_names(http):
    assert [model["aliases"] for model in http.get("/models").json()["data"]] == [["fake", "alias"]] * 2


def test_other_fields_are_told(http, strict):
    asked = {"prompt": "a", "samplers": ["top_k"]}
    assert http.post("/completion", json=asked).headers["x-holdfast-ignored-fields"] == "samplers"
    assert strict.post("/completion", json=asked).status_code == 400


def test_times_are_those_of_the_engine():
    timing = RequestTiming(arrival_s=1.0, scheduled_s=2.0, first_token_s=2.5, finished_s=4.5)
    told = timings(timing, 110, 10, 20)
    assert (told["prompt_ms"], told["prompt_per_second"], told["prompt_per_token_ms"]) == (500, 200, 5)
    assert (told["predicted_ms"], told["predicted_per_second"], told["cache_n"]) == (2000, 10, 10)
    assert timings(None, 5, 5, 0)["predicted_per_second"] == 0


def test_an_openai_client_without_v1(server):
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        assert client.models.list().data[0].id == "fake"
        assert client.chat.completions.create(model="fake", messages=HELLO).choices[0].message.content == "hi"
        assert client.completions.create(model="fake", prompt="ab").choices[0].text == "ab"
        assert len(client.embeddings.create(model="fake", input="ab").data[0].embedding) == 8
        assert client.responses.create(model="fake", input="hi").object == "response"


POSTED = (*(path for path in ALIASES if path != "/models"), "/completion", "/apply-template", "/invocations")


def test_keys_and_states_are_looked_at_without_v1_too(launch):
    server = launch(api_key="k", enable_sleep_mode=True)
    with server.client() as http:
        key = {"Authorization": "Bearer k"}
        assert {http.post(path, json={}).status_code for path in POSTED} == {401}
        for path in ("/models", "/props"):
            assert http.get(path).status_code == 401
        assert http.post("/sleep", headers=key).status_code == 200
        for path in (path for path in POSTED if path not in ("/apply-template", "/chat/completions/input_tokens")):
            refused = http.post(path, json={}, headers=key)
            assert (path, refused.status_code, refused.json()["error"].get("code")) == (path, 503, "sleeping")
        server.call(server.engine.die)
        assert {http.post(path, json={}, headers=key).status_code for path in POSTED} == {503}


def test_paths_without_v1_wait_for_the_model(launch):
    with launch(FakeEngine(start_delay_s=3600), wait=False).client() as http:
        for path in POSTED:
            refused = http.post(path, json={"input": "a"})
            assert (path, refused.status_code, refused.headers.get("retry-after")) == (path, 503, "2")


def test_any_model_name_where_none_was_chosen(launch):
    with launch(any_model_name=True).client() as http:
        for path, body in (
            ("/v1/chat/completions", {"messages": HELLO}),
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/embeddings", {"input": "a"}),
            ("/tokenize", {"content": "a"}),
        ):
            answered = http.post(path, json={**body, "model": "gpt-3.5-turbo"})
            assert (answered.status_code, answered.headers["x-holdfast-ignored-fields"]) == (200, "model")
            assert answered.json().get("model", "fake") == "fake"
        assert http.get("/v1/models/gpt-3.5-turbo").status_code == 404
    with launch(any_model_name=True, strict_fields=True).client() as http:
        assert http.post("/v1/completions", json={"prompt": "a", "model": "gpt-3.5-turbo"}).status_code == 404


def test_tokens_by_its_names(http):
    assert http.post("/tokenize", json={"content": "hé"}).json()["tokens"] == list("hé".encode())
    pieces = http.post("/tokenize", json={"content": "hé", "with_pieces": True, "add_special": True}).json()["tokens"]
    assert pieces == [{"id": 104, "piece": "h"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert http.post("/detokenize", json={"tokens": [104]}).json()["content"] == "h"
    refused = http.post("/tokenize", json={"content": "a", "parse_special": False})
    assert refused.json()["error"]["param"] == "parse_special"


def test_a_template_applied_and_the_properties(http):
    applied = http.post("/apply-template", json={"messages": HELLO}).json()["prompt"]
    ids = http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == applied
    told = http.get("/props").json()
    assert (told["default_generation_settings"]["n_ctx"], told["total_slots"]) == (4096, 256)
    assert (told["eos_token"], told["model_alias"], told["chat_template"]) == ("<|end|>", "fake", "built in")


def test_properties_without_a_tokenizer(launch):
    with launch(FakeEngine(with_tokenizer=False)).client() as http:
        assert http.get("/props").json()["chat_template"] == ""
