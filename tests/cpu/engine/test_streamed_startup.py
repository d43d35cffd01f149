"""A start with streamed layers that was planned holds, with what an H200 was seen to take of it; and what a second plan
counts with after a start that failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.config import EngineConfig
from holdfast.engine.startup import build, build_gpu
from holdfast.errors import DoesNotFitError
from holdfast.hardware import Memory, Resident, gpus
from holdfast.hardware.nvidia import NvidiaGpu, NvidiaMachine
from holdfast.models import catalogue
from holdfast.planner import Plan, settle_pool
from holdfast.planner.models.variants import planned
from holdfast.planner.serve.gpu_plan import make_gpu_plan
from holdfast.units import GIB, MIB

KERNELS = 163 * MIB
"""Loaded by the profile run of a 70B model in int4, and counted by no term."""
ACTIVATIONS, LOGITS = 10 * MIB, -22 * MIB
"""What these took beyond their plan."""


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "hidden_act": "silu", "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "bos_token_id": 1,
    "eos_token_id": 2, "num_key_value_heads": 8, "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "tie_word_embeddings": False,
}  # fmt: skip


def h200() -> NvidiaGpu:
    total, known = 141 * GIB, gpus.find("h200")
    return NvidiaGpu(
        index=0, uuid="GPU-0", name="H200", total_bytes=total, free_bytes=total, capability=(9, 0), known=known
    )


def served(vram: str, **settings: object) -> Plan:
    model = planned(catalogue.find("llama-3.1-70b-awq"))
    assert model is not None
    config = EngineConfig.from_arguments(device="cuda", load_format="dummy", vram=vram, **settings)
    host = Memory(total_bytes=256 * GIB, available_bytes=256 * GIB, limited_by="machine")
    return make_gpu_plan(model.spec, None, config, [h200()], name="model", host=host)


def started(plan: Plan, kernels: int) -> Plan:
    """With its pool as it would be after the profile run."""
    measured = {name: size for name, size in plan.terms.items() if name != "kv_pool"} | {"graphs": 0}
    measured["activations"] += ACTIVATIONS
    measured["logits"] += LOGITS
    taken = build_gpu.taken_terms(plan, measured, sum(measured.values()) + kernels)
    return settle_pool(plan, 141 * GIB, taken)


@pytest.mark.parametrize("kernels", [144 * MIB, KERNELS, 217 * MIB])
def test_a_context_that_was_set_and_planned_holds(kernels: int) -> None:
    for length in range(4096, 32257, 1536):
        plan = served("22.93GiB", max_model_len=length)
        assert plan.engine.streamed is not None
        assert started(plan, kernels).limits.max_model_len == length


def test_kernels_that_are_loaded_are_not_to_come() -> None:
    plan = served("22.93GiB", max_model_len=8192)
    measured = {name: size for name, size in plan.terms.items() if name != "kv_pool"} | {"graphs": 0}
    held = sum(measured.values())
    assert build_gpu.taken_terms(plan, measured, held)["graphs"] == plan.terms["graphs"] > 0
    assert build_gpu.taken_terms(plan, measured, held + 100 * MIB)["graphs"] == plan.terms["graphs"] - 100 * MIB
    assert build_gpu.taken_terms(plan, measured, held + KERNELS)["graphs"] == 0


def test_a_second_plan_counts_ram_as_the_first_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process of the failed start holds is used again; what the front takes is not there for layers."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    config = EngineConfig.from_arguments(
        model=str(tmp_path), device="cuda", load_format="dummy", vram="12GiB", skip_tokenizer_init=True
    )
    model = build.find_model(config)
    monkeypatch.setattr(build, "probe", lambda: NvidiaMachine(gpus=(h200(),)))

    def free(nbytes: int) -> None:
        machine = Memory(total_bytes=64 * GIB, available_bytes=nbytes, limited_by="machine")
        monkeypatch.setattr(build, "memory", lambda: machine)

    def again(held: int) -> Plan:
        monkeypatch.setattr(build, "resident", lambda: Resident(held + GIB, held + GIB, files_bytes=GIB))
        return build.plan_again(config, model, first, 0)

    free(11 * GIB)
    first = build.plan_model(config, model, front_bytes=GIB)
    assert first.engine.streamed is not None
    free(8 * GIB)
    assert again(3 * GIB).engine.streamed == first.engine.streamed
    with pytest.raises(DoesNotFitError) as caught:
        again(0)
    assert caught.value.code == "HF114"
    assert "less 4.00 GiB for the server's own processes" in str(caught.value.found)
