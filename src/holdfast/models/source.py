"""One description of a model, whichever file it came from, and the reading that all families have in common.

Fields go by config.json's names; a GGUF header's spellings are looked up. Knows no family.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from holdfast.models.fields import MAX_CONTEXT, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH, Fields
from holdfast.models.quantization import QuantSpec, quantization_from_config
from holdfast.models.quantization.kv_scheme import kv_cache_fp8
from holdfast.models.rope import longest_context, no_rope, rope_from_config, rope_from_gguf
from holdfast.models.spec import Activation, DecoderSpec, EncoderSpec, LayerSpec, ModelSpec, RopeSpec, TensorSpec

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
_DTYPES = ("float32", "float16", "bfloat16")
_NO_TOKEN = 0xFFFF_FFFF
"""How GGUF writers spell "none" in an unsigned token id."""

GGUF_NAMES: dict[str, str | tuple[str, ...]] = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "value_dim": "attention.value_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "num_nextn_predict_layers": "nextn_predict_layers",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "partial_rotary_factor": "rope.dimension_count",
    "rope_scaling": "rope.scaling.type",
    "full_attention_interval": "full_attention_interval",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "use_parallel_residual": "use_parallel_residual",
    "rope.freq_base": "rope.freq_base",
    "rope.dimension_count": "rope.dimension_count",
    "rope.freq_base_swa": "rope.freq_base_swa",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "rope.scaling.type": "rope.scaling.type",
    "rope.scaling.finetuned": "rope.scaling.finetuned",
    "rope.scaling.factor": "rope.scaling.factor",
    "rope.scale_linear": "rope.scale_linear",
    "rope.scaling.original_context_length": "rope.scaling.original_context_length",
    "rope.scaling.attn_factor": "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast": "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow": "rope.scaling.yarn_beta_slow",
    "key_length_mla": "attention.key_length_mla",
    "value_length_mla": "attention.value_length_mla",
    "conv_kernel": "ssm.conv_kernel",
    "inner_size": "ssm.inner_size",
    "state_size": "ssm.state_size",
    "time_step_rank": "ssm.time_step_rank",
    "group_count": "ssm.group_count",
}
"""How GGUF headers spell the fields of config.json, behind the architecture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The numbers that every decoder has."""

    vocab: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layer_count: int
    max_position: int
    norm_eps: float
    tied: bool
    activation: Activation
    rope: RopeSpec

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    fields: Fields
    architecture: str
    generation: Fields
    gguf: bool = False
    tensor_names: Collection[str] = frozenset()
    """What a GGUF file holds; config.json does not know."""
    outer: Fields
    """The whole of a config whose text model is in a table of its own; else the same as `fields`."""

    def has_tensor(self, name: str) -> bool:
        return name in self.tensor_names

    def called(self, names: Mapping[str, str | tuple[str, ...]]) -> ModelDescription:
        """The same with a family's own spellings of config.json; a GGUF header spells them as ever."""
        if self.gguf:
            return self
        fields = Fields(self.fields.values, where=self.fields.where, names={**self.fields.names, **names})
        outer = fields if self.outer is self.fields else self.outer
        return ModelDescription(fields=fields, architecture=self.architecture, generation=self.generation, outer=outer)

    def holding(self, values: Mapping[str, Any]) -> ModelDescription:
        """The same with other values, where a family must settle a field before the common reading."""
        fields = Fields(values, where=self.fields.where, names=self.fields.names)
        outer = fields if self.outer is self.fields else self.outer
        return replace(self, fields=fields, outer=outer)

    def within(self, name: str) -> ModelDescription:
        """The text model of a config that wraps it with others."""
        table = self.fields.table(name)
        if table is None:
            raise self.fields.wrong(name, "an object: the text model", "nothing")
        return ModelDescription(
            fields=table, architecture=self.architecture, generation=self.generation, outer=self.fields
        )


def source_of_config(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None, architecture: str
) -> ModelDescription:
    fields = Fields(config, where="config.json")
    return ModelDescription(
        fields=fields,
        architecture=architecture,
        generation=Fields(generation or {}, where="generation_config.json"),
        outer=fields,
    )


def source_of_gguf(metadata: Mapping[str, Any], tensor_names: Collection[str], architecture: str) -> ModelDescription:
    prefix = f"{architecture}."
    fields = Fields(metadata, where="GGUF header", prefix=prefix, names=GGUF_NAMES, only_named=True)
    return ModelDescription(
        fields=fields,
        architecture=architecture,
        generation=Fields({}, where="GGUF header"),
        gguf=True,
        tensor_names=frozenset(tensor_names),
        outer=fields,
    )


def read_shape(
    source: ModelDescription,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    inner: int | None = None,
    vocab: int | None = None,
    tied: bool = False,
    eps: str = "rms_norm_eps",
    act: str | None = "hidden_act",
    act_default: str = "silu",
    max_position: int | None = None,
    rotary: float = 1.0,
    theta: float = 10_000.0,
    eps_default: float = 1e-6,
    stretch: bool = True,
    values_alike: bool = True,
    layers_alike: bool = True,
) -> DecoderShape:
    """Keywords are what the family takes where its config is silent; `rotary` 0: it does not rotate at all.

    `act` None: the family's activation is none of those that a spec can say. `stretch`: a rope scaling makes the
    context longer than max_position_embeddings says. `values_alike`: a head's values are as wide as its keys;
    `layers_alike`: no layer has sizes of its own.
    """
    fields = source.fields
    if layers_alike and fields.raw("per_layer_config"):
        raise fields.wrong(
            "per_layer_config", "nothing (this family's layers are all alike)", fields.raw("per_layer_config")
        )
    if not source.gguf:
        # Of families without windows too: what it says must be a length, whoever goes by it.
        fields.integer("sliding_window", low=0, high=MAX_CONTEXT, default=None)
    hidden = fields.integer("hidden_size", high=MAX_WIDTH)
    _refuse_lists(fields, ("num_attention_heads", "num_key_value_heads", "intermediate_size"))
    head_count = fields.integer("num_attention_heads", high=MAX_HEADS, default=_or_missing(heads))
    kv_count = fields.integer("num_key_value_heads", high=MAX_HEADS, default=_kv_default(fields, kv_heads, head_count))
    if head_count % kv_count:
        raise fields.wrong("num_key_value_heads", f"a divisor of the {head_count} attention heads", kv_count)
    dim = _head_dim(fields, hidden, head_count, head_dim, even=rotary > 0)
    if values_alike and source.gguf and fields.integer("value_dim", high=MAX_HEAD_DIM, default=dim) != dim:
        raise fields.wrong("value_dim", f"the key's {dim}", "another")
    context = fields.integer("max_position_embeddings", high=MAX_CONTEXT, default=_or_missing(max_position))
    rope = _rope(source, dim, context, rotary, theta)
    return DecoderShape(
        vocab=_vocabulary(source, vocab),
        hidden=hidden,
        inner=fields.integer("intermediate_size", high=MAX_WIDTH, default=_or_missing(inner)),
        heads=head_count,
        kv_heads=kv_count,
        head_dim=dim,
        layer_count=fields.integer("num_hidden_layers", high=MAX_LAYERS),
        max_position=longest_context(rope, context) if stretch else context,
        norm_eps=fields.number(eps, low=0.0, high=1.0, default=eps_default if not source.gguf else ...),  # type: ignore[arg-type]
        tied=_tied(source, tied),
        activation=_activation(fields, act, act_default),
        rope=rope,
    )


def _or_missing(value: int | None) -> int:
    """A default, or the sign that there is none."""
    return value if value is not None else ...  # type: ignore[return-value]


def _refuse_lists(fields: Fields, names: Sequence[str]) -> None:
    for name in names:
        if isinstance(given := fields.raw(name), list):
            raise fields.wrong(
                name, "one whole number (this family's layers are all alike)", f"a list of {len(given)}, one a layer"
            )


def _kv_default(fields: Fields, default: int | None, heads: int) -> int:
    """transformers reads an absent field as its class's default but a null as "as many as heads"."""
    return heads if default is None or fields.key("num_key_value_heads") in fields.values else default


def _head_dim(fields: Fields, hidden: int, heads: int, default: int | None, *, even: bool) -> int:
    given = fields.integer("head_dim", high=MAX_HEAD_DIM, default=default)
    if given is None and hidden % heads:
        needed = f"a multiple of the {heads} heads, or an explicit {fields.key('head_dim')}"
        raise fields.wrong("hidden_size", needed, hidden)
    head_dim = hidden // heads if given is None else given
    if (even and head_dim % 2) or head_dim > MAX_HEAD_DIM:
        raise fields.wrong("head_dim", f"even and at most {MAX_HEAD_DIM}", head_dim)
    return head_dim


def _rope(source: ModelDescription, head_dim: int, context: int, rotary: float, theta: float) -> RopeSpec:
    if not rotary:
        return no_rope()
    if source.gguf:
        return rope_from_gguf(source.fields, head_dim=head_dim, max_position=context, theta=theta)
    return rope_from_config(source.fields, head_dim=head_dim, max_position=context, partial=rotary, theta=theta)


def _vocabulary(source: ModelDescription, default: int | None) -> int:
    if source.gguf and not source.fields.has("vocab_size"):
        tokens: Any = source.fields.values.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and tokens:
            return len(tokens)
    return source.fields.integer("vocab_size", high=MAX_VOCABULARY, default=_or_missing(default))


def _tied(source: ModelDescription, default: bool) -> bool:
    if source.gguf:
        return not source.has_tensor("output.weight")
    holder = source.fields if source.fields.has("tie_word_embeddings") else source.outer
    return holder.boolean("tie_word_embeddings", default=default)


def _activation(fields: Fields, name: str | None, default: str) -> Activation:
    if name is None:
        return "silu"
    given = fields.text(name, default=default)
    if given not in _ACTIVATIONS:
        raise fields.wrong(name, "one of " + ", ".join(_ACTIVATIONS), given)
    return _ACTIVATIONS[given]


def read_windows(
    source: ModelDescription, count: int, default: Callable[[int], bool], *, window: int | None = None
) -> tuple[int | None, ...]:
    """The window of each layer: `layer_types` where the config lists them, else what `default` says of an index."""
    fields = source.fields
    kinds = fields.texts("layer_types", count=count, allowed=("full_attention", "sliding_attention"))
    slides = [default(index) for index in range(count)] if kinds is None else [kind[0] == "s" for kind in kinds]
    if not any(slides):
        return (None,) * count
    width = fields.integer("sliding_window", high=MAX_CONTEXT, default=_or_missing(window))
    return tuple(width if slide else None for slide in slides)


def build_spec(
    source: ModelDescription,
    shape: DecoderShape,
    *,
    family: str,
    tensors: Sequence[TensorSpec],
    layers: Sequence[LayerSpec] | None = None,
    features: Sequence[str] = (),
    attention_scale: float | None = None,
    decoder: DecoderSpec | None = None,
    not_counted: Sequence[str] = (),
    encoder: EncoderSpec | None = None,
) -> ModelSpec:
    fields, quantization = source.fields, None if source.gguf else _quantization(source)
    if quantization is not None and quantization.method == "mxfp4":
        tensors = stacked_experts(tensors)
    bos, eos = _gguf_ends(fields, shape.vocab) if source.gguf else _config_ends(source, shape.vocab)
    plain = [LayerSpec(index=index) for index in range(shape.layer_count)]
    return ModelSpec(
        family=family,
        architecture=source.architecture,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        layers=tuple(_forgetting(layer, shape.max_position) for layer in layers or plain),
        rope=shape.rope,
        norm_eps=shape.norm_eps,
        max_position=shape.max_position,
        tied_embeddings=shape.tied,
        activation=shape.activation,
        attention_scale=shape.head_dim**-0.5 if attention_scale is None else attention_scale,
        stored_dtype=_gguf_dtype(fields) if source.gguf else _config_dtype(source),
        bos_token_id=bos,
        eos_token_ids=eos,
        decoder=decoder or DecoderSpec(),
        tensors=tuple(tensors),
        quantization=quantization,
        kv_cache_fp8=not source.gguf and (kv_cache_fp8(source.fields) or kv_cache_fp8(source.outer)),
        features=tuple(features),
        not_counted=tuple(not_counted),
        encoder=encoder,
        spellings={} if source.gguf else {name: fields.key(name) for name in fields.names},
    )


def stacked_experts(tensors: Iterable[TensorSpec]) -> list[TensorSpec]:
    """As checkpoints in MXFP4 keep experts, gpt-oss and what was quantized after it: those of a layer in one tensor
    each for gate with up, and for down, where others keep them one by one."""
    found: list[TensorSpec] = []
    for tensor in tensors:
        where, _, part = tensor.name.rpartition(".")
        module, alone, _ = tensor.hf_name.partition(".{expert}.")
        if not alone:
            found.append(tensor)
        elif part != "up":
            count, rows, columns = tensor.shape
            name, height = ("gate_up", 2 * rows) if part == "gate" else (part, rows)
            shape, hf_name = (count, height, columns), f"{module}.{name}_proj"
            found.append(replace(tensor, name=f"{where}.{name}", shape=shape, hf_name=hf_name, gguf_name=""))
    return found


def _forgetting(layer: LayerSpec, max_position: int) -> LayerSpec:
    """A window as long as the whole context forgets nothing: it is none."""
    if layer.window is None or layer.window < max_position:
        return layer
    return replace(layer, window=None, chunked=False)


def _quantization(source: ModelDescription) -> QuantSpec | None:
    return quantization_from_config(source.fields) or quantization_from_config(source.outer)


def _config_dtype(source: ModelDescription) -> str:
    for holder in (source.fields, source.outer):
        given = [name for name in ("dtype", "torch_dtype") if holder.has(name)]
        dtypes = [_dtype(holder, name) for name in given]
        if len(set(dtypes)) > 1:
            raise holder.wrong("torch_dtype", f"{dtypes[0]}, as {given[0]} says", dtypes[1])
        if dtypes:
            return dtypes[0]
    return "bfloat16"


def _dtype(holder: Fields, name: str) -> str:
    dtype = holder.text(name).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise holder.wrong(name, "one of " + ", ".join(_DTYPES), dtype)
    return dtype


def _gguf_dtype(fields: Fields) -> str:
    # file_type 0 and 1: all of it float32 or float16; quantized files come from bfloat16 models by now.
    kinds: dict[object, Literal["float32", "float16"]] = {0: "float32", 1: "float16"}
    kind = fields.values.get("general.file_type")
    return kinds.get(kind, "bfloat16") if isinstance(kind, int) else "bfloat16"


def _config_ends(source: ModelDescription, vocab: int) -> tuple[int | None, tuple[int, ...]]:
    holders = (
        (source.fields, source.generation)
        if source.outer is source.fields
        else (source.fields, source.outer, source.generation)
    )
    eos = [token for holder in holders for token in holder.token_ids("eos_token_id", vocab_size=vocab)]
    bos = [token for holder in holders for token in holder.token_ids("bos_token_id", vocab_size=vocab)]
    return (bos[0] if bos else None), tuple(dict.fromkeys(eos))


def _gguf_ends(fields: Fields, vocab: int) -> tuple[int | None, tuple[int, ...]]:
    known = {key: value for key, value in fields.values.items() if value != _NO_TOKEN}
    tokenizer = Fields(known, where="GGUF header", prefix="tokenizer.ggml.")
    bos = tokenizer.integer("bos_token_id", low=0, high=vocab - 1, default=None)
    ends: list[int] = []
    for name in ("eos_token_id", "eot_token_id", "eom_token_id"):
        ends += tokenizer.token_ids(name, vocab_size=vocab)
    return bos, tuple(dict.fromkeys(ends))
