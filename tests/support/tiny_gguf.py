"""A tiny llama of random numbers in a GGUF file whose matrices are quantized in several ways."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy

VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 224, 64, 96, 2, 4, 2
KINDS = ("Q8_0", "Q4_1", "Q4_0", "F16")


def write_tiny_gguf(path: Path, also: tuple[str, ...] = (), *, hidden: int = HIDDEN, inner: int = INNER) -> None:
    """Several kinds of matrices; in the second layer q, k and v are of three kinds. `also`: vectors beside them."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    rng = numpy.random.default_rng(3)
    kv = hidden // HEADS * KV_HEADS

    def matrix(name: str, rows: int, columns: int, kind: str) -> None:
        numbers = (0.2 * rng.standard_normal((rows, columns))).astype(numpy.float32)
        layout = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(numbers, layout), raw_dtype=layout)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", (1 + 0.1 * rng.standard_normal(hidden)).astype(numpy.float32))

    matrix("token_embd", VOCABULARY, hidden, "Q8_0")
    matrix("output", VOCABULARY, hidden, "Q4_1")
    norm("output_norm")
    for layer in range(LAYERS):
        place, kinds = f"blk.{layer}", KINDS if layer else ("Q4_1",) * 4
        norm(f"{place}.attn_norm")
        norm(f"{place}.ffn_norm")
        matrix(f"{place}.attn_q", hidden, hidden, kinds[0])
        matrix(f"{place}.attn_k", kv, hidden, kinds[1])
        matrix(f"{place}.attn_v", kv, hidden, kinds[2])
        matrix(f"{place}.attn_output", hidden, hidden, kinds[3])
        matrix(f"{place}.ffn_gate", inner, hidden, "Q5_0" if layer else "Q8_0")
        matrix(f"{place}.ffn_up", inner, hidden, "Q5_0" if layer else "Q8_0")
        matrix(f"{place}.ffn_down", hidden, inner, "Q5_1" if layer else "Q4_0")
    for name in also:
        writer.add_tensor(name, numpy.ones(hidden, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
