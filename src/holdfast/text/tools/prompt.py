"""What a model is shown of tools: by its chat template, or in words where the template knows none.

Owns the words. Which family a template speaks is decided in `registry`; how calls are read back is each family's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from holdfast.text.messages import plain
from holdfast.text.templates.template import compile_template
from holdfast.text.tools.call_format import ARGUMENTS, BARE_NAME, NAME, ToolCallFormat
from holdfast.text.tools.registry import DIALECTS, GENERIC, Dialect, dialect_of

PREAMBLE = """# Tools

You can call functions. These are there, each as a JSON object with its name and a JSON schema of its arguments:
{tools}

To call one, answer with its name and arguments in this form and nothing else:
{one}

To call several, write:
{several}

If no function is needed, answer in words."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How tools are spoken of with one template."""

    dialect: Dialect
    call_format: ToolCallFormat
    by_template: bool
    """Whether the template shows tools and calls itself."""
    takes_system: bool
    has_tools: bool
    """Whether the template has tools at all, be it in a form that is not read here."""


@lru_cache(maxsize=32)
def speech_of(template: str, parser: str | None = None) -> ToolFormat:
    """`parser`: a name in DIALECTS. Without one a template that shows tools in a format that is not known here is not
    given any: its calls could not be read, so the model is asked for the generic format."""
    compiled = compile_template(template)
    found = dialect_of(template) if parser is None else DIALECTS[parser]
    dialect = found if found is not None and (parser is not None or compiled.knows_tools) else GENERIC
    by_template = compiled.knows_tools and (parser is not None or dialect is not GENERIC)
    return ToolFormat(
        dialect, dialect.form_in(template), by_template, compiled.takes_system, has_tools=compiled.knows_tools
    )


def shown(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, speech: ToolFormat
) -> tuple[list[Message], list[Mapping[str, Any]] | None]:
    """Messages and tools for the template. What is given is left as it is."""
    if speech.by_template:
        return [dict(message) for message in messages], list(tools) if tools else None
    return _with_tools(_history(messages, speech.call_format), tools, speech), None


def shown_in(
    template: str, messages: Any, tools: Sequence[Mapping[str, Any]] | None
) -> tuple[list[Any], list[Mapping[str, Any]] | None]:
    """The same for whoever has a template and no server's settings. A chat without tools or calls is left as it is."""
    chat = [_with_objects(message) for message in messages]
    if tools or any(isinstance(one, Mapping) and (one.get("role") == "tool" or "tool_calls" in one) for one in chat):
        return shown(chat, tools, speech_of(template))
    return chat, None


def arguments_object(given: Any) -> Any:
    """Arguments as templates want them, from the JSON text that OpenAI's clients send. What a model wrote may be no
    JSON: then it is shown as it was."""
    if not isinstance(given, str):
        return plain(given)
    try:
        read = plain(json.loads(given or "{}"))
    except (ValueError, RecursionError):  # RequestError too: deeper than anybody could write it out.
        return given
    return read if isinstance(read, dict) else given


def _with_objects(message: Any) -> Any:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not calls:
        return message
    functions = [
        {**call["function"], "arguments": arguments_object(call["function"].get("arguments"))} for call in calls
    ]
    made = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
    return {**message, "tool_calls": made}


def _with_tools(told: list[Message], tools: Sequence[Mapping[str, Any]] | None, speech: ToolFormat) -> list[Message]:
    if not tools:
        return told
    blank = ('"..."', "{...}")
    preamble = PREAMBLE.format(
        tools="\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools),
        one=written(speech.call_format, [blank]),
        several=written(speech.call_format, [blank, blank]),
    )
    if told and told[0].get("role") == "system":
        return [_with_text(told[0], preamble, behind=True), *told[1:]]
    if speech.takes_system or not told or told[0].get("role") != "user":
        return [{"role": "system" if speech.takes_system else "user", "content": preamble}, *told]
    return [_with_text(told[0], preamble, behind=False), *told[1:]]


def written(call_format: ToolCallFormat, calls: Sequence[tuple[str, str]]) -> str:
    """Calls as the family writes them: each a name as a JSON string, and arguments."""

    def one(name: str, arguments: str) -> str:
        spelled = {NAME: name, BARE_NAME: name.strip('"'), ARGUMENTS: arguments}
        return "".join(spelled.get(part, part) for part in call_format.call)

    written = "".join(call_format.between).join(one(*call) for call in calls)
    if call_format.bare_alone and len(calls) == 1:
        return written
    return "".join(call_format.before) + written + "".join(call_format.after)


def _history(messages: Sequence[Mapping[str, Any]], call_format: ToolCallFormat) -> list[Message]:
    """Calls become text of the assistant, answers of tools that of the user; those that follow each other one message,
    because many templates want the two to take turns."""
    told: list[Message] = []
    names: dict[str, str] = {}
    answering = False
    for message in messages:
        role = message.get("role")
        if role == "tool":
            identifier = str(message.get("tool_call_id", ""))
            name = message.get("name") or names.get(identifier) or identifier or "the function"
            answer = {"role": "user", "content": f"{name} answered:\n{_text(message.get('content'))}"}
            if answering:
                told[-1] = _with_text(told[-1], answer["content"], behind=True)
            else:
                told.append(answer)
        elif role == "assistant" and message.get("tool_calls"):
            names.update({str(call.get("id")): str(call["function"]["name"]) for call in message["tool_calls"]})
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            told.append(_with_text(kept, written(call_format, _spelled(message["tool_calls"])), behind=True))
        else:
            told.append(dict(message))
        answering = role == "tool"
    return told


def _spelled(calls: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    functions = [call["function"] for call in calls]
    return [
        (json.dumps(function["name"]), json.dumps(function.get("arguments", {}), ensure_ascii=False))
        for function in functions
    ]


def _with_text(message: Mapping[str, Any], text: str, *, behind: bool) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        part = {"type": "text", "text": text}
        return {**message, "content": [*content, part] if behind else [part, *content]}
    if not content:
        return {**message, "content": text}
    return {**message, "content": f"{content}\n\n{text}" if behind else f"{text}\n\n{content}"}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
