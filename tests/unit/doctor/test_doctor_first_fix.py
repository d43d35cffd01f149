"""Logs as people have them: the first fix is one that this server takes, and that would do."""

# ruff: noqa: E501

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from holdfast.doctor.check_command.check import CommandMachine, judge_command
from holdfast.doctor.diagnosis.diagnose import diagnose, diagnose_lines
from holdfast.doctor.findings import Diagnosis, Fix, RootCause
from holdfast.doctor.report.text import lines
from holdfast.doctor.rules.codes import cause_named
from holdfast.errors import ConfigurationError

VLLM = "INFO 11-17 10:02:15 [api_server.py:1839] vLLM API server version 0.11.0\nINFO 11-17 10:02:15 [utils.py:233] non-default args: {}\n"
TOO_LONG = VLLM.format("{'model': 'Qwen/Qwen3-8B'}") + (
    "ValueError: To serve at least one request with the models's max seq len (40960), (5.62 GiB KV cache is needed, which is larger than the available KV cache memory (3.12 GiB). Based on the available memory, the estimated maximum model length is 22704.\n"
)
SGLANG = """[2025-11-17 10:11:12] server_args=ServerArgs(model_path='Qwen/Qwen3-32B', tokenizer_path='Qwen/Qwen3-32B', host='0.0.0.0', port=30000, mem_fraction_static=0.88, tp_size=2, context_length=None)
[2025-11-17 10:11:30 TP0] Load weight begin. avail mem=23.10 GB
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has a total capacity of 23.53 GiB of which 80.00 MiB is free. Process 1234 has 23.44 GiB memory in use. Of the allocated memory 22.90 GiB is allocated by PyTorch, and 20 MiB is reserved by PyTorch but unallocated.
"""


def _read(text: str) -> Diagnosis:
    return diagnose_lines(text.splitlines(), "log")


def _first(found: Diagnosis) -> Fix:
    fix = found.findings[0].fix
    assert fix is not None
    return fix


def _files(folder: Path, **texts: str) -> list[str]:
    for name, text in texts.items():
        (folder / f"{name}.log").write_text(text)
    return [str(folder / f"{name}.log") for name in texts]


def test_logs_of_two_servers_are_judged_apart(tmp_path: Path) -> None:
    found = diagnose(_files(tmp_path, one=TOO_LONG, two=SGLANG))
    assert found.programs == {"one.log": "vllm 0.11.0, phase: profile", "two.log": "sglang, phase: load"}
    assert found.command is None
    commands = {one.what.split(":")[0]: one.fix.command for one in found.findings if one.fix is not None}
    assert commands["one.log"] == "vllm serve Qwen/Qwen3-8B --max-model-len 22704"
    assert "Qwen3-32B" in (commands["two.log"] or "")
    assert next(lines(found)).startswith("one.log: vllm")
    assert "5.62/2" not in "\n".join(lines(found, width=400))


def test_logs_of_two_models_are_judged_apart_and_of_one_together(tmp_path: Path) -> None:
    other = TOO_LONG.replace("Qwen3-8B", "Qwen3-4B")
    assert len(diagnose(_files(tmp_path, one=TOO_LONG, two=other)).findings) == 2
    joined = diagnose(_files(tmp_path, one=TOO_LONG, two=TOO_LONG))
    assert len(joined.findings) == 1
    assert not joined.programs


def test_programs_of_a_log_that_are_well_are_listed(tmp_path: Path) -> None:
    serves = "webui-1 | INFO:     Application startup complete.\nwebui-1 | INFO:     Uvicorn running on http://0.0.0.0:8080\n"
    text = "".join(f"vllm-1 | {line}\n" for line in TOO_LONG.splitlines()) + serves
    found = diagnose(_files(tmp_path, compose=text))
    assert [one.split(":")[0] for one in found.seen] == ["webui-1"]


def test_what_needs_ram_that_nobody_named_does_not_fit() -> None:
    """As `holdfast plan` says of it."""
    command = "holdfast serve llama3.3:70b"
    found = judge_command(command, machine=CommandMachine(gpu="rtx4090"))
    assert not found.healthy
    assert "GiB of free RAM" in _first(found).why
    assert judge_command(command, machine=CommandMachine(gpu="rtx4090", ram="160GiB")).healthy


def test_a_model_that_fits_what_is_free_is_offered_so() -> None:
    refused = "ValueError: Free memory on device (11.31/23.64 GiB) on startup is less than desired GPU memory utilization (0.9, 21.28 GiB)."
    found = _read(VLLM.format("{'model': 'Qwen/Qwen3-8B-AWQ'}") + refused)
    fix = _first(found)
    assert fix.basis == "planned"
    assert fix.changes["--gpu-memory-utilization"] == "0.47"
    assert 16_000 < int(fix.changes["--max-model-len"] or 0) < 40_960
    assert "would not hold" not in found.findings[0].why
    unknown = _first(_read(VLLM.format("{'model': 'somebody/unheard-of'}") + refused))
    assert not unknown.changes


def test_a_share_comes_with_a_context_that_it_holds() -> None:
    text = VLLM.format("{'model': 'Qwen/Qwen3-8B', 'gpu_memory_utilization': 0.85}") + (
        "INFO 11-17 10:03:45 [gpu_model_runner.py:2653] Model loading took 15.2683 GiB and 12.0 seconds\n"
        "INFO 11-17 10:04:12 [gpu_worker.py:298] Available KV cache memory: -0.42 GiB\n"
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`\n"
    )
    fix = _first(_read(text))
    assert fix.changes["--gpu-memory-utilization"] == "0.95"
    # A GPU of at least (15.27 - 0.42) / 0.85 GiB; 144 KiB of KV a token.
    assert 9000 < int(fix.changes["--max-model-len"] or 0) <= (0.1 * 17.47 - 0.42) * 2**20 / 144
    other = _first(_read(text.replace("Qwen/Qwen3-8B", "somebody/unheard-of")))
    assert other.changes["--max-model-len"] == "4096"
    assert other.first_try


def test_what_vllm_reads_is_offered_before_a_gguf() -> None:
    machine = CommandMachine(gpu="rtx4090")
    found = judge_command("vllm serve casperhansen/llama-3.3-70b-instruct-awq", machine=machine)
    assert "GGUF" not in _first(found).why
    quantized = judge_command("vllm serve Qwen/Qwen3-30B-A3B --quantization fp8 --kv-cache-dtype fp8", machine=machine)
    assert _first(quantized).command == "vllm serve Qwen/Qwen3-30B-A3B-GPTQ-Int4 --kv-cache-dtype fp8"


OLLAMA = (
    'time=2025-11-17T10:00:01.123Z level=INFO source=routes.go:1298 msg="Listening on [::]:11434 (version 0.12.3)"\n'
)


def test_ollama_gets_a_shorter_context() -> None:
    text = OLLAMA + (
        'time=2025-11-17T10:01:12.001Z level=INFO source=server.go:429 msg="starting runner" cmd="/usr/bin/ollama runner --model /m --ctx-size 32768 --batch-size 512 --n-gpu-layers 33 --port 40123"\n'
        "CUDA error: out of memory\n"
    )
    assert _first(_read(text)).command == "OLLAMA_CONTEXT_LENGTH=8192 ollama serve"


def test_ollama_on_a_cpu_is_said() -> None:
    text = (
        OLLAMA + 'time=2025-11-17T10:00:02.000Z level=INFO source=gpu.go:396 msg="no compatible GPUs were discovered"\n'
    )
    quick = _read(text + '[GIN] 2025/11/17 - 10:05:14 | 200 |  1.5s |  127.0.0.1 | POST     "/api/chat"\n')
    assert quick.healthy
    assert "CPU" in quick.findings[0].what
    slow = _read(text + '[GIN] 2025/11/17 - 10:05:14 | 200 |  3m12s |  127.0.0.1 | POST     "/api/chat"\n')
    assert not slow.healthy
    assert "3m12s" in slow.findings[0].what


def test_a_slot_of_llama_cpp_is_made_as_long_as_the_prompt() -> None:
    text = (
        "srv          init: initializing slots, n_slots = 2\n"
        "main: server is listening on http://127.0.0.1:8080 - starting the main loop\n"
        "slot update_slots: id  0 | task 0 | new prompt, n_ctx_slot = 4096, n_keep = 0, n_prompt_tokens = 9120\n"
        "srv    send_error: task id = 0, error: the request exceeds the available context size, try increasing it\n"
    )
    finding = _read(text).findings[0]
    assert _first(_read(text)).changes == {"--ctx-size": "20480"}
    assert "truncate_prompt_tokens" not in str(finding)


def test_a_refused_quantization_is_taken_away() -> None:
    text = VLLM.format("{'model': 'RedHatAI/Qwen3-8B-FP8-dynamic', 'quantization': 'awq'}") + (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, Quantization method specified in the model config (compressed-tensors) does not match the quantization method specified in the `quantization` argument (awq). [type=value_error, input_value=ArgsKwargs((), {...}), input_type=ArgsKwargs]\n"
    )
    assert _first(_read(text)).command == "vllm serve RedHatAI/Qwen3-8B-FP8-dynamic"


OUT = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 270.00 MiB. GPU 0 has a total capacity of 23.53 GiB of which 142.94 MiB is free. Including non-PyTorch memory, this process has {} GiB memory in use.{}\n"


def test_a_published_copy_comes_before_gpus_that_are_not_there() -> None:
    start = VLLM.format("{'model': 'Qwen/Qwen2.5-32B-Instruct', 'max_model_len': 8192, 'gpu_memory_utilization': 0.95}")
    text = (
        f"{start}INFO 11-17 10:02:45 [gpu_model_runner.py:2602] Starting to load model Qwen/Qwen2.5-32B-Instruct...\n"
    )
    fix = _first(_read(text + OUT.format("23.37", "")))
    assert fix.changes["--model"] == "Qwen/Qwen2.5-32B-Instruct-AWQ"
    assert fix.basis == "planned"


def test_another_process_is_named() -> None:
    start = VLLM.format("{'model': 'Qwen/Qwen2.5-7B-Instruct', 'max_model_len': 32768}")
    text = f"{start}Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  30%|###       | 20/67 [00:02<00:05,  8.81it/s]\n"
    finding = _read(text + OUT.format("21.37", " Process 4242 has 2.00 GiB memory in use.")).findings[0]
    assert "Process 4242" in finding.what
    assert "4242" in (finding.alternatives[0].command or "")
    assert "Process" not in _read(text + OUT.format("23.37", "")).findings[0].what


def test_a_size_that_divides_is_offered_with_what_makes_it_fit() -> None:
    found = judge_command("vllm serve Qwen/Qwen3-32B -tp 3", machine=CommandMachine(gpu="rtx4090x3"))
    commands = {one.fix.command for one in found.findings if one.fix is not None}
    assert len(commands) == 1
    assert "Qwen3-32B-FP8 -tp 2" in str(commands)
    assert "HFW27" not in {one.code for one in found.findings}


def test_half_is_half() -> None:
    text = (
        '2025-11-17T10:00:00.000000Z  INFO text_generation_launcher: Args { model_id: "mistralai/Mistral-7B-Instruct-v0.3", max_batch_prefill_tokens: Some(32000) }\n'
        'Error: Backend(Warmup(Generation("Not enough memory to handle 32000 prefill tokens. You need to decrease `--max-batch-prefill-tokens`")))\n'
    )
    assert _first(_read(text)).changes["--max-batch-prefill-tokens"] == "16000"


def test_a_root_cause_is_explained_and_ollama_is_sent_to_the_planner() -> None:
    assert all(cause_named(one) is not None for one in get_args(RootCause))
    with pytest.raises(ConfigurationError) as caught:
        judge_command("ollama run llama3.3:70b")
    assert "holdfast plan llama3.3:70b" in str(caught.value.fix)


def test_a_model_is_named_once() -> None:
    found = judge_command("vllm serve Qwen/Qwen3-32B", machine=CommandMachine(gpu="rtx3060"))
    assert not [line for line in lines(found, width=400) if re.search(r"--model (\S+): \1:", line)]
    assert [line for line in lines(found, width=400) if "or        --model" in line]


def test_many_sequences_are_counted_in_whole_ones() -> None:
    found = judge_command("vllm serve Qwen/Qwen3-0.6B --max-model-len 16", machine=CommandMachine(gpu="h100-80"))
    assert re.search(r", \d{1,3},\d{3} sequences of 16 at once", "\n".join(found.seen))
