"""Settings: every source goes through the same parser, the stronger one wins, and nothing is ignored."""

import argparse

import pytest

from holdfast.config import EngineConfig, ServerConfig
from holdfast.config.engine import REFUSED as ENGINE_REFUSED
from holdfast.config.plan import PlanConfig
from holdfast.config.server import REFUSED as SERVER_REFUSED
from holdfast.config.sources import add_flags, gather, split
from holdfast.errors import ConfigurationError


def parse(*flags: str, environment: dict[str, str] | None = None, file=None) -> tuple[EngineConfig, ServerConfig]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, EngineConfig, title="engine")
    add_flags(parser, ServerConfig, title="server")
    given = vars(parser.parse_args(flags))
    gathered = gather([EngineConfig, ServerConfig], given, environment=environment or {}, file=file)
    return split(gathered, (EngineConfig, ENGINE_REFUSED), (ServerConfig, SERVER_REFUSED))


def test_every_setting_has_a_flag_and_help() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig, title="engine")
    shown = parser.format_help()
    for name in EngineConfig.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in shown


def test_flag_over_environment_over_file_over_default(tmp_path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('max-num-seqs = 3\nblock_size = 32\nport = 1234\nserved-model-name = ["a", "b"]\n')
    environment = {"HOLDFAST_MAX_NUM_SEQS": "5", "HOLDFAST_HOST": "::1"}
    engine, server = parse("--max-num-seqs", "7", environment=environment, file=file)
    assert (engine.max_num_seqs, engine.block_size, engine.step_tokens) == (7, 32, 512)
    assert (server.port, server.host, server.served_model_name) == (1234, "::1", ("a", "b"))
    engine, _ = parse(environment=environment, file=file)
    assert engine.max_num_seqs == 5


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--enable-prefix-caching"], True),
        (["--enable-prefix-caching=false"], False),
        (["--no-enable-prefix-caching"], False),
        (["--enable-prefix-caching=True"], True),
    ],
)
def test_booleans_as_people_write_them(flags: list[str], expected: bool) -> None:
    assert parse(*flags)[0].enable_prefix_caching is expected


@pytest.mark.parametrize(("written", "tokens"), [("8192", 8192), ("32k", 32_000), ("32K", 32_768), ("auto", None)])
def test_lengths_as_vllm_spells_them(written: str, tokens: int | None) -> None:
    assert parse("--max-model-len", written)[0].max_model_len == tokens


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"max_model_length": 3}, "did you mean max_model_len"),
        ({"quantization": "aqlm"}, "quantization aqlm is not supported"),
        (
            {"load_format": "bitsandbytes", "quantization": "awq"},
            "load_format is bitsandbytes, but quantization is awq",
        ),
        ({"logits_processors": ["a.b"]}, "never run"),
        ({"hf_overrides": lambda config: config}, "a function is not supported"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 1}, "engines are on one machine"),
        ({"data_parallel_size": 2, "data_parallel_rank": 0}, "behind one API"),
        ({"data_parallel_external_lb": True}, "behind one API"),
        ({"data_parallel_backend": "ray"}, "processes of this machine"),
        ({"data_parallel_size": 0}, "from 1"),
        ({"block_size": 0}, "whole number"),
        ({"block_size": True}, "whole number"),
        ({"block_size": 1.5}, "whole number"),
        ({"gpu_memory_utilization": 1.2}, "from 0.01 to 1"),
        ({"dtype": "int3"}, "one of auto"),
        ({"kv_cache_memory_bytes": "four"}, "not a size"),
        ({"max_model_len": 0}, "from 1"),
        ({"max_model_len": "9z"}, "not a number of tokens"),
        ({"enable_prefix_caching": "perhaps"}, "true or false"),
    ],
)
def test_what_cannot_be_honoured_is_refused_as_a_value_error(arguments: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        EngineConfig.from_arguments(**arguments)
    assert isinstance(caught.value, ValueError)
    assert part in str(caught.value)


def test_refused_names_at_their_harmless_values_pass() -> None:
    EngineConfig.from_arguments(quantization=None, trust_remote_code=False, swap_space=0, enable_lora=False)


def test_unknown_name_in_a_file_is_an_error(tmp_path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("max-num-seq = 3\n")
    with pytest.raises(ConfigurationError, match="max-num-seqs"):
        parse(file=file)
    file.write_text("max-num-seqs = = 3\n")
    with pytest.raises(ConfigurationError, match="TOML"):
        parse(file=file)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        parse(file=tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("written", "line", "message", "fix"),
    [
        ("max-num-seq = 3", 2, "max-num-seq is not a setting", "did you mean max-num-seqs?"),
        ("max_num_seq = 3", 2, "max_num_seq is not a setting", "did you mean max_num_seqs?"),
        ('"prot" = 3', 2, "prot is not a setting", "did you mean port?"),
        ("[server]", 2, "server is not a setting", None),
        ("block_size = 0", 2, "block_size: 0 is not valid", None),
        ("kv-cache-memory-bytes = 'four'", 2, "kv-cache-memory-bytes: 'four' is not a size", None),
        ("kv_events_config = 4", 2, "kv_events_config is not supported: KV block", "leave kv_events_config out"),
    ],
)
def test_a_mistake_in_a_file_is_spelled_as_in_the_file(tmp_path, written, line, message, fix) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f"port = 1234\n{written}\n")
    with pytest.raises(ConfigurationError) as caught:
        parse(file=file)
    assert caught.value.message.startswith(f"{file}, line {line}: {message}")
    assert "--" not in str(caught.value).partition("--help")[0]
    if fix is not None:
        assert caught.value.fix == fix


def test_a_mistake_in_a_variable_is_spelled_as_the_variable() -> None:
    with pytest.raises(ConfigurationError, match=r"^HOLDFAST_BLOCK_SIZE: '0' is not valid"):
        parse(environment={"HOLDFAST_BLOCK_SIZE": "0"})
    with pytest.raises(ConfigurationError, match=r"^--block-size: '-1' is not valid"):
        parse("--block-size", "-1", environment={"HOLDFAST_BLOCK_SIZE": "0"})


def test_an_unknown_variable_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="HOLDFAST_MAX_NUM_SEQS"):
        parse(environment={"HOLDFAST_MAX_NUM_SEQ": "1"})
    parse(environment={"HOLDFAST_CACHE": "/somewhere", "HOLDFAST_NATIVE": "0", "OTHER": "x"})


def test_settings_of_a_server_that_scripts_give_to_llm() -> None:
    """Most scripts switch the statistics off, which an LLM has none of; what is of the network alone is said to be."""
    EngineConfig.from_arguments(disable_log_stats=True, max_model_len="-1")
    EngineConfig.from_arguments(disable_log_stats=False)
    for name, value in (("port", 8000), ("root_path", "/x")):
        with pytest.raises(ConfigurationError, match="a setting of holdfast serve") as caught:
            EngineConfig.from_arguments(**{name: value})
        assert caught.value.field == name
    with pytest.raises(
        ConfigurationError,
        match=r"2 settings cannot be honoured:\n  kv_events_config .*\n  weight_transfer_config .*from files",
    ):
        EngineConfig.from_arguments(kv_events_config=4, weight_transfer_config=4)
    assert EngineConfig.from_arguments(attention_backend="FLASH_ATTN").attention_backend == "auto"
    assert EngineConfig.from_arguments(attention_backend="TORCH_SDPA").attention_backend == "torch"


def test_an_abbreviation_that_vllms_recipes_use() -> None:
    assert parse("--tensor-parallel", "1")[0].tensor_parallel_size == 1


def test_what_replaces_values_of_the_models_config() -> None:
    config = EngineConfig.from_arguments(
        rope_theta=5e5, rope_scaling={"rope_type": "yarn"}, hf_overrides={"rope_theta": 1e6, "vocab_size": 3}
    )
    assert config.config_overrides == {"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 1e6, "vocab_size": 3}
    assert EngineConfig().config_overrides == {}


@pytest.mark.parametrize(("written", "kept"), [("FP8", "fp8"), ("fp8_e4m3", "fp8"), ("BFloat16", "bfloat16")])
def test_types_of_the_kv_cache_may_be_written_in_capitals(written: str, kept: str) -> None:
    assert EngineConfig.from_arguments(kv_cache_dtype=written).kv_cache_dtype == kept
    assert PlanConfig.from_arguments(kv_cache_dtype=written).kv_cache_dtype == kept
