"""What a checkpoint says of keys and values: compressed-tensors' kv_cache_scheme. Knows no weights and no scales."""

from __future__ import annotations

from holdfast.models.fields import Fields


def kv_cache_fp8(config: Fields) -> bool:
    """Whether they are to be kept in FP8. Another scheme is not followed: keys and values then have the dtype of the
    model, which is never less exact."""
    table = config.table("quantization_config") or config.table("compression_config")
    scheme = None if table is None else table.table("kv_cache_scheme")
    if scheme is None:
        return False
    kind, bits = scheme.text("type", default="int"), scheme.integer("num_bits", high=64, default=8)
    return (kind, bits) == ("float", 8) and scheme.text("strategy", default="tensor") == "tensor"
