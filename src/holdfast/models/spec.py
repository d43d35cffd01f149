"""What a model is, as data: enough to count its bytes, lay out its KV cache and build its decoder. No torch.

A tensor has one canonical name here, beside the names that checkpoints keep it under. Linear weights are
[out, in], as safetensors checkpoints keep them; those of experts are stacked, [expert, out, in].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from holdfast.models.quantization import QuantSpec

RopeScaling = Literal["none", "linear", "llama3", "yarn", "dynamic", "longrope", "mrope", "proportional"]
Activation = Literal["silu", "gelu", "gelu_tanh"]
"""Those the engine has; a family with another says so in its features."""
Part = Literal["text", "vision", "draft"]
"""draft: layers that guess further tokens, which a server loads only for speculation."""

EXPERTS_AXIS = 0
"""Of stacked matrices."""
SCALED_ELEMENTS, SCALE_BYTES = 128, 4
"""A latent cache in FP8 has a float32 scale for so many elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    theta: float
    dim: int
    """Rotated dimensions of a head, first half against second half (the non-interleaved order); 0: none."""
    scaling: RopeScaling = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn, longrope)."""
    truncate: bool = True
    """yarn: the ramp's ends are rounded to whole dimensions."""
    short_factors: tuple[float, ...] = field(repr=False, default=())
    long_factors: tuple[float, ...] = field(repr=False, default=())
    """longrope: what each frequency is divided by, in contexts up to original_max_position and in longer ones. Empty:
    the checkpoint has them as tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """What the decoder does; as it stands here, what llama's does: a norm before attention, one before a gated MLP."""

    norm: Literal["rms", "layer"] = "rms"
    """Of all norms on the stream; layer: the mean is taken out first."""
    norms: Literal["before", "after", "both"] = "before"
    """On which side of attention and of the MLP; after: on what they add to the stream."""
    query_key_norm: Literal["none", "head", "whole"] = "none"
    """Queries and keys before they are rotated: every head by itself, or all heads of a token together."""
    mlp: Literal["gated", "plain"] = "gated"
    """plain: up, activation, down. A layer with experts has those instead."""
    attention_softcap: float = 0.0
    """Scores s become cap · tanh(s / cap); 0: they do not."""
    logits_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Of what attention and MLP add to the stream."""
    logits_scale: float = 1.0
    """What the head's products are multiplied by, before a cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """An MLP that sends each token to `per_token` of `count` routed experts, and to the shared ones always."""

    count: int
    per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    """Of all shared experts together; 0: there are none."""
    normalized: bool = True
    """The weights of a token's experts add up to one; else they are their shares of a softmax over all."""
    here: tuple[tuple[int, int], ...] = ()
    """Of a rank that has whole experts: which of them, each range from its first to behind its last. Empty: all."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the experts that are here, in the order in which their matrices lie."""
        return tuple(number for first, last in self.here or ((0, self.count),) for number in range(first, last))

    @property
    def most_here(self) -> int:
        """Experts of this rank that one token may go to."""
        return min(self.per_token, len(self.numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention: one compressed vector a token instead of keys and values a head."""

    rank: int
    rope_dim: int
    index_dim: int = 0
    """A further key a token, by which few tokens are chosen to attend to; 0: attends to all."""

    @property
    def elements(self) -> int:
        """Of a token, in the cache's own type; the index has a type of its own."""
        return self.rank + self.rope_dim

    def token_bytes(self, element_bytes: int) -> int:
        """Of a token in one layer, with its key in the index: bytes of FP8 with a float32 scale for every block of
        them, whatever the rest is kept in. An engine that chooses tokens keeps a latent of one byte an element so
        too, and its rotated part in two: 512 + 4 x 4 + 2 x 64 = 656 bytes of DeepSeek V3.2."""
        if not self.index_dim:
            return self.elements * element_bytes
        latent = _scaled_bytes(self.rank) + 2 * self.rope_dim if element_bytes == 1 else self.elements * element_bytes
        return latent + _scaled_bytes(self.index_dim)


def _scaled_bytes(elements: int) -> int:
    return elements + SCALE_BYTES * -(-elements // SCALED_ELEMENTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """What a recurrent layer keeps of a sequence, however long it is."""

    recurrent_elements: int
    convolution_elements: int
    """The last inputs of the short convolution before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """What turns images into tokens, as far as the config tells how large they may be."""

    hidden_size: int
    intermediate_size: int
    gated: bool
    """Its MLP has a gate beside the projection up."""
    patches: int
    """Of the largest image, all at once."""
    tokens: int
    """That the text model gets for them."""
    outputs: int = 1
    """Vectors of each of these tokens: more than one where layers in between hand over theirs too."""
    kept_columns: int = 0
    """Of one patch, beside what a layer takes, from the first layer to the last: its pixels, its position."""

    @property
    def live_columns(self) -> int:
        """Of one patch, at the widest: the stream, a norm, what goes into attention or the MLP and comes out of it;
        and queries, keys and values, or what lies between the projections of the MLP; and what is kept."""
        between = (3 if self.gated else 2) * self.intermediate_size
        return 4 * self.hidden_size + max(3 * self.hidden_size, between) + self.kept_columns


LayerKind = Literal["full", "window", "latent", "state", "shared", "none"]
"""none: remembers nothing, such as a layer that is only an MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer: how it remembers, and what its MLP is. None stands for what the model says of all layers."""

    index: int
    window: int | None = None
    """Attends to itself and the window-1 tokens before; None: to all."""
    chunked: bool = False
    """The window does not slide: it starts anew at every multiple of it."""
    kv_heads: int | None = None
    head_dim: int | None = None
    latent: LatentSpec | None = None
    state: StateSpec | None = None
    attends: bool = True
    """False: has no keys and values (a recurrent layer without attention)."""
    shares_kv_of: int | None = None
    """Reads the keys and values of that layer and keeps none."""
    intermediate_size: int | None = None
    experts: ExpertsSpec | None = None
    rotates: bool = True
    """False: its queries and keys know no positions."""
    rope: RopeSpec | None = None

    @property
    def kind(self) -> LayerKind:
        if not self.attends:
            return "none" if self.state is None else "state"
        if self.shares_kv_of is not None:
            return "shared"
        if self.latent is not None:
            return "latent"
        return "full" if self.window is None else "window"


LabelActivation = Literal["sigmoid", "softmax", "identity"]
"""What makes chances of a classification head's products; identity: they are the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierSpec:
    """A head that scores the last token of a text, instead of one that predicts the next."""

    labels: tuple[str, ...]
    activation: LabelActivation
    token_ids: tuple[int, ...] = ()
    """Of a checkpoint that generates: the head is made of these tokens' rows of the one for tokens."""
    two_way: bool = False
    """Its one row is the second token's less the first one's: sigmoid of it is their softmax."""


Turn = Literal["none", "unpermute_rope"]
"""unpermute_rope: GGUF stores llama's q and k rows in interleaved rotary order; undo it, row by row of a head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPiece:
    """What one rank has of a tensor that is split: of one axis these ranges, one behind the other."""

    axis: int
    ranges: tuple[tuple[int, int], ...]
    """Each from its first index to behind its last."""
    whole: tuple[int, ...]
    """The shape of all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    name: str
    """Canonical: embed, layers.N.attn_norm, layers.N.q, .k, .v, .o, .q_bias, .k_bias, .v_bias, .o_bias,
    layers.N.mlp_norm, .gate, .up, .down, .router, .experts.gate, .experts.up, .experts.down, final_norm, head; .qkv,
    .gate_up and .experts.gate_up where a checkpoint keeps those as one matrix; .q_norm, .k_norm, .post_attn_norm,
    .post_mlp_norm; score, of a classifier."""
    shape: tuple[int, ...]
    hf_name: str
    """With {expert} in it: every expert lies under a name of its own. Empty: not in that format."""
    gguf_name: str
    gguf_turn: Turn = "none"
    heads: int = 0
    """For unpermute_rope: how many heads the rows are made of."""
    shard_axis: int | None = None
    """Split along this axis under tensor parallelism; None: replicated."""
    layer: int | None = None
    optional: bool = False
    """May be missing from the checkpoint (a bias that the config cannot tell)."""
    experts: int = 0
    """The first axis is that many routed experts; 0: no expert's weight."""
    linear: bool = False
    """A matrix of a linear layer: what quantization converts."""
    hf_shape: tuple[int, ...] | None = None
    """As safetensors keep it, where that is not `shape` (stored transposed)."""
    alternating: bool = False
    """Of .experts.gate_up: safetensors keep the rows of gate and up in turns, and not those of up below gate's."""
    part: Part = "text"
    wide: bool = False
    """In memory it is float32, whatever the rest: a norm's weight whose product is rounded once, at its end."""
    plus_one: bool = False
    """A norm's weight that safetensors keep less one, and GGUF as it is. It is `wide` too: near one, half precision
    would lose what it says."""
    piece: ShardPiece | None = None
    """Of a rank's own spec (`shards`): `shape` is what that rank has of it. None: all of it."""

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def cut(self) -> ShardPiece | None:
        """Its piece, where that is a part of each matrix; None: those that are here are whole."""
        return None if self.experts and self.piece is not None and self.piece.axis == EXPERTS_AXIS else self.piece

    @property
    def expert_numbers(self) -> tuple[int, ...]:
        """By which a stack's experts are known in files, in the order in which they lie here."""
        if self.piece is None or self.cut is not None:
            return tuple(range(self.experts))
        return tuple(number for first, last in self.piece.ranges for number in range(first, last))

    def in_safetensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes under which a safetensors checkpoint keeps this tensor."""
        shape = self.shape if self.hf_shape is None else self.hf_shape
        if "{expert}" not in self.hf_name:
            yield self.hf_name, shape
            return
        for expert in range(self.experts):
            yield self.hf_name.replace("{expert}", str(expert)), shape[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    family: str
    architecture: str
    """As the checkpoint names it: LlamaForCausalLM, or llama in GGUF."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    rope: RopeSpec
    norm_eps: float
    max_position: int
    """The longest context the model was made for."""
    tied_embeddings: bool
    activation: Activation = "silu"
    attention_scale: float = 0.0
    """What q·k is multiplied by; head_dim ** -0.5 for most."""
    stored_dtype: str = "bfloat16"
    """float32, float16 or bfloat16: what the config says the weights were made in."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    decoder: DecoderSpec = DecoderSpec()
    tensors: tuple[TensorSpec, ...] = field(repr=False, default=())
    quantization: QuantSpec | None = None
    kv_cache_fp8: bool = False
    """The checkpoint was made for keys and values in FP8 (e4m3)."""
    features: tuple[str, ...] = ()
    """What the family needs beyond what `decoder` and `layers` can say, in words."""
    unsupported: tuple[str, ...] = ()
    """What of it this engine lacks, in words; planning needs none of that."""
    not_counted: tuple[str, ...] = ()
    """Parts of the checkpoint whose tensors are not in `tensors`, in words."""
    pooling: str = "last"
    """How its files ask for one vector of a text."""
    classifier: ClassifierSpec | None = None
    """None: it has a head for tokens, and generates."""
    encoder: EncoderSpec | None = None
    """None: it reads text alone, or its config does not tell how large images may be."""
    spellings: Mapping[str, str] = field(repr=False, default_factory=dict)
    """How its config.json spells the fields that most call otherwise: num_experts is n_routed_experts there."""

    @property
    def runnable(self) -> bool:
        return not self.unsupported

    def rope_of(self, layer: LayerSpec) -> RopeSpec | None:
        """None: it does not rotate."""
        return (layer.rope or self.rope) if layer.rotates else None

    @property
    def parameters(self) -> int:
        """Text and vision; tied embeddings once; without draft layers."""
        return sum(tensor.elements for tensor in self.tensors if tensor.part != "draft")

    @property
    def active_parameters(self) -> int:
        """What one token of text meets: of routed experts only those it is sent to."""
        return sum(self._active(tensor) for tensor in self.tensors if tensor.part == "text")

    @property
    def active_layer_parameters(self) -> int:
        """What every token of a prompt is multiplied by: its embedding is looked up, and the head is for the last."""
        return sum(
            self._active(tensor) for tensor in self.tensors if tensor.part == "text" and tensor.layer is not None
        )

    def _active(self, tensor: TensorSpec) -> int:
        if not tensor.experts or tensor.layer is None:
            return tensor.elements
        experts = self.layers[tensor.layer].experts
        used = tensor.experts if experts is None else experts.per_token
        return tensor.elements // tensor.experts * used

    def kv_elements(self, layer: LayerSpec) -> int:
        """Keys and values of one token in this layer, in the cache's own type."""
        if not layer.attends or layer.shares_kv_of is not None:
            return 0
        if layer.latent is not None:
            return layer.latent.elements
        kv_heads = self.kv_heads if layer.kv_heads is None else layer.kv_heads
        head_dim = self.head_dim if layer.head_dim is None else layer.head_dim
        return 2 * kv_heads * head_dim

    def kv_bytes(self, layer: LayerSpec, element_bytes: int) -> int:
        """Of one token in this layer: its elements, and what is kept beside them in a type of its own."""
        if layer.latent is not None and self.kv_elements(layer):
            return layer.latent.token_bytes(element_bytes)
        return self.kv_elements(layer) * element_bytes

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """What one more token costs once all windows are full."""
        return sum(self.kv_bytes(layer, element_bytes) for layer in self.layers if layer.window is None)
