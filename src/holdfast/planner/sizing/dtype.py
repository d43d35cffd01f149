"""Chooses the compute dtype and the KV cache dtype where they are not set, each with its reason: one rule for CPUs, one
for GPUs, one for models that only other engines run. Counts no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import ConfigurationError
from holdfast.footprint.identity_key import Same
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision
from holdfast.planner.inputs.question import Device, Question
from holdfast.planner.sizing.engine_weights import engine_weights

_SHORT_NAMES = {"half": "float16", "float": "float32"}
_OUTGROW_HALF = ("gemma2", "gemma3")
"""Architectures whose activations pass 65,504, the largest number of float16."""


def asked_type(asked: str) -> str | None:
    """By its whole name; None: it is left to us."""
    return None if asked == "auto" else _SHORT_NAMES.get(asked, asked)


def outgrows_half(spec: ModelSpec) -> bool:
    return spec.architecture.lower().startswith(_OUTGROW_HALF)


def check_type(asked: str, spec: ModelSpec) -> None:
    if asked_type(asked) == "float16" and outgrows_half(spec):
        raise ConfigurationError(
            f"{spec.architecture} cannot run in float16: its activations overflow it",
            code="HF129",
            needed="dtype bfloat16 or float32",
            found=asked,
            fix="leave --dtype out",
            field="dtype",
        )


def cpu_type(stored: str, *, fast_bfloat16: bool, as_stored: bool = False) -> Decision:
    """`as_stored`: compiled kernels multiply quantized weights where they lie."""
    if stored == "float32":
        return Decision("dtype", "float32", "the model is stored in float32", "hardware")
    if fast_bfloat16 and as_stored:
        reason = "compiled kernels multiply quantized weights as they are, and compute in float32"
        return Decision("dtype", "float32", reason, "hardware")
    if fast_bfloat16:
        return Decision("dtype", "bfloat16", "this CPU multiplies bfloat16 in hardware", "hardware")
    reason = "this CPU has no bfloat16 instructions; emulation is many times slower"
    return Decision("dtype", "float32", reason, "hardware")


def other_engines_type(stored: str, engine: str, *, fast_bfloat16: bool) -> Decision:
    """On a CPU, of a model that this engine does not run: what the one takes that does."""
    value = "float16" if stored == "float16" else "bfloat16"
    how = "uses the model's dtype" if value == stored else f"uses half the width of the model's {stored}"
    if engine == "llama.cpp":
        how = "stores KV in 16 bits"
    reason = f"Holdfast does not run this model: {engine}, which does, {how}"
    if value == "bfloat16" and engine != "llama.cpp" and not fast_bfloat16:
        reason += "; this CPU has no bfloat16 instructions, and emulation is many times slower"
    return Decision("dtype", value, reason, "model")


def gpu_type(spec: ModelSpec, devices: Sequence[Device]) -> Decision:
    """The same on all of these."""
    stored = spec.stored_dtype
    lacking = next((device for device in devices if device.gpu is not None and not device.gpu.bf16), None)
    if outgrows_half(spec) and (lacking is not None or stored == "float16"):
        reason = "the model's activations overflow float16"
        if lacking is None:
            return Decision("dtype", "bfloat16", reason, "model")
        return Decision("dtype", "float32", f"{reason}, and {lacking.name} does not support bfloat16", "hardware")
    if stored == "float16":
        return Decision("dtype", "float16", "the model's dtype", "model")
    if lacking is not None:
        return Decision("dtype", "float16", f"{lacking.name} does not support bfloat16", "hardware")
    if stored == "bfloat16":
        return Decision("dtype", "bfloat16", "the model's dtype", "model")
    reason = f"half the width of the model's {stored}, and GPUs are built for it"
    return Decision("dtype", "bfloat16", reason, "planner")


def multiplied_as_stored(question: Question) -> bool:
    """Whether compiled kernels, which compute in float32, multiply quantized weights faster where they lie than torch
    does expanded ones."""
    machine, weights = question.machine, engine_weights(Same(question.model))
    if weights is None or not weights.quantized or not machine.compiled_kernels:
        return False
    if question.settings.expand_weights == "always":
        return False
    if weights.quantize is None and weights.spec.quantization is None:
        return machine.processor.fast_block_products
    return weights.compiles() and machine.processor.fast_code_products(whole_numbers=weights.in_whole_numbers())


def compute_dtype(question: Question, ranks: int = 1) -> str:
    """What the engine would compute in, and keep plain weights in: the same on all of the first `ranks` devices."""
    return asked_type(question.settings.dtype) or str(chosen_dtype(question, ranks).value)


def chosen_dtype(question: Question, ranks: int = 1) -> Decision:
    """Where it is left to us."""
    spec, devices = question.model.spec, question.machine.devices[:ranks]
    if devices[0].kind == "gpu":
        return gpu_type(spec, devices)
    fast = question.machine.processor.fast_bfloat16
    if not spec.runnable:
        engine = "llama.cpp" if question.model.format == "gguf" else "vLLM"
        return other_engines_type(spec.stored_dtype, engine, fast_bfloat16=fast)
    return cpu_type(spec.stored_dtype, fast_bfloat16=fast, as_stored=fast and multiplied_as_stored(question))


def kv_dtype(question: Question, ranks: int = 1) -> str:
    asked = question.settings.kv_cache_dtype
    return str(chosen_kv_dtype(question, ranks).value) if asked == "auto" else asked


def chosen_kv_dtype(question: Question, ranks: int = 1) -> Decision:
    """Where it is left to us: FP8 only where the checkpoint was made for it."""
    if question.model.spec.kv_cache_fp8:
        return Decision("kv_cache_dtype", "fp8", "the checkpoint's kv_cache_scheme", "model")
    return Decision("kv_cache_dtype", compute_dtype(question, ranks), "same as dtype", "default")


def is_fp8(kv_dtype: str) -> bool:
    return kv_dtype.startswith("fp8")
