"""The kernels by which ranks on GPUs exchange numbers: they compile, where NVRTC is, and have every name that is asked
of them. What they compute needs a GPU: tests/gpu/test_ranks.py."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from holdfast.execution.gpu.cuda import compiler, module
from holdfast.execution.parallel.gpu import exchange
from holdfast.execution.parallel.gpu.exchange import MOST_RANKS, exchange_macros


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that a rank looks up."""
    found: list[str] = []

    class Names:
        def __init__(self, source: str, macros: dict[str, int]) -> None:
            assert source == module.text("rank_exchange")

        def kernel(self, name: str, **_: Any) -> None:
            found.append(name)

    monkeypatch.setattr(exchange, "Module", Names)
    exchange.ExchangeKernels(2)
    return found


@pytest.mark.skipif(not compiler.available(), reason="libnvrtc is not installed")
@pytest.mark.parametrize(("capability", "size"), [((8, 0), 2), ((8, 9), 3), ((9, 0), MOST_RANKS)])
def test_compiles_with_all_kernels(capability: tuple[int, int], size: int, names: list[str]) -> None:
    options = compiler.options(capability, exchange_macros(size))
    made = compiler.compile_source(module.text("rank_exchange"), options)
    assert made.startswith(b"\x7fELF")
    assert len(names) == 20
    assert [name for name in names if b"\0.text." + name.encode() + b"\0" not in made] == []
