"""What people write by mistake, and what they are told: the nearest name, the unit that is missing, the address to ask.

Each is a command line as somebody wrote it at night; no server, no hub, no torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.checkpoints import locate
from holdfast.cli.chat_backends import api_of
from holdfast.cli.main import main
from holdfast.config import EngineConfig
from holdfast.config.plan import PlanConfig
from holdfast.errors import ConfigurationError, ModelNotFoundError
from holdfast.planner.api import question_of, traffic_of

FREE_PORT_OF_NOBODY = "127.0.0.1:9"


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    return capsys.readouterr().err


# Units, names and numbers


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("plan", "llama-3.1-8b", "--vram", "24"), "write 24GiB"),
        (("plan", "llama-3.1-8b", "--gpu", "l4", "--ram", "64"), "write 64GiB"),
        (("plan", "llama-3.1-8b", "--gpu", "l4", "--nvme", "512"), "write 512GiB"),
        (("serve", "--ram", "6"), "--ram 6GiB"),
        (("serve", "--vram", "24"), "--vram 24GiB"),
        (("serve", "--kv-cache-memory-bytes", "4"), "--kv-cache-memory-bytes 4GiB"),
        (("plan", "--kv-cache-dtype", "fp16"), "did you mean --kv-cache-dtype float16?"),
        (("serve", "-ctk", "q8_0"), "--kv-cache-dtype fp8 keeps keys and values in 8 bits"),
        (("serve", "--kv-cache-dtype", "int8"), "serve --kv-cache-dtype fp8"),
        (("plan", "--kv-cache-dtype", "nvfp4"), "--kv-cache-dtype fp8, which takes half of bfloat16's bytes"),
        (("plan", "--kv-cache-dtype", "fp8_e4m"), "did you mean --kv-cache-dtype fp8_e4m3?"),
        (("plan", "--gpu-memory-utilization", "95"), "--gpu-memory-utilization 0.95"),
        (("serve", "--max-model-len", "0"), "--max-model-len auto"),
        (("serve", "--max-num-seqs", "0"), "--max-num-seqs 1"),
    ],
)
def test_a_mistake_comes_with_what_was_meant(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], fix: str
) -> None:
    assert fix in said(capsys, *words)


@pytest.mark.parametrize("setting", ["ram", "vram", "kv_cache_memory_bytes"])
def test_from_python_too(setting: str) -> None:
    with pytest.raises(ConfigurationError, match="6 bytes"):
        EngineConfig.from_arguments(**{setting: 6})
    assert getattr(EngineConfig.from_arguments(device="cuda", **{setting: "1MiB"}), setting) == 1 << 20


@pytest.mark.parametrize(
    ("written", "flag"), [("4091", "--gpu rtx4090,"), ("rtx4091", "--gpu rtx4090,"), ("a100-8", "--gpu a100-80,")]
)
def test_an_unknown_gpu_is_answered_with_the_nearest_as_a_flag(
    capsys: pytest.CaptureFixture[str], written: str, flag: str
) -> None:
    assert flag in said(capsys, "plan", "llama-3.1-8b", "--gpu", written)


@pytest.mark.parametrize("written", ["a100-mig-1g.10gb", "h100-1g.10gb", "1g.10gb", "h100-80-mig-1g.10gbx2"])
def test_a_mig_slice_is_planned_by_its_memory(capsys: pytest.CaptureFixture[str], written: str) -> None:
    assert "--vram 9.5GiB" in said(capsys, "plan", "llama-3.1-8b", "--gpu", written)


@pytest.mark.parametrize(
    ("written", "key", "other"),
    [("a100", "a100-80", "a100-40"), ("m3max", "m3-max-36", "m3-max-64"), ("a100x2", "a100-80", "a100-40")],
)
def test_a_family_of_gpus_takes_a_size_and_says_so(written: str, key: str, other: str) -> None:
    question = question_of(PlanConfig(model="llama-3.1-8b", gpu=written))
    assert {device.name for device in question.machine.devices} == {key}
    (decision,) = [one for one in question.decisions if one.field == "gpu"]
    assert other in decision.reason


def test_a_gpu_that_is_named_whole_says_nothing_of_sizes() -> None:
    question = question_of(PlanConfig(model="llama-3.1-8b", gpu="a100-40"))
    assert not any("no size was given" in decision.reason for decision in question.decisions)


@pytest.mark.parametrize(
    ("name", "fix"), [("lama-3.1-8b", "did you mean llama-3.1-8b?"), ("smolm2", "did you mean smollm2?")]
)
def test_a_name_that_cannot_be_served_says_what_can(name: str, fix: str) -> None:
    with pytest.raises(ModelNotFoundError) as refused:
        locate(name)
    assert fix in (refused.value.fix or "")


def test_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="not a model folder") as refused:
        locate(str(tmp_path))
    assert "config.json" in (getattr(refused.value, "fix", None) or "")


# For programs


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--json", "--bogus", "x"),
        ("plan", "--json", "--gpu"),
        ("explain", "HF999", "--json"),
        ("ps", "not an address", "--json"),
    ],
)
def test_a_mistake_in_the_words_is_json_where_json_was_asked_for(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert main(list(words)) == 2
    output = capsys.readouterr()
    error = json.loads(output.out)["error"]
    assert error["code"].startswith("HF1")
    assert error["message"]
    assert output.err == ""


def test_a_flag_that_nothing_is_near_to_is_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean" not in said(capsys, "plan", "--bogus", "x")
    assert "did you mean --max-model-len?" in said(capsys, "plan", "--max-len", "8")
    assert "expected one argument" in said(capsys, "plan", "--gpu")


# Readers that take only ASCII


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_bars_for_a_reader_of_ascii(encoding: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "plan", "llama-3.1-8b", "--gpu", "rtx4090"],
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    assert done.returncode == 0, done.stderr
    drawn = done.stdout.decode(encoding)
    assert "[####" in drawn
    assert "\\u" not in drawn


# Comparing, and addresses


def test_an_unknown_gpu_among_compared_ones(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("rtx4090", "rtx9999"), ("rtx9999", "rtx9998")):
        told = said(capsys, "plan", "llama-3.1-8b", "--compare", *words)
        assert "HF140" in told
        assert "rtx9999" in told
    assert "not both" in said(capsys, "plan", "--compare", "rtx4090", "qwen3-8b")


def test_a_table_has_no_commands_to_choose_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert "HF143" in said(capsys, "plan", "llama-3.1-8b", "--compare", "rtx4090", "l4", "--for", "vllm")


def test_ps_without_a_server_says_how_to_ask_another(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither those of this machine, nor what a start in this process has left.
    monkeypatch.setattr("holdfast.cli.servers.registry.running_servers", list)
    monkeypatch.setattr("holdfast.cli.commands.running.ps.DEFAULT_URL", f"http://{FREE_PORT_OF_NOBODY}")
    assert main(["ps"]) == 1
    told = capsys.readouterr().out
    assert "nothing answers there" in told
    assert "holdfast ps localhost:8123" in told


@pytest.mark.parametrize(("written", "asked"), [("18731", "localhost:18731"), ("localhost:18731", "localhost:18731")])
def test_a_bare_number_is_a_port_of_this_machine(written: str, asked: str) -> None:
    assert api_of(written, written="URL") == f"http://{asked}/v1/"
    with pytest.raises(ConfigurationError):
        api_of("187310", written="URL")


def test_traffic_takes_a_bare_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError) as refused:
        traffic_of(PlanConfig(traffic=FREE_PORT_OF_NOBODY))
    assert f"http://{FREE_PORT_OF_NOBODY}" in refused.value.message
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log:8000").write_text('{"prompt_tokens": 5, "completion_tokens": 6, "time": 1, "duration_s": 1}\n')
    found, _ = traffic_of(PlanConfig(traffic="log:8000"))
    assert found is not None, "a file that is called so is still a file"


def test_a_misspelt_flag_is_named_and_not_the_one_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    told = said(capsys, "tune", "smollm2", "--trafic", "access.log", "--slo", "ttft=1s")
    assert "--trafic is not understood" in told
    assert "did you mean --traffic?" in told
    assert "are required: --traffic" in said(capsys, "tune", "smollm2", "--slo", "ttft=1s")


# Lists


def test_what_is_known_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--list-gpus"]) == 0
    assert "rtx4090 " in capsys.readouterr().out
    assert main(["plan", "--list-gpus", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"h100-80", "m3-max-64"} <= {gpu["key"] for gpu in listed}
    assert main(["models", "--known"]) == 0
    assert "meta-llama/Llama-3.1-8B-Instruct" in capsys.readouterr().out
    assert main(["models", "--known", "--json"]) == 0
    known = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert known["llama-3.1-8b-awq"]["quantization"] == "awq"
