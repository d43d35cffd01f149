"""What each engine makes of a GGUF: which types it unpacks, and what plain numbers are kept in."""

from __future__ import annotations

import pytest

from holdfast import plan
from holdfast.planner.report.answer import PlanAnswer

GIB = 1 << 30


def weights_gib(found: PlanAnswer) -> float:
    return next(term.nbytes for term in found.fit.ranks[0].terms if term.name == "weights") / GIB


def said(found: PlanAnswer) -> list[str]:
    return [decision.reason for decision in found.decisions if decision.field == "weights"]


# Plain numbers


def test_llama_cpp_keeps_float32_as_it_is_stored() -> None:
    found = plan("llama-3.1-8b", quantization="F32", gpu="rtx4090", engine="llama.cpp")
    assert weights_gib(found) == pytest.approx(8.03e9 * 4 / GIB, rel=0.001)
    assert found.fit.weights_bytes == pytest.approx(8.03e9 * 4, rel=0.001)
    assert found.fit.weights_dtype == "float32"
    assert not found.fits
    assert not said(found)


@pytest.mark.parametrize("engine", ["vllm", "holdfast", None])
def test_others_turn_it_into_what_they_compute_in_and_say_so(engine: str | None) -> None:
    found = plan("llama-3.1-8b", quantization="F32", gpu="rtx4090", engine=engine)
    assert weights_gib(found) == pytest.approx(8.03e9 * 2 / GIB, rel=0.001)
    (reason,) = said(found)
    assert "llama.cpp keeps float32: 29.92 GiB" in reason


def test_what_no_engine_changes_is_not_spoken_of() -> None:
    for kind, engine in (("BF16", "vllm"), ("Q4_K_M", "vllm"), ("BF16", "llama.cpp")):
        assert not said(plan("llama-3.1-8b", quantization=kind, gpu="rtx4090", engine=engine))


def test_rates_go_by_what_is_read() -> None:
    """Half as many bytes are read nearly twice as fast."""
    whole = plan("llama-3.1-8b", quantization="F32", gpu="h100-80", engine="llama.cpp").throughput
    half = plan("llama-3.1-8b", quantization="BF16", gpu="h100-80", engine="llama.cpp").throughput
    assert whole is not None
    assert half is not None
    assert 1.6 < half.one.estimate.tokens_per_s / whole.one.estimate.tokens_per_s < 2.0


# Types


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0", "Q1_0", "Q2_0", "MXFP4", "NVFP4"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_types_that_torch_engines_do_not_unpack(kind: str, engine: str) -> None:
    command = plan("llama-3.1-8b", quantization=kind, gpu="rtx4090").commands[engine]
    assert not command.available
    assert f"it does not support {kind} in a GGUF; llama.cpp does" in command.notes


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K_M", "Q8_0", "IQ4_XS", "IQ1_S", "F16"])
def test_types_that_they_unpack(kind: str) -> None:
    commands = plan("llama-3.1-8b", quantization=kind, gpu="rtx4090").commands
    for engine in ("vllm", "sglang"):
        assert not any("does not support" in note for note in commands[engine].notes)


@pytest.mark.parametrize(("engine", "needed"), [("vllm==0.23", False), ("vllm==0.24", True), ("vllm", True)])
def test_vllm_reads_gguf_with_a_plugin_since_0_24(engine: str, needed: bool) -> None:
    notes = plan("llama-3.1-8b", quantization="Q4_K_M", gpu="rtx4090", engine=engine).commands["vllm"].notes
    assert any("vllm-gguf-plugin" in note for note in notes) is needed
