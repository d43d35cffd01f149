"""Every test here needs the compiled kernels; on a machine that could not build them they are skipped, with why. Where
there are several variants that this CPU can run, every test runs with each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.execution import native
from holdfast.execution.native import loading
from holdfast.hardware import kernels


@pytest.fixture(autouse=True, params=kernels.runnable_variants() or ["none"])
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of the kernels in use."""
    if not native.available():
        pytest.skip(str(native.why_not()))
    monkeypatch.setenv(kernels.FORCED_VARIANT, request.param)
    kernels.kernel_choice.cache_clear()
    loading._find.cache_clear()
    yield request.param
    monkeypatch.undo()
    kernels.kernel_choice.cache_clear()
    loading._find.cache_clear()
