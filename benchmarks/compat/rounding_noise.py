"""How far apart two readers of a quantized model are that do the same, but for the rounding of their own numbers.

    python -m benchmarks.compat.rounding_noise [--dtype bfloat16]

The small Llama of vllm_formats.py, computed in float64 with inputs (and keys and values) rounded as each format says,
twice: embeddings differ by noise as large as the activations' own rounding, which sends some inputs to the next code
of eight bits. Where weights alone are quantized nothing is sent anywhere, and the two stay close. Printed are mean
differences of the log-probabilities of prompts: what the tolerances of vllm_formats.py are taken from. Knows no engine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.compat.greedy_answers import prompts
from benchmarks.compat.vllm_formats import HEADS, HIDDEN, KV_HEADS, KV_SCALES, LAYERS, VOCABULARY, WIDTH, write_plain

PROMPTS = slice(3, 6)
EPSILON, THETA = 1e-5, 1e4

Rounding = Callable[[torch.Tensor], torch.Tensor]


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def int8_rows(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(1, keepdim=True) / 127
    return (x / scale).round() * scale


def fp8_rows(x: torch.Tensor) -> torch.Tensor:
    return _fp8(x, x.abs().amax(1, keepdim=True) / 448)


def _fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).float().clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale


@dataclass(frozen=True)
class Format:
    weights: Rounding
    inputs: Rounding
    kv: bool = False


FORMATS = {
    "plain": Format(as_it_is, as_it_is),
    "weights int8": Format(int8_rows, as_it_is),
    "w8a8 int8": Format(int8_rows, int8_rows),
    "fp8": Format(fp8_rows, fp8_rows),
    "fp8 with fp8 KV": Format(fp8_rows, fp8_rows, kv=True),
}


class Model:
    def __init__(self, weights: dict[str, torch.Tensor], made: Format, dtype: torch.dtype) -> None:
        self._made, self._dtype = made, dtype
        self._plain = weights
        linear = [name for name in weights if "_proj" in name]
        self._rounded = {name: made.weights(weights[name]) for name in linear}

    def log_probabilities(self, ids: list[int], seed: int) -> torch.Tensor:
        """Of each token of the prompt but the first."""
        length, drawn = len(ids), torch.Generator().manual_seed(seed)
        stream = self._plain["model.embed_tokens.weight"][ids]
        noise = torch.randn(stream.shape, generator=drawn, dtype=torch.float64)
        stream = stream * (1 + torch.finfo(self._dtype).eps / 4 * noise)
        for layer in range(LAYERS):
            stem = f"model.layers.{layer}"
            x = self._norm(stream, f"{stem}.input_layernorm")
            stream = self._own(stream + self._linear(self._attention(x, stem, length), f"{stem}.self_attn.o_proj"))
            x = self._norm(stream, f"{stem}.post_attention_layernorm")
            gate, up = (self._linear(x, f"{stem}.mlp.{side}_proj") for side in ("gate", "up"))
            inner = self._own(torch.nn.functional.silu(gate) * up)
            stream = self._own(stream + self._linear(inner, f"{stem}.mlp.down_proj"))
        logits = self._norm(stream, "model.norm") @ self._plain["lm_head.weight"].T
        return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    def _attention(self, x: torch.Tensor, stem: str, length: int) -> torch.Tensor:
        q, k, v = (
            self._linear(x, f"{stem}.self_attn.{name}_proj").view(length, heads, WIDTH)
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        q, k = _turned(q), _turned(k)
        if self._made.kv:
            k, v = (_fp8(one, torch.tensor(KV_SCALES[name])) for one, name in ((k, "k_scale"), (v, "v_scale")))
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / WIDTH**0.5
        later = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        chances = scores.masked_fill(later, float("-inf")).softmax(-1)
        return self._own(torch.einsum("hqk,khd->qhd", chances, v).reshape(length, -1))

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._own(self._made.inputs(x) @ self._rounded[f"{name}.weight"].T)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._own(x * torch.rsqrt((x**2).mean(1, keepdim=True) + EPSILON) * self._plain[f"{name}.weight"])

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self._dtype).double()


def _turned(x: torch.Tensor) -> torch.Tensor:
    half = WIDTH // 2
    angles = torch.arange(len(x)).double()[:, None] * THETA ** (-torch.arange(half).double() / half)
    cos, sin, first, second = angles.cos()[:, None], angles.sin()[:, None], x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def measure(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """By format: how far two readers are apart, and the format from the plain model."""
    asked = prompts(VOCABULARY)[PROMPTS]

    def told(made: Format, seed: int) -> torch.Tensor:
        model = Model(weights, made, dtype)
        return torch.cat([model.log_probabilities(ids, seed) for ids in asked])

    plain, found = told(FORMATS["plain"], 1), dict[str, Any]()
    for name, made in FORMATS.items():
        answers = [told(made, seed) for seed in (1, 2, 3)]
        pairs = ((0, 1), (0, 2), (1, 2))
        apart = statistics.fmean((answers[a] - answers[b]).abs().mean().item() for a, b in pairs)
        found[name] = {"apart": apart, "changed": (answers[0] - plain).abs().mean().item()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="of the activations")
    dtype = parser.parse_args().dtype
    with tempfile.TemporaryDirectory() as folder:
        write_plain(Path(folder), experts=False, dtype=dtype)
        weights = {name: tensor.double() for name, tensor in load_file(Path(folder) / "model.safetensors").items()}
    print(f"activations in {dtype}, {LAYERS} layers of {HIDDEN}; nats")
    for name, row in measure(weights, getattr(torch, dtype)).items():
        print(f"{name:16}  two readers apart {row['apart']:.4f}  changed by the format {row['changed']:.4f}")


if __name__ == "__main__":
    main()
