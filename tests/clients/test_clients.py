"""What each client gets of a real server with the built-in model. One server serves them all; a client's program is run
once, and its cases are looked at one by one."""

from __future__ import annotations

import json
from typing import Any

import pytest

CAPITAL = "The capital of France is Paris."
ONE = pytest.approx(1.0, abs=1e-3)


@pytest.fixture(scope="module")
def server(module_server):
    return module_server("smollm2", "--kv-cache-memory-bytes", "256MiB", "--max-model-len", "4096").wait_ready()


@pytest.fixture(scope="module")
def result(server, run_program, tokenizer_folder):
    """result(CLIENT, CASE)"""
    known: dict[str, dict[str, dict[str, Any]]] = {}

    def of(client: str, case: str) -> Any:
        if client not in known:
            words = [str(tokenizer_folder)] if client in ("lm-eval", "guidellm") else []
            known[client] = run_program(client, server.url, "smollm2", *words)
        found = known[client][case]
        assert "error" not in found, found["error"]
        return found["result"]

    return of


def is_city(found: Any) -> bool:
    return set(found) == {"name", "people"} and len(found["name"]) <= 20 and 0 <= found["people"] <= 10**8


def check_weather(found: list[str]) -> None:
    name, arguments, ending = found
    assert (name, ending) == ("get_weather", "tool_calls")
    given = json.loads(arguments)
    assert set(given) == {"city", "unit"}
    assert given["unit"] in ("celsius", "fahrenheit")


@pytest.mark.parametrize("client", ["openai", "openai-js"])
class TestOpenAI:
    def test_models(self, result, client) -> None:
        assert result(client, "models") == ["smollm2"]

    def test_chat(self, result, client) -> None:
        assert result(client, "chat") == [CAPITAL, "stop", 8]

    def test_stream(self, result, client) -> None:
        text, tokens, chunks = result(client, "stream")
        # An event for the role, one for each token, and one for the usage.
        assert (text, tokens, chunks) == (CAPITAL, 8, 10)

    def test_embeddings_are_asked_for_in_base64(self, result, client) -> None:
        found = result(client, "embeddings")
        if client == "openai":
            assert (found["same"], found["plain"]) == (ONE, ONE)
            assert found["other"] < 0.999
        else:
            assert found == ONE

    def test_a_required_tool_is_called(self, result, client) -> None:
        check_weather(result(client, "required_tool"))


def test_openai_echo_and_logprobs(result) -> None:
    text, tokens, logprobs, first = result("openai", "logprobs")
    assert text.startswith("One, two, three, four")
    assert (tokens, first) == (logprobs, None)


def test_openai_parses_into_a_type(result) -> None:
    assert is_city(result("openai", "parsed"))


def test_openai_js_schema(result) -> None:
    assert is_city(result("openai-js", "schema"))


def test_openai_js_leaves_early_and_is_refused(result) -> None:
    assert result("openai-js", "aborted") == "left"
    assert result("openai-js", "refused") == ["BadRequestError", 400, "invalid_value"]


class TestResponses:
    """OpenAI's newer API with its own client."""

    def test_stored_and_gone_on_from(self, result) -> None:
        text, status, tokens, same, after, items = result("openai", "response")
        assert (text, status, tokens, same) == (CAPITAL, "completed", 8, True)
        assert items == ["message", "message", "message"]
        assert after

    def test_stream(self, result) -> None:
        assert result("openai", "response_stream") == [CAPITAL, CAPITAL, 8]

    def test_background(self, result) -> None:
        assert result("openai", "response_background") == ["cancelled", "completed", CAPITAL]

    def test_parsed_and_tools(self, result) -> None:
        assert is_city(result("openai", "response_parsed"))
        name, arguments, status = result("openai", "response_tool")
        check_weather([name, arguments, "tool_calls"])
        assert status in ("completed", "incomplete")


class TestAnthropic:
    def test_models_and_tokens(self, result) -> None:
        assert result("anthropic", "models") == ["smollm2"]
        counted, charged = result("anthropic", "counted")
        assert counted == charged

    def test_message_and_stream(self, result) -> None:
        assert result("anthropic", "message") == [CAPITAL, "end_turn", 8]
        assert result("anthropic", "stream") == [CAPITAL, CAPITAL, "end_turn", 8]

    def test_as_claude_code_calls(self, result) -> None:
        kind, ended, tokens = result("anthropic", "as_claude_code")
        assert (kind, ended, tokens > 0) == ("message", True, True)

    def test_a_tool_that_must_be_called(self, result) -> None:
        name, given, ending = result("anthropic", "forced_tool")
        check_weather([name, json.dumps(given), "tool_calls"])
        assert ending == "tool_use"

    def test_a_refusal(self, result) -> None:
        assert result("anthropic", "refused") == [400, "invalid_request_error", True]


class TestLangchain:
    def test_invoke(self, result) -> None:
        content, tokens, ending = result("langchain-openai", "invoke")
        assert "Paris" in content
        assert (tokens > 0, ending) == (True, "stop")

    def test_stream_and_batch(self, result) -> None:
        assert result("langchain-openai", "stream") == [CAPITAL, 8]
        assert result("langchain-openai", "batch") == [CAPITAL] * 4

    @pytest.mark.parametrize("case", ["json_schema", "function_calling"])
    def test_structured_output(self, result, case) -> None:
        assert is_city(result("langchain-openai", case))

    def test_json_mode(self, result) -> None:
        assert result("langchain-openai", "json_mode") is True

    def test_tools(self, result) -> None:
        name, arguments, answered = result("langchain-openai", "tools")
        assert (name, set(arguments), answered) == ("get_weather", {"city"}, True)

    def test_embeddings_of_token_ids(self, result) -> None:
        assert result("langchain-openai", "embeddings") == ONE


@pytest.mark.parametrize("case", ["tools", "tools_strict", "json_schema"])
def test_instructor(result, case) -> None:
    assert is_city(result("instructor", case))


def test_instructor_partial(result) -> None:
    grew, last = result("instructor", "partial")
    assert grew
    assert is_city(last)


class TestPydanticAI:
    def test_several_system_messages(self, result) -> None:
        output, parts = result("pydantic-ai", "plain")
        assert "Paris" in output
        assert parts == 3

    def test_stream(self, result) -> None:
        assert result("pydantic-ai", "stream") == [CAPITAL, True]

    @pytest.mark.parametrize("case", ["native_output", "tool_output"])
    def test_typed_output(self, result, case) -> None:
        assert is_city(result("pydantic-ai", case))


class TestLiteLLM:
    def test_chat_and_stream(self, result) -> None:
        assert result("litellm", "chat") == [CAPITAL, 8]
        assert result("litellm", "stream") == CAPITAL

    def test_vllms_own_fields(self, result) -> None:
        assert result("litellm", "extra_fields") == 8

    def test_a_refusal_is_a_bad_request(self, result) -> None:
        assert result("litellm", "refused") == 400

    def test_tools_and_schema(self, result) -> None:
        assert result("litellm", "tools") == "get_weather"
        assert json.loads(result("litellm", "json_schema"))["city"] in ("Paris", "Rome")

    def test_embeddings(self, result) -> None:
        assert result("litellm", "embeddings") == ONE


@pytest.fixture(scope="module")
def of_qwen(module_server, run_program):
    server = module_server("qwen2.5-coder-0.5b", "--kv-cache-memory-bytes", "256MiB", "--max-model-len", "4096")
    server.wait_ready()

    def of(client: str, case: str) -> Any:
        found = run_program(client, server.url, "qwen2.5-coder-0.5b", case)[case]
        assert "error" not in found, found["error"]
        return found["result"]

    return of


class TestToolsByItself:
    """A model that was made for tools, and is asked for none in particular."""

    def test_openai_streams_a_call_and_is_told_its_result(self, of_qwen) -> None:
        name, arguments, ending, after = of_qwen("openai", "auto_tool")
        check_weather([name, arguments, ending])
        assert after

    def test_anthropic_streams_a_call_and_is_told_its_result(self, of_qwen) -> None:
        name, given, ending, after = of_qwen("anthropic", "auto_tool")
        check_weather([name, json.dumps(given), "tool_calls"])
        assert ending == "tool_use"
        assert after

    def test_langchain_calls_a_named_tool(self, of_qwen) -> None:
        assert of_qwen("langchain-openai", "tools")[:2] == ["get_weather", {"city": "Paris"}]

    def test_an_agent_of_pydantic_ai_calls_our_function(self, of_qwen) -> None:
        output, calls = of_qwen("pydantic-ai", "called_tool")
        assert "Paris" in calls
        assert output


class TestLmEval:
    """The built-in model knows its capitals: one that does not name half of them was asked wrongly."""

    @pytest.mark.parametrize(
        ("case", "least"), [("choices_by_token_ids", 0.75), ("written", 0.75), ("chat_written", 0.5)]
    )
    def test_a_slice_of_a_task(self, result, case, least) -> None:
        score, samples = result("lm-eval", case)
        assert samples == 8
        assert score >= least


class TestGuidellm:
    def test_streamed_completions_one_by_one(self, result) -> None:
        found = result("guidellm", "completions")
        assert found == {"failed": 0, "output_tokens": [12] * 6, "prompt_tokens": [32] * 6}

    def test_streamed_chats_side_by_side(self, result) -> None:
        found = result("guidellm", "chat")
        assert (found["failed"], found["output_tokens"]) == (0, [12] * 6)
