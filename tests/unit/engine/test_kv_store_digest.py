"""Which pages may take each other's place on disk: a digest of all that they depend on besides their tokens."""

from __future__ import annotations

import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from holdfast.config import EngineConfig
from holdfast.engine.core.kv_store import (
    computed_as,
    files_stamp,
    model_digest,
    open_kv_store,
    settled_size,
    turns_beside_layers,
    usual_size,
)
from holdfast.errors import ConfigurationError, EngineError
from holdfast.footprint.cpu import kv_store_bytes
from holdfast.footprint.streamed import streamed_layers
from holdfast.kvcache import KVLayout, form_groups
from holdfast.models import RopeSpec
from holdfast.prefix_store.files.index import RECORD


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


def rope(**other: Any) -> RopeSpec:
    factors: dict[str, Any] = {"short_factors": (1.0, 2.0), "long_factors": (3.0, 4.0), "original_max_position": 4096}
    return RopeSpec(theta=1e4, dim=4, scaling="longrope", **{**factors, **other})


def test_factors_of_a_rotation_change_the_digest(tmp_path: Path) -> None:
    """They are left out of what people are shown of a rotation."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    assert digest(path, spec=rope()) == digest(path, spec=rope())
    assert digest(path, spec=rope(long_factors=(3.0, 5.0))) != digest(path, spec=rope())
    assert digest(path, spec=rope(short_factors=(1.0, 2.5))) != digest(path, spec=rope())


@pytest.mark.parametrize(
    ("scaling", "length", "same"), [("longrope", 4096, True), ("longrope", 8192, False), ("linear", 8192, True)]
)
def test_a_context_for_which_positions_turn_otherwise_changes_the_digest(scaling: str, length: int, same: bool) -> None:
    spec: Any = SimpleNamespace(rope=replace(rope(), scaling=scaling), layers=())

    def computed(max_model_len: int, gpu: object = None) -> tuple[object, ...]:
        engine = SimpleNamespace(quantize=None, expand_weights=False, compiled=True, compiled_attention=True, gpu=gpu)
        limits = SimpleNamespace(max_model_len=max_model_len)
        plan: Any = SimpleNamespace(dtype="bfloat16", kv_dtype="auto", engine=engine, limits=limits)
        return computed_as(EngineConfig(), plan, spec)

    assert (computed(length) == computed(2048)) is same
    assert computed(2048, "an H200") != computed(2048)


def test_files_that_change_while_they_are_loaded_name_no_pages(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    files: Any = SimpleNamespace(weights=(path,), format="safetensors")
    config = EngineConfig.from_arguments(kv_store=str(tmp_path / "kv"))
    before = files_stamp(config, files)
    assert before == files_stamp(config, files)
    path.write_bytes(b"others!")
    none: Any = None
    with pytest.raises(EngineError, match="changed while they were loaded"):
        open_kv_store(config, files, none, none, iter(()), before)
    assert not (tmp_path / "kv").exists()


def test_the_usual_size_does_not_shrink_as_the_store_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kv"
    total = 64 << 20

    def disk_usage(_: Path) -> Any:
        held = sum(path.stat().st_blocks * 512 for path in folder.glob("*")) if folder.exists() else 0
        return SimpleNamespace(free=total - held)

    monkeypatch.setattr("holdfast.engine.core.kv_store.shutil.disk_usage", disk_usage)
    size, _ = usual_size(folder)
    assert size == total // 2
    folder.mkdir()
    (folder / "0a.pages").write_bytes(bytes(range(256)) * (size // 256))
    assert usual_size(folder)[0] == size


def test_a_store_larger_than_its_disk_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert settled_size(1 << 20, tmp_path / "kv") == (1 << 20, "set with kv_store_size")
    assert caplog.messages == []
    assert settled_size(1 << 60, tmp_path / "kv")[0] == 1 << 60
    (said,) = caplog.messages
    assert f"kv_store_size is 1048576.00 TiB, but {tmp_path / 'kv'} has room for " in said


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"kv_store_size": "1GiB"}, "kv_store_size"),
        ({"kv_store_daily_writes": "1GiB"}, "kv_store_daily_writes"),
        ({"kv_store": "/x", "enable_prefix_caching": False}, "kv_store"),
        ({"kv_ram": "1GiB", "device": "cpu"}, "kv_ram"),
        ({"kv_ram": "1GiB", "device": "cuda", "enable_prefix_caching": False}, "kv_ram"),
        ({"kv_offloading_size": 1, "device": "cuda", "enable_prefix_caching": False}, "kv_offloading_size"),
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


@pytest.mark.parametrize(
    ("device", "name"), [("cpu", "swap_space"), ("cpu", "kv_offloading_size"), ("cuda", "swap_space")]
)
def test_a_command_of_vllms_without_prefix_caching_still_starts(device: str, name: str) -> None:
    arguments: dict[str, Any] = {name: 4, "device": device, "enable_prefix_caching": False}
    assert EngineConfig.from_arguments(**arguments).kv_ram_bytes == 0


def test_the_plan_has_room_for_the_index_of_a_full_store() -> None:
    """What a store of many small pages holds in memory, counted while it is filled."""
    pages = 20_000
    records, slots = np.zeros(pages, RECORD), dict[bytes, int]()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(pages):
        slots[number.to_bytes(32, "big")] = number
    held = tracemalloc.get_traced_memory()[0] - before + records.nbytes
    tracemalloc.stop()
    planned = kv_store_bytes(pages * 4096, 4096) - kv_store_bytes(0, 4096)
    assert held <= planned


@pytest.mark.parametrize("on_disk", [0, 2])
def test_pages_wait_for_layers_and_not_for_rows_of_an_embedding(on_disk: int, tmp_path: Path) -> None:
    placed = replace(streamed_layers([1 << 20] * 4, 2, on_disk), embedding_bytes=1 << 20, embedding_on_disk=True)
    plan: Any = SimpleNamespace(engine=SimpleNamespace(streamed=placed))
    config = EngineConfig(model="tiny", nvme_path=str(tmp_path))
    assert (turns_beside_layers(config, plan, tmp_path / "kv") is not None) == (on_disk > 0)
