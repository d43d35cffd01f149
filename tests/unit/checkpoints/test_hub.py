"""Models from a hub, against a local server that behaves like one: good, gated, missing, torn, mirror, offline.

huggingface_hub reads its environment when it is imported, so each environment gets a process of its own, which
is asked for several models.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy
import pytest

from holdfast.checkpoints import hub
from holdfast.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_a_token_that_opens_doors"
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


class Hub(ThreadingHTTPServer):
    """Keeps what it was asked, as (method, path)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: list[tuple[str, str]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *values: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append((self.command, path))
        words = path.strip("/").split("/")
        if words[:2] == ["api", "models"]:
            self.api("/".join(words[2:4]), words[4:])
        elif len(words) > 4 and words[2] == "resolve":
            self.file("/".join(words[:2]), words[3], "/".join(words[4:]))
        else:
            self.refuse(404, "EntryNotFound")

    def allowed(self, repo: str) -> bool:
        if repo not in REPOSITORIES:
            self.refuse(404, "RepoNotFound")
        elif repo == "owner/gated" and not self.path.startswith("/api"):
            self.refuse(403, "GatedRepo")
        elif repo == "owner/private" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.refuse(401, "RepoNotFound")
        else:
            return True
        return False

    def api(self, repo: str, rest: list[str]) -> None:
        if not self.allowed(repo):
            return
        files = REPOSITORIES[repo]
        if rest[:1] == ["tree"]:
            tree = [{"type": "file", "path": n, "size": len(c), "oid": git_oid(c)} for n, c in files.items()]
            self.send(200, json.dumps(tree).encode())
        elif rest and rest[0] == "revision" and rest[1] not in ("main", COMMIT):
            self.refuse(404, "RevisionNotFound")
        else:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            self.send(200, json.dumps(info).encode())

    def file(self, repo: str, revision: str, name: str) -> None:
        if not self.allowed(repo):
            return
        content = REPOSITORIES[repo].get(name)
        if content is None:
            self.refuse(404, "EntryNotFound")
            return
        headers = {"ETag": f'"{git_oid(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if repo == "owner/torn" and name == "model.safetensors" and self.command == "GET":
            content = content[:5000]
        wanted = self.headers.get("Range")
        if wanted and self.command == "GET":
            first = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            self.send(206, content[first:], headers)
        else:
            self.send(200, content, headers)

    def refuse(self, status: int, code: str) -> None:
        self.send(status, b'{"error": "no"}', {"X-Error-Code": code, "X-Error-Message": f"no: {code}"})

    def send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def git_oid(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with Hub() as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield served
        served.shutdown()
        thread.join()


ASKER = """
import json, sys
from holdfast.checkpoints import locate
from holdfast.errors import HoldfastError
for name in sys.argv[1:]:
    name, _, revision = name.partition("@")
    try:
        files = locate(name, revision=revision or None)
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
def answers(server: Hub, home: Path) -> dict[str, dict[str, Any]]:
    """With no token, from a mirror named by HF_ENDPOINT."""
    names = ["owner/good", "owner/gated", "owner/absent", "owner/good@nowhere", "owner/private"]
    return ask(home, server.address, *names, "owner/torn", "owner/pickles", "owner/ggufs", "owner/nothing")


def test_only_what_is_needed_is_fetched(answers: dict[str, dict[str, Any]], server: Hub, home: Path) -> None:
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
    assert "2 GGUF files" in answers["owner/ggufs"]["text"]
    assert "config.json" in answers["owner/nothing"]["text"]
    for name in ("owner/pickles", "owner/ggufs", "owner/nothing"):
        assert answers[name]["error"] == "CheckpointError"


def test_a_token_opens_what_is_private(server: Hub, tmp_path: Path) -> None:
    answer = ask(tmp_path, server.address, "owner/private", HF_TOKEN=TOKEN)["owner/private"]
    assert "model.safetensors" in answer["files"]


def test_offline_serves_what_is_cached_and_names_what_is_not(
    answers: dict[str, dict[str, Any]], server: Hub, home: Path
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
    for word in ("not whole", "holdfast pull owner/torn"):
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
    with pytest.raises(CheckpointError, match="hf download r a"):
        hub.choose(["a.gguf", "b.gguf"], "r")
