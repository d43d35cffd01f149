"""Which fix is taken, and what the command's words become."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.doctor.findings import Finding, Fix
from holdfast.errors import ConfigurationError
from holdfast.rescue.choose_fix import RescueLimits, Started, apply, check_keep, choose, read

VLLM = ["vllm", "serve", "some/model", "--max-model-len", "32768", "--port", "9000"]


def _finding(*fixes: Fix, confidence: str = "high", **numbers: float) -> Finding:
    return Finding(
        code="HFD01",
        root_cause="kv_blowout",
        cause="kv_cache_too_small_for_max_len",
        confidence=confidence,  # type: ignore[arg-type]
        cause_confidence=confidence,  # type: ignore[arg-type]
        what="",
        evidence=[],
        why="",
        fix=fixes[0] if fixes else None,
        alternatives=list(fixes[1:]),
        numbers=numbers,
    )


def _chosen(words: list[str], *fixes: Fix, keep: tuple[str, ...] = (), confidence: str = "high") -> str | None:
    started = read(words)
    choice = choose(started, [_finding(*fixes, confidence=confidence)], RescueLimits(keep=keep), tried=[started])
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


def test_the_smallest_change_comes_first_if_it_is_more_than_a_guess() -> None:
    shorter, more = Fix(changes={"--max-model-len": "8192"}), Fix(changes={"--gpu-memory-utilization": "0.95"})
    eight_bits = Fix(changes={"--kv-cache-dtype": "fp8"})
    assert "--max-model-len 8192" in (_chosen(VLLM, eight_bits, shorter) or "")
    assert "--max-model-len 8192" in (_chosen(VLLM, shorter, eight_bits, more) or "")
    started = read(VLLM)
    for lacking_gib, flag in ((1.0, "--gpu-memory-utilization"), (2.0, "--max-model-len")):
        finding = _finding(shorter, more, needed_gib=4.0 + lacking_gib, available_gib=4.0)
        choice = choose(started, [finding], RescueLimits(gpu_gib=24.0), tried=[started])
        assert choice is not None
        assert list(choice.fix.changes) == [flag]


def test_a_kind_of_change_that_did_not_help_twice_comes_last() -> None:
    lower, eager = Fix(changes={"--gpu-memory-utilization": "0.8"}), Fix(changes={"--enforce-eager": ""})
    started, finding = read(VLLM), msgspec.structs.replace(_finding(lower, eager), cause="activation_oom_runtime")
    taken: list[Fix] = []
    for expected in (lower, lower, eager):
        choice = choose(started, [finding], RescueLimits(), tried=[started], taken=taken)
        assert choice is not None
        assert choice.fix == expected
        taken.append(choice.fix)


@pytest.mark.parametrize(
    ("words", "gone", "becomes"),
    [
        ("vllm serve m --api-keyy a b --host 0.0.0.0", "--api-keyy", "vllm serve m --api-key a b --host 0.0.0.0"),
        ("vllm serve m --api-keyy=a", "--api-keyy", "vllm serve m --api-key=a"),
        ("vllm serve m --max-model-lenn 9", "--max-model-lenn", "vllm serve m --max-model-len 9"),
        ("vllm serve m --swap-spice-x-y-z 9", "--swap-spice-x-y-z", "vllm serve m"),
        ("vllm serve m --api-key a", "--api-key", None),
        ("vllm serve m --ssl-qwertyuiop a", "--ssl-qwertyuiop", None),
        ("vllm serve m --host 10.0.0.1", "--host", None),
        ("vllm serve m --allowed-origins x", "--allowed-origins", None),
    ],
)
def test_what_is_misspelt_is_corrected_and_nothing_that_guards_is_dropped(
    words: str, gone: str, becomes: str | None
) -> None:
    started = read(words.split())
    for bold in (False, True):
        finding = _finding(Fix(changes={gone: None}))
        choice = choose(started, [finding], RescueLimits(bold=bold), tried=[started])
        assert (None if choice is None else choice.started.text) == becomes


def test_a_flag_to_keep_that_there_is_not_is_refused() -> None:
    check_keep(read(VLLM), ("max-model-len", "--max_num_seqs", "VLLM_CPU_KVCACHE_SPACE", "tp"))
    check_keep(read(["./start.sh"]), ("anything",))
    with pytest.raises(ConfigurationError, match="no flag max-num-seq"):
        check_keep(read(VLLM), ("max-num-seq",))


def test_what_is_kept_stays() -> None:
    fixes = (Fix(changes={"--max-model-len": "8192"}), Fix(changes={"--kv-cache-dtype": "fp8"}))
    assert "fp8" in (_chosen(VLLM, *fixes, keep=("max-model-len",)) or "")
    assert "fp8" in (_chosen(VLLM, *fixes, keep=("--max_model_len",)) or "")
    assert _chosen(VLLM, *fixes, keep=("max-model-len", "kv-cache-dtype")) is None


def test_another_model_its_code_or_address_is_never_taken_unasked() -> None:
    for flag in ("--model", "--quantization", "--trust-remote-code", "--port"):
        assert _chosen(VLLM, Fix(changes={flag: "x"})) is None
    started = read(VLLM)
    asked = choose(started, [_finding(Fix(changes={"--port": "9001"}))], RescueLimits(bold=True), tried=[started])
    assert asked is not None
    assert "--port 9001" in asked.started.text


def test_more_ranks_only_where_there_are_gpus_for_them() -> None:
    started, more = read(VLLM), _finding(Fix(changes={"--tensor-parallel-size": "2"}))
    assert choose(started, [more], RescueLimits(gpus=1), tried=[started]) is None
    assert choose(started, [more], RescueLimits(gpus=2), tried=[started]) is not None
    fewer = read(["vllm", "serve", "m", "-tp", "4"])
    assert choose(fewer, [more], RescueLimits(), tried=[fewer]) is not None


def test_nothing_is_tried_twice_and_nothing_unsure_is_tried() -> None:
    assert _chosen(VLLM, Fix(changes={"--max-model-len": "32768"})) is None
    assert _chosen(VLLM, Fix(changes={"--max-model-len": "8192"}), confidence="low") is None


def test_a_command_that_cannot_be_read_is_never_changed() -> None:
    assert _chosen(["./start.sh"], Fix(changes={"--max-model-len": "8192"})) is None
