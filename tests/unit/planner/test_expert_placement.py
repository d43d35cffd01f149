"""A mixture of experts larger than its GPU: as many experts as fit stay, evenly, the others wait in RAM and are
computed by the host's cores where RAM has them twice; every byte counted, what cannot be done refused with numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest

from holdfast.config import EngineConfig
from holdfast.config.parts.offload import OffloadRequest
from holdfast.errors import ConfigurationError, DoesNotFitError
from holdfast.footprint.cpu import weights_bytes
from holdfast.footprint.expert_places import ExpertPlaces, expert_sizes, host_expert_sizes
from holdfast.footprint.streamed import with_gaps
from holdfast.hardware import Memory, Processor, gpus
from holdfast.hardware.nvidia import NvidiaGpu
from holdfast.hardware.probe import KERNEL_VARIANTS
from holdfast.models import ModelSpec, catalogue
from holdfast.planner import api
from holdfast.planner.advice.expert_speed import ExpertSpeed
from holdfast.planner.advice.throughput import EXPECTED, throughput
from holdfast.planner.fit.expert_placement import exchange_bytes, ram_bytes
from holdfast.planner.fit.result import Plan
from holdfast.planner.inputs.expert_layers import check_expert_layers, expert_layers, moe_layers
from holdfast.planner.models.resolve import resolve_model
from holdfast.planner.models.variants import planned
from holdfast.planner.serve.gpu_plan import make_gpu_plan
from holdfast.units import GIB

MODEL = "qwen3-30b-a3b-gptq-int4"


@cache
def spec_of(name: str) -> ModelSpec:
    model = planned(catalogue.find(name))
    assert model is not None
    return model.spec


def served(vram_gib: float, *, ram_gib: float = 256, name: str = MODEL, cores: int = 16, **settings: object) -> Plan:
    card = NvidiaGpu(
        index=0,
        uuid="GPU-0",
        name="H200",
        total_bytes=141 * GIB,
        free_bytes=141 * GIB,
        capability=(9, 0),
        known=gpus.find("h200"),
    )
    config = EngineConfig.from_arguments(
        device="cuda", load_format="dummy", vram=f"{int(vram_gib * 1024)}MiB", **settings
    )
    host = Memory(total_bytes=256 * GIB, available_bytes=int(ram_gib * GIB), limited_by="machine")
    return make_gpu_plan(spec_of(name), None, config, [card], name=name, host=host, processor=machine_of(cores))


def machine_of(cores: int) -> Processor:
    return Processor(model="", cores=cores, features=KERNEL_VARIANTS["avx2"])


def refused(*arguments: float, **settings: object) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        served(*arguments, **settings)  # type: ignore[arg-type]
    return caught.value


def places_of(plan: Plan) -> ExpertPlaces:
    assert plan.engine.streamed is None
    assert plan.engine.expert_places is not None
    return plan.engine.expert_places


def said(plan: Plan) -> dict[str, str]:
    return {one.field: f"{one.value}: {one.reason}" for one in plan.decisions}


# What is counted


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", MODEL, "qwen3-30b-a3b-fp8", "mixtral-8x7b"])
def test_experts_are_all_of_a_layer_but_what_is_of_no_expert(name: str) -> None:
    spec = spec_of(name)
    sizes = expert_sizes(spec, None, dtype="bfloat16", quantize=None)
    assert tuple(sorted(sizes)) == moe_layers(spec)
    without = replace(spec, tensors=tuple(tensor for tensor in spec.tensors if not tensor.experts))
    whole, rest = (weights_bytes(one, None, dtype="bfloat16", expand=False) for one in (spec, without))
    experts = next(layer.experts.count for layer in spec.layers if layer.experts is not None)
    assert whole - rest == experts * sum(sizes.values())
    host = host_expert_sizes(spec, None, quantize=None)
    assert host is not None
    assert set(host) == set(sizes)


@pytest.mark.parametrize("vram_gib", [5, 8, 12.5])
def test_every_byte_is_in_one_tier(vram_gib: float) -> None:
    plan = served(vram_gib)
    places, terms = places_of(plan), plan.terms
    assert terms["weights"] + sum(places.waiting_bytes) == plan.weights_bytes
    assert terms["expert_slots"] == places.slots_bytes + places.tables_bytes
    assert places.slots_bytes == 2 * with_gaps(max(places.waiting) * places.sizes[0])
    assert sum(terms.values()) <= plan.budget_bytes
    assert plan.loading_bytes <= plan.budget_bytes
    assert max(places.resident) - min(places.resident) <= 1
    # One more expert would leave KV less than its share, and not a page of the budget is given away.
    assert terms["kv_pool"] >= 0.97 * plan.ranks[0].kv.needed_bytes(1, 8192)
    assert terms["kv_pool"] - places.sizes[0] < plan.ranks[0].kv.needed_bytes(32, 256)
    assert plan.budget_bytes - sum(terms.values()) < 2 * plan.engine.layout.page_bytes


def test_the_plan_travels_to_the_engine_process() -> None:
    plan = served(8)
    heard = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan)
    assert heard.engine.expert_places == plan.engine.expert_places
    assert exchange_bytes(heard, places_of(heard)) == exchange_bytes(plan, places_of(plan))


def test_more_vram_keeps_more_experts_until_all_fit() -> None:
    counts = [sum(places_of(served(vram)).resident) for vram in (4, 6, 8, 12)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    whole = served(24)
    assert whole.engine.expert_places is None
    assert "expert_slots" not in whole.terms


def test_kv_that_is_set_takes_the_room_of_experts() -> None:
    usual, longer = places_of(served(8)), places_of(served(8, max_model_len=32768))
    assert sum(longer.resident) < sum(usual.resident)
    pool = places_of(served(8, kv_cache_memory_bytes="2GiB"))
    assert sum(pool.resident) < sum(usual.resident)


# RAM


def test_the_host_computes_where_ram_has_the_experts_twice() -> None:
    both, one = served(8), served(8, ram_gib=24)
    assert places_of(both).host_sizes != ()
    assert places_of(one).host_sizes == ()
    assert "RAM is" in said(one)["cpu_compute"]
    assert places_of(both).resident == places_of(one).resident
    more = [decision.value for decision in one.decisions if decision.field == "alternative"]
    assert any("more of RAM: the CPU computes" in str(way) for way in more)
    places = places_of(both)
    exchange = exchange_bytes(both, places)
    assert 0 < exchange < GIB // 64
    assert ram_bytes(places, exchange) == places.pinned_bytes + 128 * sum(places.host_sizes) + exchange
    assert exchange_bytes(one, places_of(one)) == 0


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"cpu_compute": "off"}, "--cpu-compute off"), ({"cores": 2}, "2 cores would take longer than the GPU")],
)
def test_the_host_computes_nothing(settings: dict[str, object], why: str) -> None:
    plan = served(8, **settings)  # type: ignore[arg-type]
    assert places_of(plan).host_sizes == ()
    assert why in said(plan)["cpu_compute"]


def test_the_host_computes_nothing_that_its_kernels_have_no_activation_for(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = replace(spec_of(MODEL), activation="gelu")
    monkeypatch.setitem(globals(), "spec_of", lambda name: exact)
    plan = served(8)
    assert places_of(plan).host_sizes == ()
    assert "compiled kernels have no gelu" in said(plan)["cpu_compute"]


def test_pinned_memory_does_not_starve_the_host(tmp_path: Path) -> None:
    error = refused(8, ram_gib=12)
    assert isinstance(error, DoesNotFitError)
    assert error.code == "HF114"
    assert "of 6,144 experts" in str(error.needed)
    assert "short" in str(error.found)
    assert "--nvme-path" in str(error.fix)
    # With a disk whole layers are streamed, as many from there as RAM does not hold.
    plan = served(8, ram_gib=12, nvme_path=str(tmp_path))
    assert plan.engine.expert_places is None
    assert plan.engine.streamed is not None
    assert plan.engine.streamed.on_disk


def test_what_does_not_fit_is_refused_where_that_was_asked_for() -> None:
    assert refused(8, offload=False).code == "HF110"


def test_less_than_the_rest_of_the_layers_streams_layers() -> None:
    """Attention and norms of all layers, and the head, are more than a GPU of 2.5 GiB holds."""
    plan = served(2.5, max_num_seqs=1, max_num_batched_tokens=256, max_model_len=1024)
    assert plan.engine.expert_places is None
    assert plan.engine.streamed is not None


# By hand


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"n_cpu_moe": 24}, range(24)),
        ({"n_cpu_moe": 24, "gpu_layers": 99}, range(24)),
        ({"cpu_moe": True}, range(48)),
        ({"override_tensor": "exps=CPU"}, range(48)),
        ({"override_tensor": r"blk\.(2[4-9]|[34][0-9])\.ffn_.*_exps\.=CPU"}, range(24, 48)),
        ({"override_tensor": [r"blk\.[0-9]\.ffn_.*_exps=CUDA0", "exps=CPU"]}, range(10, 48)),
        ({"override_tensor": r"attn=CUDA0,blk\.7\..*_exps=cpu"}, range(7, 8)),
    ],
)
def test_all_experts_of_named_layers_wait(settings: dict[str, object], layers: range) -> None:
    plan = served(20, **settings)  # type: ignore[arg-type]
    places = places_of(plan)
    assert places.layers == tuple(layers)
    assert set(places.resident) == {0}
    assert plan.terms["weights"] + sum(places.waiting_bytes) == plan.weights_bytes
    assert "all experts of" in said(plan)["expert_places"]


@pytest.mark.parametrize(
    ("written", "layers"),
    [
        ("exps=CPU", range(48)),
        (r"blk\.(2[4-9]|[34][0-9])\.ffn_.*_exps\.=CPU", range(24, 48)),
        (r"layers\.[0-3]\.mlp\.experts\.\d+\.=CPU", range(4)),
    ],
)
@pytest.mark.parametrize("quantization", [None, "Q4_K_M"])
def test_patterns_match_names_of_either_format(written: str, layers: range, quantization: str | None) -> None:
    """A model of the catalogue becomes a GGUF where one is asked for, and its patterns are llama.cpp's."""
    model = resolve_model("qwen3-30b-a3b", quantization=quantization).model
    asked = OffloadRequest(overrides=(written,))
    check_expert_layers(asked, model.spec)
    assert expert_layers(asked, model.spec) == tuple(layers)


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("ffn_up_exps=CPU", "blk.0.ffn_gate_exps.weight stay on the GPU"),
        (".*=CPU", "token_embd.weight is not an expert's"),
        (r"blk\.1\.=CPU", "blk.1.attn_norm.weight is not an expert's"),
        ("shexp=CPU", "no tensor of an expert matches"),
        ("exps=RPC0", "exps=RPC0"),
        ("ex(ps=CPU", "ex(ps=CPU"),
        ("exps", "exps"),
    ],
)
def test_patterns_of_anything_else_are_refused_by_name(written: str, found: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_expert_layers(OffloadRequest(overrides=(written,)), spec_of(MODEL))
    assert caught.value.code == "HF137"
    assert found in str(caught.value.found)


@pytest.mark.parametrize("settings", [{"cpu_moe": True}, {"n_cpu_moe": 3}, {"override_tensor": "exps=CPU"}])
def test_a_model_without_experts_has_none_that_wait(settings: dict[str, object]) -> None:
    error = refused(8, name="llama-3.1-8b", **settings)
    assert error.code == "HF137"
    assert error.field == next(iter(settings))


def test_too_few_by_hand_are_refused_with_numbers() -> None:
    error = refused(6, n_cpu_moe=4)
    assert error.code == "HF116"
    assert "5,632 of 6,144 experts would stay there" in error.message
    assert "leave --n-cpu-moe out" in str(error.fix)


def test_fewer_layers_on_the_gpu_contradict_experts_in_ram() -> None:
    error = refused(20, n_cpu_moe=24, gpu_layers=20)
    assert error.code == "HF135"
    assert "leaves 28 of 48 layers to stream whole" in error.message


# How fast


def test_the_estimate_is_of_what_is_sooner() -> None:
    with_host, over_link = (throughput(served(8, cpu_compute=value)) for value in ("auto", "off"))
    assert with_host is not None
    assert over_link is not None
    assert [one.batch for one in with_host.batches] == [1, 8, 32]
    for one, other in zip(with_host.batches, over_link.batches, strict=True):
        assert one.estimate.tokens_per_s > other.estimate.tokens_per_s
        assert one.estimate.low < one.estimate.tokens_per_s < one.estimate.high
    assert "cores" in with_host.one.limited_by
    assert "kernels read over it" in over_link.one.limited_by
    # Copying every expert that waits is what a step with many tokens does, and at most what one with few takes.
    places, link = places_of(served(8)), gpus.find("h200").host_link.gb_s * 1e9 * EXPECTED.host
    copied = 32 / (sum(places.waiting_bytes) / link)
    assert over_link.batches[2].estimate.tokens_per_s == pytest.approx(copied, rel=0.05)
    whole = throughput(served(24))
    assert whole is not None
    assert whole.one.estimate.tokens_per_s > with_host.one.estimate.tokens_per_s


def test_experts_are_met_as_if_by_lot() -> None:
    places = ExpertPlaces((0, 1), (4, 4), 16, (1000, 1000), (1000, 1000))
    speed = ExpertSpeed.of(places, per_token=4, expert_parameters=2000, host=machine_of(10))
    assert speed.waiting_bytes == 24000
    assert speed.met(1) == 0.25
    assert speed.met(2) == pytest.approx(1 - 0.75**2)
    assert speed.parameters == 24 * 0.25 * 2000
    assert speed.host_s(1, 1.0) == pytest.approx(6000 / 54e9)  # Ten cores read 54 GB/s.
    assert speed.host_s(1000, 1.0) > 24000 / 54e9  # With many tokens it is their operations.


def test_the_gpu_fetches_whole_experts_beside_the_cores() -> None:
    """By both speeds: 0.8 of a half. 3 of a layer that wait are met by one token, and 12 by very many."""
    places = ExpertPlaces((0, 1), (4, 4), 16, (1000, 1000), (1000, 1000))
    speed = ExpertSpeed.of(places, per_token=4, expert_parameters=2000, host=machine_of(10))
    assert speed.fetched(1, 54e9, 1.0) == pytest.approx(1 / 3)
    assert speed.fetched(1, 54e9 / 10, 1.0) == 0.0, "less than one"
    assert speed.fetched(1000, 54e9, 1.0) == pytest.approx(4 / 12)


# What is said


def test_a_plan_says_what_is_where_and_what_else_there_is() -> None:
    found = api.plan(MODEL, gpu="rtx3060", ram="32GiB")
    text = " ".join(str(found).split())
    for part in (
        " of 6,144 experts in RAM, computed by the CPU or copied",
        "With experts in RAM",
        "8 cores (assumed)",
        "whole layers streamed: about",
        "--cpu-compute off: about",
        "1 at once: about",
        "32 at once: about",
        "prompts: about",
    ):
        assert part in text
    document = json.loads(json.dumps(found.to_json()))["offload"]
    assert document["runs"] is True
    assert document["experts"]["all_experts"] == 6144
    assert document["experts"]["cpu_computes"] is True
    assert document["vram"]["expert_slots"] > 0
    assert [one["batch"] for one in document["throughput"]["batches"]] == [1, 8, 32]


def test_by_hand_a_plan_is_of_that() -> None:
    found = api.plan(MODEL, gpu="rtx4090", ram="64GiB", n_cpu_moe=24, max_model_len=4096)
    assert found.fits
    assert found.to_json()["offload"]["experts"]["layers"] == list(range(24))
    assert "--n-cpu-moe 24" in str(found)


@pytest.mark.parametrize("settings", [{"n_cpu_moe": 2}, {"override_tensor": r"blk\.4[0-7]\..*exps=CPU"}])
def test_remedies_of_too_few_by_hand_may_be_models_without_experts(settings: dict[str, object]) -> None:
    found = api.plan(MODEL, gpu="rtx4090", vram="6GiB", ram="64GiB", **settings)  # type: ignore[arg-type]
    assert not found.fits
    assert "experts would stay" in str(found)
    assert found.ways_out
