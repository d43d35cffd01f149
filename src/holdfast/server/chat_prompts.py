"""From the messages of a chat to its prompt: checked, rendered by the template, turned into token ids.

Owns what a request may say to a template; what a template does with it is `text`'s. Knows nothing of sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.engine.interface import Engine
from holdfast.errors import RequestError
from holdfast.server.fields import unsupported
from holdfast.server.messages import read_messages
from holdfast.server.protocol import ChatBody
from holdfast.server.reading import Reading, prepared, reading_of
from holdfast.server.settings import ServerSettings
from holdfast.server.tokenizing import encode_within, off_loop
from holdfast.server.tooling import ToolUse, read_tool_use

if TYPE_CHECKING:
    from holdfast.text.tokenizer import Tokenizer

MAX_MESSAGES = 8192
"""Each is checked by itself, and a template walks over all of them."""

_TEMPLATE_OWN = frozenset(
    {
        "conversation", "messages", "tokenize", "add_generation_prompt", "continue_final_message", "chat_template",
        "tools", "documents", "return_dict", "self",
    }
)  # fmt: skip
"""Names that our own call of the template has."""


async def chat_prompt(
    body: ChatBody, tools: Any, tokenizer: Tokenizer, engine: Engine, settings: ServerSettings, size_bytes: int
) -> tuple[list[int], Reading | None]:
    """The prompt that messages make, and how answers to it are to be read. `tools`: as they came, for the template."""
    if body.chat_template is not None and not settings.trust_request_chat_template:
        raise unsupported(
            "chat_template",
            "this server does not run templates sent by clients",
            "leave chat_template out, or start the server with --trust-request-chat-template",
        )
    if len(body.messages) > MAX_MESSAGES:
        raise RequestError(
            f"messages: {len(body.messages)} of them in one request; at most {MAX_MESSAGES}", field="messages"
        )
    use = read_tool_use(body, tools, auto=settings.enable_auto_tool_choice)
    render = _renderer(tokenizer, body, read_messages(body.messages), use, engine.info.max_model_len, settings)
    # A client's own template may be slow, however short it is.
    return await (off_loop(render, size_bytes) if body.chat_template is None else off_loop(render))


def final_answer(body: ChatBody) -> str:
    """What the last message says where it is an assistant's, which is what vLLM repeats of a chat."""
    last = read_messages(body.messages[-1:])[0]
    content = last["content"] if last["role"] == "assistant" else ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _renderer(
    tokenizer: Tokenizer,
    body: ChatBody,
    messages: list[dict[str, Any]],
    use: ToolUse | None,
    context: int,
    settings: ServerSettings,
) -> Callable[[], tuple[list[int], Reading | None]]:
    """Makes the prompt, and says how its answers are to be read."""
    extra = dict(body.chat_template_kwargs or {})
    taken = sorted(_TEMPLATE_OWN & extra.keys())
    if taken:
        raise RequestError(f"chat_template_kwargs may not contain {taken[0]}", field="chat_template_kwargs")
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other", field="continue_final_message"
        )
    if body.chat_template is not None:
        extra["chat_template"] = body.chat_template
    opening = body.add_generation_prompt
    if opening is None:
        opening = not body.continue_final_message

    def render() -> tuple[list[int], Reading | None]:
        template = tokenizer.template_source(body.chat_template, use)
        reading = reading_of(template, use, messages, settings, shows_thoughts=body.include_reasoning)
        told, tools = prepared(reading, messages)
        text = tokenizer.apply_chat_template(
            told,
            tools=tools,
            tokenize=False,
            add_generation_prompt=opening,
            continue_final_message=body.continue_final_message,
            **extra,
        )
        # The template writes bos itself; a second one would change the answer.
        ids = encode_within(
            context, tokenizer, str(text), field="messages", add_special_tokens=bool(body.add_special_tokens)
        )
        return ids, reading.behind(str(text), continued=body.continue_final_message) if reading else None

    return render
