"""Where vLLM keeps `LLM`, for code that imports it from there. Owns nothing."""

from holdfast.engine.offline.llm import LLM

__all__ = ["LLM"]
