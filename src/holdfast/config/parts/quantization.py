"""Values of --quantization, in vLLM's names: how a checkpoint is stored, or what it becomes while it is loaded.

    awq, gptq, fp8, gguf, ...        how the checkpoint is stored: confirmed, or refused where it says otherwise
    awq_marlin, gptq_bitblas, ...    the same: in vLLM they also name a kernel
    fp8, int4                        an unquantized checkpoint is quantized while it is loaded
    Q4_K_M, Q8_0, ...                a type of GGUF files: planned, and true of files that are named so
    aqlm, hqq, modelopt, ...         refused by name

Data and their parser, of `holdfast plan` and of engines alike. Knows no model: whether a name is true of a checkpoint
is asked where both are known.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Mapping
from typing import Any

from holdfast.config.parts.gguf_kinds import KINDS, kind_of
from holdfast.errors import ConfigurationError
from holdfast.units import shorten

STORED_AS: Mapping[str, tuple[str, ...]] = {
    "awq": ("awq",),
    "gptq": ("gptq",),
    "compressed-tensors": ("int4", "int8", "fp8", "nvfp4"),
    "fp8": ("fp8",),
    "bitsandbytes": ("bitsandbytes",),
    "nf4": ("bitsandbytes",),
    "mxfp4": ("mxfp4",),
    "gguf": (),
    "int4": ("int4",),
    "int8": ("int8",),
    "nvfp4": ("nvfp4",),
    "modelopt": ("nvfp4", "fp8"),
    "w4a16": ("int4",),
    "w8a16": ("int8", "fp8"),
    "w8a8": ("int8", "fp8"),
    "moe_wna16": ("awq", "gptq"),
    "auto-round": ("awq", "gptq"),
    "inc": ("awq", "gptq"),
}
"""Names that say how a checkpoint is stored, and the methods (`QuantSpec.method`) that each is true of. Whether such
a checkpoint can be read is another question."""
BITS_AND_INPUTS: Mapping[str, tuple[int, bool]] = {
    "nf4": (4, False),
    "w4a16": (4, False),
    "w8a16": (8, False),
    "w8a8": (8, True),
}
"""Names that say more than the method: the bits of a weight, and whether inputs are rounded to that too."""
READ_FORMATS = ("awq", "gptq", "auto-round", "compressed-tensors", "fp8", "bitsandbytes", "mxfp4")
"""Of safetensors, as their configs name them."""
MADE_WHILE_LOADING = ("fp8", "int4")
"""Of these, what an unquantized checkpoint is turned into."""
KERNEL_NAMES: Mapping[str, str] = {
    "awq_marlin": "awq", "auto_awq": "awq", "cpu_awq": "awq",
    "gptq_marlin": "gptq", "gptq_bitblas": "gptq", "auto_gptq": "gptq", "marlin": "gptq", "cpu_gptq": "gptq",
    "fbgemm_fp8": "fp8", "fp8_per_tensor": "fp8", "fp8_per_block": "fp8", "ptpc_fp8": "fp8",
    "gpt_oss_mxfp4": "mxfp4", "modelopt_fp4": "nvfp4", "petit_nvfp4": "nvfp4",
}  # fmt: skip
"""vLLM's names that choose a kernel, or how far a scale reaches, for one of those."""
_SPELLINGS = {
    "compressed_tensors": "compressed-tensors",
    "auto_round": "auto-round",
    "bnb": "bitsandbytes",
}
UNKNOWN_METHOD = "HF144"
_AS_STORED = ("", "auto", "none", "null")
_NO_FORMATS = ("nvfp4", "modelopt")
"""Known, so that a checkpoint that is stored so is refused for what it is; not advised."""
_UNREAD = frozenset({
    "aqlm", "bitblas", "deepspeedfp", "experts_int8", "fp_quant", "gptq_marlin_24", "hqq", "humming",
    "int8_per_channel_weight_only", "ipex", "modelopt_mixed",
    "modelopt_mxfp8", "mxfp6", "mxfp8", "neuron_quant", "online", "qqq", "quark", "rtn",
    "squeezellm", "torchao", "tpu_int8",
})  # fmt: skip
"""vLLM's other names, of one release or another."""
LEAVE_OUT = "leave --quantization out; with fp8 or int4 an unquantized model is quantized while loading"


def known_names() -> str:
    """By kind: all in one row are too many to read."""
    kinds = {
        "vLLM's ": [name for name, family in KERNEL_NAMES.items() if family not in _NO_FORMATS],
        "k-quants ": [name for name in KINDS if "_K" in name],
        "i-quants ": [name for name in KINDS if name.startswith("IQ")],
    }
    told = {name for names in kinds.values() for name in names}
    kinds["other GGUF "] = [name for name in KINDS if name not in told]
    formats = [name for name in STORED_AS if name not in _NO_FORMATS]
    rows = (kind + ", ".join(names) for kind, names in {"": formats, **kinds}.items())
    return ";\n          ".join(line for row in rows for line in textwrap.wrap(row, 100, break_on_hyphens=False))


def method(field: str, value: Any) -> str | None:
    """As it is written here; types of GGUF files as llama.cpp writes them. None: as the checkpoint says."""
    if not isinstance(value, str):
        raise _unknown(field, value)
    written = value.strip().lower()
    name = _SPELLINGS.get(written, written)
    if name in _AS_STORED:
        return None
    if name in STORED_AS or name in KERNEL_NAMES:
        return name
    kind = kind_of(written)
    if kind is None:
        raise _unknown(field, value)
    return kind


def as_planned(field: str, value: Any) -> str | None:
    """As somebody wrote it, if it is such a name: a plan repeats it."""
    return None if method(field, value) is None else str(value).strip()


def _unknown(field: str, value: Any) -> ConfigurationError:
    written = str(value).strip().lower()
    why, fix = ": no such method is known", LEAVE_OUT
    known = {name.lower(): name for name in (*STORED_AS, *KERNEL_NAMES, *_SPELLINGS, *KINDS)}
    if written.replace("-", "_") in {name.replace("-", "_") for name in _UNREAD}:
        why = ""
    elif near := difflib.get_close_matches(written, known, n=1):
        fix = f"did you mean --quantization {known[near[0]]}?"
    return ConfigurationError(
        f"{field} {shorten(str(value))} is not supported{why}",
        code=UNKNOWN_METHOD,
        needed=known_names(),
        found=shorten(str(value)),
        fix=fix,
        field="quantization",
    )
