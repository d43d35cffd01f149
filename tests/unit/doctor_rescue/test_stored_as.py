"""A command's word for the format of a model against the model itself, and why a format does not run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.doctor.check_command.check import CommandMachine, judge_command
from holdfast.doctor.check_command.checkpoint_format import would_not_run
from holdfast.doctor.command.parse import parse_command


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("Qwen/Qwen3-8B --quantization awq --max-model-len 4096", "vllm serve Qwen/Qwen3-8B --max-model-len 4096"),
        ("Qwen/Qwen3-8B-AWQ -q gptq --max-model-len 4096", "vllm serve Qwen/Qwen3-8B-AWQ --max-model-len 4096"),
        ("Qwen/Qwen3-8B-AWQ -q awq_marlin --max-model-len 4096", None),
        ("Qwen/Qwen3-8B -q fp8 --max-model-len 4096", None),
    ],
)
def test_a_format_that_the_model_does_not_have_is_left_out(words: str, command: str | None) -> None:
    found = judge_command(f"vllm serve {words}", machine=CommandMachine(gpu="l4"), version="0.11.0").findings
    assert [one.fix.command for one in found if one.fix is not None] == ([] if command is None else [command])
    assert [one.cause for one in found] == ([] if command is None else ["bad_flag"])


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("Qwen/Qwen3-8B -q awq", "holdfast serve Qwen/Qwen3-8B -q int4"),
        ("Qwen/Qwen3-8B --quantization=bitsandbytes", "holdfast serve Qwen/Qwen3-8B --quantization=int4"),
        ("Qwen/Qwen3-8B -q int8", "holdfast serve Qwen/Qwen3-8B -q fp8"),
        ("Qwen/Qwen3-8B-AWQ -q w4a16", "holdfast serve Qwen/Qwen3-8B-AWQ"),
        ("Qwen/Qwen3-8B-AWQ --quantization gptq_marlin", "holdfast serve Qwen/Qwen3-8B-AWQ"),
        ("Qwen/Qwen3-8B-AWQ --quantization fp8", "holdfast serve Qwen/Qwen3-8B-AWQ"),
        ("Qwen/Qwen3-8B-AWQ -q awq_marlin", None),
        ("Qwen/Qwen3-8B-FP8 -q fp8", None),
        ("Qwen/Qwen3-8B -q fp8", None),
        ("Qwen/Qwen3-8B -q int4", None),
    ],
)
def test_holdfast_checks_it_as_it_starts(words: str, command: str | None) -> None:
    found = judge_command(f"holdfast serve {words} --max-model-len 4096", machine=CommandMachine(gpu="l4")).findings
    assert [one.cause for one in found] == ([] if command is None else ["bad_flag"])
    for one in found:
        assert one.fix is not None
        assert one.fix.command == f"{command} --max-model-len 4096"


def test_a_folder_that_is_quantized_already_is_not_quantized_again(tmp_path: Path) -> None:
    """Its name says nothing of it: its config does."""
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "quantization_config": quantization,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for asked, right in (("fp8", False), ("int4", False), ("bitsandbytes", True)):
        command = f"holdfast serve {tmp_path}"
        found = judge_command(f"{command} -q {asked}", machine=CommandMachine(gpu="l4")).findings
        assert [one.cause for one in found] == ([] if right else ["bad_flag"])
        assert [one.fix.command for one in found if one.fix is not None] == ([] if right else [command])


def test_what_does_not_fit_is_quantized_while_it_is_loaded() -> None:
    command = "holdfast serve meta-llama/Meta-Llama-3-8B-Instruct --max-model-len 4096 --no-offload"
    [finding] = judge_command(command, machine=CommandMachine(gpu="rtx3060")).findings
    fixes = [one.command for one in (finding.fix, *finding.alternatives) if one is not None]
    assert f"{command} --quantization fp8" in fixes
    assert f"{command} --quantization int4" in fixes


@pytest.mark.parametrize(
    ("reason", "cause", "fix"),
    [
        ("FP8: in vLLM since 0.6.6, and not in 0.6.3", "arch_unsupported", "pip install --upgrade 'vllm>=0.6.6'"),
        ("FP8 needs compute capability 8.0; t4 has 7.5", "dtype_unsupported_gpu", None),
        ("an FP8 KV cache needs compute capability 8.0", "dtype_unsupported_gpu", "vllm serve a --kv-cache-dtype auto"),
        ("KV in FP8 needs compute capability 8.0", "dtype_unsupported_gpu", "vllm serve a --kv-cache-dtype auto"),
        ("vLLM needs compute capability 7.5; p100 has 6.0", "kernel_image_missing", None),
    ],
)  # fmt: skip
def test_what_a_release_lacks_is_no_fault_of_the_gpu(reason: str, cause: str, fix: str | None) -> None:
    command = parse_command("vllm serve a --kv-cache-dtype fp8")
    assert command is not None
    finding = would_not_run(command, reason)
    assert finding.cause == cause
    assert (None if finding.fix is None else finding.fix.command) == fix


def test_gpus_that_stay_empty_are_said_and_are_no_fault_where_one_is_enough() -> None:
    found = judge_command("vllm serve Qwen/Qwen3-8B --max-model-len 4096", machine=CommandMachine(gpu="l4x2"))
    assert found.healthy
    assert any("1 is unused" in line for line in found.seen)


def test_what_a_plan_warns_of_is_told_with_what_helps() -> None:
    command = "vllm serve Qwen/Qwen3-8B --max-model-len 4096 --kv-cache-dtype fp8"
    [finding] = judge_command(command, machine=CommandMachine(gpu="a100-80"), version="0.11.0").findings
    assert finding.fix is not None
    assert "--kv-cache-dtype auto" in finding.fix.why
    assert not finding.fix.changes  # Twice the KV: nobody has planned that.
    assert "explain" not in finding.why


def test_files_that_holdfast_does_not_read_are_said_before_it_does(tmp_path: Path) -> None:
    """Its own reader has refused them; of other engines that proves nothing."""
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "quantization_config": {"quant_method": "aqlm"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (finding,) = judge_command(f"holdfast serve {tmp_path}", machine=CommandMachine(gpu="rtx4090")).findings
    assert "quantization_config" in finding.what
    assert finding.fix is not None
    assert "--quantization int4" in finding.fix.why
    assert not judge_command(f"vllm serve {tmp_path}", machine=CommandMachine(gpu="rtx4090")).findings


def test_no_download_is_advised_of_what_is_not_read_then(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for flags in ("", " -q modelopt"):
        found = judge_command(f"holdfast serve {tmp_path}{flags}", machine=CommandMachine(ram="64GiB")).findings
        assert any("weights in NVFP4" in finding.what for finding in found)
        assert "holdfast pull" not in str(found)
        assert any("GGUF" in finding.fix.why for finding in found if finding.fix is not None)
