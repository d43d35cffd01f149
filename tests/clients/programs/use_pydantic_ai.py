"""pydantic-ai: several system messages, streams, output by JSON schema and by tool, a tool that is called."""

import asyncio
import os

from cases import main
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(os.environ["MODEL"], provider=OpenAIProvider(base_url=os.environ["BASE_URL"], api_key="none"))
SETTINGS = {"temperature": 0.0, "max_tokens": 100}
OF_PARIS = "Tell me of Paris: its name and how many people live there."


class City(BaseModel):
    name: str = Field(max_length=20)
    people: int = Field(ge=0, le=100_000_000)


def plain():
    agent = Agent(model, system_prompt=("Be brief.", "Be kind."), model_settings=SETTINGS, retries=0)
    done = agent.run_sync("What is the capital of France?")
    return [done.output, len(done.all_messages()[0].parts)]


def stream():
    async def run():
        agent = Agent(model, model_settings=SETTINGS, retries=0)
        async with agent.run_stream("What is the capital of France?") as answer:
            return [piece async for piece in answer.stream_text(delta=True, debounce_by=None)]

    pieces = asyncio.run(run())
    return ["".join(pieces), len(pieces) > 1]


def native_output():
    agent = Agent(model, output_type=NativeOutput(City), model_settings=SETTINGS, retries=0)
    return agent.run_sync(OF_PARIS).output.model_dump()


def tool_output():
    agent = Agent(model, output_type=ToolOutput(City), model_settings=SETTINGS, retries=0)
    return agent.run_sync(OF_PARIS).output.model_dump()


def called_tool():
    """A function of ours that the model calls by itself."""
    calls = []
    agent = Agent(model, model_settings=SETTINGS, system_prompt="Use the tool for the weather.")

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather in a city."""
        calls.append(city)
        return f"It rains in {city}."

    return [agent.run_sync("What is the weather in Paris?").output, calls]


main(plain, stream, native_output, tool_output, called_tool)
