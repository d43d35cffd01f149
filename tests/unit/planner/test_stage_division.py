"""Which layers stages have, and what of KV pages: by bytes, evenly over groups, whatever the model."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest

from holdfast import plan
from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError
from holdfast.footprint.cpu import bytes_by_name
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.models import ModelSpec, from_config
from holdfast.models.stages import LayerStage, stage_spec
from holdfast.planner.report.text import lines
from holdfast.planner.serve.ranks import NOT_WITH_RANKS, refuse_with_ranks
from holdfast.planner.sizing.stages import PP_NOT_POSSIBLE, cut_evenly, divide_stages

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
