"""Where vLLM keeps this name, for code that imports it from there. Owns nothing."""

from holdfast.engine.async_llm_engine import AsyncLLM

__all__ = ["AsyncLLM"]
