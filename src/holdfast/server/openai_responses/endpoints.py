"""/v1/responses: made, in the background too, read back, cancelled and deleted. Shapes are `shape`'s."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Send

from holdfast.engine.interface import Engine
from holdfast.errors import RequestError
from holdfast.observability.metrics.registry import ServingMetrics
from holdfast.server.http.errors import NOT_FOUND, HttpFailure, describe, json_response
from holdfast.server.http.middleware import CLIENT_GONE, CUT_OFF, Record, tenant_of
from holdfast.server.openai_responses.read import ResponseOptions, owner_of, read_response_request
from holdfast.server.openai_responses.schema import DeletedResponse, InputItemList, InputTokens
from holdfast.server.openai_responses.shape import ResponseShape, failed
from holdfast.server.openai_responses.store import OWN_BYTES, ResponseStore, StoredResponse
from holdfast.server.request.logprob_budget import LogprobBudget
from holdfast.server.request.parse import GenerationRequest
from holdfast.server.request.workers.template_workers import TemplateWorkers
from holdfast.server.request.workers.tokenize_pool import TokenizePool
from holdfast.server.response.generation import Generation
from holdfast.server.response.json_handler import Exchange
from holdfast.server.response.logprobs import encode
from holdfast.server.schema.fields import unsupported
from holdfast.server.settings import ServerSettings

MOST_LISTED = 100
"""Items on one page, and how many where nobody says: OpenAI's own."""
LISTED = 20
COUNTED = "/v1/responses/input_tokens"


def response_routes(
    store: ResponseStore,
    engine: Engine,
    settings: ServerSettings,
    metrics: ServingMetrics,
    room: LogprobBudget,
    workers: TemplateWorkers,
    pool: TokenizePool,
) -> list[Route]:
    read = partial(read_response_request, workers=workers, pool=pool, store=store)
    shape = partial(ResponseShape, store=store)
    made = ResponseGeneration(read, shape, engine, settings, metrics, room, store=store)

    async def count(raw: bytes, record: Record) -> InputTokens:
        return InputTokens(input_tokens=sum(map(len, (await read(raw, engine, settings)).prompts)))

    return [
        Route("/v1/responses", made, methods=["POST"]),
        Route(COUNTED, Exchange(count, engine, settings), methods=["POST"]),
        *StoredResponses(store, settings).routes,
    ]


class ResponseGeneration(Generation):
    """A request in the background is answered as soon as the engine has taken it, and runs on in a task of its own."""

    def __init__(self, *parts: Any, store: ResponseStore) -> None:
        super().__init__(*parts)
        self._store = store
        self._awaited: dict[str, Callable[[], None]] = {}
        """By the engine's id: what is called when the engine has taken one."""

    async def answer(self, ask: GenerationRequest, record: Record, send: Send) -> None:
        options = ask.options
        assert isinstance(options, ResponseOptions)
        if not options.response.background:
            await super().answer(ask, record, send)
            return
        begun = encode(options.response)
        self._store.check_room(len(begun) + len(options.items) + OWN_BYTES, options.owner)
        taken = asyncio.Event()
        run = Record(record.request_id, record.started_s, record.finish, model=record.model, stream=record.stream)
        task = asyncio.create_task(self._run(ask, options, run))

        def take() -> None:
            stored = StoredResponse(
                owner=options.owner, response=begun, items=options.items, task=task, background=True
            )
            self._store.put(options.response.id, stored)
            taken.set()

        self._awaited[ask.engine_id] = take
        waiting = asyncio.create_task(taken.wait())
        try:
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()  # Nobody has heard of it.
            raise
        finally:
            waiting.cancel()
            self._awaited.pop(ask.engine_id, None)
        if not taken.is_set():
            task.result()
        record.answer_id, record.deferred = ask.answer_id, True
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(begun)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": begun})

    def taken(self, ask: GenerationRequest) -> None:
        take = self._awaited.get(ask.engine_id)
        if take is not None:
            take()

    async def _run(self, ask: GenerationRequest, options: ResponseOptions, record: Record) -> None:
        """What it comes to is put into the store by the shape, or where it comes to nothing here. Counted and logged
        when it ends, unless the engine never took it: then whoever asked is told so."""
        begun = options.response
        try:
            await super().answer(ask, record, _discard)
            record.status = 200
        except asyncio.CancelledError:
            if record.answer_id is None:
                raise
            record.status, record.error_code = CLIENT_GONE, CUT_OFF if self._store.closed else None
            self._replace(options, encode(msgspec.structs.replace(begun, status="cancelled")))
        except Exception as error:
            if record.answer_id is None:
                raise
            record.status, told = describe(error)
            record.fail(told)
            self._replace(options, encode(failed(begun, told, [])))
        record.finish(record)

    def _replace(self, options: ResponseOptions, content: bytes) -> None:
        kept = StoredResponse(owner=options.owner, response=content, items=options.items, background=True)
        self._store.put(options.response.id, kept)


async def _discard(message: Message) -> None:
    """Whoever asked is answered already."""


class StoredResponses:
    """What can be done with a response that is kept."""

    def __init__(self, store: ResponseStore, settings: ServerSettings) -> None:
        self._store = store
        self._settings = settings

    @property
    def routes(self) -> list[Route]:
        path = "/v1/responses/{response_id}"
        return [
            Route(path, self.retrieve, methods=["GET"]),
            Route(path, self.delete, methods=["DELETE"]),
            Route(f"{path}/cancel", self.cancel, methods=["POST"]),
            Route(f"{path}/input_items", self.input_items, methods=["GET"]),
        ]

    async def retrieve(self, request: Request) -> Response:
        if request.query_params.get("stream", "false").lower() in ("true", "1"):
            raise unsupported("stream", "a stored response is not streamed again")
        return _as_json(self._find(request)[1].response)

    async def delete(self, request: Request) -> Response:
        name, stored = self._find(request)
        await _end(stored)
        self._store.remove(name)
        return json_response(DeletedResponse(id=name))

    async def cancel(self, request: Request) -> Response:
        name, stored = self._find(request)
        if not stored.background:
            raise RequestError(
                "only a response in the background can be cancelled",
                needed="background: true",
                fix="close the connection to end the others",
                field="response_id",
            )
        await _end(stored)
        return _as_json((self._store.get(name, stored.owner) or stored).response)

    async def input_items(self, request: Request) -> Response:
        items = msgspec.json.decode(self._find(request)[1].items)
        query = request.query_params
        limit, order, after = query.get("limit", str(LISTED)), query.get("order", "desc"), query.get("after")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MOST_LISTED):
            raise RequestError(f"limit must be between 1 and {MOST_LISTED}", field="limit")
        if order not in ("asc", "desc"):
            raise RequestError("order must be asc or desc", needed="asc or desc", field="order")
        if order == "desc":
            items.reverse()
        if after is not None:
            place = next((number for number, item in enumerate(items) if item["id"] == after), None)
            if place is None:
                raise RequestError("after is not the id of one of the items", field="after")
            items = items[place + 1 :]
        page = items[: int(limit)]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        return json_response(InputItemList(data=page, first_id=first, last_id=last, has_more=len(items) > len(page)))

    def _find(self, request: Request) -> tuple[str, StoredResponse]:
        name = request.path_params["response_id"]
        stored = self._store.get(name, owner_of(self._settings, tenant_of(request.scope)))
        if stored is None:
            raise HttpFailure(
                NOT_FOUND,
                f"the response {name[:100]!r} is not stored: it never was, was deleted, or gave way to others",
                kind="invalid_request_error",
                code="not_found",
                param="response_id",
            )
        return name, stored


async def _end(stored: StoredResponse) -> None:
    if stored.task is not None:
        stored.task.cancel()
        await asyncio.gather(stored.task, return_exceptions=True)


def _as_json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
