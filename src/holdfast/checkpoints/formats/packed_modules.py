"""Which tensors of a model its quantizer took, and how each of them is packed. Knows shapes and names, no bytes."""

from __future__ import annotations

from holdfast.checkpoints.formats.quantized_tensors import Packing
from holdfast.models import QuantSpec, TensorSpec


def packing_of(quantization: QuantSpec, tensor: TensorSpec, dtype: str) -> Packing | None:
    """How the quantizer stored this tensor; None: it left it alone."""
    if not tensor.linear or len(tensor.shape) < 2:
        return None
    scheme = quantization.scheme_of(tensor.hf_name, tensor.experts)
    if scheme is None or (scheme.method == "mxfp4" and not tensor.experts):  # gpt-oss: only its experts.
        return None
    return _packing(scheme, dtype)


def _packing(scheme: QuantSpec, dtype: str) -> Packing:
    if scheme.method == "mxfp4":
        return Packing("mxfp4")
    if scheme.method == "nvfp4":
        return Packing("nvfp4", static_inputs=scheme.static_activations)
    if scheme.method == "bitsandbytes":
        name = "nf4" if scheme.bits == 4 else "bnb-int8"
        return Packing(name, nested=scheme.double_quantization, dtype=dtype)
    group = scheme.group_size or -1
    if scheme.method in ("awq", "gptq"):
        return Packing(
            scheme.method,
            bits=scheme.bits,
            group_size=group,
            symmetric=scheme.symmetric,
            act_order=scheme.activation_order,
            zeros_less_one=scheme.zeros_less_one,
        )
    packed = scheme.method == "int4" or scheme.packed
    return Packing(
        "pack-quantized" if packed else scheme.method,
        bits=scheme.bits if packed else 4,
        granularity=None if packed else scheme.granularity,
        group_size=group,
        block=scheme.block if scheme.granularity == "block" else (128, 128),
        symmetric=scheme.symmetric or scheme.method == "fp8",
        act_order=scheme.activation_order,
        inputs=scheme.inputs,
        input_group=scheme.input_group,
        input_bound=scheme.input_bound,
        input_powers=scheme.input_powers,
        static_inputs=scheme.static_activations,
    )
