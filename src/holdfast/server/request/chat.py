"""From the messages of a chat to its prompt: checked, rendered by the template, turned into token ids.

Owns what a request may say to a template; what a template does with it is `text`'s. Knows nothing of sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.engine.interface import Engine
from holdfast.errors import RequestError
from holdfast.server.request.messages import read_messages
from holdfast.server.request.output_parser import OutputParserConfig, prepared, reading_of, talks_of_tools
from holdfast.server.request.tools import ToolUse, read_tool_use
from holdfast.server.request.workers.template_workers import TemplateWorkers
from holdfast.server.request.workers.tokenize_pool import OFF_LOOP_BYTES, TokenizePool, Truncation, encode_within
from holdfast.server.schema.fields import unsupported
from holdfast.server.schema.ignored import IGNORED
from holdfast.server.schema.requests import ChatBody
from holdfast.server.settings import ServerSettings
from holdfast.text.messages import join_text_parts
from holdfast.text.templates.budget import SlowRenderingError, impatient
from holdfast.text.templates.jobs import RenderJob
from holdfast.text.templates.template import check_end, check_length
from holdfast.text.tools.prompt import ToolFormat, speech_of

if TYPE_CHECKING:
    from holdfast.text.tokenizer.tokenizer import Tokenizer

MAX_MESSAGES = 8192
"""Each is checked by itself, and a template walks over all of them."""

LOOP_CPU_S = 0.02
"""That a template may take on the event loop, where everybody waits for it; one that takes longer runs in a thread."""

_TEMPLATE_OWN = frozenset(
    {
        "conversation", "messages", "tokenize", "add_generation_prompt", "continue_final_message", "chat_template",
        "tools", "documents", "return_dict", "self",
    }
)  # fmt: skip
"""Names that our own call of the template has."""


_NO_TOOLS = "the chat template has no tools; with --tool-call-parser json they are described in the prompt"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What messages have become."""

    ids: list[int]
    text: str
    """As the template has rendered it."""
    reading: OutputParserConfig | None
    """How answers to it are to be read."""


async def chat_prompt(
    body: ChatBody,
    tools: Any,
    tokenizer: Tokenizer,
    engine: Engine,
    settings: ServerSettings,
    size_bytes: int,
    workers: TemplateWorkers,
    pool: TokenizePool,
    truncation: Truncation | None = None,
) -> ChatPrompt:
    """The prompt that messages make. `tools`: as they came, for the template."""
    if body.chat_template is not None and not settings.trust_request_chat_template:
        raise unsupported(
            "chat_template",
            "chat templates sent by clients are not allowed on this server",
            "leave chat_template out, or start the server with --trust-request-chat-template",
        )
    if len(body.messages) > MAX_MESSAGES:
        raise RequestError(
            f"messages: {len(body.messages)} messages in one request; at most {MAX_MESSAGES}", field="messages"
        )
    use = read_tool_use(body, tools, auto=settings.enable_auto_tool_choice)
    messages = read_messages(body.messages)
    if settings.joins_parts:
        messages = join_text_parts(messages, keep_parts=False)
    chat = _Chat(tokenizer, body, messages, use, engine.info.max_model_len, settings, truncation)
    prompt = await _rendered(chat, size_bytes, workers, pool)
    if chat.leaves_tools_out:
        IGNORED.get().add("tools", why=_NO_TOOLS)
    return prompt


async def _rendered(chat: _Chat, size_bytes: int, workers: TemplateWorkers, pool: TokenizePool) -> ChatPrompt:
    if chat.is_foreign:
        return await chat.render_elsewhere(workers, pool)
    if size_bytes <= OFF_LOOP_BYTES:
        try:
            with impatient(LOOP_CPU_S):
                return chat.render()
        except SlowRenderingError:
            pass  # Once more, where others do not wait for it.
    return await pool.run(chat.render)


def final_answer(body: ChatBody) -> str:
    """What the last message says where it is an assistant's, which is what vLLM repeats of a chat."""
    last = read_messages(body.messages[-1:])[0]
    content = last["content"] if last["role"] == "assistant" else ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def check_variables(given: Mapping[str, Any]) -> None:
    """Those of chat_template_kwargs must leave our own call of the template alone."""
    taken = sorted(_TEMPLATE_OWN & given.keys())
    if taken:
        raise RequestError(f"chat_template_kwargs must not contain {taken[0]}", field="chat_template_kwargs")


def template_variables(body: ChatBody) -> dict[str, Any]:
    """What a request says to the template beside its messages; chat_template_kwargs wins over the fields with a name of
    their own. Enabling thoughts by the effort is vLLM's: some templates want to be asked for them."""
    extra = dict(body.chat_template_kwargs or {})
    check_variables(extra)
    if body.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
        thinks = body.reasoning_effort != "none"
        extra.setdefault("enable_thinking", thinks if body.enable_thinking is None else body.enable_thinking)
    elif body.enable_thinking is not None:
        extra.setdefault("enable_thinking", body.enable_thinking)
    return extra


class _Chat:
    """One request's conversation with its template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        body: ChatBody,
        messages: list[dict[str, Any]],
        use: ToolUse | None,
        context: int,
        settings: ServerSettings,
        truncation: Truncation | None,
    ) -> None:
        extra = {**settings.default_chat_template_kwargs, **template_variables(body)}
        check_end(add_generation_prompt=body.add_generation_prompt, continue_final_message=body.continue_final_message)
        self._tokenizer = tokenizer
        self._body = body
        self._messages = messages
        self._use = use
        self._context = context
        self._settings = settings
        self._variables = extra
        self._truncation = truncation
        self.leaves_tools_out = False
        """Once rendered: whether the template has no tools, and nobody asked for calls all the same."""
        opening = body.add_generation_prompt
        self._opening = opening if opening is not None else not body.continue_final_message
        self._talks_of_tools = talks_of_tools(use, messages)
        self._template = tokenizer.template_source(body.chat_template, use)

    @property
    def is_foreign(self) -> bool:
        """Whether the client brought its template; it may also have named one of the model's own."""
        return self._body.chat_template is not None and self._template == self._body.chat_template

    def render(self) -> ChatPrompt:
        """Here, with the model's own template."""
        reading = self._reading(lambda: speech_of(self._template, self._settings.tool_call_parser))
        rendered_messages, tools = prepared(reading, self._messages)
        text = self._tokenizer.apply_chat_template(
            rendered_messages,
            tools=tools,
            documents=self._body.documents,
            chat_template=self._body.chat_template,
            tokenize=False,
            add_generation_prompt=self._opening,
            continue_final_message=self._body.continue_final_message,
            **self._variables,
        )
        return self._finished(str(text), reading)

    async def render_elsewhere(self, workers: TemplateWorkers, pool: TokenizePool) -> ChatPrompt:
        """In a process that can be killed: whatever the template does, it is not done here."""
        check_length(self._template)
        job = RenderJob(
            template=self._template,
            messages=self._messages,
            tools=[dict(tool.given) for tool in self._use.tools] if self._use else None,
            talks_of_tools=self._talks_of_tools,
            tool_call_parser=self._settings.tool_call_parser,
            in_words=self._use is None or self._use.in_words(self._settings.tool_call_parser),
            add_generation_prompt=self._opening,
            continue_final_message=self._body.continue_final_message,
            documents=self._body.documents,
            variables=self._tokenizer.template_variables(self._variables),
        )
        rendered = await workers.render(job)
        text, facts = rendered.text.decode(errors="surrogatepass"), rendered.speech

        def finished() -> ChatPrompt:
            reading = self._reading(lambda: facts.speech(self._template) if facts is not None else None)
            return self._finished(text, reading)

        return await pool.run(finished, len(rendered.text))

    def _reading(self, speech: Callable[[], ToolFormat | None]) -> OutputParserConfig | None:
        found = reading_of(
            self._template,
            self._use,
            self._settings,
            shows_thoughts=self._body.include_reasoning,
            speech=speech if self._talks_of_tools else None,
        )
        self.leaves_tools_out = self._use is not None and (found is None or found.use is None)
        return found

    def _finished(self, text: str, reading: OutputParserConfig | None) -> ChatPrompt:
        # The template writes bos itself; a second one would change the answer.
        ids = encode_within(
            self._context,
            self._tokenizer,
            text,
            field="messages",
            add_special_tokens=bool(self._body.add_special_tokens),
            truncation=self._truncation,
        )
        known = reading.behind(text, continued=self._body.continue_final_message) if reading else None
        return ChatPrompt(ids, text, known)
