"""Since which release vLLM has what a plan asks of it, as its source at each tag has it: quantizations, GGUF, KV in
FP8, stages, prompts in chunks, ranks of adapters, sizes of KV blocks.

Knows no memory. Which architectures a release has is in architectures.py, which GPUs in gpu_kernels.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from holdfast.hardware.gpus import Gpu
from holdfast.models import QuantSpec
from holdfast.planner.compat.architectures import since
from holdfast.planner.compat.vllm_release import Release, Vllm, spelled
from holdfast.planner.engines.vllm_kv import expands_latents
from holdfast.planner.fit.search import Fit
from holdfast.planner.models.model_sources import ModelSource
from holdfast.planner.models.variants import published_as

T = TypeVar("T")
MADE_SINCE: Mapping[str, Release] = {"fp8": (0, 4, 1), "bitsandbytes": (0, 5, 0)}
"""Of a plain checkpoint, while it is loaded."""
STORED_SINCE: Mapping[str, Release] = {
    "fp8": (0, 4, 2),
    "int8": (0, 5, 1),
    "int4": (0, 5, 1),
    "bitsandbytes": (0, 5, 4),
    "mxfp4": (0, 10, 1),
}
"""Of a checkpoint that is quantized already. INT8 and INT4 are compressed-tensors with a scale for each row or group;
AWQ and GPTQ are older than what is known here."""
FP8_OF_COMPRESSED_TENSORS: Release = (0, 5, 2)
FP8_OF_FBGEMM: Release = (0, 5, 3)
FP8_IN_BLOCKS: Release = (0, 6, 6)
FP8_LEAST: tuple[tuple[Release, tuple[int, int]], ...] = (
    ((0, 5, 1), (8, 0)),
    ((0, 4, 2), (8, 9)),
    ((0, 0, 0), (9, 0)),
)
"""The least compute capability for FP8 weights; since the first Marlin unpacks them where nothing multiplies them."""
FP8_ON_TURING, COMPRESSED_FP8_ON_TURING = (0, 14, 0), (0, 16, 0)
"""Marlin does so on 7.5 too, but not for FBGEMM's: vLLM's own, and compressed-tensors' two releases later."""
TURING = (7, 5)
SPLIT_BITSANDBYTES: Release = (0, 6, 2)
SPLIT_STORED_BITSANDBYTES: Release = (0, 10, 0)
"""Over tensor parallel ranks; over stages as what is made while loading."""
EAGER_BITSANDBYTES: tuple[Release, Release] = ((0, 5, 4), (0, 5, 5))
"""From the first to before the second it stops unless it is told to capture no graphs."""
FINDS_BITSANDBYTES: Release = (0, 9)
"""Before it, what it is to make with bitsandbytes had to be named as a format to load too."""
CHUNKS: Release = (0, 5)
"""All of them have --enable-chunked-prefill; 0.4.0 has not."""
CHUNKS_WITH_ADAPTERS: Release = (0, 7)
CHUNKS_WITH_LATENTS: Release = (0, 8)
GGUF: Release = (0, 5, 5)
GGUF_OF_THE_HUB: Release = (0, 12, 0)
"""As repository:type; before, as a file only."""
KV_CALLED_FP8: Release = (0, 4, 1)
KV_BEFORE = "fp8_e5m2"
KV_IN_V1: tuple[tuple[Release, tuple[int, ...]], ...] = (((0, 10, 0), (9, 10)), ((0, 8, 3), (9,)), ((0, 0, 0), ()))
"""NVIDIA's GPUs, by the first digit of their capability, where its V1 engine keeps KV in FP8; on others it went over to
V0 while it had it."""
V0_LEFT: Release = (0, 11, 0)
LATENTS_IN_FP8: Release = (0, 10, 2)
STAGES: Release = (0, 5, 1)
STAGES_OF: Mapping[str, Release] = {
    **dict.fromkeys(
        ("LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "GPT2LMHeadModel", "InternLMForCausalLM"), STAGES
    ),
    "MixtralForCausalLM": (0, 5, 3), "DeepseekV2ForCausalLM": (0, 5, 4), "NemotronForCausalLM": (0, 5, 4),
    "Qwen2ForCausalLM": (0, 5, 4), "Qwen2MoeForCausalLM": (0, 5, 4), "InternLM2ForCausalLM": (0, 6, 1),
    "Qwen2VLForConditionalGeneration": (0, 6, 2),
}  # fmt: skip
STAGES_OF_OTHERS: Release = (0, 6, 3)
"""It went by a list of architectures before."""
LORA_RANKS: tuple[tuple[Release, tuple[int, ...]], ...] = (
    ((0, 8, 0), (8, 16, 32, 64, 128, 256, 320, 512)), ((0, 5, 5), (8, 16, 32, 64, 128, 256)),
    ((0, 0, 0), (8, 16, 32, 64)),
)  # fmt: skip
"""Ranks of adapters that it takes; another is served in slots of the next larger one."""
BLOCK_TOKENS: tuple[tuple[Release, tuple[int, ...]], ...] = (
    ((0, 11, 1), (8, 16, 32, 64, 128, 256)), ((0, 7, 0), (8, 16, 32, 64, 128)), ((0, 6, 5), (8, 16, 32)),
    ((0, 6, 4), (8, 16, 32, 64, 128)), ((0, 4, 1), (8, 16, 32)), ((0, 0, 0), (8, 16, 32, 128)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Feature:
    """That a plan asks for."""

    name: str
    first: Release


def lacks_features(found: Fit, source: ModelSource, vllm: Vllm) -> Iterator[str]:
    for one in _features(found, source):
        if vllm.at < one.first:
            yield f"{one.name}: in vLLM since {spelled(one.first)}, and not in {vllm.release}"


def features_since(found: Fit, source: ModelSource, vllm: Vllm) -> Iterator[str]:
    """What to say where only some releases of the version have it, and none was named."""
    for one in _features(found, source):
        if since(one.first, vllm):
            yield f"{one.name}: in vLLM since {spelled(one.first)}"


def _features(found: Fit, source: ModelSource) -> Iterator[Feature]:
    model = found.question.model
    if model.format == "gguf":
        yield Feature("GGUF", GGUF)
        if model.origin == "hub" and not source.name.endswith(".gguf"):
            yield Feature("a GGUF by its name at the hub", GGUF_OF_THE_HUB)
    elif model.spec.quantization is not None:
        made = "--quantization" in source.flags
        stored = published_as(model)
        yield from _quantized(found, model.spec.quantization if stored is None else stored.spec.quantization, made)
    if found.pipeline_parallel > 1:
        architecture = model.spec.architecture
        yield Feature(f"pipeline stages of {architecture}", STAGES_OF.get(architecture, STAGES_OF_OTHERS))


def _quantized(found: Fit, quantization: QuantSpec | None, made: bool) -> Iterator[Feature]:
    if quantization is None:
        return
    method, how = quantization.method, "made while loading" if made else "weights"
    first = MADE_SINCE[method] if made else STORED_SINCE.get(method)
    if method == "fp8" and not made:
        first = _stored_fp8(quantization)
    if first is not None:
        name = "bitsandbytes" if method == "bitsandbytes" else method.upper()
        yield Feature(f"{name} {how}", first)
    if method == "bitsandbytes" and (found.tensor_parallel > 1 or found.pipeline_parallel > 1):
        stored = not made and found.tensor_parallel > 1
        yield Feature("bitsandbytes over several GPUs", SPLIT_STORED_BITSANDBYTES if stored else SPLIT_BITSANDBYTES)


def _stored_fp8(quantization: QuantSpec) -> Release:
    """By how many weights share a scale, which tells who made it: FBGEMM leaves the head alone."""
    if quantization.granularity == "block":
        return FP8_IN_BLOCKS
    if quantization.head_converted:
        return FP8_OF_COMPRESSED_TENSORS
    return FP8_OF_FBGEMM if quantization.granularity == "channel" else STORED_SINCE["fp8"]


def lacks_fp8_units(found: Fit, vllm: Vllm) -> str | None:
    """Why a release cannot compute with FP8 weights on these GPUs, and since when one can."""
    quantization = found.question.model.spec.quantization
    if quantization is None or quantization.method != "fp8":
        return None
    table = _fp8_least(quantization)
    least = _at(table, vllm)
    for gpu in _gpus(found):
        if gpu.compute_capability is None or gpu.compute_capability >= least:
            continue
        has, needed, most = (".".join(map(str, pair)) for pair in (gpu.compute_capability, least, table[0][1]))
        if gpu.compute_capability < table[0][1]:
            return f"FP8 needs compute capability {most}; {gpu.key} has {has}"
        since_when = spelled(next(first for first, pair in reversed(table) if gpu.compute_capability >= pair))
        release = f"vLLM {vllm.release}"
        return f"FP8 needs compute capability {needed} in {release}; {gpu.key} has {has}, enough since {since_when}"
    return None


def _fp8_least(quantization: QuantSpec) -> tuple[tuple[Release, tuple[int, int]], ...]:
    """By who made the weights; newest first."""
    made_by = _stored_fp8(quantization)
    if made_by == FP8_OF_FBGEMM:
        return FP8_LEAST
    first = COMPRESSED_FP8_ON_TURING if made_by == FP8_OF_COMPRESSED_TENSORS else FP8_ON_TURING
    return ((first, TURING), *FP8_LEAST)


def leaves_v1(found: Fit, kv_dtype: str, vllm: Vllm) -> str | None:
    """Where its V1 engine goes over to V0 because of KV in FP8: what is said of V1 is not what runs."""
    if kv_dtype != "fp8" or vllm.runner != "v1" or vllm.at >= V0_LEFT:
        return None
    if vllm.at >= LATENTS_IN_FP8 and any(layer.latent is not None for layer in found.question.model.spec.layers):
        return None
    able = _at(KV_IN_V1, vllm)
    if all(gpu.compute_capability is None or gpu.compute_capability[0] in able for gpu in _gpus(found)):
        return None
    return (
        f"the V1 engine of {vllm.release} has no FP8 KV cache on this GPU, and falls back to V0:"
        f" --for vllm=={vllm.release}:v0 sizes that"
    )


def lora_rank(rank: int, vllm: Vllm) -> int | None:
    """The smallest that it takes and that holds this one; None: there is none."""
    return next((size for size in _at(LORA_RANKS, vllm) if rank <= size), None)


def block_sizes(vllm: Vllm) -> tuple[int, ...]:
    return _at(BLOCK_TOKENS, vllm)


def fp8_kv_name(vllm: Vllm) -> str:
    """As its --kv-cache-dtype spells it."""
    return "fp8" if vllm.at >= KV_CALLED_FP8 else KV_BEFORE


def bitsandbytes_flags(source: ModelSource, vllm: Vllm) -> dict[str, object]:
    """What a release must be told beside the quantization."""
    flags: dict[str, object] = {}
    if source.flags.get("--quantization") != "bitsandbytes":
        return flags
    if vllm.at < FINDS_BITSANDBYTES:
        flags["--load-format"] = "bitsandbytes"
    if EAGER_BITSANDBYTES[0] <= vllm.at < EAGER_BITSANDBYTES[1]:
        flags["--enforce-eager"] = True
    return flags


def can_chunk(found: Fit, vllm: Vllm) -> bool:
    """Whether its V0 engine can be told to read a prompt in several steps."""
    spec = found.question.model.spec
    latents = any(layer.latent is not None for layer in spec.layers) and not expands_latents(spec, vllm)
    adapters = found.question.settings.max_loras > 0
    return vllm.at >= max(
        CHUNKS, CHUNKS_WITH_ADAPTERS if adapters else CHUNKS, CHUNKS_WITH_LATENTS if latents else CHUNKS
    )


def _at(table: tuple[tuple[Release, T], ...], vllm: Vllm) -> T:
    """What holds at a release; newest first."""
    return next(value for first, value in table if vllm.at >= first)


def _gpus(found: Fit) -> Iterator[Gpu]:
    return (rank.device.gpu for rank in found.ranks if rank.device.gpu is not None)
