"""Kernels run on the GPU where there is one, else in Triton's interpreter (tests/support/quick_interpreter.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    import quick_interpreter  # noqa: F401


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", params=["llama", "window"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tiny_gpu import LLAMA, MISTRAL, Tiny

    return Tiny(tmp_path_factory.mktemp("tiny"), **(LLAMA if request.param == "llama" else MISTRAL))


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """For whole models, most of whose time the interpreter would spend on the kernel for few rows, on parts of a row's
    keys that are empty, and on tiles as small as a GPU's registers want them. All have tests of their own."""
    from holdfast.execution.gpu.layers import linear
    from holdfast.execution.triton_kernels.attention import decode
    from holdfast.execution.triton_kernels.experts import blocks, direct, scaled
    from holdfast.execution.triton_kernels.quantized import vector_products

    def widen(module: ModuleType, choice: str, **sizes: int) -> None:
        chosen = getattr(module, choice)
        monkeypatch.setattr(module, choice, lambda *args, **more: replace(chosen(*args, **more), **sizes))

    if device.type == "cpu":
        widen(blocks, "expert_block_tile", outputs=256)
        widen(direct, "expert_tile", outputs=128)
        widen(scaled, "scaled_tile", lines=128)
        widen(vector_products, "vector_tile", outputs=256)
        splits = decode.decode_splits
        monkeypatch.setattr(linear, "SKINNY_ROWS", 0)
        monkeypatch.setattr(decode, "decode_splits", lambda *sizes, codes: min(2, splits(*sizes, codes=codes)))


@pytest.fixture(scope="module")
def services() -> Iterator[list[Any]]:
    """Processes of grammars that tests have started."""
    started: list[Any] = []
    yield started
    for service in started:
        service.close()
