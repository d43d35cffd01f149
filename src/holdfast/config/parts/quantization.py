"""Values of --quantization, in vLLM's names: how a checkpoint is stored, or what it becomes while it is loaded.

    awq, gptq, fp8, gguf, ...        how the checkpoint is stored: confirmed, or refused where it says otherwise
    awq_marlin, gptq_bitblas, ...    the same: in vLLM they also name a kernel
    fp8, int4                        an unquantized checkpoint is quantized while it is loaded
    aqlm, hqq, modelopt, ...         refused by name

Data and their parser. Knows no model: whether a name is true of a checkpoint is asked where both are known.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from holdfast.errors import ConfigurationError
from holdfast.units import shorten

STORED_AS: Mapping[str, tuple[str, ...]] = {
    "awq": ("awq",),
    "gptq": ("gptq",),
    "compressed-tensors": ("int4", "int8", "fp8"),
    "fp8": ("fp8",),
    "bitsandbytes": ("bitsandbytes",),
    "mxfp4": ("mxfp4",),
    "gguf": (),
    "int4": ("int4",),
    "moe_wna16": ("awq", "gptq"),
    "auto-round": ("awq", "gptq"),
    "inc": ("awq", "gptq"),
}
"""Names that say how a checkpoint is stored, and the methods (`QuantSpec.method`) that each is true of."""
READ_FORMATS = ("awq", "gptq", "auto-round", "compressed-tensors", "fp8", "bitsandbytes", "mxfp4")
"""Of safetensors, as their configs name them."""
MADE_WHILE_LOADING = ("fp8", "int4")
"""Of these, what an unquantized checkpoint is turned into."""
KERNEL_NAMES: Mapping[str, str] = {
    "awq_marlin": "awq", "auto_awq": "awq", "cpu_awq": "awq",
    "gptq_marlin": "gptq", "gptq_bitblas": "gptq", "auto_gptq": "gptq", "marlin": "gptq", "cpu_gptq": "gptq",
    "fbgemm_fp8": "fp8", "fp8_per_tensor": "fp8", "fp8_per_block": "fp8", "ptpc_fp8": "fp8",
    "gpt_oss_mxfp4": "mxfp4",
}  # fmt: skip
"""vLLM's names that choose a kernel, or how far a scale reaches, for one of those."""
_SPELLINGS = {
    "compressed_tensors": "compressed-tensors",
    "auto_round": "auto-round",
    "bnb": "bitsandbytes",
    "nf4": "bitsandbytes",
    "w4a16": "compressed-tensors",
    "w8a8": "compressed-tensors",
    "w8a16": "compressed-tensors",
}
_GGUF_TYPE = re.compile(r"(?:i?q|tq)\d\w*")
_AS_STORED = ("", "auto", "none", "null")
_UNREAD = frozenset({
    "aqlm", "bitblas", "deepspeedfp", "experts_int8", "fp_quant", "gptq_marlin_24", "hqq", "humming",
    "int8", "int8_per_channel_weight_only", "ipex", "modelopt", "modelopt_fp4", "modelopt_mixed",
    "modelopt_mxfp8", "mxfp6", "mxfp8", "neuron_quant", "nvfp4", "online", "petit_nvfp4", "qqq", "quark", "rtn",
    "squeezellm", "torchao", "tpu_int8",
})  # fmt: skip
"""vLLM's other names, of one release or another."""
RUNS_INSTEAD = (
    "a copy of the model in AWQ, GPTQ, FP8, compressed-tensors or GGUF; or the unquantized model, which"
    " --quantization int4 or fp8 quantizes while loading"
)
"""For whoever has a checkpoint that is not read, or asks for a method that is not there."""


def method(field: str, value: Any) -> str | None:
    """As it is written here; None: as the checkpoint says."""
    if not isinstance(value, str):
        raise _unknown(field, value)
    written = value.strip().lower()
    name = _SPELLINGS.get(written, written)
    if name in _AS_STORED:
        return None
    if name not in STORED_AS and name not in KERNEL_NAMES:
        raise _unknown(field, value)
    return name


def _unknown(field: str, value: Any) -> ConfigurationError:
    written = str(value).strip().lower()
    why, fix = ": no such method is known", f"{RUNS_INSTEAD}; else leave it out"
    if written.replace("-", "_") in {name.replace("-", "_") for name in _UNREAD}:
        why = ""
    elif _GGUF_TYPE.fullmatch(written):
        why, fix = ": it is a type of GGUF files", f"name such a file instead, or owner/name-GGUF:{written.upper()}"
    elif near := difflib.get_close_matches(written, (*STORED_AS, *KERNEL_NAMES), n=1):
        fix = f"did you mean --quantization {near[0]}?"
    return ConfigurationError(
        f"{field} {shorten(str(value))} is not supported{why}",
        needed="one of " + ", ".join((*READ_FORMATS, "gguf", "int4")),
        found=shorten(str(value)),
        fix=fix,
        field="quantization",
    )
