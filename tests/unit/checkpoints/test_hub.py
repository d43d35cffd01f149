"""Models from a hub, against a local server that behaves like one: good, gated, missing, torn, mirror, offline.

huggingface_hub reads its environment when it is imported, so each environment gets a process of its own, which
is asked for several models.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from holdfast.checkpoints.sources import hub
from holdfast.errors import CheckpointError

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 32}


def safetensors_file() -> bytes:
    text = json.dumps({"x": {"dtype": "F32", "shape": [4096], "data_offsets": [0, 16384]}}).encode()
    return len(text).to_bytes(8, "little") + text + numpy.ones(4096, "<f4").tobytes()


GOOD = {
    "config.json": json.dumps(CONFIG).encode(),
    "generation_config.json": b'{"eos_token_id": 2}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"model_max_length": 64}',
    "chat_template.jinja": b"template",
    "model.safetensors": safetensors_file(),
    "consolidated.safetensors": b"the same again",
    "pytorch_model.bin": b"a pickle",
    "README.md": b"read me",
    "onnx/model.onnx": b"not for us",
    "original/x.safetensors": b"not for us",
}
REPOSITORIES: dict[str, dict[str, bytes]] = {
    "owner/good": GOOD,
    "owner/private": GOOD,
    "owner/gated": GOOD,
    "owner/torn": GOOD,
    "owner/pickles": {"config.json": b"{}", "pytorch_model.bin": b"a pickle"},
    "owner/ggufs": {"a-q4.gguf": b"GGUF", "a-q8.gguf": b"GGUF"},
    "owner/nothing": {"README.md": b""},
}


@pytest.fixture(scope="module")
def server(serve_hub: Callable[..., Any]) -> Iterator[Any]:
    with serve_hub(REPOSITORIES) as served:
        yield served


ASKER = """
import json, os, sys
from pathlib import Path
from holdfast.checkpoints import locate
cache = Path(os.environ["ASKED_CACHE"]) if "ASKED_CACHE" in os.environ else None
from holdfast.errors import HoldfastError
for name in sys.argv[1:]:
    name, _, revision = name.partition("@")
    try:
        files = locate(name, revision=revision or None, cache=cache)
        answer = {"path": str(files.path), "kind": files.kind, "template": files.chat_template,
                  "files": sorted(path.name for path in files.path.iterdir())}
    except HoldfastError as error:
        answer = {"error": type(error).__name__, "code": error.code, "text": str(error)}
    print(json.dumps(answer))
"""


def ask(home: Path, endpoint: str, *names: str, **environment: str) -> dict[str, dict[str, Any]]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    variables = {**inherited, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "NO_PROXY": "*", **environment}
    done = subprocess.run(
        [sys.executable, "-c", ASKER, *names], env=variables, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return dict(zip(names, map(json.loads, lines), strict=True))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf-home")


@pytest.fixture(scope="module")
def answers(server: Any, home: Path) -> dict[str, dict[str, Any]]:
    """With no token, from a mirror named by HF_ENDPOINT."""
    names = ["owner/good", "owner/gated", "owner/absent", "owner/good@nowhere", "owner/private"]
    return ask(home, server.address, *names, "owner/torn", "owner/pickles", "owner/ggufs", "owner/nothing")


def test_a_folder_in_place_of_the_hubs_cache(server: Any, home: Path, tmp_path: Path) -> None:
    """--download-dir: what is fetched goes there, and is found there again without a hub."""
    for further in ({}, {"HF_HUB_OFFLINE": "1"}):
        found = ask(home, server.address, "owner/good", ASKED_CACHE=str(tmp_path), **further)["owner/good"]
        assert Path(found["path"]).is_relative_to(tmp_path)


def test_only_what_is_needed_is_fetched(answers: dict[str, dict[str, Any]], server: Any, home: Path) -> None:
    good = answers["owner/good"]
    assert good["kind"] == "hub"
    assert good["template"] == "template"
    needed = ["chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"]
    assert good["files"] == [*needed, "tokenizer.json", "tokenizer_config.json"]
    assert Path(good["path"]).is_relative_to(home)
    fetched = {path for method, path in server.asked if method == "GET" and path.startswith("/owner/good/resolve")}
    assert {path.rpartition("/")[2] for path in fetched} == set(good["files"])


def test_gated(answers: dict[str, dict[str, Any]], home: Path) -> None:
    gated = answers["owner/gated"]
    assert gated["error"] == "ModelAccessError"
    for word in ("gated", "hf auth login", "HF_TOKEN", str(home), "none is set"):
        assert word in gated["text"]


@pytest.mark.parametrize(
    ("name", "word"), [("owner/absent", "no model"), ("owner/good@nowhere", "revision"), ("owner/private", "private")]
)
def test_missing(answers: dict[str, dict[str, Any]], name: str, word: str) -> None:
    assert answers[name]["error"] == "ModelNotFoundError"
    assert word in answers[name]["text"]


def test_torn(answers: dict[str, dict[str, Any]], home: Path) -> None:
    torn = answers["owner/torn"]
    assert (torn["error"], torn["code"]) == ("CheckpointError", "HF231")
    assert "holdfast pull owner/torn" in torn["text"]
    snapshots = home / "hub" / "models--owner--torn" / "snapshots"
    assert not list(snapshots.glob("*/model.safetensors"))


def test_pickles_alone_and_other_repositories_are_refused(answers: dict[str, dict[str, Any]]) -> None:
    assert "pickle" in answers["owner/pickles"]["text"]
    assert "owner/ggufs:Q4" in answers["owner/ggufs"]["text"]
    assert "config.json" in answers["owner/nothing"]["text"]
    for name in ("owner/pickles", "owner/ggufs", "owner/nothing"):
        assert answers[name]["error"] == "CheckpointError"


def test_a_token_opens_what_is_private(server: Any, tmp_path: Path) -> None:
    answer = ask(tmp_path, server.address, "owner/private", HF_TOKEN=server.token)["owner/private"]
    assert "model.safetensors" in answer["files"]


def test_offline_serves_what_is_cached_and_names_what_is_not(
    answers: dict[str, dict[str, Any]], server: Any, home: Path
) -> None:
    before = len(server.asked)
    offline = ask(home, server.address, "owner/good", "owner/absent", HF_HUB_OFFLINE="1")
    assert offline["owner/good"]["path"] == answers["owner/good"]["path"]
    assert offline["owner/absent"]["error"] == "ModelAccessError"
    assert "HF_HUB_OFFLINE" in offline["owner/absent"]["text"]
    assert len(server.asked) == before


def test_what_a_download_left_half_done_is_not_taken_for_whole(answers: dict[str, dict[str, Any]], home: Path) -> None:
    torn = ask(home, "http://127.0.0.1:1", "owner/torn", HF_HUB_OFFLINE="1")["owner/torn"]
    assert (torn["error"], torn["code"]) == ("ModelAccessError", "HF223")
    for word in ("incomplete", "holdfast pull owner/torn"):
        assert word in torn["text"]


def test_a_snapshot_without_one_of_its_shards_is_not_whole(tmp_path: Path) -> None:
    assert hub._missing(tmp_path) == "no config.json"
    (tmp_path / "config.json").write_text("{}")
    assert hub._missing(tmp_path) == "no weights"
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "model-1.safetensors").touch()
    assert hub._missing(tmp_path) == "no model-2.safetensors"
    (tmp_path / "model-2.safetensors").touch()
    assert hub._missing(tmp_path) is None


def test_an_unreachable_hub_does_not_hide_what_is_cached(answers: dict[str, dict[str, Any]], home: Path) -> None:
    # Port 1 is reserved and refuses at once.
    unreachable = ask(home, "http://127.0.0.1:1", "owner/good", "owner/absent")
    assert unreachable["owner/good"]["path"] == answers["owner/good"]["path"]
    assert unreachable["owner/absent"]["error"] == "ModelAccessError"
    assert "http://127.0.0.1:1" in unreachable["owner/absent"]["text"]


def test_choosing_files() -> None:
    assert hub.choose(["config.json", "a.gguf", "x/b.gguf"], "r") == ["config.json", "a.gguf"]
    assert hub.choose(["consolidated.safetensors", "config.json"], "r") == ["config.json", "consolidated.safetensors"]
    assert hub.choose(["config.json", "training_args.bin"], "r") == ["config.json"]
    assert hub.choose(["config.json", "a-Q4_0.gguf", "a-Q8_0.gguf"], "r", "q8_0") == ["config.json", "a-Q8_0.gguf"]
    with pytest.raises(CheckpointError, match=r"r:a\.gguf"):
        hub.choose(["a.gguf", "b.gguf"], "r")
