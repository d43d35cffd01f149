"""Compiled products with five-bit blocks, K-quants and IQ4 against float64 over what the gguf package reads."""

from __future__ import annotations

import itertools

import gguf
import numpy
import numpy.typing
import pytest
import torch
from quantized_blocks import NEW_KINDS, block_shape, drawn, written

from holdfast.execution import native
from holdfast.execution.native.loading import kernels
from holdfast.hardware.kernels import runnable_variants

GUARD = 1234.5
Doubles = numpy.typing.NDArray[numpy.float64]

IN_INTEGERS = [name for name in runnable_variants() if name != "portable"]


def in_integers() -> bool:
    return kernels().VARIANT != "portable"


def error_bound(x: torch.Tensor, weights: numpy.typing.NDArray[numpy.float32]) -> Doubles:
    """What may be lost: a few units in float32's last place of every term, more of them where one sum takes all terms
    one by one; in integers, half a unit of sixteen bits of the largest activation of 32 for each of them."""
    sizes, exact = numpy.abs(x.contiguous().numpy().astype(numpy.float64)), numpy.abs(weights.astype(numpy.float64))
    bound: Doubles = 2.0 ** (-22 if in_integers() else -19) * (sizes @ exact.T) + 1e-30
    if in_integers():
        peaks = numpy.repeat(sizes.reshape(len(x), -1, 32).max(2), 32, axis=1)
        bound += peaks @ exact.T / 65000
    return bound


def exactly(x: torch.Tensor, weights: numpy.typing.NDArray[numpy.float32]) -> Doubles:
    product: Doubles = x.contiguous().numpy().astype(numpy.float64) @ weights.astype(numpy.float64).T
    return product


def made(kind: str, rows: int, columns: int, seed: int, bias: torch.Tensor | None = None):  # type: ignore[no-untyped-def]
    raw, weights = drawn(kind, rows, columns, seed)
    return native.BlockMatrix(torch.from_numpy(raw.copy()), kind, bias), weights


def guarded(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.full((rows + 2, columns + 7), GUARD)
    view = whole[1:-1, 3:-4]
    view.fill_(float("nan"))
    return view, whole


@pytest.mark.parametrize("kind", NEW_KINDS)
@pytest.mark.parametrize(("outputs", "blocks"), [(1, 1), (3, 2), (53, 3), (18, 6)])
def test_product_equals_float64(kind: str, outputs: int, blocks: int) -> None:
    columns = blocks * block_shape(kind)[0]
    matrix, weights = made(kind, outputs, columns, seed=outputs)
    generator = torch.Generator().manual_seed(columns)
    for rows in (1, 2, 3, 4, 7, 8, 9, 37, 64, 65, 131):
        x = torch.randn(rows, columns, generator=generator)
        out, whole = guarded(rows, outputs)
        matrix.write(x, out)
        assert (numpy.abs(out.numpy() - exactly(x, weights)) <= error_bound(x, weights)).all()
        out.fill_(GUARD)
        assert (whole == GUARD).all()


@pytest.mark.parametrize("kind", NEW_KINDS)
@pytest.mark.parametrize("rows", [1, 6, 70])
def test_bias_addition_and_rows_that_lie_apart(kind: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    bias = torch.randn(35, generator=generator)
    matrix, weights = made(kind, 35, 256, rows, bias)
    x = torch.randn(rows, 400, generator=generator)[:, 40:296]
    exact, bound = exactly(x, weights) + bias.numpy(), error_bound(x, weights) + 1e-6
    before = torch.randn(rows, 35, generator=generator)
    out, _ = guarded(rows, 35)
    matrix.write(x, out)
    assert (numpy.abs(out.numpy() - exact) <= bound).all()
    out.copy_(before)
    matrix.add(x, out)
    assert (numpy.abs(out.numpy() - exact - before.numpy()) <= bound).all()


@pytest.mark.parametrize("kind", NEW_KINDS)
def test_elements_are_those_of_the_package(kind: str) -> None:
    matrix, weights = made(kind, 39, 768, seed=1)
    out, whole = guarded(39, 768)
    matrix.dequantize(out)
    assert numpy.array_equal(out.numpy(), weights)
    out.fill_(GUARD)
    assert (whole == GUARD).all()
    rows = torch.tensor([38, 0, 0, 17, 36, 35])
    chosen = torch.empty(6, 768)
    matrix.select(rows, chosen)
    assert numpy.array_equal(chosen.numpy(), weights[rows.numpy()])


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1"])
def test_what_the_package_quantizes_is_multiplied(kind: str) -> None:
    raw, weights = written(kind, 40, 896, seed=8)
    x, out = torch.randn(5, 896, generator=torch.Generator().manual_seed(3)), torch.empty(5, 40)
    native.matmul_blocks(x, torch.from_numpy(raw.copy()), kind, out)
    assert (numpy.abs(out.numpy() - exactly(x, weights)) <= error_bound(x, weights)).all()


@pytest.mark.parametrize("kind", NEW_KINDS)
def test_one_huge_activation_does_not_drown_the_other_blocks(kind: str) -> None:
    matrix, weights = made(kind, 24, 256, seed=5)
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(6))
    x[0, 7] = 30_000.0
    x[0, 64:96] *= 1e-20
    out = torch.empty(1, 24)
    matrix.write(x, out)
    assert (numpy.abs(out.numpy() - exactly(x, weights)) <= error_bound(x, weights)).all()


@pytest.mark.parametrize("kind", NEW_KINDS)
def test_what_is_no_number_stays_in_its_row(kind: str) -> None:
    matrix, _ = made(kind, 9, 256, seed=3)
    for rows, bad in itertools.product((1, 12, 80), (float("nan"), float("inf"))):
        x = torch.zeros(rows + 1, 256)
        x[0, 33] = bad
        out = torch.empty(rows + 1, 9)
        matrix.write(x, out)
        assert not out[0, :8].isfinite().any()
        assert (out[1:] == 0).all()


# In floats, few rows and many are multiplied in different ways.
@pytest.mark.parametrize("variant", IN_INTEGERS, indirect=True)
@pytest.mark.parametrize("kind", NEW_KINDS)
def test_a_row_does_not_depend_on_its_company(kind: str) -> None:
    matrix, _ = made(kind, 20, 512, seed=12)
    x, alone = torch.randn(70, 512), torch.empty(70, 20)
    for row in range(70):
        matrix.write(x[row : row + 1], alone[row : row + 1])
    for most in (2, 3, 7, 13, 31, 64, 70):
        together = torch.empty(most, 20)
        matrix.write(x[:most], together)
        assert torch.equal(together, alone[:most])


def test_the_number_of_threads_changes_nothing() -> None:
    matrix, _ = made("Q4_K", 300, 768, seed=2)
    before = torch.get_num_threads()
    for rows in (1, 70):
        x, results = torch.randn(rows, 768), []
        try:
            for threads in (1, 2, 3):
                native.use_own_threads(threads)
                results.append(torch.empty(rows, 300))
                matrix.write(x, results[-1])
        finally:
            native.share_torch_threads(before)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


def test_rows_are_whole_blocks() -> None:
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q4_K] == (256, 144)
    with pytest.raises(ValueError, match="whole number of Q4_K blocks"):
        native.BlockMatrix(torch.zeros(4, 100, dtype=torch.uint8), "Q4_K")
