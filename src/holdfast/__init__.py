"""Holdfast serves large language models on the memory a machine really has.

    from holdfast import LLM, SamplingParams, plan

Names are imported when they are first used, so that `import holdfast` stays cheap and needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.engine.llm import LLM
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

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "GuidedDecodingParams",
    "LoRARequest",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
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
_INPUTS = ("PromptType", "TextPrompt", "TokensPrompt")


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from holdfast.engine.llm import LLM

        return LLM
    if name in _RECORDS:
        from holdfast import records

        return getattr(records, name)
    if name in _INPUTS:
        from holdfast import inputs

        return getattr(inputs, name)
    if name == "plan":
        from holdfast.planner.api import plan

        return plan
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
