"""A model larger than its GPU, and RAM that holds few layers: KV and batch give way before anything is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from holdfast.planner.fit.expert_placement import ExpertPlacement, place_larger
from holdfast.planner.fit.placement import SPARE_BYTES, Placement, place
from holdfast.planner.fit.search import Question
from holdfast.planner.inputs.question import USEFUL_TOKENS
from holdfast.units import GIB, MIB

Ask = Callable[..., Question]


def pinned(question: Question, pinned_bytes: int) -> Question:
    return replace(question, machine=replace(question.machine, pinned_bytes=pinned_bytes))


def layers(question: Question) -> tuple[Placement, Placement]:
    """With RAM for all that is wanted, and with a MiB less than that takes."""
    usual = place(pinned(question, 64 * GIB))
    assert usual is not None
    assert usual.fits
    tight = place(pinned(question, usual.streamed.pinned_bytes - MIB))
    assert tight is not None
    return usual, tight


def test_kv_gives_way_to_layers_that_ram_does_not_hold(ask: Ask) -> None:
    usual, tight = layers(ask("llama-3.1-8b", "rtx3060"))
    assert tight.fits
    assert len(tight.streamed.layers) == len(usual.streamed.layers) - 1, "as little as need be"
    assert tight.plan.ranks[0].pool_bytes < usual.plan.ranks[0].pool_bytes
    assert tight.plan.limits.max_model_len >= USEFUL_TOKENS


def test_what_is_short_is_what_lacks_with_the_least_kv(ask: Ask) -> None:
    """With so much RAM it runs, with one MiB less it does not."""
    short = place(pinned(ask("llama-3.1-8b", "rtx3060"), 0))
    assert short is not None
    assert not short.fits
    assert short.ram_short_bytes == short.streamed.pinned_bytes
    for pinned_bytes, fits in ((short.ram_short_bytes, True), (short.ram_short_bytes - MIB, False)):
        found = place(pinned(ask("llama-3.1-8b", "rtx3060"), pinned_bytes))
        assert found is not None
        assert found.fits is fits
    assert short.plan.limits.max_model_len >= USEFUL_TOKENS


def test_fewer_sequences_never_need_more_ram(ask: Ask) -> None:
    """Room for N of that length is a preference; the limit stays what was set."""
    open_, _ = layers(ask("llama-3.1-8b", "rtx3060", max_model_len=4096))
    asked = ask("llama-3.1-8b", "rtx3060", max_model_len=4096, max_num_seqs=4)
    usual = place(pinned(asked, 64 * GIB))
    assert usual is not None
    assert usual.streamed.pinned_bytes > open_.streamed.pinned_bytes, "it is preferred where RAM has room"
    tight = place(pinned(asked, open_.streamed.pinned_bytes))
    assert tight is not None
    assert tight.fits
    assert tight.plan.limits.max_num_seqs == 4


def test_what_was_set_does_not_give_way(ask: Ask) -> None:
    usual, tight = layers(ask("llama-3.1-8b", "rtx3060", max_model_len=24576))
    rank = tight.plan.ranks[0]
    assert not tight.fits or rank.room_bytes >= tight.plan.needed_bytes(rank) + SPARE_BYTES
    assert tight.plan.limits.max_model_len == 24576
    asked = ask("llama-3.1-8b", "rtx3060")
    pool = 2 * GIB
    least = place(pinned(asked, 0), pool)
    assert least is not None
    assert least.plan.ranks[0].room_bytes >= pool
    assert len(usual.streamed.layers) >= len(tight.streamed.layers)


@pytest.mark.parametrize("less", [MIB, 512 * MIB])
def test_kv_gives_way_to_experts_that_ram_does_not_hold(ask: Ask, less: int) -> None:
    asked = ask("qwen3-30b-a3b-gptq-int4", "rtx3060")
    usual = place_larger(pinned(asked, 64 * GIB))
    assert isinstance(usual, ExpertPlacement)
    tight = place_larger(pinned(asked, usual.places.pinned_bytes - less))
    assert isinstance(tight, ExpertPlacement)
    assert tight.fits
    assert tight.resident_experts > usual.resident_experts
    assert tight.plan.limits.max_model_len >= USEFUL_TOKENS
    one_less = sum(tight.places.waiting) + len(tight.places.waiting)
    assert one_less * tight.places.pinned_bytes // sum(tight.places.waiting) > usual.places.pinned_bytes - less
