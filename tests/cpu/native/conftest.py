"""Every test here needs the compiled kernels; on a machine that could not build them they are skipped, with why. Where
there are several variants that this CPU can run, every test runs with the best, and each of its cases with one of the
others in turn, so that every variant meets every value of every parameter; with all the others in long runs. All cases
of a file that says ALL_VARIANTS run with each, those of one that says BEST_VARIANT with the others only among the long
ones, and a test that names its variants with those."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.execution import native
from holdfast.execution.native import loading
from holdfast.hardware import kernels

HERE = Path(__file__).parent


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if any("variant" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")):
        return
    best, *others = kernels.runnable_variants() or ["none"]
    rare = getattr(metafunc.module, "BEST_VARIANT", False)
    marks = [pytest.mark.long] if rare else []
    metafunc.parametrize("variant", [best, *(pytest.param(name, marks=marks) for name in others)], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE and isinstance(item, pytest.Function) and not _in_turn(item):
            item.add_marker(pytest.mark.long)


def _in_turn(item: pytest.Function) -> bool:
    """Whether its variant is the best, or the one of the others whose turn it is in its case. A case without
    parameters, and one of few, runs with all."""
    best, *others = kernels.runnable_variants() or ["none"]
    marks = list(item.iter_markers("parametrize"))
    named = any("variant" in mark.args[0] for mark in marks)
    if named or getattr(item.module, "ALL_VARIANTS", False) or item.callspec.params["variant"] == best:
        return True
    if max((len(mark.args[1]) for mark in marks), default=0) < len(others):
        return True
    firsts = [mark.args[0] if isinstance(mark.args[0], str) else mark.args[0][0] for mark in marks]
    case = sum(item.callspec.indices[first.partition(",")[0].strip()] for first in firsts)
    return others[case % len(others)] == item.callspec.params["variant"]


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
