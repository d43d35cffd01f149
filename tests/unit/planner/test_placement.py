"""A model larger than its GPU: as few layers as need be wait in RAM and on a disk, every byte of it counted, and what
cannot be done is refused with numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from examples import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast import plan
from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError, DoesNotFitError
from holdfast.footprint.lora import held_bytes
from holdfast.footprint.streamed import (
    DRIVER_PAGE_BYTES,
    PLACE_GRAIN_BYTES,
    STAGED_ROWS_BYTES,
    StreamedLayers,
    all_apart,
    beside_gpu,
    driver_pages,
    evenly,
    last_of_groups,
    streamed_layers,
    with_others_streamed,
)
from holdfast.hardware import Memory, Processor, gpus
from holdfast.hardware.nvidia import NvidiaGpu
from holdfast.hardware.probe import KERNEL_VARIANTS
from holdfast.models import ModelSpec, catalogue
from holdfast.planner import api
from holdfast.planner.advice.throughput import EXPECTED, host_gain, throughput
from holdfast.planner.fit.placement import LEAST_SPEED, POOL_SHARE, STREAMED_TOKENS, place
from holdfast.planner.fit.result import Plan
from holdfast.planner.fit.search import Question, fit
from holdfast.planner.inputs.question import STREAMED_SEQUENCE_TOKENS, Device, Machine, PlannedModel
from holdfast.planner.models.variants import planned
from holdfast.planner.serve import offload
from holdfast.planner.serve.gpu_plan import make_gpu_plan
from holdfast.planner.serve.host_memory import with_host_memory
from holdfast.planner.sizing.engine_weights import EngineWeights
from holdfast.units import GIB, format_bytes

Ask = Callable[..., Question]
LIMITS = {"max_model_len": 2048, "max_num_seqs": 32, "max_num_batched_tokens": 2048}


@cache
def spec_of(name: str) -> ModelSpec:
    model = planned(catalogue.find(name))
    assert model is not None
    return model.spec


def machine(free_gib: float) -> Memory:
    return Memory(total_bytes=256 * GIB, available_bytes=int(free_gib * GIB), limited_by="machine")


def served(name: str, vram_gib: float, *, ram_gib: float = 256, **settings: object) -> Plan:
    total = 141 * GIB
    card = NvidiaGpu(
        index=0,
        uuid="GPU-0",
        name="H200",
        total_bytes=total,
        free_bytes=total,
        capability=(9, 0),
        known=gpus.find("h200"),
    )
    vram = f"{int(vram_gib * 1024)}MiB"
    config = EngineConfig.from_arguments(device="cuda", load_format="dummy", vram=vram, **settings)
    return make_gpu_plan(spec_of(name), None, config, [card], name=name, host=machine(ram_gib))


def refused(*arguments: object, **settings: object) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        served(*arguments, **settings)  # type: ignore[arg-type]
    return caught.value


def streamed(plan: Plan) -> StreamedLayers:
    assert plan.engine.streamed is not None
    return plan.engine.streamed


# What is counted


@given(st.lists(st.integers(1, 1 << 33), min_size=1, max_size=128), st.data())
def test_every_streamed_layer_has_its_place(by_layer: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(by_layer)))
    on_disk = data.draw(st.integers(0, count))
    found = streamed_layers(by_layer, count, on_disk)
    assert len(found.layers) == len(set(found.layers)) == count
    assert sorted((*found.in_ram, *found.on_disk)) == list(found.layers)
    assert len(found.on_disk) == on_disk
    assert found.weights_bytes == sum(by_layer[layer] for layer in found.layers)
    for layer, size in zip(found.layers, found.sizes, strict=True):
        assert by_layer[layer] + PLACE_GRAIN_BYTES <= size <= by_layer[layer] + 2 * PLACE_GRAIN_BYTES
        assert size % PLACE_GRAIN_BYTES == 0
    in_ram = sum(size for layer, size in zip(found.layers, found.sizes, strict=True) if layer in found.in_ram)
    assert found.pinned_bytes == in_ram + min(2, on_disk) * max(found.sizes, default=0)
    assert found.moved_bytes == in_ram + found.read_bytes == sum(found.sizes)
    assert found.file_bytes == on_disk * max(found.sizes, default=0)


@given(st.data())
def test_a_packed_layer_has_room_where_it_waits(data: st.DataObject) -> None:
    """As much beyond its bytes, for the gaps between its tensors, as where it is computed."""
    pairs = data.draw(
        st.lists(
            st.integers(1, 1 << 30)
            .flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n // 2)))
            .filter(lambda pair: pair[1] < pair[0]),
            min_size=1,
            max_size=40,
        )
    )
    by_layer, saved = [nbytes for nbytes, _ in pairs], tuple(less for _, less in pairs)
    found = beside_gpu(replace(streamed_layers(by_layer, len(by_layer) // 2, 0), saved=saved), by_layer)
    found = with_others_streamed(found, range(len(by_layer) - 1, -1, -2)[::-1])
    for layer, size in zip(found.layers, found.moved_sizes, strict=True):
        travels = by_layer[layer] - saved[layer]
        assert travels + PLACE_GRAIN_BYTES <= size <= travels + 3 * PLACE_GRAIN_BYTES
        assert size % PLACE_GRAIN_BYTES == 0
    assert found.pinned_bytes == found.moved_bytes == sum(found.moved_sizes)
    assert found.waiting_bytes == max(found.moved_sizes)


def test_a_70b_in_four_bits_moves_no_more_than_17_8_gb_a_step() -> None:
    """Forty of its layers, whose zero points lie two to a byte on the link; where they are computed they are bytes."""
    layers = streamed(served("llama-3.1-70b-awq", 22.93, **LIMITS))
    assert len(layers.layers) == 40
    assert 17.75e9 < layers.moved_bytes <= 17.8e9
    assert sum(layers.sizes) > 17.9e9
    # Of the seven matrices' groups of 128 columns half a byte each.
    groups = (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28672 * 8192) // 128
    assert set(layers.saved) == {groups // 2}
    assert not any(streamed(served("llama-3.1-8b", 8)).saved)


@given(st.integers(1, 200), st.data())
def test_streamed_layers_are_spread_evenly(layers: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, layers))
    found = evenly(range(layers), count)
    gaps = [after - before for before, after in zip((found[-1] - layers, *found), found, strict=False)]
    assert len(found) == count
    assert max(gaps) - min(gaps) <= 1


def test_groups_are_those_of_vllm() -> None:
    assert last_of_groups(24, 8, 2) == (6, 7, 14, 15, 22, 23)
    assert last_of_groups(10, 4, 1) == (3, 7)


@pytest.mark.parametrize("name", ["llama-3.1-70b-awq", "llama-3.1-8b"])
def test_every_byte_is_in_one_tier(name: str) -> None:
    plan = served(name, 8 if name == "llama-3.1-8b" else 22.93)
    layers, terms = streamed(plan), plan.terms
    others = terms["weights"] + layers.weights_bytes + layers.embedding_bytes - plan.weights_bytes
    # Layers that stay have whole pages of the driver.
    assert 0 <= others <= len(layers.resident_sizes or ()) * (DRIVER_PAGE_BYTES + 2 * PLACE_GRAIN_BYTES)
    assert layers.resident_bytes % DRIVER_PAGE_BYTES == 0
    assert len(layers.all_sizes) == len(plan.question.model.spec.layers)
    assert layers.slots == (1 if all_apart(layers.layers) else 2)
    assert terms["layer_slots"] == layers.slots_bytes == layers.slots * driver_pages(max(layers.all_sizes))
    assert sum(terms.values()) <= plan.budget_bytes
    assert plan.loading_bytes <= plan.budget_bytes
    assert not layers.on_disk
    # What is pinned is whole places, of an embedding apart from the head as well.
    embedding = layers.pinned_bytes - layers.moved_bytes
    assert layers.embedding_bytes + PLACE_GRAIN_BYTES <= embedding <= layers.embedding_bytes + 2 * PLACE_GRAIN_BYTES
    assert embedding % PLACE_GRAIN_BYTES == 0
    # One layer fewer would leave KV too little, and not one page of the budget is given away.
    fewer = max(layers.sizes)
    wanted = plan.ranks[0].kv.needed_bytes(32, STREAMED_SEQUENCE_TOKENS)
    assert terms["kv_pool"] - fewer < max(wanted, plan.ranks[0].kv.needed_bytes(1, STREAMED_TOKENS))
    assert plan.budget_bytes - sum(terms.values()) < 2 * plan.engine.layout.page_bytes


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(12, 36), st.integers(1, 12))
def test_less_vram_streams_no_fewer_layers(vram_gib: int, less: int) -> None:
    more = served("llama-3.1-70b-awq", vram_gib, **LIMITS)
    fewer = served("llama-3.1-70b-awq", max(8, vram_gib - less), **LIMITS)
    assert len(streamed(fewer).layers) >= len(streamed(more).layers) > 0
    assert streamed(fewer).moved_bytes >= streamed(more).moved_bytes


def test_what_fits_is_not_streamed() -> None:
    whole = served("llama-3.1-8b", 40)
    assert whole.engine.streamed is None
    assert "layer_slots" not in whole.terms


def test_the_default_pool_is_small_and_larger_when_asked_for() -> None:
    plan = served("llama-3.1-70b-awq", 22.93)
    assert STREAMED_TOKENS <= plan.limits.max_model_len < 2 * STREAMED_TOKENS
    assert (plan.limits.max_num_seqs, plan.limits.max_num_batched_tokens) == (32, 2048)
    longer = served("llama-3.1-70b-awq", 22.93, max_model_len=16384)
    assert len(streamed(longer).layers) > len(streamed(plan).layers)
    pool = served("llama-3.1-70b-awq", 22.93, kv_cache_memory_bytes="6GiB")
    assert pool.terms["kv_pool"] >= 6 * GIB - pool.engine.layout.page_bytes
    one = served("llama-3.1-70b-awq", 22.93, max_model_len=2048, max_num_seqs=1)
    assert len(streamed(one).layers) < len(streamed(plan).layers)
    assert any(decision.field == "kv_price" for decision in plan.decisions)


def test_sequences_that_were_set_run_side_by_side() -> None:
    plan = served("llama-3.1-8b", 12.05, max_model_len=2048, max_num_seqs=8)
    rate, fastest = throughput(plan), throughput(served("llama-3.1-8b", 12.05, max_model_len=2048, max_num_seqs=4))
    assert rate is not None
    assert fastest is not None
    assert rate.full_length.batch == int(plan.concurrency(2048)) == 7
    assert rate.one.estimate.tokens_per_s >= LEAST_SPEED * fastest.one.estimate.tokens_per_s
    (said,) = [str(decision.value) for decision in plan.decisions if decision.field == "expected_speed"]
    assert "of 8 of 240 tokens, " in said
    assert said.endswith(" of 7 of 2,048 tokens"), "no more than the pool holds"
    many = served("llama-3.1-70b-awq", 22.93, **LIMITS)
    assert len(streamed(many).layers) == 40, "full length would take too much of one sequence's speed"
    assert throughput(many).full_length.batch == 3  # type: ignore[union-attr]
    some = [
        len(streamed(served("llama-3.1-70b-awq", 22.93, max_model_len=4096, max_num_seqs=n)).layers) for n in (2, 8)
    ]
    assert some == [42, 40], "both of two fit with 42, and 5 of 8 would with 50"


@pytest.mark.parametrize(("sequences", "length"), [(1, 2048), (3, 2048), (8, 2048), (16, 4096), (32, 512), (64, 4096)])
def test_a_pool_holds_what_sequences_can_use_up_to_a_bound(sequences: int, length: int) -> None:
    plan = served("llama-3.1-8b", 12, max_model_len=length, max_num_seqs=sequences)
    assert plan.kv_tokens >= POOL_SHARE * min(STREAMED_TOKENS, sequences * length) - 16
    assert plan.kv_tokens >= POOL_SHARE * sequences * min(length, STREAMED_SEQUENCE_TOKENS) - 16


def test_speed_and_alternatives_are_said_at_start() -> None:
    said = {decision.field: decision for decision in served("llama-3.1-8b", 13).decisions}
    for field in ("streamed_layers", "pinned_ram", "expected_speed", "kv_price", "alternative"):
        assert said[field].lowered, "a warning before the server is ready"
    assert "GB a step over PCIe 5.0 x16" in said["expected_speed"].reason
    assert str(said["alternative"].value).startswith("--quantization fp8: all layers on the GPU, about ")
    assert "alternative" not in {decision.field for decision in served("llama-3.1-8b", 13, gpu_layers=8).decisions}


def test_what_is_said_to_be_copied_is_what_is_copied() -> None:
    """Four-bit zero points lie two to a byte on the way."""
    plan = served("llama-3.1-70b-awq", 22.93, **LIMITS)
    layers = streamed(plan)
    said = {decision.field: decision for decision in plan.decisions}["streamed_layers"]
    assert str(said.value) == f"40 of 80, {format_bytes(layers.moved_bytes)}"
    assert format_bytes(layers.moved_bytes) != format_bytes(layers.weights_bytes)


AMX_HOST = Processor(model="", cores=16, features=KERNEL_VARIANTS["amx"])


def on_host(plan: Plan, host: Processor | None) -> Plan:
    return replace(plan, question=replace(plan.question, machine=replace(plan.question.machine, host=host)))


@pytest.mark.parametrize(("batch", "measured"), [(1, 5.23), (8, 30.7), (32, 94.9)])
def test_the_estimate_knows_mlps_on_the_host(batch: int, measured: float) -> None:
    """Llama-70B in int4 at 22.93 GiB beside 16 cores with AMX; without them one sequence had 3.09."""
    plan = served("llama-3.1-70b-awq", 22.93, **LIMITS)
    rate, without = throughput(on_host(plan, AMX_HOST)), throughput(on_host(plan, None))
    assert rate is not None
    assert without is not None
    (found,), (alone,) = ([one.estimate for one in each.batches if one.batch == batch] for each in (rate, without))
    assert found.low < measured < found.high
    assert found.tokens_per_s == pytest.approx(measured, rel=0.2)
    assert (found.tokens_per_s > 1.05 * alone.tokens_per_s) == (batch < 32)


def test_where_the_host_computes_no_mlps_the_link_is_all(tmp_path: Path) -> None:
    plan = served("llama-3.1-70b-awq", 22.93, **LIMITS)
    assert host_gain(on_host(plan, AMX_HOST)) == pytest.approx(1.7, abs=0.1)
    assert host_gain(on_host(plan, AMX_HOST), 64) == 1
    for more in ({"cpu_compute": "off"}, {"enable_lora": True}, {"nvme_path": str(tmp_path), "ram": 16 * GIB}):
        other = on_host(served("llama-3.1-70b-awq", 22.93, **LIMITS | more), AMX_HOST)
        assert host_gain(other) == 1, more
    assert host_gain(on_host(plan, replace(AMX_HOST, cores=2))) == 1
    # Where RAM has room for some of them only, so much less is gained.
    few = served("llama-3.1-70b-awq", 22.93, ram_gib=30, **LIMITS)
    assert 1 < host_gain(on_host(few, AMX_HOST)) < 1.5


def test_what_ram_does_not_hold_is_on_disk(tmp_path) -> None:
    plan = served("llama-3.1-70b-awq", 22.93, ram_gib=20, nvme_path=str(tmp_path), nvme="60GiB", ram="13GiB")
    layers = streamed(plan)
    assert layers.on_disk
    assert layers.in_ram
    assert layers.pinned_bytes <= 13 * GIB < layers.pinned_bytes + max(layers.sizes)
    assert layers.read_slots == 2
    assert layers.embedding_on_disk
    assert layers.file_bytes > len(layers.on_disk) * layers.waiting_bytes + layers.embedding_bytes
    all_in_ram = served("llama-3.1-70b-awq", 22.93, nvme_path=str(tmp_path))
    assert not streamed(all_in_ram).on_disk
    assert streamed(all_in_ram).layers == layers.layers


def test_a_70b_with_8_gib_of_ram_reads_no_more_than_ram_does_not_hold(tmp_path: Path) -> None:
    """All of --ram is for layers and what brings them: neither the server's processes nor the embedding are in it."""
    plan = served("llama-3.1-70b-awq", 22.93, ram_gib=124, nvme_path=str(tmp_path), nvme="60GiB", ram="8GiB", **LIMITS)
    layers = streamed(plan)
    assert 9.5e9 <= layers.read_bytes <= 10.9e9
    assert 32 / (layers.read_bytes / 2.84e9) >= 8.3
    others = layers.pinned_bytes - (layers.moved_bytes - layers.read_bytes)
    assert others == 2 * layers.waiting_bytes + STAGED_ROWS_BYTES
    (said,) = (one for one in plan.decisions if one.field == "pinned_ram")
    assert said.reason.startswith("of 8.00 GiB, as set; 3.")
    assert "for the server's own processes come on top, of 124.00 GiB free" in said.reason


def test_where_ram_lacks_no_more_than_the_embedding_no_layer_is_read(tmp_path: Path) -> None:
    plan = served("llama-3.1-70b-awq", 22.93, nvme_path=str(tmp_path), nvme="60GiB", ram="17GiB", **LIMITS)
    layers = streamed(plan)
    assert (layers.on_disk, layers.embedding_on_disk, layers.read_bytes) == ((), True, 0)
    assert layers.pinned_bytes == layers.moved_bytes + STAGED_ROWS_BYTES
    assert layers.embedding_bytes < layers.file_bytes < layers.embedding_bytes + GIB // 1024
    enough = streamed(served("llama-3.1-70b-awq", 22.93, nvme_path=str(tmp_path), ram="19GiB", **LIMITS))
    assert not enough.embedding_on_disk


def test_an_embedding_that_is_the_head_too_has_no_rows_on_disk() -> None:
    known = EngineWeights(spec_of("llama-3.1-70b-awq"), None, None)
    assert known.embedding_in_rows(dtype="bfloat16")
    assert not EngineWeights(replace(known.spec, tied_embeddings=True), None, None).embedding_in_rows(dtype="bfloat16")


def test_kv_blocks_in_ram_are_of_the_same_budget(tmp_path: Path) -> None:
    budget = {"nvme_path": str(tmp_path), "nvme": "60GiB", "ram": "12GiB"}
    alone = streamed(served("llama-3.1-70b-awq", 22.93, **LIMITS | budget))
    beside = streamed(served("llama-3.1-70b-awq", 22.93, **LIMITS | budget | {"kv_ram": "4GiB"}))
    assert beside.pinned_bytes <= 8 * GIB < beside.pinned_bytes + max(beside.sizes)
    assert alone.pinned_bytes > 11 * GIB


def test_kv_blocks_have_what_layers_leave_of_ram(tmp_path: Path) -> None:
    """And the server's processes none of it: they are checked against what is free."""

    def with_kv(free_gib: float, kv_ram: str) -> Plan:
        config = EngineConfig.from_arguments(
            device="cuda", load_format="dummy", ram="8GiB", kv_ram=kv_ram, skip_tokenizer_init=True
        )
        return with_host_memory(served("llama-3.1-8b", 40), config, machine(free_gib), 0)

    assert "kv_ram = 8.00 GiB" in "".join(one.line() for one in with_kv(12, "8GiB").decisions)
    for free_gib, kv_ram, said in (
        (12, "9GiB", "8.00 GiB are left of --ram 8.00 GiB"),
        (9, "8GiB", "6.00 GiB are left"),
    ):
        with pytest.raises(DoesNotFitError) as caught:
            with_kv(free_gib, kv_ram)
        assert said in str(caught.value.found)
        assert caught.value.field == "kv_ram"


# What is refused


def test_pinned_memory_never_starves_the_host() -> None:
    error = refused("llama-3.1-70b-awq", 22.93, ram_gib=20)
    assert (error.code, error.field) == ("HF114", "nvme_path")
    assert "of pinned RAM for 37 layers" in str(error.needed), "with as little KV as can be"
    assert "0.9 of 20.00 GiB free" in str(error.found)
    assert str(error.fix).startswith("--nvme-path DIR")
    assert refused("llama-3.1-70b-awq", 22.93, ram="12GiB").code == "HF114"
    assert refused("llama-3.1-70b-awq", 22.93, ram_gib=20, ram="30GiB").field == "ram"
    assert served("llama-3.1-8b", 40, ram_gib=1).engine.streamed is None


def test_copies_of_adapters_are_part_of_the_servers_ram() -> None:
    """Of 32 of rank 64, 10 GiB."""
    lora: dict[str, object] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 64}
    few, many = ({**lora, "max_cpu_loras": copies} for copies in (2, 32))
    assert served("llama-3.1-8b", 13, ram_gib=19, **few).engine.streamed is not None  # type: ignore[arg-type]
    error = refused("llama-3.1-8b", 13, ram_gib=19, **many)
    assert error.code == "HF114"
    assert "for the server's own processes and copies of 32 adapters" in str(error.found)
    # --ram is what layers may take: the copies come on top, and are checked against what is free.
    assert served("llama-3.1-8b", 13, ram_gib=28, ram="16GiB", **few).engine.streamed is not None  # type: ignore[arg-type]
    error = refused("llama-3.1-8b", 13, ram_gib=28, ram="16GiB", **many)
    assert error.field == "ram"
    assert str(error.needed).startswith("16.00 GiB, and 13.")
    shown = [
        api.plan("llama-3.1-8b", gpu="h200", vram="13GiB", ram="20GiB", max_loras=loras, max_lora_rank=64).to_json()
        for loras in (1, 2)
    ]
    held = [one["offload"]["pinned_limit_bytes"] for one in shown]
    assert held[0] - held[1] == held_bytes(spec_of("llama-3.1-8b"), dtype="bfloat16", places=1, max_rank=64)


def test_a_disk_that_is_too_small_is_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refused("llama-3.1-70b-awq", 22.93, ram_gib=16, nvme_path=str(tmp_path), nvme="1GiB")
    assert (error.code, error.field) == ("HF115", "nvme_path")
    assert "1.00 GiB" in str(error.found)
    monkeypatch.setattr(offload, "disk_room", lambda folder, most: GIB)
    error = refused("llama-3.1-70b-awq", 22.93, ram_gib=16, nvme_path=str(tmp_path))
    assert error.fix == "--nvme-path on a larger disk, or --device cuda with a larger --ram"


def test_no_offload_refuses_as_before() -> None:
    error = refused("llama-3.1-70b-awq", 22.93, offload=False)
    assert isinstance(error, DoesNotFitError)
    assert (error.code, error.fix) == ("HF110", "leave --no-offload out")
    assert refused("llama-3.1-70b-awq", 22.93, gpu_layers="all").fix == "leave --gpu-layers out"


def test_no_offload_takes_no_part_of_the_layers() -> None:
    error = refused("llama-3.1-8b", 40, offload=False, gpu_layers=10)
    assert (error.code, error.field) == ("HF135", "gpu_layers")
    assert "--gpu-layers 10 leaves 22 of 32 layers to stream" in error.message
    assert served("llama-3.1-8b", 40, offload=False, gpu_layers=32).engine.streamed is None
    assert served("llama-3.1-8b", 40, offload=False, gpu_layers="all").engine.streamed is None
    with pytest.raises(ConfigurationError, match="HF135"):
        api.plan("llama-3.1-8b", gpu="h200", offload=False, gpu_layers=10)


def test_what_would_stay_whole_is_named_whatever_streams(tmp_path) -> None:
    """The settings of what is streamed are not those of a model that is not."""
    plan = served("llama-3.1-8b", 10, nvme_path=str(tmp_path), offload_prefetch_step=2)
    assert streamed(plan).layers
    assert "all layers on the GPU" in next(str(one.value) for one in plan.decisions if one.field == "alternative")


def test_a_gpu_without_room_for_one_layer_is_refused() -> None:
    assert refused("llama-3.1-70b", 5).code == "HF110"


# By hand


def test_layers_by_hand() -> None:
    assert len(streamed(served("llama-3.1-70b-awq", 22.93, gpu_layers=30)).layers) == 50
    assert len(streamed(served("llama-3.1-8b", 40, gpu_layers=0)).layers) == 32, "though all of them fit"
    assert served("llama-3.1-8b", 40, gpu_layers=99).engine.streamed is None
    half = served("llama-3.1-8b", 40, offload_group_size=8, offload_num_in_group=2, offload_backend="prefetch")
    assert streamed(half).layers == (6, 7, 14, 15, 22, 23, 30, 31)
    three = served("llama-3.1-8b", 40, offload_group_size=2, offload_prefetch_step=2)
    assert streamed(three).slots == 3
    assert three.terms["layer_slots"] == 3 * driver_pages(max(streamed(three).sizes))
    some = streamed(served("llama-3.1-8b", 40, cpu_offload_gb=4, offload_backend="uva"))
    assert some.weights_bytes >= 4 * GIB > some.weights_bytes - max(some.sizes)


def test_too_many_layers_by_hand_are_refused() -> None:
    error = refused("llama-3.1-70b-awq", 22.93, gpu_layers=60)
    assert (error.code, error.field, error.fix) == ("HF116", "gpu_layers", "leave --gpu-layers out")
    error = refused("llama-3.1-70b-awq", 22.93, cpu_offload_gb=5)
    assert (error.code, error.field) == ("HF116", "cpu_offload_gb")


# What a plan shows


def test_a_plan_shows_what_a_server_does() -> None:
    found = api.plan("llama-3.1-70b-awq", gpu="h200", vram="22.93GiB", ram="128GiB")
    document = found.to_json()
    assert (document["fits"], document["runs"]) == (False, True)
    shown, plan = document["offload"], served("llama-3.1-70b-awq", 22.93, ram="128GiB")
    assert shown["streamed_layers"] == list(streamed(plan).layers)
    assert shown["max_model_len"] == plan.limits.max_model_len
    assert shown["vram"]["weights"] == plan.terms["weights"]
    assert shown["pinned_bytes"] == streamed(plan).pinned_bytes
    assert "holdfast serve" in shown["command"]
    assert "With layers in RAM" in str(found)
    unknown = api.plan("llama-3.1-70b-awq", gpu="h200", vram="22.93GiB").to_json()
    assert (unknown["runs"], unknown["offload"]["runs"]) == (False, None)
    few = api.plan("llama-3.1-70b-awq", gpu="h200", vram="22.93GiB", ram="12GiB").to_json()
    assert few["offload"]["runs"] is False
    assert few["offload"]["ram_short_bytes"] > 0
    assert api.plan("llama-3.1-70b-awq", gpu="h200", vram="22.93GiB", offload=False).to_json()["offload"] is None


def test_a_plan_by_hand_is_the_plan() -> None:
    found = api.plan("llama-3.1-8b", gpu="rtx4090", gpu_layers=16, ram="64GiB").to_json()
    assert found["fits"]
    assert len(found["offload"]["streamed_layers"]) == 16
    assert "--gpu-layers 16" in found["commands"]["holdfast"]
    assert found["commands"]["vllm"] == ""
    few = api.plan("llama-3.1-70b-awq", gpu="rtx4090", gpu_layers=60)
    assert not few.fits
    assert not few.runs
    assert "with --gpu-layers 60, 60 of 80 layers would stay" in " ".join(str(few).split())
    with pytest.raises(ConfigurationError) as caught:
        api.plan("llama-3.1-8b", gpu="rtx4090x2", gpu_layers=16)
    assert caught.value.code == "HF136"


def test_a_step_takes_as_long_as_its_bytes_over_the_link(ask: Ask) -> None:
    placed = place(ask("llama-3.1-70b-awq", "rtx4090", ram_bytes=64 * GIB))
    assert placed is not None
    rate = throughput(placed.plan)
    assert rate is not None
    link = 31.5e9 * EXPECTED.host
    assert rate.one.estimate.tokens_per_s == pytest.approx(link / placed.streamed.moved_bytes)
    assert rate.largest.batch == 32
    assert rate.largest.estimate.tokens_per_s == pytest.approx(32 * link / placed.streamed.moved_bytes)
    assert "link to the host" in rate.one.limited_by


def test_the_price_of_experts_is_said() -> None:
    found = api.plan("qwen3-30b-a3b", quantization="Q4_K_M", gpu="rtx3060", ram="8GiB", nvme="40GiB")
    assert "a token uses 8 of 128" in " ".join(str(found).split())


@settings(max_examples=examples(30), deadline=None)
@given(
    st.sampled_from(["llama-3.1-70b-awq", "qwen3-30b-a3b", "gemma-3-27b"]),
    st.integers(6, 40),
    st.integers(0, 80),
    st.none() | st.integers(1, 80),
)
@example("llama-3.1-70b-awq", 28, 12, 4)
def test_no_tier_ever_holds_more_than_it_has(name: str, vram: int, pinned: int, nvme: int | None) -> None:
    card = gpus.find("h100-80")
    total = card.usable_bytes
    device = Device(
        index=0, name="h100", kind="gpu", total_bytes=total, free_bytes=total, budget_bytes=vram * GIB, gpu=card
    )
    disk = None if nvme is None else nvme * GIB
    machine = Machine(devices=(device,), pinned_bytes=pinned * GIB, nvme_bytes=disk)
    model = PlannedModel(name=name, spec=spec_of(name), origin="catalogue")
    question = Question(model=model, machine=machine)
    found = place(question)
    if fit(question).fits or found is None:
        return
    held = found.plan.ranks[0]
    assert sum(term.nbytes for term in held.terms) + found.plan.needed_bytes(held) <= held.budget_bytes
    short = found.ram_short_bytes > 0 or found.disk_short_bytes > 0
    assert found.fits is not short
    assert found.streamed.pinned_bytes - found.ram_short_bytes <= pinned * GIB
    assert found.streamed.file_bytes - found.disk_short_bytes <= (disk or 0)
    if found.streamed.on_disk and not found.ram_short_bytes:
        fewer = replace(machine, nvme_bytes=None)
        alone = place(replace(question, machine=fewer))
        assert alone is not None
        less_kv = alone.plan.ranks[0].room_bytes < held.room_bytes
        assert alone.ram_short_bytes > 0 or less_kv, "a disk is used only where RAM alone does not do"


def test_flags_that_divide_the_model_are_named_where_layers_would_wait_in_ram() -> None:
    with pytest.raises(ConfigurationError, match="layers cannot be streamed") as caught:
        plan("llama-3.1-8b", gpu="rtx4090x2", gpu_layers=30, tensor_parallel_size=2)
    assert caught.value.found == "rtx4090, with -tp 2"
    assert caught.value.fix == "leave -tp 2 out, or --gpu-layers 30"
