"""The llama family: Llama 1 to 3.3, SmolLM, Mistral. Maps a config.json or a GGUF header to a ModelSpec.

Knows the names and shapes of its tensors; not where files lie, nor how anything is computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from holdfast.errors import CheckpointError
from holdfast.models.fields import MAX_CONTEXT, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH, Fields
from holdfast.models.rope import longest_context, rope_from_config, rope_from_gguf
from holdfast.models.spec import LayerSpec, ModelSpec, TensorSpec

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
GGUF_ARCHITECTURES = ("llama",)

_ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_DTYPES = ("float32", "float16", "bfloat16")
_NO_TOKEN = 0xFFFF_FFFF
"""How GGUF writers spell "none" in an unsigned token id."""


def from_config(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, architecture: str) -> ModelSpec:
    fields = Fields(config, where="config.json")
    mistral = architecture == "MistralForCausalLM"
    _refuse_what_is_not_there(fields)
    hidden, heads = fields.integer("hidden_size", high=MAX_WIDTH), fields.integer("num_attention_heads", high=MAX_HEADS)
    # transformers reads an absent field as its class's default but a null as "as many as heads".
    kv_default = 8 if mistral and "num_key_value_heads" not in config else heads
    kv_heads = fields.integer("num_key_value_heads", high=MAX_HEADS, default=kv_default)
    head_dim = _head_dim(fields, "head_dim", "hidden_size", hidden, heads)
    max_position = fields.integer("max_position_embeddings", high=MAX_CONTEXT, default=131_072 if mistral else 2048)
    rope = rope_from_config(fields, head_dim=head_dim, max_position=max_position)
    window = None
    if mistral:
        window_default = None if "sliding_window" in config else 4096
        window = fields.integer("sliding_window", high=MAX_CONTEXT, default=window_default)
    activation = fields.text("hidden_act", default="silu")
    if activation not in _ACTIVATIONS:
        raise fields.wrong("hidden_act", "one of " + ", ".join(_ACTIVATIONS), activation)
    dtype_name = "dtype" if fields.has("dtype") else "torch_dtype"
    dtype = fields.text(dtype_name, default="bfloat16").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise fields.wrong(dtype_name, "one of " + ", ".join(_DTYPES), dtype)
    vocab = fields.integer("vocab_size", high=MAX_VOCABULARY)
    generation = Fields(generation_config or {}, where="generation_config.json")
    eos = fields.token_ids("eos_token_id", vocab_size=vocab) + generation.token_ids("eos_token_id", vocab_size=vocab)
    bos = fields.token_ids("bos_token_id", vocab_size=vocab) or generation.token_ids("bos_token_id", vocab_size=vocab)
    return _assemble(
        fields,
        biases=("q", "k", "v", "o") if not mistral and fields.boolean("attention_bias", default=False) else (),
        rope_freqs=False,
        window=window,
        layer_count=fields.integer("num_hidden_layers", high=MAX_LAYERS),
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", high=MAX_WIDTH),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        norm_eps=fields.number("rms_norm_eps", low=0.0, high=1.0, default=1e-6),
        max_position=longest_context(rope, max_position),
        tied_embeddings=fields.boolean("tie_word_embeddings", default=False),
        activation=_ACTIVATIONS[activation],
        stored_dtype=dtype,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )


def from_gguf(metadata: Mapping[str, Any], tensor_names: Collection[str], architecture: str) -> ModelSpec:
    fields = Fields(metadata, where="GGUF header", prefix=f"{architecture}.")
    names = frozenset(tensor_names)
    if fields.integer("expert_count", low=0, high=MAX_WIDTH, default=0):
        raise fields.wrong("expert_count", "0 (mixtures of experts are not supported)", "more")
    if "blk.0.ffn_up.bias" in names:
        raise CheckpointError("GGUF header: biases in the MLP are not supported", found="blk.0.ffn_up.bias")
    hidden = fields.integer("embedding_length", high=MAX_WIDTH)
    heads = fields.integer("attention.head_count", high=MAX_HEADS)
    head_dim = _head_dim(fields, "attention.key_length", "embedding_length", hidden, heads)
    if fields.integer("attention.value_length", high=MAX_HEAD_DIM, default=head_dim) != head_dim:
        raise fields.wrong("attention.value_length", f"the key's {head_dim}", "another")
    max_position = fields.integer("context_length", high=MAX_CONTEXT)
    rope = rope_from_gguf(fields, head_dim=head_dim, max_position=max_position)
    tokens: Any = metadata.get("tokenizer.ggml.tokens")
    counted = isinstance(tokens, list) and tokens and not fields.has("vocab_size")
    vocab = len(tokens) if counted else fields.integer("vocab_size", high=MAX_VOCABULARY)
    window = fields.integer("attention.sliding_window", low=0, high=MAX_CONTEXT, default=0)
    bos, eos = _gguf_ends(metadata, vocab)
    return _assemble(
        fields,
        biases=tuple(part for part in "qkvo" if f"blk.0.{_GGUF_ATTENTION[part]}.bias" in names),
        rope_freqs="rope_freqs.weight" in names,
        window=window or None,
        layer_count=fields.integer("block_count", high=MAX_LAYERS),
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length", high=MAX_WIDTH),
        heads=heads,
        kv_heads=fields.integer("attention.head_count_kv", high=MAX_HEADS, default=heads),
        head_dim=head_dim,
        rope=rope,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", low=0.0, high=1.0),
        max_position=longest_context(rope, max_position),
        tied_embeddings="output.weight" not in names,
        # file_type 0 and 1: all of it float32 or float16; quantized files come from bfloat16 models by now.
        stored_dtype={0: "float32", 1: "float16"}.get(metadata.get("general.file_type", -1), "bfloat16"),
        bos_token_id=bos,
        eos_token_ids=eos,
    )


def _refuse_what_is_not_there(fields: Fields) -> None:
    if fields.boolean("mlp_bias", default=False):
        raise fields.wrong("mlp_bias", "false (biases in the MLP are not supported)", True)
    quantization = fields.table("quantization_config")
    if quantization is not None:
        method = quantization.text("quant_method", default="an unnamed method")
        raise fields.wrong("quantization_config", "none (bf16, fp16 or fp32 weights), or a GGUF file", method)


def _head_dim(fields: Fields, name: str, width_name: str, hidden: int, heads: int) -> int:
    given = fields.integer(name, high=MAX_HEAD_DIM, default=None)
    if given is None and hidden % heads:
        raise fields.wrong(width_name, f"a multiple of the {heads} heads, or {fields.prefix}{name} beside it", hidden)
    head_dim = hidden // heads if given is None else given
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise fields.wrong(name, f"even and at most {MAX_HEAD_DIM}", head_dim)
    return head_dim


def _gguf_ends(metadata: Mapping[str, Any], vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
    known = {key: value for key, value in metadata.items() if value != _NO_TOKEN}
    tokenizer = Fields(known, where="GGUF header", prefix="tokenizer.ggml.")
    bos = tokenizer.integer("bos_token_id", low=0, high=vocab_size - 1, default=None)
    ends: list[int] = []
    for name in ("eos_token_id", "eot_token_id", "eom_token_id"):
        ends += tokenizer.token_ids(name, vocab_size=vocab_size)
    return bos, tuple(dict.fromkeys(ends))


def _assemble(
    fields: Fields,
    *,
    biases: tuple[str, ...],
    rope_freqs: bool,
    window: int | None,
    layer_count: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    **rest: Any,
) -> ModelSpec:
    if heads % kv_heads:
        name = "attention.head_count_kv" if fields.prefix else "num_key_value_heads"
        raise fields.wrong(name, f"a divisor of the {heads} attention heads", kv_heads)
    bare = ModelSpec(
        family="llama",
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=tuple(LayerSpec(index=index, window=window) for index in range(layer_count)),
        attention_scale=head_dim**-0.5,
        **rest,
    )
    values = {name: getattr(bare, name) for name in bare.__dataclass_fields__}
    return ModelSpec(**{**values, "tensors": tuple(_tensors(bare, biases, rope_freqs))})


_GGUF_ATTENTION = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}


def _tensors(spec: ModelSpec, biases: tuple[str, ...], rope_freqs: bool) -> Iterator[TensorSpec]:
    hidden, vocab = spec.hidden_size, spec.vocab_size
    yield TensorSpec(
        name="embed",
        shape=(vocab, hidden),
        hf_name="model.embed_tokens.weight",
        gguf_name="token_embd.weight",
        shard_axis=0,
    )
    for layer in range(len(spec.layers)):
        yield from _layer_tensors(spec, layer, biases)
    yield TensorSpec(name="final_norm", shape=(hidden,), hf_name="model.norm.weight", gguf_name="output_norm.weight")
    if not spec.tied_embeddings:
        yield TensorSpec(
            name="head", shape=(vocab, hidden), hf_name="lm_head.weight", gguf_name="output.weight", shard_axis=0
        )
    if rope_freqs:
        yield TensorSpec(
            name="rope_freqs",
            shape=(spec.rope.dim // 2,),
            hf_name="rope_freqs.weight",
            gguf_name="rope_freqs.weight",
            optional=True,
        )


def _layer_tensors(spec: ModelSpec, layer: int, biases: tuple[str, ...]) -> Iterator[TensorSpec]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    here, hf, gguf = f"layers.{layer}", f"model.layers.{layer}", f"blk.{layer}"

    def norm(name: str, hf_name: str, gguf_name: str) -> TensorSpec:
        return TensorSpec(
            name=f"{here}.{name}",
            shape=(hidden,),
            hf_name=f"{hf}.{hf_name}.weight",
            gguf_name=f"{gguf}.{gguf_name}.weight",
            layer=layer,
        )

    def linear(name: str, shape: tuple[int, int], hf_name: str, gguf_name: str, axis: int) -> Iterator[TensorSpec]:
        # GGUF keeps llama's q and k in interleaved rotary order, weights and biases alike.
        turned = {"q": spec.heads, "k": spec.kv_heads}.get(name, 0)
        for part in ("weight", "bias") if name in biases else ("weight",):
            yield TensorSpec(
                name=f"{here}.{name}" if part == "weight" else f"{here}.{name}_bias",
                shape=shape if part == "weight" else shape[:1],
                hf_name=f"{hf}.{hf_name}.{part}",
                gguf_name=f"{gguf}.{gguf_name}.{part}",
                gguf_turn="unpermute_rope" if turned else "none",
                heads=turned,
                # A bias is split with its output rows; that of a row-parallel product is added once, whole.
                shard_axis=axis if part == "weight" or axis == 0 else None,
                layer=layer,
            )

    rows = {"q": spec.heads * spec.head_dim, "k": spec.kv_heads * spec.head_dim, "v": spec.kv_heads * spec.head_dim}
    yield norm("attn_norm", "input_layernorm", "attn_norm")
    for name in ("q", "k", "v"):
        yield from linear(name, (rows[name], hidden), f"self_attn.{name}_proj", _GGUF_ATTENTION[name], 0)
    yield from linear("o", (hidden, rows["q"]), "self_attn.o_proj", _GGUF_ATTENTION["o"], 1)
    yield norm("mlp_norm", "post_attention_layernorm", "ffn_norm")
    yield from linear("gate", (inner, hidden), "mlp.gate_proj", "ffn_gate", 0)
    yield from linear("up", (inner, hidden), "mlp.up_proj", "ffn_up", 0)
    yield from linear("down", (hidden, inner), "mlp.down_proj", "ffn_down", 1)
