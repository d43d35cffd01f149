"""A tiny random model of transformers as a GGUF file, as llama.cpp's converter writes that family.

Names come from the gguf package's own table, not from the project.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch

Writer = gguf.GGUFWriter


@dataclass(frozen=True)
class Kind:
    architecture: str
    permuted: bool = False
    """q and k rows in interleaved rotary order, as llama's."""
    plus_one: bool = False
    """Norms' weights are written with the one that the model adds to them."""
    layer_norm: bool = False
    header: Callable[[Writer, Any], None] = lambda writer, config: None


def _gemma2(writer: Writer, config: Any) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def _gemma3(writer: Writer, config: Any) -> None:
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)


def _granite(writer: Writer, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _still(writer: Writer, config: Any) -> None:
    writer.add_logit_scale(1.0)
    writer.add_rope_scaling_finetuned(False)


def _phi3(writer: Writer, config: Any) -> None:
    rope = config.rope_parameters
    original = rope["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original)
    scale = config.max_position_embeddings / original
    writer.add_rope_scaling_attn_factors(float((1 + numpy.log(scale) / numpy.log(original)) ** 0.5))
    for name in ("long", "short"):
        writer.add_tensor(f"rope_factors_{name}.weight", numpy.array(rope[f"{name}_factor"], dtype=numpy.float32))


KINDS = {
    "Qwen2": Kind("qwen2"),
    "Qwen3": Kind("qwen3"),
    "SeedOss": Kind("seed_oss"),
    "Gemma": Kind("gemma", plus_one=True),
    "Gemma2": Kind("gemma2", plus_one=True, header=_gemma2),
    "Gemma3": Kind("gemma3", plus_one=True, header=_gemma3),
    "Phi3": Kind("phi3", header=_phi3),
    "Olmo2": Kind("olmo2"),
    "Granite": Kind("granite", permuted=True, header=_granite),
    "SmolLM3": Kind("smollm3", permuted=True),
    "Starcoder2": Kind("starcoder2", layer_norm=True),
    "StableLm": Kind("stablelm", layer_norm=True),
}


STILL_GRANITE = Kind("granite", permuted=True, header=_still)
"""What llama.cpp makes of a model like SmolLM3 none of whose layers rotate."""


def write_family_gguf(path: Path, family: str | Kind, model: Any) -> None:
    kind, config = KINDS[family] if isinstance(family, str) else family, model.config
    writer = Writer(path, kind.architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(width)
    writer.add_value_length(width)
    if kind.layer_norm:
        writer.add_layer_norm_eps(getattr(config, "norm_epsilon", None) or config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(width * rope.get("partial_rotary_factor", 1.0)))
    kind.header(writer, config)
    names = gguf.get_tensor_name_map(_arch(kind.architecture), config.num_hidden_layers)
    stored = model.state_dict()
    if config.tie_word_embeddings:
        stored.pop("lm_head.weight")
    for name, tensor in stored.items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        writer.add_tensor(found, _turned(kind, config, name, tensor).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _arch(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, written in gguf.MODEL_ARCH_NAMES.items() if written == name)


def _turned(kind: Kind, config: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if kind.plus_one and name.endswith("norm.weight"):
        return tensor + 1
    for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if kind.permuted and part in name:
            return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    return tensor
