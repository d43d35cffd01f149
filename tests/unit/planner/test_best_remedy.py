"""Of a plan that does not fit, which remedy is best and whose commands are printed: none that its engine refuses."""

from __future__ import annotations

import re

import pytest

from holdfast import plan
from holdfast.cli.main import main
from holdfast.planner.report.text import lines


@pytest.mark.parametrize("method", ["fp8", "Q8_0"])
def test_a_published_copy_comes_first_for_a_model_planned_as_if_quantized(method: str) -> None:
    found = plan("qwen3-30b-a3b", quantization=method, gpu="4090")
    assert found.ways_out[0].settings == {"model": "Qwen/Qwen3-30B-A3B-GPTQ-Int4", "quantization": "gptq"}
    assert found.best == 0
    assert found.commands["holdfast"].text.startswith("holdfast serve Qwen/Qwen3-30B-A3B-GPTQ-Int4 ")
    words = ["plan", "qwen3-30b-a3b", "-q", method, "--gpu", "4090", "--brief"]
    for way in found.ways_out[:2]:
        assert main([*words, *way.flags.split()]) == 0, "behind the line that was planned it fits"


def test_no_copy_of_as_many_bits_is_a_remedy() -> None:
    found = plan("llama-3.1-70b", quantization="Q4_K_M", gpu="rtx3090")
    assert not [way for way in found.ways_out if "awq" in str(way.settings.get("model", "")).lower()]


def test_ram_comes_before_more_gpus_and_few_gpus_before_many() -> None:
    found = plan("llama3.3:70b", gpu="4090")
    kinds = [way.kind for way in found.ways_out]
    assert kinds.index("tiers") < kinds.index("more_gpus")
    counts = [way.settings["gpus"] for way in found.ways_out if way.kind == "more_gpus"]
    assert counts == sorted(counts)
    assert counts[0] == 2


def test_commands_are_of_the_first_remedy_that_each_engine_runs() -> None:
    found = plan("llama3.3:70b", gpu="4090")
    assert found.best is not None
    assert found.commands["holdfast"].remedy == found.best + 1
    assert found.ways_out[found.best].kind == found.commands_of == "tiers"
    taken = found.commands["vllm"].remedy
    assert taken is not None
    assert found.ways_out[taken - 1].kind == "more_gpus"
    assert not any(command.lacks for command in found.commands.values())
    said = "\n".join(lines(found, width=120))
    assert "Commands, each of the first remedy that its engine runs" in said
    assert f"# of remedy {taken}: more_gpus" in said
    assert "does not support this yet" not in said


def test_the_best_remedy_is_one_that_holdfast_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-70b", "-q", "Q4_K_M", "--gpu", "rtx3090", "--brief"]) == 1
    said = capsys.readouterr().out
    assert "layers on the GPU" in said
    assert "2 x rtx3090" not in said


def test_layers_of_llama_cpp_are_told_apart_from_the_remedy_beside_them(capsys: pytest.CaptureFixture[str]) -> None:
    """The command has some of the layers on the GPU, the remedy all of another file; nothing of it says 0 tokens."""
    asked = ["plan", "llama-3.1-70b", "-q", "Q4_K_M", "--gpu", "rtx4090", "--for", "llama.cpp", "--brief", "--ram"]
    assert main([*asked, "128GiB"]) == 0
    said = capsys.readouterr().out
    placed = re.search(r"llama.cpp runs it with\s(\d+ of 80 layers on the GPU)", said)
    assert placed is not None
    assert f"with {placed[1]} there is room for 4,096 tokens" in said
    assert f"\nCommand with {placed[1]}\n" in said
    assert f"-ngl {placed[1].split()[0]}\n" in said
    assert "\nBest remedy, for all layers on the GPU\n" in said
    assert "it does not fit" not in said
    # With too little RAM for them the command is the remedy's.
    assert main([*asked, "16GiB"]) == 1
    said = capsys.readouterr().out
    assert "short for llama.cpp with" in " ".join(said.split())
    remedy = re.search(r"Best remedy\n +1\. (\w+)", said)
    assert remedy is not None
    assert "Commands of remedy 1: quantization" in said
    assert f"-{remedy[1]}.gguf" in said


def test_a_card_that_engines_refuse_is_said_and_has_the_command_of_what_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "llama-3.1-8b", "--gpu", "gtx1080ti"]) == 1
    said = capsys.readouterr().out
    assert "Holdfast needs compute capability 8.0" in " ".join(said.splitlines()[:2])
    commands = said[said.index("Commands of remedy 1: quantization") :]
    assert "llama-server -m ./TO-BE-MADE/Llama-3.1-8B-Instruct-Q8_0.gguf" in commands
    assert "Holdfast, no command:" in commands
    assert " serve " not in commands
    assert main(["plan", "llama-3.1-8b", "--gpu", "gtx1080ti", "--brief"]) == 1
    brief = capsys.readouterr().out
    assert "Holdfast needs compute capability 8.0" in " ".join(brief.splitlines()[:2])
    assert "1. Q8_0" in brief


def test_a_family_that_holdfast_lacks_has_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt-oss-20b", "--gpu", "4090", "--for", "holdfast"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "holdfast serve" not in said
    assert "mixtures of experts" not in said, "it has those of other families"
    assert "experts routed as in the gpt_oss family" in said


def test_llama_cpp_runs_with_some_layers_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3.1-70b", "-q", "Q4_K_M", "--gpu", "rtx3090", "--for", "llama.cpp"]
    assert main([*words, "--ram", "64GiB"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    layers = int(said.partition("llama.cpp runs it with ")[2].split()[0])
    assert 30 < layers < 40, "of 80 of 0.47 GiB each, in 21.3 GiB with the output, KV and a step's buffer"
    assert f"-ngl {layers}" in said
    assert "-c 4096" in said
    assert "not something to run" not in said
    assert main([*words, "--ram", "16GiB"]) == 1
    assert "RAM is" in capsys.readouterr().out
    assert main(words) == 1, "it is not known what RAM there is"
    assert "of free RAM" in " ".join(capsys.readouterr().out.split())
    found = plan("llama-3.1-70b", quantization="Q4_K_M", gpu="rtx3090", engine="llama.cpp", ram="64GiB")
    assert found.partly is not None
    longer = plan("llama-3.1-70b", quantization="Q4_K_M", gpu="rtx3090", engine="llama.cpp", max_model_len=32768)
    assert longer.partly is not None
    assert longer.partly.on_gpu < found.partly.on_gpu, "KV of a layer lies beside it"
    assert "-c 32768" in longer.commands["llama.cpp"].text


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q5_K_M", "holdfast plan llama-3.1-8b -q Q5_K_M"),
        ("TheBloke/Llama-2-13B-chat-GPTQ", "holdfast plan llama-2-13b -q gptq"),
    ],
)
def test_without_network_somebodys_copy_is_planned_by_the_catalogue(
    name: str, instead: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["plan", name, "--gpu", "4090"]) == 2
    assert f"without the network: {instead}" in capsys.readouterr().err
    assert main([*instead.split()[1:], "--gpu", "4090", "--brief"]) == 0


def test_methods_that_are_known_are_listed_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-8b", "-q", "exl2"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert max(map(len, said)) <= 120
    assert any(line.strip().startswith("k-quants ") and "Q4_K_M" in line for line in said)
