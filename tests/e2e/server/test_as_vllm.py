"""Where clients that were written against vLLM would notice another answer than vLLM's."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import msgspec
import pytest
from deadlines import PATIENCE_S

from holdfast import __version__
from holdfast.engine.fake import FakeEngine
from holdfast.errors import ConfigurationError
from holdfast.server.run import bind_unix
from holdfast.server.schema import fields
from holdfast.server.schema.responses import ChatAnswer, CompletionAnswer

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
BEGUN = [*HELLO, {"role": "assistant", "content": "ab"}]


def ask(http: httpx.Client, path: str = CHAT, **body: Any) -> dict[str, Any]:
    response = http.post(path, json={"messages": HELLO, **body} if path == CHAT else body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def events(http: httpx.Client, path: str = CHAT, **body: Any) -> list[dict[str, Any]]:
    text = http.post(path, json={**({"messages": HELLO} if path == CHAT else {}), **body, "stream": True}).text
    told = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert told.pop() == "[DONE]"
    return [json.loads(event) for event in told]


@pytest.mark.parametrize("name", ["conversation", "self", "messages", "range", "tools", "return_dict", "chat_template"])
def test_no_name_given_to_a_template_is_a_fault_of_the_server(http, name):
    for path in (CHAT, "/tokenize"):
        response = http.post(path, json={"messages": HELLO, "chat_template_kwargs": {name: 1}})
        assert response.status_code in (200, 400), response.text


def test_the_newer_limit_wins_and_defaults_of_clients_are_taken(http):
    answer = ask(http, max_tokens=3, max_completion_tokens=2, logprobs=False, top_logprobs=0, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/embeddings", {"input": "abc"}),
        ("/v1/embeddings", {"messages": HELLO, "encoding_format": "float"}),
        ("/v1/embeddings", {"messages": HELLO, "dimensions": 2}),
        ("/v1/embeddings", {"messages": HELLO, "embed_dtype": "float32"}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "a"]}),
        ("/v1/score", {"queries": "a", "documents": "b"}),
    ],
)
def test_sagemakers_path_leads_by_the_fields_of_a_body(http, path, body):
    plain, invoked = (ask(http, place, **body, model="fake") for place in (path, "/invocations"))
    for answer in (plain, invoked):
        answer.pop("id", None), answer.pop("created", None)
        answer.get("usage", {}).pop("prompt_tokens_details", None)  # The second may find the prompt cached.
    assert invoked == plain


def test_sagemakers_path_streams_and_refuses(http):
    assert events(http, "/invocations", messages=HELLO)[0]["object"] == "chat.completion.chunk"
    refused = http.post("/invocations", json={"neither": 1})
    assert refused.status_code == 400
    assert "messages (/v1/chat/completions)" in refused.json()["error"]["holdfast"]["needed"]
    assert http.post("/invocations", content=b"{").status_code == 400


@pytest.mark.parametrize(
    ("named", "asked", "status"), [("none", "fake", 404), ("fake", "none", 200), ("", "fake", 200)]
)
def test_sagemakers_header_names_the_adapter(http, named, asked, status):
    header = {"X-Amzn-SageMaker-Adapter-Identifier": named}
    answer = http.post("/invocations", json={"prompt": "é", "model": asked}, headers=header)
    assert answer.status_code == status, answer.text
    assert answer.json()["choices"][0]["text"] == "é" if status == 200 else "'none'" in answer.text


def test_errors_have_vllms_types_and_words(http):
    unknown = http.post("/v1/completions", json={"prompt": [999_999_999]})
    error = unknown.json()["error"]
    assert (unknown.status_code, error["type"], error["param"]) == (400, "BadRequestError", "prompt")
    assert "out of vocabulary" in error["message"]
    absent = {"model": "none", "input": "a", "prompt": "a", "messages": HELLO}
    for path in (CHAT, "/completions", "/embeddings", "/tokenize", "/invocations"):
        answer = http.post(path, json=absent)
        assert (path, answer.status_code, answer.json()["error"]["type"]) == (path, 404, "NotFoundError")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/responses", b"{", 400), ("POST", "/responses", b"{", 400),
        ("POST", "/v1/responses", b'{"input": "a", "model": "none"}', 404),
        ("GET", "/v1/responses/resp_none", b"", 404),
        ("POST", "/v1/responses", b'{"input": "a", "previous_response_id": "resp_none"}', 400),
        ("POST", "/completion", b"{", 400), ("GET", CHAT, b"", 405), ("POST", CHAT, b"form", 415),
        ("GET", "/none", b"", 404), ("GET", "/v1/files", b"", 404), ("GET", "/v1/models/none", b"", 404),
    ],
)  # fmt: skip
def test_other_errors_have_openais_type(http, method, path, body, status):
    kind = "text/plain" if status == 415 else "application/json"
    answer = http.request(method, path, content=body, headers={"Content-Type": kind})
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error"), answer.text


def test_the_requests_own_name_becomes_the_answers(http):
    named = {"X-Request-Id": "trace-9"}
    body = {"messages": HELLO, "request_id": "other"}
    assert http.post(CHAT, json=body, headers=named).json()["id"] == "chatcmpl-trace-9"
    assert http.post(CHAT, json=body).json()["id"] == "chatcmpl-other"
    # What is not fit to be printed is not taken.
    bad = http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "a b"}).json()["id"]
    assert bad.startswith("cmpl-")
    assert " " not in bad


def test_parts_of_content_that_are_text(http):
    parts = [
        "a", {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}, {"type": "input_text", "text": "c"},
        {"type": "refusal", "refusal": "d"}, {"type": "text", "text": "e", "image_url": None},
    ]  # fmt: skip
    messages = [{"role": "user", "content": parts}]
    ids = ask(http, messages=messages, return_token_ids=True)["prompt_token_ids"]
    assert b"abcde" in bytes(token for token in ids if token < 256)


@pytest.mark.parametrize("tools", [False, True])
def test_echo_repeats_the_answer_that_was_begun(http, tools):
    """vLLM's meaning: the last message, where it has the answer's role."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    extra = {"tools": [tool]} if tools else {}
    asked = {"messages": BEGUN, "continue_final_message": True, "max_tokens": 2, **extra}
    plain = ask(http, **asked)["choices"][0]["message"]["content"]
    assert ask(http, **asked, echo=True)["choices"][0]["message"]["content"] == "ab" + plain
    deltas = [event["choices"][0]["delta"] for event in events(http, **asked, echo=True)]
    assert deltas[:2] == [{"role": "assistant", "content": ""}, {"content": "ab"}]
    assert "".join(delta.get("content", "") for delta in deltas) == "ab" + plain
    other = ask(http, echo=True, max_tokens=2, **extra)["choices"][0]["message"]["content"]
    assert other == ask(http, max_tokens=2, **extra)["choices"][0]["message"]["content"]


def test_all_answers_begin_before_any_goes_on_and_tell_the_prompts_tokens(http):
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = events(http, n=3, max_tokens=2, stream_options=options)
    assert [event["choices"][0]["index"] for event in told[:3]] == [0, 1, 2]
    for event in told[:3]:
        assert event["choices"][0]["delta"]["role"] == "assistant"
        assert event["usage"]["completion_tokens"] == 0
        assert event["usage"]["prompt_tokens"] == event["usage"]["total_tokens"] > 0
    assert all("role" not in event["choices"][0]["delta"] for event in told[3:-1])
    echoed = events(http, "/v1/completions", prompt="abc", echo=True, stream_options=options)
    assert (echoed[0]["choices"][0]["text"], echoed[0]["usage"]["completion_tokens"]) == ("abc", 0)


@pytest.mark.parametrize("tools", [False, True])
def test_token_ids_of_a_chat(http, tools):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    prompt = {"messages": HELLO, **({"tools": [tool]} if tools else {})}
    asked = {"max_tokens": 4, "return_token_ids": True, **prompt}
    whole = ask(http, **asked)
    ids = whole["choices"][0]["token_ids"]
    assert whole["prompt_token_ids"] == ask(http, "/tokenize", **prompt)["tokens"]
    assert len(ids) == whole["usage"]["completion_tokens"]
    told = events(http, **asked)
    assert told[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in event for event in told[1:])
    assert [one for event in told for one in event["choices"][0].get("token_ids", [])] == ids
    plain = ask(http, max_tokens=4)
    assert plain["prompt_token_ids"] is plain["choices"][0]["token_ids"] is None
    assert events(http, max_tokens=4)[0]["prompt_token_ids"] is None


# The members of vLLM 0.32's answers, null where there is nothing to tell: its types, and what its streams leave unset.
CHAT_MEMBERS = """id object created model choices service_tier system_fingerprint usage prompt_logprobs prompt_token_ids
    prompt_text kv_transfer_params ec_transfer_params metrics"""
COMPLETION_MEMBERS = """id object created model choices service_tier system_fingerprint usage kv_transfer_params
    ec_transfer_params metrics"""
CHOICE_MEMBERS = "index logprobs finish_reason stop_reason token_ids routed_experts"
MESSAGE_MEMBERS = "role content refusal annotations audio function_call reasoning"
USAGE_MEMBERS = "prompt_tokens completion_tokens total_tokens prompt_tokens_details completion_tokens_details"


def test_members_that_are_null_are_there(http):
    chat, text = ask(http), ask(http, "/v1/completions", prompt="a")
    assert set(chat) == set(CHAT_MEMBERS.split())
    assert set(chat["choices"][0]) == {*CHOICE_MEMBERS.split(), "message"}
    message = chat["choices"][0]["message"]
    assert set(message) == {*MESSAGE_MEMBERS.split(), "reasoning_content"}
    assert set(chat["usage"]) == set(USAGE_MEMBERS.split())
    assert set(text) == set(COMPLETION_MEMBERS.split())
    assert set(text["choices"][0]) == {*CHOICE_MEMBERS.split(), "text", "prompt_logprobs", "prompt_token_ids"}
    assert chat["system_fingerprint"] == text["system_fingerprint"] == f"holdfast-{__version__}"
    # An answer may be sent back as it came.
    ask(http, messages=[*HELLO, message, *HELLO])


def test_members_of_events(http):
    opening, *others = events(http)
    chunk = {"id", "object", "created", "model", "choices"}
    assert set(opening) == chunk | {"prompt_token_ids", "prompt_text"}
    assert set(opening["choices"][0]) == {"index", "delta", "logprobs", "finish_reason"}
    member = {"index", "delta", "logprobs", "finish_reason", "token_ids"}
    assert all(member <= set(event["choices"][0]) for event in others)
    assert all(set(event) == chunk for event in others[:-1])
    assert set(others[-1]) == chunk | {"system_fingerprint"}
    assert set(others[-1]["choices"][0]) == member | {"stop_reason"}
    for event in events(http, "/v1/completions", prompt="abc", echo=True):
        ended = event["choices"][0]["finish_reason"] is not None
        assert set(event) == (chunk | {"system_fingerprint"} if ended else chunk)
        assert set(event["choices"][0]) == {
            "index",
            "text",
            "logprobs",
            "finish_reason",
            "stop_reason",
            "prompt_token_ids",
            "token_ids",
        }


def test_the_chunk_of_the_usage_bears_the_fingerprint(http):
    for path, body in ((CHAT, {}), ("/v1/completions", {"prompt": "a"})):
        *others, last = events(http, path, **body, stream_options={"include_usage": True})
        assert (last["system_fingerprint"], last["choices"]) == (f"holdfast-{__version__}", [])
        assert not any("system_fingerprint" in event for event in others)


def test_an_answer_bears_the_models_first_name(http):
    for name in ("alias", None):
        assert ask(http, model=name)["model"] == "fake"
        assert {event["model"] for event in events(http, "/v1/completions", prompt="a", model=name)} == {"fake"}
    assert [card["permission"][0]["object"] for card in http.get("/v1/models").json()["data"]] == [
        "model_permission"
    ] * 2


@pytest.mark.parametrize("value", ["True", "1", "yes", "", "maybe"])
def test_what_a_reset_cannot_do_is_refused_however_it_is_spelled(http, value):
    for name in ("reset_running_requests", "reset_external"):
        refused = http.post("/reset_prefix_cache", params={name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        assert http.post("/reset_prefix_cache", params={name: "False"}).status_code == 200


def test_what_helps_stands_in_the_message_that_clients_show(http):
    def said(path: str = CHAT, **body: Any) -> str:
        return str(
            http.post(path, json={"messages": HELLO, **body} if path == CHAT else body).json()["error"]["message"]
        )

    assert said(model="gpt-x").startswith("the model 'gpt-x' does not exist; served: fake, alias; use one")
    assert said("/detokenize", tokens=[999]).endswith("of this model; needed: integers from 0 to 258")
    # Not twice where the sentence has it already.
    assert "needed" not in said(max_tokens=100_000)
    assert "--trust-request-chat-template" in said(chat_template="{{ x }}")
    for name in fields.UNSUPPORTED | fields.QUIET.keys() - {"parallel_tool_calls", "include_reasoning", "tools"}:
        message = said("/v1/completions", prompt="a", **{name: {"some": "thing"}})
        assert message.startswith(f"{name} is not supported here: "), message


@pytest.mark.parametrize("path", ["/v1/conversations", "/tokenizer_info", "/v1/load_lora_adapter"])
def test_paths_that_are_not_there_say_why(http, path):
    refused = http.post(path, json={})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["holdfast"]["code"]) == (404, "not_found", "HF320")
    assert error["message"].startswith(f"{path} is not supported here: ")
    assert http.post("/v1/nothing", json={}).json()["error"]["message"].startswith("unknown path")


def test_requests_are_counted_by_path_and_status_refused_ones_too(launch):
    server = launch(FakeEngine(max_model_len=100), api_key="k")
    with server.client() as http:
        key = {"Authorization": "Bearer k"}
        http.post(CHAT, json={"messages": HELLO})
        http.post(CHAT, json={"messages": HELLO, "max_tokens": 2}, headers=key)
        http.post(CHAT, json={"messages": HELLO, "max_tokens": 200}, headers=key)
        http.get("/v1/models/some/thing", headers=key)
        http.request("TRACE", "/no/such/path", headers=key)
        text = http.get("/metrics/", headers=key).text
    counted = 'http_requests_total{handler="%s",method="%s",status="%s"} %s'
    assert counted % (CHAT, "POST", "2xx", 1.0) in text
    assert counted % (CHAT, "POST", "4xx", 2.0) in text
    assert counted % ("/v1/models/{name:path}", "GET", "4xx", 1.0) in text
    assert counted % ("none", "OTHER", "4xx", 1.0) in text
    assert f'http_request_duration_seconds_count{{handler="{CHAT}",method="POST"}} 3.0' in text
    assert "process_start_time_seconds" in text
    # What is refused for what it asks is no request that ended in an error.
    tally = server._app.state.tally
    assert (tally.answered, tally.failed) == (1, 0)
    assert 'vllm:request_time_per_output_token_seconds_count{engine="0",model_name="fake"}' in text
    series = [line for line in text.splitlines() if line.startswith("vllm:")]
    assert all('engine="0"' in line for line in series)


@pytest.mark.parametrize("extra", [{}, {"return_token_ids": True, "n": 2}, {"prompt_logprobs": 1, "stop": "b"}])
def test_answers_are_what_the_document_tells(http, extra):
    chat = ask(http, **extra, logprobs=True, top_logprobs=2)
    assert msgspec.convert(chat, ChatAnswer).choices[0].index == 0
    text = ask(http, "/v1/completions", prompt="abc", **extra, logprobs=2, echo=True)
    assert msgspec.convert(text, CompletionAnswer).choices[0].text.startswith("abc")
    msgspec.convert(ask(http, max_tokens=1), ChatAnswer)
    msgspec.convert(ask(http, "/v1/completions", prompt="abc"), CompletionAnswer)


def test_settings_of_a_server_that_vllm_has_too(launch: Any) -> None:
    """On one server: the prefix of a proxy, paths that are not logged, limits and defaults of requests."""
    server = launch(
        root_path="/llm",
        unlogged_paths=frozenset({"/v1/models"}),
        max_logprobs=2,
        chat_max_tokens=2,
        tokens_as_ids=True,
        api_key="k",
    )
    headers = {"Authorization": "Bearer k"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE_S) as client:
        for prefix in ("", "/llm"):
            assert client.get(prefix + "/v1/models").status_code == 200
            assert httpx.get(server.url + prefix + "/health", timeout=PATIENCE_S).status_code == 200
            assert httpx.get(server.url + prefix + "/v1/models", timeout=PATIENCE_S).status_code == 401
            body = {"prompt": "a", "max_tokens": 1, "logprobs": 1}
            told = ask(client, prefix + "/v1/completions", **body)["choices"][0]["logprobs"]["tokens"]
            assert told[0].startswith("token_id:")
        assert client.get("/llmv1/models").status_code == 404
        as_text = ask(client, "/v1/completions", **body, return_tokens_as_token_ids=False)["choices"][0]["logprobs"]
        assert not as_text["tokens"][0].startswith("token_id:")
        many = client.post("/v1/completions", json={**body, "logprobs": 3})
        assert many.status_code == 400
        assert "between 0 and 2" in many.json()["error"]["message"]
        for path, asked in (("/v1/completions", body), (CHAT, {"messages": HELLO, "logprobs": True})):
            named = [client.post(path, json={**asked, "logprob_token_ids": ids}) for ids in ([5, 6], [5, 6, 7])]
            assert [answer.status_code for answer in named] == [200, 400]
            assert named[1].json()["error"]["param"] == "logprob_token_ids"
            prompted = [client.post(path, json={**asked, "prompt_logprobs": count}) for count in (2, 3)]
            assert [answer.status_code for answer in prompted] == [200, 400]
        assert ask(client)["usage"]["completion_tokens"] == 2
        # A default that the client did not send gives way.
        assert ask(client, min_tokens=6)["usage"]["completion_tokens"] == 6
    lines = server.wait_for_lines(5)
    assert {line["path"] for line in lines} <= {"/v1/completions", "/llmv1/models", CHAT}


def test_over_a_unix_domain_socket(tmp_path: Any, launch: Any) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    for left in (True, False):  # A file that a dead server left is no hindrance.
        assert path.exists() == left
        server = launch(listener=bind_unix(path))
        socketed = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=socketed, base_url="http://x", timeout=PATIENCE_S) as client:
            assert ask(client)["choices"]
        with pytest.raises(ConfigurationError, match="there already"):
            bind_unix(path)
        server.stop()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigurationError):
        bind_unix(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(("joins", "shown"), [(False, "parts: 2"), (True, "a\nb")])
def test_parts_of_a_message_are_joined_where_the_server_says_so(launch, joins, shown):
    """vLLM's --chat-template-content-format string; else a template that takes parts gets them."""
    template = (
        "{%- for message in messages %}{%- if message['content'] is string %}{{ message['content'] }}"
        "{%- else %}parts: {{ message['content'] | length }}"
        "{%- for part in message['content'] %}{{ ' ' + part['text'] if part['type'] == 'text' }}{%- endfor %}"
        "{%- endif %}{%- endfor %}"
    )
    parts = [{"type": "text", "text": text} for text in "ab"]
    body = {"messages": [{"role": "user", "content": parts}], "chat_template": template}
    with launch(FakeEngine(), trust_request_chat_template=True, joins_parts=joins).client() as http:
        assert http.post("/apply-template", json=body).json()["prompt"].startswith(shown)
