"""What a checkpoint says of keys and values: compressed-tensors' kv_cache_scheme. Knows no weights and no scales."""

from __future__ import annotations

from holdfast.models.fields import Fields


def kv_cache_fp8(config: Fields) -> bool:
    """Whether they are to be kept in FP8; any other scheme is refused by what it says."""
    table = config.table("quantization_config") or config.table("compression_config")
    scheme = None if table is None else table.table("kv_cache_scheme")
    if scheme is None:
        return False
    kind, bits = scheme.text("type", default="int"), scheme.integer("num_bits", high=64, default=8)
    if (kind, bits) != ("float", 8):
        raise scheme.wrong("type", "float with 8 bits", f"{kind} with {bits}")
    strategy = scheme.text("strategy", default="tensor")
    if strategy != "tensor":
        raise scheme.wrong("strategy", "tensor: one scale a layer", strategy)
    return True
