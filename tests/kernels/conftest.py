"""Kernels run on the GPU where there is one, else in Triton's interpreter (tests/support/quick_interpreter.py)."""

from __future__ import annotations

from collections.abc import Iterator
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
    """For whole models, most of whose time the interpreter would spend on the kernel for few rows, and on parts of a
    row's keys that are empty. Both have tests of their own."""
    from holdfast.execution.gpu.layers import linear
    from holdfast.execution.triton_kernels.attention import decode

    if device.type == "cpu":
        splits = decode.decode_splits
        monkeypatch.setattr(linear, "SKINNY_ROWS", 0)
        monkeypatch.setattr(decode, "decode_splits", lambda *sizes, codes: min(4, splits(*sizes, codes=codes)))


@pytest.fixture(scope="module")
def services() -> Iterator[list[Any]]:
    """Processes of grammars that tests have started."""
    started: list[Any] = []
    yield started
    for service in started:
        service.close()
