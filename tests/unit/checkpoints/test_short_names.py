"""Names that `holdfast plan` knows are taken by pull, serve and run too: against a fake hub with tiny weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoints.sources import resolve
from holdfast.checkpoints.sources.resolve import say_short_name, short_name
from holdfast.errors import ModelNotFoundError

PULL_AND_SERVE = """
import json, sys
from holdfast.cli.main import main
from holdfast.config import EngineConfig
from holdfast.engine.startup.build import find_model
assert main(["pull", "llama3.1:8b"]) == 0
for name in ("llama-3.1-8b", "LLaMA3.1:8B"):
    files = find_model(EngineConfig(model=name)).files
    print(json.dumps([files.name, files.kind, files.format, str(files.path)]))
"""


def test_pull_and_serve_take_the_repository_that_plan_knows(
    serve_hub: Callable[..., Any], model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    files = {path.name: path.read_bytes() for path in model_folder().iterdir()}
    with serve_hub({"meta-llama/Llama-3.1-8B-Instruct": files}) as fake_hub:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        variables = {**inherited, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": fake_hub.address, "NO_PROXY": "*"}
        done = subprocess.run(
            [sys.executable, "-c", PULL_AND_SERVE],
            env=variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    pulled, *found = done.stdout.splitlines()
    assert "models--meta-llama--Llama-3.1-8B-Instruct" in pulled
    assert [json.loads(line) for line in found] == [
        ["llama-3.1-8b", "hub", "safetensors", pulled],
        ["LLaMA3.1:8B", "hub", "safetensors", pulled],
    ]
    first = done.stderr.splitlines()[0]
    assert first.startswith("llama3.1:8b is meta-llama/Llama-3.1-8B-Instruct at the hub, its unquantized safetensors")


def test_paths_built_in_names_and_hub_ids_are_not_short_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_name("llama-3.1-8b") is not None
    (tmp_path / "llama-3.1-8b").mkdir()
    for name in ("llama-3.1-8b", "smollm2", "meta-llama/Llama-3.1-8B-Instruct", "", "nobody", "llama3.1:8b.gguf"):
        assert short_name(name) is None
        say_short_name(name)
    assert capsys.readouterr().err == ""


def test_a_name_that_is_nothing_names_the_nearest() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve._hub_id("llama-3.1-8bb")
    assert caught.value.fix == "did you mean llama-3.1-8b?"
