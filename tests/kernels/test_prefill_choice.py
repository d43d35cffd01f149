"""Which kernels prompts have, and the reasons that are printed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from holdfast.execution.batch import RunnerLimits
from holdfast.execution.gpu.layers.prefill_kernel import choose_gated_product, choose_prefill_kernel
from holdfast.execution.gpu.step import BatchBuilder
from holdfast.kvcache.groups import KVGroup, KVLayout
from holdfast.records import Row

CUDA = torch.device("cuda", 0)


def chosen(
    *, heads: int = 32, kv_heads: int = 8, width: int = 128, softcap: float = 0.0, block: int = 16, size: int = 2,
    device: torch.device = CUDA, dtype: torch.dtype = torch.bfloat16,
) -> tuple[object, str]:  # fmt: skip
    spec: Any = SimpleNamespace(
        heads=heads, kv_heads=kv_heads, head_dim=width, decoder=SimpleNamespace(attention_softcap=softcap)
    )
    layout = KVLayout(
        groups=(KVGroup(0, (0,), None),),
        block_tokens=block,
        layers_per_page=1,
        kv_heads=kv_heads,
        head_dim=width,
        element_bytes=size,
    )
    decision = choose_prefill_kernel(spec, layout, device, dtype)
    assert decision.field == "prefill_attention"
    return decision.value, decision.reason


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton, "__version__", "3.6.0")


@pytest.mark.usefixtures("hopper")
def test_the_kernel_for_hopper_where_it_can() -> None:
    for heads, kv_heads, width in ((32, 8, 128), (16, 16, 64), (9, 3, 64), (128, 1, 128)):
        assert chosen(heads=heads, kv_heads=kv_heads, width=width)[0] == "hopper"
    assert "expanded" not in chosen()[1]
    assert chosen(size=1)[0] == "hopper"
    assert "expanded" in chosen(size=1)[1]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"width": 96}, "these have 96"),
        ({"width": 256}, "these have 256"),
        ({"softcap": 50.0}, "softcap"),
        ({"size": 4, "dtype": torch.float32}, "these have 4"),
        ({"block": 4}, "this is 4"),
        ({"block": 24}, "this is 24"),
        ({"heads": 256, "kv_heads": 1}, "128 query heads"),
        ({"device": torch.device("cpu")}, "needs a GPU"),
    ],
    ids=str,
)
def test_else_the_one_in_triton_and_why(change: dict[str, Any], said: str) -> None:
    value, reason = chosen(**change)
    assert value == "triton"
    assert said in reason


@pytest.mark.usefixtures("hopper")
def test_other_gpus_and_other_releases_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for release in ("3.5.1", "3.9.0", "4.0.0"):
        monkeypatch.setattr(triton, "__version__", release)
        assert chosen()[0] == "triton"
        assert release in chosen()[1]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert chosen() == ("triton", "the kernel for Hopper needs compute capability 9.0; this GPU has 8.9")


def gated(rows: int, inputs: int, dtype: torch.dtype = torch.bfloat16, *, bias: bool = False) -> tuple[object, str]:
    decision = choose_gated_product((rows, inputs), dtype, CUDA, torch.empty(rows) if bias else None)
    assert decision.field == "gated_product"
    return decision.value, decision.reason


def test_where_gates_are_taken_in_the_product(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gated(28672, 4096)[0] == gated(256, 1024)[0] == "hopper"
    for (value, reason), said in (
        (gated(2 * 1000, 4096), "these are 1,000 and 4,096"),
        (gated(256, 4128), "these are 128 and 4,128"),
        (gated(256, 960), "from 1,024 inputs on"),
        (gated(256, 64, torch.float32), "these have 4"),
        (gated(256, 64, bias=True), "bias"),
    ):
        assert value == "cublas"
        assert said in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert gated(28672, 4096) == ("cublas", "the kernel for Hopper needs compute capability 9.0; this GPU has 10.0")


def test_where_the_pages_of_prompts_go_when_they_are_expanded(device: torch.device) -> None:
    """One row after the other; rows of a single token have none."""
    limits = RunnerLimits(max_num_seqs=8, max_model_len=512, max_num_batched_tokens=256)
    forms = BatchBuilder(limits, device, tile_tokens=32, block_tokens=16)
    rows = [Row(3, 0, 16, True), Row(1, 40, 1, True), Row(0, 31, 2, True), Row(2, 100, 60, False)]
    prefill = forms.mixed(rows).rows.prefill
    assert prefill is not None
    assert prefill.slots.tolist() == [3, 0, 2]
    assert prefill.page_firsts.tolist() == [0, 1, 4]
    assert (prefill.total_pages, prefill.most_pages) == (14, 10)
    assert forms.mixed([Row(1, 40, 1, True)]).rows.prefill is None
