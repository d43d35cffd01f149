"""RAM beside a GPU for a store of KV pages on disk: every part is named and counted, and held against what is free."""

from __future__ import annotations

import pytest
from planned_llama import LLAMA_3_8B, idle_gpu

from holdfast.config import EngineConfig
from holdfast.errors import DoesNotFitError
from holdfast.footprint.cpu import kv_store_terms, staging_places, staging_stride
from holdfast.hardware import Memory
from holdfast.models import ModelSpec, from_config
from holdfast.planner import Plan
from holdfast.planner.serve.gpu_plan import make_gpu_plan
from holdfast.planner.serve.host_memory import with_host_memory
from holdfast.planner.serve.kv_store_ram import store_terms, with_kv_store
from holdfast.units import GIB, MIB, format_bytes

GPU = idle_gpu(40 * GIB)


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return from_config(LLAMA_3_8B)


def made(spec: ModelSpec, available_bytes: int, **settings: object) -> Plan:
    config = EngineConfig.from_arguments(device="cuda", skip_tokenizer_init=True, **settings)
    machine = Memory(total_bytes=64 * GIB, available_bytes=available_bytes, limited_by="machine")
    plan = with_host_memory(make_gpu_plan(spec, None, config, [GPU]), config, machine, front_bytes=GIB)
    return with_kv_store(plan, config, machine, front_bytes=GIB)


def test_every_part_is_named(spec: ModelSpec) -> None:
    assert not [one for one in made(spec, 0).decisions if one.field == "kv_store_ram"]
    found = made(spec, 32 * GIB, kv_store="/kv", kv_store_size="50GiB")
    page = found.engine.layout.page_bytes
    terms = store_terms(EngineConfig.from_arguments(kv_store="/kv", kv_store_size="50GiB"), page)
    assert terms == {
        "buffers": 2 * staging_places(page) * staging_stride(page),
        "queue": 64 * MIB,
        "work": 16 * MIB,
        "index": 50 * GIB // page * 260,
    }
    (told,) = [one for one in found.decisions if one.field == "kv_store_ram"]
    assert told.value == format_bytes(sum(terms.values()))
    assert f"index {format_bytes(terms['index'])}" in told.reason


def test_it_is_refused_where_ram_is_short_with_a_size_that_is_not(spec: ModelSpec) -> None:
    """Pinned KV pages count too."""
    free = 8 * GIB
    with pytest.raises(DoesNotFitError) as caught:
        made(spec, free, kv_store="/kv", kv_store_size="100000GiB")
    assert caught.value.field == "kv_store_size"
    flag, size = str(caught.value.fix).split()
    assert flag == "--kv-store-size"
    made(spec, free, kv_store="/kv", kv_store_size=size)
    with pytest.raises(DoesNotFitError, match="index of the KV store"):
        made(spec, free, kv_store="/kv", kv_store_size=size, kv_ram="2GiB")
    with pytest.raises(DoesNotFitError) as caught:
        made(spec, 4 * GIB, kv_store="/kv")
    assert caught.value.field == "kv_store"


@pytest.mark.parametrize("page", [1000, 4096, 300_000, 2 << 20, 40 << 20])
def test_buffers_are_those_that_pages_pass_through(page: int) -> None:
    one, two = (kv_store_terms(GIB, page, ways=ways)["buffers"] for ways in (1, 2))
    assert two == 2 * one
    assert one % staging_stride(page) == 0
    assert one <= max(32 * MIB, staging_stride(page))
