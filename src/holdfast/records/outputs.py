"""What comes out: tokens from the engine, and the answers people see."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast import errors
from holdfast.errors import HoldfastError
from holdfast.records.lora import LoRARequest
from holdfast.records.memory import ExpertUse, KVStoreUse, KVTierUse, LinkUse, MemoryReport


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The chosen token first, then the likeliest ones, most likely first (the chosen one may stand there again)."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Of the chosen token, 1 is the likeliest."""


class RequestTiming(msgspec.Struct, frozen=True, kw_only=True):
    """time.monotonic() of this machine, the same clock in every process."""

    arrival_s: float
    scheduled_s: float
    first_token_s: float
    finished_s: float


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A HoldfastError that crosses a process border."""

    kind: str
    """Class name of the error."""
    message: str
    code: str
    needed: str | None = None
    found: str | None = None
    fix: str | None = None
    field: str | None = None

    @staticmethod
    def of(error: HoldfastError) -> Failure:
        return Failure(
            kind=type(error).__name__,
            message=error.message,
            code=error.code,
            needed=error.needed,
            found=error.found,
            fix=error.fix,
            field=error.field,
        )

    def error(self, request_id: str | None = None) -> HoldfastError:
        """A new one each time: what is raised collects where it has been."""
        kind = getattr(errors, self.kind, errors.EngineError)
        if not (isinstance(kind, type) and issubclass(kind, HoldfastError)):
            kind = errors.EngineError
        return kind(
            self.message,
            code=self.code,
            needed=self.needed,
            found=self.found,
            fix=self.fix,
            field=self.field,
            request_id=request_id,
        )


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """News of one request after one step."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of further tokens of the prompt, each told once; the first token of a prompt has none."""
    prompt_computed: int = 0
    """Of the prompt, after a step that leaves more of it to compute, where that was asked for."""
    embedding: bytes | None = None
    """Of the prompt, where that was asked for: float32, of length 1."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop id that ended it, when it was not the model's own end."""
    complete: bool = False
    """The grammar of the answer is complete, and its last token is part of the text."""
    cached_tokens: int = 0
    """Of the prompt, how many were found in the prefix cache at first admission."""
    fetched_tokens: int = 0
    """Of these, how many came from tiers below the KV pool."""
    timing: RequestTiming | None = None
    """With the first token, and with the last output."""
    failure: Failure | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot after a step. Counters (…_total) only grow while one engine process lives."""

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_touched: int = 0
    """Ever handed out: the system backs the memory of these, and of no others."""
    step_tokens: int = 0
    """Tokens of the step this snapshot follows; 0 when there was none."""
    steps_total: int = 0
    preemptions_total: int = 0
    prefix_queries_total: int = 0
    """Tokens looked up."""
    prefix_hits_total: int = 0
    """Tokens found."""
    prefix_below_queries_total: int = 0
    """Tokens looked up that the pool did not have; 0 where there are no tiers below it."""
    kv_tiers: list[KVTierUse] = []
    """RAM and disk, where KV pages lie there."""
    kv_store: KVStoreUse | None = None
    failed_copies_total: int = 0
    """Pages that did not come or go between tiers."""
    fetches_not_worth_total: int = 0
    """How often a prefix was computed that could have been fetched, because that was sooner."""
    pool_resizes_total: int = 0
    """How often the KV pool has become smaller or larger while serving."""
    stood_still_s_total: float = 0.0
    """How long steps stood still for that."""
    device_bytes: int = 0
    """What the engine process holds on its GPU, as the driver counts it; 0: it has none."""
    links: list[LinkUse] = []
    """Each direction over which weights come to a GPU, or KV pages move; none: all stay where they are."""
    experts: ExpertUse | None = None
    """None: all experts stay where they are computed, or whole layers come."""
    running_adapters: list[str] = []
    waiting_adapters: list[str] = []
    """Names of LoRA adapters that requests run and wait with."""
    arriving_adapters: list[int] = []
    """Numbers of those that are on their way to a place."""


class Logprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class AnswerDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one answer of a request gained since the last delta. Text may be empty while half a character waits."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[dict[int, Logprob]] | None = None
    """One entry a token: the chosen token first, then the likeliest."""
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    """Of further tokens of the prompt, spelled when they are looked at; None stands for the first, behind which nothing
    was known. Of a request with several answers they come with the first."""
    prompt_computed: int = 0
    """Tokens of the prompt so far, where that was asked for; nothing else is told with it."""
    embedding: bytes | None = None
    """Of the prompt, where that was asked for: float32, of length 1."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or id that ended it."""
    cached_tokens: int = 0
    fetched_tokens: int = 0
    """Of these, how many came from tiers below the KV pool."""
    timing: RequestTiming | None = None
    """With the last delta of this answer."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine that is ready says of itself: printed at start, read by the server and the metrics."""

    model: str
    device: str
    dtype: str
    kv_dtype: str
    block_size: int
    blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    parameters: int
    weights_bytes: int
    kv_pool_bytes: int
    attention_backend: str
    hidden_size: int = 0
    """Numbers in an embedding."""
    eos_token_ids: list[int] = []
    """The model's own ends."""
    labels: list[str] = []
    """Of a model that classifies: it generates nothing and embeds nothing."""
    scores: bool = False
    """Whether embeddings may be compared as scores: the model was trained to embed, or is served for it."""
    label_activation: str = ""
    """What makes chances of its scores: sigmoid, softmax, identity."""
    max_concurrency: float = 0.0
    """Requests of max_model_len tokens that the pool holds at once."""
    max_loras: int = 0
    """LoRA adapters in one step; 0: they are not enabled."""
    kv_groups: int = 1
    """Each keeps a page of its own for the same tokens."""
    profile_run_s: float | None = None
    """On a CPU: how long the heaviest work between two heartbeats took when it was profiled; None: not measured."""
    decisions: list[str] = []
    """Each automatic choice with its reason, one line each."""
    lowered: list[str] = []
    """Those of them that lowered something for want of memory."""
    memory: MemoryReport | None = None

    @property
    def kv_tokens(self) -> int:
        return self.blocks // self.kv_groups * self.block_size


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One answer, growing while it streams."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """All answers to one prompt, named as vLLM names them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry a token of the prompt, None for the first."""
    lora_request: LoRARequest | None = None
    """The adapter that was asked for."""
    metrics: None = None
    """vLLM's, which are there only while it logs statistics; `LLM.get_metrics` has the engine's."""


@dataclass(slots=True, kw_only=True)
class EmbeddingOutput:
    """A prompt as a vector of length 1."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True, kw_only=True)
class EmbeddingRequestOutput:
    """Of one prompt, named as vLLM names it."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
