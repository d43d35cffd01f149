"""The application: which path leads where. Knows the engine by its interface only and never imports torch."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import uuid
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from holdfast.engine.interface import Engine
from holdfast.errors import RequestError
from holdfast.observability.logs import json_lines
from holdfast.observability.metrics.engines import EngineSource
from holdfast.observability.metrics.http import HttpMetrics
from holdfast.observability.metrics.registry import CONTENT_TYPE, ServingMetrics
from holdfast.records import EngineInfo
from holdfast.server.anthropic.models import model_info, model_page
from holdfast.server.anthropic.routes import message_routes
from holdfast.server.endpoints.docs_page import POLICY, page
from holdfast.server.endpoints.invocations import Invocations
from holdfast.server.endpoints.llama_cpp import LlamaCpp, aliases
from holdfast.server.endpoints.lora import LoraEndpoints
from holdfast.server.endpoints.memory import MemoryEndpoint
from holdfast.server.endpoints.openapi import document
from holdfast.server.endpoints.pooling.embeddings import Embeddings
from holdfast.server.endpoints.pooling.prompt_vectors import PromptVectors
from holdfast.server.endpoints.pooling.scores import Scores
from holdfast.server.endpoints.sleep import Sleeping
from holdfast.server.endpoints.tokenize import Tokenizing
from holdfast.server.endpoints.unsupported import absent_routes
from holdfast.server.http.errors import (
    NOT_ALLOWED,
    NOT_FOUND,
    UNAVAILABLE,
    HttpFailure,
    describe,
    failure_response,
    is_anthropic,
    json_response,
)
from holdfast.server.http.middleware import METRICS_NEED_KEY, OPEN, AccessMiddleware, RootPath, Tally, WrittenPath
from holdfast.server.http.paths import INVOCATIONS
from holdfast.server.http.request_metrics import Counting
from holdfast.server.openai_responses.endpoints import response_routes
from holdfast.server.openai_responses.store import ResponseStore
from holdfast.server.request.llama_cpp import read_native
from holdfast.server.request.logprob_budget import LogprobBudget, told_entries
from holdfast.server.request.parse import read_chat, read_completion
from holdfast.server.request.workers.template_workers import TemplateWorkers
from holdfast.server.request.workers.tokenize_pool import TokenizePool
from holdfast.server.response.generation import Generation
from holdfast.server.response.json_handler import Answering, Exchange
from holdfast.server.response.llama_cpp import NativeShape, with_llama_members
from holdfast.server.response.serialize import chat_shape, completion_shape
from holdfast.server.schema.ignored import HEADER
from holdfast.server.settings import ServerSettings
from holdfast.server.ui.routes import ui_routes
from holdfast.server.ui.state import StateKeeper, status_of

server_log = logging.getLogger("holdfast.server")

_OFF = frozenset({"false", "0", "no", "off"})
_REASONS = {
    "draining": "the server is shutting down",
    "restarting": "the engine process exited and is being restarted",
    "loading": "the model is loading",
}
"""Of a status of /health; a dead or hung engine has its own."""


def create_app(engine: Engine, settings: ServerSettings) -> Starlette:
    """Starts nothing: whoever runs the application starts the engine too (`server.run.serve` does both)."""

    metrics = _metrics(engine, settings)
    for number, member in enumerate(engine.members):
        member.on_step(partial(metrics.observe_step, engine=number))
    room = LogprobBudget(told_entries(settings.max_logprobs), settings.max_queued_requests)
    workers, pool = TemplateWorkers(), TokenizePool()
    store = ResponseStore()
    vectors = PromptVectors(engine, settings, metrics, room, workers, pool)
    tokenizing = Tokenizing(engine, settings, workers, pool)
    lora = None if settings.adapters is None else LoraEndpoints(settings.adapters, settings, engine)
    plain = _Plain(engine, settings, metrics, lora)
    routes = [
        *_generating(store, engine, settings, metrics, room, workers, pool),
        *_pooling(vectors),
        Route("/tokenize", Exchange(tokenizing.tokenize, engine, settings), methods=["POST"]),
        Route("/detokenize", Exchange(tokenizing.detokenize, engine, settings), methods=["POST"]),
        Route("/v1/models", plain.models, methods=["GET"]),
        Route("/v1/models/{name:path}", plain.model, methods=["GET"]),
        Route("/health", plain.health, methods=["GET"]),
        Route("/ping", plain.health, methods=["GET", "POST"]),
        Route("/version", plain.version, methods=["GET"]),
        Route("/load", plain.load, methods=["GET"]),
        Route("/reset_prefix_cache", plain.reset_prefix_cache, methods=["POST"]),
        Route("/metrics", plain.metrics, methods=["GET"]),
        Route("/metrics/", plain.metrics, methods=["GET"]),
        *MemoryEndpoint(engine, settings).routes,
        *Sleeping(engine, settings).routes,
        *LlamaCpp(engine, settings, workers, pool).routes,
    ]
    routes += aliases(routes)
    routes.append(Route(INVOCATIONS, Invocations(routes, engine, settings), methods=["POST"]))

    if settings.enable_tokenizer_info_endpoint:
        routes.append(Route("/tokenizer_info", tokenizing.info, methods=["GET"]))
    routes += absent_routes(lora=lora is not None)
    routes += [] if lora is None else lora.routes
    routes += [] if settings.disable_docs else _documentation(settings, lora=lora is not None)
    keeper = StateKeeper(engine, settings, metrics) if settings.ui else None
    routes += [] if keeper is None else ui_routes(keeper, with_key=bool(settings.api_key or settings.api_key_file))

    async def refuse(request: Request, error: Exception) -> Response:
        failure = _as_failure(error)
        status, body = describe(failure)
        request.scope["holdfast.record"].fail(body)
        response = failure_response(request.scope, failure, status, body, settings.retry_after_s)
        response.headers.update(getattr(error, "headers", None) or {})  # Which methods a path has.
        return response

    if (settings.api_key or settings.api_key_file) and not settings.public_metrics:
        server_log.info("an API key is required: %s", METRICS_NEED_KEY)
    log = json_lines(settings.access_log) if isinstance(settings.access_log, Path) else settings.access_log
    tally = Tally()
    app = Starlette(
        routes=routes,
        middleware=[
            *([Middleware(RootPath, prefix=settings.root_path)] if settings.root_path else []),
            Middleware(WrittenPath, paths=_asked_by_clients(routes)),
            *_cors(settings),
            Middleware(Counting, paths=[route.path for route in routes], metrics=HttpMetrics(metrics.registry)),
            Middleware(AccessMiddleware, engine=engine, settings=settings, log=log, tally=tally),
        ],
        exception_handlers={HTTPException: refuse},
    )
    app.router.redirect_slashes = False
    app.state.metrics = metrics
    app.state.tally = tally
    app.state.ui = keeper
    app.state.lora = lora
    app.state.response_store = store
    app.state.template_workers = workers
    app.state.tokenize_pool = pool
    return app


def _asked_by_clients(routes: list[Route]) -> frozenset[str]:
    """Of the API, not of probes and of pages, whose links depend on their path."""
    return frozenset({"/v1/models", *(route.path for route in routes if "POST" in (route.methods or ()))} - OPEN)


def _metrics(engine: Engine, settings: ServerSettings) -> ServingMetrics:
    return ServingMetrics(settings.served_model_names[0], engines=[*map(_source, engine.members)], memory=engine.memory)


def _source(engine: Engine) -> EngineSource:
    def info() -> EngineInfo | None:
        return engine.info if engine.ready or engine.unresponsive is not None else None

    return EngineSource(
        stats=engine.stats,
        info=info,
        sleeping=lambda: engine.sleeping,
        restarts=lambda: (engine.restarts - engine.hangs, engine.hangs),
        hung=lambda: engine.unresponsive is not None,
    )


def _generating(
    store: ResponseStore,
    engine: Engine,
    settings: ServerSettings,
    metrics: ServingMetrics,
    room: LogprobBudget,
    workers: TemplateWorkers,
    pool: TokenizePool,
) -> list[Route]:
    """Of each API that generates."""
    parts = (engine, settings, metrics, room)
    chat = Generation(partial(read_chat, workers=workers, pool=pool), with_llama_members(chat_shape), *parts)
    completion = Generation(partial(read_completion, pool=pool), with_llama_members(completion_shape), *parts)
    native = Generation(partial(read_native, pool=pool), NativeShape, *parts)
    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completion, methods=["POST"]),
        Route("/completion", native, methods=["POST"]),
        *response_routes(store, engine, settings, metrics, room, workers, pool),
        *message_routes(engine, settings, metrics, room, workers, pool),
    ]


def close_app(app: Starlette) -> None:
    """Ends the processes and threads that requests were prepared in; the engine is for its owner to stop."""
    app.state.response_store.close()
    app.state.template_workers.close()
    app.state.tokenize_pool.close()


@contextlib.contextmanager
def watched(app: Starlette) -> Iterator[Coroutine[Any, Any, None] | None]:
    """While it is served, the page hears the log; what is given is to be run beside it, and takes its samples."""
    keeper: StateKeeper | None = app.state.ui
    if keeper is None:
        yield None
        return
    logger = logging.getLogger("holdfast")
    logger.addHandler(keeper.log)
    try:
        yield keeper.history.run()
    finally:
        logger.removeHandler(keeper.log)


def _documentation(settings: ServerSettings, *, lora: bool) -> list[Route]:
    with_key = bool(settings.api_key or settings.api_key_file)

    @functools.cache
    def described() -> dict[str, Any]:
        """When it is first asked for: it takes a tenth of a second, and few ask."""
        return document(settings.version, with_key=with_key, lora=lora, ui=settings.ui, strict=settings.strict_fields)

    async def openapi(request: Request) -> Response:
        return json_response(described())

    async def docs(request: Request) -> Response:
        return Response(page(described()), headers={"Content-Security-Policy": POLICY}, media_type="text/html")

    return [Route("/openapi.json", openapi, methods=["GET"]), Route("/docs", docs, methods=["GET"])]


def _cors(settings: ServerSettings) -> list[Middleware]:
    """Before the door: a browser asks without a key whether it may ask. Nothing unless origins are named."""
    if not settings.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
            expose_headers=["X-Request-Id", "Retry-After", HEADER],
        )
    ]


def _as_failure(error: Exception) -> Exception:
    """Starlette's own refusals in OpenAI's shape."""
    if not isinstance(error, HTTPException):
        return error
    known = {
        NOT_FOUND: ("unknown path; the API is under /v1, as in /v1/chat/completions; /docs has all paths", "not_found"),
        NOT_ALLOWED: ("method not allowed for this path; /docs has the methods of all", "not_allowed"),
    }
    message, code = known.get(error.status_code, (str(error.detail), "invalid_request"))
    return HttpFailure(error.status_code, message, kind="invalid_request_error", code=code)


def _pooling(vectors: PromptVectors) -> list[Route]:
    embeddings, scores = Embeddings(vectors), Scores(vectors)
    answers: dict[str, Answering] = {
        "/v1/embeddings": embeddings.answer,
        "/pooling": embeddings.pool,
        "/v1/score": scores.score,
        "/v1/rerank": scores.rerank,
        "/classify": scores.classify,
    }
    return [
        Route(path, Exchange(answer, vectors.engine, vectors.settings), methods=["POST"])
        for path, answer in answers.items()
    ]


class _Plain:
    """The endpoints that answer at once."""

    def __init__(
        self, engine: Engine, settings: ServerSettings, metrics: ServingMetrics, lora: LoraEndpoints | None
    ) -> None:
        self._lora = lora
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._created = int(time.time())
        # OpenAI's of old, which vLLM still has: clients in typed languages expect it.
        self._permission = {
            "id": f"modelperm-{uuid.uuid4().hex}", "object": "model_permission", "created": self._created,
            "allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True,
            "allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False, "organization": "*",
            "group": None, "is_blocking": False,
        }  # fmt: skip

    async def health(self, request: Request) -> Response:
        engine = self._engine
        body: dict[str, Any] = {"status": status_of(engine)}
        if body["status"] in ("ready", "sleeping"):  # Alive, as vLLM says; who must know asks /is_sleeping.
            return json_response(body)
        failure = engine.failure or engine.unresponsive
        if body["status"] in _REASONS:
            body["reason"] = _REASONS[body["status"]]
        elif failure is not None:
            body |= {"reason": failure.message, "code": failure.code}
        if engine.starting:
            body["progress"] = engine.starting
        return json_response(body, UNAVAILABLE, {"Retry-After": str(self._settings.retry_after_s)})

    async def models(self, request: Request) -> Response:
        cards = list(self._cards().values())
        if is_anthropic(request.scope):
            return json_response(model_page(cards))
        return json_response({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        card = self._cards().get(name)
        if card is None:
            raise HttpFailure(
                NOT_FOUND,
                f"the model {name[:200]!r} does not exist",
                kind="invalid_request_error",
                code="model_not_found",
            )
        return json_response(model_info(card) if is_anthropic(request.scope) else card)

    def _cards(self) -> dict[str, dict[str, Any]]:
        """The model under each of its names, then adapters."""
        found = [self._card(name) for name in self._settings.served_model_names]
        found += [] if self._lora is None else self._lora.cards(found[0])
        return {card["id"]: card for card in found}

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "holdfast",
            "root": self._engine.info.model,
            "aliases": [*self._settings.served_model_names],
            "parent": None,
            "max_model_len": self._engine.info.max_model_len,
            "permission": [self._permission],
        }

    async def version(self, request: Request) -> Response:
        return json_response({"version": self._settings.version})

    async def load(self, request: Request) -> Response:
        return json_response({"server_load": self._engine.unfinished})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Cached prefixes are forgotten at once, also while requests run: those keep what they hold."""
        for name in request.query_params:
            # Only what asks for nothing, however it is spelled.
            off = all(value.lower() in _OFF for value in request.query_params.getlist(name))
            if name not in ("reset_running_requests", "reset_external") or not off:
                raise RequestError(
                    f"{name[:100]} is not supported here: running requests keep their KV blocks, and there is no other "
                    "cache",
                    fix=f"leave {name[:100]} out",
                    field=name[:100],
                )
        await self._engine.reset_prefix_cache()
        return json_response({"success": True})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)
