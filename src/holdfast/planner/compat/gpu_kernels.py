"""Which GPUs Holdfast, vLLM and SGLang have kernels for, by vendor, compute capability and quantization. Knows no plan.

Least capabilities are in the engines' profiles: Volta is 7.0, Turing 7.5, Ampere 8.0, Ada 8.9. FP8 weights are unpacked
by Marlin from 8.0 on (by vLLM's newer releases from 7.5: vllm_features.py), and multiplied as they are from 8.9 on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.engine_profiles.profile import Release, profile, release_of, spelled_release
from holdfast.footprint.gpu import LEAST_CAPABILITY
from holdfast.hardware.gpus import Gpu
from holdfast.planner.inputs.question import PlannedModel

VOLTA = (7, 0)
GGUF_TYPES_READ = frozenset({
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS", "IQ4_NL",
})  # fmt: skip
"""As vLLM's list (quantization/gguf.py, to 0.23) and SGLang's have them: no ternary types, Q1_0, Q2_0, MXFP4, NVFP4."""
MAKERS = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel", "apple": "Apple"}


def lacks_gguf_types(model: PlannedModel) -> str | None:
    """Why vLLM and SGLang cannot compute with what is in a GGUF: what they unpack of it is the same list in both."""
    layouts = {tensor.layout for tensor in (model.stored or {}).values()} if model.format == "gguf" else set()
    unread = sorted(layouts - GGUF_TYPES_READ)
    return f"it does not support {' and '.join(unread)} in a GGUF; llama.cpp does" if unread else None


def lacks_method(model: PlannedModel, gpus: Iterable[Gpu | None], engine: str = "sglang") -> str | None:
    """Why these GPUs cannot run what the model is quantized with; None: they can, or nothing is known against it. FP8
    in vLLM depends on its release: vllm_features.py."""
    method = "" if model.spec.quantization is None else model.spec.quantization.method
    return lacks_capability(method.upper(), gpus, profile(engine).data["gpus"]["quantization"].get(method, ()))


def lacks_capability(what: str, gpus: Iterable[Gpu | None], least: Sequence[int]) -> str | None:
    """Why one of these GPUs cannot do something that needs a compute capability; nothing is known of others than
    NVIDIA's."""
    for gpu in gpus:
        if gpu is not None and gpu.compute_capability is not None and gpu.compute_capability < tuple(least):
            return f"{what} needs compute capability {spelled_release(tuple(least))}; {_has(gpu)}"
    return None


def lacks_engine(engine: str, gpus: Iterable[Gpu | None], version: Release | None = None) -> str | None:
    """Why the engine does not run on these GPUs at all; of vLLM by release, None being the newest."""
    there, known = [gpu for gpu in gpus if gpu is not None], profile(engine)
    if engine == "llama.cpp":  # It has kernels for every GPU of the catalogue.
        return None
    if engine == "vllm" and version is not None:
        newer = next((said for gpu in there if (said := _newer_than(version, gpu)) is not None), None)
        if newer is not None:
            return newer
        if known.has("volta", version):
            there = [gpu for gpu in there if gpu.compute_capability != VOLTA]
    for gpu in there:
        if engine == "holdfast" and gpu.vendor != "nvidia":
            return f"Holdfast has kernels for NVIDIA GPUs only, and {gpu.key} is from {MAKERS[gpu.vendor]}"
        if gpu.vendor == "apple":
            return f"{known.name} has no kernels for Apple GPUs; llama.cpp has"
        if gpu.vendor == "intel":
            return f"{known.name} for Intel GPUs has to be built first; llama.cpp has kernels for them"
    least = LEAST_CAPABILITY if engine == "holdfast" else known.data["gpus"]["least-capability"]
    return lacks_capability(known.name, there, least)


def _newer_than(version: Release, gpu: Gpu) -> str | None:
    """Why this vLLM's packages have no kernels for a GPU that came after them."""
    rows = profile("vllm").data["gpus"]["built-since"].items()
    built = [(release_of(least), release_of(first)) for least, first in rows]
    able = [(least, first) for least, first in built if least <= (gpu.compute_capability or ())]
    if not able or version >= able[0][1]:
        return None
    most = next((least for least, first in able if version >= first), (9, 0))
    needed = f"up to {spelled_release(most)}, {spelled_release(able[0][1])} for more"
    return f"this vLLM is built for compute capability {needed}; {_has(gpu)}"


def build_note(engine: str, gpus: Iterable[Gpu | None]) -> str | None:
    """What has to be installed where it is not the usual package."""
    vendor = next((gpu.vendor for gpu in gpus if gpu is not None), "nvidia")
    return f"on AMD GPUs {profile(engine).name} needs its ROCm build" if vendor == "amd" else None


def _has(gpu: Gpu) -> str:
    return f"{gpu.key} has {spelled_release(gpu.compute_capability or ())}"
