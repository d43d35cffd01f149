"""A client's own template, run in a process of its own: what that process is sent, what it sends back, and its work.

Owns the messages. Which process does it, and for how long, is `server`'s; here is no event loop and no socket.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.errors import RequestError, UnsupportedOptionError
from holdfast.text.templates.template import compile_template, stopped
from holdfast.text.tools.prompt import ToolFormat, shown, speech_of
from holdfast.text.tools.registry import DIALECTS


class RenderJob(msgspec.Struct, kw_only=True, frozen=True):
    template: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    talks_of_tools: bool
    """Whether there are tools, or were in the conversation: how the template shows them is found out then."""
    tool_call_parser: str | None
    in_words: bool
    """Whether tools are described in words to a template that has none."""
    add_generation_prompt: bool
    continue_final_message: bool
    documents: list[dict[str, Any]] | None
    variables: dict[str, Any]


class SpeechFacts(msgspec.Struct, frozen=True):
    """What `tools.prompt.ToolFormat` is made of again."""

    dialect: str
    by_template: bool
    takes_system: bool
    has_tools: bool

    def speech(self, template: str) -> ToolFormat:
        dialect = DIALECTS[self.dialect]
        return ToolFormat(
            dialect, dialect.form_in(template), self.by_template, self.takes_system, has_tools=self.has_tools
        )


class Rendered(msgspec.Struct, tag="rendered", frozen=True):
    text: bytes
    """UTF-8, with halves of surrogate pairs passed through: whoever reads it refuses those."""
    speech: SpeechFacts | None


class TemplateRefused(msgspec.Struct, tag="refused", frozen=True):
    """A RequestError."""

    message: str
    code: str
    needed: str | None
    found: str | None
    fix: str | None
    field: str | None
    unsupported: bool

    def error(self) -> RequestError:
        kind = UnsupportedOptionError if self.unsupported else RequestError
        return kind(self.message, code=self.code, needed=self.needed, found=self.found, fix=self.fix, field=self.field)


Outcome = Rendered | TemplateRefused

# JSON, because numbers in it may have more than 64 bits.
encode_job = msgspec.json.Encoder().encode
decode_job = msgspec.json.Decoder(RenderJob).decode
encode_outcome = msgspec.json.Encoder().encode
_decode_outcome = msgspec.json.Decoder(Outcome)


def decode_outcome(raw: bytes) -> Outcome:
    found: Outcome = _decode_outcome.decode(raw)
    return found


def run_job(job: RenderJob) -> Outcome:
    try:
        return _rendered(job)
    except RequestError as error:
        return _refused(error)
    except MemoryError:
        return _refused(stopped("it exceeded the memory limit for templates"))


def _rendered(job: RenderJob) -> Rendered:
    messages: list[Any] = list(job.messages)
    tools: list[Any] | None = None
    facts = None
    if job.talks_of_tools:
        speech = speech_of(job.template, job.tool_call_parser)
        facts = SpeechFacts(speech.dialect.name, speech.by_template, speech.takes_system, speech.has_tools)
        messages, tools = shown(job.messages, job.tools if job.in_words or speech.has_tools else None, speech)
    text = compile_template(job.template).render(
        messages,
        tools=tools,
        add_generation_prompt=job.add_generation_prompt,
        continue_final_message=job.continue_final_message,
        documents=job.documents,
        variables=job.variables,
    )
    return Rendered(text.encode(errors="surrogatepass"), facts)


def _refused(error: RequestError) -> TemplateRefused:
    return TemplateRefused(
        *(error.message, error.code, error.needed, error.found, error.fix, error.field),
        unsupported=isinstance(error, UnsupportedOptionError),
    )
