"""Demanded calls of real models through the openai client: valid for the tool's schema, whole and as a stream."""

from __future__ import annotations

import json

import openai
import pytest

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
            },
            "required": ["city", "unit", "days"],
        },
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 999}, "b": {"type": "integer", "maximum": 999}},
            "required": ["a", "b"],
        },
    },
}
ASKED = {
    "model": "model",
    "messages": [
        {"role": "system", "content": "You are helpful."},
        {"role": "system", "content": "You like the weather."},
        {"role": "user", "content": [{"type": "text", "text": "How will the weather be in Oslo, in celsius?"}]},
    ],
    "tools": [WEATHER, ADD],
    "temperature": 0,
    "max_tokens": 120,
}
NAMED = {"type": "function", "function": {"name": "add"}}


def check(name: str, arguments: str) -> None:
    given = json.loads(arguments)
    if name == "add":
        assert set(given) == {"a", "b"}
        assert all(isinstance(value, int) and value <= 999 for value in given.values())
        return
    assert name == "get_weather"
    assert set(given) == {"city", "unit", "days"}
    assert isinstance(given["city"], str)
    assert len(given["city"]) <= 20
    assert given["unit"] in ("celsius", "fahrenheit")
    assert given["days"] in range(1, 15)


def streamed(client, **asked):
    calls, reason = [], None
    for chunk in client.chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    calls.append([call.function.name, ""])
                calls[call.index][1] += call.function.arguments
            reason = choice.finish_reason or reason
    return calls, reason


def demanded_calls(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        for choice, reason in (("required", "tool_calls"), (NAMED, "stop")):
            asked = {**ASKED, "tool_choice": choice, "parallel_tool_calls": False}
            whole = client.chat.completions.create(**asked).choices[0]
            assert (whole.finish_reason, whole.message.content) == (reason, None)
            (call,) = whole.message.tool_calls
            check(call.function.name, call.function.arguments)
            assert choice == "required" or call.function.name == "add"
            assert streamed(client, **asked) == ([[call.function.name, call.function.arguments]], reason)


@pytest.mark.long
def test_the_built_in_model_makes_valid_calls_though_its_template_knows_none(module_server) -> None:
    arguments = ("--threads", "1", "--kv-cache-memory-bytes", "96MiB", "--max-model-len", "2048")
    server = module_server("smollm2", *arguments, "--served-model-name", "model").wait_ready()
    demanded_calls(server.url)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        hot = client.chat.completions.create(
            **{**ASKED, "temperature": 1.5}, tool_choice="required", parallel_tool_calls=False, n=2, seed=7
        )
        for choice in hot.choices:
            (call,) = choice.message.tool_calls
            check(call.function.name, call.function.arguments)
        short = client.chat.completions.create(**{**ASKED, "max_tokens": 8}, tool_choice="required").choices[0]
        assert short.finish_reason == "length"
        function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "nonsense"}}}}
        broken = [{"type": "function", "function": function}]
        with pytest.raises(openai.BadRequestError, match="nonsense") as caught:
            client.chat.completions.create(**{**ASKED, "tools": broken}, tool_choice="required")
        assert caught.value.body["param"] == "tools"


@pytest.mark.long
def test_a_model_whose_template_knows_tools_makes_valid_calls(module_server) -> None:
    server = module_server("qwen2.5-coder-0.5b", "--max-model-len", "2048", "--served-model-name", "model")
    server.wait_ready(300)
    demanded_calls(server.url)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        several = client.chat.completions.create(**ASKED, tool_choice="required").choices[0]
        for call in several.message.tool_calls:
            check(call.function.name, call.function.arguments)
        free = client.chat.completions.create(**ASKED).choices[0]
        assert [call.function.name for call in free.message.tool_calls] == ["get_weather"]
        message = {"role": "tool", "tool_call_id": free.message.tool_calls[0].id, "content": "rain, 7 degrees"}
        history = [*ASKED["messages"], free.message, message]
        answer = client.chat.completions.create(**{**ASKED, "messages": history}, tool_choice="none").choices[0]
        assert (answer.message.tool_calls, answer.finish_reason) == (None, "stop")
        assert answer.message.content
