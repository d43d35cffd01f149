"""What the benchmarks of quantized products measure: every format's kernels, in tiny shapes, and right results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks import gpu_kernels_experts as experts
from benchmarks import gpu_kernels_quantized as products


@pytest.mark.parametrize("name", [*products.SCALED, *products.BLOCKS])
def test_products_of_every_format_are_right(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    # As elsewhere here: the interpreter does not compute in bfloat16 as a GPU does.
    kind = torch.float16 if device.type == "cpu" else torch.bfloat16
    monkeypatch.setattr(products, "KIND", kind)
    product = products.Product(name, 128, 512, device=device, copies=2)
    for rows in (1, 3):
        x, out = (torch.randn(rows, width, device=device).to(kind) for width in (512, 128))
        product.check(x, out)
        product.dense.neg_()
        with pytest.raises(SystemExit, match="off by"):
            product.check(x, out)
        product.dense.neg_()


@pytest.mark.parametrize("name", list(experts.LAYOUTS))
def test_experts_of_every_kind_are_multiplied(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(experts, "GPU", device)
    layer = experts.Layer(name, (4, 2, 256, 256), 3, copies=2)
    layer.inner.fill_(torch.nan)
    layer.rows.fill_(torch.nan)
    layer.whole(1)
    assert not bool(layer.inner.isnan().any())
    assert not bool(layer.rows.isnan().any())
