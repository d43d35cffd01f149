"""Which fix is taken, and what the command's words become."""

from __future__ import annotations

import pytest

from holdfast.doctor.records import Finding, Fix
from holdfast.doctor.rescue_change import Started, apply, choose, read

VLLM = ["vllm", "serve", "some/model", "--max-model-len", "32768", "--port", "9000"]


def _finding(*fixes: Fix, confidence: str = "high") -> Finding:
    return Finding(
        code="HFD01", root_cause="kv_blowout", cause="kv_cache_too_small_for_max_len", confidence=confidence,  # type: ignore[arg-type]
        what="", evidence=[], why="", fix=fixes[0] if fixes else None, alternatives=list(fixes[1:]),
    )  # fmt: skip


def _chosen(words: list[str], *fixes: Fix, keep: tuple[str, ...] = (), confidence: str = "high") -> str | None:
    started = read(words)
    choice = choose(started, [_finding(*fixes, confidence=confidence)], keep=keep, tried=[started])
    return None if choice is None else choice.started.text


@pytest.mark.parametrize(
    ("words", "changes", "becomes"),
    [
        ("vllm serve m --max-model-len 9", {"--max-model-len": "4"}, "vllm serve m --max-model-len 4"),
        ("vllm serve m --max-model-len=9 -tp 2", {"--max-model-len": "4"}, "vllm serve m --max-model-len=4 -tp 2"),
        ("vllm serve m -tp 3", {"--tensor-parallel-size": "2"}, "vllm serve m -tp 2"),
        ("vllm serve m --max_model_len 9", {"--max-model-len": "4"}, "vllm serve m --max_model_len 4"),
        ("vllm serve m", {"--enforce-eager": ""}, "vllm serve m --enforce-eager"),
        ("vllm serve m --swap-space 4 --port 1", {"--swap-space": None}, "vllm serve m --port 1"),
        ("nice -n 5 vllm serve m -tp 3", {"-tp": "1"}, "nice -n 5 vllm serve m -tp 1"),
        ("A=1 vllm serve m", {"B_C": "2", "A": None}, "B_C=2 vllm serve m"),
        ("python -m vllm.entrypoints.openai.api_server --model m --dtype x", {"--dtype": "half"},
         "python -m vllm.entrypoints.openai.api_server --model m --dtype half"),
        ("llama-server -m a.gguf -c 65536 -ngl 99", {"--ctx-size": "8192"}, "llama-server -m a.gguf -c 8192 -ngl 99"),
        ("llama-server -m a.gguf -fa -c 9", {"--flash-attn": "on"}, "llama-server -m a.gguf -fa on -c 9"),
        ("python -m sglang.launch_server --model-path m --tp 3", {"--tp": "2"},
         "python -m sglang.launch_server --model-path m --tp 2"),
        ("holdfast serve m --ram 1GiB", {"--ram": "2GiB"}, "holdfast serve m --ram 2GiB"),
        ("docker run --gpus all vllm/vllm-openai:latest --model m", {"X_Y": "1"},
         "docker run -e X_Y=1 --gpus all vllm/vllm-openai:latest --model m"),
    ],
)  # fmt: skip
def test_only_what_is_changed_changes(words: str, changes: dict[str, str | None], becomes: str) -> None:
    changed = apply(read(words.split()), changes)
    assert changed is not None
    assert changed.text == becomes


def test_words_with_spaces_stay_one() -> None:
    started = Started(("vllm", "serve", "my model", "--max-model-len", "9"))
    changed = apply(started, {"--max-model-len": "4"})
    assert changed is not None
    assert changed.argv == ("vllm", "serve", "my model", "--max-model-len", "4")


def test_the_smallest_change_comes_first() -> None:
    shorter, more = Fix(changes={"--max-model-len": "8192"}), Fix(changes={"--gpu-memory-utilization": "0.95"})
    eight_bits = Fix(changes={"--kv-cache-dtype": "fp8"})
    assert "--gpu-memory-utilization 0.95" in (_chosen(VLLM, shorter, eight_bits, more) or "")
    assert "--max-model-len 8192" in (_chosen(VLLM, eight_bits, shorter) or "")


def test_what_is_kept_stays() -> None:
    fixes = (Fix(changes={"--max-model-len": "8192"}), Fix(changes={"--kv-cache-dtype": "fp8"}))
    assert "fp8" in (_chosen(VLLM, *fixes, keep=("max-model-len",)) or "")
    assert "fp8" in (_chosen(VLLM, *fixes, keep=("--max_model_len",)) or "")
    assert _chosen(VLLM, *fixes, keep=("max-model-len", "kv-cache-dtype")) is None


def test_another_model_its_code_or_address_is_never_taken_unasked() -> None:
    for flag in ("--model", "--quantization", "--trust-remote-code", "--port"):
        assert _chosen(VLLM, Fix(changes={flag: "x"})) is None
    started = read(VLLM)
    asked = choose(started, [_finding(Fix(changes={"--port": "9001"}))], keep=(), tried=[started], bold=True)
    assert asked is not None
    assert "--port 9001" in asked.started.text


def test_more_ranks_only_where_there_are_gpus_for_them() -> None:
    started, more = read(VLLM), _finding(Fix(changes={"--tensor-parallel-size": "2"}))
    assert choose(started, [more], keep=(), tried=[started], gpus=1) is None
    assert choose(started, [more], keep=(), tried=[started], gpus=2) is not None
    fewer = read(["vllm", "serve", "m", "-tp", "4"])
    assert choose(fewer, [more], keep=(), tried=[fewer]) is not None


def test_nothing_is_tried_twice_and_nothing_unsure_is_tried() -> None:
    assert _chosen(VLLM, Fix(changes={"--max-model-len": "32768"})) is None
    assert _chosen(VLLM, Fix(changes={"--max-model-len": "8192"}), confidence="low") is None


def test_a_command_that_cannot_be_read_is_never_changed() -> None:
    assert _chosen(["./start.sh"], Fix(changes={"--max-model-len": "8192"})) is None
