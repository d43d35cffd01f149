"""LoRA adapters over HTTP: loaded and unloaded at runtime, listed beside the model, under vLLM's paths and names.

Only folders that were allowed when the server started are looked into, which is any folder where only programs of this
machine or clients with a key can ask and none was named (`cli.commands.serve`). No answer tells where files lie.

Where ranks are on several nodes, each of which has files of its own, a load is over when all ranks have read theirs.
Until then its name stands for what it stood for before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from holdfast.checkpoints.lora.adapter import READ_LIMIT_S, too_slow
from holdfast.checkpoints.lora.bounded_looks import EXAMINE_LIMIT_S, in_time, look
from holdfast.engine.interface import Engine
from holdfast.engine.requests.adapters import Adapters, Loaded
from holdfast.engine.requests.embedding import PARAMS
from holdfast.errors import (
    AdapterError,
    DrainingError,
    EngineDiedError,
    EngineHungError,
    HoldfastError,
    OverloadedError,
    SleepingError,
    UnknownModelError,
)
from holdfast.records import AdapterRef
from holdfast.server.http.request_body import read_body
from holdfast.server.request.json_body import decode_object
from holdfast.server.schema.fields import check_fields, convert, honoured_fields, unsupported
from holdfast.server.settings import ServerSettings
from holdfast.units import shorten

log = logging.getLogger("holdfast.server")

MAX_BODY_BYTES = 64 << 10
"""A name and a path."""
TURN_LIMIT_S = 60.0
"""That an adapter waits for a place, in which it is taken to all nodes."""
ARRIVAL_LIMIT_S = READ_LIMIT_S + 15.0
"""For an adapter that has one: ranks give up first, and say why."""
_NOTHING_OF_ADAPTERS = (SleepingError, OverloadedError, DrainingError, EngineDiedError, EngineHungError)
"""Ends of a request that say nothing of the adapter it came with."""


class LoadBody(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadBody(msgspec.Struct, kw_only=True):
    lora_name: str
    lora_int_id: int | None = None


_LOAD_FIELDS, _UNLOAD_FIELDS = honoured_fields(LoadBody), honoured_fields(UnloadBody)


class LoraEndpoints:
    def __init__(self, adapters: Adapters, settings: ServerSettings, engine: Engine) -> None:
        self._adapters, self._settings, self._engine = adapters, settings, engine
        self._loading = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    async def load(self, request: Request) -> Response:
        body: LoadBody = convert(check_fields(await self._body(request), _LOAD_FIELDS), LoadBody)
        if body.is_3d_lora_weight:
            raise unsupported("is_3d_lora_weight", "LoRA on MoE experts is not supported")
        if body.lora_name in self._settings.served_model_names:
            raise AdapterError(f"{shorten(body.lora_name)!r} is the name of the base model", field="lora_name")
        async with self._loading:  # One at a time: of two with one name the second is refused.
            examined = await self._examine(body)
            unknown = await self._reach_other_nodes(examined.ref)
            if unknown is not None and self._adapters.known(body.lora_name) is not None:
                raise unknown  # What this name stands for is not given up for what may not be there.
            self._adapters.add(examined)
        if unknown is not None:
            _warn(examined.ref, unknown)
        log.info("LoRA adapter %s loaded", shorten(body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def _examine(self, body: LoadBody) -> Loaded:
        def examine() -> Loaded:
            return self._adapters.examine(body.lora_name, body.lora_path, in_place=body.load_inplace)

        return await in_time(look(examine), body.lora_name, EXAMINE_LIMIT_S)

    async def _reach_other_nodes(self, ref: AdapterRef) -> HoldfastError | None:
        """A request of one token takes it to all ranks, before anybody can ask for it by name. Raises what is wrong
        with it where one has not got it. Returns why that is not known; None: all of them have it. Where it is not
        known, it is whoever asks for the adapter first who hears of that."""
        if not ref.digest:
            return None
        asking = asyncio.create_task(self._ask_once(ref))
        try:
            await asyncio.wait([asking], timeout=TURN_LIMIT_S)
            if not asking.done() and ref.number in self._engine.stats().arriving_adapters:
                await asyncio.wait([asking], timeout=ARRIVAL_LIMIT_S)
                if not asking.done():
                    raise too_slow(shorten(ref.name), ARRIVAL_LIMIT_S)
            if not asking.done():
                return OverloadedError(
                    f"the LoRA adapter {shorten(ref.name)!r} had no place within {TURN_LIMIT_S:g} s, and other nodes "
                    "have not looked for it",
                    fix="load it again later",
                    field="lora_name",
                )
            return asking.result()
        except AdapterError as error:
            error.field = "lora_path"
            raise
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait([asking])

    async def _ask_once(self, ref: AdapterRef) -> HoldfastError | None:
        """As `_reach_other_nodes`."""
        try:
            stream = await self._engine.generate(
                [0], PARAMS, request_id=f"adapter-{ref.number}", adapter=ref, embed=self._adapters.classifies
            )
        except HoldfastError as error:  # It was not taken, and no rank has heard of it.
            return error
        try:
            async for _ in stream:
                pass
        except _NOTHING_OF_ADAPTERS as error:
            return error
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
        return None

    def look_at_named(self) -> None:
        """At those that were named at start, as soon as the engine is ready: what other nodes lack is logged. Called on
        the loop, and waits for nothing."""
        self._looking = asyncio.create_task(self._look_at(self._adapters.listed))

    async def _look_at(self, named: Sequence[Loaded]) -> None:
        for one in named:
            if self._engine.draining:
                return
            try:
                unknown = await self._reach_other_nodes(one.ref)
            except HoldfastError as error:
                log.error("LoRA adapter %s cannot be used: %s", shorten(one.ref.name), error)
            else:
                if unknown is not None:
                    _warn(one.ref, unknown)

    async def unload(self, request: Request) -> Response:
        body: UnloadBody = convert(check_fields(await self._body(request), _UNLOAD_FIELDS), UnloadBody)
        known = self._adapters.named(body.lora_name)
        if known is None or body.lora_int_id not in (None, known.number):
            raise UnknownModelError(
                f"the LoRA adapter {shorten(body.lora_name)!r} is not loaded",
                fix="GET /v1/models lists the loaded adapters",
                field="lora_name",
            )
        self._adapters.unload(body.lora_name)
        log.info("LoRA adapter %s unloaded", shorten(body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def cards(self, base: dict[str, Any]) -> list[dict[str, Any]]:
        """As /v1/models lists them; `base`: the model's own card."""
        return [
            {
                **base,
                "id": one.ref.name,
                "created": one.loaded_s,
                "root": one.ref.name,
                "aliases": [one.ref.name],
                "parent": one.parent or base["id"],
            }
            for one in self._adapters.listed
        ]

    async def _body(self, request: Request) -> dict[str, Any]:
        raw = await read_body(request.scope, request.receive, MAX_BODY_BYTES, self._settings.body_timeout_s)
        return decode_object(raw)


def _warn(ref: AdapterRef, unknown: HoldfastError) -> None:
    log.warning("LoRA adapter %s: that other nodes have it is not known yet: %s", shorten(ref.name), unknown.message)
