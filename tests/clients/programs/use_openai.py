"""The openai client in Python: what it and the libraries on top of it use."""

import os

from cases import main
from openai import OpenAI
from pydantic import BaseModel, Field

client = OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
MODEL = os.environ["MODEL"]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    name: str = Field(max_length=20)
    people: int = Field(ge=0, le=100_000_000)


def models():
    return [model.id for model in client.models.list()]


def chat():
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=20)
    return [answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage.completion_tokens]


def stream():
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, max_tokens=20, stream=True, stream_options=options
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return [text, chunks[-1].usage.completion_tokens, len(chunks)]


def logprobs():
    answer = client.completions.create(
        model=MODEL, prompt="One, two, three", max_tokens=4, temperature=0, logprobs=2, echo=True
    )
    told = answer.choices[0].logprobs
    return [answer.choices[0].text, len(told.tokens), len(told.token_logprobs), told.token_logprobs[0]]


def embeddings():
    """In base64, which is what it asks for unless told otherwise."""
    answer = client.embeddings.create(model=MODEL, input=["The sea is blue.", "The sea is blue.", "Two plus two"])
    first, same, other = (entry.embedding for entry in answer.data)
    plain = client.embeddings.create(model=MODEL, input="The sea is blue.", encoding_format="float").data[0].embedding
    return {
        "same": sum(a * b for a, b in zip(first, same, strict=True)),
        "other": sum(a * b for a, b in zip(first, other, strict=True)),
        "plain": sum(a * b for a, b in zip(first, plain, strict=True)),
    }


def parsed():
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell me of Paris: its name and how many people live there."}],
        response_format=City,
        max_tokens=100,
    )
    return answer.choices[0].message.parsed.model_dump()


def required_tool():
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris in celsius?"}],
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=100,
    )
    (call,) = answer.choices[0].message.tool_calls
    return [call.function.name, call.function.arguments, answer.choices[0].finish_reason]


def auto_tool():
    """A model that was made for tools decides by itself; then it is told what the tool said."""
    asked = [{"role": "user", "content": "What is the weather in Paris in celsius? Use the tool."}]
    chunks = client.chat.completions.create(
        model=MODEL, messages=asked, tools=[WEATHER], temperature=0, max_tokens=100, stream=True
    )
    name, arguments, ending, identity = "", "", None, ""
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or ():
            name += call.function.name or ""
            arguments += call.function.arguments or ""
            identity = call.id or identity
        ending = chunk.choices[0].finish_reason or ending
    call = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
    said = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": identity, "content": "rain"}]
    after = client.chat.completions.create(
        model=MODEL, messages=[*asked, *said], tools=[WEATHER], tool_choice="none", temperature=0, max_tokens=60
    )
    return [name, arguments, ending, after.choices[0].message.content]


def response():
    answer = client.responses.create(model=MODEL, input=QUESTION[0]["content"], temperature=0, max_output_tokens=20)
    same = client.responses.retrieve(answer.id)
    after = client.responses.create(
        model=MODEL, input="And of Italy?", previous_response_id=answer.id, temperature=0, max_output_tokens=20
    )
    items = [item.type for item in client.responses.input_items.list(after.id)]
    client.responses.delete(answer.id)
    return [answer.output_text, answer.status, answer.usage.output_tokens, same == answer, after.output_text, items]


def response_stream():
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=20) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        answer = events.get_final_response()
    return [text, answer.output_text, answer.usage.output_tokens]


def response_background():
    answer = client.responses.create(model=MODEL, input="Write a long story.", background=True, max_output_tokens=1000)
    ended = client.responses.cancel(answer.id)
    answer = client.responses.create(model=MODEL, input=QUESTION, background=True, temperature=0, max_output_tokens=20)
    while answer.status in ("queued", "in_progress"):
        answer = client.responses.retrieve(answer.id)
    return [ended.status, answer.status, answer.output_text]


def response_parsed():
    answer = client.responses.parse(
        model=MODEL,
        input="Tell me of Paris: its name and how many people live there.",
        text_format=City,
        max_output_tokens=100,
    )
    return answer.output_parsed.model_dump()


def response_tool():
    """Called as it must be, and told what the tool said."""
    tool = {"type": "function", "strict": True, **WEATHER["function"]}
    asked = [{"role": "user", "content": "What is the weather in Paris in celsius?"}]
    answer = client.responses.create(
        model=MODEL, input=asked, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_output_tokens=100
    )
    (call,) = answer.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    after = client.responses.create(
        model=MODEL, input=[*asked, call, result], tools=[tool], tool_choice="none", max_output_tokens=30
    )
    return [call.name, call.arguments, after.status]


main(
    *(models, chat, stream, logprobs, embeddings, parsed, required_tool, auto_tool),
    *(response, response_stream, response_background, response_parsed, response_tool),
)
