"""RAM for KV blocks that leave a GPU, where nothing was said of it: a modest share, in the plan by name."""

from __future__ import annotations

import pytest
from planned_llama import LLAMA_3_8B, idle_gpu

from holdfast import plan
from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError, DoesNotFitError
from holdfast.footprint.streamed import page_tables_bytes
from holdfast.hardware import Memory
from holdfast.models import ModelSpec, from_config
from holdfast.planner import Plan
from holdfast.planner.serve.gpu_plan import make_gpu_plan
from holdfast.planner.serve.host_memory import with_host_memory
from holdfast.planner.sizing.host_ram import usual_kv_ram
from holdfast.units import GIB, MIB, format_bytes

FRONT = GIB // 4


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return from_config(LLAMA_3_8B)


def made(spec: ModelSpec, free_ram: int, vram: int = 80 * GIB, front: int = FRONT, **settings: object) -> Plan:
    gpu = idle_gpu(vram)
    config = EngineConfig.from_arguments(device="cuda", **settings)
    found = make_gpu_plan(spec, None, config, [gpu], front_bytes=front)
    machine = Memory(total_bytes=free_ram, available_bytes=free_ram, limited_by="machine")
    return with_host_memory(found, config, machine, front)


def decision(found: Plan) -> tuple[str, str]:
    return next(((one.value, one.source) for one in found.decisions if one.field == "kv_ram"), ("", ""))


def test_a_quarter_of_what_the_server_leaves_free(spec: ModelSpec) -> None:
    found = made(spec, 128 * GIB)
    kv_ram = found.engine.kv_ram_bytes
    assert 26 * GIB < kv_ram < 0.25 * 0.9 * 128 * GIB
    assert decision(found) == (format_bytes(kv_ram), "measured")
    assert found.terms["page_tables"] == page_tables_bytes(kv_ram)
    assert sum(found.terms.values()) <= found.budget_bytes


def test_no_more_than_twice_the_pool(spec: ModelSpec) -> None:
    found = made(spec, 2048 * GIB, vram=24 * GIB)
    before = made(spec, 2048 * GIB, vram=24 * GIB, kv_ram="0")
    assert found.engine.kv_ram_bytes == 2 * before.terms["kv_pool"]
    assert before.engine.kv_ram_bytes == 0
    assert "page_tables" not in before.terms


def test_none_where_ram_is_short_nothing_is_cached_or_the_process_is_a_users(spec: ModelSpec) -> None:
    assert decision(made(spec, 4 * GIB)) == ("none", "measured")
    assert made(spec, 4 * GIB).engine.kv_ram_bytes == 0
    for free in (128 * GIB, 4 * GIB):
        assert made(spec, free, enable_prefix_caching=False).engine.kv_ram_bytes == 0
        assert decision(made(spec, free, front=0)) == ("", "")
    assert made(spec, 128 * GIB, swap_space=0).engine.kv_ram_bytes == 0
    assert made(spec, 128 * GIB, front=0, kv_ram="8GiB").engine.kv_ram_bytes == 8 * GIB


def test_its_page_tables_never_cost_the_context(spec: ModelSpec) -> None:
    """A pool that holds one sequence and a little: tables of gigabytes of RAM would take that little."""
    without = made(spec, 1024 * GIB, kv_ram="0", max_model_len=8192, kv_cache_memory_bytes="1026MiB", vram=20 * GIB)
    least = 1 + without.engine.layout.peak_blocks(8192, without.limits.max_num_batched_tokens)
    assert without.engine.blocks >= least
    tight = without.budget_bytes - sum(without.terms.values())
    found = made(
        spec, 1024 * GIB, max_model_len=8192, kv_cache_memory_bytes="1026MiB", vram=20 * GIB - int(tight / 0.9) + MIB
    )
    assert found.engine.blocks >= least
    assert found.engine.kv_ram_bytes < 2 * 1026 * MIB
    assert sum(found.terms.values()) <= found.budget_bytes


def test_what_was_set_is_held_against_ram_with_copies_of_adapters(spec: ModelSpec) -> None:
    with pytest.raises(DoesNotFitError) as caught:
        made(spec, 16 * GIB, kv_ram="16GiB")
    assert caught.value.field == "kv_ram"
    lora = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 64, "max_cpu_loras": 64}
    assert made(spec, 64 * GIB, **lora).engine.kv_ram_bytes < made(spec, 64 * GIB).engine.kv_ram_bytes


def test_zero_is_allowed_on_a_cpu_and_nothing_else() -> None:
    assert EngineConfig.from_arguments(device="cpu", kv_ram="0").kv_ram_bytes == 0
    assert EngineConfig.from_arguments(device="cuda").kv_ram_bytes is None
    with pytest.raises(ConfigurationError):
        EngineConfig.from_arguments(device="cuda", kv_ram="4")  # A unit was forgotten.


def test_plan_says_it_too() -> None:
    answer = plan("meta-llama/Llama-3.1-8B-Instruct", gpu="rtx4090", ram="64GiB")
    (said,) = [one for one in answer.decisions if one.field == "kv_ram"]
    assert said.value == format_bytes(
        usual_kv_ram(answer.question.machine.pinned_bytes or 0, answer.fit.ranks[0].pool_bytes)
    )
    assert f"{said.value} of it for KV blocks" in str(answer)
    others = plan("meta-llama/Llama-3.1-8B-Instruct", gpu="rtx4090", ram="64GiB", engine="vllm")
    assert not [one for one in others.decisions if one.field == "kv_ram"]
