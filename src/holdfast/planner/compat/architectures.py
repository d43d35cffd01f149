"""Since which release vLLM and SGLang have a model's architecture, as their registries at each release say.

What vLLM 0.4.0 had already, the oldest that is known, is not listed. Knows no GPU and no plan.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.models import ModelSpec
from holdfast.planner.compat.vllm_release import Release, Vllm, spelled

FIRST_IN_VLLM: Mapping[str, Release] = {
    "Cohere2ForCausalLM": (0, 6, 5), "DeepseekV2ForCausalLM": (0, 5, 1), "DeepseekV32ForCausalLM": (0, 11, 0),
    "DeepseekV3ForCausalLM": (0, 6, 6), "Exaone4ForCausalLM": (0, 10, 0), "ExaoneForCausalLM": (0, 6, 0),
    "Gemma2ForCausalLM": (0, 5, 1), "Gemma3ForCausalLM": (0, 8, 0), "Gemma3ForConditionalGeneration": (0, 8, 0),
    "Gemma3nForCausalLM": (0, 10, 1), "Gemma3nForConditionalGeneration": (0, 9, 2), "Gemma4ForCausalLM": (0, 19, 0),
    "Gemma4ForConditionalGeneration": (0, 19, 0), "Glm4ForCausalLM": (0, 8, 4), "Glm4MoeForCausalLM": (0, 10, 0),
    "GlmForCausalLM": (0, 6, 5), "GlmMoeDsaForCausalLM": (0, 16, 0), "GptOssForCausalLM": (0, 10, 1),
    "GraniteForCausalLM": (0, 6, 0), "GraniteMoeForCausalLM": (0, 6, 3), "GraniteMoeHybridForCausalLM": (0, 9, 0),
    "JambaForCausalLM": (0, 5, 1), "Llama4ForCausalLM": (0, 8, 3), "Llama4ForConditionalGeneration": (0, 8, 3),
    "LlavaForConditionalGeneration": (0, 6, 4), "MiniCPMForCausalLM": (0, 4, 1), "MiniMaxM2ForCausalLM": (0, 11, 1),
    "Ministral3ForCausalLM": (0, 20, 0), "Mistral3ForConditionalGeneration": (0, 8, 3),
    "NemotronForCausalLM": (0, 5, 4), "NemotronHForCausalLM": (0, 9, 1), "Olmo2ForCausalLM": (0, 6, 5),
    "Olmo3ForCausalLM": (0, 11, 0), "OlmoForCausalLM": (0, 4, 2), "OlmoeForCausalLM": (0, 6, 2),
    "Phi3ForCausalLM": (0, 4, 2), "PhiMoEForCausalLM": (0, 6, 0), "Qwen3ForCausalLM": (0, 8, 4),
    "Qwen3MoeForCausalLM": (0, 8, 4), "Qwen3NextForCausalLM": (0, 10, 2), "Qwen3_5ForCausalLM": (0, 27, 0),
    "Qwen3_5ForConditionalGeneration": (0, 17, 0), "Qwen3_5MoeForCausalLM": (0, 27, 0),
    "Qwen3_5MoeForConditionalGeneration": (0, 17, 0), "SeedOssForCausalLM": (0, 10, 2),
    "SmolLM3ForCausalLM": (0, 10, 1),
}  # fmt: skip
ROTARY_IN_VLLM: Mapping[str, Release] = {
    "llama3": (0, 5, 3, 1),
    "longrope": (0, 5, 1),
    "mrope": (0, 6, 1),
}
"""How positions are stretched, and the first release that reads it; it stopped at others that it did not know."""
FIRST_IN_SGLANG: Mapping[str, str] = {
    "Cohere2ForCausalLM": "0.4.2", "DeepseekV32ForCausalLM": "0.5.3", "DeepseekV3ForCausalLM": "0.4.1",
    "Exaone4ForCausalLM": "0.5.9", "Gemma3ForCausalLM": "0.4.4.post2",
    "Gemma3ForConditionalGeneration": "0.4.4.post2", "Gemma3nForConditionalGeneration": "0.4.8.post1",
    "Gemma4ForCausalLM": "0.5.11", "Gemma4ForConditionalGeneration": "0.5.11", "Glm4ForCausalLM": "0.4.8",
    "Glm4MoeForCausalLM": "0.4.9.post5", "GlmMoeDsaForCausalLM": "0.5.9", "GptOssForCausalLM": "0.5.1",
    "GraniteMoeForCausalLM": "0.4.9.post3", "GraniteMoeHybridForCausalLM": "0.5.9", "Llama4ForCausalLM": "0.4.5",
    "Llama4ForConditionalGeneration": "0.4.5", "LlavaForConditionalGeneration": "0.4.6.post4",
    "MiniMaxM2ForCausalLM": "0.5.5", "Ministral3ForCausalLM": "0.5.7",
    "Mistral3ForConditionalGeneration": "0.4.6.post5", "NemotronHForCausalLM": "0.5.4",
    "PhiMoEForCausalLM": "0.4.9.post2", "Qwen3ForCausalLM": "0.4.5.post2", "Qwen3MoeForCausalLM": "0.4.5.post2",
    "Qwen3NextForCausalLM": "0.5.2", "Qwen3_5ForConditionalGeneration": "0.5.9",
    "Qwen3_5MoeForConditionalGeneration": "0.5.9", "Starcoder2ForCausalLM": "0.5.3",
}  # fmt: skip
"""Those that came after 0.4.0."""


def lacks_model(architecture: str, vllm: Vllm) -> str | None:
    """Why this version of vLLM does not run the architecture; None: it does, or nothing is known against it."""
    first = FIRST_IN_VLLM.get(architecture)
    if first is None or vllm.at >= first:
        return None
    return f"{architecture} is in vLLM since {spelled(first)}, and not in {vllm.release}"


def lacks_rotary(spec: ModelSpec, vllm: Vllm) -> str | None:
    """Why this version does not read how the model's positions are stretched."""
    first = ROTARY_IN_VLLM.get(spec.rope.scaling)
    if first is None or vllm.at >= first:
        return None
    return f"RoPE scaling {spec.rope.scaling} is in vLLM since {spelled(first)}, and not in {vllm.release}"


def since(first: Release, vllm: Vllm) -> bool:
    """Whether only some releases of the version have what came with that one, and none was named."""
    return vllm.patch is None and vllm.version == first[:2] and any(first[2:])


def vllm_since(architecture: str, vllm: Vllm) -> str | None:
    """What to say where only some releases of the version have it, and none was named."""
    first = FIRST_IN_VLLM.get(architecture)
    return f"{architecture} is in vLLM since {spelled(first)}" if first is not None and since(first, vllm) else None


def sglang_since(architecture: str) -> str | None:
    first = FIRST_IN_SGLANG.get(architecture)
    return None if first is None else f"{architecture} is in SGLang since {first}"
