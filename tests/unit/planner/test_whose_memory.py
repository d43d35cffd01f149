"""Whose memory a GPU's terms are: vLLM's graphs follow the sequences, and llama.cpp is counted as llama.cpp."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.footprint.cpu import Limits
from holdfast.planner.fit.search import Question, Rank, fit
from holdfast.planner.models.quantize import quantized_as
from holdfast.planner.report.answer import PlanAnswer, answer
from holdfast.planner.sizing.terms import captured_sizes, graphs_bytes, llama_gpu_terms
from holdfast.units import GIB, MIB

Ask = Callable[..., Question]


def terms(rank: Rank) -> dict[str, int]:
    return {term.name: term.nbytes for term in rank.terms}


@pytest.mark.parametrize(
    ("sequences", "sizes"), [(1, 2), (2, 3), (4, 4), (8, 5), (16, 7), (64, 19), (256, 51), (999, 51)]
)
def test_as_many_sizes_are_captured_as_twice_the_sequences_reach(sequences: int, sizes: int) -> None:
    """1, 2, 4, 8, 16, 24 and so on: with 8 sequences 1, 2, 4, 8 and 16."""
    assert captured_sizes(sequences) == sizes


def test_a_short_step_captures_no_larger_size() -> None:
    assert captured_sizes(256, 256) == captured_sizes(128)


@pytest.mark.parametrize(("model", "measured"), [("llama-3.1-8b", 0.99), ("qwen3-0.6b", 0.5)])
def test_graphs_are_what_was_measured_with_the_default_and_less_with_fewer(
    ask: Ask, model: str, measured: float
) -> None:
    spec = ask(model, "h200").model.spec
    layers = range(len(spec.layers))

    def graphs(sequences: int) -> int:
        limits = Limits(max_model_len=4096, max_num_seqs=sequences, max_num_batched_tokens=8192)
        return graphs_bytes(spec, layers, limits)

    assert graphs(256) / GIB == pytest.approx(measured, abs=0.02)
    sizes = [graphs(count) for count in (1, 4, 16, 64, 256)]
    assert sizes == sorted(set(sizes))
    assert sizes[0] < 0.3 * sizes[-1]


def test_the_graphs_of_a_plan_follow_its_sequences(ask: Ask) -> None:
    few, many = (fit(ask("qwen3-8b", "h100-80", max_num_seqs=count, runs_here=False)) for count in (1, 256))
    assert terms(few.ranks[0])["graphs"] < 0.3 * terms(many.ranks[0])["graphs"]


def quantized_70b(ask: Ask, count: int = 2) -> Question:
    question = ask("llama-3.1-70b", "rtx4090", count=count)
    return Question(model=quantized_as(question.model, "Q4_K_M"), machine=question.machine, settings=question.settings)


@pytest.mark.parametrize("engine", [None, "llama.cpp"])
def test_a_gguf_over_gpus_is_counted_as_llama_cpp_takes_it(ask: Ask, engine: str | None) -> None:
    """40 GB of weights on two 4090s, as thousands run it: no graphs stand in the way."""
    found = answer(quantized_70b(ask), engine=engine)
    assert found.fits
    assert found.fit.longest_tokens >= 4096
    held = terms(found.fit.ranks[0])
    assert "graphs" not in held
    assert held["compute"] > 250 * MIB
    (said,) = [one for one in found.decisions if one.field == "engine"]
    assert said.value == "llama.cpp"
    assert "no CUDA graphs" in said.reason


def test_a_step_of_llama_cpp_takes_what_it_prints(ask: Ask) -> None:
    """`CUDA0 compute buffer size = 258.50 MiB` for Llama 3 8B with a context of 512."""
    limits = Limits(max_model_len=512, max_num_seqs=1, max_num_batched_tokens=512)
    found = llama_gpu_terms(ask("llama-3-8b", "rtx4090").model.spec, limits, weights_bytes=1)
    (compute,) = [term.nbytes for term in found if term.name == "compute"]
    assert compute / MIB == pytest.approx(258.5, abs=1)


def test_vllm_is_still_sized_by_its_own_terms(ask: Ask) -> None:
    """Graphs of 256 sequences take what is left: its command is printed, and said not to do."""
    found = answer(quantized_70b(ask))
    assert found.commands["llama.cpp"].text.startswith("llama-server")
    assert not found.commands["vllm"].available
    asked_for = answer(quantized_70b(ask), engine="vllm").fit
    assert "graphs" in terms(asked_for.ranks[0])
    assert asked_for.limits.max_num_seqs < 256, "planned with limits that vLLM holds"


def in_order(found: PlanAnswer) -> list[str]:
    return [str(way.settings.get("quantization", "")) for way in found.ways_out]


def test_who_asks_for_llama_cpp_is_offered_ggufs(ask: Ask) -> None:
    found = answer(ask("llama-3.1-70b", "rtx4090", count=2), engine="llama.cpp")
    assert not found.fits
    assert in_order(found)[0] == "Q4_K_M"
    assert found.ways_out[0].available
    assert found.commands_of == "quantization"
    one = answer(ask("llama-3.1-70b", "rtx4090"), engine="llama.cpp")
    assert any(way.kind == "more_gpus" and way.settings.get("quantization") == "Q4_K_M" for way in one.ways_out)
