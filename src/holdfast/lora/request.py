"""Where vLLM keeps LoRARequest, for code that imports it from there. Owns nothing."""

from holdfast.records import LoRARequest

__all__ = ["LoRARequest"]
