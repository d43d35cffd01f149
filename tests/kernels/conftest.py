"""Kernels run on the GPU where there is one, else in Triton's interpreter, with two of its faults mended."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    from triton.runtime import interpreter

    _patch_tensor, _patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    _patched = set[frozenset[str]]()

    def _patch_with_index(tensor: Any, scope: Any) -> None:
        """Triton 3.6 makes loop bounds of arrays with one element by int(), which numpy has refused since 2.4."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def _patch_once(function: Any) -> Any:
        """Triton 3.6 patches its language again at every call of a device function, which takes most of the time."""
        languages = frozenset(name for name in ("tl", "core") if name in function.__globals__)
        if languages in _patched:
            return interpreter._LangPatchScope()
        scope = _patch_language(function)
        if not _patched:
            scope.restore = MethodType(_restore, scope)
        _patched.add(languages)
        return scope

    def _restore(scope: Any) -> None:
        """At the end of the launch, which patched first."""
        _patched.clear()
        type(scope).restore(scope)

    interpreter._patch_lang_tensor = _patch_with_index
    interpreter._patch_lang = _patch_once


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", params=["llama", "window"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tiny_gpu import LLAMA, MISTRAL, Tiny

    return Tiny(tmp_path_factory.mktemp("tiny"), **(LLAMA if request.param == "llama" else MISTRAL))


@pytest.fixture
def no_kernel_for_few_rows(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """In the interpreter it takes most of the time; it has tests of its own."""
    from holdfast.execution.gpu.layers import linear

    if device.type == "cpu":
        monkeypatch.setattr(linear, "SKINNY_ROWS", 0)


@pytest.fixture
def few_programs_of_a_row(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The interpreter takes as long for a program whatever the size of its tile."""
    from holdfast.execution.triton_kernels.rounded import row_products
    from holdfast.execution.triton_kernels.rounded.tiles import RowTile

    if device.type == "cpu":
        monkeypatch.setattr(row_products, "row_tile", lambda inputs, gated: RowTile(64, 2, 1))
