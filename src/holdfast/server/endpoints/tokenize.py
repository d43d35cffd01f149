"""/tokenize and /detokenize: between text, or messages, and token ids, in vLLM's shapes. Nothing is computed for it."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from holdfast.engine.interface import Engine
from holdfast.errors import RequestError
from holdfast.server.http.errors import json_response
from holdfast.server.http.middleware import Record
from holdfast.server.request.chat import chat_prompt
from holdfast.server.request.json_body import decode_object
from holdfast.server.request.parse import served_model, tokenizer_of
from holdfast.server.request.workers.template_workers import TemplateWorkers
from holdfast.server.request.workers.tokenize_pool import TokenizePool, encode_within
from holdfast.server.schema.auxiliary import (
    DetokenizeBody,
    DetokenizeResponse,
    TokenizeBody,
    TokenizedPiece,
    TokenizeResponse,
)
from holdfast.server.schema.fields import check_fields, convert, honoured_fields, unsupported
from holdfast.server.schema.requests import ChatBody
from holdfast.server.settings import ServerSettings

_TEXT_FIELDS = honoured_fields(TokenizeBody)
_IDS_FIELDS = honoured_fields(DetokenizeBody)
_ROLES = ("bos", "eos", "unk", "pad")
PROMPT_FIELDS = frozenset(
    {
        "model",
        "messages",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "enable_thinking",
        "reasoning_effort",
        "tools",
    }
) & honoured_fields(ChatBody)
"""Of a chat, those that make its prompt."""


class Tokenizing:
    def __init__(self, engine: Engine, settings: ServerSettings, workers: TemplateWorkers, pool: TokenizePool) -> None:
        self._engine = engine
        self._settings = settings
        self._workers = workers
        self._pool = pool

    async def tokenize(self, raw: bytes, record: Record) -> TokenizeResponse:
        body = decode_object(raw)
        with_pieces = body.pop("return_token_strs", None)
        if not isinstance(with_pieces, bool | None):
            raise RequestError("return_token_strs: expected true or false", field="return_token_strs")
        with_pieces_too = _of_llama_cpp(body)
        ids = await (self._ids_of_chat(body, len(raw)) if "messages" in body else self._ids_of_text(body, len(raw)))
        pieces = None
        if with_pieces:
            tokenizer = tokenizer_of(self._engine, "return_token_strs")
            pieces = [piece or "" for piece in tokenizer.convert_ids_to_tokens(ids)]
        told = await self._pool.run(lambda: self._pieces(ids), len(raw)) if with_pieces_too else ids
        return TokenizeResponse(
            count=len(ids), max_model_len=self._engine.info.max_model_len, tokens=told, token_strs=pieces
        )

    def _pieces(self, ids: list[int]) -> list[TokenizedPiece]:
        tokenizer = tokenizer_of(self._engine, "with_pieces")
        return [TokenizedPiece(id=one, piece=_piece(tokenizer.bytes_of(one) or b"")) for one in ids]

    async def _ids_of_text(self, given: dict[str, Any], size_bytes: int) -> list[int]:
        body: TokenizeBody = convert(check_fields(given, _TEXT_FIELDS), TokenizeBody)
        served_model(body.model, self._settings)
        tokenizer, context = tokenizer_of(self._engine, "prompt"), self._engine.info.max_model_len

        def encode() -> list[int]:
            return encode_within(
                context, tokenizer, body.prompt, field="prompt", add_special_tokens=body.add_special_tokens
            )

        return await self._pool.run(encode, size_bytes)

    async def _ids_of_chat(self, given: dict[str, Any], size_bytes: int) -> list[int]:
        fields = check_fields(given, PROMPT_FIELDS)
        body: ChatBody = convert(fields, ChatBody)
        served_model(body.model, self._settings)
        tokenizer = tokenizer_of(self._engine, "messages")
        prompt = await chat_prompt(
            body, fields.get("tools"), tokenizer, self._engine, self._settings, size_bytes, self._workers, self._pool
        )
        return prompt.ids

    async def detokenize(self, raw: bytes, record: Record) -> DetokenizeResponse:
        body: DetokenizeBody = convert(check_fields(decode_object(raw), _IDS_FIELDS), DetokenizeBody)
        served_model(body.model, self._settings)
        tokenizer = tokenizer_of(self._engine, "tokens")
        unknown = next((token for token in body.tokens if token >= tokenizer.ids_end), None)
        if unknown is not None:
            raise RequestError(
                f"tokens contains {unknown}, which is out of vocabulary: not a token of this model",
                needed=f"integers from 0 to {tokenizer.ids_end - 1}",
                found=str(unknown),
                field="tokens",
            )
        text = await self._pool.run(lambda: tokenizer.decode(body.tokens), len(raw))
        return DetokenizeResponse(prompt=text, content=text if body.model is None else UNSET)

    async def info(self, request: Request) -> Response:
        """vLLM's, as far as a tokenizer.json tells it."""
        tokenizer = tokenizer_of(self._engine, "tokenizer_info")
        added = tokenizer.backend.get_added_tokens_decoder()
        named = {f"{role}_token": tokenizer.special_tokens_map.get(f"{role}_token") for role in _ROLES}
        return json_response(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **named,
                "additional_special_tokens": [
                    token for token in tokenizer.all_special_tokens if token not in named.values()
                ],
                "model_max_length": self._engine.info.max_model_len,
                "chat_template": tokenizer.chat_template,
                "added_tokens_decoder": {
                    str(number): {"content": token.content, "special": token.special}
                    for number, token in sorted(added.items())
                },
            },
            200,
        )


def _of_llama_cpp(body: dict[str, Any]) -> bool:
    """Puts llama.cpp's names in place of vLLM's; says whether pieces are wanted beside ids. Without being asked it adds
    no special tokens. Marks in a text are read as tokens, which is all that is done here."""
    if "content" not in body or "prompt" in body or "messages" in body:
        return False
    special, pieces = body.pop("add_special", None), body.pop("with_pieces", None)
    if body.pop("parse_special", None) is False:
        raise unsupported("parse_special", "special tokens in a text are always parsed")
    body["prompt"] = body.pop("content")
    body["add_special_tokens"] = False if special is None else special
    return bool(pieces)


def _piece(spelled: bytes) -> str | list[int]:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return list(spelled)
