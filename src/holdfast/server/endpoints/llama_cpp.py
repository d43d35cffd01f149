"""What llama.cpp's server has beside OpenAI's API: /props, /apply-template, the count of a chat's tokens, and OpenAI's
paths without /v1."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from holdfast.engine.interface import Engine
from holdfast.server.endpoints.tokenize import PROMPT_FIELDS
from holdfast.server.http.errors import json_response
from holdfast.server.http.middleware import Record
from holdfast.server.http.paths import ALIASES
from holdfast.server.openai_responses.schema import InputTokens
from holdfast.server.request.chat import ChatPrompt, chat_prompt
from holdfast.server.request.json_body import decode_object
from holdfast.server.request.parse import served_model, tokenizer_of
from holdfast.server.request.workers.template_workers import TemplateWorkers
from holdfast.server.request.workers.tokenize_pool import TokenizePool
from holdfast.server.response.json_handler import Exchange
from holdfast.server.schema.fields import check_fields, convert, honoured_fields
from holdfast.server.schema.requests import ChatBody
from holdfast.server.settings import ServerSettings

COUNTED = "/v1/chat/completions/input_tokens"
_CHAT_FIELDS = honoured_fields(ChatBody)


def aliases(routes: Iterable[Route]) -> list[Route]:
    known = {route.path: route for route in routes}
    return [Route(path, known[of].endpoint, methods=list(known[of].methods or ())) for path, of in ALIASES.items()]


class AppliedTemplate(msgspec.Struct, kw_only=True):
    prompt: str


class LlamaCpp:
    def __init__(self, engine: Engine, settings: ServerSettings, workers: TemplateWorkers, pool: TokenizePool) -> None:
        self._engine = engine
        self._settings = settings
        self._workers = workers
        self._pool = pool

    @property
    def routes(self) -> list[Route]:
        return [
            Route(COUNTED, Exchange(self.count_tokens, self._engine, self._settings), methods=["POST"]),
            Route("/apply-template", Exchange(self.apply_template, self._engine, self._settings), methods=["POST"]),
            Route("/props", self.props, methods=["GET"]),
        ]

    async def apply_template(self, raw: bytes, record: Record) -> AppliedTemplate:
        return AppliedTemplate(prompt=(await self._prompt(decode_object(raw), len(raw))).text)

    async def count_tokens(self, raw: bytes, record: Record) -> InputTokens:
        """Of a chat as it would be sent to be answered: what makes no prompt does not matter."""
        given = decode_object(raw)
        kept = {name: value for name, value in given.items() if name in PROMPT_FIELDS or name not in _CHAT_FIELDS}
        return InputTokens(input_tokens=len((await self._prompt(kept, len(raw))).ids))

    async def _prompt(self, given: dict[str, Any], size_bytes: int) -> ChatPrompt:
        fields = check_fields(given, PROMPT_FIELDS)
        body: ChatBody = convert(fields, ChatBody)
        served_model(body.model, self._settings)
        return await chat_prompt(
            *(body, fields.get("tools"), tokenizer_of(self._engine, "messages"), self._engine, self._settings),
            *(size_bytes, self._workers, self._pool),
        )

    async def props(self, request: Request) -> Response:
        """No path of this machine is told, which is what llama.cpp's `model_path` would be."""
        info, tokenizer = self._engine.info, self._engine.tokenizer
        told: dict[str, Any] = {
            "default_generation_settings": {
                "n_ctx": info.max_model_len,
                "params": dict(self._settings.default_sampling),
            },
            "total_slots": info.max_num_seqs,
            "model_path": self._settings.served_model_names[0],
            "model_alias": self._settings.served_model_names[0],
            "chat_template": (tokenizer.chat_template if tokenizer is not None else None) or "",
            "bos_token": getattr(tokenizer, "bos_token", None) or "",
            "eos_token": getattr(tokenizer, "eos_token", None) or "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"holdfast {self._settings.version}",
            "is_sleeping": self._engine.sleeping,
        }
        return json_response(told)
