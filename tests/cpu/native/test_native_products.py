"""Compiled products against float64 over the same stored bytes, with poisoned outputs and guarded edges."""

from __future__ import annotations

import numpy
import numpy.typing
import pytest
import torch

from holdfast.execution import native
from holdfast.execution.native import products
from holdfast.execution.native.loading import kernels
from holdfast.hardware.kernels import runnable_variants
from holdfast.hardware.numa import NumaNodes

LAYOUTS = ("Q4_1", "Q4_0", "Q8_0", "F16", "BF16", "F32")
WHOLE = ("Q4_1", "Q4_0", "Q8_0")
"""Whose products are computed in whole numbers where the machine has dot products of bytes."""
GUARD = 1234.5

IN_INTEGERS = [name for name in runnable_variants() if name != "portable"]


def in_integers() -> bool:
    return kernels().VARIANT != "portable"


def stored_weights(
    layout: str, rows: int, columns: int, seed: int
) -> tuple[torch.Tensor, numpy.typing.NDArray[numpy.float64]]:
    """Bytes as GGUF keeps them, and the numbers they stand for, worked out apart from the code under test."""
    random = numpy.random.default_rng(seed)
    blocks = columns // 32
    if layout in ("F32", "F16", "BF16"):
        numbers = random.standard_normal((rows, columns)).astype(numpy.float32)
        if layout == "F16":
            halves = numbers.astype(numpy.float16)
            return torch.from_numpy(halves.view(numpy.uint8)), halves.astype(numpy.float64)
        if layout == "BF16":
            cut = numbers.view(numpy.uint32) >> 16
            return (
                torch.from_numpy(cut.astype(numpy.uint16).view(numpy.uint8)),
                (cut << 16).view(numpy.float32).astype(numpy.float64),
            )
        return torch.from_numpy(numbers.view(numpy.uint8)), numbers.astype(numpy.float64)
    scale = (random.standard_normal((rows, blocks, 1)) * 0.05).astype(numpy.float16)
    if layout == "Q8_0":
        quants = random.integers(-128, 128, (rows, blocks, 32)).astype(numpy.int8)
        parts = [scale.view(numpy.uint8), quants.view(numpy.uint8)]
        numbers64 = quants * scale.astype(numpy.float64)
    else:
        quants = random.integers(0, 16, (rows, blocks, 32)).astype(numpy.uint8)
        packed = quants[..., :16] | (quants[..., 16:] << 4)
        if layout == "Q4_1":
            minimum = (random.standard_normal((rows, blocks, 1)) * 0.4).astype(numpy.float16)
            parts = [scale.view(numpy.uint8), minimum.view(numpy.uint8), packed]
            numbers64 = quants * scale.astype(numpy.float64) + minimum
        else:
            parts = [scale.view(numpy.uint8), packed]
            numbers64 = (quants.astype(numpy.float64) - 8) * scale
    raw = numpy.concatenate(parts, axis=2).reshape(rows, -1)
    return torch.from_numpy(raw), numbers64.reshape(rows, columns)


def guarded(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A NaN-filled [rows, columns] view with guard numbers on all its sides, and the whole it is part of."""
    whole = torch.full((rows + 2, columns + 7), GUARD)
    view = whole[1:-1, 3:-4]
    view.fill_(float("nan"))
    return view, whole


def guards_stand(view: torch.Tensor, whole: torch.Tensor) -> bool:
    view.fill_(GUARD)
    return bool((whole == GUARD).all())


def error_bound(
    x: torch.Tensor, weights: numpy.typing.NDArray[numpy.float64], layout: str
) -> numpy.typing.NDArray[numpy.float64]:
    """What may be lost: a few units in float32's last place of every term; and where activations become 16-bit whole
    numbers, half a unit of the largest of a block of 32 for each of the block."""
    sizes = numpy.abs(x.contiguous().numpy().astype(numpy.float64))
    peaks = numpy.repeat(sizes.reshape(len(x), -1, 32).max(2), 32, axis=1)
    whole = layout in WHOLE and in_integers()
    unit = 1 / 32_600 if whole else 2.0**-23
    # 4-bit blocks are summed around their middle, and what stands for 0 is added apart: larger terms than the weights.
    largest = numpy.abs(weights).reshape(len(weights), -1, 32).max(2).repeat(32, axis=1)
    return 2.0**-22 * sizes @ largest.T + 0.501 * unit * peaks @ numpy.abs(weights).T + 1e-30


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("outputs", "columns"), [(1, 32), (3, 96), (53, 576), (130, 1344), (17, 1536)])
def test_product_equals_float64(layout: str, outputs: int, columns: int) -> None:
    blocks, weights = stored_weights(layout, outputs, columns, seed=outputs)
    matrix = native.BlockMatrix(blocks, layout)
    x = torch.randn(131, columns, generator=torch.Generator().manual_seed(columns))
    exact, bound = x.numpy().astype(numpy.float64) @ weights.T, error_bound(x, weights, layout)
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 15, 37, 64, 65, 131):
        out, whole = guarded(rows, outputs)
        matrix.write(x[:rows], out)
        assert (numpy.abs(out.numpy().astype(numpy.float64) - exact[:rows]) <= bound[:rows]).all()
        assert guards_stand(out, whole)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 6, 21, 70])
def test_bias_addition_and_rows_that_lie_apart(layout: str, rows: int) -> None:
    blocks, weights = stored_weights(layout, 35, 64, seed=rows)
    generator = torch.Generator().manual_seed(rows)
    bias = torch.randn(35, generator=generator)
    matrix = native.BlockMatrix(blocks, layout, bias)
    x = torch.randn(rows, 200, generator=generator)[:, 40:104]
    exact = x.numpy().astype(numpy.float64) @ weights.T + bias.numpy()
    before = torch.randn(rows, 35, generator=generator)
    bound = error_bound(x, weights, layout) + 1e-6
    for add in (False, True):
        out, whole = guarded(rows, 35)
        if add:
            out.copy_(before)
            matrix.add(x, out)
        else:
            matrix.write(x, out)
        wanted = exact + before.numpy() if add else exact
        assert (numpy.abs(out.numpy() - wanted) <= bound).all()
        assert guards_stand(out, whole)


@pytest.mark.parametrize("layout", ["Q4_1", "Q4_0", "Q8_0"])
def test_one_huge_activation_does_not_drown_the_other_blocks(layout: str) -> None:
    blocks, weights = stored_weights(layout, 24, 128, seed=5)
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(6))
    x[0, 7] = 30_000.0
    x[0, 64:96] *= 1e-20
    out = torch.empty(1, 24)
    native.matmul_blocks(x, blocks, layout, out)
    exact = x.numpy().astype(numpy.float64) @ weights.T
    assert (numpy.abs(out.numpy() - exact) <= error_bound(x, weights, layout)).all()


@pytest.mark.parametrize("layout", ["Q4_1", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [1, 12, 80])
def test_what_is_no_number_stays_in_its_row(layout: str, bad: float, rows: int) -> None:
    blocks, _ = stored_weights(layout, 9, 64, seed=3)
    x = torch.zeros(rows + 1, 64)
    x[0, 33] = bad
    out = torch.empty(rows + 1, 9)
    native.matmul_blocks(x, blocks, layout, out)
    assert not out[0].isfinite().any()
    assert (out[1:] == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_does_not_depend_on_its_company(layout: str) -> None:
    blocks, _ = stored_weights(layout, 50, 608, seed=9)
    matrix = native.BlockMatrix(blocks, layout)
    # Few rows and many are multiplied in different ways, and each way must keep it.
    few, many = ((0, 1), (3, 5), (2, 8)), ((1, 70), (3, 90), (17, 83))
    for most, parts in ((8, few), (90, many)):
        x = torch.randn(most, 608)
        together = torch.empty(most, 50)
        matrix.write(x, together)
        for first, last in parts:
            apart = torch.empty(last - first, 50)
            matrix.write(x[first:last], apart)
            assert torch.equal(apart, together[first:last])


# In floats, few rows and many are multiplied in different ways.
@pytest.mark.parametrize("variant", IN_INTEGERS, indirect=True)
@pytest.mark.parametrize("layout", ["Q4_1", "Q4_0", "Q8_0"])
def test_quantized_rows_keep_no_company_however_many(layout: str) -> None:
    """Weights are read where they lie or laid out for many rows, and rows of x go in panels: none of that may show."""
    blocks, _ = stored_weights(layout, 54, 96, seed=12)
    matrix = native.BlockMatrix(blocks, layout)
    x = torch.randn(607, 96)
    alone = torch.empty(607, 54)
    for row in range(607):
        matrix.write(x[row : row + 1], alone[row : row + 1])
    for most in (2, 3, 7, 13, 31, 64, 300, 607):
        together = torch.empty(most, 54)
        matrix.write(x[:most], together)
        assert torch.equal(together, alone[:most])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dequantize_is_exact(layout: str) -> None:
    blocks, weights = stored_weights(layout, 37, 96, seed=1)
    out, whole = guarded(37, 96)
    native.dequantize(blocks, layout, out)
    # Scale times quant is exact in float32; adding the minimum rounds once, as here.
    assert numpy.array_equal(out.numpy(), weights.astype(numpy.float32))
    assert guards_stand(out, whole)
    rows = torch.tensor([36, 0, 0, 17])
    chosen = torch.empty(4, 96)
    native.BlockMatrix(blocks, layout).select(rows, chosen)
    assert numpy.array_equal(chosen.numpy(), weights.astype(numpy.float32)[rows.numpy()])


def test_the_number_of_threads_changes_nothing() -> None:
    blocks, _ = stored_weights("Q4_1", 300, 576, seed=2)
    matrix, before = native.BlockMatrix(blocks, "Q4_1"), torch.get_num_threads()
    for rows in (1, 70):
        x, results = torch.randn(rows, 576), []
        try:
            for threads in (1, 2, 3):
                native.use_own_threads(threads)
                results.append(torch.empty(rows, 300))
                matrix.write(x, results[-1])
        finally:
            native.share_torch_threads(before)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


def test_misuse_is_refused() -> None:
    blocks, _ = stored_weights("Q4_1", 8, 64, seed=4)
    matrix = native.BlockMatrix(blocks, "Q4_1")
    good = torch.zeros(2, 64), torch.zeros(2, 8)
    wrong_x = (torch.zeros(2, 32), torch.zeros(2, 64, dtype=torch.float64), torch.zeros(64, 2).t(), torch.zeros(64))
    for x in wrong_x:
        with pytest.raises(ValueError, match="x must be float32"):
            matrix.write(x, good[1])
    for out in (torch.zeros(2, 9), torch.zeros(2, 8, dtype=torch.float16)):
        with pytest.raises(ValueError, match="out must be float32"):
            matrix.add(good[0], out)
    with pytest.raises(ValueError, match="as many rows"):
        matrix.write(good[0], torch.zeros(3, 8))
    with pytest.raises(ValueError, match="no compiled product"):
        native.BlockMatrix(blocks, "IQ1_S")
    with pytest.raises(ValueError, match="whole number"):
        native.BlockMatrix(blocks, "Q8_0")
    with pytest.raises(ValueError, match="contiguous uint8"):
        native.BlockMatrix(blocks[:, ::2], "Q4_1")
    with pytest.raises(ValueError, match="bias"):
        native.BlockMatrix(blocks, "Q4_1", torch.zeros(9))
    with pytest.raises(ValueError, match="outside the matrix"):
        matrix.select(torch.tensor([8]), torch.empty(1, 64))
    matrix.write(torch.zeros(0, 64), torch.zeros(0, 8))


@pytest.mark.parametrize("spread", [True, False])
def test_pages_of_weights_take_turns_among_numa_nodes(spread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, tuple[int, ...]]] = []
    nodes = NumaNodes((0, 3), None if spread else "mbind: Operation not permitted")
    monkeypatch.setattr(products, "numa_nodes", lambda: nodes)
    monkeypatch.setattr(products, "spread_pages", lambda *call: asked.append(call) or 0)
    raw = torch.zeros(32, 4096 // 32 * 20, dtype=torch.uint8)
    matrix = native.BlockMatrix(raw, "Q4_1")
    assert asked == ([(matrix.blocks.data_ptr(), raw.nbytes, (0, 3))] if spread else [])
