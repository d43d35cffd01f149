"""Anthropic's API over HTTP as its client and Claude Code call it; the client itself is in tests/clients."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from holdfast.engine.fake import FakeEngine, echo, say
from holdfast.server.response import generation

HELLO = [{"role": "user", "content": "hello"}]
ASKED = {"model": "fake", "max_tokens": 400, "messages": HELLO}
HEADERS = {"x-api-key": "k", "anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
WEATHER = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
ARGUMENTS = '{"city": "Oslo"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SAID = f"<think>Let me see.</think>\n\nWait.{CALL}\n{CALL}"


@pytest.fixture
def client(agents):
    agents.engine.script = echo
    agents.engine.received.clear()
    with agents.client() as http:
        http.headers.update(HEADERS)
        yield http


def post(client, **changes):
    answered = client.post("/v1/messages?beta=true", json={**ASKED, **changes})
    assert answered.status_code == 200, answered.text
    return answered.json()


def streamed(client, **changes):
    text = client.post("/v1/messages?beta=true", json={**ASKED, "stream": True, **changes}).text
    pairs = [event.split("\n") for event in text.removesuffix("\n\n").split("\n\n")]
    events = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]
    assert all(name == event["type"] for name, event in events)
    return [event for _, event in events]


def prompt(server, number=-1):
    return server.engine.tokenizer.decode(server.engine.received[number][0])


def test_a_message_as_claude_code_sends_it(agents, client):
    billing = "x-anthropic-billing-header: cc_version=2; cch=1;"
    system = [
        {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in (billing, "be", "kind")
    ]
    parts = [{"type": "text", "text": "<reminder>"}, {"type": "text", "text": "hi", "cache_control": {"ttl": "1h"}}]
    answered = client.post(
        "/v1/messages?beta=true",
        json={
            **ASKED, "max_tokens": 32000, "system": system, "messages": [{"role": "user", "content": parts}],
            "metadata": {"user_id": "u"}, "temperature": 0, "top_k": 3, "thinking": {"type": "adaptive"},
            "context_management": {"edits": []}, "something_new": 1,
        },
    )  # fmt: skip
    told = answered.json()
    assert answered.headers["x-holdfast-ignored-fields"] == "something_new, context_management"
    assert answered.headers["request-id"] == answered.headers["x-request-id"]
    assert (told["type"], told["role"], told["model"], told["stop_reason"]) == (
        "message",
        "assistant",
        "fake",
        "end_turn",
    )
    assert told["content"] == [{"type": "text", "text": "<reminder>hi"}]
    assert told["id"].startswith("msg_")
    # More tokens than the context has are the most that is wanted.
    assert prompt(agents).startswith("system<|message|>be\n\nkind<|end|>user<|message|><reminder>hi<|end|>")
    assert (agents.engine.received[-1][1].top_k, agents.engine.received[-1][1].greedy) == (3, True)
    assert told["usage"] == {
        "input_tokens": len(agents.engine.received[-1][0]), "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0, "output_tokens": len("<reminder>hi") + 1,
    }  # fmt: skip


def test_thoughts_text_and_calls_are_blocks_whole_and_streamed(agents, client):
    agents.engine.script = say(SAID)
    told = post(client, tools=[WEATHER], thinking={"type": "enabled", "budget_tokens": 1024})
    calls = [block for block in told["content"] if block["type"] == "tool_use"]
    assert [{**block, "id": ""} if "id" in block else block for block in told["content"]] == [
        {"type": "thinking", "thinking": "Let me see.", "signature": "unsigned"},
        {"type": "text", "text": "Wait."},
        *[{"type": "tool_use", "id": "", "name": "weather", "input": {"city": "Oslo"}}] * 2,
    ]
    assert len({call["id"] for call in calls}) == 2
    assert told["stop_reason"] == "tool_use"
    events = streamed(client, tools=[WEATHER])
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    for before, after in pairwise(kinds[2:-2]):
        assert (before == "content_block_stop") == (after == "content_block_start")
    begun = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert begun == ["thinking", "text", "tool_use", "tool_use"]
    pieces = dict.fromkeys(range(4), "")
    for event in events:
        if event["type"] == "content_block_delta":
            kind = event["delta"].pop("type")
            if kind != "signature_delta":
                pieces[event["index"]] += next(iter(event["delta"].values()))
    assert list(pieces.values()) == ["Let me see.", "Wait.", ARGUMENTS, ARGUMENTS]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    first, last = events[0]["message"]["usage"], events[-2]["usage"]
    assert (first["output_tokens"], last["output_tokens"]) == (0, told["usage"]["output_tokens"])
    # What was asked before is found in the cache, and told apart.
    assert last["cache_read_input_tokens"] > 0
    assert first["input_tokens"] == last["input_tokens"] + last["cache_read_input_tokens"]


def test_results_of_tools_and_thoughts_go_back(agents, client):
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Wait."},
        {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
        {"type": "tool_use", "id": "c2", "name": "weather", "input": {}},
    ]  # fmt: skip
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": "c2", "content": "no city", "is_error": True},
        {"type": "text", "text": "go on"},
    ]
    history = [*HELLO, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    post(client, messages=history, tools=[WEATHER], system="be brief")
    shown = prompt(agents)
    for before, after in pairwise(
        ["be brief", "The weather of a city", "hello", "Wait.", '"Oslo"', "rain", "Error: no city", "go on"]
    ):
        assert shown.index(before) < shown.index(after), shown


def test_how_an_answer_has_ended(agents, client):
    told = post(client, stop_sequences=["l", "z"])
    assert (told["content"][0]["text"], told["stop_reason"], told["stop_sequence"]) == ("he", "stop_sequence", "l")
    assert streamed(client, stop_sequences=["l"])[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "l"}
    assert post(client, max_tokens=2)["stop_reason"] == "max_tokens"
    agents.engine.script = say(CALL)
    cut = post(client, max_tokens=55, tools=[WEATHER])
    assert (cut["stop_reason"], cut["content"][0]["input"]) == ("max_tokens", {})


def test_an_answer_that_was_begun_is_gone_on_with(agents, client):
    begun = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "He"}]}]
    post(client, messages=begun)
    assert prompt(agents).endswith("assistant<|message|>He")


def test_users_who_speak_twice_are_heard_as_one(agents, client):
    post(client, messages=[*HELLO, {"role": "user", "content": "again"}])
    assert prompt(agents) == "user<|message|>helloagain<|end|>assistant<|answer|>"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [({"type": "any"}, True), ({"type": "tool", "name": "weather"}, True), ({"type": "auto"}, False)],
)
def test_which_tools_may_be_called(agents, client, choice, expected):
    agents.engine.script = say(CALL + CALL)
    told = post(client, tools=[WEATHER], tool_choice={**choice, "disable_parallel_tool_use": True})
    assert [block["type"] for block in told["content"]] == ["tool_use"]
    assert told["stop_reason"] == "tool_use"
    assert (agents.engine.received[-1][1].structured_outputs is not None) is expected
    plain = post(client, tools=[WEATHER], tool_choice={"type": "none"})
    assert [block["type"] for block in plain["content"]] == ["text"]


def test_a_schema_and_the_templates_switches(agents, client, monkeypatch):
    given = []
    render = agents.engine.tokenizer.apply_chat_template
    monkeypatch.setattr(
        agents.engine.tokenizer, "apply_chat_template", lambda *args, **kw: given.append(kw) or render(*args, **kw)
    )
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {}}}
    post(client, output_config={"format": form, "effort": "low"}, thinking={"type": "disabled"})
    assert (given[0]["enable_thinking"], given[0]["reasoning_effort"]) == (False, "low")
    assert agents.engine.received[-1][1].structured_outputs is not None
    post(client, output_format=form)
    assert agents.engine.received[-1][1].structured_outputs is not None
    assert "enable_thinking" not in given[1]


def test_tokens_are_counted_as_a_message_counts_them(client):
    asked = {"system": "be", "tools": [WEATHER], "messages": HELLO}
    counted = client.post("/v1/messages/count_tokens?beta=true", json={**asked, "model": "fake", "max_tokens": 5})
    usage = post(client, **asked)["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]: type 'image' is not supported"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].content[0]: type 'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]: type 'web_search_20250305'"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema is missing"),
        ({"mcp_servers": [{"url": "http://a"}]}, "mcp_servers is not supported here"),
        ({"container": "c"}, "container is not supported here"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type must be json_schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"stop_sequences": ["a"] * 99}, "stop_sequences"),
        ({"messages": []}, "messages: at least one"),
        ({"messages": [{"role": "assistant", "content": ""}] * 8193}, "messages: too many messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role must be"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text must be"),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, "prompt is too long: "),
    ],
)  # fmt: skip
def test_what_is_refused_is_named_in_anthropics_shape(client, changes, message):
    refused = client.post("/v1/messages", json={**ASKED, **changes})
    told = refused.json()
    assert (refused.status_code, told["type"], told["error"]["type"]) == (400, "error", "invalid_request_error")
    assert told["error"]["message"].startswith(message), told
    assert told["request_id"] == refused.headers["request-id"]


def test_other_errors_in_its_shape(agents, client, launch):
    def said(answered):
        told = answered.json()
        assert told["type"] == "error"
        return answered.status_code, told["error"]["type"]

    assert said(client.post("/v1/messages", json={**ASKED, "model": "none"})) == (404, "not_found_error")
    assert said(client.post("/v1/messages/batches", json={})) == (404, "not_found_error")
    assert said(client.get("/v1/messages")) == (405, "invalid_request_error")
    assert said(client.post("/v1/messages", content=b"{")) == (400, "invalid_request_error")
    assert said(client.post("/v1/messages", json=ASKED, headers={"x-api-key": "no"})) == (401, "authentication_error")
    bearer = {"x-api-key": "", "Authorization": "Bearer k"}
    assert client.post("/v1/messages", json=ASKED, headers=bearer).status_code == 200
    # A key in Anthropic's header is one everywhere; without its version errors elsewhere are OpenAI's.
    assert client.get("/v1/nothing").json()["type"] == "error"
    with agents.client() as http:
        assert http.get("/v1/models", headers={"x-api-key": "k"}).json()["object"] == "list"
        assert "type" not in http.get("/v1/models").json()
    strict = launch(FakeEngine(fail_after_tokens=2), strict_fields=True)
    with strict.client() as http:
        assert said(http.post("/v1/messages", json={**ASKED, "new": 1})) == (400, "invalid_request_error")
        assert said(http.post("/v1/messages", json=ASKED)) == (503, "overloaded_error")
        events = streamed(http)
        assert events[-1]["type"] == "error"
        assert events[-1]["error"]["type"] == "overloaded_error"


def test_models_as_its_client_lists_them(client):
    listed = client.get("/v1/models?limit=1000").json()
    assert [(one["type"], one["id"]) for one in listed["data"]] == [("model", "fake"), ("model", "alias")]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "fake", "alias")
    assert client.get("/v1/models/alias").json()["display_name"] == "alias"


def test_a_client_that_leaves_ends_its_answer(agents, client):
    agents.engine.aborted.clear()
    agents.call(agents.engine.pause)
    try:
        with client.stream("POST", "/v1/messages", json={**ASKED, "stream": True}) as answered:
            # Before anything was generated.
            assert next(answered.iter_lines()) == "event: message_start"
        agents.until(lambda: len(agents.engine.aborted) == 1 and agents.engine.unfinished == 0)
    finally:
        agents.call(agents.engine.resume)


def test_a_silent_stream_says_that_it_lives(agents, client, monkeypatch):
    monkeypatch.setattr(generation, "PING_S", 0.01)
    agents.call(agents.engine.pause)
    try:
        with client.stream("POST", "/v1/messages", json={**ASKED, "stream": True}) as answered:
            lines = answered.iter_lines()
            pings = 0
            while pings < 3:
                pings += next(lines) == "event: ping"
            agents.call(agents.engine.resume)
            assert [line for line in lines if line][-2] == "event: message_stop"
    finally:
        agents.call(agents.engine.resume)


def test_requests_are_counted_and_logged_by_path(agents, client):
    told = post(client)
    lines: list = []
    while told["id"] not in (one["id"] for one in lines):  # Written once the client has its answer.
        lines = agents.wait_for_lines(len(lines) + 1)
    line = next(one for one in lines if one["id"] == told["id"])
    assert (line["path"], line["model"], line["finish_reason"]) == ("/v1/messages", "fake", "stop")
    page = client.get("/metrics").text
    assert 'handler="/v1/messages"' in page
