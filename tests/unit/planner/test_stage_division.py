"""Which layers stages have, and what of KV pages: by bytes, evenly over groups, whatever the model."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import plan
from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError
from holdfast.footprint.cpu import bytes_by_name
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.models import ModelSpec, from_config
from holdfast.models.stages import LayerStage, stage_spec
from holdfast.planner.fit.count import _share
from holdfast.planner.fit.search import fit
from holdfast.planner.fit.stage_cuts import ends_for
from holdfast.planner.report.text import lines
from holdfast.planner.serve.ranks import NOT_WITH_RANKS, refuse_with_ranks
from holdfast.planner.sizing.stages import PP_NOT_POSSIBLE, SHARES, cut_evenly, cut_for_rooms, divide_stages

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


def spec_of(**settings: Any) -> ModelSpec:
    return from_config(LLAMA | settings)


def stages_of(spec: ModelSpec, count: int) -> tuple[LayerStage, ...]:
    return divide_stages(spec, bytes_by_name(spec, None, dtype="float32", expand=False, compiled=False), count)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("sizes", [[5] * 7, [9, 1, 1, 1, 1, 1, 20], [1, 2, 3, 4, 5, 6, 7], [30, 1, 1, 1, 1, 1, 1]])
def test_the_largest_part_is_as_small_as_can_be(sizes: list[int], parts: int) -> None:
    before, behind, count = 6, 4, len(sizes)
    ends = cut_evenly(sizes, parts, before, behind)

    def largest(cuts: list[int]) -> int:
        found = [sum(sizes[first:last]) for first, last in pairwise(cuts)]
        found[0], found[-1] = found[0] + before, found[-1] + behind
        return max(found)

    assert (ends[0], ends[-1], len(ends)) == (0, count, parts + 1)
    assert all(first < last for first, last in pairwise(ends))
    every = [[0, *cuts, count] for cuts in combinations(range(1, count), parts - 1)]
    assert largest(ends) == min(map(largest, every))


def test_a_large_vocabulary_takes_layers_from_the_stages_at_the_ends() -> None:
    assert [stage.layers for stage in stages_of(spec_of(vocab_size=16), 4)] == [2, 2, 2, 2]
    assert [stage.layers for stage in stages_of(spec_of(vocab_size=1600), 4)] == [1, 3, 3, 1]


def test_every_tensor_is_on_one_stage_and_a_tied_embedding_on_two() -> None:
    for tied in (False, True):
        spec = spec_of(tie_word_embeddings=tied)
        parts = [stage_spec(spec, stage) for stage in stages_of(spec, 3)]
        held = [tensor.name for part in parts for tensor in part.tensors]
        assert sorted(held) == sorted([*(tensor.name for tensor in spec.tensors), *(["embed"] if tied else [])])
        names = [{tensor.name for tensor in part.tensors} for part in parts]
        assert "embed" in names[0]
        assert {"final_norm", "embed" if tied else "head"} <= names[2]
        assert [layer.index for part in parts for layer in part.layers] == list(range(8))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="pipeline_parallel_size is 9, but the model has 8 layers") as caught:
        stages_of(spec_of(), 9)
    assert caught.value.code == PP_NOT_POSSIBLE


@pytest.mark.parametrize(
    "windows",
    [[None] * 10, [8, 8, 8, 8, 8, None] * 4, [8, None] * 5, [8, 8, 8, None, 8, 8, 8, None, 8, 8], [8, 4, None] * 4],
)
@pytest.mark.parametrize("ends", [(0, 4, 10), (0, 1, 10), (0, 3, 6, 10)])
def test_stages_keep_their_own_layers_of_the_same_pages(windows: list[int | None], ends: tuple[int, ...]) -> None:
    count = len(windows)
    stages = list(pairwise([end * count // 10 for end in ends]))
    groups, places = form_groups(windows, stages)
    layout = KVLayout(groups=groups, block_tokens=4, layers_per_page=places, kv_heads=2, head_dim=4, element_bytes=4)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(count))
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)
    assert len(groups) == len(form_groups(windows)[0]), "as many tables as one rank has"
    parts = [layout.of_layers(first, last, 2) for first, last in stages]
    assert sum(part.page_bytes for part in parts) == layout.page_bytes
    for part, (first, last) in zip(parts, stages, strict=True):
        assert sorted(layer for group in part.groups for layer in group.layers) == list(range(last - first))
        kinds = {window: sum(one == window for one in windows[first:last]) for window in windows}
        tables = {window: sum(group.window == window for group in groups) for window in windows}
        # No page has a place more than dealing its layers out evenly needs.
        assert part.layers_per_page == max(-(-kinds[window] // tables[window]) for window in windows)


def test_stages_may_do_what_divided_layers_may_not() -> None:
    spec = spec_of()
    refuse_with_ranks(EngineConfig(pipeline_parallel_size=2), spec, None, compiled_kernels=True)
    config = EngineConfig(pipeline_parallel_size=2, kv_store="/tmp/pages")
    with pytest.raises(ConfigurationError, match="pipeline_parallel_size is 2, and a store of KV pages") as caught:
        refuse_with_ranks(config, spec, None, compiled_kernels=True)
    assert caught.value.code == NOT_WITH_RANKS


def test_a_plan_of_the_405b_has_a_row_for_each_of_32_ranks() -> None:
    found = plan("llama-3.1-405b", device="cpu", ram="1500GiB", tensor_parallel_size=8, pipeline_parallel_size=4)
    assert found.fits
    rows = found.to_json()["ranks"]
    assert [row["rank"] for row in rows] == list(range(32))
    assert [(row["stage"], row["first_layer"], row["layers"]) for row in rows[::8]] == [
        (0, 0, 31),
        (1, 31, 32),
        (2, 63, 32),
        (3, 95, 31),
    ]
    assert sum(row["weights_bytes"] for row in rows) == found.fit.weights_bytes
    assert sum(row["kv_pool_bytes"] for row in rows) == found.fit.terms["kv_pool"]
    assert max(row["weights_bytes"] for row in rows) < 1.02 * min(row["weights_bytes"] for row in rows)
    printed = lines(found, width=100)
    assert sum(" to 125 " in line and line.split()[0].isdigit() for line in printed) == 8
    assert any("stages by bytes" in line for line in printed)


def test_a_plan_of_stages_in_too_little_does_not_fit() -> None:
    assert not plan("llama-3.1-8b", device="cpu", ram="12GiB", tensor_parallel_size=2, pipeline_parallel_size=2).fits


# Rooms that differ


def filled_share(held: Any, rooms: list[int], ends: tuple[int, ...], kv: int) -> int:
    """Of the fullest room, as finely as shares are told apart; more than all where one holds its part of it not."""
    stages = enumerate(pairwise(ends))
    return max(-(-held(stage, *part, kv) * SHARES // max(1, rooms[stage])) for stage, part in stages)


@settings(max_examples=examples(150), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=8),
    per_kv=st.lists(st.integers(0, 5), min_size=8, max_size=8),
    rooms=st.lists(st.integers(1, 250), min_size=2, max_size=4),
    ends=st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
def test_a_cut_for_rooms_is_the_best_of_all(
    sizes: list[int], per_kv: list[int], rooms: list[int], ends: tuple[int, int]
) -> None:
    """Most KV, then the emptiest room; or where none fits, the least that is short."""
    count, most = len(sizes), 300
    rooms = rooms[:count]

    def held(stage: int, first: int, last: int, kv: int) -> int:
        beside = (ends[0] if stage == 0 else 0) + (ends[1] if stage == len(rooms) - 1 else 0)
        return sum(sizes[first:last]) + beside + kv * sum(per_kv[first:last])

    found = tuple(cut_for_rooms(held, rooms, count, most))
    every = [(0, *cuts, count) for cuts in combinations(range(1, count), len(rooms) - 1)]

    def short(cut: tuple[int, ...], kv: int) -> int:
        return max(held(stage, *part, kv) - rooms[stage] for stage, part in enumerate(pairwise(cut)))

    def most_kv(cut: tuple[int, ...]) -> int:
        return next((kv for kv in range(most, -1, -1) if short(cut, kv) <= 0), -1)

    assert found in every
    kv = max(map(most_kv, every))
    if kv < 0:
        assert short(found, 0) == min(short(cut, 0) for cut in every)
        return
    assert most_kv(found) == kv
    assert filled_share(held, rooms, found, kv) == min(filled_share(held, rooms, cut, kv) for cut in every)


def test_a_plan_gives_the_larger_gpu_more_layers() -> None:
    """Cut evenly it does not fit the L4, while 20 GiB of the L40S are free; and no other cut holds a longer context."""
    found = plan("llama-3.1-70b-awq", gpu="l40s,l4", pipeline_parallel_size=2)
    assert found.fits
    assert [len(one) for one in found.fit.stage_layers] == [56, 24]
    assert [rank.stage for rank in found.fit.ranks] == [0, 1]
    text = "\n".join(lines(found, width=200))
    assert "layers 0 to 55 on GPU 0; layers 56 to 79 on GPU 1" in text
    assert "VLLM_PP_LAYER_PARTITION=56,24 vllm serve" in text
    assert "SGLANG_PP_LAYER_PARTITION=56,24 python -m sglang" in text
    question = found.fit.question
    limits = replace(found.fit.limits, max_model_len=question.model.spec.max_position)

    def tokens(layers: int) -> int:
        halves = range(layers), range(layers, 80)
        shares = [_share(question, question.machine.devices[at], at, half, 1, limits) for at, half in enumerate(halves)]
        rooms = [rank.budget_bytes - sum(term.nbytes for term in terms)
                 for rank, (terms, _, _) in zip(found.fit.ranks, shares, strict=True)]  # fmt: skip
        return min(kv.held_tokens(max(0, room), 4096) for room, (_, kv, _) in zip(rooms, shares, strict=True))

    assert tokens(56) == max(map(tokens, range(40, 80))) == found.fit.kv_tokens


def test_stages_of_equal_gpus_are_cut_as_ever() -> None:
    found = plan("llama-3.1-70b-awq", gpu="l40sx2", pipeline_parallel_size=2)
    assert found.fit.stage_ends == ()
    assert [len(one) for one in found.fit.stage_layers] == [40, 40]
    assert "LAYER_PARTITION" not in "\n".join(lines(found, width=200))


def test_the_smallest_gpu_of_a_stage_decides_for_it() -> None:
    """Two stages of two GPUs: those of the first share each layer, so the smaller one's room is the stage's."""
    found = plan("llama-3.1-70b-awq", gpu="l40sx2,l4x2", tensor_parallel_size=2, pipeline_parallel_size=2)
    assert found.fits
    first, last = found.fit.stage_layers
    assert len(first) > 1.5 * len(last)
    assert all(rank.room_bytes >= found.fit.needed_bytes(rank) for rank in found.fit.ranks)


def test_a_plan_keeps_stages_even_where_they_hold_all_that_runs_at_once() -> None:
    """Of one short sequence more KV is of no use; of many it is."""
    asked = {"gpu": "rtx4090,rtx4080", "pipeline_parallel_size": 2, "max_model_len": 4096}
    even = plan("llama-3.1-8b", **asked, max_num_seqs=1)
    assert even.fits
    assert even.fit.stage_ends == ()
    assert [len(one) for one in even.fit.stage_layers] == [16, 16]
    assert "LAYER_PARTITION" not in "\n".join(lines(even, width=200))
    many = plan("llama-3.1-8b", **asked, max_num_seqs=64)
    assert many.fits
    assert many.fit.stage_ends


def test_a_cut_is_for_no_more_kv_than_is_of_use() -> None:
    """Eight layers of 10 bytes, with a byte for each piece of KV: halves hold 2 in the smaller room."""
    asked = list[int]()

    def held(stage: int, first: int, last: int, kv: int) -> int:
        asked.append(kv)
        return (last - first) * (10 + kv)

    rooms = [200, 48]
    assert ends_for(held, rooms, rooms, [0, 4, 8], 2) == []
    assert ends_for(held, rooms, rooms, [0, 4, 8], 3) == [0, 7, 8]
    assert max(asked) == 3


def test_gpus_whose_budgets_are_near_are_alike() -> None:
    """A neighbour's few MiB are no reason for another cut; where halves do not hold what must fit, they are one."""
    found = plan("llama-3.1-8b", gpu="rtx4090x2", pipeline_parallel_size=2)
    question = replace(found.fit.question, settings=replace(found.fit.question.settings, tensor_parallel=1))
    first, second = question.machine.devices

    def ends(less_bytes: int) -> tuple[int, ...]:
        devices = first, replace(second, budget_bytes=found.fit.ranks[1].budget_bytes - less_bytes)
        return fit(replace(question, machine=replace(question.machine, devices=devices))).stage_ends

    assert ends(100 << 20) == ()
    assert len(ends(2 << 30)) == 3
