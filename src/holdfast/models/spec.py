"""What a model is, as data: enough to count its bytes, lay out its KV cache and build its decoder. No torch.

A tensor has one canonical name here; where a checkpoint keeps it, and how it must be turned, is in its
`StoredAs`. Linear weights are [out, in], as safetensors checkpoints keep them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RopeScaling = Literal["none", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    theta: float
    dim: int
    """Rotated dimensions of a head, first half against second half (the non-interleaved order)."""
    scaling: RopeScaling = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer: pre-norm attention, then a gated MLP."""

    index: int
    window: int | None = None
    """Attends to itself and the window-1 tokens before; None: to all."""


Turn = Literal["none", "unpermute_rope"]
"""unpermute_rope: GGUF stores llama's q and k rows in interleaved rotary order; undo it, row by row of a head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    name: str
    """Canonical: embed, layers.N.attn_norm, layers.N.q, .k, .v, .o, .q_bias, .k_bias, .v_bias, .o_bias,
    layers.N.mlp_norm, .gate, .up, .down, final_norm, head."""
    shape: tuple[int, ...]
    hf_name: str
    gguf_name: str
    gguf_turn: Turn = "none"
    heads: int = 0
    """For unpermute_rope: how many heads the rows are made of."""
    shard_axis: int | None = None
    """Split along this axis under tensor parallelism; None: replicated."""
    layer: int | None = None
    optional: bool = False
    """May be missing from the checkpoint (a bias that the config cannot tell)."""


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
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    attention_scale: float = 0.0
    """What q·k is multiplied by; head_dim ** -0.5 for most."""
    stored_dtype: str = "bfloat16"
    """float32, float16 or bfloat16: what the config says the weights were made in."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    tensors: tuple[TensorSpec, ...] = field(repr=False, default=())

    @property
    def parameters(self) -> int:
        total = 0
        for tensor in self.tensors:
            count = 1
            for size in tensor.shape:
                count *= size
            total += count
        return total
