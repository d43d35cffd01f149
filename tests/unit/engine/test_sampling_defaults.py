"""How a GGUF file is sampled where a request says nothing: the file's advice, else llama.cpp's defaults."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_gguf import write_tiny_gguf

from holdfast.checkpoints import ModelFiles, locate, spec_of
from holdfast.checkpoints.files import GGUFHeader
from holdfast.checkpoints.sources import builtin, resolve
from holdfast.config import EngineConfig
from holdfast.engine.requests.sampling_defaults import GGUF_DEFAULTS, default_sampling, served_sampling


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


def test_a_gguf_without_advice_is_sampled_as_llama_cpp_does(file: Path) -> None:
    files = locate(str(file))
    spec = spec_of(files)
    auto, vllm = EngineConfig(), EngineConfig(generation_config="vllm")
    assert default_sampling(auto, files) == {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert served_sampling(auto, files, spec) == {"max_tokens": 1024, **GGUF_DEFAULTS}
    assert served_sampling(vllm, files, spec) == {}
    own = EngineConfig.from_arguments(override_generation_config={"max_new_tokens": 4000, "temperature": 0})
    assert served_sampling(own, files, spec) == {**GGUF_DEFAULTS, "max_tokens": 4000, "temperature": 0}
    # Other formats are served as vLLM serves them.
    plain = replace(files, format="safetensors")
    assert served_sampling(auto, plain, spec) == {}


def test_only_small_models_that_do_not_reason_are_limited(file: Path) -> None:
    files = locate(str(file))
    thinking = replace(files, chat_template="{{ '<think>' }}")
    assert "max_tokens" not in served_sampling(EngineConfig(), thinking, spec_of(files))
    large: Any = SimpleNamespace(parameters=8_000_000_000)
    assert "max_tokens" not in served_sampling(EngineConfig(), files, large)


def test_advice_in_the_file_or_beside_it_is_taken(file: Path) -> None:
    header = GGUFHeader(
        path=file,
        version=3,
        alignment=32,
        data_start=0,
        metadata={"general.sampling.temp": 0.6000000238418579, "general.sampling.top_k": 20},
        tensors={},
    )
    assert resolve._gguf_advice(header) == {"temperature": 0.6, "top_k": 20}
    beside = file.with_name("generation_config.json")
    beside.write_text('{"temperature": 0.3}')
    try:
        assert default_sampling(EngineConfig(), locate(str(file.parent))) == {"temperature": 0.3}
    finally:
        beside.unlink()


def test_a_built_in_file_is_sampled_alike_by_name_and_by_path(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = file.read_bytes()
    known = replace(
        builtin.BUILTINS[0],
        parts=(replace(builtin.BUILTINS[0].parts[0], size=len(content)),),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    assert locate(str(file)).generation_config is None
    monkeypatch.setattr(builtin, "BUILTINS", (known,))
    by_path: ModelFiles = locate(str(file))
    assert by_path.generation_config == dict(known.sampling)
    other = replace(known, sha256="0" * 64)
    monkeypatch.setattr(builtin, "BUILTINS", (other,))
    assert locate(str(file)).generation_config is None
