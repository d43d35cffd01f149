"""A fake engine behind the real server, for tests of clients and of the server: public API, no model, no torch.

It answers with a script (by default it echoes the last message), at a pace that is set, one token a delta, cut at
stop strings as the real one does, and can be told to load slowly, to fail, to be full, to stand still. It knows
nothing of HTTP and of real tokenizers.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from holdfast.engine.fake.script import EMBEDDING_SIZE, Script, Speaker, echo, fake_vector, say
from holdfast.engine.fake.tokenizer import END, VOCABULARY, ByteTokenizer
from holdfast.engine.requests.admission import check_room
from holdfast.engine.requests.embedding import embedding_too_long
from holdfast.engine.requests.output import OutputBuilder
from holdfast.engine.requests.searches import Searches
from holdfast.engine.requests.structured_output import StructuredOutput
from holdfast.errors import (
    ContextLengthError,
    DrainingError,
    EngineDiedError,
    EngineError,
    HoldfastError,
    RequestError,
    SleepingError,
    UnsupportedOptionError,
)
from holdfast.hardware import Resident, resident
from holdfast.observability.ledger import Ledger, ProcessMemory, make_ledger
from holdfast.records import (
    AdapterRef,
    AnswerDelta,
    EngineInfo,
    EngineStats,
    Failure,
    MemoryReport,
    MemoryTerm,
    Request,
    RequestTiming,
    SamplingParams,
)
from holdfast.units import GIB

if TYPE_CHECKING:
    from holdfast.text.tokenizer.tokenizer import Tokenizer

__all__ = ["FakeEngine", "Script", "echo", "say"]

BLOCK_SIZE = 16
BLOCKS = 1024
PAGE_BYTES = 1024


class FakeEngine:
    """Implements `holdfast.engine.interface.Engine`. All arguments are attributes and may be changed at any time."""

    def __init__(
        self,
        script: Script = echo,
        *,
        model: str = "fake",
        max_model_len: int = 4096,
        max_num_seqs: int = 256,
        max_queued_requests: int | None = None,
        start_delay_s: float = 0.0,
        start_error: Exception | None = None,
        first_token_delay_s: float = 0.0,
        token_delay_s: float = 0.0,
        fail_after_tokens: int | None = None,
        with_tokenizer: bool = True,
        labels: Sequence[str] = (),
        scores: bool = False,
    ) -> None:
        self.script = script
        self.model = model
        self.labels = list(labels)
        self.scores = scores
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_queued_requests = max_queued_requests
        self.start_delay_s = start_delay_s
        self.start_error = start_error
        self.first_token_delay_s = first_token_delay_s
        self.token_delay_s = token_delay_s
        self.fail_after_tokens = fail_after_tokens
        self.restarts = self.hangs = 0
        self.unresponsive: Failure | None = None
        self.starting = ""
        self.received: list[tuple[list[int], SamplingParams]] = []
        """Every request that was taken, in order."""
        self.aborted: list[str] = []
        """Ids of requests whose iterator was closed before they ended."""
        self.finished: list[str] = []
        self._tokenizer = ByteTokenizer() if with_tokenizer else None
        self.structured = (
            StructuredOutput(cast("Tokenizer", self._tokenizer), [END], VOCABULARY) if with_tokenizer else None
        )
        self._started = False
        self._draining = False
        self._failure: Failure | None = None
        self._cut = False
        self._searches = Searches()
        self._sleeping = self._abandoned = False
        self._tokens_allowed: int | None = None
        self._flow = asyncio.Event()
        self._changed = asyncio.Condition()
        self._listeners: list[Callable[[EngineStats], None]] = []
        self._prefixes: set[int] = set()
        self._running = self._waiting = self._steps = self._blocks_used = 0
        self._prefix_queries = self._prefix_hits = 0

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            model=self.model,
            device="none",
            dtype="none",
            kv_dtype="none",
            block_size=BLOCK_SIZE,
            blocks=BLOCKS,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=2048,
            prefix_caching=True,
            parameters=0,
            weights_bytes=0,
            kv_pool_bytes=0,
            attention_backend="none",
            hidden_size=EMBEDDING_SIZE,
            eos_token_ids=[END],
            labels=self.labels,
            scores=self.scores,
            label_activation="" if not self.labels else "sigmoid" if len(self.labels) == 1 else "softmax",
            memory=MemoryReport(
                total_bytes=GIB,
                free_bytes=GIB,
                limited_by="machine",
                budget_bytes=GIB,
                terms=[MemoryTerm(tier="ram", term=name, planned_bytes=PAGE_BYTES) for name in ("front", "kv_pool")],
                page_bytes=PAGE_BYTES,
                loading_bytes=0,
                loading_peak_bytes=0,
            ),
        )

    @property
    def members(self) -> tuple[FakeEngine, ...]:
        return (self,)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return cast("Tokenizer | None", self._tokenizer)

    @property
    def ready(self) -> bool:
        return (
            self._started and not self._draining and not self._sleeping and self._failure is self.unresponsive is None
        )

    @property
    def failure(self) -> Failure | None:
        return self._failure

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def unfinished(self) -> int:
        return self._running + self._waiting - self._searches.steps + len(self._searches)

    def memory(self) -> Ledger | None:
        held = resident() or Resident(0, 0)
        front = ProcessMemory(name="front", pid=os.getpid(), resident_bytes=held.now_bytes, peak_bytes=held.peak_bytes)
        return make_ledger(self.info, self.stats(), [front]) if self._started else None

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self._running,
            waiting=self._waiting,
            blocks_total=BLOCKS,
            blocks_used=self._blocks_used,
            step_tokens=1 if self._steps else 0,
            steps_total=self._steps,
            prefix_queries_total=self._prefix_queries,
            prefix_hits_total=self._prefix_hits,
        )

    def on_step(self, listener: Callable[[EngineStats], None]) -> None:
        self._listeners.append(listener)

    async def start(self) -> None:
        await asyncio.sleep(self.start_delay_s)
        if self.start_error is not None:
            raise self.start_error
        self._started = True

    def pause(self) -> None:
        """No token is produced until `step` or `resume`."""
        self._tokens_allowed = 0
        self._flow.clear()

    def step(self, tokens: int = 1) -> None:
        """While paused: lets that many tokens through."""
        if self._tokens_allowed is not None and tokens > 0:
            self._tokens_allowed += tokens
            self._flow.set()

    def resume(self) -> None:
        self._tokens_allowed = None
        self._flow.set()

    async def until(self, happened: Callable[[], bool]) -> None:
        """Waits for something to be true of this engine, e.g. `lambda: len(engine.aborted) == 1`."""
        async with self._changed:
            await self._changed.wait_for(happened)

    def die(self, message: str = "the fake engine was told to die") -> None:
        """Dead for good: open streams end with EngineDiedError, new requests are refused with it."""
        self._failure = Failure(kind="EngineDiedError", message=message, code=EngineDiedError.code)
        self.resume()

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        adapter: AdapterRef | None = None,
        embed: bool = False,
        search_id: str | None = None,
        progress: bool = False,
    ) -> AsyncIterator[AnswerDelta]:
        if search_id in self._searches:
            self._searches.begin_step(request_id)
        else:
            self._check(prompt_token_ids, params, embed)
        self.received.append((prompt_token_ids, params))
        cached_tokens = self._look_up(prompt_token_ids, cache_salt)
        self._waiting += 1
        await self._tell()
        return _Stream(self, prompt_token_ids, params, request_id, cached_tokens, embed, progress)

    def check_room(self, answers: int) -> None:
        if self.max_queued_requests is not None:
            taken = self._running + self._waiting + self._searches.idle_places
            check_room(answers, taken, self.max_num_seqs, self.max_queued_requests)

    async def open_search(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        search_id: str,
        adapter: AdapterRef | None = None,
    ) -> int:
        self._check(prompt_token_ids, params)
        self._searches.open(search_id, params.n)
        return 0

    async def close_search(self, search_id: str) -> None:
        self._searches.close(search_id)
        await self._tell()

    @property
    def sleeping(self) -> bool:
        return self._sleeping

    async def sleep(self, mode: str = "abort", level: int = 1) -> None:
        self._sleeping = True
        if level > 1:
            self._prefixes.clear()
        if mode == "abort":
            self._abandoned = True
            self.resume()
        async with self._changed:
            await self._changed.wait_for(lambda: self.unfinished == 0)
        self._abandoned = False

    async def wake_up(self) -> None:
        self._sleeping = False

    async def reset_prefix_cache(self) -> None:
        self._prefixes.clear()

    @property
    def budgets(self) -> Mapping[str, int | None]:
        return {}

    async def set_memory_budget(self, tier: str, budget_bytes: int | None) -> None:
        raise UnsupportedOptionError("a fake engine has no memory to budget", field=tier)

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self.unfinished == 0), timeout_s)
            except TimeoutError:
                self._cut = True
                self.resume()
                await self._changed.wait_for(lambda: self.unfinished == 0)

    async def stop(self) -> None:
        self._started = False
        if self.structured is not None:
            self.structured.close()

    def _check(self, prompt_token_ids: list[int], params: SamplingParams, embed: bool = False) -> None:
        if self._failure is not None:
            raise EngineDiedError(self._failure.message)
        if self._draining:
            raise DrainingError("the server is shutting down")
        if self._sleeping:
            raise SleepingError("the engine is sleeping", fix="POST /wake_up")
        if not self._started:
            raise EngineError("the engine has not been started")
        if any(token_id >= VOCABULARY for token_id in prompt_token_ids):
            raise RequestError(f"a token id is out of vocabulary, which has {VOCABULARY}", field="prompt")
        wanted = len(prompt_token_ids) + (params.max_tokens or 1)
        if wanted > self.max_model_len:
            field = "prompt" if len(prompt_token_ids) >= self.max_model_len else "max_tokens"
            raise ContextLengthError(
                embedding_too_long(f"{len(prompt_token_ids)} tokens", self.max_model_len)
                if embed
                else f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{wanted} tokens ({len(prompt_token_ids)} in the messages, {params.max_tokens or 1} in the "
                "completion). Please reduce the length of the messages or completion.",
                field=field,
            )
        self.check_room(params.n)

    def _look_up(self, prompt_token_ids: list[int], cache_salt: str) -> int:
        """A prefix cache in miniature: whole blocks seen before, never the whole prompt. A block's key is chained to
        the one before it: prompts of agents have a hundred thousand tokens here, where a byte is one."""
        prefix = hash(cache_salt)
        hits = 0
        for end in range(BLOCK_SIZE, len(prompt_token_ids) + 1, BLOCK_SIZE):
            prefix = hash((prefix, *prompt_token_ids[end - BLOCK_SIZE : end]))
            if prefix in self._prefixes and end < len(prompt_token_ids):
                hits = end
            self._prefixes.add(prefix)
        self._prefix_queries += len(prompt_token_ids)
        self._prefix_hits += hits
        return hits

    async def _enter(self) -> None:
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._running < self.max_num_seqs)
                self._running += 1
        finally:
            self._waiting -= 1

    async def _tell(self) -> None:
        """Wakes those who wait for a place, for the end of a drain, or in `until`."""
        async with self._changed:
            self._changed.notify_all()

    async def _step(self, tokens_so_far: int) -> None:
        """Waits as long as one token takes, then tells the listeners of a step of one token."""
        delay_s = self.token_delay_s if tokens_so_far else self.first_token_delay_s
        await asyncio.sleep(delay_s)
        while self._tokens_allowed == 0:
            await self._flow.wait()
        if self._tokens_allowed is not None:
            self._tokens_allowed -= 1
            if self._tokens_allowed == 0:
                self._flow.clear()
        if self._abandoned:
            raise SleepingError("the engine was put to sleep before the request was finished")
        if self._cut:
            raise DrainingError("the server shut down before the request was finished")
        if self._failure is not None:
            raise EngineDiedError(self._failure.message)
        if self.fail_after_tokens is not None and tokens_so_far >= self.fail_after_tokens:
            raise EngineDiedError("the fake engine was told to fail here")
        self._steps += 1
        stats = self.stats()
        for listener in self._listeners:
            listener(stats)


class _Stream:
    """The iterator `generate` returns. Closing it early is an abort."""

    def __init__(
        self,
        engine: FakeEngine,
        prompt: list[int],
        params: SamplingParams,
        request_id: str,
        cached_tokens: int,
        embed: bool,
        progress: bool,
    ) -> None:
        self._engine = engine
        self._request_id = request_id
        self._begun = False
        self._ended = False
        self._embed = embed
        self._progress = progress
        self._deltas = self._run(prompt, params, cached_tokens)

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> AnswerDelta:
        return await anext(self._deltas)

    async def aclose(self) -> None:
        if not self._ended:
            self._ended = True
            self._engine.aborted.append(self._request_id)
        if not self._begun:
            self._begun = True
            self._engine._waiting -= 1
        await cast(Any, self._deltas).aclose()
        self._engine._searches.end_step(self._request_id)
        await self._engine._tell()

    async def _run(self, prompt: list[int], params: SamplingParams, cached_tokens: int) -> AsyncIterator[AnswerDelta]:
        engine = self._engine
        arrival_s = time.monotonic()
        blocks = -(-len(prompt) // BLOCK_SIZE)
        self._begun = True
        request = Request(request_id=self._request_id, prompt_token_ids=prompt, params=params, arrival_s=arrival_s)
        others = msgspec.structs.replace(request, params=params.replace(prompt_logprobs=None))
        script = engine.script(prompt)
        speaking = [
            (OutputBuilder(one, index, engine.tokenizer), Speaker(one, script, engine.max_model_len))
            for index, one in enumerate([request, *[others] * (params.n - 1)])
        ]
        await engine._enter()
        engine._blocks_used += blocks
        scheduled_s = time.monotonic()
        first_token_s = 0.0
        try:
            if self._progress and len(prompt) > 1:  # As if it took two steps.
                yield AnswerDelta(prompt_computed=len(prompt) // 2, cached_tokens=cached_tokens)
            while speaking:
                for answer, speaker in list(speaking):
                    await engine._step(speaker.count)
                    now_s = time.monotonic()
                    first_token_s = first_token_s or now_s
                    timing = RequestTiming(
                        arrival_s=arrival_s, scheduled_s=scheduled_s, first_token_s=first_token_s, finished_s=now_s
                    )
                    output = speaker.next_output(cached_tokens, timing)
                    if self._embed:
                        output = msgspec.structs.replace(
                            output, token_ids=[], embedding=fake_vector(prompt, len(engine.labels))
                        )
                    delta = answer.take(output)
                    if answer.finished:
                        speaking.remove((answer, speaker))
                        if not speaking:
                            self._ended = True
                            engine.finished.append(self._request_id)
                    yield delta
        except HoldfastError:
            self._ended = True
            raise
        finally:
            engine._blocks_used -= blocks
            engine._running -= 1
            await engine._tell()
