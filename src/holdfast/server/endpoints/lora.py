"""LoRA adapters over HTTP: loaded and unloaded at runtime, listed beside the model, under vLLM's paths and names.

Only folders that were allowed when the server started are looked into, which is any folder where only programs of this
machine or clients with a key can ask and none was named (`cli.commands.serve`). No answer tells where files lie.

Where ranks are on several nodes, each of which has files of its own, a load is over when all ranks have read theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from holdfast.checkpoints.lora.adapter import too_slow
from holdfast.engine.interface import Engine
from holdfast.engine.requests.adapters import Adapters, Loaded
from holdfast.engine.requests.embedding import PARAMS
from holdfast.errors import AdapterError, HoldfastError, UnknownModelError
from holdfast.records import AdapterRef
from holdfast.server.http.request_body import read_body
from holdfast.server.request.json_body import decode_object
from holdfast.server.schema.fields import check_fields, convert, honoured_fields, unsupported
from holdfast.server.settings import ServerSettings
from holdfast.units import shorten

log = logging.getLogger("holdfast.server")

MAX_BODY_BYTES = 64 << 10
"""A name and a path."""
EXAMINE_LIMIT_S = 60.0
"""For an adapter's two headers, which take milliseconds, or where several nodes compare its files for all of them: what
takes longer hangs."""


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
        self._turn = asyncio.Lock()
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
        async with self._turn:  # One at a time: of two with one name the second is refused.
            examined, before = await self._examine(body), self._adapters.known(body.lora_name)
            ref = self._adapters.add(examined)
            try:
                await self._reach_other_nodes(ref)
            except BaseException:
                self._adapters.put_back(ref.name, before)
                raise
        log.info("LoRA adapter %s loaded", shorten(body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def _examine(self, body: LoadBody) -> Loaded:
        """In a thread of its own that nobody waits for at the end of the process: the folder's file server may hang."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        work = Future[Loaded]()

        def examine() -> None:
            try:
                work.set_result(self._adapters.examine(body.lora_name, body.lora_path, in_place=body.load_inplace))
            except Exception as error:
                work.set_exception(error)
            with contextlib.suppress(RuntimeError):  # The loop has ended meanwhile.
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=examine, name="adapter-examine", daemon=True).start()
        try:
            await asyncio.wait_for(ended.wait(), EXAMINE_LIMIT_S)
        except TimeoutError:
            log.error("loading LoRA adapter %s timed out after %g s", shorten(body.lora_name), EXAMINE_LIMIT_S)
            raise too_slow(shorten(body.lora_name), EXAMINE_LIMIT_S) from None
        return work.result()

    async def _reach_other_nodes(self, ref: AdapterRef) -> None:
        """A request of one token takes it to all ranks, and says where one has not got it. With an engine that has no
        turn for it within a minute, or sleeps, it is whoever asks for the adapter first who hears of that."""
        if not ref.digest:
            return
        try:
            async with asyncio.timeout(EXAMINE_LIMIT_S):
                await self._ask_once(ref)
        except AdapterError as error:
            error.field = "lora_path"
            raise
        except (TimeoutError, HoldfastError) as error:
            why = error.message if isinstance(error, HoldfastError) else f"no turn within {EXAMINE_LIMIT_S:g} s"
            log.warning("LoRA adapter %s: whether other nodes have it is not known yet: %s", shorten(ref.name), why)

    def look_at_named(self) -> None:
        """At those that were named at start, as soon as the engine is ready: what other nodes lack is logged. Called on
        the loop, and waits for nothing."""
        self._looking = asyncio.create_task(self._look_at(self._adapters.listed))

    async def _look_at(self, named: Sequence[Loaded]) -> None:
        for one in named:
            if self._engine.draining:
                return
            try:
                await self._reach_other_nodes(one.ref)
            except AdapterError as error:
                log.error("LoRA adapter %s cannot be used: %s", shorten(one.ref.name), error)

    async def _ask_once(self, ref: AdapterRef) -> None:
        stream = await self._engine.generate(
            [0], PARAMS, request_id=f"adapter-{ref.number}", adapter=ref, embed=self._adapters.classifies
        )
        try:
            async for _ in stream:
                pass
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()

    async def unload(self, request: Request) -> Response:
        body: UnloadBody = convert(check_fields(await self._body(request), _UNLOAD_FIELDS), UnloadBody)
        async with self._turn:
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
