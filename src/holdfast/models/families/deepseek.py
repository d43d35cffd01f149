"""DeepSeek V2, V3, R1, Kimi K2, K2.5 and others so built: latent attention, a dense start, shared and routed experts.

V3 carries draft layers (multi-token prediction) behind the last one; they are counted apart. V3.2 and GLM-5 choose
the tokens to attend to by an index, which has a key of its own for every token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

from holdfast.models.fields import MAX_EXPERTS, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields
from holdfast.models.source import DecoderShape, ModelDescription, build_spec, read_shape
from holdfast.models.spec import ExpertsSpec, LatentSpec, LayerSpec, ModelSpec, TensorSpec
from holdfast.models.tensors import LayerTensors, TensorList

FAMILY = "deepseek"


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Sizes of the attention: what is compressed, and what a head makes of it."""

    query_rank: int | None
    """None: queries come straight from the hidden state."""
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool
    split: bool
    """GGUF files of today keep the keys' and the values' part of kv_b apart."""
    index_heads: int = 0
    index_dim: int = 0


WITH_VISION = "KimiK25ForConditionalGeneration"


def describe(source: ModelDescription) -> ModelSpec:
    whole, outer = source.architecture == WITH_VISION, source
    source = source.within("text_config") if whole else source
    # transformers writes a head_dim that is only the rotated part.
    source = source.called({"num_experts": "n_routed_experts", "head_dim": "qk_head_dim"})
    latent = _latent(source)
    head_dim = latent.nope_dim + latent.rope_dim
    shape = read_shape(source, head_dim=head_dim, max_position=None if source.gguf else 2048, values_alike=False)
    shape = replace(shape, head_dim=head_dim, rope=replace(shape.rope, dim=latent.rope_dim))
    experts = read_shared_experts(source)
    dense = source.fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=0)
    step = source.fields.integer("moe_layer_freq", high=MAX_LAYERS, default=1)
    first = source.architecture == "DeepseekV2ForCausalLM"
    correction = source.has_tensor(f"blk.{dense}.exp_probs_b.bias") if source.gguf else not first
    sparse = [experts if index >= dense and index % step == 0 else None for index in range(shape.layer_count)]
    stem = "language_model." if whole else ""
    tensors = TensorList(f"{stem}model.")
    tensors.embed(shape)
    for index, chosen in enumerate(sparse):
        _layer(tensors.block(index), shape, latent, chosen, correction)
    tensors.end(shape, head=f"{stem}lm_head")
    vision = _vision(outer, shape) if whole else []
    memory = LatentSpec(rank=latent.rank, rope_dim=latent.rope_dim, index_dim=latent.index_dim)
    return build_spec(
        source,
        shape,
        family=FAMILY,
        layers=[LayerSpec(index=index, latent=memory, experts=chosen) for index, chosen in enumerate(sparse)],
        tensors=[*tensors.found, *_draft(source, shape, latent, experts, correction), *vision],
        features=("attention to chosen tokens only",) if latent.index_dim else (),
    )


def _latent(source: ModelDescription) -> Latent:
    fields = source.fields
    query_rank = fields.integer("q_lora_rank", low=0, high=MAX_WIDTH, default=None) or None
    rank = fields.integer("kv_lora_rank", high=MAX_WIDTH)
    if not source.gguf:
        return Latent(
            query_rank=query_rank,
            rank=rank,
            nope_dim=fields.integer("qk_nope_head_dim", high=MAX_HEAD_DIM, default=128),
            rope_dim=fields.integer("qk_rope_head_dim", high=MAX_HEAD_DIM, default=64),
            value_dim=fields.integer("v_head_dim", high=MAX_HEAD_DIM, default=128),
            bias=fields.boolean("attention_bias", default=False),
            split=False,
            **_index(source),
        )
    key_name = "key_length_mla" if fields.has("key_length_mla") else "head_dim"
    value_name = "value_length_mla" if fields.has("value_length_mla") else "value_dim"
    key, rope_dim = (
        fields.integer(key_name, high=MAX_HEAD_DIM),
        fields.integer("rope.dimension_count", high=MAX_HEAD_DIM),
    )
    if rope_dim >= key:
        raise fields.wrong("rope.dimension_count", f"less than the key's {key}", rope_dim)
    return Latent(
        query_rank=query_rank,
        rank=rank,
        nope_dim=key - rope_dim,
        rope_dim=rope_dim,
        value_dim=fields.integer(value_name, high=MAX_HEAD_DIM),
        bias=False,
        split=source.has_tensor("blk.0.attn_k_b.weight"),
    )


def _index(source: ModelDescription) -> dict[str, int]:
    if source.architecture not in ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"):
        return {}
    fields = source.fields
    kinds: Any = fields.raw("indexer_types")
    for name in ("index_topk_pattern", "index_topk_freq"):
        if fields.has(name):
            raise fields.wrong(name, "nothing (layers that share an index are not known)", fields.raw(name))
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full" for kind in kinds)):
        raise fields.wrong("indexer_types", "full for every layer (shared indexes are not known)", kinds)
    return {
        "index_heads": fields.integer("index_n_heads", high=MAX_HEADS),
        "index_dim": fields.integer("index_head_dim", high=MAX_HEAD_DIM),
    }


def read_shared_experts(source: ModelDescription) -> ExpertsSpec | None:
    """Routed experts of one size, and shared ones as wide as so many of them."""
    fields = source.fields
    count = fields.integer("num_experts", low=0, high=MAX_EXPERTS, default=0)
    if not count:
        return None
    inner = fields.integer("moe_intermediate_size", high=MAX_WIDTH)
    shared = fields.integer("n_shared_experts", low=0, high=MAX_EXPERTS, default=0)
    return ExpertsSpec(
        count=count,
        per_token=fields.integer("num_experts_per_tok", high=count),
        intermediate_size=inner,
        shared_intermediate_size=shared * inner,
    )


def _layer(
    block: LayerTensors, shape: DecoderShape, latent: Latent, experts: ExpertsSpec | None, correction: bool
) -> None:
    hidden, heads = shape.hidden, shape.heads
    block.norm("attn_norm", hidden, "input_layernorm", "attn_norm")
    if latent.query_rank is None:
        block.linear("q", shape.query, hidden, "self_attn.q_proj", "attn_q", axis=0)
    else:
        block.linear("q_a", latent.query_rank, hidden, "self_attn.q_a_proj", "attn_q_a", axis=None, bias=latent.bias)
        block.norm("q_a_norm", latent.query_rank, "self_attn.q_a_layernorm", "attn_q_a_norm")
        block.linear("q_b", shape.query, latent.query_rank, "self_attn.q_b_proj", "attn_q_b", axis=0)
    both = latent.rank + latent.rope_dim
    block.linear("kv_a", both, hidden, "self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa", axis=None, bias=latent.bias)
    block.norm("kv_a_norm", latent.rank, "self_attn.kv_a_layernorm", "attn_kv_a_norm")
    if latent.split:
        block.add("k_b", (heads, latent.rank, latent.nope_dim), "", "attn_k_b.weight", shard_axis=0, linear=True)
        block.add("v_b", (heads, latent.value_dim, latent.rank), "", "attn_v_b.weight", shard_axis=0, linear=True)
    else:
        rows = heads * (latent.nope_dim + latent.value_dim)
        block.linear("kv_b", rows, latent.rank, "self_attn.kv_b_proj", "attn_kv_b", axis=0)
    if latent.index_dim:
        wide, stem = latent.index_heads * latent.index_dim, "self_attn.indexer"
        block.linear("index.q", wide, latent.query_rank or hidden, f"{stem}.wq_b", axis=None)
        block.linear("index.k", latent.index_dim, hidden, f"{stem}.wk", axis=None)
        block.norm("index.k_norm", latent.index_dim, f"{stem}.k_norm", bias=True)
        block.linear("index.weights", latent.index_heads, hidden, f"{stem}.weights_proj", axis=None)
    width = heads * latent.value_dim
    block.linear("o", hidden, width, "self_attn.o_proj", "attn_output", axis=1, bias=latent.bias)
    block.norm("mlp_norm", hidden, "post_attention_layernorm", "ffn_norm")
    if experts is None:
        block.gated_mlp(hidden, shape.inner)
    else:
        shared_experts(block, hidden, experts, correction=correction)


def shared_experts(block: LayerTensors, hidden: int, experts: ExpertsSpec, *, correction: bool) -> None:
    block.router(experts.count, hidden, "mlp.gate")
    if correction:
        block.add("router_correction", (experts.count,), "mlp.gate.e_score_correction_bias", "exp_probs_b.bias")
    block.experts(experts.count, hidden, experts.intermediate_size, "mlp.experts", "gate_proj", "up_proj", "down_proj")
    if experts.shared_intermediate_size:
        block.shared_expert(hidden, experts.shared_intermediate_size, "mlp.shared_experts")


def _draft(
    source: ModelDescription, shape: DecoderShape, latent: Latent, experts: ExpertsSpec | None, correction: bool
) -> list[TensorSpec]:
    if source.gguf:  # converters leave them out
        return []
    tensors = TensorList(part="draft")
    for number in range(source.fields.integer("num_nextn_predict_layers", low=0, high=64, default=0)):
        block = tensors.draft_block(shape.layer_count + number, number)
        draft_ends(block, shape)
        _layer(block, shape, latent, experts, correction)
    return tensors.found


def draft_ends(block: LayerTensors, shape: DecoderShape) -> None:
    """What a draft layer has beside the layer itself: a join of state and token, and copies of embedding and head."""
    hidden, vocabulary = shape.hidden, (shape.vocab, shape.hidden)
    block.add("embed", vocabulary, "embed_tokens.weight", "nextn.embed_tokens.weight", shard_axis=0)
    block.norm("token_norm", hidden, "enorm", "nextn.enorm")
    block.norm("state_norm", hidden, "hnorm", "nextn.hnorm")
    block.linear("join", hidden, 2 * hidden, "eh_proj", "nextn.eh_proj", axis=None)
    block.norm("final_norm", hidden, "shared_head.norm", "nextn.shared_head_norm")
    block.add("head", vocabulary, "shared_head.head.weight", "nextn.shared_head_head.weight", shard_axis=0)


def _vision(source: ModelDescription, shape: DecoderShape) -> list[TensorSpec]:
    """Of Kimi K2.5: MoonViT, and a merger of neighbouring patches."""
    config = source.fields.table("vision_config") or Fields({}, where="config.json")
    hidden = config.integer("vt_hidden_size", high=MAX_WIDTH, default=1152)
    inner = config.integer("vt_intermediate_size", high=MAX_WIDTH, default=4304)
    patch = config.integer("patch_size", high=1 << 12, default=14)
    sides = [config.integer(f"init_pos_emb_{side}", high=1 << 12, default=64) for side in ("height", "width")]
    merged = hidden * prod(config.integers("merge_kernel_size", low=1, high=64, most=2) or (2, 2))
    tensors = TensorList("vision_tower.", part="vision")

    def linear(name: str, *size: int, stem: str = tensors.stem) -> None:
        tensors.add(f"vision.{name}", size, f"{stem}{name}.weight", linear=len(size) == 2)
        tensors.add(f"vision.{name}_bias", size[:1], f"{stem}{name}.bias")

    linear("patch_embed.proj", hidden, 3, patch, patch)
    tensors.add("vision.position", (*sides, hidden), "vision_tower.patch_embed.pos_emb.weight")
    for layer in range(config.integer("vt_num_hidden_layers", high=MAX_LAYERS, default=27)):
        here = f"encoder.blocks.{layer}"
        for norm in ("norm0", "norm1"):
            tensors.norm(f"vision.layers.{layer}.{norm}", hidden, f"{here}.{norm}", bias=True)
        linear(f"{here}.wqkv", 3 * hidden, hidden)
        linear(f"{here}.wo", hidden, hidden)
        linear(f"{here}.mlp.fc0", inner, hidden)
        linear(f"{here}.mlp.fc1", hidden, inner)
    tensors.norm("vision.final_norm", hidden, "encoder.final_layernorm", bias=True)
    for name in ("weight", "bias"):
        tensors.add(f"vision.projector.norm_{name}", (hidden,), f"mm_projector.pre_norm.{name}")
    linear("proj.0", merged, merged, stem="mm_projector.")
    linear("proj.2", shape.hidden, merged, stem="mm_projector.")
    return tensors.found
