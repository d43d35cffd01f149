"""The anthropic client in Python, as its users and Claude Code call it."""

import os

from anthropic import Anthropic, BadRequestError
from cases import main

client = Anthropic(base_url=os.environ["BASE_URL"].removesuffix("/v1"), api_key="none", max_retries=0)
MODEL = os.environ["MODEL"]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
GREEDY = {"extra_body": {"temperature": 0}}
"""Its newest versions have no word for it."""
ASKED = [{"role": "user", "content": "What is the weather in Paris in celsius? Use the tool."}]


def models():
    return [model.id for model in client.models.list()]


def message():
    answer = client.messages.create(model=MODEL, messages=QUESTION, max_tokens=20, **GREEDY)
    return [answer.content[0].text, answer.stop_reason, answer.usage.output_tokens]


def stream():
    with client.messages.stream(model=MODEL, messages=QUESTION, max_tokens=20, **GREEDY) as events:
        text = "".join(events.text_stream)
        answer = events.get_final_message()
    return [text, answer.content[0].text, answer.stop_reason, answer.usage.output_tokens]


def counted():
    usage = client.messages.create(model=MODEL, messages=QUESTION, max_tokens=1).usage
    told = client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens
    return [told, usage.input_tokens + usage.cache_read_input_tokens]


def as_claude_code():
    """A large system prompt in blocks, betas, and fields that matter to Anthropic alone."""
    rules = [f"Rule {number}: be brief." for number in range(200)]
    with client.beta.messages.stream(
        model=MODEL,
        max_tokens=32000,
        system=[
            {"type": "text", "text": "You answer questions."},
            {"type": "text", "text": "\n".join(rules), "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Say hi.", "cache_control": {"type": "ephemeral"}}]}
        ],
        metadata={"user_id": "user_1"},
        thinking={"type": "disabled"},
        **GREEDY,
        betas=["claude-code-20250219", "interleaved-thinking-2025-05-14"],
        stop_sequences=["."],
    ) as events:
        answer = events.get_final_message()
    return [answer.type, answer.stop_reason in ("end_turn", "stop_sequence", "max_tokens"), answer.usage.output_tokens]


def forced_tool():
    answer = client.messages.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris in celsius?"}],
        tools=[WEATHER],
        tool_choice={"type": "any"},
        max_tokens=100,
    )
    call = answer.content[-1]
    return [call.name, call.input, answer.stop_reason]


def auto_tool():
    """A model that was made for tools decides by itself; then it is told what the tool said."""
    with client.messages.stream(model=MODEL, messages=ASKED, tools=[WEATHER], **GREEDY, max_tokens=100) as events:
        answer = events.get_final_message()
    call = answer.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    history = [*ASKED, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(
        model=MODEL, messages=history, tools=[WEATHER], tool_choice={"type": "none"}, **GREEDY, max_tokens=60
    )
    return [call.name, call.input, answer.stop_reason, after.content[0].text]


def refused():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    try:
        client.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": [image]}])
    except BadRequestError as error:
        return [error.status_code, error.body["error"]["type"], "image" in error.body["error"]["message"]]


main(models, message, stream, counted, as_claude_code, forced_tool, auto_tool, refused)
