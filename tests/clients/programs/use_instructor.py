"""instructor: an object out of an answer by tools, JSON mode and JSON schema."""

import os

import instructor
from cases import main
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

MODEL = os.environ["MODEL"]
MESSAGES = [{"role": "user", "content": "Tell me of Paris: its name and how many people live there."}]


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")  # Else its schema allows any further property.
    name: str = Field(max_length=20)
    people: int = Field(ge=0, le=100_000_000)


def _ask(mode, **options):
    client = instructor.from_openai(OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0), mode=mode)
    return client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_model=City, max_retries=0, max_tokens=100, temperature=0, **options
    ).model_dump()


def tools():
    return _ask(instructor.Mode.TOOLS)


def tools_strict():
    return _ask(instructor.Mode.TOOLS_STRICT)


def json_schema():
    return _ask(instructor.Mode.JSON_SCHEMA)


def partial():
    """An object that grows while it is streamed."""
    client = instructor.from_openai(
        OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0), mode=instructor.Mode.TOOLS
    )
    pieces = list(
        client.chat.completions.create_partial(
            model=MODEL, messages=MESSAGES, response_model=City, max_retries=0, max_tokens=100, temperature=0
        )
    )
    return [len(pieces) > 1, pieces[-1].model_dump()]


main(tools, tools_strict, json_schema, partial)
