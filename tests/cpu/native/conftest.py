"""Every test here needs the compiled kernels; on a machine that could not build them they are skipped, with why."""

from __future__ import annotations

import pytest

from holdfast.execution import native


@pytest.fixture(autouse=True)
def _kernels_are_there() -> None:
    if not native.available():
        pytest.skip(str(native.why_not()))
