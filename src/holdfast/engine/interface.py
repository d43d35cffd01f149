"""What the server needs of an engine: implemented by the engine process's client and by the public fake.

Nothing here or below `server` imports torch: the tensors live in another process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from holdfast.errors import UnsupportedOptionError
from holdfast.records import AdapterRef, AnswerDelta, EngineInfo, EngineStats, Failure, SamplingParams

if TYPE_CHECKING:
    from holdfast.engine.requests.structured_output import StructuredOutput
    from holdfast.observability.ledger import Ledger
    from holdfast.text.tokenizer.tokenizer import Tokenizer


def check_wake_tags(tags: Collection[str]) -> None:
    """vLLM restores parts of an engine by tag; here an engine is restored as a whole."""
    if sorted(tags) != ["kv_cache", "weights"]:
        raise UnsupportedOptionError(
            "tags are not supported: weights and KV cache are restored together", fix="leave tags out", field="tags"
        )


def engine_of(stream: AsyncIterator[AnswerDelta]) -> int:
    """The number of the engine that a stream of `Engine.generate` is of; 0 where there is one."""
    return int(getattr(stream, "engine", 0))


class Engine(Protocol):
    """All methods are called on one asyncio loop."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def members(self) -> Sequence[Engine]:
        """The engines that answer requests: this one itself, or those behind it, by their numbers."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None under skip_tokenizer_init: then only token ids go in and out."""

    @property
    def structured(self) -> StructuredOutput | None:
        """Checks grammars and matches texts; None without a tokenizer."""

    @property
    def ready(self) -> bool:
        """False while loading, restarting, draining or dead, and while it does not answer."""

    @property
    def unresponsive(self) -> Failure | None:
        """Why it is taken to hang: nothing was heard of it for long. None while it answers, or is started again."""

    @property
    def starting(self) -> str:
        """How far a start has come and when it last got on, for people; empty when it does not start."""

    @property
    def failure(self) -> Failure | None:
        """Why it is dead for good; None while it lives or comes back."""

    @property
    def draining(self) -> bool: ...

    @property
    def sleeping(self) -> bool:
        """Put to sleep, or about to be: it holds no memory but the front's and what is kept, and takes nothing new."""

    @property
    def unfinished(self) -> int:
        """Requests taken and not yet ended."""

    @property
    def restarts(self) -> int:
        """How often the engine process was started again."""

    @property
    def hangs(self) -> int:
        """Of these, how often because it did not answer and was killed."""

    def stats(self) -> EngineStats:
        """The newest snapshot; counters go on over restarts."""

    def memory(self) -> Ledger | None:
        """Planned and measured bytes as they are now; None before it was ready, and where no books are kept."""

    @property
    def budgets(self) -> Mapping[str, int | None]:
        """By tier, as requested: at the start, or by `set_memory_budget` since; `info` says what is kept to. None: as
        it is by default."""

    def on_step(self, listener: Callable[[EngineStats], None]) -> None:
        """From now on `listener` is called on the loop with the snapshot of every step, none left out:
        a histogram of steps cannot be had from the newest snapshot alone."""

    async def start(self) -> None:
        """Returns when the engine is ready; raises what stopped it from becoming so."""

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
        """Checks the request and queues it, or raises a RequestError, OverloadedError, DrainingError or EngineError.

        The iterator yields deltas of all `params.n` answers as they come and ends when all have ended. Closing it
        early aborts the request and frees its pages. It raises EngineError when the request cannot be finished.
        `embed`: one delta with the prompt's embedding, and no token (`engine.requests.embedding.PARAMS` goes with it).
        `search_id`: it is a step of that search, for which there is room, also while draining. `progress`: deltas also
        say after each step how much of the prompt is computed.
        """

    async def open_search(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        search_id: str,
        adapter: AdapterRef | None = None,
    ) -> int:
        """Checks a beam search as `generate` checks a request, and holds `params.n` places until `close_search`: it
        counts as one unfinished request, and its steps are not refused for want of room or by a drain. The number of
        the engine that it is on."""

    async def close_search(self, search_id: str) -> None:
        """Also for one that was closed before."""

    def check_room(self, answers: int) -> None:
        """For a body of several prompts, before the first is opened: raises RequestError when so many answers
        (prompts times n) can never be held at once, OverloadedError when they cannot be now."""

    async def reset_prefix_cache(self) -> None:
        """Forgets what is cached of prompts; requests that run keep what they hold."""

    async def set_memory_budget(self, tier: str, budget_bytes: int | None) -> None:
        """Of `tier` (ram, vram), from now on and after restarts; None: as it is by default. The KV pool is resized, and
        answers go on. A GPU gives back what it can of a budget that is too small; `info` says how much is kept.
        Raises DoesNotFitError for too small a budget of RAM and for one that is not there, UnsupportedOptionError
        for a tier that cannot be changed; nothing has changed then."""

    async def sleep(self, mode: str = "abort", level: int = 1) -> None:
        """Gives weights and all else of the engine back to the system; at level 1 cached prefixes stay in RAM, as far
        as that has room for them. `mode`: what becomes of open requests: abort ends them with a SleepingError, wait
        lets them finish first. Raises EngineError when it is not ready."""

    async def wake_up(self) -> None:
        """Returns when it is ready again; raises what keeps it from it, and sleeps on."""

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new, lets what runs finish for at most `timeout_s`, aborts the rest."""

    async def stop(self) -> None:
        """Ends the engine process."""
