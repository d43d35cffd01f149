"""Refusals that help: the nearest field, the path where it belongs, what to do instead; and servers without text."""

from __future__ import annotations

import json

import pytest

from holdfast.engine.fake import FakeEngine
from holdfast.engine.fake.tokenizer import END

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BODIES = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, COMPLETION: {"prompt": "hi"}}


def error_of(http, path: str, **extra) -> dict:
    response = http.post(path, json={**BODIES[path], **extra})
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize(
    ("path", "name", "fix"),
    [
        (CHAT, "max_token", "did you mean max_tokens?"), (CHAT, "temprature", "did you mean temperature?"),
        (COMPLETION, "top_kk", "did you mean top_k?"), (COMPLETION, "zzz", "leave zzz out"),
        (CHAT, "zzz" * 100, "leave " + "zzz" * 33 + "z... out"),
    ],
)  # fmt: skip
def test_the_nearest_field_is_named(strict, path, name, fix):
    error = error_of(strict, path, **{name: 1})
    assert error["holdfast"]["fix"] == fix
    assert error["message"].endswith(f"; {fix}")


@pytest.mark.parametrize(
    ("path", "name", "home"),
    [
        (CHAT, "prompt", COMPLETION), (COMPLETION, "messages", CHAT), (COMPLETION, "top_logprobs", CHAT),
        (CHAT, "encoding_format", "/v1/embeddings"),
    ],
)  # fmt: skip
def test_a_field_of_another_path_is_sent_there(strict, path, name, home):
    error = error_of(strict, path, **{name: "x"})
    assert home in error["message"]
    assert home in error["holdfast"]["fix"]
    assert error["param"] == name


def test_what_is_not_there_says_what_to_do_instead(http):
    assert "--scheduling-policy priority" in error_of(http, CHAT, priority=1)["holdfast"]["fix"]
    assert "n with logprobs" in error_of(http, COMPLETION, best_of=3)["holdfast"]["fix"]
    assert "use_beam_search" in error_of(http, COMPLETION, use_beam_search=True, stop=["x"])["message"]
    assert "from 1 to 10 beams" in error_of(http, COMPLETION, use_beam_search=True, n=11)["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_search_is_refused_before_its_first_byte(http, stream):
    long = {"prompt": "x" * 5000, "use_beam_search": True, "n": 2, "stream": stream}
    error = error_of(http, COMPLETION, **long)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(("skip", "text"), [(True, ""), (False, "<|end|>")])
def test_special_tokens_of_beams(http, skip, text):
    """The fake answers an end to a prompt of nothing but an end."""
    asked = {"prompt": [END], "use_beam_search": True, "n": 1, "max_tokens": 1, "ignore_eos": True}
    response = http.post(COMPLETION, json={**asked, "skip_special_tokens": skip})
    assert response.json()["choices"][0]["text"] == text


def test_too_many_messages(http):
    many = [{"role": "user", "content": "x"}] * 8193
    assert error_of(http, CHAT, messages=many)["param"] == "messages"


def test_token_ids_beside_the_text(http):
    asked = {"prompt": ["ab", "c"], "n": 2, "return_token_ids": True}
    for choice in http.post(COMPLETION, json=asked).json()["choices"]:
        said = [97, 98] if choice["index"] < 2 else [99]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (said, [*said, 256])
        assert choice["text"] == bytes(said).decode()
    plain = http.post(COMPLETION, json={"prompt": "ab"}).json()["choices"][0]
    assert plain["token_ids"] is plain["prompt_token_ids"] is None


def test_token_ids_in_a_stream(http):
    text = http.post(COMPLETION, json={"prompt": "ab", "stream": True, "return_token_ids": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events]
    assert [choice["token_ids"] for choice in choices] == [[97], [98], [256]]
    assert choices[0]["prompt_token_ids"] == [97, 98]
    assert all(choice["prompt_token_ids"] is None for choice in choices[1:])
    assert "".join(choice["text"] for choice in choices) == "ab"


def test_without_a_tokenizer_ids_are_the_answer(launch):
    with launch(FakeEngine(with_tokenizer=False)).client() as http:
        choice = http.post(COMPLETION, json={"prompt": [97, 98]}).json()["choices"][0]
        assert (choice["text"], choice["token_ids"]) == ("", [97, 98, 256])
        ended = http.post(COMPLETION, json={"prompt": [97, 98], "stop_token_ids": [98]}).json()["choices"][0]
        assert (ended["token_ids"], ended["stop_reason"]) == ([97, 98], 98)
        refused = {
            "stop": "x",
            "echo": True,
            "logprobs": 1,
            "include_stop_str_in_output": True,
            "return_token_ids": False,
        }
        for name, value in refused.items():
            response = http.post(COMPLETION, json={"prompt": [97], name: value})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)
        for path, body in ((CHAT, BODIES[CHAT]), (COMPLETION, BODIES[COMPLETION]), ("/tokenize", {"prompt": "a"})):
            assert http.post(path, json=body).status_code == 400
        assert http.post("/v1/embeddings", json={"input": [97]}).status_code == 200
