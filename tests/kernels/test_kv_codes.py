"""float8 codes of keys and values on the device: every code read, every rounding made, against torch's conversions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from holdfast.execution.triton_kernels.attention import kv_codes

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
BLOCK = 1024


@triton.jit
def _encode(x, out, count, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    codes = kv_codes.encode(tl.load(x + index, mask=index < count, other=0.0), FORMAT)
    tl.store(out + index, codes, mask=index < count)


@triton.jit
def _decode(codes, out, count, FORMAT: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    read = kv_codes.decode(tl.load(codes + index, mask=index < count, other=0), FORMAT, HARDWARE)
    tl.store(out + index, read, mask=index < count)


def launch(kernel: Any, source: torch.Tensor, out: torch.Tensor, **constants: Any) -> torch.Tensor:
    kernel[(triton.cdiv(len(source), BLOCK),)](source, out, len(source), BLOCK=BLOCK, **constants)
    return out


@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_every_code_is_read(stored: torch.dtype, device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    wanted = codes.cpu().view(stored).float()
    _, kept = kv_codes.as_codes(codes.view(stored))
    able = device.type == "cuda" and kv_codes.converts_in_hardware()
    for hardware in (False, True) if able else (False,):
        found = torch.full((256,), 7.0, dtype=torch.float16, device=device)
        launch(_decode, codes, found, FORMAT=kept, HARDWARE=hardware)
        torch.testing.assert_close(found.cpu().float(), wanted, rtol=0, atol=0, equal_nan=True)


def numbers(stored: torch.dtype) -> torch.Tensor:
    """All that are codes, those in the middle between two, and the nearest float32 on both sides of each; what is too
    large, what is too small, and any others."""
    codes = torch.arange(256, dtype=torch.uint8).view(stored).double()
    finite = codes[codes.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    exact = torch.cat((finite, middles)).float()
    infinity = torch.tensor(torch.inf)
    near = [exact, exact.nextafter(infinity), exact.nextafter(-infinity)]
    source = torch.Generator().manual_seed(5)
    drawn = torch.randn(4000, generator=source).exp() * torch.randn(4000, generator=source).sign()
    odd = torch.tensor([0.0, -0.0, 1e-45, -1e-38, 464.0, 465.0, -480.0, 61440.0, -1e30, 3e38, torch.inf, -torch.inf])
    return torch.cat((*near, drawn, drawn * 1e-3, drawn * 1e3, odd, torch.tensor([torch.nan])))


@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_every_rounding_is_that_of_torch(stored: torch.dtype, device: torch.device) -> None:
    x = numbers(stored)
    wanted = x.clamp(-LARGEST[stored], LARGEST[stored]).to(stored)
    found = torch.full((len(x),), 0x55, dtype=torch.uint8, device=device)
    _, kept = kv_codes.as_codes(found.view(stored))
    launch(_encode, x.to(device), found, FORMAT=kept)
    nan = x.isnan()
    assert found.cpu()[nan].view(stored).isnan().all()
    different = found.cpu()[~nan] != wanted[~nan].view(torch.uint8)
    assert not different.any(), x[~nan][different]
