"""Where vLLM keeps this name, for code that imports it from there. Owns nothing."""

from holdfast.records.pooling import PoolingParams

__all__ = ["PoolingParams"]
