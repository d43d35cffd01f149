"""Since which release vLLM has what a plan needs of it: architectures, quantizations, GGUF, stages, prompts in chunks.

The releases are in its profile; which of them a plan comes to is decided here. Knows no memory; which GPUs a release
runs on is in gpu_kernels.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.engine_profiles.profile import Release, profile, release_of, spelled_release
from holdfast.models import ModelSpec, QuantSpec
from holdfast.planner.compat.gpu_kernels import lacks_capability
from holdfast.planner.compat.vllm_release import Vllm
from holdfast.planner.engines.vllm_kv import expands_latents
from holdfast.planner.fit.search import Plan
from holdfast.planner.models.model_sources import ModelSource
from holdfast.planner.models.variants import published_as


def lacks_features(found: Plan, source: ModelSource, vllm: Vllm) -> list[str]:
    return [
        f"{what} in vLLM since {spelled_release(first)}, and not in {vllm.release}"
        for what, first in _features(found, source)
        if vllm.at < first
    ]


def features_since(found: Plan, source: ModelSource, vllm: Vllm) -> list[str]:
    """What to say where only some releases of the version have it, and none was named."""
    needed = _features(found, source)
    return [f"{what} in vLLM since {spelled_release(first)}" for what, first in needed if vllm.in_part(first)]


def _features(found: Plan, source: ModelSource) -> Iterator[tuple[str, Release]]:
    """What the plan needs, and the first release that has it."""
    model, known = found.question.model, profile("vllm")
    architecture = model.spec.architecture
    yield from spec_features(model.spec)
    if model.format == "gguf":
        yield "GGUF:", known.feature("gguf")
        if model.origin == "hub" and not source.name.endswith(".gguf"):
            yield "a GGUF by its name at the hub:", known.feature("gguf-by-name")
    elif model.spec.quantization is not None:
        stored = published_as(model)
        quantization = model.spec.quantization if stored is None else stored.spec.quantization
        if quantization is not None:
            yield from _quantized(found, quantization, "--quantization" in source.flags)
    if found.pipeline_parallel > 1:
        first = known.since("stages", architecture) or known.feature("pipeline-stages")
        yield f"pipeline stages of {architecture}:", first


def spec_features(spec: ModelSpec) -> Iterator[tuple[str, Release]]:
    """Of the model itself, whatever it is stored in; what the oldest known release has is left out."""
    for what, first in (
        (spec.architecture, profile("vllm").since("architectures", spec.architecture)),
        (f"RoPE scaling {spec.rope.scaling}", profile("vllm").since("rope-scaling", spec.rope.scaling)),
    ):
        if first is not None:
            yield f"{what} is", first


def _quantized(found: Plan, quantization: QuantSpec, made: bool) -> Iterator[tuple[str, Release]]:
    method, known = quantization.method, profile("vllm")
    stored = _fp8_kind(quantization) if method == "fp8" else method
    first = known.since("quantization-made", method) if made else known.since("quantization-stored", stored)
    if first is not None:
        name = method if method == "bitsandbytes" else method.upper()
        yield f"{name} {'made while loading' if made else 'weights'}:", first
    if method == "bitsandbytes" and (found.tensor_parallel > 1 or found.pipeline_parallel > 1):
        feature = "bitsandbytes-split" if made or found.tensor_parallel == 1 else "bitsandbytes-split-stored"
        yield "bitsandbytes over several GPUs:", known.feature(feature)


def _fp8_kind(quantization: QuantSpec) -> str:
    """By how many weights share a scale, which tells who made it: FBGEMM leaves the head alone."""
    if quantization.granularity == "block":
        return "fp8-blocks"
    if quantization.head_converted:
        return "fp8-compressed-tensors"
    return "fp8-fbgemm" if quantization.granularity == "channel" else "fp8"


def lacks_fp8_units(found: Plan, vllm: Vllm) -> str | None:
    """Why a release cannot compute with FP8 weights on these GPUs, and since when one can."""
    quantization = found.question.model.spec.quantization
    if quantization is None or quantization.method != "fp8":
        return None
    kind = _fp8_kind(quantization)
    rows, least = profile("vllm").data["by-release"][kind], tuple(vllm.value(kind))
    for gpu in (rank.device.gpu for rank in found.ranks):
        has = None if gpu is None else gpu.compute_capability
        if gpu is None or has is None or has >= least:
            continue
        first = next((first for first, pair in reversed(rows.items()) if has >= tuple(pair)), None)
        if first is None:  # In no release.
            return lacks_capability("FP8", [gpu], next(iter(rows.values())))
        needed = f"FP8 needs compute capability {spelled_release(least)} in vLLM {vllm.release}"
        return f"{needed}; {gpu.key} has {spelled_release(has)}, enough since {spelled_release(release_of(first))}"
    return None


def leaves_v1(found: Plan, kv_dtype: str, vllm: Vllm) -> str | None:
    """Where its V1 engine goes over to V0 because of KV in FP8: what is said of V1 is not what runs."""
    if kv_dtype != "fp8" or vllm.runner != "v1" or vllm.has("v1-alone"):
        return None
    if vllm.has("latents-in-fp8") and any(layer.latent is not None for layer in found.question.model.spec.layers):
        return None
    capabilities = [rank.device.gpu.compute_capability for rank in found.ranks if rank.device.gpu is not None]
    if all(one is None or one[0] in vllm.value("kv-fp8-in-v1") for one in capabilities):
        return None
    return (
        f"the V1 engine of {vllm.release} has no FP8 KV cache on this GPU, and falls back to V0:"
        f" --for vllm=={vllm.release}:v0 sizes that"
    )


def lora_rank(rank: int, vllm: Vllm) -> int | None:
    """The smallest that it takes and that holds this one; None: there is none."""
    return next((size for size in vllm.value("lora-ranks") if rank <= size), None)


def can_chunk(found: Plan, vllm: Vllm) -> bool:
    """Whether its V0 engine can be told to read a prompt in several steps."""
    spec = found.question.model.spec
    latents = any(layer.latent is not None for layer in spec.layers) and not expands_latents(spec, vllm)
    needed = {"chunked-prefill": True, "chunked-prefill-with-latents": latents}
    needed["chunked-prefill-with-adapters"] = found.question.settings.max_loras > 0
    return all(vllm.has(feature) for feature, matters in needed.items() if matters)
