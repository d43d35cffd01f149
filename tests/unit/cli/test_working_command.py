"""A refused start prints one command that works, however many of its flags are refused, and whenever."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_gguf import write_tiny_gguf

from holdfast.cli import working_command
from holdfast.cli.main import main, parse_command_line
from holdfast.cli.working_command import refused_start
from holdfast.engine.startup import build
from holdfast.hardware import Memory
from holdfast.units import GIB, MIB


def command_in(said: str) -> list[str]:
    return shlex.split(said.rpartition("holdfast serve ")[2].splitlines()[0])


def test_flags_of_every_kind_are_refused_in_one_round(capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown, known and absent, with a value that is not valid, and one of another device."""
    asked = ["--enable-foo", "--kv-transfer-config", "{}", "--kv-events-config", "x", "--gpu-memory-utilization", "95"]
    asked += ["--dtype", "float99", "--tensor-parallel-size", "2", "--port", "9"]
    assert main(["serve", "some/model", *asked]) == 2
    said = capsys.readouterr().err
    for name in ("--enable-foo", "--kv-events-config", "--gpu-memory-utilization", "--dtype"):
        assert name in said.partition("fix:")[0]
    words = command_in(said)
    assert words[:1] == ["some/model"]
    assert words[words.index("--port") + 1] == "9"
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.95"
    assert refused_start(["serve", *words], parse_command_line) is None
    assert parse_command_line(["serve", *words])


def test_what_only_the_model_can_tell_is_planned_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tiny.gguf"
    write_tiny_gguf(file)
    asked = ["--quantization", "awq", "--load-format", "safetensors", "--max-model-len", "100K", "--bogus"]
    assert main(["serve", str(file), *asked]) == 2
    words = command_in(capsys.readouterr().err)
    assert words == [str(file), "--max-model-len", "128"]
    assert refused_start(["serve", *words], parse_command_line) is None


def test_a_value_that_may_be_meant_is_in_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Not only in the sentence before it."""
    assert main(["serve", "some/model", "--kv-cache-dtype", "fp8_e4m4", "-q", "awk"]) == 2
    assert command_in(capsys.readouterr().err) == ["some/model", "--kv-cache-dtype", "fp8_e4m3", "-q", "awq"]


@pytest.mark.parametrize(
    ("flag", "written", "meant"),
    [
        ("--ram", "15GG", "15GiB"),
        ("--ram", "1e3GiB", "1000GiB"),
        ("--ram", "-1GiB", "1GiB"),
        ("--kv-store-size", "5PiB", "5120TiB"),
        ("--vram", "1.5gigs", "1.5GiB"),
    ],
)
def test_a_size_keeps_its_number(
    flag: str, written: str, meant: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(working_command, "refused_start", lambda words, parse: None)  # Of a machine of any size.
    store = ["--kv-store", "/kv"] if flag.startswith("--kv-store") else []
    assert main(["serve", "some/model", *store, flag, written]) == 2
    said = capsys.readouterr().err
    assert f"{flag}: '{written}' is not a size" in said
    assert f"fix:    {flag} {meant}\n" in said
    assert command_in(said) == ["some/model", *store, flag, meant]


def test_a_setting_that_is_refused_again_and_again_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less is free each time that it is looked at: the numbers in between are no mistakes of who typed one."""
    file, asked, real = tmp_path / "tiny.gguf", list[int](), build.memory()
    write_tiny_gguf(file)

    def less_each_time() -> Memory:
        asked.append(max(4, 8 - len(asked)))
        return replace(real, total_bytes=16 * GIB, available_bytes=asked[-1] * GIB)

    monkeypatch.setattr(build, "memory", less_each_time)
    assert main(["serve", str(file), "--ram", "9000", "--quantization", "awq"]) == 2
    said = capsys.readouterr().err
    assert len(asked) > 3
    assert said.count("a budget of ") == said.count("also refused: a budget of 8.79 TiB") == 1
    assert said.splitlines()[0].endswith(" [HF100]"), "not behind what else is refused, which has another"
    assert said.count("also refused: --quantization") == 1
    words = command_in(said)
    assert refused_start(["serve", *words], parse_command_line) is None


def test_a_budget_that_is_advised_leaves_some_of_what_is_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried when a little less of it is there."""
    file, real = tmp_path / "tiny.gguf", build.memory()
    write_tiny_gguf(file)
    free = [8 * GIB]
    monkeypatch.setattr(build, "memory", lambda: replace(real, total_bytes=16 * GIB, available_bytes=free[0]))
    assert main(["serve", str(file), "--ram", "9000"]) == 2
    words = command_in(capsys.readouterr().err)
    free[0] -= 100 * MIB
    assert refused_start(["serve", *words], parse_command_line) is None


def test_the_setting_that_was_given_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tiny.gguf"
    write_tiny_gguf(file)
    assert main(["serve", str(file), "--rope-theta", "12345", "--port", "9"]) == 2
    said = capsys.readouterr().err
    assert "leave rope_theta out" in said
    assert "overrides" not in said
    assert command_in(said) == [str(file), "--port", "9"]


def test_no_command_is_printed_where_none_passes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_DTYPE", "float99")
        assert main(["serve", "a/b", "--bogus"]) == 2
    said = capsys.readouterr().err
    assert "--bogus is not understood" in said
    assert "holdfast serve a/b" not in said


@pytest.mark.parametrize(
    ("asked", "printed"),
    [
        ("M --api-kye secret --host 0.0.0.0", 'M --api-key "${API_KEY:?}" --host 0.0.0.0'),
        ("M --api_kye=secret --host 0.0.0.0", 'M --api-key="${API_KEY:?}" --host 0.0.0.0'),
        ("M --apikey secret --bogus 1 --port", None),
        ("M --ssl-kefile k.pem --ssl-certfile c.pem", "M --ssl-keyfile k.pem --ssl-certfile c.pem"),
        ("M --ssl-keyfil k.pem --port 99999", None),
        ("M --token secret --port 9", None),
        ("M --max-modle-len 2048", "M --max-model-len 2048"),
        ("M --port 8672 --prot 3", "M --port 8672"),
        ("M --prot=3 --port 8672", "M --port 8672"),
        ("M --prot 3 --potr 4", "M --port 3"),
        ("M --api-key secret --api-kye secret2", None),
        ("--max-modle-len=2048 M", "--max-model-len=2048 M"),
        ("--foo-bar M --port 8106", None),
        ("--foo-bar a/M --port 8106", "a/M --port 8106"),
        ("--foo-bar 1 M --port 8106", "M --port 8106"),
        ("--api-kye secret M", None),
        ("M --max-num-seqs -1 --port 99999", "M"),
        ("--port 99999", ""),
        ("-fa on", ""),
        ("-fa M", None),
        ("-fa a/M", "a/M"),
        ("--foo-bar 8192", ""),
        ("M -ctk q8_0 --port 9", "M --port 9"),
        ("M --mem-fraction-static 0.8 -np 4", "M --gpu-memory-utilization 0.8 --max-num-seqs 4"),
        ("M --max-running-requests=3 -ub 512", "M --max-num-seqs=3 --max-num-batched-tokens 512"),
        ("M --ram 24 --port 9", "M --ram 24GiB --port 9"),
        ("--prot 8106 --gpu-memory-utilization 1.5", "--port 8106 --gpu-memory-utilization 0.9"),
    ],
)
def test_a_misspelt_flag_is_renamed_and_nothing_that_guards_is_dropped(
    asked: str, printed: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *asked.split()]) == 2
    said = capsys.readouterr().err
    assert "secret" not in said
    advised = said.partition("fix:")[2].strip().splitlines()
    fix = next((line for line in advised if line.startswith("  run: ")), advised[0])
    command = fix.rpartition("holdfast serve")[2]
    if printed is None:
        assert "holdfast serve" not in fix or command.strip() == "--help"
    else:
        assert command.strip() == printed


@pytest.mark.parametrize("command", ["serve", "plan"])
@pytest.mark.parametrize(
    "spelled", ["-c 8192", "-c8192", "--ctx-size 8192", "--ctx_size=8192", "--context-length 8192"]
)
def test_the_context_is_set_as_other_engines_spell_it(command: str, spelled: str) -> None:
    _, parsed = parse_command_line([command, "-m", "some/model", *spelled.split()])
    assert parsed.max_model_len == "8192"
    assert parsed.model == "some/model"


@pytest.mark.parametrize(("words", "named"), [("-cm", "-cm"), ("-np 4", "--max-num-seqs"), ("-fa", "llama.cpp")])
def test_a_flag_of_one_dash_is_not_guessed(words: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-8b", *words.split()]) == 2
    said = capsys.readouterr().err
    assert f"{words.split()[0]} is not understood" in said
    assert named in said


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["--speculative-modle", "x"], None),
        (["--speculative-modle", "x", "--ram", "4GiB"], None),
        (["--speculative-modle", "some/model"], ["some/model"]),
        (["--speculative-modle", "llama3.1:8b"], ["llama3.1:8b"]),
        (["some/model", "--speculative-modle", "x"], ["some/model"]),
    ],
)
def test_the_value_of_a_flag_that_there_is_not_is_taken_for_no_model(
    words: list[str], command: list[str] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *words]) == 2
    said = capsys.readouterr().err
    if command is None:
        assert "holdfast serve x" not in said
    else:
        assert command_in(said) == command


def test_a_command_with_blanks_is_not_one_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tiny.gguf"
    write_tiny_gguf(file)
    assert main(["serve", str(file), "--ssl-keyfile", "/nope", "--ssl-certfile", "/nope", "--port", "0"]) != 0
    said = capsys.readouterr().err
    assert "--ssl-keyfile FILE" in said
    assert "run:" not in said


@pytest.mark.parametrize(
    "words",
    ["--nnodes 2 --node-rank 0", "-tp 2 --nnodes 2 --node-rank 5", "-dp 2 --distributed-executor-backend ray"],
)
def test_a_command_of_several_machines_is_told_what_is_wrong_and_not_another_place(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Leaving one of its flags out makes another server of it, or a second head."""
    assert main(["serve", "smollm2", *words.split()]) == 2
    said = capsys.readouterr().err
    assert "HF" in said
    assert "holdfast serve" not in said


def test_an_example_value_of_a_flag_that_nobody_wrote_is_no_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "nowhere"
    assert main(["serve", "some/model", "--nvme", "4GiB"]) == 2
    said = capsys.readouterr().err
    assert "there is no folder for it" in said
    assert "also refused" not in said
    assert main(["serve", "some/model", "--nvme", "4GiB", "--nvmepath", str(missing)]) == 2
    assert f"also refused: --nvme-path: No such file or directory: {missing}" in capsys.readouterr().err
