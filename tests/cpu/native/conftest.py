"""Every test here needs the compiled kernels; on a machine that could not build them they are skipped, with why. Where
there are several variants that this CPU can run, every test runs with each; those of a file that says BEST_VARIANT
run with the others only among the long ones, and a test that names its variants with those."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.execution import native
from holdfast.execution.native import loading
from holdfast.hardware import kernels


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if any("variant" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")):
        return
    best, *others = kernels.runnable_variants() or ["none"]
    rare = getattr(metafunc.module, "BEST_VARIANT", False)
    marks = [pytest.mark.long] if rare else []
    metafunc.parametrize("variant", [best, *(pytest.param(name, marks=marks) for name in others)], indirect=True)


@pytest.fixture(autouse=True)
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
