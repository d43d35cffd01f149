"""Which tensors of a model its quantizer took, and how each of them is packed. Knows shapes and names, no bytes."""

from __future__ import annotations

from holdfast.checkpoints.formats.quantized_tensors import Packing
from holdfast.models import QuantSpec, TensorSpec


def packing_of(quantization: QuantSpec, tensor: TensorSpec, dtype: str) -> Packing | None:
    """How the quantizer stored this tensor; None: it left it alone."""
    if not tensor.linear and not tensor.experts:
        return None
    if not quantization.converts(tensor.hf_name):
        return None
    if len(tensor.shape) < 2:
        return None
    method = quantization.method
    if method == "mxfp4":
        # gpt-oss: only its experts.
        return Packing("mxfp4") if tensor.experts else None
    if method == "bitsandbytes":
        method_name = "nf4" if quantization.bits == 4 else "bnb-int8"
        return Packing(method_name, nested=quantization.double_quantization, dtype=dtype)
    if method == "int4":
        return Packing(
            "pack-quantized",
            bits=4,
            group_size=quantization.group_size or -1,
            symmetric=quantization.symmetric,
            act_order=quantization.activation_order,
        )
    if method in ("int8", "fp8"):
        return Packing(
            method,
            granularity=quantization.granularity,
            group_size=quantization.group_size or -1,
            block=quantization.block,
            symmetric=quantization.symmetric or method == "fp8",
            act_order=quantization.activation_order,
            static_inputs=quantization.static_activations,
        )
    return Packing(method, bits=quantization.bits, group_size=quantization.group_size or -1)
