"""Ranks on GPUs as a server plans them: which GPU each has, what it holds there, and what is refused before anything is
loaded, by the rank that cannot be."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from holdfast.cli.main import main
from holdfast.config import EngineConfig
from holdfast.config.sources import gather
from holdfast.config.unsupported import NOT_WITH_RANKS, RANK_GPUS
from holdfast.engine.ranks.cpu import segment_layout
from holdfast.engine.startup.select_device import settle_device
from holdfast.errors import ConfigurationError, DoesNotFitError
from holdfast.execution.parallel.segment import SegmentLayout
from holdfast.footprint.cpu import SLOT_PAGE_BYTES
from holdfast.footprint.identity_key import Same
from holdfast.footprint.lora import gpu_bytes, held_bytes
from holdfast.hardware import Memory
from holdfast.hardware.nvidia import NvidiaGpu, NvidiaMachine
from holdfast.hardware.torch_build import TorchBuild
from holdfast.models import from_config
from holdfast.models.stages import rank_spec
from holdfast.planner.serve.gpu_plan import make_gpu_plan
from holdfast.planner.serve.host_memory import with_host_memory
from holdfast.planner.serve.settle import settle_pool, stage_blocks
from holdfast.planner.serve.shares.gpu_ranks import gpus_of_ranks, tightest
from holdfast.planner.sizing.engine_weights import EngineWeights
from holdfast.planner.sizing.rank_shares import gpu_rank_shares
from holdfast.units import GIB, MIB, format_bytes

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SPEC = from_config(LLAMA)


def card(index: int, free_gib: int = 23, total_gib: int = 24, **others: Any) -> NvidiaGpu:
    given = {"name": "NVIDIA GeForce RTX 4090", "capability": (8, 9)}
    return NvidiaGpu(
        index=index, uuid=f"GPU-{index}", total_bytes=total_gib * GIB, free_bytes=free_gib * GIB, **given | others
    )


@pytest.fixture(autouse=True)
def _a_gpu_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANK_GPUS, "0,1")


def planned(gpus: list[NvidiaGpu], ranks: int = 2, **settings: Any) -> Any:
    config = EngineConfig(device="cuda", tensor_parallel_size=ranks, **settings)
    return make_gpu_plan(SPEC, None, config, gpus, name="llama")


def test_a_model_that_one_gpu_does_not_hold_fits_on_two() -> None:
    small = [card(index, free_gib=12, total_gib=12) for index in range(2)]
    with pytest.raises(DoesNotFitError):
        make_gpu_plan(SPEC, None, EngineConfig(device="cuda", offload=False), small[:1], name="llama")
    plan = planned(small)
    engine = plan.engine
    assert [gpu.uuid for gpu in engine.rank_gpus] == ["GPU-0", "GPU-1"]
    assert plan.tensor_parallel == 2
    assert engine.rank_weights[0] == plan.terms["weights"]
    assert sum(engine.rank_weights) < 1.01 * 2 * SPEC.parameters, "norms alone are on both"
    assert engine.layout.kv_heads == 4, "of a rank's own pages"
    assert plan.terms["exchange"] > 16 * MIB
    assert sum(plan.terms.values()) <= plan.budget_bytes
    assert any("rank 1 has" in decision.line() for decision in plan.decisions if decision.field == "device")


def test_the_gpu_with_the_least_decides() -> None:
    even, uneven = planned([card(0), card(1)]), planned([card(0), card(1, free_gib=14)])
    assert uneven.engine.blocks < even.engine.blocks
    assert uneven.budget_bytes == 14 * GIB
    assert "rank 1 has the least" in next(one for one in uneven.decisions if one.field == "device").reason


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_each_rank_has_a_visible_gpu_by_default(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing has to be set and nothing is warned of; too few are refused before a model is looked for."""
    monkeypatch.delenv(RANK_GPUS)
    here = NvidiaMachine(gpus=(card(4), card(6), card(7)), driver="580.65", cuda=(13, 0))

    def settled(ranks: int) -> EngineConfig:
        config = EngineConfig(device=device, tensor_parallel_size=ranks)
        return settle_device(config, here=here, build=TorchBuild("2.13.0", "13.0"))

    assert (settled(2).device, settled(3).device, caplog.records) == ("cuda", "cuda", [])
    staged = EngineConfig(device=device, pipeline_parallel_size=3)
    assert settle_device(staged, here=here, build=TorchBuild("2.13.0", "13.0")).device == "cuda"
    (warned,) = [one.getMessage() for one in caplog.records]
    assert "stages were run on one H200 so far, never on several GPUs" in warned
    assert [gpu.index for gpu in gpus_of_ranks(here.gpus, 2)] == [4, 6]
    with pytest.raises(ConfigurationError, match="rank 3 has no GPU: 4 ranks, and 3 visible GPUs") as caught:
        settled(4)
    assert (caught.value.code, caught.value.field) == ("HF133", "tensor_parallel_size")
    assert all(
        part in str(caught.value.fix) for part in ("-tp times -pp of 1 to 3", "CUDA_VISIBLE_DEVICES", "--device cpu")
    )


def test_stages_are_divided_by_bytes_each_with_its_own_pages() -> None:
    """A page is as large as that of the stage with most layers; both pools have as many."""
    small = [card(index, free_gib=12, total_gib=12) for index in range(2)]
    plan = planned(small, 1, pipeline_parallel_size=2)
    engine = plan.engine
    assert (plan.tensor_parallel, plan.pipeline_parallel, engine.rank_count) == (1, 2, 2)
    assert [gpu.uuid for gpu in engine.rank_gpus] == ["GPU-0", "GPU-1"]
    assert [stage.layers for stage in engine.stages] == [16, 16]
    pages = [engine.layout_of(rank).page_bytes for rank in range(2)]
    assert engine.layout.page_bytes == max(pages)
    assert max(engine.rank_weights) == plan.terms["weights"]
    assert sum(engine.rank_weights) == pytest.approx(2 * SPEC.parameters, rel=0.001), "nothing twice"
    limits = plan.limits
    assert engine.stream_bytes >= limits.max_num_batched_tokens * 4096 * 2
    assert engine.answer_bytes >= limits.max_num_seqs * 128256 * 2
    assert plan.terms["exchange"] >= 2 * max(engine.stream_bytes, engine.answer_bytes)
    assert sum(plan.terms.values()) <= plan.budget_bytes
    assert any("layers 16 to 31" in one.line() for one in plan.decisions if one.field == "pipeline_parallel_size")


# GPUs that differ


def small(index: int, **others: Any) -> NvidiaGpu:
    return card(index, free_gib=12, total_gib=12, name="NVIDIA L4", **others)


@pytest.mark.parametrize("first", [True, False])
def test_a_stage_has_as_many_layers_as_its_gpu_has_room_for(first: bool) -> None:
    """Each with the terms of its own rank, and as many blocks; what is shown is rank 0's."""
    gpus = [card(0), small(1)] if first else [small(0), card(1)]
    plan = planned(gpus, 1, pipeline_parallel_size=2)
    engine, ranks = plan.engine, plan.stage_ranks
    assert [stage.layers for stage in engine.stages] == ([23, 9] if first else [9, 23])
    assert [rank.budget_bytes for rank in ranks] == [int(gpu.total_bytes * 0.9) for gpu in gpus]
    assert plan.budget_bytes == ranks[0].budget_bytes
    assert plan.device.total_bytes == gpus[0].total_bytes
    assert [rank_term(rank, "weights") for rank in ranks] == list(engine.rank_weights)
    assert plan.terms["weights"] == engine.rank_weights[0]
    pages = [engine.layout_of(rank).page_bytes for rank in range(2)]
    assert engine.layout.page_bytes == pages[0]
    for rank, page in zip(ranks, pages, strict=True):
        assert rank.pool_bytes == engine.blocks * page <= rank.left_bytes
    said = {one.field: one.reason for one in plan.decisions}
    assert "stages by bytes and by the room of their GPUs" in said["pipeline_parallel_size"]
    assert "which holds the fewest blocks" in said["kv_pool"]

    def held(layers: int) -> int:
        """Blocks, of such a cut."""
        shares = gpu_rank_shares(Same(EngineWeights(SPEC, None)), 1, 2, dtype="bfloat16", ends=(0, layers, 32))
        sizes = {"block_tokens": 16, "kv_dtype": "bfloat16"}
        each = [shares.gpu_kv_layout(stage, **sizes).page_bytes for stage in range(2)]
        weights = [shares.most_weights(stage, dtype="bfloat16") for stage in range(2)]
        left = [rank.left_bytes + rank_term(rank, "weights") - own for rank, own in zip(ranks, weights, strict=True)]
        return min(room // page for room, page in zip(left, each, strict=True))

    assert engine.blocks == max(map(held, range(1, 32))) == held(engine.stages[0].layers)


def rank_term(rank: Any, name: str) -> int:
    return next(term.nbytes for term in rank.terms if term.name == name)


def test_a_model_that_does_not_fit_evenly_fits_gpus_that_differ() -> None:
    tight = card(1, free_gib=6, total_gib=6)
    assert planned([card(0), tight], 1, pipeline_parallel_size=2).fits
    with pytest.raises(DoesNotFitError):
        planned([tight, replace(tight, uuid="GPU-0", index=0)], 1, pipeline_parallel_size=2)
    with pytest.raises(DoesNotFitError, match=r"does not fit on NVIDIA GeForce RTX 4090 \(GPU \d, stage \d\)"):
        planned([card(0, 10, 10), card(1, 8, 8)], 1, pipeline_parallel_size=2)


@pytest.mark.parametrize("first", [True, False])
def test_a_pool_that_is_set_holds_for_each_gpu(first: bool) -> None:
    """Whichever stage has the larger pages: no GPU has a larger pool than was set, and one has all of it."""
    gpus = [card(0), small(1)] if first else [small(0), card(1)]
    plan = planned(gpus, 1, pipeline_parallel_size=2, kv_cache_memory_bytes=GIB)
    pools = [plan.engine.blocks * plan.engine.layout_of(rank).page_bytes for rank in range(2)]
    assert max(pools) <= GIB < max(pools) * (plan.engine.blocks + 1) / plan.engine.blocks
    assert plan.engine.most_blocks == plan.engine.blocks
    assert all(pool <= rank.left_bytes for pool, rank in zip(pools, plan.stage_ranks, strict=True))


@pytest.mark.parametrize("first", [True, False])
def test_a_pool_that_a_stage_has_no_room_for_is_refused_with_one_that_it_has(first: bool) -> None:
    gpus = [card(0), small(1)] if first else [small(0), card(1)]
    free = planned(gpus, 1, pipeline_parallel_size=2, max_num_seqs=64)
    largest = max(free.engine.layout_of(rank).page_bytes for rank in range(2)) * free.engine.blocks
    asked = {"pipeline_parallel_size": 2, "max_num_seqs": 64}
    fits = planned(gpus, 1, **asked, kv_cache_memory_bytes=largest // MIB * MIB)
    assert free.engine.blocks - 8 <= fits.engine.blocks <= free.engine.blocks
    with pytest.raises(DoesNotFitError, match=r"the requested KV pool does not fit") as caught:
        planned(gpus, 1, **asked, kv_cache_memory_bytes=largest + 64 * MIB)
    error = caught.value
    assert "left of the budget of stage" in str(error.found)
    assert f"--kv-cache-memory-bytes {largest // MIB}MiB" in str(error.fix)


def test_a_context_that_a_set_pool_does_not_hold_is_refused_with_one_that_does() -> None:
    """Counted in the pages of the stage with the largest."""
    gpus = [small(0), card(1)]
    asked = {"pipeline_parallel_size": 2, "max_model_len": 8192, "max_num_seqs": 4}
    with pytest.raises(DoesNotFitError, match="does not fit in the KV pool") as caught:
        planned(gpus, 1, **asked, kv_cache_memory_bytes=400 * MIB)
    size = re.search(r"--kv-cache-memory-bytes (\d+)MiB", str(caught.value.fix))
    assert size is not None
    assert planned(gpus, 1, **asked, kv_cache_memory_bytes=int(size[1]) * MIB).fits


@pytest.mark.parametrize("first", [True, False])
def test_stages_stay_even_where_they_hold_all_kv_that_is_of_use(first: bool) -> None:
    """One sequence of 1,024 tokens: more KV would be of no use, and a longer stage is a slower step."""
    gpus = [card(0), card(1, free_gib=13)] if first else [card(0, free_gib=13), card(1)]
    few = {"pipeline_parallel_size": 2, "max_num_seqs": 1, "max_model_len": 1024}
    plan = planned(gpus, 1, **few)
    assert (plan.engine.blocks, plan.stage_ends) == (65, ())
    assert [stage.layers for stage in plan.engine.stages] == [16, 16]
    assert "room of their GPUs" not in next(
        one.reason for one in plan.decisions if one.field == "pipeline_parallel_size"
    )
    many = planned(gpus, 1, pipeline_parallel_size=2)
    assert len({stage.layers for stage in many.engine.stages}) == 2
    within = planned(gpus, 1, pipeline_parallel_size=2, kv_cache_memory_bytes=GIB)
    assert [stage.layers for stage in within.engine.stages] == [16, 16], "a set pool is all that is of use"


def test_a_neighbour_of_a_few_mib_changes_no_cut() -> None:
    free = card(1).free_bytes
    near = [card(0, free_gib=20), replace(card(1), free_bytes=20 * GIB - 100 * MIB)]
    plan = planned(near, 1, pipeline_parallel_size=2)
    assert [stage.layers for stage in plan.engine.stages] == [16, 16]
    assert plan.engine.blocks <= min(rank.left_bytes for rank in plan.stage_ranks) // plan.engine.layout.page_bytes
    far = planned([card(0), replace(card(1), free_bytes=free - 6 * GIB)], 1, pipeline_parallel_size=2)
    assert far.stage_ends


def test_equal_gpus_have_the_stages_that_they_had() -> None:
    plan = planned([card(0), card(1)], 1, pipeline_parallel_size=2)
    assert (plan.stage_ranks, plan.stage_ends) == ((), ())
    assert [stage.layers for stage in plan.engine.stages] == [16, 16]
    set_alike = planned([card(0), small(1)], 1, pipeline_parallel_size=2, vram=10 * GIB)
    assert set_alike.stage_ranks == ()
    assert set_alike.budget_bytes == 10 * GIB


def test_the_ranks_of_a_stage_have_the_room_of_their_smallest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RANK_GPUS)
    gpus = [card(0), card(1), card(2), small(3)]
    plan = planned(gpus, 2, pipeline_parallel_size=2, enable_lora=True, max_lora_rank=32)
    assert [rank.device.limited_by for rank in plan.stage_ranks] == ["GPU 0", "GPU 3"]
    engine = plan.engine
    assert engine.stages[0].layers > engine.stages[1].layers
    for stage, rank in enumerate(plan.stage_ranks):
        assert rank_term(rank, "weights") == max(engine.rank_weights[2 * stage : 2 * stage + 2])
        parts = [rank_spec(SPEC, *engine.part_of(one)) for one in (2 * stage, 2 * stage + 1)]
        each = [gpu_bytes(one, plan.limits, dtype="bfloat16", places=1, max_rank=32) for one in parts]
        assert rank_term(rank, "adapters") == max(each)


def test_windows_in_uneven_stages_have_pages_of_their_own() -> None:
    windows = ["sliding_attention"] * 5 + ["full_attention"]
    spec = from_config(LLAMA | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 128,
                                "sliding_window": 512, "layer_types": (windows * 6)[:32],
                                "query_pre_attn_scalar": 128})  # fmt: skip
    config = EngineConfig(device="cuda", pipeline_parallel_size=2)
    plan = make_gpu_plan(spec, None, config, [card(0), small(1)], name="gemma")
    assert plan.engine.stages[0].layers > 16
    for rank, share in enumerate(plan.stage_ranks):
        assert share.pool_bytes == plan.engine.blocks * plan.engine.layout_of(rank).page_bytes <= share.left_bytes


def test_the_pool_is_settled_by_the_stage_that_has_least_left() -> None:
    """After loading: what a rank took more than planned is its own GPU's, not the pool's of rank 0."""
    plan = planned([card(0), small(1)], 1, pipeline_parallel_size=2)
    pages = [plan.engine.layout_of(rank).page_bytes for rank in range(2)]

    def settled(more: tuple[int, int], free: int = 1 << 40) -> Any:
        taken = [{"activations": rank_term(rank, "activations") + one}
                 for rank, one in zip(plan.stage_ranks, more, strict=True)]  # fmt: skip
        within = [stage_blocks(plan, stage, one, pages[stage]) for stage, one in enumerate(taken)]
        return settle_pool(plan, free, within_blocks=min(within))

    assert settled((0, 0)).engine.blocks == plan.engine.blocks
    spare = [rank.left_bytes - rank.pool_bytes for rank in plan.stage_ranks]
    for stage in range(2):
        more = [0, 0]
        more[stage] = spare[stage] + 100 * pages[stage]
        assert settled((more[0], more[1])).engine.blocks == plan.engine.blocks - 100
    grown = settled((-GIB, -GIB))
    assert plan.engine.blocks < grown.engine.blocks <= plan.engine.most_blocks
    assert settled((0, 0), free=1000 * pages[0]).engine.blocks == 1000


def test_ranks_of_stages_have_a_part_of_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RANK_GPUS)
    plan = planned([card(index) for index in range(4)], 2, pipeline_parallel_size=2)
    engine = plan.engine
    assert [gpu.index for gpu in engine.rank_gpus] == [0, 1, 2, 3]
    assert (engine.rank_count, len(engine.shards), len(engine.stages)) == (4, 2, 2)
    assert [engine.layout_of(rank).kv_heads for rank in range(4)] == [4, 4, 4, 4]
    assert engine.slot_bytes > 0
    with pytest.raises(ConfigurationError, match="rank 3 has no GPU: 4 ranks, and 3 visible GPUs"):
        planned([card(index) for index in range(3)], 2, pipeline_parallel_size=2)


def test_windows_in_stages_have_pages_of_the_stage_with_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are those of the whole model, whatever a stage has of them."""
    windows = ["sliding_attention"] * 5 + ["full_attention"]
    spec = from_config(LLAMA | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 128,
                                "sliding_window": 512, "layer_types": (windows * 6)[:32],
                                "query_pre_attn_scalar": 128})  # fmt: skip
    config = EngineConfig(device="cuda", pipeline_parallel_size=2)
    engine = make_gpu_plan(spec, None, config, [card(0), card(1)], name="gemma").engine
    layouts = [engine.layout_of(rank) for rank in range(2)]
    assert len({len(layout.groups) for layout in (engine.layout, *layouts)}) == 1
    assert engine.layout.page_bytes == max(layout.page_bytes for layout in layouts)
    assert sum(len(group.layers) for layout in layouts for group in layout.groups) == 32


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        (
            {"tensor_parallel_size": 2, "disable_custom_all_reduce": True},
            "disable_custom_all_reduce",
            "stages of several GPUs add up over CUDA IPC",
        ),
        ({"tensor_parallel_size": 8}, "pipeline_parallel_size", "16 ranks on GPUs are more than the 8"),
        ({"kv_ram": 4 * GIB}, "kv_ram", "not kept in RAM by several ranks"),
    ],
)
def test_what_stages_on_gpus_cannot_do_is_refused(settings: dict[str, Any], field: str, words: str) -> None:
    config = EngineConfig(device="cuda", pipeline_parallel_size=2, **settings)
    with pytest.raises(ConfigurationError, match=words) as caught:
        make_gpu_plan(SPEC, None, config, [card(0), card(1)], name="llama")
    assert (caught.value.code, caught.value.field) == (NOT_WITH_RANKS, field)


def test_more_stages_than_map_one_another_may_be_of_one_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RANK_GPUS)
    config = EngineConfig(device="cuda", pipeline_parallel_size=16)
    assert make_gpu_plan(SPEC, None, config, [card(index) for index in range(16)], name="llama").engine.rank_count == 16


def test_ranks_on_gpus_have_no_numbers_in_the_memory_of_the_host() -> None:
    """Plans and orders alone: a page for each rank's slots, however large those on the GPU are."""
    engine = planned([card(0), card(1)]).engine
    assert engine.slot_bytes > SLOT_PAGE_BYTES
    assert segment_layout(engine) == SegmentLayout(2, SLOT_PAGE_BYTES)
    staged = planned([card(0), card(1)], 1, pipeline_parallel_size=2).engine
    assert segment_layout(staged) == SegmentLayout(2, SLOT_PAGE_BYTES)


def test_the_variable_is_not_taken_for_a_setting() -> None:
    assert not gather([EngineConfig], {}, environment={RANK_GPUS: "0,0"}).values


@pytest.mark.parametrize("listed", ["0,1", None])
def test_a_plan_prints_the_command_of_several_gpus(
    listed: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the environment here says: a command is run elsewhere too."""
    if listed is None:
        monkeypatch.delenv(RANK_GPUS)
    assert main(["plan", "llama-3.1-8b", "--for", "holdfast", "--brief", "--gpu", "rtx4090x2", "-tp", "2"]) == 0
    said = capsys.readouterr().out
    assert "holdfast serve" in said
    assert "--tensor-parallel-size 2" in said


def test_a_rank_without_a_gpu_is_named() -> None:
    with pytest.raises(ConfigurationError, match="rank 1 has no GPU") as caught:
        planned([card(0)])
    assert caught.value.code == "HF133"
    assert "CUDA_VISIBLE_DEVICES" in str(caught.value.fix)


@pytest.mark.parametrize("listed", ["0", "0,1,1", "0,-1", "a,b", ""])
def test_a_list_that_does_not_name_each_is_refused(listed: str) -> None:
    with pytest.raises(ConfigurationError, match="does not name the GPU of each rank") as caught:
        gpus_of_ranks([card(0), card(1)], 2, {RANK_GPUS: listed})
    assert (caught.value.code, caught.value.fix) == ("HF133", f"{RANK_GPUS}=0,1")


def test_unlike_gpus_are_refused_by_rank() -> None:
    other = card(1, name="NVIDIA A100-PCIE-40GB", capability=(8, 0))
    with pytest.raises(ConfigurationError, match="rank 1 has NVIDIA A100") as caught:
        planned([card(0), other])
    assert caught.value.code == NOT_WITH_RANKS


def test_ranks_that_choose_experts_have_the_same_gpus() -> None:
    """One of two ranks that differ at a near tie would leave an expert out, or add it twice."""
    experts = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8}
    spec = from_config(LLAMA | experts | {"num_hidden_layers": 2, "num_experts_per_tok": 2})
    other = card(1, name="NVIDIA L40S", capability=(8, 9))
    config = EngineConfig(device="cuda", tensor_parallel_size=2)
    with pytest.raises(ConfigurationError, match="may choose other experts") as caught:
        make_gpu_plan(spec, None, config, [card(0), other], name="mixtral")
    assert caught.value.code == NOT_WITH_RANKS
    assert make_gpu_plan(spec, None, config, [card(0), card(1)], name="mixtral").fits
    assert planned([card(0), other]).fits, "without experts the same kernels are enough"


def test_ranks_may_share_a_gpu_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANK_GPUS, "0,0")
    plan = planned([card(0, free_gib=60, total_gib=80)])
    assert [gpu.uuid for gpu in plan.engine.rank_gpus] == ["GPU-0", "GPU-0"]
    assert plan.budget_bytes == 30 * GIB, "half of what is free"


def test_gpus_are_those_that_are_named_in_their_order() -> None:
    gpus = [card(0, free_gib=3), card(1), card(2, free_gib=20), card(3)]
    assert [gpu.index for gpu in gpus_of_ranks(gpus, 3, {RANK_GPUS: "3, 1,2"})] == [3, 1, 2]
    rank, device = tightest([gpus[1], gpus[2]], 0.9)
    assert (rank, device.free_bytes) == (1, 20 * GIB)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"cpu_offload_gb": 4.0}, "cpu_offload_gb"),
        ({"kv_ram": 4 * GIB}, "kv_ram"),
    ],
)
def test_what_ranks_on_gpus_cannot_do_yet_is_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        planned([card(0), card(1)], **settings)
    assert (caught.value.code, caught.value.field) == (NOT_WITH_RANKS, field)


FP8: dict[str, Any] = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize(
    ("more", "settings"),
    [(FP8, {}), ({}, {"quantization": "fp8"}), ({}, {"quantization": "int4"}), ({}, {"kv_cache_dtype": "fp8"})],
)
def test_ranks_on_gpus_have_quantized_weights_and_pages(
    size: str, more: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Each its part of the codes, and pages of half the size."""
    spec, config = from_config(LLAMA | more), EngineConfig(device="cuda", load_format="dummy", **{size: 2}, **settings)
    plan = make_gpu_plan(spec, None, config, [card(0), card(1)], name="llama")
    plain = make_gpu_plan(SPEC, None, EngineConfig(device="cuda", **{size: 2}), [card(0), card(1)], name="llama")
    page, whole = plan.engine.layout.page_bytes, plain.engine.layout.page_bytes
    if "kv_cache_dtype" in settings:
        assert page == whole // 2
        assert plan.engine.rank_weights == plain.engine.rank_weights
        return
    assert page == whole
    assert max(plan.engine.rank_weights) < 0.65 * max(plain.engine.rank_weights), "but for the vocabulary"
    assert plan.terms["weights"] == max(plan.engine.rank_weights)


def test_what_is_whole_on_a_gpu_while_it_is_cut_is_counted() -> None:
    """The largest matrix of codes, with its scales."""
    spec, codes = from_config(LLAMA | FP8), 14336 * 4096
    shares = gpu_rank_shares(Same(EngineWeights(spec, None)), 2, dtype="bfloat16")
    assert shares.gpu_staging_bytes(dtype="bfloat16") == codes + 14336 * 4
    down = replace(spec, tensors=tuple(one for one in spec.tensors if one.name == "layers.0.down"))
    shares = gpu_rank_shares(Same(EngineWeights(down, None)), 2, dtype="bfloat16")
    assert shares.gpu_staging_bytes(dtype="bfloat16") == codes + 4096 * 4 + 4, "with one number for inputs"
    plain = gpu_rank_shares(Same(EngineWeights(SPEC, None)), 2, dtype="bfloat16")
    assert plain.gpu_staging_bytes(dtype="bfloat16") == 0, "its parts are read as they are"
    alone = gpu_rank_shares(Same(EngineWeights(spec, None)), 1, 2, dtype="bfloat16")
    assert alone.gpu_staging_bytes(dtype="bfloat16") == 0, "stages cut no matrix"


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp", "pp"])
def test_adapters_are_counted_by_the_rank_that_holds_most(sizes: dict[str, int]) -> None:
    """To the byte, as it allocates them."""
    config = EngineConfig(device="cuda", enable_lora=True, max_lora_rank=32, **sizes)
    plan = make_gpu_plan(SPEC, None, config, [card(0), card(1)], name="llama")
    own = [rank_spec(SPEC, *plan.engine.part_of(rank)) for rank in range(2)]
    each = [gpu_bytes(one, plan.limits, dtype="bfloat16", places=1, max_rank=32) for one in own]
    whole = gpu_bytes(SPEC, plan.limits, dtype="bfloat16", places=1, max_rank=32)
    assert plan.terms["adapters"] == max(each)
    assert max(each) < 0.8 * whole
    ram = Memory(total_bytes=64 * GIB, available_bytes=60 * GIB, limited_by="machine")
    copies = with_host_memory(plan, config, ram, 0)
    (said,) = [one for one in copies.decisions if one.field == "max_cpu_loras"]
    bytes_each = sum(held_bytes(one, dtype="bfloat16", places=1, max_rank=32) for one in own)
    assert said.value == format_bytes(config.lora_copies * bytes_each), "each rank has a copy of its part"
