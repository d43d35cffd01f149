"""litellm with its hosted_vllm/ prefix: what routers and proxies send."""

import os

import litellm
from cases import main

litellm.telemetry = False
ASKED = {"model": f"hosted_vllm/{os.environ['MODEL']}", "api_base": os.environ["BASE_URL"], "num_retries": 0}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"],
        },
    },
}  # fmt: skip


def chat():
    answer = litellm.completion(messages=QUESTION, temperature=0, max_tokens=20, **ASKED)
    return [answer.choices[0].message.content, answer.usage.completion_tokens]


def stream():
    chunks = list(
        litellm.completion(
            messages=QUESTION,
            temperature=0,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
            **ASKED,
        )
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def extra_fields():
    """vLLM's own, which it passes through."""
    answer = litellm.completion(messages=QUESTION, max_tokens=8, min_tokens=8, top_k=1, ignore_eos=True, **ASKED)
    return answer.usage.completion_tokens


def refused():
    try:
        litellm.completion(messages=QUESTION, max_tokens=20, temperature=-1, **ASKED)
    except litellm.BadRequestError as error:
        return error.status_code


def tools():
    answer = litellm.completion(
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=100,
        temperature=0,
        **ASKED,
    )
    return answer.choices[0].message.tool_calls[0].function.name


def json_schema():
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    answer = litellm.completion(
        messages=QUESTION,
        max_tokens=50,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
        **ASKED,
    )
    return answer.choices[0].message.content


def embeddings():
    answer = litellm.embedding(input=["The sea is blue.", "The sea is blue."], **ASKED)
    first, same = (entry["embedding"] for entry in answer.data)
    return sum(a * b for a, b in zip(first, same, strict=True))


main(chat, stream, extra_fields, refused, tools, json_schema, embeddings)
