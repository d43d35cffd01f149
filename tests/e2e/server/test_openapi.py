"""/openapi.json and /docs: of what is really there, and of the types that really check."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from holdfast.engine.fake import FakeEngine
from holdfast.server.app import create_app
from holdfast.server.endpoints.unsupported import LORA, PATHS
from holdfast.server.http.paths import ALIASES, UI_OPEN
from holdfast.server.schema import fields
from holdfast.server.schema.auxiliary import DetokenizeBody
from holdfast.server.schema.pooling import EmbeddingBody
from holdfast.server.schema.requests import ChatBody, CompletionBody
from holdfast.server.settings import ServerSettings


@pytest.fixture(scope="module")
def described(http) -> dict:
    response = http.get("/openapi.json")
    assert response.status_code == 200
    return response.json()


@pytest.fixture(scope="module")
def http(request):
    from starlette.testclient import TestClient

    with TestClient(create_app(FakeEngine(), ServerSettings(served_model_names=("fake",)))) as client:
        yield client


def test_every_route_is_described_and_nothing_else(described):
    app = create_app(FakeEngine(), ServerSettings(served_model_names=("fake",)))
    routes = {
        (re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path), method.lower())
        for route in app.routes
        for method in route.methods - {"HEAD"}
        if route.path not in {*PATHS, *LORA, *ALIASES, *UI_OPEN, "/metrics/"}
    }
    told = {(path, method) for path, methods in described["paths"].items() for method in methods}
    assert told | {("/openapi.json", "get"), ("/docs", "get")} == routes


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, DetokenizeBody])
def test_bodies_are_those_that_are_read(described, kind):
    schema = described["components"]["schemas"][kind.__name__]
    own = {field.encode_name for field in msgspec.structs.fields(kind)}
    beside = fields.HARMLESS.keys() | fields.QUIET.keys()
    assert set(schema["properties"]) == own | beside
    assert schema["additionalProperties"] is True
    required = {field.encode_name for field in msgspec.structs.fields(kind) if field.required}
    assert set(schema["required"]) == required


def test_either_form_of_a_text_for_its_tokens_is_told_whole(described):
    text, chat = described["components"]["schemas"]["TokenizeBody"]["anyOf"]
    assert text["additionalProperties"] is chat["additionalProperties"] is True
    assert {"prompt", "user"} <= text["properties"].keys()
    assert {"messages", "tools", "chat_template_kwargs", "user"} <= chat["properties"].keys()


def test_inputs_or_messages_are_embedded(described):
    inputs, chat = described["components"]["schemas"]["EmbeddingBody"]["anyOf"]
    own = {field.encode_name for field in msgspec.structs.fields(EmbeddingBody)}
    assert own <= inputs["properties"].keys()
    assert (own - {"input"}) | {"messages", "chat_template_kwargs"} <= chat["properties"].keys()
    assert (inputs["required"], chat["required"]) == (["input"], ["messages"])


def test_a_strict_server_says_that_it_takes_nothing_else(launch):
    with launch(strict_fields=True).client() as client:
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["ChatBody"]["additionalProperties"] is False
    assert [one["additionalProperties"] for one in schemas["TokenizeBody"]["anyOf"]] == [False, False]


def test_what_is_given_together_is_told_so(described):
    (tags,) = described["paths"]["/wake_up"]["post"]["parameters"]
    assert (tags["name"], tags["schema"]["minItems"]) == ("tags", 2)
    assert tags["schema"]["items"]["enum"] == ["weights", "kv_cache"]


def test_all_references_lead_somewhere(described):
    names = re.findall(r"#/components/schemas/(\w+)", json.dumps(described))
    assert names
    assert set(names) <= described["components"]["schemas"].keys()
    assert r"\Z" not in json.dumps(described)


def test_the_page_is_whole_by_itself(http):
    response = http.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    text = response.text
    assert "<script" not in text
    assert not re.search(r"(src|href)=['\"]?(https?:)?//", text)
    assert "POST /v1/chat/completions" in text
    assert "temperature" in text


def test_neither_where_they_were_switched_off(launch):
    with launch(disable_docs=True).client() as client:
        assert [client.get(path).status_code for path in ("/docs", "/openapi.json")] == [404, 404]


def test_a_key_is_part_of_the_description(launch):
    with launch(api_key="secret").client() as client:
        told = client.get("/openapi.json", headers={"Authorization": "Bearer secret"}).json()
        assert told["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}


def test_a_wrong_method_is_told_the_right_ones(launch):
    with launch().client() as client:
        assert client.get("/tokenize").headers["allow"] == "POST"


def test_usage_may_be_forced_into_every_stream(launch):
    with launch(force_include_usage=True).client() as client:
        for path, body in (
            ("/v1/completions", {"prompt": "abc"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
        ):
            text = client.post(path, json={**body, "stream": True}).text
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            told = [event["usage"]["completion_tokens"] for event in events]
            assert told == ([] if path == "/v1/completions" else [0]) + [1, 2, 3, 4, 4]
        assert client.post("/v1/completions", json={"prompt": "abc"}).status_code == 200
