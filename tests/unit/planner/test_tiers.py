"""A model larger than its GPU: every byte has a place, and finding it takes one walk over the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.errors import CheckpointError
from holdfast.models import catalogue, describe_config
from holdfast.planner.advice import offload
from holdfast.planner.fit.search import Question, fit
from holdfast.planner.inputs.question import PlannedModel
from holdfast.planner.sizing.sharded_weights import layer_bytes, rank_bytes, total_bytes, weights_of
from holdfast.units import GIB

Ask = Callable[..., Question]


class Counted(list[Any]):
    walks = 0

    def __iter__(self) -> Iterator[Any]:
        Counted.walks += 1
        return super().__iter__()


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-2-9b", "qwen3-30b-a3b", "llama-3.1-70b-awq"])
@pytest.mark.parametrize("size", [1, 2])
def test_layers_and_the_rest_are_the_whole(name: str, size: int) -> None:
    spec = describe_config(catalogue.find(name).config)
    weights = weights_of(PlannedModel(name=name, spec=spec, origin="catalogue"), dtype="bfloat16")
    held = layer_bytes(weights, spec, tensor_parallel=size)
    assert set(held) == {None, *range(len(spec.layers))}
    assert sum(held.values()) == rank_bytes(weights, spec, tensor_parallel=size)


def test_the_number_of_walks_does_not_grow_with_the_layers(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "weights_of", lambda *given, **more: Counted(weights_of(*given, **more)))
    walks = []
    for name in ("llama-3.1-8b", "llama-3.1-70b"):
        Counted.walks = 0
        placed = offload.place(fit(ask(name, "t4", ram_bytes=256 * GIB)))
        assert placed is not None
        assert placed.layers > placed.resident_layers
        walks.append(Counted.walks)
    assert walks[0] == walks[1]
    assert walks[0] < 8


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-2-9b"])
def test_every_byte_has_a_place(ask: Ask, name: str) -> None:
    """What lies on the GPU and in RAM is the model, its terms, three layers on their way and the KV it must hold."""
    question = ask(name, "t4", ram_bytes=256 * GIB)
    found = fit(question)
    placed = offload.place(found)
    assert placed is not None
    (rank,) = found.ranks
    others = sum(term.nbytes for term in rank.terms if term.name not in ("weights", "graphs"))
    weights = weights_of(question.model, dtype=found.dtype)
    layers = layer_bytes(weights, question.model.spec, tensor_parallel=1)
    slots = offload.COPY_SLOTS * max(layers[layer] for layer in range(placed.layers))
    held = placed.gpu_bytes + placed.ram_bytes + placed.nvme_bytes
    assert held == others + slots + total_bytes(weights) + found.needed_bytes(rank)


def test_more_layers_than_any_model_has_are_refused_at_once() -> None:
    config = {**catalogue.find("llama-3.1-8b").config, "num_hidden_layers": 4096}
    with pytest.raises(CheckpointError) as caught:
        describe_config(config)
    assert caught.value.field == "num_hidden_layers"
