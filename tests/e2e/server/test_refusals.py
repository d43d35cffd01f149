"""Every way to be refused: status, OpenAI's shape, the field by name. And nothing a client sends is a 500."""

from __future__ import annotations

import json
import subprocess

import httpx
import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.engine.fake import FakeEngine
from holdfast.server.schema import fields
from holdfast.server.schema.requests import ChatBody, CompletionBody

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
DEEP: list = []
for _ in range(500):
    DEEP = [DEEP]
PATHS = ("/v1/chat/completions", "/v1/completions")


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert {"message", "type", "param", "code"} <= set(body["error"])
    assert "Traceback" not in response.text
    return body["error"]


def post(http: httpx.Client, extra: dict, path: str = PATHS[0]) -> httpx.Response:
    base = CHAT if "chat" in path else {"prompt": "hi"}
    return http.post(path, json={**base, **extra})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", sorted(fields.UNSUPPORTED | fields.QUIET.keys()))
def test_unsupported_options_are_refused_by_name(http, path, name):
    error = error_of(post(http, {name: {"some": "thing"}}, path), 400)
    if name in (ChatBody if path == PATHS[0] else CompletionBody).__struct_fields__:
        assert (error["param"].split(".")[0], error["code"]) == (name, "invalid_value")
        return
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert name in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (PATHS[0], {}, "messages"),
        (PATHS[0], {"messages": None}, "messages"),
        (PATHS[0], {"model": "fake", "max_tokens": 3}, "messages"),
        (PATHS[0], {"messages": [{"content": "hi"}]}, "messages[0].role"),
        (PATHS[0], {"messages": [{"role": "user", "content": [{"text": "hi"}]}]}, "messages[0].content[0].type"),
        (PATHS[1], {}, "prompt"),
        (PATHS[1], {"prompt": None}, "prompt"),
    ],
)
def test_what_is_missing_is_the_param(http, path, body, param):
    error = error_of(http.post(path, json=body), 400)
    assert (error["param"], error["message"]) == (param, f"{param} is missing")


@pytest.mark.parametrize("path", PATHS)
def test_values_that_ask_for_nothing_are_accepted(http, path):
    for name, values in fields.QUIET.items():
        for value in (*values, None):
            assert post(http, {name: value}, path).status_code == 200, (name, value)
    for name in fields.HARMLESS:
        assert post(http, {name: "anything"}, path).status_code == 200


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"max_tokens": "5 or so"}, "max_tokens"),
        ({"temperature": "nan"}, "temperature"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "r" * 65, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"priority": 1}, "priority"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_usage": None}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "guided_decoding_backend": "yacc"}, "guided_decoding_backend"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": DEEP}}}]}, "tools"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": DEEP}}}]}
                ]
            },
            "messages",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ],
)
def test_chat_errors_name_the_field(http, extra, param):
    assert error_of(post(http, extra), 400)["param"] == param


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [100000]}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "logprobs": 1, "stream": True, "n": 2}, "echo"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_completion_errors_name_the_field(http, extra, param):
    error = error_of(post(http, extra, PATHS[1]), 400)
    # A missing prompt has no place of its own: msgspec names it in the text.
    assert error["param"] == param or (extra["prompt"] is None and "prompt" in error["message"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "it is empty; send"), (b"{", "ends before the object is closed (byte 1); close"),
        (b"[]", "must be a JSON object"),
        (b"null", ""), (b'"x"', ""), (b"\xff\xfe", "(byte 0); send valid JSON"), (b"[" * 100_000, "nested too deep"),
        (b'{"a": "\\ud800"}', "(byte "), (b'{"a": "b\xff"}', "not UTF-8 (byte 8)"),
        (b'{"a": 1,}', "trailing comma in object (byte 8); send valid JSON in UTF-8, written by a JSON library"),
    ],
)  # fmt: skip
def test_bad_json(http, body, said):
    for path in PATHS:
        error = error_of(http.post(path, content=body), 400)
        assert error["type"] == "BadRequestError"
        assert said in error["message"]


def test_beyond_the_context_both_numbers_are_told(launch):
    server = launch(FakeEngine(max_model_len=100))
    with server.client() as http:
        error = error_of(post(http, {"prompt": "x" * 90, "max_tokens": 101}, PATHS[1]), 400)
        assert error["code"] == "context_length_exceeded"
        assert "100" in error["message"]
        assert "191" in error["message"]
        for length in (100, 200, 20_000):  # What refuses it differs; what is wrong does not.
            asked = {"messages": [{"role": "user", "content": "y" * length}]}
            error = error_of(post(http, asked), 400)
            assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
            error = error_of(post(http, {"prompt": "y" * length, "max_tokens": 1}, PATHS[1]), 400)
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
            # By these words LiteLLM and others know it, and try a model with a longer context.
            said = "This model's maximum context length is 100 tokens. However, you requested "
            assert error["message"].startswith(said)
            assert "Please reduce the length of the messages or completion" in error["message"]
        # As in vLLM max_tokens is the most that is wanted: what the context has left is given.
        for wanted in (10, 20, 100):
            answer = post(http, {"prompt": "x" * 90, "max_tokens": wanted, "ignore_eos": True}, PATHS[1]).json()
            assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (10, "length")
        assert error_of(post(http, {"prompt": "x" * 90, "max_tokens": 20, "min_tokens": 11}, PATHS[1]), 400)
        # Without max_tokens a chat gets what is left of the context.
        answer = post(http, {"ignore_eos": True}).json()
        assert answer["usage"]["total_tokens"] == 100
        assert answer["choices"][0]["finish_reason"] == "length"


def test_unknown_model_path_and_method(http):
    error = error_of(post(http, {"model": "gpt-x"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    error_of(http.get("/v2/nothing"), 404)
    error_of(http.get("/v1/completions"), 405)
    error_of(http.post("/v1/nothing/", json={}), 404)


def test_key(launch):
    with launch(api_key="secret").client() as http:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            response = http.get("/v1/models", headers=headers)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        assert http.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert http.get("/health").status_code == 200


def test_body_too_large_by_length_and_by_chunks(launch):
    with launch(max_body_bytes=1000).client() as http:
        assert error_of(http.post(PATHS[1], content=b"x" * 1001), 413)["code"] == "request_too_large"
        chunks = (b"y" * 100 for _ in range(11))
        error_of(http.post(PATHS[1], content=chunks), 413)
        assert post(http, {}, PATHS[1]).status_code == 200


def test_a_full_queue_is_429_with_retry_after(launch):
    server = launch(FakeEngine(max_num_seqs=1, max_queued_requests=1), retry_after_s=7)
    server.call(server.engine.pause)
    with server.client() as http, http.stream("POST", PATHS[0], json={**CHAT, "stream": True}) as first:
        assert first.status_code == 200
        with http.stream("POST", PATHS[0], json={**CHAT, "stream": True}) as second:
            assert second.status_code == 200
            refused = post(http, {})
            assert error_of(refused, 429)["code"] == "overloaded"
            assert refused.headers["retry-after"] == "7"
            server.call(server.engine.resume)
            assert b"[DONE]" in second.read()
        assert b"[DONE]" in first.read()


def test_an_error_in_the_middle_of_a_stream_is_its_last_event(launch):
    server = launch(FakeEngine(fail_after_tokens=2))
    with server.client() as http:
        text = post(http, {"stream": True}).text
        *told, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert done == "[DONE]"
        events = [json.loads(one) for one in told]
        assert len(events) == 4
        assert events[-1]["error"]["code"] == "engine_dead"
        assert error_of(post(http, {}), 503)["code"] == "engine_dead"
        several = post(http, {"prompt": ["abc", "def"]}, PATHS[1])
        assert error_of(several, 503)["code"] == "engine_dead"
    lines = server.wait_for_lines(3)
    assert (lines[0]["status"], lines[0]["error_code"], lines[0]["holdfast_code"]) == (200, "engine_dead", "HF410")


def test_a_bug_is_500_without_its_traceback(launch):
    def broken(prompt):
        raise ZeroDivisionError("secret detail")

    server = launch(FakeEngine(broken))
    with server.client() as http:
        response = post(http, {})
        assert error_of(response, 500)["type"] == "server_error"
        assert "secret" not in response.text
        streamed = post(http, {"stream": True}).text
        assert "secret" not in streamed
        assert '"server_error"' in streamed
        assert http.get("/health").status_code == 200


def test_curl(server):
    command = ["curl", "-sS", "-N", "--max-time", "120", f"{server.url}/v1/completions"]
    refused = subprocess.run([*command, "-d", '{"prompt": "abc"}'], capture_output=True, check=True, timeout=150)
    assert "-H 'Content-Type: application/json'" in json.loads(refused.stdout)["error"]["message"]
    command += ["-H", "Content-Type: application/json", "-d", '{"prompt": "abc"}']
    done = subprocess.run(command, capture_output=True, check=True, timeout=150)
    assert json.loads(done.stdout)["choices"][0]["text"] == "abc"
    command[-1] = '{"prompt": "abc", "stream": true}'
    done = subprocess.run(command, capture_output=True, check=True, timeout=150)
    assert done.stdout.endswith(b"data: [DONE]\n\n")


_NAMES = sorted(
    fields.honoured_fields(ChatBody)
    | fields.honoured_fields(CompletionBody)
    | fields.HARMLESS.keys()
    | fields.QUIET.keys()
)
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.integers(-2, 300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
_JSON = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.just("role"), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=examples(250), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(PATHS),
    extra=st.dictionaries(st.sampled_from(_NAMES), _JSON, max_size=5),
    wild=st.none() | st.binary(max_size=200) | _JSON,
)
def test_whatever_is_sent_is_never_a_500(http, path, extra, wild):
    base = CHAT if "chat" in path else {"prompt": "hi"}
    if isinstance(wild, bytes):
        response = http.post(path, content=wild)
    elif wild is not None:
        response = http.post(path, json=wild)
    else:
        response = http.post(path, json={**base, "max_tokens": 5, **extra})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert set(response.json()) == {"error"}


def test_an_access_line_has_both_codes_of_a_refusal(launch):
    server = launch()
    with server.client() as http:
        post(http, {"messages": [{"role": "user", "content": "x" * 100_000}]})
        http.get("/v1/models/nobody")
        http.get("/v1/models")
    long, unknown, fine = server.wait_for_lines(3)
    assert (long["error_code"], long["holdfast_code"]) == ("context_length_exceeded", "HF310")
    assert (unknown["status"], unknown["error_code"], unknown["holdfast_code"]) == (404, "model_not_found", None)
    assert (fine["error_code"], fine["holdfast_code"]) == (None, None)


def test_every_wrong_key_of_a_bias_is_named(http):
    error = error_of(post(http, {"logit_bias": {"bad1": 1, "7": 1, "bad2": 1}}), 400)
    assert error["message"].startswith("logit_bias: 'bad1', 'bad2' are not token ids")
    assert post(http, {"stream_options": {}}).status_code == 200
