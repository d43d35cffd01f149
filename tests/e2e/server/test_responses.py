"""The Responses API with the openai client: whole, streamed, stored, in the background, and what is refused."""

from __future__ import annotations

import json

import openai
import pytest
from pydantic import BaseModel

from holdfast.engine.fake import FakeEngine, echo, say

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
ADD = {"type": "function", "name": "sum_up", "parameters": {"type": "object", "properties": {}}, "strict": None}
ARGUMENTS = '{"city": "Oslo"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SAID = f"<think>Let me see.</think>\n\nWait.{CALL}"


@pytest.fixture
def client(agents):
    agents.engine.script = echo
    agents.engine.received.clear()
    with openai.OpenAI(base_url=f"{agents.url}/v1", api_key="k", max_retries=0) as made:
        yield made


def prompt(server):
    return server.engine.tokenizer.decode(server.engine.received[-1][0])


def told_twice(server, name):
    """Status, error and completion tokens of both access lines of a response in the background, in any order."""
    lines: list = []
    while [one["id"] for one in lines].count(name) < 2:
        lines = server.wait_for_lines(len(lines) + 1)
    own = [one for one in lines if one["id"] == name]
    assert all((one["path"], one["model"]) == ("/v1/responses", "fake") for one in own)
    return {(one["status"], one["error_code"], one["completion_tokens"]) for one in own}


def test_a_response_whole(agents, client):
    told = client.responses.create(
        model="alias", input="hello", instructions="be", metadata={"a": "b"}, temperature=0.5, max_output_tokens=50,
        extra_body={"top_k": 3, "user": "u", "prompt_cache_key": "p"},
    )  # fmt: skip
    assert (told.output_text, told.status, told.error, told.model) == ("hello", "completed", None, "fake")
    assert (told.instructions, told.metadata, told.temperature, told.max_output_tokens) == ("be", {"a": "b"}, 0.5, 50)
    assert (told.usage.output_tokens, told.usage.input_tokens) == (6, len(agents.engine.received[-1][0]))
    assert (agents.engine.received[-1][1].top_k, agents.engine.received[-1][1].max_tokens) == (3, 50)
    assert prompt(agents) == "system<|message|>be<|end|>user<|message|>hello<|end|>assistant<|answer|>"
    cut = client.responses.create(model="fake", input="hello", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason, cut.output[0].status) == (
        "incomplete", "max_output_tokens", "incomplete",
    )  # fmt: skip


def test_items_of_thoughts_text_and_calls_are_the_same_whole_and_streamed(agents, client):
    agents.engine.script = say(SAID)
    told = client.responses.create(model="fake", input="hi", tools=[WEATHER], store=False)
    thought, said, called = told.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "Let me see.", [])
    assert (said.type, said.content[0].text) == ("message", "Wait.")
    assert (called.type, called.name, called.arguments) == ("function_call", "weather", ARGUMENTS)
    assert told.usage.output_tokens_details.reasoning_tokens == len("<think>Let me see.</think>\n\n")
    assert told.tools[0].name == "weather"
    hidden = {"include_reasoning": False}
    quiet = client.responses.create(model="fake", input="hi", tools=[WEATHER], store=False, extra_body=hidden)
    assert [item.type for item in quiet.output] == ["message", "function_call"]
    with client.responses.stream(model="fake", input="hi", tools=[WEATHER], store=False) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    steps = [event.type.removeprefix("response.") for event in events]
    assert [step for place, step in enumerate(steps) if step != steps[place - 1]] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == ARGUMENTS
    assert [item.type for item in final.output] == [item.type for item in told.output]
    assert (final.output_text, final.output[0].content[0].text) == ("Wait.", "Let me see.")
    assert (final.output[2].arguments, final.usage.total_tokens) == (ARGUMENTS, told.usage.total_tokens)


def test_a_conversation_goes_on_from_what_is_stored(agents, client):
    agents.engine.script = say(SAID)
    first = client.responses.create(model="fake", input="how is it?", instructions="be brief", tools=[WEATHER])
    assert client.responses.retrieve(first.id) == first
    agents.engine.script = say("fine")
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "rain"}
    second = client.responses.create(
        model="fake", input=[result], previous_response_id=first.id, tools=[WEATHER], stream=True
    )
    second = next(event.response for event in second if event.type == "response.completed")
    shown = prompt(agents)
    places = [shown.index(text) for text in ("how is it?", "Wait.", '"Oslo"', "rain")]
    assert places == sorted(places)
    assert "be brief" not in shown  # Instructions are for one response.
    assert second.previous_response_id == first.id
    kept = agents._app.state.response_store._stored
    assert (kept[first.id].continued, kept[second.id].continued) == (True, False)
    listed = client.responses.input_items.list(second.id, order="asc", limit=3)
    assert [item.type for item in listed.data] == ["message", "reasoning", "message"]
    assert listed.has_more
    assert [item.type for item in client.responses.input_items.list(second.id, limit=2)] == [
        "function_call_output", "function_call", "message", "reasoning", "message",
    ]  # fmt: skip
    # Those before it may be gone: each has all of its conversation.
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    reference = {"type": "item_reference", "id": second.output[0].id}
    client.responses.create(model="fake", input=[{"role": "user", "content": "and?"}, reference])
    assert prompt(agents).endswith("and?<|end|>assistant<|message|>fine<|end|>assistant<|answer|>")
    third = client.responses.create(model="fake", input="thanks", previous_response_id=second.id, store=False)
    assert "how is it?" in prompt(agents)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(third.id)
    # Nobody finds what another key has made.
    with openai.OpenAI(base_url=f"{agents.url}/v1", api_key="other", max_retries=0) as other:
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(second.id)
        with pytest.raises(openai.BadRequestError) as caught:
            other.responses.create(model="fake", input="a", previous_response_id=second.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_what_clients_send_of_a_conversation(agents, client):
    agents.engine.script = say("ok")
    client.responses.create(
        model="fake",
        input=[
            {"role": "developer", "content": [{"type": "input_text", "text": "be kind"}]},
            {"type": "message", "role": "user", "content": "one", "status": "completed"},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
            {
                "role": "assistant",
                "content": [{"type": "output_text", "text": "two", "annotations": []}],
                "id": "msg_1",
            },
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": ARGUMENTS, "id": "fc_1"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "rain"}]},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "three"}, {"type": "input_text", "text": "four"}],
            },
        ],
        instructions="be brief",
    )
    shown = prompt(agents)
    assert shown.startswith(
        "system<|message|>be brief\n\nbe kind<|end|>user<|message|>one<|end|>assistant<|message|>two"
    )
    assert shown.index("Oslo") < shown.index("rain") < shown.index("threefour")


def test_structured_output_and_which_tools_may_be_called(agents, client):
    class City(BaseModel):
        name: str

    agents.engine.script = say('{"name": "Oslo"}')
    told = client.responses.parse(model="fake", input="a", text_format=City)
    assert told.output_parsed == City(name="Oslo")
    assert agents.engine.received[-1][1].structured_outputs is not None
    agents.engine.script = say(CALL)
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    for choice, of_weather, of_add in (
        ("required", True, True), ({"type": "function", "name": "weather"}, True, False), (allowed, True, False),
    ):  # fmt: skip
        told = client.responses.create(model="fake", input="a", tools=[WEATHER, ADD], tool_choice=choice)
        assert told.output[0].name == "weather"
        grammar = agents.engine.received[-1][1].structured_outputs.grammar
        assert ("weather" in grammar, "sum_up" in grammar) == (of_weather, of_add)
    client.responses.create(model="fake", input="a", tools=[WEATHER], tool_choice="none", reasoning={"effort": "low"})
    assert agents.engine.received[-1][1].structured_outputs is None


def test_logprobs_are_told_where_all_is_text(launch):
    with openai.OpenAI(base_url=f"{launch().url}/v1", api_key="k", max_retries=0) as client:
        asked = {"model": "fake", "input": "ab", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
        told = client.responses.create(**asked)
        assert [(one.token, len(one.top_logprobs)) for one in told.output[0].content[0].logprobs][:2] == [
            ("a", 2), ("b", 2),
        ]  # fmt: skip
        deltas = [event for event in client.responses.create(stream=True, **asked) if event.type.endswith("text.delta")]
        assert [event.logprobs[0].token for event in deltas] == ["a", "b"]


def test_in_the_background(agents, client):
    agents.call(agents.engine.pause)
    try:
        told = client.responses.create(model="fake", input="hello", background=True)
        assert (told.status, told.output, told.background) == ("in_progress", [], True)
        assert client.responses.retrieve(told.id).status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="still in progress"):
            client.responses.create(model="fake", input="a", previous_response_id=told.id)
        ended = client.responses.create(model="fake", input="hello", background=True)
        assert client.responses.cancel(ended.id).status == "cancelled"
        assert client.responses.cancel(ended.id).status == "cancelled"
        deleted = client.responses.create(model="fake", input="hello", background=True)
        client.responses.delete(deleted.id)
        agents.until(lambda: agents.engine.unfinished == 1)
    finally:
        agents.call(agents.engine.resume)
    agents.until(lambda: agents.engine.unfinished == 0)
    found = client.responses.retrieve(told.id)
    while found.status == "in_progress":  # The engine is done before its answer is read.
        found = client.responses.retrieve(told.id)
    assert (found.status, found.output_text) == ("completed", "hello")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(deleted.id)
    assert told_twice(agents, told.id) == {(200, None, None), (200, None, 6)}
    assert told_twice(agents, ended.id) == {(200, None, None), (499, None, 0)}
    with pytest.raises(openai.BadRequestError, match="context length"):
        client.responses.create(model="fake", input="a" * 5000, background=True)
    plain = client.responses.create(model="fake", input="hello")
    with pytest.raises(openai.BadRequestError, match="only a response in the background"):
        client.responses.cancel(plain.id)


def test_input_tokens_are_counted_as_they_would_be_asked(agents, client):
    asked = {"model": "fake", "input": "hello", "instructions": "be brief"}
    counted = client.responses.input_tokens.count(**asked)
    answered = client.responses.create(**asked, max_output_tokens=1)
    assert counted.input_tokens == answered.usage.input_tokens > 0
    following = {"model": "fake", "input": "more", "previous_response_id": answered.id}
    more = client.responses.input_tokens.count(**following)
    assert more.input_tokens == client.responses.create(**following, max_output_tokens=1).usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="not stored"):
        client.responses.input_tokens.count(model="fake", input="x", previous_response_id="resp_gone")


def test_a_client_that_leaves_ends_its_response(agents, client):
    agents.engine.aborted.clear()
    agents.call(agents.engine.pause)
    try:
        with client.responses.create(model="fake", input="hello", stream=True) as stream:
            assert next(iter(stream)).type == "response.created"
        agents.until(lambda: len(agents.engine.aborted) == 1 and agents.engine.unfinished == 0)
    finally:
        agents.call(agents.engine.resume)


def test_an_engine_that_fails(launch):
    server = launch(FakeEngine(fail_after_tokens=2))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        *_, last = client.responses.create(model="fake", input="hello", stream=True)
        assert (last.type, last.response.status, last.response.error.code) == (
            "response.failed", "failed", "server_error",
        )  # fmt: skip
        assert client.responses.retrieve(last.response.id).status == "failed"
        with pytest.raises(openai.InternalServerError):
            client.responses.create(model="fake", input="hello")
        behind = client.responses.create(model="fake", input="hello", background=True)
        server.until(lambda: server.engine.unfinished == 0)
        while (found := client.responses.retrieve(behind.id)).status == "in_progress":
            pass
        assert (found.status, bool(found.error.message)) == ("failed", True)
        assert told_twice(server, behind.id) == {(200, None, None), (503, "engine_dead", 2)}
        tally = server._app.state.tally
        assert (tally.answered, tally.failed) == (0, 3)


def test_a_response_in_the_background_that_the_servers_end_cuts_off(launch):
    server = launch()
    server.call(server.engine.pause)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        told = client.responses.create(model="fake", input="hello", background=True)
    server.stop()
    assert (499, "draining", 0) in told_twice(server, told.id)
    tally = server._app.state.tally
    assert (tally.answered, tally.left, tally.cut) == (0, 0, 1)


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "http://a"}]}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": [IMAGE]}, "input[0].content[0]"),
        ({"input": [{"type": "computer_call", "id": "a"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "a"}]}, "input[0].arguments"),
        ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "input[0].id"),
        ({"input": []}, "input"),
        ({"input": [{"role": "assistant", "content": ""}] * 8193}, "input"),
        ({"input": "a" * 5000}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "b"}}, "tool_choice"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"effort": "immense"}}, "reasoning.effort"),
        ({"top_logprobs": 2}, "include"),
        ({"temperature": -1}, "temperature"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named_as_it_was_sent(agents, changes, param):
    with agents.client() as http:
        refused = http.post("/v1/responses", json={"input": "a", **changes}, headers={"Authorization": "Bearer k"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


@pytest.mark.parametrize("name", ["input", "tools", "tool_choice"])
def test_what_is_nested_too_deeply_to_be_repeated(agents, name):
    deep = '{"role": "user", "content": "a", "type": "%s", "name": "a", "parameters": %s1%s}'
    given = deep % ("message" if name == "input" else "function", '{"a":' * 300, "}" * 300)
    body = f'{{"input": "a", "tool_choice": "none", "{name}": {given if name == "tool_choice" else f"[{given}]"}}}'
    with agents.client() as http:
        refused = http.post("/v1/responses", content=body, headers={"Authorization": "Bearer k"})
    assert (refused.status_code, "64 deep" in refused.json()["error"]["message"]) == (400, True)


def test_what_is_asked_of_stored_ones_wrongly(agents, client):
    told = client.responses.create(model="fake", input="hello")
    with agents.client() as http:
        http.headers["Authorization"] = "Bearer k"
        path = f"/v1/responses/{told.id}"
        for query, param in (
            ("?stream=true", "stream"), ("/input_items?limit=0", "limit"), ("/input_items?limit=x", "limit"),
            ("/input_items?order=up", "order"), ("/input_items?after=no", "after"),
        ):  # fmt: skip
            assert http.get(path + query).json()["error"]["param"] == param
        assert http.get("/v1/responses/no").json()["error"]["code"] == "not_found"
        page = http.get("/metrics").text
    for handler in ("/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items"):
        assert f'handler="{handler}"' in page
    assert told.id not in page


@pytest.mark.parametrize(("bearer", "own"), [("dummy", "k"), ("k", "dummy"), ("k", "")])
def test_either_header_may_have_the_key_and_it_is_whose_the_response_is(agents, bearer, own):
    with agents.client() as http:
        both = {"Authorization": f"Bearer {bearer}", "x-api-key": own}
        made = http.post("/v1/responses", json={"input": "a"}, headers=both)
        assert made.status_code == 200, made.text
        path = f"/v1/responses/{made.json()['id']}"
        assert [http.get(path, headers={"x-api-key": key}).status_code for key in ("k", "other")] == [200, 404]
        wrong = {"Authorization": "Bearer dummy", "x-api-key": "dummy"}
        assert http.get(path, headers=wrong).status_code == 401


def test_fields_that_nothing_is_done_with_are_told(agents):
    with agents.client() as http:
        asked = {"input": "a", "truncation": "auto", "new": 1, "service_tier": "auto", "verbosity": "low"}
        answered = http.post("/v1/responses", content=json.dumps(asked), headers={"Authorization": "Bearer k"})
    assert (answered.status_code, answered.headers["x-holdfast-ignored-fields"]) == (200, "new, truncation")
