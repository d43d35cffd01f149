"""Which GPUs Holdfast, vLLM and SGLang have kernels for, by vendor, compute capability and quantization. Knows no plan.

Least capabilities as vLLM's own table of quantizations has them: Volta is 7.0, Turing 7.5, Ampere 8.0, Ada 8.9. FP8
weights are unpacked by Marlin from 8.0 on (by vLLM's newer releases from 7.5: vllm_features.py), and multiplied as they
are from 8.9 on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.footprint.gpu import LEAST_CAPABILITY
from holdfast.hardware.gpus import Gpu
from holdfast.planner.inputs.question import PlannedModel

Capability = tuple[int, int]
LEAST_OF_ENGINE: Mapping[str, Capability] = {"holdfast": LEAST_CAPABILITY, "vllm": (7, 5), "sglang": (7, 5)}
VOLTA = (7, 0)
VOLTA_LEFT = (0, 20)
"""vLLM is built with CUDA 13 since, which has no Volta any more; for 7.2 (Xavier) it was never built."""
BUILT_SINCE: tuple[tuple[Capability, tuple[int, int, int]], ...] = (
    ((12, 1), (0, 10, 2)),
    ((12, 0), (0, 9, 2)),
    ((11, 0), (0, 20, 0)),
    ((10, 0), (0, 9, 0)),
)
"""The first release of vLLM whose packages have kernels for a GPU of that capability or a little more: those before are
built, as is the torch they need, for 9.0 at most. 12.1 is GB10's, on Arm; 11.0 came with CUDA 13."""
LEAST_OF_METHOD: Mapping[str, Capability] = {
    "fp8": (8, 0), "int4": (8, 0), "mxfp4": (8, 0), "awq": (7, 5), "int8": (7, 5), "gptq": (6, 0),
    "bitsandbytes": (7, 0),
}  # fmt: skip
LEAST_OF_INDEX = (9, 0)
"""Attention to few tokens that an index chooses (DeepSeek V3.2, GLM-5): vLLM 0.27 has it from Hopper on."""
LEAST_OF_FP8_KV = (8, 0)
"""FlashInfer reads it there; other attention needs units for it. vLLM's V0 engine unpacked it anywhere."""
GGUF_TYPES_READ = frozenset({
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS", "IQ4_NL",
})  # fmt: skip
"""As vLLM's list (quantization/gguf.py, to 0.23) and SGLang's have them: no ternary types, Q1_0, Q2_0, MXFP4, NVFP4."""
GGUF_IN_A_PLUGIN = (0, 24, 0)
"""vLLM reads GGUF with a package beside it since then."""
ENGINE_NAMES = {"holdfast": "Holdfast", "vllm": "vLLM", "sglang": "SGLang"}
MAKERS = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel", "apple": "Apple"}


def lacks_gguf_types(model: PlannedModel) -> str | None:
    """Why vLLM and SGLang cannot compute with what is in a GGUF: what they unpack of it is the same list in both."""
    layouts = {tensor.layout for tensor in (model.stored or {}).values()} if model.format == "gguf" else set()
    unread = sorted(layouts - GGUF_TYPES_READ)
    return f"it does not support {' and '.join(unread)} in a GGUF; llama.cpp does" if unread else None


def gguf_note(version: tuple[int, ...]) -> str:
    """Of vLLM."""
    needed = "; it needs the package vllm-gguf-plugin" if version >= GGUF_IN_A_PLUGIN else ""
    return f"its GGUF support is experimental and slower than its own formats{needed}"


def lacks_method(model: PlannedModel, gpus: Iterable[Gpu | None], *, but: str = "") -> str | None:
    """Why these GPUs cannot run what the model is quantized with; None: they can, or nothing is known against it.
    `but`: a method that is judged elsewhere."""
    quantization = model.spec.quantization
    least = LEAST_OF_METHOD.get(quantization.method) if quantization is not None else None
    if quantization is None or least is None or quantization.method == but:
        return None
    for gpu in gpus:
        if gpu is not None and gpu.compute_capability is not None and gpu.compute_capability < least:
            return f"{quantization.method.upper()} needs compute capability {_spelled(least)}; {_has(gpu)}"
    return None


def lacks_index(model: PlannedModel, gpus: Iterable[Gpu | None]) -> str | None:
    """Why these GPUs cannot attend as the model does."""
    if not any(layer.latent is not None and layer.latent.index_dim for layer in model.spec.layers):
        return None
    for gpu in gpus:
        if gpu is not None and gpu.compute_capability is not None and gpu.compute_capability < LEAST_OF_INDEX:
            return f"sparse attention with an indexer needs compute capability {_spelled(LEAST_OF_INDEX)}; {_has(gpu)}"
    return None


def lacks_fp8_kv(kv_dtype: str, gpus: Iterable[Gpu | None]) -> str | None:
    """Why KV in FP8 cannot be attended to on these GPUs."""
    for gpu in gpus if kv_dtype == "fp8" else ():
        if gpu is not None and gpu.compute_capability is not None and gpu.compute_capability < LEAST_OF_FP8_KV:
            return f"an FP8 KV cache needs compute capability {_spelled(LEAST_OF_FP8_KV)}; {_has(gpu)}"
    return None


def lacks_engine(engine: str, gpus: Iterable[Gpu | None], version: tuple[int, ...] | None = None) -> str | None:
    """Why the engine does not run on these GPUs at all; of vLLM by release, None being the newest."""
    gpus = list(gpus)
    if engine == "vllm" and version is not None:
        newer = next((found for gpu in gpus if gpu is not None and (found := _newer_than(version, gpu))), None)
        if newer is not None:
            return newer
    least = LEAST_OF_ENGINE[engine]
    had_volta = engine == "vllm" and version is not None and version < VOLTA_LEFT
    for gpu in gpus:
        if gpu is not None and had_volta and gpu.compute_capability == VOLTA:
            continue
        if gpu is not None and engine == "holdfast" and gpu.vendor != "nvidia":
            return f"Holdfast has kernels for NVIDIA GPUs only, and {gpu.key} is from {MAKERS[gpu.vendor]}"
        if gpu is not None and gpu.vendor == "apple":
            return f"{ENGINE_NAMES[engine]} has no kernels for Apple GPUs; llama.cpp has"
        if gpu is not None and gpu.vendor == "intel":
            return f"{ENGINE_NAMES[engine]} for Intel GPUs has to be built first; llama.cpp has kernels for them"
        if gpu is not None and gpu.compute_capability is not None and gpu.compute_capability < least:
            return f"{ENGINE_NAMES[engine]} needs compute capability {_spelled(least)}; {_has(gpu)}"
    return None


def _newer_than(version: tuple[int, ...], gpu: Gpu) -> str | None:
    capability = gpu.compute_capability
    since = next((first for least, first in BUILT_SINCE if capability is not None and capability >= least), None)
    if since is None or version >= since:
        return None
    most = next((least for least, first in reversed(BUILT_SINCE) if version >= first), (9, 0))
    release = ".".join(map(str, since))
    return f"this vLLM is built for compute capability up to {_spelled(most)}, {release} for more; {_has(gpu)}"


def build_note(engine: str, gpus: Iterable[Gpu | None]) -> str | None:
    """What has to be installed where it is not the usual package."""
    vendor = next((gpu.vendor for gpu in gpus if gpu is not None), "nvidia")
    return f"on AMD GPUs {ENGINE_NAMES[engine]} needs its ROCm build" if vendor == "amd" else None


def _has(gpu: Gpu) -> str:
    assert gpu.compute_capability is not None
    return f"{gpu.key} has {_spelled(gpu.compute_capability)}"


def _spelled(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"
