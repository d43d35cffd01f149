"""Fields that nothing is done with: accepted as vLLM does, told in a header and once in the log, or refused."""

from __future__ import annotations

import json
import logging

import pytest

from holdfast.engine.fake import FakeEngine
from holdfast.server.schema import fields, ignored
from holdfast.text.templates.template import compile_template

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETION: {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [97]},
}
HEADER = "x-holdfast-ignored-fields"


def post(http, path=CHAT, **extra):
    return http.post(path, json={**BODIES[path], **extra})


UNKNOWN = [
    ({"max_token": 5}, "max_token", "max_token"),
    ({"prompt": "x"}, "prompt", "prompt"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs", "vllm_xargs"),
    ({"extra_body": {}}, "extra_body", "extra_body"),
    ({"stream": True, "stream_options": {"what": 1}}, "stream_options.what", "stream_options.what"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "stream_options.include_obfuscation",
    ),
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[].mood", "messages[0].mood"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "mood": 1}]}]},
        "messages[].content[].mood",
        "messages[0].content[0].mood",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
        "messages[].tool_calls",
        "messages[0].tool_calls",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]},
        "messages[].tool_call_id",
        "messages[0].tool_call_id",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "reasoning": "hm"}]},
        "messages[].reasoning_content",
        "messages[0].reasoning_content",
    ),
]


@pytest.mark.parametrize(("extra", "told", "refused"), UNKNOWN)
def test_an_unknown_field_is_told_or_refused(http, strict, extra, told, refused):
    answered = post(http, **extra)
    assert (answered.status_code, answered.headers[HEADER]) == (200, told)
    error = post(strict, **extra)
    assert (error.status_code, error.json()["error"]["param"]) == (400, refused)


@pytest.mark.parametrize("path", BODIES)
def test_every_endpoint_takes_them(http, strict, path):
    answered = post(http, path, nobody_knows=1)
    assert (answered.status_code, answered.headers[HEADER]) == (200, "nobody_knows")
    assert post(strict, path, nobody_knows=1).status_code == 400
    assert HEADER not in post(http, path).headers
    of_vllm = post(strict, path, request_id="mine").status_code
    assert of_vllm == (400 if path.endswith("tokenize") else 200)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_what_changes_nothing_by_its_definition_is_not_told(http, strict, path):
    for client in (http, strict):
        answered = post(client, path, **{name: {"any": ["value"]} for name in fields.HARMLESS})
        assert (answered.status_code, HEADER in answered.headers) == (200, False)
    sent_back = {"role": "assistant", "content": "x", "id": "1", "refusal": None, "annotations": [], "audio": None}
    answered = post(strict, messages=[*BODIES[CHAT]["messages"], sent_back, *BODIES[CHAT]["messages"]])
    assert answered.status_code == 200


def test_neither_header_nor_log_grow_without_bound(launch, caplog):
    caplog.set_level(logging.WARNING, "holdfast.server")
    with launch().client() as http:
        answered = post(http, **{f"f{number}" * 50: 1 for number in range(500)})
        assert answered.status_code == 200
        assert len(answered.headers[HEADER]) < 2000
        assert answered.headers[HEADER].endswith(", ...")
        told = post(http, **{"a\r\nSet-Cookie: b\u00e9": 1}).headers
        assert told[HEADER] == "a?r?nSet-Cookie??b?"
        assert "set-cookie" not in told
        for batch in range(40):
            post(http, **{f"g{batch}_{number}": 1 for number in range(10)})
        lines = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
        assert len(lines) == ignored.MOST_LOGGED
        assert "further ones are not" in caplog.records[-1].getMessage()


def test_the_log_says_it_once_and_what_may_have_been_meant(launch, caplog):
    caplog.set_level(logging.WARNING, "holdfast.server")
    with launch().client() as http:
        for _ in range(3):
            post(http, temprature=0.5)
        lines = [record.getMessage() for record in caplog.records if "temprature" in record.getMessage()]
    assert len(lines) == 1
    assert "similar: temperature" in lines[0]
    assert "--strict-fields" in lines[0]


def test_numbers_and_switches_as_text(http, strict):
    for client in (http, strict):
        asked = {"max_tokens": "3", "temperature": "0.5", "ignore_eos": "true", "seed": 7.0, "logit_bias": {"5": "1"}}
        answered = post(client, prompt="abcdef", path=COMPLETION, **asked).json()
        assert answered["usage"]["completion_tokens"] == 3


def rendered_by(launch, template: str, **extra) -> str:
    """The prompt that a template makes of a request."""

    def apply(messages, *, tools=None, documents=None, tokenize, chat_template, continue_final_message, **variables):
        opening = variables.pop("add_generation_prompt")
        return compile_template(template).render(
            messages, tools=tools, documents=documents, add_generation_prompt=opening, variables=variables
        )

    engine = FakeEngine()
    engine.tokenizer.apply_chat_template = apply
    with launch(engine).client() as http:
        answered = post(http, return_prompt_text=True, **extra)
        assert answered.status_code == 200, answered.text
        return answered.json()["prompt_text"]


def test_effort_and_thinking_reach_the_template(launch):
    template = (
        "{{ reasoning_effort is defined and reasoning_effort }} {{ enable_thinking is defined and enable_thinking }}"
    )

    def rendered(**extra):
        return rendered_by(launch, template, **extra)

    assert rendered() == "False False"
    assert rendered(reasoning_effort="high") == "high True"
    assert rendered(reasoning_effort="none") == "none False"
    assert rendered(enable_thinking=True) == "False True"
    assert rendered(reasoning_effort="low", enable_thinking=False) == "low False"
    assert rendered(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "max"}) == "max True"


def test_documents_reach_the_template(launch):
    template = "{% for one in documents or [] %}{{ one.title }}:{{ one.text }};{% endfor %}."
    assert rendered_by(launch, template, documents=[{"title": "a", "text": "b"}]) == "a:b;."


def test_functions_of_old_are_tools(launch):
    template = (
        "{% for one in messages %}{{ one.role }}"
        "{% for call in one.tool_calls or [] %} calls{% endfor %} {{ one.content }};{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": json.dumps({"x": 5})}},
        {"role": "function", "name": "f", "content": "seven"},
    ]
    shown = rendered_by(launch, template, messages=messages)
    # A template without tools is told of them in words.
    assert shown == 'user q;assistant {"name": "f", "arguments": {"x": 5}};user f answered:\nseven;'


def test_a_role_of_the_template_s_own_reaches_it(launch):
    template = "{% for one in messages %}{{ one.role }}={{ one.content }};{% endfor %}"
    messages = [{"role": "critic", "content": "x"}, {"role": "developer", "content": None}]
    assert rendered_by(launch, template, messages=messages) == "critic=x;system=;"


def test_thoughts_of_a_part_are_its_text(http):
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "so"}]
    answered = post(http, messages=[{"role": "assistant", "content": parts}, *BODIES[CHAT]["messages"]])
    assert answered.status_code == 200


def test_the_rendered_prompt_is_returned_when_asked_for(http):
    told = post(http, return_prompt_text=True, return_token_ids=True).json()
    detokenized = http.post("/detokenize", json={"tokens": told["prompt_token_ids"]}).json()["prompt"]
    assert detokenized == told["prompt_text"]
    assert "hi" in told["prompt_text"]
    assert post(http).json()["prompt_text"] is None
    streamed = post(http, return_prompt_text=True, stream=True).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert events[0]["prompt_text"] == told["prompt_text"]
    assert not any(event.get("prompt_text") for event in events[1:])
