"""What a model is shown of tools: through a template that knows them, or in words through one that does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from holdfast.config.server import REASONING_PARSERS, TOOL_CALL_PARSERS, ServerConfig
from holdfast.config.setting import flag_name
from holdfast.errors import ConfigurationError
from holdfast.text.output.reasoning import FAMILIES
from holdfast.text.templates.template import ChatTemplate
from holdfast.text.tools.prompt import shown, shown_in, speech_of
from holdfast.text.tools.registry import DIALECTS

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
WITHOUT_SYSTEM = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"  # noqa: E501
HERMES = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> <tool_call>{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content }}{% for c in m.tool_calls %}<tool_call>{{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}"
)
XML = HERMES + "<arg_key>"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
HISTORY = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, {**CALL, "id": "c2"}]},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
    {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "two"}]},
]


def rendered(source: str, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
    chat, given = shown_in(source, messages, tools)
    return ChatTemplate(source).render(chat, tools=given)


def test_a_template_that_knows_tools_is_given_them_and_arguments_as_objects() -> None:
    assert ChatTemplate(HERMES).knows_tools
    assert speech_of(HERMES).dialect.name == "hermes"
    text = rendered(HERMES, HISTORY, [ADD])
    assert text.startswith('<tools>[{"type": "function", "function": {"name": "add"')
    assert '<tool_call>{"a": 1}<tool_call>{"a": 1}[tool]2' in text


def test_a_template_that_knows_none_gets_words() -> None:
    assert not ChatTemplate(PLAIN).knows_tools
    assert speech_of(PLAIN).dialect.name == "json"
    text = rendered(PLAIN, HISTORY, [ADD])
    assert text.startswith("[system]# Tools\n")
    assert '{"name": "add", "parameters": {"type": "object", "properties": {}}}' in text
    calls = '[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 1}}]'
    assert text.endswith(f"[user]1+1?\n[assistant]{calls}\n[user]add answered:\n2\n\nadd answered:\ntwo\n")


def test_words_go_behind_the_systems_own_and_into_the_users_where_there_is_no_system() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert rendered(PLAIN, [system, *HISTORY], [ADD]).startswith("[system]Be brief.\n\n# Tools\n")
    text = rendered(WITHOUT_SYSTEM, HISTORY, [ADD])
    assert text.startswith("[user]# Tools\n")
    assert "answer in words.\n\n1+1?" in text
    parts = [{"role": "user", "content": [{"type": "text", "text": "1+1?"}]}]
    assert "answer in words.\n1+1?" in rendered(WITHOUT_SYSTEM, parts, [ADD])


def test_a_form_that_cannot_be_read_is_not_asked_for() -> None:
    assert ChatTemplate(XML).knows_tools
    speech = speech_of(XML)
    assert (speech.dialect.name, speech.by_template) == ("json", False)
    assert "<tools>" not in rendered(XML, HISTORY, [ADD])
    assert speech_of(XML, "hermes").by_template


def test_a_named_family_is_described_in_its_own_form() -> None:
    speech = speech_of(PLAIN, "mistral")
    chat, _ = shown(HISTORY[:1], [ADD], speech)
    assert '[TOOL_CALLS][{"name": "...", "arguments": {...}}]' in chat[0]["content"]
    assert speech_of(PLAIN + "[ARGS]", "mistral").call_format.call[0] == "[TOOL_CALLS]"


def test_a_chat_without_tools_is_left_alone() -> None:
    chat, tools = shown_in(PLAIN, HISTORY[:1], None)
    assert (chat, tools) == (HISTORY[:1], None)


@pytest.mark.parametrize("arguments", ["", "{", "[1]", '{"a": 1}', '{"a": ' * 500 + "1" + "}" * 500])
def test_whatever_a_model_wrote_can_be_shown_again(arguments: str) -> None:
    call = {**CALL, "function": {"name": "add", "arguments": arguments}}
    text = rendered(PLAIN, [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}], [ADD])
    assert '{"name": "add", "arguments": ' in text


def test_the_settings_name_what_there_is() -> None:
    assert set(TOOL_CALL_PARSERS) == set(DIALECTS)
    assert set(REASONING_PARSERS) == {*FAMILIES, "none"}


@pytest.mark.parametrize(
    ("name", "given", "fix"),
    [
        *(("tool_call_parser", one, "plain JSON") for one in ("granite-20b-fc", "functiongemma", "minicpm5")),
        ("tool_call_parser", "hermess", "hermes"),
        ("reasoning_parser", "quen3", "qwen3"),
    ],
)
def test_a_parser_that_is_not_there_is_refused_with_what_helps(name: str, given: str, fix: str) -> None:
    """Of models that are served. Of others it is the model that is refused."""
    parse = {field.name: field for field in dataclasses.fields(ServerConfig)}[name].metadata["parse"]
    with pytest.raises(ConfigurationError) as caught:
        parse(flag_name(name), given)
    assert fix in (caught.value.fix or "")


def test_a_parser_that_is_there_is_taken() -> None:
    parse = {field.name: field for field in dataclasses.fields(ServerConfig)}["tool_call_parser"].metadata["parse"]
    assert parse("--tool-call-parser", "granite4") == "granite4"
