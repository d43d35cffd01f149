"""Whether --quantization is true of the checkpoint that is loaded, and what an unquantized one becomes meanwhile.

    asked                 unquantized           quantized so          quantized otherwise, or a GGUF file
    fp8, int4             quantized on the way  confirmed             refused
    awq, gptq, mxfp4 ...  refused               confirmed             refused
    gguf                  refused               refused               of a GGUF file: confirmed
    Q4_K_M, Q8_0, ...     refused               refused               of a file whose name says so: confirmed

For an engine that starts: `holdfast plan` plans with quantizations that nobody has made yet (quantize.py). Counts
nothing and reads no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.checkpoints.sources.select_files import quantization_of
from holdfast.config.parts.gguf_kinds import kind_of
from holdfast.config.parts.quantization import BITS_AND_INPUTS, KERNEL_NAMES, MADE_WHILE_LOADING, STORED_AS
from holdfast.errors import ConfigurationError
from holdfast.models import QuantSpec
from holdfast.observability.decisions import Decision

MISMATCH = "HF144"
_WHILE_LOADING = {
    "fp8": "the checkpoint is unquantized: its linear layers become FP8 while they are loaded, a scale for each row",
    "int4": "the checkpoint is unquantized: its linear layers become 4-bit integers while they are loaded, a scale for"
    " each 128 weights of a row; a checkpoint made with AWQ or GPTQ loses less",
}
_CONFIGS = {
    **dict.fromkeys(("compressed-tensors", "w4a16", "w8a16", "w8a8"), "compressed-tensors"),
    "modelopt": "modelopt",
    "auto-round": "auto-round",
    "inc": "auto-round",
}
"""Names of a way to write configs, or of what only that can say: the quant_method that each is true of."""
_EIGHT_BITS = ("int8", "w8a8", "w8a16")


@dataclass(frozen=True, slots=True)
class Requested:
    made: Literal["fp8", "int4"] | None = None
    """What matrices of an unquantized checkpoint become while they are loaded; None: they stay as they are stored."""
    decisions: tuple[Decision, ...] = ()


def requested(asked: str | None, stored: QuantSpec | None, *, gguf: bool, name: str) -> Requested:
    """`asked` as `config.quantization` names it; `stored`: what the checkpoint says; `name` of the model. Raises
    ConfigurationError."""
    if asked is None:
        return Requested()
    family = KERNEL_NAMES.get(asked, asked)
    if gguf or family == "gguf":
        if gguf and (family == "gguf" or quantization_of(name) == asked.upper()):
            return Requested()
        raise _mismatch(asked, "blocks of a GGUF file" if gguf else _described(stored), name)
    if stored is not None:
        if family not in STORED_AS or not true_of(family, stored):
            raise _mismatch(asked, _described(stored), name)
        return Requested(decisions=_alias(asked, family, stored.method))
    if family == "fp8":
        return Requested("fp8", (Decision("quantization", "fp8", _WHILE_LOADING["fp8"], "set"),))
    if family == "int4":
        return Requested("int4", (Decision("quantization", "int4", _WHILE_LOADING["int4"], "set"),))
    raise _not_quantized(asked, name)


def true_of(name: str, stored: QuantSpec) -> bool:
    """Whether a checkpoint is stored as a name of `STORED_AS` says."""
    written = _CONFIGS.get(name)
    if written is not None and stored.quant_method and stored.quant_method != written:
        return False
    ways = [one for one in (stored, *stored.others) if one.method in STORED_AS[name]]
    said = BITS_AND_INPUTS.get(name)
    return any(said is None or said == (one.bits, one.inputs != "plain") for one in ways)


def _alias(asked: str, family: str, method: str) -> tuple[Decision, ...]:
    if asked == family and asked != "moe_wna16":
        return ()
    reason = f"{asked} names a kernel of vLLM's for {method}; Holdfast has its own, and reads the checkpoint as it is"
    return (Decision("quantization", method, reason, "set"),)


def _methods(stored: QuantSpec) -> tuple[str, ...]:
    """Modules of one checkpoint may be quantized in several ways."""
    return tuple(dict.fromkeys(one.method for one in (stored, *stored.others)))


def _described(stored: QuantSpec | None) -> str:
    if stored is None:
        return "unquantized weights"
    return f"{' and '.join(_methods(stored))} weights, as its quantization_config says"


def _mismatch(asked: str, found: str, name: str) -> ConfigurationError:
    makes = KERNEL_NAMES.get(asked, asked) in MADE_WHILE_LOADING
    return ConfigurationError(
        f"--quantization {asked} does not match {name}, which has {found}",
        code=MISMATCH,
        needed="an unquantized checkpoint, or one that is stored so" if makes else f"a checkpoint stored as {asked}",
        found=found,
        fix="leave --quantization out: the checkpoint says how it is stored",
        field="quantization",
    )


def _not_quantized(asked: str, name: str) -> ConfigurationError:
    """Also of bitsandbytes, which vLLM makes while loading: four bits of another kind are what we make."""
    kind = kind_of(asked) if asked not in STORED_AS else None
    does = "quantizes no checkpoint while loading" if STORED_AS.get(asked) == ("bitsandbytes",) else None
    eight = asked in _EIGHT_BITS or (kind or "").startswith("Q8")
    instead = "fp8, which quantizes it to 8 bits while loading" if eight else "int4, which quantizes it to 4 bits"
    return ConfigurationError(
        f"--quantization {asked} {does or 'only says how one is stored'}, and {name} is unquantized",
        code=MISMATCH,
        needed=f"a checkpoint stored as {asked}" if kind is None else f"a GGUF file of type {asked}",
        found="unquantized weights",
        fix=f"--quantization {instead}" + ("" if eight else " while loading"),
        field="quantization",
    )
