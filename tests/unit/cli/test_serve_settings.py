"""`holdfast serve`: from words on the command line to settings, and refusals that help."""

import argparse
import asyncio
import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from command_parsers import serve_parser

from holdfast.checkpoints import ModelFiles
from holdfast.cli.commands import serve
from holdfast.cli.main import main
from holdfast.config import EngineConfig
from holdfast.engine.fake import FakeEngine
from holdfast.engine.requests.sampling_defaults import default_sampling, sampling_defaults
from holdfast.engine.startup.build import find_model
from holdfast.errors import ConfigurationError, UnknownArchitectureError
from holdfast.server.settings import ServerSettings


def read(*words: str) -> tuple[object, object]:
    return serve.read_settings(serve_parser().parse_args(words))


def test_the_founding_command_line() -> None:
    engine, server = read(
        "some/model",
        "--port",
        "9000",
        "--gpu-memory-utilization",
        "0.85",
        "--max-model-len",
        "8192",
        "--api-key",
        "k",
        "--served-model-name",
        "a",
        "b",
        "--enable-prefix-caching",
        "--tensor-parallel-size",
        "1",
        "--disable-log-stats=false",
    )
    assert (engine.model, engine.gpu_memory_utilization, engine.max_model_len) == ("some/model", 0.85, 8192)
    assert (server.port, server.api_key, server.served_model_name) == (9000, ("k",), ("a", "b"))
    assert server.disable_log_stats is False


def test_a_flag_before_the_model_does_not_swallow_it() -> None:
    assert read("--enable-prefix-caching", "some/model")[0].model == "some/model"


def test_two_models_are_one_too_many() -> None:
    with pytest.raises(ConfigurationError, match="two models"):
        read("a/b", "--model", "c/d")
    assert read("a/b", "--model", "a/b")[0].model == "a/b"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--kv-transfer-config", "{1}"], "stay where"), (["--logits-processors", "a.b"], "never run"),
        (["--enable-prompt-embeds"], "token ids"), (["--quantization", "hqq"], "hqq is not supported"),
        (["--tool-call-parser", "x"], "tool"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused_with_the_reason(words: list[str], part: str) -> None:
    with pytest.raises(ConfigurationError, match=part):
        read(*words)


def test_the_fix_is_the_command_that_works(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        "serve",
        "a/b",
        "--logprobs-mode",
        "processed_logits",
        "--port=9",
        "-q",
        "awq",
        "--kv-events-config=4",
        "--enable_prompt_embeds",
    ]
    assert main([*asked, "--api-key", "geheim"]) == 2
    said = capsys.readouterr().err
    assert "--logprobs-mode is not supported: log-probabilities are those of the raw logits" in said
    fix = said.rpartition("fix:")[2].strip()
    assert fix == (
        "leave out --logprobs-mode, --kv-events-config, --enable-prompt-embeds\n  run:    "
        'holdfast serve a/b --port=9 -q awq --api-key "${API_KEY:?}"'
    )
    engine, server = read(*shlex.split(fix.partition("holdfast serve ")[2]))
    assert (engine.model, server.port) == ("a/b", 9)
    # Of a variable the command says nothing.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_ATTENTION_BACKEND", "none")
        assert main(["serve", "a/b"]) == 2
    assert "holdfast serve" not in capsys.readouterr().err


def test_asking_for_nothing_is_no_asking() -> None:
    read("--swap-space", "0", "--cpu-offload-gb", "0")


def test_unknown_words_name_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--max-model-length", "3"]) == 2
    assert "--max-model-len" in capsys.readouterr().err
    assert main(["sevre"]) == 2
    assert "holdfast serve" in capsys.readouterr().err
    assert main([]) == 2
    assert main(["--help"]) == 0


def model_files(own: dict[str, object] | None) -> ModelFiles:
    return ModelFiles(name="x", kind="folder", path=Path("x"), weights=(), format="safetensors", generation_config=own)


def test_defaults_of_a_generation_config() -> None:
    found = sampling_defaults({"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": 2})
    assert found == {"temperature": 0.6, "top_p": 0.9}
    # As vLLM does: whether transformers would draw is not asked, and penalties count in any case.
    greedy = {"do_sample": False, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    assert sampling_defaults(greedy) == {name: value for name, value in greedy.items() if name != "do_sample"}
    assert sampling_defaults({"do_sample": False, "temperature": 0.6}) == {"temperature": 0.6}
    assert sampling_defaults(None) == {}


def test_defaults_come_from_the_model_a_folder_or_the_command(tmp_path: Path) -> None:
    own = model_files({"temperature": 0.6, "top_k": 20, "max_new_tokens": 64})
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.5, "repetition_penalty": 1.1}))

    def found(**settings: object) -> dict[str, object]:
        return default_sampling(EngineConfig.from_arguments(**settings), own)

    assert found() == {"temperature": 0.6, "top_k": 20, "max_tokens": 64}
    assert found(generation_config="vllm") == {}
    assert found(generation_config=str(tmp_path)) == {"top_p": 0.5, "repetition_penalty": 1.1}
    assert found(override_generation_config='{"temperature": 0.1, "min_p": 0.2}') == {
        "temperature": 0.1,
        "top_k": 20,
        "max_tokens": 64,
        "min_p": 0.2,
    }
    engine, _ = read("--override-generation-config", '{"top_k": 5}', "--generation-config", str(tmp_path))
    assert isinstance(engine, EngineConfig)
    assert default_sampling(engine, own) == {"top_p": 0.5, "repetition_penalty": 1.1, "top_k": 5}
    assert found(generation_config="vllm", override_generation_config={"max_new_tokens": 7}) == {"max_tokens": 7}
    for wrong in (
        {"generation_config": str(tmp_path / "nowhere")},
        {"override_generation_config": "temperature=1"},
        {"override_generation_config": '{"temprature": 1}'},
        {"override_generation_config": '{"temperature": -1}'},
        {"override_generation_config": "[1]"},
    ):
        with pytest.raises(ConfigurationError) as caught:
            found(**wrong)
        assert caught.value.field == next(iter(wrong))


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "dummy"])
def test_an_architecture_that_is_not_there_is_said_before_anything_else(tmp_path: Path, load_format: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NobodysForCausalLM"], "vocab_size": 8}))
    with pytest.raises(UnknownArchitectureError, match="NobodysForCausalLM is not supported") as caught:
        find_model(EngineConfig(model=str(tmp_path), load_format=load_format))
    assert "holdfast models" in (caught.value.fix or "")
    assert "dummy" not in str(caught.value)


def test_a_wrong_default_is_said_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        default_sampling(EngineConfig.from_arguments(override_generation_config={"temperature": -1}), model_files(None))
    assert "\n" not in caught.value.message
    assert str(caught.value).count("[HF") == 1
    assert caught.value.message.startswith("override_generation_config cannot be used: temperature")


@pytest.mark.parametrize("level", ["info", "debug"])
def test_the_log_of_a_start_has_the_rest_with_verbose_only(
    level: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    asyncio.run(engine.start())
    decisions = ["max_model_len = 64 (planner): memory holds 64", "dtype = float32 (hardware): no bfloat16"]
    info = msgspec.structs.replace(engine.info, decisions=decisions, lowered=decisions[:1])
    monkeypatch.setattr(FakeEngine, "info", info)
    caplog.set_level(level.upper(), logger="holdfast")
    serve._log_ready(
        engine,
        ServerSettings(served_model_names=("fake",), api_key="secret"),
        serve._Reach("http://127.0.0.1:1", loopback=True),
    )
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert ("WARNING", f"lowered to fit in memory: {decisions[0]}") in said
    assert said[-1][1].startswith("Ready: http://127.0.0.1:1/v1 (try: curl -H ")
    assert said[-2][1].endswith("; else --host 0.0.0.0")  # It has a key.
    assert "secret" not in caplog.text
    assert [name for name, text in said if text.startswith("Decision: dtype")] == ["DEBUG"] * (level == "debug")
    assert ("unaccounted" in caplog.text) == (level == "debug")


def test_vllms_module_starts_the_same_server() -> None:
    words = [
        sys.executable,
        "-m",
        "holdfast.entrypoints.openai.api_server",
        "--model",
        "m",
        "--logits-processors",
        "a.b",
    ]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "--logits-processors is not supported" in ended.stderr
    assert "run" in ended.stderr or "fix" in ended.stderr


def test_sigusr1_does_not_end_a_server_that_is_still_starting() -> None:
    """Fetching a model may take minutes, before there is a loop that hears it."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        with pytest.raises(ConfigurationError):
            serve.run(argparse.Namespace(config=Path("missing.toml")), (), lambda words: None)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
