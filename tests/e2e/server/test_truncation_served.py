"""truncate_prompt_tokens and return_tokens_as_token_ids over HTTP."""

from __future__ import annotations

import json

from holdfast.engine.fake import FakeEngine

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def test_a_prompt_is_cut_to_what_fits(launch):
    server = launch(FakeEngine(max_model_len=20))
    with server.client() as http:

        def sent(path, **body):
            answered = http.post(path, json=body)
            assert answered.status_code == 200, answered.text
            return server.engine.received[-1][0], answered.json()

        text = "x" * 30 + "abcdefghijklmnopqrst"
        prompt, _ = sent(COMPLETION, prompt=text, truncate_prompt_tokens=3, max_tokens=5)
        assert bytes(prompt) == b"rst"
        prompt, _ = sent(COMPLETION, prompt=text, truncate_prompt_tokens=-1, max_tokens=5)
        assert bytes(prompt) == text.encode()[-15:]
        prompt, told = sent(
            COMPLETION, prompt=text, truncate_prompt_tokens=3, truncation_side="right", max_tokens=5, echo=True
        )
        assert bytes(prompt) == b"xxx"
        assert told["choices"][0]["text"].startswith("xxx")
        prompt, _ = sent(COMPLETION, prompt=list(text.encode()), truncate_prompt_tokens=2, max_tokens=5)
        assert bytes(prompt) == b"st"
        messages = [{"role": "user", "content": text}]
        prompt, _ = sent(CHAT, messages=messages, truncate_prompt_tokens=-1, max_tokens=5)
        whole = http.post(CHAT, json={"messages": messages, "max_tokens": 5}).json()["error"]
        assert whole["code"] == "context_length_exceeded"
        assert len(prompt) == 15
        refused = http.post(COMPLETION, json={"prompt": text, "truncate_prompt_tokens": 16, "max_tokens": 5}).json()
        assert refused["error"]["param"] == "truncate_prompt_tokens"
        assert http.post(COMPLETION, json={"prompt": text, "truncate_prompt_tokens": 0}).status_code == 400


def test_tokens_are_named_by_their_ids(http):
    asked = {"prompt": "ab", "logprobs": 2, "return_tokens_as_token_ids": True, "max_tokens": 2, "echo": True}
    told = http.post(COMPLETION, json=asked).json()["choices"][0]["logprobs"]
    assert told["tokens"] == ["token_id:97", "token_id:98", "token_id:97", "token_id:98"]
    assert told["top_logprobs"][1].keys() == {"token_id:98", "token_id:99"}
    streamed = http.post(COMPLETION, json={**asked, "echo": False, "stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert [event["choices"][0]["logprobs"]["tokens"] for event in events] == [["token_id:97"], ["token_id:98"]]
    messages = [{"role": "user", "content": "ab"}]
    asked = {"messages": messages, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    first = http.post(CHAT, json=asked).json()["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["bytes"], first["top_logprobs"][0]["token"]) == ("token_id:97", [97], "token_id:97")
