"""The records that cross packages and processes. No behaviour beyond checking themselves, no torch."""

from holdfast.records.lora import AdapterRef, LoRARequest
from holdfast.records.memory import LinkUse, LowerTier, MemoryReport, MemoryTerm, VramBudget, VramGrant
from holdfast.records.outputs import (
    AnswerDelta,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    EngineInfo,
    EngineOutput,
    EngineStats,
    Failure,
    FinishReason,
    Logprob,
    RequestOutput,
    RequestTiming,
    TokenLogprobs,
)
from holdfast.records.requests import Request
from holdfast.records.sampling import SamplingParams
from holdfast.records.steps import (
    AdapterArrival,
    AdapterFetch,
    BlockCopy,
    Row,
    SequenceStart,
    StepFailure,
    StepPlan,
    StepResult,
    TableWrite,
    TokenMasks,
    Verdict,
)
from holdfast.records.structured import GuidedDecodingParams, StructuredOutputsParams

__all__ = [
    "AdapterArrival",
    "AdapterFetch",
    "AdapterRef",
    "AnswerDelta",
    "BlockCopy",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineInfo",
    "EngineOutput",
    "EngineStats",
    "Failure",
    "FinishReason",
    "GuidedDecodingParams",
    "LinkUse",
    "LoRARequest",
    "Logprob",
    "LowerTier",
    "MemoryReport",
    "MemoryTerm",
    "Request",
    "RequestOutput",
    "RequestTiming",
    "Row",
    "SamplingParams",
    "SequenceStart",
    "StepFailure",
    "StepPlan",
    "StepResult",
    "StructuredOutputsParams",
    "TableWrite",
    "TokenLogprobs",
    "TokenMasks",
    "Verdict",
    "VramBudget",
    "VramGrant",
]
