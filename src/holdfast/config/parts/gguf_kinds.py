"""Kinds of GGUF files, as llama.cpp names them and --quantization takes them. Data: knows no file and no model."""

from __future__ import annotations

from collections.abc import Mapping

KINDS: Mapping[str, str] = {
    "Q4_0": "Q4_0", "Q4_1": "Q4_1", "Q5_0": "Q5_0", "Q5_1": "Q5_1", "Q8_0": "Q8_0",
    "Q2_K": "Q2_K", "Q2_K_S": "Q2_K", "Q3_K_S": "Q3_K", "Q3_K_M": "Q3_K", "Q3_K_L": "Q3_K", "Q4_K_S": "Q4_K",
    "Q4_K_M": "Q4_K", "Q5_K_S": "Q5_K", "Q5_K_M": "Q5_K", "Q6_K": "Q6_K",
    "IQ1_S": "IQ1_S", "IQ1_M": "IQ1_M", "IQ2_XXS": "IQ2_XXS", "IQ2_XS": "IQ2_XS", "IQ2_S": "IQ2_XS", "IQ2_M": "IQ2_S",
    "IQ3_XXS": "IQ3_XXS", "IQ3_XS": "IQ3_S", "IQ3_S": "IQ3_S", "IQ3_M": "IQ3_S", "IQ4_XS": "IQ4_XS", "IQ4_NL": "IQ4_NL",
    "Q1_0": "Q1_0", "Q2_0": "Q2_0", "TQ1_0": "TQ1_0", "TQ2_0": "TQ2_0",
    "MXFP4": "MXFP4", "MXFP4_MOE": "MXFP4", "NVFP4": "NVFP4",
    "F16": "F16", "BF16": "BF16", "F32": "F32",
}  # fmt: skip
"""What most matrices are stored as in each kind of file."""
_SHORT = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
"""As the quantizer itself reads the short names."""


def kind_of(asked: str) -> str | None:
    """As llama.cpp calls it; None: there is none of this name."""
    name = asked.strip().upper()
    name = _SHORT.get(name, name)
    return name if name in KINDS else None
