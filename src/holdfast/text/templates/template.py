"""Chat templates: messages rendered to prompt text by the model's own Jinja template, in a sandbox with limits.

Owns equality with transformers' rendering; what a template may cost is `sandbox`'s. Knows no tokens and no models.

Codes: HF301 the template refused or failed, HF302 it tried to leave the sandbox or its limits, HF303 there is none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from holdfast.errors import ConfigurationError, RequestError
from holdfast.text.messages import join_text_parts, plain
from holdfast.text.templates import budget as template_budget
from holdfast.text.templates.budget import SlowRenderingError, budget, rendering
from holdfast.text.templates.sandbox import Sandbox
from holdfast.text.templates.string_limits import refuse_numbers
from holdfast.units import shorten

TEMPLATE_REFUSED, TEMPLATE_UNSAFE, TEMPLATE_MISSING = "HF301", "HF302", "HF303"

MAX_TEMPLATE_CHARS = 200_000
"""The longest known has a fifth of it, and compiling takes time that grows with it."""
PROBE_CPU_S = 0.5
"""Of a rendering by which a template is found out, of which there are several; it is asked nothing long."""
MAX_JSON_CHARS = 4_000_000
"""Of one value, when written out."""
MAX_JSON_AT_ONCE = 100_000
"""Of what is encoded in one call, a few milliseconds; the rest is done in pieces."""
MAX_JSON_INDENT = 100
MAX_LOOP_TURNS = 100_000
"""Numbers all `range()` calls of one rendering may give out together."""

_CONTINUE_MARK = "\ue000continue-here\ue001 "
"""Private-use characters that no message has; the space shows whether the template trims the message."""
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "range"})


class ChatTemplate:
    """One compiled template. Safe to share between threads: a rendering keeps no state here."""

    def __init__(self, source: str) -> None:
        check_length(source)
        if template_budget.is_impatient():
            raise SlowRenderingError
        self.source = source
        try:
            self._compiled = _ENVIRONMENT.from_string(source)
        except SecurityError as problem:
            raise stopped(str(problem)) from problem
        except Exception as problem:  # what Jinja parses may still be too much for Python's own compiler
            raise _refused(problem) from problem
        self._takes_parts = self._probe_parts()

    @property
    def takes_parts(self) -> bool:
        """Whether a message's content may be a list of parts; if not, its text parts are joined to one string."""
        return self._takes_parts

    @cached_property
    def knows_tools(self) -> bool:
        """Whether it shows a model the tools it is given."""
        function = {"name": "probe_of_tools", "description": "", "parameters": {"type": "object", "properties": {}}}
        tools = [{"type": "function", "function": function}]
        return "probe_of_tools" in self._probe([{"role": "user", "content": "hi"}], tools)

    @cached_property
    def takes_system(self) -> bool:
        """Whether a conversation may begin with a message of the system."""
        chat = [{"role": "system", "content": "probe-of-system"}, {"role": "user", "content": "hi"}]
        return "probe-of-system" in self._probe(chat)

    @cached_property
    def takes_systems(self) -> bool:
        """Whether it may begin with several; if not, they are joined to one."""
        systems = [{"role": "system", "content": f"probe-of-{place}"} for place in ("one", "two")]
        rendered = self._probe([*systems, {"role": "user", "content": "hi"}])
        return "probe-of-one" in rendered and "probe-of-two" in rendered

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """`messages` are left as they are. Raises RequestError with the template's own words when it refuses."""
        check_end(add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message)
        chat = [_alias_reasoning(message) for message in join_text_parts(messages, keep_parts=self._takes_parts)]
        if len(chat) > 1 and chat[0]["role"] == chat[1]["role"] == "system" and not self.takes_systems:
            chat = _one_system(chat)
        final = _mark_final(chat) if continue_final_message else None
        clash = _RESERVED.intersection(variables or ())
        if clash:
            raise RequestError(f"{sorted(clash)[0]} cannot be passed to a chat template", field="chat_template_kwargs")
        rendered = self._generate(
            {
                **plain(variables or {}, "chat_template_kwargs"),
                "messages": chat,
                "tools": plain(tools, "tools"),
                "documents": plain(documents, "documents"),
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return rendered if final is None else _cut_at_mark(rendered, final)

    def _generate(self, context: Mapping[str, Any], cpu_s: float | None = None) -> str:
        chunks: list[str] = []
        length = 0
        try:
            with rendering(cpu_s):
                for chunk in self._compiled.generate(**context, range=_bounded_range()):
                    length += len(chunk)
                    if length > template_budget.MAX_VALUE_CHARS:
                        raise SecurityError(f"the prompt exceeds {template_budget.MAX_VALUE_CHARS} characters")
                    chunks.append(chunk)
        except SecurityError as problem:
            raise stopped(str(problem)) from problem
        except SlowRenderingError:
            raise
        # A template is a program: whatever it divides by zero or looks up in None ends this one request.
        except Exception as problem:
            raise _refused(problem) from problem
        return "".join(chunks)

    def _probe_parts(self) -> bool:
        """Templates do not say whether they take parts, so one is asked: does the text come out, and only the text?"""
        rendered = self._probe([{"role": "user", "content": [{"type": "text", "text": "probe-of-parts"}]}])
        return "probe-of-parts" in rendered and "'text'" not in rendered and '"text"' not in rendered

    def _probe(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """Nothing where it refuses."""
        context = {"messages": messages, "tools": tools, "bos_token": "", "eos_token": ""}
        try:
            return self._generate({**context, "add_generation_prompt": False}, PROBE_CPU_S)
        except RequestError:
            return ""


@lru_cache(maxsize=32)
def compile_template(source: str) -> ChatTemplate:
    return ChatTemplate(source)


def load_template(given: str) -> str:
    """What --chat-template means: the name of a file, or the template's own text."""
    path = Path(given).expanduser()
    if "\n" not in given and "{{" not in given and "{%" not in given:
        try:
            with path.open(encoding="utf-8") as handle:
                return handle.read(MAX_TEMPLATE_CHARS + 1)
        except (OSError, UnicodeDecodeError) as problem:
            raise ConfigurationError(
                f"the chat template {given} cannot be read",
                needed="a Jinja template file, or the template itself as a string",
                found=str(problem),
                field="chat_template",
            ) from problem
    return given


def check_end(*, add_generation_prompt: bool | None, continue_final_message: bool | None) -> None:
    """A prompt ends with the last message, or with the opening of another."""
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt cannot both be true",
            fix="set add_generation_prompt to false to continue the last message",
            field="continue_final_message",
        )


def check_length(source: str) -> None:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise RequestError(
            "the chat template is too long",
            code=TEMPLATE_UNSAFE,
            needed=f"at most {MAX_TEMPLATE_CHARS} characters",
            found=f"{len(source)}",
        )


def stopped(why: str) -> RequestError:
    return RequestError(
        f"the chat template was stopped: {why}",
        code=TEMPLATE_UNSAFE,
        fix="pass a trusted template with --chat-template",
    )


def missing_template() -> RequestError:
    return RequestError(
        "this model has no chat template",
        code=TEMPLATE_MISSING,
        needed="a Jinja template that turns messages into a prompt",
        fix="start with --chat-template FILE.jinja, or send a prompt to /v1/completions instead",
    )


def _refused(problem: BaseException) -> RequestError:
    words = shorten(str(problem) or type(problem).__name__, 500)
    return RequestError(f"the chat template failed: {words}", code=TEMPLATE_REFUSED, field="messages")


def _alias_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Templates read a message's reasoning under one of several names; it is offered under the common two."""
    for name in _REASONING_FIELDS:
        reasoning = message.get(name)
        if reasoning is not None:
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _one_system(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The system's messages at the beginning as one."""
    count = next((place for place, message in enumerate(chat) if message["role"] != "system"), len(chat))
    contents = [message.get("content") or "" for message in chat[:count]]
    if all(isinstance(content, str) for content in contents):
        joined: Any = "\n\n".join(contents)
    else:
        parts = [content if isinstance(content, list) else [{"type": "text", "text": content}] for content in contents]
        joined = [part for each in parts for part in each]
    return [{**chat[0], "content": joined}, *chat[count:]]


def _mark_final(chat: list[dict[str, Any]]) -> str:
    """Appends the mark to the last message's text and returns that text without it."""
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_MARK
        return content
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _CONTINUE_MARK
            return text
    raise RequestError("the last message has no text to continue", field="continue_final_message")


def _cut_at_mark(rendered: str, final: str) -> str:
    position = rendered.rfind(_CONTINUE_MARK.strip())
    if position < 0 or final.strip() not in rendered:
        raise RequestError(
            "the chat template does not render the whole last message, so it cannot be continued",
            code=TEMPLATE_REFUSED,
            field="continue_final_message",
        )
    kept = rendered[:position]
    return kept if rendered.startswith(_CONTINUE_MARK, position) else kept.rstrip()


class _GenerationTag(Extension):
    """`{% generation %}` marks the model's own words for training; here its body is shown, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own spelling

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _bounded_range() -> Callable[..., range]:
    left = MAX_LOOP_TURNS

    def bounded(*arguments: int) -> range:
        nonlocal left
        numbers = range(*arguments)
        # A range too long for len() is too long for us; the slice keeps the question cheap.
        left -= len(numbers[: MAX_LOOP_TURNS + 1])
        if left < 0:
            raise SecurityError(f"more than {MAX_LOOP_TURNS} iterations of range() in one rendering")
        return numbers

    return bounded


def _raise_exception(message: object) -> None:
    # Not every object may be written out: a nested list can be short and its text endless.
    raise TemplateError(message if isinstance(message, str) else f"<{type(message).__name__}>")


def _strftime_now(format: str) -> str:
    if len(format) > 100:
        raise SecurityError("a date format of more than 100 characters")
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which models were not trained on."""
    running = budget()
    weight = running.weigh(value, most=MAX_JSON_CHARS)
    refuse_numbers((indent,), MAX_JSON_INDENT)
    for text in (indent, *(separators or ())):
        if isinstance(text, str):
            running.limit(len(text), MAX_JSON_INDENT, "characters in an indent or separator")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if weight <= MAX_JSON_AT_ONCE and indent is None:
        running.work(4 * weight)
        return encoder.encode(value)
    # In pieces, made by Python and not by C: others run meanwhile, and it is counted.
    chunks: list[str] = []
    length = 0
    for chunk in encoder.iterencode(value):
        length += len(chunk)
        running.room_for(length)
        running.step()
        chunks.append(chunk)
    return "".join(chunks)


def _make_environment() -> jinja2.Environment:
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.add_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _make_environment()
