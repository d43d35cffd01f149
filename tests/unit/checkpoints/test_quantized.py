"""Bytes of quantized matrices, held against worked shapes and against what published checkpoints weigh."""

from __future__ import annotations

import json
import struct

import gguf as gguf_library
import numpy
import pytest
import safetensors as safetensors_library

from holdfast.checkpoints import LAYOUTS, Packing, stored_bytes, stored_parts
from holdfast.checkpoints.formats.block_layouts import GGUF_LAYOUTS, RETIRED_GGUF_TYPES, SAFETENSORS_LAYOUTS
from holdfast.checkpoints.formats.quantized_tensors import METHODS
from holdfast.errors import CheckpointError

GB = 10**9
NEWER = {42: ("Q2_0", 64, 18)}
"""In the reference library's repository, and not yet in every version that is published."""


def test_every_gguf_type_of_the_reference_library_is_counted_alike() -> None:
    kinds = {int(kind): (kind.name, *sizes) for kind, sizes in gguf_library.GGML_QUANT_SIZES.items()}
    ours = {number: (found.name, found.block_elements, found.block_bytes) for number, found in GGUF_LAYOUTS.items()}
    assert {**NEWER, **kinds} == ours
    assert {int(kind) for kind in gguf_library.GGMLQuantizationType} == set(kinds)
    assert not set(RETIRED_GGUF_TYPES) & set(kinds)


@pytest.mark.parametrize("number", sorted(map(int, gguf_library.GGMLQuantizationType)))
def test_bytes_of_a_gguf_matrix(number: int) -> None:
    layout = GGUF_LAYOUTS[number]
    kind = gguf_library.GGMLQuantizationType(number)
    expected = gguf_library.quant_shape_to_byte_shape((3, 512), kind)
    assert layout.bytes_for((3, 512)) == int(numpy.prod(expected))


@pytest.mark.parametrize("dtype", sorted(SAFETENSORS_LAYOUTS))
@pytest.mark.parametrize("shape", [[1, 4], [2, 3], [3, 8], [0, 4], []])
def test_the_reference_reader_takes_exactly_our_bytes(dtype: str, shape: list[int]) -> None:
    def taken(size: int) -> bool:
        text = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
        try:
            safetensors_library.deserialize(struct.pack("<Q", len(text)) + text + bytes(size))
        except safetensors_library.SafetensorError:
            return False
        return True

    sizes = [size for size in range(200) if taken(size)]
    expected = LAYOUTS[dtype].bytes_for(tuple(shape))
    assert sizes == ([] if expected is None else [expected])


def test_no_safetensors_type_is_missing() -> None:
    text = json.dumps({"x": {"dtype": "?", "shape": [1], "data_offsets": [0, 1]}}).encode()
    with pytest.raises(safetensors_library.SafetensorError) as caught:
        safetensors_library.deserialize(struct.pack("<Q", len(text)) + text + bytes(1))
    # The reference lists what it knows in its complaint.
    listed = set(str(caught.value).partition("one of")[2].split("`")[1::2])
    assert listed == SAFETENSORS_LAYOUTS


# Matrices worked out by hand: method, [out, in], bytes of each part in order.
WORKED: list[tuple[Packing, tuple[int, int], list[int]]] = [
    # 4096 x 512 words, 32 x 512 words of zeros, 32 x 4096 halves.
    (Packing("awq"), (4096, 4096), [8_388_608, 65_536, 262_144]),
    (Packing("fp8", granularity="group", group_size=128), (4096, 14336), [58_720_256, 917_504]),
    (Packing("int8", granularity="group", group_size=128), (4096, 14336), [58_720_256, 917_504]),
    (Packing("int8", granularity="group", group_size=100), (8, 256), [2_048, 48]),
    (Packing("int8", granularity="tensor"), (8, 256), [2_048, 2]),
    (Packing("int8", granularity="block", block=(4, 128)), (8, 256), [2_048, 8]),
    (Packing("int8", symmetric=False, act_order=True), (8, 256), [2_048, 16, 8, 1_024]),
    (Packing("awq", group_size=-1), (1024, 4096), [2_097_152, 512, 2_048]),
    (Packing("gptq"), (1024, 4096), [2_097_152, 16_384, 65_536, 16_384]),
    # 8 bits: 4 a word; the last group of 100 columns is a short one.
    (Packing("gptq", bits=8, group_size=-1), (64, 100), [6_400, 64, 128, 400]),
    # 3 bits: 32 of them in 3 words.
    (Packing("gptq", bits=3), (64, 128), [3_072, 24, 128, 512]),
    (Packing("pack-quantized"), (4096, 14336), [29_360_128, 917_504, 16]),
    (Packing("pack-quantized", symmetric=False, act_order=True), (8, 256), [1_024, 32, 16, 8, 1_024]),
    (Packing("pack-quantized", bits=8, group_size=-1), (8, 6), [64, 16, 16]),
    (Packing("int8"), (1024, 4096), [4_194_304, 2_048]),
    (Packing("int8", static_inputs=True), (1024, 4096), [4_194_304, 2_048, 2]),
    (Packing("fp8"), (1024, 4096), [4_194_304, 4]),
    (Packing("fp8", static_inputs=True), (1024, 4096), [4_194_304, 4, 4]),
    (Packing("fp8", granularity="channel"), (1024, 4096), [4_194_304, 2_048]),
    # DeepSeek-V3's kv_a_proj: 576 rows are 4.5 blocks.
    (Packing("fp8", granularity="block"), (576, 7168), [4_128_768, 5 * 56 * 4]),
    (Packing("bnb-int8"), (1024, 4096), [4_194_304, 4_096, 1]),
    # gpt-oss: one expert's gate and up.
    (Packing("mxfp4"), (5760, 2880), [5760 * 90 * 16, 5760 * 90]),
    (Packing("nvfp4", static_inputs=True), (1024, 4096), [2_097_152, 262_144, 4, 4]),
]


@pytest.mark.parametrize(("packing", "shape", "expected"), WORKED, ids=lambda value: str(value)[:40])
def test_worked_matrices(packing: Packing, shape: tuple[int, int], expected: list[int]) -> None:
    assert [part.nbytes for part in stored_parts(packing, *shape)] == expected
    assert stored_bytes(packing, *shape) == sum(expected)


def test_mxfp4_is_the_same_in_both_formats() -> None:
    assert stored_bytes("mxfp4", 5760, 2880) == LAYOUTS["MXFP4"].bytes_for((5760, 2880))


def test_bitsandbytes_nf4() -> None:
    parts = {part.name: part for part in stored_parts("nf4", 1024, 4096)}
    assert parts["weight"].shape == (2_097_152, 1)
    assert parts["weight.absmax"].nbytes == 65_536
    assert parts["weight.nested_absmax"].shape == (256,)
    state = parts["weight.quant_state.bitsandbytes__nf4"]
    written = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [1024, 4096]}
    written |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.04235176369547844}
    assert abs(state.nbytes - len(json.dumps(written))) <= 2
    plain = {part.name: part.nbytes for part in stored_parts(Packing("nf4", nested=False), 1024, 4096)}
    assert plain["weight.absmax"] == 4 * 65_536
    assert "weight.nested_absmax" not in plain


Shape = tuple[int, int]


def llama_like(
    *, layers: int, hidden: int, kv: int, feed_forward: int, vocabulary: int, qkv_bias: bool = False
) -> tuple[list[Shape], int]:
    """Its quantized matrices, and the elements that stay half precision: embeddings, head, norms and biases."""
    attention = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    matrices = [*attention, (feed_forward, hidden), (feed_forward, hidden), (hidden, feed_forward)] * layers
    biases = layers * (hidden + 2 * kv) if qkv_bias else 0
    return matrices, 2 * vocabulary * hidden + (2 * layers + 1) * hidden + biases


LLAMA_8B = llama_like(layers=32, hidden=4096, kv=1024, feed_forward=14336, vocabulary=128256)
LLAMA_70B = llama_like(layers=80, hidden=8192, kv=1024, feed_forward=28672, vocabulary=128256)
QWEN_7B = llama_like(layers=28, hidden=3584, kv=512, feed_forward=18944, vocabulary=152064, qkv_bias=True)

# What the hub shows for these repositories, in decimal gigabytes.
PUBLISHED = [
    ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", LLAMA_8B, Packing("awq"), 5.73),
    ("hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4", LLAMA_70B, Packing("awq"), 39.77),
    ("Qwen/Qwen2.5-7B-Instruct-AWQ", QWEN_7B, Packing("awq"), 5.57),
]


@pytest.mark.parametrize(("name", "model", "packing", "published_gb"), PUBLISHED)
def test_whole_checkpoints(name: str, model: tuple[list[Shape], int], packing: Packing, published_gb: float) -> None:
    matrices, half_elements = model
    total = sum(stored_bytes(packing, *shape) for shape in matrices) + 2 * half_elements
    assert total / GB == pytest.approx(published_gb, abs=0.006), name


@pytest.mark.parametrize(
    ("packing", "shape", "word"),
    [
        (Packing("exl2"), (64, 64), "exl2"),
        (Packing("awq"), (64, 100), "group_size 128"),
        (Packing("awq"), (63, 128), "output features"),
        (Packing("awq", bits=3), (64, 128), "bits of 4"),
        (Packing("gptq", bits=5), (64, 128), "bits of 2, 3, 4, 8"),
        (Packing("gptq", group_size=0), (64, 128), "group_size"),
        (Packing("gptq"), (64, 127), "input features"),
        (Packing("pack-quantized", bits=16), (64, 128), "bits of 4, 8"),
        (Packing("mxfp4"), (64, 40), "multiples of 32"),
        (Packing("nvfp4"), (64, 40), "multiples of 16"),
        (Packing("fp8", granularity="block", block=(0, 128)), (64, 128), "block"),
        (Packing("fp8", scales="Q4_0"), (64, 128), "scales"),
        (Packing("fp8"), (0, 128), "rows and columns"),
    ],
)
def test_what_cannot_be_stored_so_is_refused(packing: Packing, shape: Shape, word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        stored_parts(packing, *shape)


def test_every_method_counts_something_near_its_bits() -> None:
    elements = 4096 * 4096
    for method in METHODS:
        bits = 8 * stored_bytes(method, 4096, 4096) / elements
        assert 4 < bits < 4.6 or 8 < bits < 8.1, method
