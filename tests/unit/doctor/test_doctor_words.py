"""Commands as they are read and changed, what is taken out of a report, and the command line of the doctor."""

# ruff: noqa: E501

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.doctor.command.parse import parse_command
from holdfast.doctor.report.redact import redacted

COMMANDS = {
    "CUDA_VISIBLE_DEVICES=0 vllm serve Qwen/Qwen3-8B --max-model-len 32768 -tp 2 --enforce-eager": (
        "vllm",
        "Qwen/Qwen3-8B",
        "CUDA_VISIBLE_DEVICES=0 vllm serve Qwen/Qwen3-8B --max-model-len 1024 -tp 4",
    ),
    "nohup python -m vllm.entrypoints.openai.api_server --model q --port=80 --max_model_len=4096 > log 2>&1": (
        "vllm",
        "q",
        "nohup python -m vllm.entrypoints.openai.api_server --model q --port=80 --max_model_len=1024 --tensor-parallel-size 4 > log 2>&1",
    ),
    "docker run --gpus all -p 8001:8000 vllm/vllm-openai:v0.9.0 --model /d/m": (
        "vllm",
        "/d/m",
        "docker run --gpus all -p 8001:8000 vllm/vllm-openai:v0.9.0 --model /d/m --max-model-len 1024 --tensor-parallel-size 4",
    ),
    "python3 -m sglang.launch_server --model-path x --tp 3": (
        "sglang",
        "x",
        "python3 -m sglang.launch_server --model-path x --tp 4 --max-model-len 1024",
    ),
    'llm = LLM("a/b", gpu_memory_utilization=0.8, max_model_len=n)': (
        "vllm",
        "a/b",
        "LLM('a/b', gpu_memory_utilization=0.8, max_model_len=1024, tensor_parallel_size=4)",
    ),
}


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_is_read_and_changed(text: str) -> None:
    engine, model, changed = COMMANDS[text]
    command = parse_command(text)
    assert command is not None
    assert (command.engine, command.model) == (engine, model)
    changes = {"--max-model-len": "1024", "--tensor-parallel-size": "4", "--enforce-eager": None}
    assert command.with_changes(changes) == changed


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("llama-server -m a.gguf -c 8192 -ngl 99", "llama.cpp"),
        ("ollama serve", "ollama"),
        ("holdfast serve x --ram 1GiB", "holdfast"),
        ("text-generation-launcher --model-id a/b --num-shard 2", "tgi"),
        ("the server is up", None),
        ("vllm 'unclosed", None),
    ],
)
def test_whose_command_it_is(text: str, engine: str | None) -> None:
    command = parse_command(text)
    assert (None if command is None else command.engine) == engine


HOME = "/home/" + "jane"
SECRETS = (
    "hf_abcdefghijklmnop",
    "sk-proj-abcdefgh12345678",
    "Bearer abcdef123456.xyz",
    "AKIAABCDEFGHIJKLMNOP",
    f"{HOME}/models",
    "C:\\Users\\jane\\models",
    "jane@example.org",
    "--api-key topsecretvalue",
    "HF_TOKEN=whatever123",
    "'api_key': ['abcd1234']",
    "https://jane:hunter2@proxy:3128",
    "password: hunter2",
    "prompt: 'my private question'",
    '"messages": [{"content": "private"}]',
    "Received request cmpl-1: prompt: 'private words'",
    "/Users/jane/x",
    "https://x/y?token=abc123def",
)


@pytest.mark.parametrize("secret", SECRETS)
def test_a_report_holds_no_secret(secret: str) -> None:
    clean = redacted(f"INFO something {secret} and more")
    for word in (
        "abcdef",
        "jane",
        "secretvalue",
        "whatever123",
        "abcd1234",
        "hunter2",
        "private",
        "AKIAABCD",
        "abc123def",
    ):
        assert word not in clean
    assert "something" in clean


@pytest.mark.parametrize(
    "text",
    ["max_tokens=16, prompt_tokens: 200", "api_key=None", "GPU KV cache size: 37,136 tokens", "--max-model-len 4096"],
)
def test_what_a_report_needs_stays(text: str) -> None:
    assert redacted(text) == text


FAILED = "ValueError: LoRA rank 64 is greater than max_lora_rank 16."


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "server.log"
    log.write_text(f"non-default args: {{'model': '{HOME}/m', 'api_key': ['topsecret99']}}\n{FAILED}\n")
    bundle = tmp_path / "report.tar.gz"
    assert main(["doctor", str(log), "--json", "--bundle", str(bundle)]) == 1
    said = capsys.readouterr()
    assert "written to" in said.err
    told = json.loads(said.out)
    assert told["findings"][0]["cause"] == "lora_rank"
    assert told["findings"][0]["fix"]["changes"] == {"--max-lora-rank": "64"}
    with tarfile.open(bundle) as archive:
        texts = [archive.extractfile(member).read().decode() for member in archive.getmembers()]  # type: ignore[union-attr]
    assert len(texts) == 3
    assert not any("jane" in text or "topsecret99" in text for text in texts)
    assert main(["doctor", str(log)]) == 1
    report = capsys.readouterr().out
    assert "--max-lora-rank 64" in report
    assert "lora_rank [HFD30]" in report


@pytest.mark.parametrize(("text", "code"), [("Application startup complete.\n", 0), ("hello\n", 3), (FAILED, 1)])
def test_exit_codes(text: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "server.log"
    log.write_text(text)
    assert main(["doctor", str(log)]) == code
    assert capsys.readouterr().out


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "none.log")]) == 2
    assert "HFD90" in capsys.readouterr().err
    (tmp_path / "a.log").write_text(FAILED)
    for path in ("a.log", "no folder/b.tar.gz"):  # What cannot be written loses no answer.
        assert main(["doctor", str(tmp_path / "a.log"), "--bundle", str(tmp_path / path)]) == 2
        said = capsys.readouterr()
        assert "lora_rank [HFD30]" in said.out
        assert "HFD91" in said.err
    assert main(["explain", "hfd01", "kv_cache_too_small_for_max_len"]) == 0
    assert capsys.readouterr().out.count("HFD01") == 2


def test_a_log_that_is_piped_in_is_read_without_a_dash(tmp_path: Path) -> None:
    log = b"ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.\n"
    command = [sys.executable, "-m", "holdfast", "doctor", "--json"]
    piped = subprocess.run(command, input=log, capture_output=True, timeout=120, check=False)
    assert json.loads(piped.stdout)["findings"][0]["cause"] == "no_memory_for_kv_blocks"
    (tmp_path / "server.log").write_bytes(log)
    with open(tmp_path / "server.log") as opened:
        redirected = subprocess.run(command, stdin=opened, capture_output=True, timeout=120, check=False)
    assert json.loads(redirected.stdout)["findings"][0]["cause"] == "no_memory_for_kv_blocks"
    empty = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False)
    assert "no_memory_for_kv_blocks" not in empty.stdout.decode()
