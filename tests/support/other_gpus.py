"""Compiles this project's kernels for GPUs that are not here, as far as their shared memory is known, and prints that.

    python other_gpus.py worst|hopper|all       lines of: capability, case, kernel, bytes, limit

`worst`, and `hopper`, which are the kernels for it alone, run the passes that give shared memory its places and no
further; `all` the whole stage, and compares.

A process of its own, without Triton's interpreter: the wrappers run as they are, over tensors without memory, on a
driver that names another GPU and launches nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import triton.compiler
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptx_version_from_options
from triton.compiler.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from holdfast.execution.triton_kernels import layer, scatter
from holdfast.execution.triton_kernels.attention.decode import decode_attention
from holdfast.execution.triton_kernels.attention.expand_pages import expand_pages
from holdfast.execution.triton_kernels.attention.prefill import prefill_attention
from holdfast.execution.triton_kernels.attention.prefill_hopper import page_descriptor, prefill_attention_hopper
from holdfast.execution.triton_kernels.experts import blocks as expert_blocks
from holdfast.execution.triton_kernels.experts import direct as expert_numbers
from holdfast.execution.triton_kernels.experts import launch as experts
from holdfast.execution.triton_kernels.experts import ordering as expert_ordering
from holdfast.execution.triton_kernels.experts import rounding as expert_rounding
from holdfast.execution.triton_kernels.experts import scaled as expert_codes
from holdfast.execution.triton_kernels.experts.planes import RoundedRows, ScaledPlanes
from holdfast.execution.triton_kernels.gated_hopper import gated_product_hopper
from holdfast.execution.triton_kernels.quantized import blocks, products
from holdfast.execution.triton_kernels.quantized.block_products import block_gate_up, block_product
from holdfast.execution.triton_kernels.quantized.product_tiles import FEW_QUANTIZED_ROWS
from holdfast.execution.triton_kernels.quantized.scaled_products import scaled_gate_up, scaled_product
from holdfast.execution.triton_kernels.quantized.scaled_rows import expand_scaled, gather_columns
from holdfast.execution.triton_kernels.quantized.split_sums import SplitSums
from holdfast.execution.triton_kernels.quantized.vector_products import (
    vector_product,
    vectors_of_blocks,
    vectors_of_codes,
)
from holdfast.execution.triton_kernels.rounded.products import rounded_product, scale_sums
from holdfast.execution.triton_kernels.rounded.rounding import largest_of_parts, round_rows
from holdfast.execution.triton_kernels.sampling import adjust
from holdfast.execution.triton_kernels.sampling import launch as sampling
from holdfast.execution.weights.gguf_blocks import QUANTIZED_LAYOUTS, QuantizedMatrix
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint.scaled_layouts import ScaledLayout

LIMITS = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes that one program may have, by compute capability."""
SHAPES = ((32, 8, 64), (71, 1, 64), (32, 8, 128), (48, 1, 128), (8, 8, 96), (16, 8, 256), (32, 1, 256))
"""(heads, KV heads, head width) of attention."""
META = torch.device("meta")
PLAIN_CODES = (
    ScaledLayout(codes="int4", scales="float16", group=128),
    ScaledLayout(codes="int4", scales="float16", group=32, zeros=True),
    ScaledLayout(codes="mxfp4", scales="uint8", group=32),
    ScaledLayout(codes="nf4", group=64),
    ScaledLayout(codes="int8"),
    ScaledLayout(codes="fp8", group=128, group_rows=128),
)
ROUNDED_CODES = (
    ScaledLayout(codes="fp8", inputs="fp8"),
    ScaledLayout(codes="fp8", group=128, group_rows=128, inputs="fp8"),
    ScaledLayout(codes="int8", inputs="int8"),
)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn
SCALED = (
    ScaledLayout(codes="int4", scales="float16", group=128, zeros=True),
    ScaledLayout(codes="int4", scales="bfloat16", group=32),
    ScaledLayout(codes="nf4", group=64),
    ScaledLayout(codes="mxfp4", scales="uint8", group=32),
    ScaledLayout(codes="int8"),
    ScaledLayout(codes="fp8", group=128, group_rows=128),
)


class OtherGpu:
    """What Triton asks its driver when it compiles. Devices are numbered by capability: each has its own kernels."""

    capability = 0

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def compile_in_part(source: Any, target: GPUTarget, options: dict[str, Any]) -> int:
    """Bytes of shared memory; what turns the rest into machine code is left out."""
    module, parsed, _ = _lowered(source, target, options)
    return _allocated(module, target, parsed)


def compile_further(source: Any, target: GPUTarget, options: dict[str, Any]) -> int:
    """The same by the whole of the stage, held against its first passes."""
    module, _, finish = _lowered(source, target, options)
    shared = finish(module)
    if compile_in_part(source, target, options) != shared:
        raise AssertionError(f"{shared} bytes by the whole stage, and not by its first passes")
    return shared


def _lowered(source: Any, target: GPUTarget, options: dict[str, Any]) -> tuple[Any, Any, Callable[[Any], int]]:
    """The kernel's own module, its options, and what makes bytes of shared memory of it."""
    backend, stages, context = make_backend(target), dict[str, Any](), ir.context()
    parsed = backend.parse_options({**options, **source.parse_options()})
    backend.add_stages(stages, parsed, source.language)
    ir.load_dialects(context)
    backend.load_dialects(context)
    metadata: dict[str, Any] = {"target": target, **parsed.__dict__}
    code = source.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
    for stage in ("ttir", "ttgir"):
        code = stages[stage](code, metadata) if stage in stages else code  # Gluon begins with the second.

    def finish(module: Any) -> int:
        stages["llir"](module, metadata)
        return int(metadata["shared"])

    return code, parsed, finish


def _allocated(module: Any, target: GPUTarget, options: Any) -> int:
    """By the first passes of the backend's stage `llir`, which takes most of the time."""
    manager = ir.pass_manager(module.context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    version = get_ptx_version_from_options(options, target.arch)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, target.arch, version)
    manager.run(module, "allocate")
    return int(module.get_int_attr("ttg.shared"))


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


WORKSPACE = SplitSums(empty(1 << 24, dtype=FP32), empty(1 << 13))


def attention(
    kind: str,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    window: int = 0,
    stored: torch.dtype | None = None,
) -> None:
    ints, pages = empty(64), empty(8, 2, 2, 16, kv_heads, dim, dtype=stored or dtype)
    query, out = empty(64, heads + 2 * kv_heads, dim, dtype=dtype)[:, :heads], empty(64, heads, dim, dtype=dtype)
    shared: dict[str, Any] = {"place": 1, "scale": 0.1, "window": window, "softcap": 30.0, "out": out}
    if kind == "prefill":
        prefill_attention(query, pages, empty(4, 128), *[ints] * 6, **shared)
    else:
        workspace = empty(9999, dtype=FP32)
        decode_attention(query, pages, empty(4, 128), ints, ints, workspace=workspace, splits=4, **shared)


def hopper_attention(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, window: int, expanded: bool = False
) -> None:
    """`expanded`: over pages of float8."""
    ints, pages = empty(64), empty(8, 2, 2, 16, kv_heads, dim, dtype=dtype)
    query, out = empty(64, heads + 2 * kv_heads, dim, dtype=dtype)[:, :heads], empty(64, heads, dim, dtype=dtype)
    if expanded:
        expand_pages(pages.to(E4M3), empty(4, 128), *[ints] * 4, 4, place=1, window=window, out=pages)
    prefill_attention_hopper(
        query, pages, empty(4, 128), *[ints] * 6, descriptor=page_descriptor(pages), place=1, scale=0.1,
        window=window, out=out, page_firsts=ints if expanded else None,
    )  # fmt: skip


def hopper_gate() -> None:
    x, weight, out = empty(4000, 1024, dtype=BF16), empty(6144, 1024, dtype=BF16), empty(4000, 3072, dtype=BF16)
    gated_product_hopper(x, weight, "gelu", out)


def dense_products(rows: int, dtype: torch.dtype) -> None:
    for outputs, inputs in ((6144, 4096), (4096, 14336), (128256, 2048), (576, 576)):
        norm, weight = empty(inputs, dtype=dtype), empty(2 * outputs, inputs, dtype=dtype)
        x, out = empty(rows, inputs, dtype=dtype), empty(rows, outputs, dtype=dtype)
        products.skinny_product(x, weight[:outputs], out)
        products.skinny_product(x, weight[:outputs], out, norm_weight=norm, accumulate=True)
        products.skinny_gate_up(x, weight, out, norm_weight=norm)


def block_products(rows: int, layout: str, dtype: torch.dtype) -> None:
    outputs, count = 6144, 128
    matrix = QuantizedMatrix(layout, outputs, 32 * count, META)
    planes = blocks.BlockPlanes(layout, matrix.quants, matrix.scales, matrix.minimums, matrix.high, matrix.small)
    x, out = empty(rows, 32 * count, dtype=dtype), empty(rows, outputs, dtype=dtype)
    block_product(x, planes, out, WORKSPACE)
    if rows <= FEW_QUANTIZED_ROWS:
        block_gate_up(x, planes, out[:, : outputs // 2], WORKSPACE)
    if rows == 1 and (vectors := vectors_of_blocks(planes)):
        vector_product(x, vectors, out, norm_weight=empty(32 * count, dtype=dtype))
    blocks.dequantize_tile(planes, 0, outputs, empty(outputs, 32 * count, dtype=dtype))
    blocks.embed_blocks(empty(4, 64), empty(8), empty(8), planes, empty(8, 32 * count, dtype=dtype))


def rounded_products(rows: int, kind: torch.dtype, dtype: torch.dtype) -> None:
    if kind != torch.int8 and OtherGpu.capability < 89:
        return  # There inputs are not rounded: see `footprint.rounded`.
    outputs, inputs = 6144, 4096
    x, out, codes = empty(rows, inputs, dtype=dtype), empty(rows, outputs, dtype=dtype), empty(rows, inputs, dtype=kind)
    norm, wide, parts = empty(inputs, dtype=dtype), empty(rows, 2 * inputs, dtype=dtype), empty(99, dtype=FP32)
    for group in (0, 128) if kind != torch.int8 else (0,):
        x_scales = empty(rows, inputs // group if group else 1, dtype=FP32)
        scales = empty(outputs // (group or 1), inputs // group if group else 1, dtype=FP32)
        round_rows(x, codes, x_scales, norm=norm, grouped=group > 0)
        round_rows(wide, codes, x_scales, activation="silu", grouped=group > 0)
        round_rows(x, codes, x_scales, norm=norm, grouped=group > 0, bound=1200.0, powers=group > 0)
        matrix = empty(outputs, inputs, dtype=kind)
        rounded_product(codes, x_scales, matrix, scales, out, parts, empty(99), grouped=group > 0, accumulate=True)
    scale_sums(out, empty(rows, 1, dtype=FP32), empty(outputs, 1, dtype=FP32), out)
    of_ranks = empty(rows, 3, dtype=FP32)
    largest_of_parts(x, of_ranks, 1)
    round_rows(x, codes, empty(rows, 1, dtype=FP32), parts=of_ranks)


def scaled_kernels(rows: int, layout: ScaledLayout, dtype: torch.dtype) -> None:
    outputs, inputs = 6144, 4096
    matrix = ScaledMatrix(layout, outputs, inputs, META)
    x, out = empty(rows, inputs, dtype=dtype), empty(rows, outputs, dtype=dtype)
    scaled_product(x, matrix, out, WORKSPACE)
    if rows <= FEW_QUANTIZED_ROWS:
        scaled_gate_up(x, matrix, out[:, : outputs // 2], WORKSPACE)
    if rows == 1 and (vectors := vectors_of_codes(matrix)):
        vector_product(x, vectors, out, norm_weight=empty(inputs, dtype=dtype))
    expand_scaled(matrix, 0, outputs, empty(outputs, inputs, dtype=dtype))
    gather_columns(x, empty(inputs), x)


def expert_kernels(tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    count, chosen, hidden, inner = shape
    x, rows = empty(tokens, hidden, dtype=dtype), empty(tokens * chosen, hidden, dtype=dtype)
    middle = empty(tokens * chosen, inner, dtype=dtype)
    lines = experts.ExpertAssignments.allocate(tokens, count, chosen, META)
    experts.route(empty(tokens, count, dtype=dtype), lines, normalized=True)
    gate_up = empty(count, 2 * inner, hidden, dtype=dtype)
    expert_numbers.multiply_dense(x, gate_up, lines, middle, by_token=True, activation="silu")
    expert_numbers.multiply_dense(middle, empty(count, hidden, inner, dtype=dtype), lines, rows, by_token=False)
    experts.add_pairs(rows, lines, x, add=True)
    some = experts.ExpertAssignments.allocate(tokens, count, chosen, META, range(0, count, 2))
    experts.route(empty(tokens, count, dtype=dtype), some, normalized=True)
    experts.add_pairs(rows, some, x, add=False)
    expert_ordering.gather_expert_columns(x, empty(count, hidden), lines, rows, by_token=True)
    for layout in PLAIN_CODES:
        matrix = ScaledMatrix(layout, count * 2 * inner, hidden, META)
        codes = ScaledPlanes(layout, matrix.codes, matrix.scales, matrix.zeros)
        expert_codes.multiply_scaled(x, codes, lines, middle, by_token=True, activation="silu")
    for layout in ROUNDED_CODES:
        matrix = ScaledMatrix(layout, count * hidden, inner, META)
        codes = ScaledPlanes(layout, matrix.codes, matrix.scales, matrix.zeros)
        kind = torch.uint8 if layout.inputs == "fp8" else torch.int8
        groups = inner // layout.group if layout.group else 1
        rounded = RoundedRows(empty(tokens * chosen, inner, dtype=kind), empty(tokens * chosen, groups, dtype=FP32))
        expert_rounding.round_rows(middle, rounded.codes, rounded.scales)
        expert_rounding.round_rows(middle, rounded.codes, rounded.scales, bound=1200.0, powers=True)
        expert_numbers.multiply_rounded(rounded, codes, lines, rows, by_token=False)
    for layout in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS"):
        kept = QuantizedMatrix(layout, count * inner, hidden, META)
        planes = blocks.BlockPlanes(layout, kept.quants, kept.scales, kept.minimums, kept.high, kept.small)
        expert_blocks.multiply_blocks(x, planes, lines, middle, by_token=True)


def layer_kernels(hidden: int, dim: int, dtype: torch.dtype) -> None:
    ints, stream = empty(8), empty(8, hidden, dtype=dtype)
    layer.rms_norm(stream, empty(hidden, dtype=dtype), 1e-5, stream)
    pages, angles = empty(8, 2, 2, 16, 8, dim, dtype=dtype), empty(8, dim, dtype=FP32)
    qkv = empty(8, 48 * dim, dtype=dtype)
    for kept in (pages, pages.to(E4M3), pages.to(torch.float8_e5m2)):
        layer.rotate_and_store(qkv, angles, ints, ints, kept, empty(4, 64), place=0)
    layer.gate(empty(8, 28672, dtype=dtype), "silu", empty(8, 14336, dtype=dtype))
    layer.embed(empty(4, 64), ints, ints, empty(99, hidden, dtype=dtype), stream)
    layer.fill_cos_sin(ints, angles[0, : dim // 2], 1.0, angles)
    scatter.scatter_words(ints, ints, ints)


def sampling_kernels(vocabulary: int, dtype: torch.dtype) -> None:
    ints, known, logits = empty(8), empty(8, 4096), empty(8, vocabulary, dtype=dtype)
    params: Any = SimpleNamespace(table=empty(8, 16), entries=empty(8, 2048, 2))
    workspace = sampling.Workspace.allocate(8, vocabulary, META)
    lanes = adjust.Lanes.allocate(8, vocabulary, META)
    adjusted = adjust.adjust_rows(logits, ints, ints, params, known, lanes)
    for some in (adjusted, None):
        sampling.sample_rows(logits, ints, ints, params, known, ints, workspace, adjusted=some)


Cases = Iterator[tuple[str, Callable[[], None]]]


def worst() -> Cases:
    """Attention where it needs most: no other kernel comes near a limit."""
    for dim in (128, 256):
        yield f"prefill, head {dim}", lambda dim=dim: attention("prefill", 32, 8, dim, BF16)
    yield "prefill in float32", lambda: attention("prefill", 32, 1, 256, FP32)
    yield "decode", lambda: attention("decode", 48, 1, 128, BF16)
    for kind in ("prefill", "decode"):
        yield f"{kind} over FP8 pages", lambda kind=kind: attention(kind, 32, 8, 128, BF16, stored=E4M3)
    yield from for_hopper()


def for_hopper() -> Cases:
    if OtherGpu.capability == 90:
        for window, expanded in ((0, False), (1000, False), (0, True)):
            yield (
                f"prefill for Hopper, window {window}{', expanded' if expanded else ''}",
                lambda some=(window, expanded): hopper_attention(32, 8, 128, BF16, *some),
            )
        yield "gate for Hopper", hopper_gate


def everything() -> Cases:
    for dtype in (BF16, FP16, FP32):
        for kind in ("prefill", "decode"):
            for heads, kv_heads, dim in SHAPES:
                for window in (0, 1000):
                    yield (
                        f"{kind} {heads}/{kv_heads} of {dim}, window {window}, {dtype}",
                        lambda some=(kind, heads, kv_heads, dim, dtype, window): attention(*some),
                    )
                for stored in (E4M3, torch.float8_e5m2):
                    yield (
                        f"{kind} {heads}/{kv_heads} of {dim}, {dtype} over {stored}",
                        lambda some=(kind, heads, kv_heads, dim, dtype, 0, stored): attention(*some),
                    )
        if OtherGpu.capability == 90 and dtype != FP32:
            for heads, kv_heads, dim in ((32, 8, 64), (9, 3, 64), (8, 8, 128), (32, 4, 128)):
                for window in (0, 1000):
                    yield (
                        f"prefill for Hopper {heads}/{kv_heads} of {dim}, window {window}, {dtype}",
                        lambda some=(heads, kv_heads, dim, dtype, window): hopper_attention(*some),
                    )
        for rows in (1, 2):
            yield f"dense, {rows} rows, {dtype}", lambda some=(rows, dtype): dense_products(*some)
        for layout in sorted(QUANTIZED_LAYOUTS):
            for rows in (1, 2, 8, 16, 64, 128):
                yield f"{layout}, {rows} rows, {dtype}", lambda some=(rows, layout, dtype): block_products(*some)
        for rows in (1, 32, 64, 500):
            for kind in (torch.int8, torch.float8_e4m3fn):
                yield f"{kind}, {rows} rows, {dtype}", lambda some=(rows, kind, dtype): rounded_products(*some)
        for scaled in SCALED:
            for rows in (1, 2, 8, 16, 64, 128):
                yield f"{scaled}, {rows} rows, {dtype}", lambda some=(rows, scaled, dtype): scaled_kernels(*some)
        for tokens in (1, 500, 4000):
            for shape in ((128, 8, 2048, 768), (8, 2, 4096, 14336)):
                name = f"{tokens} tokens, {shape[1]} of {shape[0]} experts, {dtype}"
                yield name, lambda some=(tokens, shape, dtype): expert_kernels(*some)
        for hidden, dim in ((2048, 64), (4096, 128), (16384, 256)):
            yield f"layer of {hidden}, {dtype}", lambda some=(hidden, dim, dtype): layer_kernels(*some)
        for vocabulary in (49152, 262144):
            yield f"sampling of {vocabulary}, {dtype}", lambda some=(vocabulary, dtype): sampling_kernels(*some)


def main(cases: Callable[[], Cases], compile_one: Callable[..., int]) -> None:
    gpu, found, run = OtherGpu(), list[tuple[str, int]](), JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        shared: Any = run(kernel, *arguments, grid=grid, warmup=True, **options)
        found.append((kernel.__name__, shared))

    driver.set_active(gpu)
    triton.compiler.compile = compile_one
    JITFunction.run = compile_only
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = gpu.get_current_device
    torch.cuda.get_device_capability = lambda index=None: divmod(OtherGpu.capability, 10)
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(
        shared_memory_per_block_optin=LIMITS[index], multi_processor_count=132
    )
    for OtherGpu.capability, limit in LIMITS.items():
        for name, launch in cases():
            found.clear()
            launch()
            for kernel, shared in sorted(set(found)):
                print(OtherGpu.capability, name, kernel, shared, limit, sep="\t", flush=True)


if __name__ == "__main__":
    chosen = {"worst": (worst, compile_in_part), "hopper": (for_hopper, compile_in_part)}
    main(*chosen.get(sys.argv[1], (everything, compile_further)))
