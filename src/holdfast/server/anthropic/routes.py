"""Where Anthropic's API is."""

from __future__ import annotations

from functools import partial

from starlette.routing import Route

from holdfast.engine.interface import Engine
from holdfast.observability.metrics.registry import ServingMetrics
from holdfast.server.anthropic.read import TokenCount, read_message_request
from holdfast.server.anthropic.shape import MessageShape
from holdfast.server.request.logprob_budget import LogprobBudget
from holdfast.server.request.workers.template_workers import TemplateWorkers
from holdfast.server.request.workers.tokenize_pool import TokenizePool
from holdfast.server.response.generation import Generation
from holdfast.server.response.json_handler import Exchange
from holdfast.server.settings import ServerSettings


def message_routes(
    engine: Engine,
    settings: ServerSettings,
    metrics: ServingMetrics,
    room: LogprobBudget,
    workers: TemplateWorkers,
    pool: TokenizePool,
) -> list[Route]:
    read = partial(read_message_request, workers=workers, pool=pool)
    messages = Generation(read, MessageShape, engine, settings, metrics, room)
    counting = TokenCount(engine, settings, workers, pool)
    return [
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", Exchange(counting.count, engine, settings), methods=["POST"]),
    ]
