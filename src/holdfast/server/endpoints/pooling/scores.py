"""/score, /rerank and /classify: texts in, one number a pair or one chance a label out.

a model that embeds       each text by itself ─► cosine of the two vectors
a classifier of one label both texts as one prompt ─► its chance
"""

from __future__ import annotations

import time
import uuid
from contextlib import AsyncExitStack
from typing import Any

from holdfast.engine.requests.embedding import numbers
from holdfast.engine.requests.scoring import chances, cosines, pairs, require_labels, require_score
from holdfast.errors import RequestError
from holdfast.server.endpoints.pooling.prompt_vectors import MAX_INPUTS, PromptVectors, usage_of
from holdfast.server.endpoints.tokenize import PROMPT_FIELDS
from holdfast.server.http.middleware import Record
from holdfast.server.request.chat import check_variables
from holdfast.server.request.json_body import decode_object
from holdfast.server.request.parse import tokenizer_of
from holdfast.server.request.workers.tokenize_pool import Truncation, check_ids, check_text
from holdfast.server.schema.fields import check_fields, convert, honoured_fields
from holdfast.server.schema.pooling import (
    Classified,
    ClassifyBody,
    ClassifyResponse,
    RerankBody,
    Reranked,
    RerankedText,
    RerankResponse,
    RerankUsage,
    ScoreBody,
    Scored,
    ScoreResponse,
    ScoringCommon,
)

_SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
_RERANK_SIDES = ("query", "documents")

MAX_PAIRED_CHARS = 8 << 20
"""Of all pairs together, for a classifier: it reads a query again with every document. With 2,048 documents that leaves
a query of 4,096 characters; texts that are in one pair only are bounded by the body."""


class Scores:
    def __init__(self, vectors: PromptVectors) -> None:
        self._vectors = vectors

    async def score(self, raw: bytes, record: Record) -> ScoreResponse:
        self._require("/score")
        body: ScoreBody = convert(check_fields(decode_object(raw), honoured_fields(ScoreBody)), ScoreBody)
        fields = next((two for two in _SIDES if all(getattr(body, name) is not None for name in two)), None)
        if fields is None:
            raise RequestError(
                "there are no two sides to compare",
                needed=", ".join(" and ".join(two) for two in _SIDES),
                field="queries",
            )
        first, second = (_texts(getattr(body, name), name) for name in fields)
        record.answer_id = f"score-{uuid.uuid4().hex}"
        scores = await self._scores(pairs(first, second, fields), fields, body, record, len(raw))
        return ScoreResponse(
            id=record.answer_id,
            created=int(time.time()),
            model=record.model or "",
            data=[Scored(index=place, score=score) for place, score in enumerate(scores)],
            usage=usage_of(record),
        )

    async def rerank(self, raw: bytes, record: Record) -> RerankResponse:
        self._require("/rerank")
        body: RerankBody = convert(check_fields(decode_object(raw), honoured_fields(RerankBody)), RerankBody)
        query, documents = (_texts(getattr(body, name), name) for name in _RERANK_SIDES)
        if len(query) > 1:
            raise RequestError("query: expected one text", field="query")
        record.answer_id = f"rerank-{uuid.uuid4().hex}"
        joined = pairs(query, documents, _RERANK_SIDES)
        scores = await self._scores(joined, _RERANK_SIDES, body, record, len(raw))
        results = [
            Reranked(index=place, relevance_score=score, document=RerankedText(text=documents[place]))
            if body.return_documents
            else Reranked(index=place, relevance_score=score)
            for place, score in enumerate(scores)
        ]
        results.sort(key=lambda result: -result.relevance_score)
        tokens = record.prompt_tokens or 0
        return RerankResponse(
            id=record.answer_id,
            model=record.model or "",
            usage=RerankUsage(prompt_tokens=tokens, total_tokens=tokens),
            results=results[: body.top_n or len(results)],
        )

    async def classify(self, raw: bytes, record: Record) -> ClassifyResponse:
        info = self._vectors.engine.info
        require_labels(info, "/classify")
        given, known = decode_object(raw), honoured_fields(ClassifyBody)
        chat = given.get("messages") is not None and given.get("input") is None
        fields = check_fields(given, known | PROMPT_FIELDS if chat else known)
        beside = {name: value for name, value in fields.items() if name in known}
        body: ClassifyBody = convert({"input": []} | beside if chat else fields, ClassifyBody)
        cut = self._vectors.begin(body, record)
        if chat:
            prompts = [await self._vectors.read_chat(fields, cut, len(raw))]
        else:
            prompts = await self._vectors.read(body.input, cut, len(raw), special=body.add_special_tokens)
        record.answer_id = f"classify-{uuid.uuid4().hex}"
        activation = "identity" if body.use_activation is False else info.label_activation
        async with AsyncExitStack() as stack:
            await self._vectors.hold(stack, len(prompts), "input")
            found = await self._vectors.all_of(prompts, body, record)
            told = [chances(numbers(one.vector), activation) for one in found]
        return ClassifyResponse(
            id=record.answer_id,
            created=int(time.time()),
            model=record.model or "",
            data=[
                Classified(index=place, label=info.labels[probs.index(max(probs))], probs=probs, num_classes=len(probs))
                for place, probs in enumerate(told)
            ],
            usage=usage_of(record),
        )

    def _require(self, path: str) -> None:
        info = self._vectors.engine.info
        require_score(info, path, f"holdfast serve {info.model} --runner pooling, or serve an embedding model")

    async def _scores(
        self,
        joined: list[tuple[str, str]],
        fields: tuple[str, str],
        body: ScoringCommon,
        record: Record,
        size_bytes: int,
    ) -> list[float]:
        cut = self._vectors.begin(body, record)
        if self._vectors.engine.info.labels:
            return await self._classified(joined, fields, cut, body, record, size_bytes)
        # A text that is in several pairs goes through the model once.
        sides = [dict.fromkeys(pair[side] for pair in joined) for side in (0, 1)]
        limits = (body.max_tokens_per_query, body.max_tokens_per_doc)
        read = [
            await self._vectors.read_texts(list(texts), _shorter(cut, limit), size_bytes, field=field)
            for texts, limit, field in zip(sides, limits, fields, strict=True)
        ]
        prompts = [*read[0], *read[1]]
        if not all(prompts):
            raise RequestError(f"{fields[1]}: a string has no tokens", field=fields[1])
        async with AsyncExitStack() as stack:
            await self._vectors.hold(stack, len(prompts), fields[1])
            found = await self._vectors.all_of(prompts, body, record, fields[1])
            places = [dict(zip(texts, range(len(texts)), strict=True)) for texts in sides]
            told = [(places[0][one], len(read[0]) + places[1][other]) for one, other in joined]
            # As vLLM counts it: both texts of every pair.
            record.prompt_tokens = sum(len(prompts[one]) + len(prompts[other]) for one, other in told)
            vectors = [one.vector for one in found]
            return await self._vectors.pool.run(lambda: cosines(vectors, told), len(told) * len(vectors[0]))

    async def _classified(
        self,
        joined: list[tuple[str, str]],
        fields: tuple[str, str],
        cut: Truncation | None,
        body: ScoringCommon,
        record: Record,
        size_bytes: int,
    ) -> list[float]:
        info, field = self._vectors.engine.info, fields[1]

        def prepare() -> list[list[int]]:
            shortened = self._shortened(joined, fields, cut, body)
            _check_paired(shortened, fields, max(MAX_PAIRED_CHARS, size_bytes))
            return self._joined(shortened, field, cut, body)

        # A small body may make many pairs, and a template costs more than its texts tell.
        paired = None if self._vectors.settings.scores_by_template else _chars(joined)
        prompts = await self._vectors.pool.run(prepare, paired)
        activation = "identity" if body.use_activation is False else info.label_activation
        async with AsyncExitStack() as stack:
            await self._vectors.hold(stack, len(prompts), field)
            found = await self._vectors.all_of(prompts, body, record, field)
            return [chances(numbers(one.vector), activation)[0] for one in found]

    def _shortened(
        self, joined: list[tuple[str, str]], fields: tuple[str, str], cut: Truncation | None, body: ScoringCommon
    ) -> list[tuple[str, str]]:
        """Each text once, however many pairs it is in: what its own limit leaves of it, if the context has room."""
        tokenizer, context = tokenizer_of(self._vectors.engine, fields[1]), self._vectors.engine.info.max_model_len
        sides = []
        for side, limit in enumerate((body.max_tokens_per_query, body.max_tokens_per_doc)):
            kept = {pair[side]: pair[side] for pair in joined}
            for text in kept if limit else ():
                ids = Truncation(limit, "right").encode(tokenizer, text, add_special_tokens=False)
                kept[text] = tokenizer.decode(ids)
            for text in kept.values() if cut is None else ():
                check_text(context, tokenizer, text, field=fields[side])
            sides.append(kept)
        return [(sides[0][one], sides[1][other]) for one, other in joined]

    def _joined(
        self, joined: list[tuple[str, str]], field: str, cut: Truncation | None, body: ScoringCommon
    ) -> list[list[int]]:
        """Both texts as one prompt: as the chat template joins them where one was given at start, else as the tokenizer
        does."""
        tokenizer = tokenizer_of(self._vectors.engine, field)
        context = self._vectors.engine.info.max_model_len
        template = tokenizer.chat_template if self._vectors.settings.scores_by_template else None
        variables = {"instruction": body.instruction} if body.instruction is not None else {}
        variables |= body.chat_template_kwargs or {}
        check_variables(variables)
        found = []
        for one, other in joined:
            ids = tokenizer.encode_pair(one, other, template, variables)
            if cut is None:
                check_ids(len(ids), context, field)
            found.append(ids if cut is None else cut.of(ids))
        return found


def _check_paired(joined: list[tuple[str, str]], fields: tuple[str, str], most: int) -> None:
    count = _chars(joined)
    if count > most:
        raise RequestError(
            f"the {len(joined)} pairs of {fields[0]} and {fields[1]} have {count} characters together",
            needed=f"at most {most} characters",
            found=f"{count} characters",
            fix=f"shorten {fields[0]} (max_tokens_per_query does), or send fewer {fields[1]} in one request",
            field=fields[0],
        )


def _chars(joined: list[tuple[str, str]]) -> int:
    return sum(len(one) + len(other) for one, other in joined)


def _shorter(cut: Truncation | None, most: int) -> Truncation | None:
    """Of one side of a pair: its own limit, where it has one, keeps its beginning."""
    if not most or (cut is not None and cut.keep <= most):
        return cut
    return Truncation(most, "right")


def _texts(given: Any, field: str) -> list[str]:
    """A text or several; also as objects that have nothing but text."""
    listed = given if isinstance(given, list) else [given]
    if len(listed) > MAX_INPUTS:
        raise RequestError(f"{field}: {len(listed)} texts in one request; at most {MAX_INPUTS}", field=field)
    return [_text(one, field) for one in listed]


def _text(given: Any, field: str) -> str:
    if isinstance(given, dict):
        content = given.get("content", given.get("text"))
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in parts]
        known = [text for text in texts if isinstance(text, str)]
        given = "\n".join(known) if len(known) == len(texts) else None
    if not isinstance(given, str):
        raise RequestError(f"{field}: expected a text, or a list of texts", needed="text", field=field)
    return given
