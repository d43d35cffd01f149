"""Tools and thoughts over HTTP with the openai client: what a scripted model writes, whole and streamed, by family."""

from __future__ import annotations

import json
from collections import defaultdict

import openai
import pytest

from holdfast.engine.fake import FakeEngine, say

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
ASKED = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, ADD]}
ONE, TWO = '{"city": "Zürich \\"}\\""}', '{"a": 1}'
SAID = {
    "hermes": f'Wait.<tool_call>\n{{"name": "weather", "arguments": {ONE}}}\n</tool_call>\n<tool_call>\n'
    f'{{"name": "add", "arguments": {TWO}}}\n</tool_call>',
    "llama3_json": f'{{"name": "weather", "parameters": {ONE}}}; {{"name": "add", "parameters": {TWO}}}',
    "mistral": f'Wait.[TOOL_CALLS][{{"name": "weather", "arguments": {ONE}}}, {{"name": "add", "arguments": {TWO}}}]',
    "json": f'[{{"name": "weather", "arguments": {ONE}}}, {{"name": "add", "arguments": {TWO}}}]',
}


@pytest.fixture
def asking(launch):
    """asking(text, **settings) -> (client, server)"""
    clients = []

    def start(text, **settings):
        server = launch(FakeEngine(say(text)), **settings)
        clients.append(openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0))
        return clients[-1], server

    yield start
    for client in clients:
        client.close()


def streamed(client, **asked):
    """What a stream adds up to, answer by answer; and the events' own order is checked."""
    answers = defaultdict(lambda: {"content": "", "thought": "", "calls": [], "finish": None})
    for chunk in client.chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            answer, delta = answers[choice.index], choice.delta
            assert answer["finish"] is None
            answer["content"] += delta.content or ""
            extra = delta.model_extra or {}
            assert extra.get("reasoning") == extra.get("reasoning_content")
            answer["thought"] += extra.get("reasoning_content") or ""
            for call in delta.tool_calls or []:
                if call.index == len(answer["calls"]):
                    assert (call.type, call.function.arguments) == ("function", "")
                    answer["calls"].append([call.id, call.function.name, ""])
                else:
                    assert call.index == len(answer["calls"]) - 1
                    assert (call.id, call.function.name) == (None, None)
                    answer["calls"][-1][2] += call.function.arguments
            answer["finish"] = choice.finish_reason
    return answers


@pytest.mark.parametrize("family", SAID)
def test_calls_of_each_family_whole_and_as_a_stream(asking, family):
    client, _ = asking(SAID[family], tool_call_parser=family)
    choice = client.chat.completions.create(**ASKED).choices[0]
    calls = choice.message.tool_calls
    assert [(call.type, call.function.name, call.function.arguments) for call in calls] == [
        ("function", "weather", ONE),
        ("function", "add", TWO),
    ]
    assert len({call.id for call in calls}) == 2
    assert choice.message.content == ("Wait." if SAID[family].startswith("Wait.") else None)
    assert choice.finish_reason == "tool_calls"
    for answer in streamed(client, n=2, **ASKED).values():
        assert [call[1:] for call in answer["calls"]] == [["weather", ONE], ["add", TWO]]
        assert answer["content"] == (choice.message.content or "")
        assert answer["finish"] == "tool_calls"


def test_arguments_are_streamed_as_they_are_written(asking):
    client, _ = asking(SAID["json"], tool_call_parser="json")
    pieces = [
        call.function.arguments
        for chunk in client.chat.completions.create(stream=True, **ASKED)
        for choice in chunk.choices
        for call in choice.delta.tool_calls or []
    ]
    assert len(pieces) > len(ONE)


def test_no_call_is_plain_content(asking):
    client, _ = asking('{"city": "Oslo"}')
    choice = client.chat.completions.create(**ASKED).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
        '{"city": "Oslo"}',
        None,
        "stop",
    )
    answer = streamed(client, **ASKED)[0]
    assert (answer["content"], answer["calls"], answer["finish"]) == ('{"city": "Oslo"}', [], "stop")


def test_an_answer_cut_short_says_length(asking):
    client, _ = asking(SAID["json"], tool_call_parser="json")
    choice = client.chat.completions.create(max_tokens=45, **ASKED).choices[0]
    assert choice.finish_reason == "length"
    assert ONE.startswith(choice.message.tool_calls[0].function.arguments)
    assert streamed(client, max_tokens=45, **ASKED)[0]["finish"] == "length"


def test_at_most_one_call_without_parallel_ones(asking):
    client, _ = asking(SAID["json"], tool_call_parser="json")
    choice = client.chat.completions.create(parallel_tool_calls=False, **ASKED).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    assert len(streamed(client, parallel_tool_calls=False, **ASKED)[0]["calls"]) == 1


def test_logprobs_and_usage_go_along(asking):
    client, _ = asking(SAID["json"], tool_call_parser="json")
    asked = {**ASKED, "logprobs": True, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**asked))
    told = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs is not None]
    assert sum(len(one.content) for one in told) == len(SAID["json"].encode()) + 1
    assert chunks[-1].usage.completion_tokens == len(SAID["json"].encode()) + 1


def test_none_shows_the_model_no_tools_and_reads_no_calls(asking):
    client, server = asking(SAID["json"])
    choice = client.chat.completions.create(tool_choice="none", **ASKED).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (SAID["json"], None, "stop")
    assert "weather" not in server.engine.tokenizer.decode(server.engine.received[0][0])


def test_auto_can_be_switched_off(asking):
    client, _ = asking("hi", enable_auto_tool_choice=False)
    with pytest.raises(openai.BadRequestError, match="enable-auto-tool-choice") as caught:
        client.chat.completions.create(**ASKED)
    assert caught.value.body["param"] == "tool_choice"
    assert client.chat.completions.create(tool_choice="none", **ASKED).choices[0].message.content == "hi"


def test_the_model_is_shown_tools_calls_and_their_answers(asking):
    client, server = asking("fine", tool_call_parser="json")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    history = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "how is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm", "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    client.chat.completions.create(**{**ASKED, "messages": history})
    shown = server.engine.tokenizer.decode(server.engine.received[0][0])
    assert shown.index("be brief") < shown.index('"The weather of a city"') < shown.index("how is it?")
    assert 'assistant<|message|>{"name": "weather", "arguments": {"city": "Oslo"}}' in shown
    assert "user<|message|>weather answered:\nrain" in shown
    # Also where the next question brings no tools.
    client.chat.completions.create(model="fake", messages=history)
    assert "weather answered:\nrain" in server.engine.tokenizer.decode(server.engine.received[1][0])


def test_thoughts_whole_and_as_a_stream(asking):
    said = f"<think>Let me see.</think>\n\n{SAID['hermes']}"
    client, _ = asking(said, reasoning_parser="qwen3", tool_call_parser="hermes")
    message = client.chat.completions.create(**ASKED).choices[0].message
    assert message.model_extra == {"reasoning_content": "Let me see.", "reasoning": "Let me see."}
    assert message.content == "\n\nWait."
    assert [call.function.name for call in message.tool_calls] == ["weather", "add"]
    answer = streamed(client, **ASKED)[0]
    assert (answer["thought"], answer["content"]) == ("Let me see.", "\n\nWait.")
    assert [call[1] for call in answer["calls"]] == ["weather", "add"]
    plain = client.chat.completions.create(model="fake", messages=ASKED["messages"]).choices[0].message
    assert plain.model_extra["reasoning_content"] == "Let me see."
    assert plain.content == f"\n\n{SAID['hermes']}"
    quiet = client.chat.completions.create(extra_body={"include_reasoning": False}, **ASKED).choices[0].message
    assert quiet.model_extra == {"reasoning_content": None, "reasoning": None}
    assert quiet.content == "\n\nWait."
    assert streamed(client, extra_body={"include_reasoning": False}, **ASKED)[0]["thought"] == ""


def test_thoughts_stay_where_they_are_without_a_parser(asking):
    client, _ = asking("<think>a</think>b")
    message = client.chat.completions.create(model="fake", messages=ASKED["messages"]).choices[0].message
    assert message.content == "<think>a</think>b"
    assert message.model_extra == {"reasoning_content": None, "reasoning": None}


def test_ids_are_of_the_length_mistrals_templates_want(asking):
    client, _ = asking(SAID["mistral"], tool_call_parser="mistral")
    calls = client.chat.completions.create(**ASKED).choices[0].message.tool_calls
    assert all(len(call.id) == 9 for call in calls)
    assert json.loads(calls[1].function.arguments) == {"a": 1}


def test_what_is_demanded_is_a_grammar_for_the_engine(asking):
    """In the family's own form; that real models then answer so is tested with them."""
    client, server = asking(SAID["hermes"], tool_call_parser="hermes", reasoning_parser="deepseek_r1")
    named = {"type": "function", "function": {"name": "add"}}
    strict = {**ADD, "function": {**ADD["function"], "strict": True}}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}}}
    for extra in (
        {"tool_choice": "required"},
        {"tool_choice": named},
        {"tools": [WEATHER, strict]},
        {"response_format": schema},
        {"tools": openai.NOT_GIVEN, "response_format": schema},
    ):
        client.chat.completions.create(**{**ASKED, **extra})
    forms = [params.structured_outputs.grammar for _, params in server.engine.received]
    assert all("thought" in form for form in forms)
    assert ["weather" in form for form in forms] == [True, False, True, True, False]
    assert ["content: %json" in form for form in forms] == [False, False, False, True, True]
    # What must be a call has no content that could have a form.
    client.chat.completions.create(**ASKED, tool_choice="required", response_format=schema)
    assert server.engine.received[-1][1].structured_outputs.grammar == forms[0]


def test_content_has_its_form_beside_calls_without_a_mark(asking):
    client, server = asking(SAID["json"], tool_call_parser="json")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}}}
    message = client.chat.completions.create(**ASKED, response_format=schema).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["weather", "add"]
    form = server.engine.received[-1][1].structured_outputs.grammar
    assert "weather" in form
    assert "| content" in form
    # Of any other form the answer is all, and calls that it lets through are read, as in vLLM.
    any_text = {"structured_outputs": {"regex": ".*"}}
    message = client.chat.completions.create(**ASKED, extra_body=any_text).choices[0].message
    assert server.engine.received[-1][1].structured_outputs.regex == ".*"
    assert [call.function.name for call in message.tool_calls] == ["weather", "add"]


def test_a_template_without_tools_is_left_alone_unless_a_call_is_asked_for(asking):
    client, server = asking(SAID["json"])
    answer = client.chat.completions.with_raw_response.create(**ASKED)
    assert answer.headers["x-holdfast-ignored-fields"] == "tools"
    message = answer.parse().choices[0].message
    assert (message.content, message.tool_calls) == (SAID["json"], None)
    assert "weather" not in server.engine.tokenizer.decode(server.engine.received[0][0])
    answer = client.chat.completions.with_raw_response.create(tool_choice="required", **ASKED)
    assert "x-holdfast-ignored-fields" not in answer.headers
    assert [call.function.name for call in answer.parse().choices[0].message.tool_calls] == ["weather", "add"]
    assert "weather" in server.engine.tokenizer.decode(server.engine.received[1][0])


def test_a_form_that_is_no_schema_is_all_of_the_answer(asking):
    client, server = asking("yes", reasoning_parser="deepseek_r1")
    asked = {"model": "fake", "messages": ASKED["messages"]}
    message = client.chat.completions.create(**asked, extra_body={"structured_outputs": {"choice": ["yes"]}}).choices[0]
    assert message.message.content == "yes"
    assert server.engine.received[0][1].structured_outputs.choice == ["yes"]
    assert client.chat.completions.create(**asked).choices[0].message.model_extra["reasoning"] == "yes"
