"""GET /ui/state: all that the page and `holdfast top` show, in one answer of bounded size and cost.

    once a second at most    requests (the oldest hundred), memory, notices: shared by all that ask
    ?since=N                 samples of the last hour behind number N: whoever has asked before gets the new ones only

Docs: docs/ui.md. Nothing of prompts or answers is in it.
"""

from __future__ import annotations

import time
import uuid

import msgspec

from holdfast.engine.interface import Engine
from holdfast.observability.ledger import Ledger
from holdfast.observability.metrics.history import FIELDS, INTERVAL_S, History, Sample
from holdfast.observability.metrics.registry import RequestMeter, ServingMetrics
from holdfast.records import EngineInfo, EngineStats
from holdfast.server.settings import ServerSettings
from holdfast.server.ui.machine import MachineTier, MachineWatch
from holdfast.server.ui.notices import LOOK_BACK_S, LogNotices, Notice, notices
from holdfast.units import shorten

VERSION = 1
"""Of the JSON. Names are added under the same version."""
FRESH_S = 1.0
SHOWN_REQUESTS, SHOWN_ADAPTERS = 100, 200
ID_CHARS = 80
WAITING, PREFILL, DECODE = "waiting", "prefill", "decode"


class ServerState(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """Another at every start: samples are numbered anew."""
    version: str
    status: str
    """As /health says it."""
    progress: str
    """Of a start."""
    uptime_s: float
    restarts: int


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    names: list[str]
    device: str
    dtype: str
    kv_dtype: str
    parameters: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    attention_backend: str
    prefix_caching: bool
    can_chat: bool
    can_generate: bool
    max_logprobs: int


class LoadState(msgspec.Struct, frozen=True, kw_only=True):
    running: int
    waiting: int
    prompt_tokens_total: int
    generation_tokens_total: int
    preemptions_total: int
    prefix_hit_share: float | None
    """None: nothing was looked up."""


class RequestState(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    state: str
    """waiting, prefill or decode. Of those without a token the first that came are taken to be in prefill."""
    age_s: float
    answers: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    max_tokens: int
    ttft_s: float | None
    tokens_per_s: float | None


class RequestsState(msgspec.Struct, frozen=True, kw_only=True):
    open: int
    shown: list[RequestState]
    """The oldest, at most a hundred."""


class AdapterState(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    base: str
    running: bool
    waiting: bool


class LiveState(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all that ask within a second."""

    server: ServerState
    model: ModelState | None
    load: LoadState
    memory: Ledger | None
    machine: list[MachineTier]
    requests: RequestsState
    adapters: list[AdapterState]
    notices: list[Notice]


class HistoryState(msgspec.Struct, frozen=True, kw_only=True):
    interval_s: float
    newest: int
    """The number of the last sample: what to ask for next as `since`."""
    fields: list[str]
    samples: list[Sample]


class UiState(LiveState, frozen=True, kw_only=True):
    version: int = VERSION
    time_s: float
    history: HistoryState


def status_of(engine: Engine) -> str:
    if engine.ready:
        return "ready"
    if engine.sleeping:
        return "sleeping"
    if engine.failure is not None:
        return "dead"
    if engine.draining:
        return "draining"
    if engine.unresponsive is not None:
        return "hung"
    return "restarting" if engine.restarts else "loading"


class StateKeeper:
    """One a server, on its loop."""

    def __init__(self, engine: Engine, settings: ServerSettings, metrics: ServingMetrics) -> None:
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self.history = History(metrics, engine.stats, engine.memory)
        self.log = LogNotices()
        self._machine = MachineWatch()
        self._id = uuid.uuid4().hex
        self._began_s = time.monotonic()
        self._live: tuple[float, LiveState] | None = None

    async def state(self, since: int = 0, *, names_holders: bool = True) -> UiState:
        """`names_holders`: whether it is told which other processes hold memory."""
        now_s = time.monotonic()
        if self._live is None or now_s - self._live[0] >= FRESH_S:
            self._live = now_s, await self._look()
        live = msgspec.structs.asdict(self._live[1])
        if not names_holders:
            live["machine"] = [msgspec.structs.replace(tier, holders=[]) for tier in live["machine"]]
        samples = HistoryState(
            interval_s=INTERVAL_S,
            newest=self.history.newest,
            fields=list(FIELDS),
            samples=self.history.since(since),
        )
        return UiState(**live, time_s=round(time.time(), 1), history=samples)

    async def _look(self) -> LiveState:
        engine, info, ledger = self._engine, self._info(), self._engine.memory()
        own_pids = [] if ledger is None else [process.pid for process in ledger.processes]
        tier = "ram" if ledger is None or not ledger.tiers else ledger.tiers[0].tier
        machine = await self._machine.tiers(own_pids, tier)
        stats = engine.stats()
        recent = self.history.last(LOOK_BACK_S)
        return LiveState(
            server=ServerState(
                id=self._id,
                version=self._settings.version,
                status=status_of(engine),
                progress=engine.starting,
                uptime_s=round(time.monotonic() - self._began_s, 1),
                restarts=engine.restarts,
            ),
            model=None if info is None else self._model(info),
            load=self._load(stats),
            memory=ledger,
            machine=machine,
            requests=requests_state(list(self._metrics.open_meters), stats.running),
            adapters=self._adapters(stats),
            notices=notices(engine, info, ledger, recent, machine, self.log),
        )

    def _info(self) -> EngineInfo | None:
        engine = self._engine
        known = engine.ready or engine.sleeping or engine.restarts or engine.unresponsive is not None
        return engine.info if known else None

    def _model(self, info: EngineInfo) -> ModelState:
        tokenizer, generates = self._engine.tokenizer, not info.labels
        return ModelState(
            names=list(self._settings.served_model_names),
            device=info.device,
            dtype=info.dtype,
            kv_dtype=info.kv_dtype,
            parameters=info.parameters,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            attention_backend=info.attention_backend,
            prefix_caching=info.prefix_caching,
            can_chat=generates and tokenizer is not None and tokenizer.chat_template is not None,
            can_generate=generates and tokenizer is not None,
            max_logprobs=self._settings.max_logprobs,
        )

    def _load(self, stats: EngineStats) -> LoadState:
        prompt, generated = self._metrics.token_totals()
        looked_up = stats.prefix_queries_total
        return LoadState(
            running=stats.running,
            waiting=stats.waiting,
            prompt_tokens_total=prompt,
            generation_tokens_total=generated,
            preemptions_total=stats.preemptions_total,
            prefix_hit_share=round(stats.prefix_hits_total / looked_up, 4) if looked_up else None,
        )

    def _adapters(self, stats: EngineStats) -> list[AdapterState]:
        adapters = self._settings.adapters
        running, waiting = set(stats.running_adapters), set(stats.waiting_adapters)
        listed = [] if adapters is None else adapters.listed[:SHOWN_ADAPTERS]
        return [
            AdapterState(
                name=one.ref.name,
                # What it was trained on may be a path of whoever trained it.
                base=one.base.rstrip("/").rpartition("/")[2],
                running=one.ref.name in running,
                waiting=one.ref.name in waiting,
            )
            for one in listed
        ]


def requests_state(meters: list[RequestMeter], running: int) -> RequestsState:
    """`meters` in the order in which they came; `running`: answers that the engine works on."""
    now_s = time.monotonic()
    in_prefill = running - sum(meter.answering for meter in meters)
    shown: list[RequestState] = []
    for meter in meters[:SHOWN_REQUESTS]:
        state = DECODE if meter.ttft_s is not None else PREFILL if in_prefill > 0 else WAITING
        in_prefill -= meter.open_answers if state == PREFILL else 0
        speed = meter.tokens_per_s()
        shown.append(
            RequestState(
                id=shorten(meter.request_id, ID_CHARS),
                model=meter.model,
                state=state,
                age_s=round(now_s - meter.arrival_s, 1),
                answers=meter.open_answers,
                prompt_tokens=meter.prompt_tokens,
                cached_tokens=meter.cached_tokens,
                generated_tokens=meter.generated_tokens,
                max_tokens=meter.max_tokens,
                ttft_s=None if meter.ttft_s is None else round(meter.ttft_s, 4),
                tokens_per_s=None if speed is None else round(speed, 1),
            )
        )
    return RequestsState(open=len(meters), shown=shown)
