"""Holdfast serves large language models on the memory a machine really has.

    from holdfast import LLM, SamplingParams, plan

Names are imported when they are first used, so that `import holdfast` stays cheap and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from holdfast.engine.async_llm_engine import AsyncLLMEngine
    from holdfast.engine.llm_engine import LLMEngine
    from holdfast.engine.offline.llm import LLM
    from holdfast.engine.offline.unsupported import ModelRegistry
    from holdfast.inputs import PromptType, TextPrompt, TokensPrompt
    from holdfast.planner.api import plan
    from holdfast.records import (
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        GuidedDecodingParams,
        LoRARequest,
        RequestOutput,
        SamplingParams,
        StructuredOutputsParams,
    )
    from holdfast.records.pooling import (
        ClassificationOutput,
        ClassificationRequestOutput,
        PoolingOutput,
        PoolingParams,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "GuidedDecodingParams",
    "LLMEngine",
    "LoRARequest",
    "ModelRegistry",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "plan",
]
_RECORDS = (
    "CompletionOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "GuidedDecodingParams", "LoRARequest",
    "RequestOutput", "SamplingParams", "StructuredOutputsParams",
)  # fmt: skip
_POOLED = (
    "ClassificationOutput", "ClassificationRequestOutput", "PoolingOutput", "PoolingParams", "PoolingRequestOutput",
    "ScoringOutput", "ScoringRequestOutput",
)  # fmt: skip
_INPUTS = ("PromptType", "TextPrompt", "TokensPrompt")


_ELSEWHERE = {
    "LLM": "holdfast.engine.offline.llm",
    "LLMEngine": "holdfast.engine.llm_engine",
    "ModelRegistry": "holdfast.engine.offline.unsupported",
    "AsyncLLMEngine": "holdfast.engine.async_llm_engine",
    "EngineArgs": "holdfast.engine.arg_utils",
    "AsyncEngineArgs": "holdfast.engine.arg_utils",
    **dict.fromkeys(_POOLED, "holdfast.records.pooling"),
    "plan": "holdfast.planner.api",
    **dict.fromkeys(_RECORDS, "holdfast.records"),
    **dict.fromkeys(_INPUTS, "holdfast.inputs"),
}


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    return getattr(importlib.import_module(_ELSEWHERE[name]), name)
