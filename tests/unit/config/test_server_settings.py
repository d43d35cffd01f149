"""Settings of the front: keys, CORS, TLS, files in YAML; what is always on, and what is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_parsers import serve_parser

from holdfast.cli.commands import serve
from holdfast.cli.main import main, parse_command_line
from holdfast.config import ServerConfig, unsupported
from holdfast.config.engine import REFUSED as ENGINE_REFUSED
from holdfast.config.server import REFUSED
from holdfast.config.setting import flag_name
from holdfast.config.tuning import TUNING
from holdfast.errors import ConfigurationError


def read(*words: str) -> tuple[object, ServerConfig]:
    return serve.read_settings(serve_parser().parse_args(words))


def test_several_keys_and_a_file_of_them() -> None:
    server = read("some/model", "--api-key", "a", "b", "--api-key-file", "keys.txt", "--api-key", "c")[1]
    assert (server.api_key, server.api_key_file) == (("a", "b", "c"), "keys.txt")
    with pytest.raises(ConfigurationError, match="empty key"):
        read("--api-key", "")


def test_vllms_key_keeps_the_door_shut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert read()[1].api_key == ("theirs",)
    assert read("--api-key", "ours")[1].api_key == ("ours",)
    (tmp_path / "c.yaml").write_text("api-key: filed")
    assert read("--config", str(tmp_path / "c.yaml"))[1].api_key == ("filed",)
    monkeypatch.setenv("HOLDFAST_API_KEY", "own")
    assert read()[1].api_key == ("own",)


def test_variables_of_vllm_that_are_not_read_are_named() -> None:
    assert serve.unread_variables({"VLLM_USE_V1": "1", "VLLM_API_KEY": "k", "PATH": ""}) == ["VLLM_USE_V1"]
    assert serve.unread_variables({"VLLM_LOGGING_LEVEL": "DEBUG"}) == []
    assert serve.unread_variables({"VLLM_LOGGING_LEVEL": "NOTSET"}) == ["VLLM_LOGGING_LEVEL"]


def test_the_level_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read()[1].level == "info"
    assert read("-v")[1].level == read("--verbose")[1].level == "debug"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    assert read()[1].level == "warning"
    assert read("--log-level", "error")[1].level == "error"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "CRITICAL")
    assert read()[1].level == "error"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "NOTSET")
    assert read()[1].level == "info"


@pytest.mark.parametrize(
    "written", ['["https://a.example", "https://b.example"]', "https://a.example,https://b.example"]
)
def test_origins_as_vllm_writes_them(written: str) -> None:
    assert read("--allowed-origins", written)[1].allowed_origins == ("https://a.example", "https://b.example")
    assert read()[1].allowed_origins == ()


@pytest.mark.parametrize("written", ["[1]", "[", '{"a": 1}[', "[[]]"])
def test_origins_that_are_no_list(written: str) -> None:
    if written.startswith("["):
        with pytest.raises(ConfigurationError, match="allowed-origins"):
            read("--allowed-origins", written)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--ssl-keyfile", "k"], "ssl_certfile"),
        (["--ssl-certfile", "c"], "ssl_keyfile"),
        (["--ssl-ca-certs", "c"], "ssl_ca_certs"),
        (["--ssl-cert-reqs", "2"], "ssl_cert_reqs"),
        (["--enable-server-load-tracking=false"], "enable_server_load_tracking"),
        (["--no-enable-request-id-headers"], "enable_request_id_headers"),
        (["--root-path", "llm"], "root_path"),
        (["--response-role", "poet"], None),
    ],
)
def test_settings_that_contradict_each_other(words: list[str], field: str | None) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(*words)
    assert field is None or caught.value.field == field


def test_every_flag_whose_feature_is_not_there_says_why() -> None:
    reasons = {**REFUSED, **ENGINE_REFUSED}
    for name, reason in reasons.items():
        words = [flag_name(name)] if name in unsupported.SWITCHES else [flag_name(name), "7"]
        if unsupported.asks_nothing(name, "true" if name in unsupported.SWITCHES else "7"):
            # Done anyway: taken, and where it can be asked otherwise that is refused.
            serve.read_settings(serve_parser().parse_args(words))
            words = [f"--no-{flag_name(name)[2:]}"]
            if unsupported.asks_nothing(name, "false"):
                continue
        with pytest.raises(ConfigurationError) as caught:
            serve.read_settings(serve_parser().parse_args(words))
        assert caught.value.message == f"{flag_name(name)} is not supported: {reason}"
    assert len(reasons) > 70
    assert not reasons.keys() & TUNING.keys()


def test_every_setting_that_only_tunes_vllm_is_taken_and_told() -> None:
    assert len(TUNING) > 170
    for name, reason in TUNING.items():
        words = [flag_name(name)] if name in unsupported.SWITCHES else [flag_name(name), "7"]
        parsed = serve_parser().parse_args(words)
        serve.read_settings(parsed)
        assert serve.said_of(parsed) == f"taken without effect: {flag_name(name)} ({reason})"


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--attention-backend", "FLASH_ATTN"], "attention_backend", "auto"),
        (["--load-format", "runai_streamer"], "load_format", "auto"),
        (["--tokenizer_mode", "mistral"], "tokenizer_mode", "auto"),
        (["--tool-call-parser", "glm45"], "tool_call_parser", None),
        (["--reasoning-parser", "gemma4"], "reasoning_parser", None),
        (["--api-server-count=4"], "api_server_count", 1),
        (["--max-logprobs", "100"], "max_logprobs", 20),
        (["--max-logprobs", "31999"], "max_logprobs", 20),
        (["--tokenizer-mode", "deepseek_v32"], "tokenizer_mode", "auto"),
        (["--no-enable-chunked-prefill"], "enable_chunked_prefill", False),
    ],
)
def test_values_of_vllms_that_are_read_as_auto(words: list[str], name: str, value: object) -> None:
    _, parsed = parse_command_line(["serve", *words])
    engine, server = serve.read_settings(parsed)
    assert getattr(engine if hasattr(engine, name) else server, name) == value
    assert flag_name(name) in (serve.said_of(parsed) or "")


@pytest.mark.parametrize("number", ["-1", "151936"])
def test_a_number_as_large_as_a_vocabulary_is_all_of_it(number: str) -> None:
    _, parsed = parse_command_line(["serve", "--max-logprobs", number])
    assert serve.read_settings(parsed)[0].max_logprobs == -1
    assert "--max-logprobs" not in (serve.said_of(parsed) or "")


def test_settings_of_vllms_that_do_what_they_say() -> None:
    _, parsed = parse_command_line([
        "serve", "-O3", "-cc.mode", "3", "--hf-overrides.rope_parameters.factor", "4", "--shutdown-timeout", "7",
        "--disable-access-log-for-endpoints", "/v1/models,/load", "--uvicorn-log-level", "warning", "--max-logprobs",
        "5", "--root-path", "/llm/", "--uds", "/tmp/s", "--download-dir", "/d", "--enable-tokenizer-info-endpoint",
        "--default-chat-template-kwargs", '{"enable_thinking": false}', "--runner", "pooling", "m/m",
    ])  # fmt: skip
    engine, server = serve.read_settings(parsed)
    assert (engine.model, engine.max_logprobs, engine.download_dir) == ("m/m", 5, "/d")
    assert engine.config_overrides == {"rope_parameters": {"factor": 4}}
    assert (server.drain_timeout, server.root_path, server.uds) == (7.0, "/llm", "/tmp/s")
    assert server.disable_access_log_for_endpoints == ("/v1/models", "/load")
    assert not server.logs_access
    assert server.enable_tokenizer_info_endpoint
    assert server.default_chat_template_kwargs == {"enable_thinking": False}
    assert serve.said_of(parsed) == f"taken without effect: --compilation-config ({TUNING['compilation_config']})"


@pytest.mark.parametrize(
    ("flags", "pooling"),
    [("", None), ("--runner auto", None), ("--runner generate", False), ("--task generate", False),
     ("--runner pooling", True), ("--convert embed", True), ("--task score", True), ("--task embedding", True)],
)  # fmt: skip
def test_what_a_model_is_served_for(flags: str, pooling: bool | None) -> None:
    _, parsed = parse_command_line(["serve", *flags.split()])
    assert serve.read_settings(parsed)[0].pooling is pooling


def test_a_model_is_not_made_a_classifier() -> None:
    _, parsed = parse_command_line(["serve", "--convert", "classify"])
    with pytest.raises(ConfigurationError, match="recognized by its architecture"):
        serve.read_settings(parsed)


def test_no_such_flag_takes_the_model_for_its_value() -> None:
    """And those that ask for what is done anyway leave a command as it is for both servers."""
    engine = read(
        "--runner",
        "generate",
        "--task",
        "generate",
        "--max-logprobs",
        "20",
        "--async-scheduling",
        "--swap-space",
        "0.0",
        "--no-enable-log-requests",
        "--guided-decoding-backend",
        "guidance",
        "--no-trust-remote-code",
        "--no-async-scheduling",
        "--no-enable-expert-parallel",
        "--enable-prefix-caching=FALSE",
        "--max-model-len",
        "-1",
        "--limit-mm-per-prompt",
        '{"image": 0}',
        "some/model",
    )[0]
    assert (engine.model, engine.enable_prefix_caching, engine.max_model_len) == ("some/model", False, None)


def test_experts_are_dealt_out_in_vllm_s_words_and_not_moved_later() -> None:
    engine = read("some/model", "-tp", "2", "-ep", "--expert-placement-strategy", "round_robin")[0]
    assert (engine.enable_expert_parallel, engine.expert_placement_strategy) == (True, "round_robin")
    usual = read("some/model")[0]
    assert (usual.enable_expert_parallel, usual.expert_placement_strategy) == (False, "linear")
    with pytest.raises(ConfigurationError, match="expert-placement-strategy"):
        read("some/model", "--expert-placement-strategy", "random")
    for flags in (("--enable-eplb",), ("--num-redundant-experts", "2"), ("--eplb-config", '{"window_size": 1000}')):
        with pytest.raises(ConfigurationError, match="stay on the rank that they were placed on") as refused:
            read("some/model", "-tp", "2", "-ep", *flags)
        assert refused.value.field == flags[0].removeprefix("--").replace("-", "_")
    read("some/model", "--no-enable-eplb", "--num-redundant-experts", "0")


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name", "--lora-folders", "--lora-modules"])
def test_a_flag_with_several_words_does_not_swallow_the_model(flag: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(flag, "a=b", "some/model")
    assert caught.value.field == "model"
    assert read("--model", "some/model", flag, "a=b", "c=d")[0].model == "some/model"
    (tmp_path / "c.toml").write_text('model = "some/model"')
    assert read("--config", str(tmp_path / "c.toml"), flag, "a=b", "c=d")[0].model == "some/model"


def test_all_that_is_refused_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--max_model_len",
        "64",
        "--kv_events_config=4",
        "-tp2",
        "-O3",
        "--compilation-config.level",
        "3",
        "--max-len",
        "3",
        "--middleware",
        "a.b",
        "--logprobs-mode",
        "processed_logits",
    ]
    assert main(["serve", *words]) == 2
    said = capsys.readouterr().err
    for flag in ("--kv-events-config", "--middleware", "--logprobs-mode"):
        assert f"\n  {flag} is not supported: " in said
    assert "--max-len is not understood; did you mean --max-model-len?" in said
    assert "fix:    leave out --max-len, --kv-events-config" in said
    # Advice never leads to another refusal.
    assert main(["serve", "--logprobs-modes", "3"]) == 2
    assert "--logprobs-mode?" not in capsys.readouterr().err


def test_vllms_spellings_of_what_is_there() -> None:
    server = read(
        "--disable-fastapi-docs",
        "--disable-uvicorn-access-log",
        "--enable-prompt-tokens-details",
        "--disable-log-requests",
    )[1]
    assert (server.disable_docs, server.disable_access_log) == (True, True)


@pytest.mark.parametrize("suffix", ["yaml", "yml"])
def test_a_file_in_yaml_as_vllm_takes_it(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"settings.{suffix}"
    file.write_text("model: some/model\nmax-model-len: 8K\nserved-model-name: [a, b]\nenable_prefix_caching: false\n")
    engine, server = read("--config", str(file), "--port", "9000")
    assert (engine.model, engine.max_model_len, engine.enable_prefix_caching) == ("some/model", 8192, False)  # type: ignore[attr-defined]
    assert (server.served_model_name, server.port) == (("a", "b"), 9000)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("port: [", "not valid YAML"),
        ("- port", "list of settings"),
        ("prot: 9000", "settings.yaml, line 1: prot is not a setting"),
        ("host: a\nport: many", "settings.yaml, line 2: port"),
        ("1: 2", "list of settings"),
        ("logits_processors: [a.b]", "never run"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_a_file_in_yaml_that_will_not_do(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read("--config", str(file))
    assert part in caught.value.message


def test_other_spellings_of_flags_are_names_in_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("shutdown-timeout: 3\ntrust_remote_code: true\n")
    _, server = read("--config", str(file))
    assert server.drain_timeout == 3.0
    file.write_text("shutdown-timeout: 3\ndrain-timeout: 4\n")
    with pytest.raises(ConfigurationError, match="twice"):
        read("--config", str(file))


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("# nothing\n")
    assert read("--config", str(file))[1].port == 8000


FLAGS = [
    "--model",
    "--served-model-name",
    "--tokenizer",
    "--dtype",
    "--quantization",
    "--load-format",
    "--max-model-len",
    "--gpu-memory-utilization",
    "--kv-cache-memory-bytes",
    "--kv-cache-dtype",
    "--block-size",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--enable-prefix-caching",
    "--no-enable-prefix-caching",
    "--enable-chunked-prefill",
    "--swap-space",
    "--cpu-offload-gb",
    "--kv-offloading-size",
    "--tensor-parallel-size",
    "-tp",
    "--pipeline-parallel-size",
    "-pp",
    "--data-parallel-size",
    "--enforce-eager",
    "--seed",
    "--host",
    "--port",
    "--api-key",
    "--enable-lora",
    "--lora-modules",
    "--max-loras",
    "--max-lora-rank",
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "--reasoning-parser",
    "--chat-template",
    "--config",
    "--scheduling-policy",
    "--attention-backend",
    "--speculative-config",
    "--disable-log-stats",
    "--trust-remote-code",
    "--enable-sleep-mode",
    "--allowed-origins",
    "--allow-credentials",
    "--ssl-keyfile",
    "--ssl-certfile",
    "--ssl-ca-certs",
    "--disable-fastapi-docs",
    "--enable-force-include-usage",
    "--generation-config",
    "--override-generation-config",
    "--revision",
]


@pytest.mark.parametrize("name", FLAGS)
def test_flags_that_people_use_with_vllm_are_known(name: str) -> None:
    """Honoured, or refused with a reason of their own: never just "not understood"."""
    assert name in serve_parser()._option_string_actions


def test_adapters_as_tables_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("enable-lora: true\nlora-modules: [{name: a, path: b}, c=d]\n")
    assert read("--config", str(tmp_path / "c.yaml"))[1].lora_modules == ('{"name": "a", "path": "b"}', "c=d")


@pytest.mark.parametrize("lines", ["port: 9\nport: 10\n", "max-model-len: 32k\nmax_model_len: 16\n"])
def test_a_file_that_sets_something_twice_is_refused(tmp_path: Path, lines: str) -> None:
    (tmp_path / "c.yaml").write_text(lines)
    with pytest.raises(ConfigurationError, match="twice"):
        read("--config", str(tmp_path / "c.yaml"))
