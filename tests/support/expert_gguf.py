"""A GGUF file with experts, in stacks, of the numbers that a safetensors checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy
from quantized_blocks import NEW_KINDS, WRITTEN, drawn

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.models import ModelSpec


def numbers_of(spec: ModelSpec, checkpoint: Checkpoint) -> dict[str, numpy.ndarray]:
    """By canonical name, experts in stacks."""
    found = {}
    for tensor in spec.tensors:
        parts = [checkpoint.read(name).view(numpy.float32).reshape(shape) for name, shape in tensor.in_safetensors()]
        found[tensor.name] = numpy.stack(parts) if "{expert}" in tensor.hf_name else parts[0]
    return found


def interleave(weight: numpy.ndarray, heads: int) -> numpy.ndarray:
    """Rows as GGUF keeps llama's q and k: the halves of a head taken in turns."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_header(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    experts = spec.layers[-1].experts
    assert experts is not None
    writer.add_block_count(len(spec.layers))
    writer.add_context_length(512)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_expert_count(experts.count)
    writer.add_expert_used_count(experts.per_token)
    if spec.family != "mixtral":
        writer.add_expert_feed_forward_length(experts.intermediate_size)
    if experts.shared_intermediate_size:
        writer.add_expert_shared_feed_forward_length(experts.shared_intermediate_size)


def write_expert_gguf(
    spec: ModelSpec, checkpoint: Checkpoint, path: Path, architecture: str, kinds: Callable[[str], str]
) -> dict[str, numpy.ndarray]:
    """Returns the numbers that the file holds, by the names and in the shapes that safetensors have."""
    writer = gguf.GGUFWriter(path, architecture)
    write_header(writer, spec)
    numbers, kept = numbers_of(spec, checkpoint), dict[str, numpy.ndarray]()
    for tensor in spec.tensors:
        values = numbers[tensor.name]
        plain = values.ndim == 1 or tensor.name.endswith("router")
        kind = gguf.GGMLQuantizationType["F32" if plain else kinds(tensor.name)]
        rounded = gguf.quants.dequantize(_quantized(values, kind), kind)
        for number, (name, shape) in enumerate(tensor.in_safetensors()):
            kept[name] = (rounded[number] if "{expert}" in tensor.hf_name else rounded).reshape(shape)
        turned = interleave(values, tensor.heads) if tensor.gguf_turn != "none" else values
        written = turned[0] if len(turned) == 1 else turned
        writer.add_tensor(tensor.gguf_name, _quantized(written, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def _quantized(values: numpy.ndarray, kind: gguf.GGMLQuantizationType) -> numpy.ndarray:
    """Of kinds that the package does not write, others of their shape."""
    if kind.name not in NEW_KINDS or kind.name in WRITTEN:
        return gguf.quants.quantize(values, kind)
    *outer, columns = values.shape
    return drawn(kind.name, math.prod(outer), columns, seed=values.size, scale=0.005)[0].reshape(*outer, -1)


def write_random_gguf(spec: ModelSpec, path: Path, architecture: str, layout: str) -> None:
    """Of any size, quickly: matrices of random blocks whose scales are small numbers."""
    writer, rng = gguf.GGUFWriter(path, architecture), numpy.random.default_rng(1)
    write_header(writer, spec)
    kind = gguf.GGMLQuantizationType[layout]
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    for tensor in spec.tensors:
        if len(tensor.shape) == 1 or tensor.name.endswith("router"):
            writer.add_tensor(tensor.gguf_name, 0.1 * rng.standard_normal(tensor.shape, dtype=numpy.float32) + 1)
            continue
        blocks = rng.integers(0, 256, (tensor.elements // elements, nbytes), dtype=numpy.uint8)
        blocks[:, :2] = numpy.frombuffer(numpy.float16(0.005).tobytes(), dtype=numpy.uint8)
        rows = blocks.reshape(*tensor.shape[:-1], -1)
        writer.add_tensor(tensor.gguf_name, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
