"""langchain-openai: max_completion_tokens, usage of streams, structured output in its three ways, tools, embeddings."""

import os

import tiktoken
from cases import main
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

MODEL = os.environ["MODEL"]
model = ChatOpenAI(
    base_url=os.environ["BASE_URL"],
    api_key="none",
    model=MODEL,
    temperature=0,
    max_tokens=100,
    max_retries=0,
    stream_usage=True,
)
OF_PARIS = "Tell me of Paris in JSON: its name and how many people live there."


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    people: int = Field(ge=0, le=100_000_000)


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"It rains in {city}."


def invoke():
    answer = model.invoke([SystemMessage("Be brief."), HumanMessage("What is the capital of France?")])
    return [answer.content, answer.usage_metadata["output_tokens"], answer.response_metadata["finish_reason"]]


def stream():
    whole = None
    for chunk in model.stream("What is the capital of France?"):
        whole = chunk if whole is None else whole + chunk
    return [whole.content, whole.usage_metadata["output_tokens"]]


def batch():
    answers = model.batch(["What is the capital of France?"] * 4, config={"max_concurrency": 4})
    return [answer.content for answer in answers]


def json_schema():
    return model.with_structured_output(City, method="json_schema").invoke(OF_PARIS).model_dump()


def json_mode():
    found = model.with_structured_output(method="json_mode").invoke(OF_PARIS)
    return isinstance(found, dict)


def function_calling():
    return model.with_structured_output(City, method="function_calling").invoke(OF_PARIS).model_dump()


def tools():
    asked = [HumanMessage("What is the weather in Paris?")]
    bound = model.bind_tools([get_weather], tool_choice="get_weather")
    answer = bound.invoke(asked)
    (call,) = answer.tool_calls
    told = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    after = model.bind_tools([get_weather], tool_choice="none").invoke([*asked, answer, told])
    return [call["name"], call["args"], bool(after.content)]


def embeddings():
    """Sent as token ids, of an encoding that needs no network: one byte a token."""
    encoding = tiktoken.Encoding(
        "bytes", pat_str=r"[\s\S]", mergeable_ranks={bytes([byte]): byte for byte in range(256)}, special_tokens={}
    )
    tiktoken.encoding_for_model = lambda name: encoding
    embedder = OpenAIEmbeddings(base_url=os.environ["BASE_URL"], api_key="none", model=MODEL, max_retries=0)
    first, same = embedder.embed_documents(["The sea is blue.", "The sea is blue."])
    return sum(a * b for a, b in zip(first, same, strict=True))


main(invoke, stream, batch, json_schema, json_mode, function_calling, tools, embeddings)
