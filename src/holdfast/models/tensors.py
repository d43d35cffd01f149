"""Writes tensor lists: one place knows how names, biases and shard axes go together. Knows no family.

tensors = TensorList(); tensors.embed(...)
block = tensors.block(3)                 everything of layer 3
block.linear("q", rows, columns, "self_attn.q_proj", "attn_q", axis=0, bias=True)
"""

from __future__ import annotations

from typing import Any

from holdfast.models.source import DecoderShape, ModelDescription
from holdfast.models.spec import Part, TensorSpec


class TensorList:
    """`stem` and `blocks`: how safetensors name the decoder and its layers. `plus_one`: they keep norms less one.
    `wide_norms`: the weights of norms are multiplied with before anything is rounded."""

    def __init__(
        self,
        stem: str = "model.",
        blocks: str = "layers",
        *,
        part: Part = "text",
        plus_one: bool = False,
        wide_norms: bool = False,
    ) -> None:
        self.norms = {"plus_one": plus_one, "wide": wide_norms or plus_one}
        self.stem = stem
        self.blocks = blocks
        self.part: Part = part
        self.found: list[TensorSpec] = []

    def add(self, name: str, shape: tuple[int, ...], hf_name: str, gguf_name: str = "", **more: Any) -> None:
        self.found.append(
            TensorSpec(name=name, shape=shape, hf_name=hf_name, gguf_name=gguf_name, **{"part": self.part, **more})
        )

    def embed(self, shape: DecoderShape, hf: str = "embed_tokens") -> None:
        self.add("embed", (shape.vocab, shape.hidden), f"{self.stem}{hf}.weight", "token_embd.weight", shard_axis=0)

    def norm(self, name: str, width: int, hf: str, gguf: str = "", *, bias: bool = False) -> None:
        self.add(name, (width,), f"{self.stem}{hf}.weight", gguf and f"{gguf}.weight", **self.norms)
        if bias:
            self.add(f"{name}_bias", (width,), f"{self.stem}{hf}.bias", gguf and f"{gguf}.bias")

    def end(
        self,
        shape: DecoderShape,
        norm: str = "norm",
        *,
        bias: bool = False,
        head: str = "lm_head",
        head_bias: bool = False,
    ) -> None:
        """The last norm, and the head where it is not the embedding."""
        self.norm("final_norm", shape.hidden, norm, "output_norm", bias=bias)
        self.head(shape, head, bias=head_bias)

    def head(self, shape: DecoderShape, hf: str = "lm_head", *, bias: bool = False) -> None:
        if not shape.tied:
            self.add("head", (shape.vocab, shape.hidden), f"{hf}.weight", "output.weight", shard_axis=0, linear=True)
        if bias:
            self.add("head_bias", (shape.vocab,), f"{hf}.bias", "output.bias", shard_axis=0)

    def rope_freqs(self, source: ModelDescription, shape: DecoderShape) -> None:
        """What a GGUF file divides rotary frequencies by, where it does."""
        if source.has_tensor("rope_freqs.weight"):
            width = shape.rope.dim // 2
            self.add("rope_freqs", (width,), "rope_freqs.weight", "rope_freqs.weight", optional=True)

    def block(self, index: int) -> LayerTensors:
        return LayerTensors(self, f"layers.{index}", f"{self.stem}{self.blocks}.{index}.", f"blk.{index}.", layer=index)

    def draft_block(self, index: int, number: int) -> LayerTensors:
        """Layer `index` of the checkpoint, behind those of the model: the `number`th draft layer."""
        return LayerTensors(self, f"draft.{number}", f"{self.stem}{self.blocks}.{index}.", f"blk.{index}.", layer=None)


def gguf_biases(source: ModelDescription) -> str:
    """Which of q, k, v and o have one, by what a file holds."""
    names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
    return "".join(part for part, name in names.items() if source.has_tensor(f"blk.0.{name}.bias"))


class LayerTensors:
    """The tensors of one layer. Names of safetensors and GGUF are given without the layer and without .weight."""

    def __init__(self, tensors: TensorList, name: str, hf: str, gguf: str, *, layer: int | None) -> None:
        self.tensors = tensors
        self.name = name
        self.hf = hf
        self.gguf = gguf
        self.layer = layer

    def add(self, name: str, shape: tuple[int, ...], hf: str, gguf: str = "", **more: Any) -> None:
        """`hf` and `gguf` as they are, .weight included."""
        gguf_name = gguf and self.gguf + gguf
        self.tensors.add(f"{self.name}.{name}", shape, self.hf + hf, gguf_name, **{"layer": self.layer, **more})

    def norm(self, name: str, width: int, hf: str, gguf: str = "", *, bias: bool = False) -> None:
        self.add(name, (width,), f"{hf}.weight", gguf and f"{gguf}.weight", **self.tensors.norms)
        if bias:
            self.add(f"{name}_bias", (width,), f"{hf}.bias", gguf and f"{gguf}.bias")

    def linear(
        self,
        name: str,
        rows: int,
        columns: int,
        hf: str,
        gguf: str = "",
        *,
        axis: int | None,
        bias: bool = False,
        turned: int = 0,
        transposed: bool = False,
    ) -> None:
        """`turned`: GGUF keeps the rows of so many heads in interleaved rotary order, weights and biases alike."""
        more: dict[str, Any] = {"gguf_turn": "unpermute_rope", "heads": turned} if turned else {}
        flipped = {"hf_shape": (columns, rows)} if transposed else {}
        weight = gguf and f"{gguf}.weight"
        self.add(name, (rows, columns), f"{hf}.weight", weight, shard_axis=axis, linear=True, **more, **flipped)
        if bias:
            # A bias is split with its output rows; that of a row-parallel product is added once, whole.
            split = 0 if axis == 0 else None
            self.add(f"{name}_bias", (rows,), f"{hf}.bias", gguf and f"{gguf}.bias", shard_axis=split, **more)

    def attention(
        self,
        shape: DecoderShape,
        hf: str = "self_attn",
        *,
        bias: str = "",
        out: str = "o_proj",
        out_bias: bool = False,
        turned: bool = False,
    ) -> None:
        """q, k, v and o; `bias`: which of q, k and v have one."""
        rows = {"q": shape.query, "k": shape.key, "v": shape.key}
        heads = {"q": shape.heads, "k": shape.kv_heads, "v": 0}
        for name in ("q", "k", "v"):
            self.linear(
                name,
                rows[name],
                shape.hidden,
                f"{hf}.{name}_proj",
                f"attn_{name}",
                axis=0,
                bias=name in bias,
                turned=heads[name] if turned else 0,
            )
        self.linear("o", shape.hidden, shape.query, f"{hf}.{out}", "attn_output", axis=1, bias=out_bias)

    def gated_mlp(self, hidden: int, inner: int, hf: str = "mlp", *, bias: bool = False, **names: str) -> None:
        """gate, up and down, under their usual names or others: gate="w1"."""
        self.linear("gate", inner, hidden, f"{hf}.{names.get('gate', 'gate_proj')}", "ffn_gate", axis=0, bias=bias)
        self.linear("up", inner, hidden, f"{hf}.{names.get('up', 'up_proj')}", "ffn_up", axis=0, bias=bias)
        self.linear("down", hidden, inner, f"{hf}.{names.get('down', 'down_proj')}", "ffn_down", axis=1, bias=bias)

    def plain_mlp(self, hidden: int, inner: int, up: str, down: str, *, bias: bool, transposed: bool = False) -> None:
        """Two products without a gate."""
        self.linear("up", inner, hidden, up, "ffn_up", axis=0, bias=bias, transposed=transposed)
        self.linear("down", hidden, inner, down, "ffn_down", axis=1, bias=bias, transposed=transposed)

    def router(self, count: int, hidden: int, hf: str, *, bias: bool = False) -> None:
        """Small, whole on every device, and left alone by quantization."""
        self.add("router", (count, hidden), f"{hf}.weight", "ffn_gate_inp.weight")
        if bias:
            self.add("router_bias", (count,), f"{hf}.bias", "ffn_gate_inp.bias")

    def experts(self, count: int, hidden: int, inner: int, hf: str, gate: str, up: str, down: str) -> None:
        """Routed experts that safetensors keep one by one and GGUF stacked."""
        for name, axis, shape, part in (
            ("gate", 1, (count, inner, hidden), gate),
            ("up", 1, (count, inner, hidden), up),
            ("down", 2, (count, hidden, inner), down),
        ):
            self.stacked(f"experts.{name}", shape, f"{hf}.{{expert}}.{part}.weight", f"ffn_{name}_exps", axis=axis)

    def stacked(
        self,
        name: str,
        shape: tuple[int, int, int],
        hf: str,
        gguf: str = "",
        *,
        axis: int,
        hf_shape: tuple[int, ...] | None = None,
        alternating: bool = False,
    ) -> None:
        self.add(
            name,
            shape,
            hf,
            gguf and f"{gguf}.weight",
            shard_axis=axis,
            experts=shape[0],
            linear=True,
            hf_shape=hf_shape,
            alternating=alternating,
        )

    def shared_expert(self, hidden: int, inner: int, hf: str) -> None:
        for name, axis, rows, columns in (
            ("gate", 0, inner, hidden),
            ("up", 0, inner, hidden),
            ("down", 1, hidden, inner),
        ):
            self.linear(f"shared.{name}", rows, columns, f"{hf}.{name}_proj", f"ffn_{name}_shexp", axis=axis)
