"""What fits is not always what this engine runs: the plan says so first, and exits by whom it was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast import plan
from holdfast.checkpoints import locate
from holdfast.checkpoints.sources import builtin
from holdfast.cli.main import main
from holdfast.errors import ConfigurationError
from holdfast.models import catalogue

ANOTHERS = "gpt-oss-20b"
"""Which Holdfast does not run yet, and vLLM does."""


def test_what_only_others_run_is_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", ANOTHERS, "--gpu", "h100-80", "--brief"]) == 0
    head = " ".join(capsys.readouterr().out.split("\n\n")[0].split("\n")[:3])
    assert "fits, but Holdfast cannot run this model yet: it lacks a decoder of the gpt_oss family" in head


@pytest.mark.parametrize(("engine", "code"), [("holdfast", 1), ("vllm", 0), ("vllm==0.9", 1), ("llama.cpp", 0)])
def test_the_exit_code_is_of_the_engine_that_was_asked_for(
    engine: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", ANOTHERS, "--gpu", "h100-80", "--for", engine, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert bool(found["lacks"]) == bool(code)
    assert found["lacks"] == found["command_notes"][engine.partition("==")[0]]["lacks"]


def test_several_gpus_are_this_engines_too_but_not_for_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Experts whose inputs are rounded by rows as they come are not divided."""
    asked = ["plan", "llama-3.1-70b", "--gpu", "h100-80x4", "--for", "holdfast", "--brief"]
    assert main(asked) == 0
    assert "--tensor-parallel-size 4" in capsys.readouterr().out
    llama = dict(catalogue.find("smollm2-135m").config)
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(llama | experts))
    assert main(["plan", str(tmp_path), "--gpu", "h100-80x2", "-tp", "2", "--for", "holdfast", "--brief"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "fits, but Holdfast does not support this yet: tensor_parallel_size is" in said


def test_what_runs_lacks_nothing() -> None:
    found = plan("llama-3.1-8b", gpu="h100-80")
    assert found.fits
    assert found.lacks == ()
    assert str(found).splitlines()[0].endswith(": fits")


def test_compared_models_say_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", ANOTHERS, "--gpu", "h100-80", "--compare", "qwen3-8b"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "gpt-oss-20b: fits, but Holdfast cannot run this model yet" in said
    assert "Qwen3-8B: fits, but" not in said


def test_a_folder_without_a_tokenizer_says_what_serve_needs(tmp_path: Path) -> None:
    config = dict(catalogue.find("smollm2-135m").config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = plan(str(tmp_path), ram="8GiB").commands["holdfast"]
    assert not command.available
    assert any("no tokenizer" in note and "--tokenizer" in note for note in command.notes)
    (tmp_path / "tokenizer.json").write_text("{}")
    command = plan(str(tmp_path), ram="8GiB").commands["holdfast"]
    assert not any("no tokenizer" in note for note in command.notes)


def test_the_text_of_gemma_3_runs_from_gguf() -> None:
    found = plan("gemma-3-27b", gpu="h100-80", quantization="Q4_K_M")
    assert found.question.model.spec.runnable
    assert found.lacks == ()
    assert "encoder" not in {term.name for term in found.fit.ranks[0].terms}
    whole = plan("gemma-3-27b", gpu="h100-80")
    assert whole.lacks == ("Holdfast cannot run this model yet: it lacks images",)


def test_built_in_names_are_their_own() -> None:
    """The catalogue's shapes are those of other variants, under other names."""
    for entry in builtin.BUILTINS:
        known = catalogue.lookup(entry.title)
        assert known is not None
        assert known.name != entry.name or known.hub_id.rpartition("/")[2].lower() == entry.title.lower()


@pytest.mark.parametrize("expand", ["always", "never"])
def test_how_weights_are_kept_is_planned_and_told(expand: str) -> None:
    locate(None, progress=False)  # Fetched where it is not here.
    found = plan(ram="4GiB", expand_weights=expand)
    decision = next(one for one in found.decisions if one.field == "weights")
    assert decision.value == {"always": "expanded", "never": "quantized"}[expand]
    assert f"--expand-weights {expand}" in found.commands["holdfast"].text
    assert (found.fit.weights_bytes > 300 << 20) == (expand == "always")


def test_weights_are_not_expanded_on_a_gpu() -> None:
    with pytest.raises(ConfigurationError) as caught:
        plan("qwen3-8b", gpu="l4", expand_weights="always")
    assert caught.value.code == "HF127"


@pytest.mark.parametrize("written", ["m3-max-36x2", "2x jetson-orin-64", "gb10,gb10"])
def test_a_machine_with_unified_memory_has_one_gpu(written: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        plan("qwen3-8b", gpu=written)
    assert (caught.value.code, caught.value.field) == ("HF141", "gpu")


def test_one_of_them_is_not_split_over() -> None:
    with pytest.raises(ConfigurationError, match="means 2 machines"):
        plan("qwen3-8b", gpu="m3-max-36", tensor_parallel_size=2)
    assert plan("qwen3-8b", gpu="mi300ax2").fits
