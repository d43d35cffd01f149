"""`holdfast plan`: words in, an answer and an exit code out, in a process that never sees torch."""

from __future__ import annotations

import json
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.cli.main import main
from holdfast.errors import ConfigurationError

GIB = 1 << 30
LIMIT_S, ATTEMPTS = 1.0, 15
WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "huggingface_hub"):
            raise ImportError("blocked by the test: " + name)
        return None

sys.meta_path.insert(0, NoTorch())
from holdfast.cli.main import main
sys.exit(main(["plan", *sys.argv[1:]]))
"""


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, found


def test_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned(capsys, "llama-3.1-8b", "--gpu", "rtx4090", "--max-model-len", "8K")
    assert (code, found["fits"], found["max_model_len"]) == (0, True, 8192)
    assert found["weights_bytes"] == 8_030_261_248 * 2
    assert found["kv_bytes_per_token"] == 128 * 1024
    assert found["devices"][0]["total_bytes"] > 23 * GIB
    fields = {decision["field"] for decision in found["decisions"]}
    assert {"model", "gpu"} <= fields


def test_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned(capsys, "llama-3.1-70b", "--gpu", "rtx4090")
    assert (code, found["fits"]) == (1, False)
    assert found["short_bytes"] > 0


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-8b", "--gpu", "rtx4090"]) == 0
    said = capsys.readouterr().out
    assert "weights" in said
    assert "\033" not in said
    assert max(map(len, said.splitlines())) <= 200


def test_every_setting_reaches_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned(
        capsys,
        "llama-3.1-8b",
        "--gpu",
        "h100-80x4",
        "-tp",
        "2",
        "-pp",
        "2",
        "--max-num-seqs",
        "32",
        "--max-num-batched-tokens",
        "4096",
        "--kv-cache-dtype",
        "fp8_e4m3",
        "--gpu-memory-utilization",
        "0.8",
        "--quantization",
        "awq",
        "--max-loras",
        "4",
        "--max-lora-rank",
        "64",
        "--block-size",
        "32",
        "--dtype",
        "half",
        "--concurrency",
        "16",
        "--prompt",
        "2k",
        "--output",
        "500",
        "--ram",
        "64GiB",
        "--nvme",
        "1TB",
    )
    assert code == 0
    settings = found["settings"]
    assert (settings["tensor_parallel_size"], settings["pipeline_parallel_size"]) == (2, 2)
    assert (settings["max_num_seqs"], settings["max_num_batched_tokens"]) == (32, 4096)
    assert (settings["kv_cache_dtype"], settings["dtype"], settings["block_size"]) == ("fp8", "float16", 32)
    assert settings["gpu_memory_utilization"] == 0.8
    assert found["kv_bytes_per_token"] == 64 * 1024
    assert found["weights_bytes"] < 6e9
    assert "adapters" in found["devices"][0]["terms"]
    assert found["traffic"]["concurrency"] == 16
    assert len(found["devices"]) == 4


def test_the_built_in_model_on_so_much_ram(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned(capsys, "--device", "cpu", "--ram", "4GiB")
    assert code == 0
    assert found["devices"][0]["kind"] == "cpu"
    assert found["devices"][0]["budget_bytes"] == 4 * GIB


def test_traffic_out_of_a_log(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    log.write_text('{"prompt_tokens": 3000, "completion_tokens": 96, "time": 5, "duration_s": 2}\n' * 3 + '{"torn": ')
    code, found = planned(capsys, "llama-3.1-8b", "--gpu", "rtx4090", "--traffic", str(log))
    assert code == 0
    assert found["traffic"]["concurrency"] == 3
    assert any("1 truncated line" in decision["reason"] for decision in found["decisions"])


def test_for_one_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-8b", "--gpu", "rtx4090", "--for", "vllm==0.26"]) == 0
    assert "vllm serve" in capsys.readouterr().out
    assert main(["plan", "llama-3.1-8b", "--gpu", "rtx4090", "--for", "abacus"]) == 2
    assert "HF146" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("llama-3.1-70b", "--gpu", "rtx4090x2"), ("llama-3.1-8b", "--gpu", "t4")])
def test_the_flags_of_ways_out_go_behind_the_line_they_answer(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """Also where they name another model than the line does."""
    code, found = planned(capsys, *words)
    assert code == 1
    named = 0
    for way in found["ways_out"]:
        flags = shlex.split(way["flags"])
        assert bool(flags) == (way["kind"] != "tiers")
        if not flags:
            continue
        code, again = planned(capsys, *words, *flags)
        assert code == 0, way
        if "--model" in flags:
            named += 1
            assert any("--model overrides" in decision["reason"] for decision in again["decisions"])
    assert named


# Comparing


def test_gpus_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned(capsys, "llama-3.1-70b", "--compare", "rtx4090", "h100-80x4")
    assert code == 1
    assert [document["fits"] for document in found["compare"]] == [False, True]
    assert main(["plan", "llama-3.1-8b", "--compare", "rtx4090", "h100-80"]) == 0
    said = capsys.readouterr().out
    assert "rtx4090" in said
    assert "h100-80" in said


def test_models_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned(capsys, "qwen3-8b", "--gpu", "rtx4090", "--compare", "llama-3.1-8b")
    assert code == 0
    names = [document["model"]["name"].lower() for document in found["compare"]]
    assert ["qwen" in name for name in names] == [True, False]


# What cannot be answered


@pytest.mark.parametrize(
    ("words", "code", "field"),
    [
        (["--vram", "1e30"], "HF100", "vram"),
        (["--vram", "0"], "HF100", "vram"),
        (["--ram=-4GiB", "--device", "cpu"], "HF100", "ram"),
        (["--concurrency", "0"], "HF100", "--concurrency"),
        (["--concurrency", "1e400"], "HF100", "--concurrency"),
        (["--concurrency", "5"], "HF143", "concurrency"),
        (["--concurrency", "1000000", "--prompt", "100M", "--output", "1"], "HF100", "concurrency"),
        (["--prompt", "5"], "HF143", "output"),
        (["--prompt", "0", "--output", "0"], "HF143", "prompt"),
        (["--prompt", "nan", "--output", "1"], "HF100", "--prompt"),
        (["--traffic", "x", "--prompt", "5", "--output", "5"], "HF143", "prompt"),
        (["--traffic", "no-such-file"], "HF160", "traffic"),
        (["--gpu-memory-utilization", "1.5"], "HF100", "--gpu-memory-utilization"),
        (["--gpu-memory-utilization", "0"], "HF100", "--gpu-memory-utilization"),
        (["--max-num-seqs", "0"], "HF100", "--max-num-seqs"),
        (["--max-num-seqs", "2.5"], "HF100", "--max-num-seqs"),
        (["--max-model-len", "1e9"], "HF100", "--max-model-len"),
        (["--max-model-len", "200K"], "HF111", "max_model_len"),
        (["-tp", "0"], "HF100", "--tensor-parallel-size"),
        (["-tp", "3", "--gpu", "l4x4"], "HF131", "tensor_parallel_size"),
        (["-tp", "4", "--gpu", "l4x2"], "HF133", "tensor_parallel_size"),
        (["-pp", "64", "--gpu", "l4x64"], "HF132", "pipeline_parallel_size"),
        (["--kv-cache-dtype", "int3"], "HF100", "--kv-cache-dtype"),
        (["--quantization", "wishful"], "HF144", "quantization"),
        (["--gpu", "voodoo2"], "HF140", "gpu"),
        (["--compare", "rtx4090"], "HF100", "compare"),
        (["--compare", "rtx4090", "qwen3-8b"], "HF143", "compare"),
        (["--max-lora-rank", "0"], "HF100", "--max-lora-rank"),
    ],
)
def test_a_question_that_cannot_be_answered(
    capsys: pytest.CaptureFixture[str], words: list[str], code: str, field: str
) -> None:
    exit_code, found = planned(capsys, "llama-3.1-8b", *words)
    assert exit_code == 2
    assert (found["error"]["code"], found["error"]["field"]) == (code, field)


def test_errors_for_people_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "./no-such-model"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "HF210" in said.err


def test_an_unknown_flag_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpus", "rtx4090"]) == 2
    assert "--gpu" in capsys.readouterr().err


# Without torch, and from Python


def test_a_plan_needs_neither_torch_nor_numpy_nor_the_hubs_client() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "llama-3.1-8b", "--gpu", "rtx4090"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "weights" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(("model", "gpu"), [("llama-3.1-8b", "rtx4090"), ("glm-5", "rtx4090x8")])
def test_a_plan_takes_less_than_a_second_of_a_processor(model: str, gpu: str) -> None:
    """Processor time, not the clock's: a busy machine must not decide. The best of a few runs counts. The second takes
    longest of the whole catalogue: it does not fit, has many layers, and every way out is planned."""
    command = [sys.executable, "-m", "holdfast", "plan", model, "--gpu", gpu]
    taken = []
    for _ in range(ATTEMPTS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, timeout=120)
        assert done.returncode in (0, 1), done.stderr
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if taken[-1] < LIMIT_S:
            break
    assert min(taken) < LIMIT_S


def test_from_python() -> None:
    answer = holdfast.plan("llama-3.1-8b", gpu="rtx4090", max_model_len=8192)
    assert answer.fits
    assert answer.to_json()["max_model_len"] == 8192
    assert not holdfast.plan("llama-3.1-70b", gpu="rtx4090").fits
    with pytest.raises(ConfigurationError, match="max_model_len") as caught:
        holdfast.plan("llama-3.1-8b", max_modellen=5)
    assert "did you mean" in str(caught.value)
    with pytest.raises(ValueError, match="is not valid"):
        holdfast.plan("llama-3.1-8b", gpu="rtx4090", concurrency=0)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--ram", "64GiB"), 0, "runs with 46 of 80 layers streamed from RAM"),
        ((), 1, "of free RAM"),
        (("--ram", "8GiB"), 1, "RAM is"),
        (("--ram", "64GiB", "--no-offload"), 1, "does not fit"),
        (("--ram", "64GiB", "-ngl", "20"), 0, "fits"),
    ],
)
def test_layers_in_ram_that_is_known_are_an_answer(
    words: tuple[str, ...], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "llama-3.1-70b-awq", "--gpu", "rtx4090", "--brief", *words]) == code
    assert said in " ".join(capsys.readouterr().out.split())
