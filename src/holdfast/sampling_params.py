"""Where vLLM keeps these names, for code that imports them from there. Owns nothing."""

from holdfast.records import GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from holdfast.records.beams import BeamSearchParams, RequestOutputKind

__all__ = ["BeamSearchParams", "GuidedDecodingParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
