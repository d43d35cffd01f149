"""Where vLLM keeps these names, for code that imports them from there. Owns nothing."""

from holdfast.records import GuidedDecodingParams, SamplingParams, StructuredOutputsParams

__all__ = ["GuidedDecodingParams", "SamplingParams", "StructuredOutputsParams"]
