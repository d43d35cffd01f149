"""Which pages may take each other's place on disk: a digest of all that they depend on besides their tokens."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.config import EngineConfig
from holdfast.engine.core.kv_store import model_digest
from holdfast.errors import ConfigurationError
from holdfast.kvcache import KVLayout, form_groups


def layout() -> KVLayout:
    groups, places = form_groups([None, None])
    return KVLayout(groups=groups, block_tokens=16, layers_per_page=places, kv_heads=2, head_dim=8, element_bytes=2)


def digest(
    path: Path, *, spec: Any = "a spec", of: KVLayout | None = None, how: str = "bf16", scales: Any = ()
) -> bytes:
    files = SimpleNamespace(weights=(path,), format="safetensors")
    return model_digest(files, spec, of or layout(), (how, "auto"), iter(scales))


def test_whatever_changes_a_page_changes_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(256)) * 4096)
    os.utime(path, ns=(1, 1))
    first = digest(path)
    assert digest(path) == first
    assert digest(path, spec="another") != first
    assert digest(path, of=replace(layout(), block_tokens=32)) != first
    assert digest(path, how="float16") != first
    assert digest(path, scales=[b"calibrated"]) != first
    assert digest(path, scales=[b"calibrated"]) != digest(path, scales=[b"calibrated otherwise"])
    os.utime(path, ns=(2, 2))
    assert digest(path) != first
    os.utime(path, ns=(1, 1))
    assert digest(path) == first
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)
    os.utime(path, ns=(1, 1))
    assert digest(path) != first


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"kv_store_size": "1GiB"}, "kv_store_size"),
        ({"kv_store_daily_writes": "1GiB"}, "kv_store_daily_writes"),
        ({"kv_store": "/x", "enable_prefix_caching": False}, "kv_store"),
        ({"kv_ram": "1GiB", "device": "cpu"}, "kv_ram"),
        ({"kv_ram": "1GiB", "device": "cuda", "enable_prefix_caching": False}, "kv_ram"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        EngineConfig.from_arguments(**arguments)
    assert refused.value.field == field
    assert refused.value.fix


def test_vllms_names_mean_the_same_ram() -> None:
    for arguments in ({"kv_ram": "3GiB"}, {"kv_offloading_size": 3}, {"swap_space": 3}):
        assert EngineConfig.from_arguments(device="cuda", **arguments).kv_ram_bytes == 3 << 30
    assert EngineConfig.from_arguments(device="cpu", swap_space=3).kv_ram_bytes == 0
