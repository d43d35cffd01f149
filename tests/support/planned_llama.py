"""Llama 3 8B as its publisher describes it, and a GPU of any size to plan it on. Knows no plan and no catalogue."""

from __future__ import annotations

from holdfast.hardware.nvidia import NvidiaGpu

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu",
}  # fmt: skip


def idle_gpu(total_bytes: int, capability: tuple[int, int] = (9, 0)) -> NvidiaGpu:
    """With all its memory free."""
    return NvidiaGpu(
        index=0, uuid="GPU-1", name="one", total_bytes=total_bytes, free_bytes=total_bytes, capability=capability
    )
