"""Small good files to read and to spoil, and a hub to get them from.

The GGUF writer here is independent of the reader under test.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy
import pytest

from holdfast.checkpoints import ModelFiles, locate

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "dtype": "float32",
}

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (8, 32),
    "model.layers.0.input_layernorm.weight": (32,),
    "model.layers.0.self_attn.q_proj.weight": (32, 32),
    "model.layers.0.self_attn.k_proj.weight": (16, 32),
    "model.layers.0.self_attn.v_proj.weight": (16, 32),
    "model.layers.0.self_attn.o_proj.weight": (32, 32),
    "model.layers.0.post_attention_layernorm.weight": (32,),
    "model.layers.0.mlp.gate_proj.weight": (32, 32),
    "model.layers.0.mlp.up_proj.weight": (32, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 32),
    "model.norm.weight": (32,),
}


def safetensors_bytes(arrays: dict[str, numpy.ndarray[Any, Any]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in arrays.items():
        raw = array.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def gguf_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_bytes() -> bytes:
    """Two tensors (F32 [2, 3] and Q8_0 [2, 32]) and one key of most kinds."""
    keys = [
        gguf_string("general.architecture") + struct.pack("<I", 8) + gguf_string("llama"),
        gguf_string("llama.block_count") + struct.pack("<II", 4, 3),
        gguf_string("a.float") + struct.pack("<If", 6, 0.5),
        gguf_string("a.truth") + struct.pack("<IB", 7, 1),
        gguf_string("a.big") + struct.pack("<Iq", 11, -5),
        gguf_string("tokens") + struct.pack("<IIQ", 9, 8, 3) + b"".join(map(gguf_string, ["a", "", "Ġé"])),
        gguf_string("numbers") + struct.pack("<IIQ3i", 9, 5, 3, 1, -2, 3),
        gguf_string("nested") + struct.pack("<IIQ", 9, 9, 2) + 2 * struct.pack("<IQ2B", 0, 2, 8, 9),
    ]
    infos = [
        gguf_string("plain") + struct.pack("<IQQIQ", 2, 3, 2, 0, 0),
        gguf_string("quantized") + struct.pack("<IQQIQ", 2, 32, 2, 8, 32),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys)) + b"".join(keys) + b"".join(infos)
    head += bytes(-len(head) % 32)
    return head + numpy.arange(6, dtype="<f4").tobytes().ljust(32, b"\0") + bytes(range(68))


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny whole model and returns its folder; `shards` splits its weights, 0 leaves them out."""

    def write(*, shards: int = 1, **config: Any) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
        arrays = {name: numpy.full(shape, index, "<f4") for index, (name, shape) in enumerate(SHAPES.items())}
        if shards == 1:
            (folder / "model.safetensors").write_bytes(safetensors_bytes(arrays))
        elif shards > 1:
            weight_map = {}
            for number in range(shards):
                filename = f"model-{number + 1:05}-of-{shards:05}.safetensors"
                part = dict(list(arrays.items())[number::shards])
                (folder / filename).write_bytes(safetensors_bytes(part))
                weight_map |= dict.fromkeys(part, filename)
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    return write


@pytest.fixture(scope="session")
def good_gguf() -> bytes:
    return gguf_bytes()


@pytest.fixture(scope="session")
def good_safetensors() -> bytes:
    return safetensors_bytes({"a": numpy.zeros((2, 3)), "b": numpy.zeros((4,)), "c": numpy.zeros((0, 5))})


@pytest.fixture
def gguf_file(tmp_path: Path, good_gguf: bytes) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(good_gguf)
    return path


@pytest.fixture(scope="session")
def default_model() -> ModelFiles:
    """The real built-in model, fetched once into the user's cache."""
    return locate(None)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Behaves like the hub; what a repository's name says is how it behaves.

    gated (403), gated-for-strangers (401), private (needs the token), torn (files shorter than listed), deaf (ignores
    ranges), far (sends on to another host, as the hub does to its store).
    """

    daemon_threads = True
    token = "hf_a_token_that_opens_doors"

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories = repositories
        self.asked: list[tuple[str, str]] = []
        """(method, path)"""
        self.ranges: list[tuple[str, str]] = []
        """(path, Range)"""
        self.served: Counter[str] = Counter()
        """Bytes of bodies handed to the socket, by path."""
        self.strangers_with_token: list[str] = []

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
        self.path_asked = path = unquote(urlsplit(self.path).path)
        self.server.asked.append((self.command, path))
        words = path.strip("/").split("/")
        if words[:2] == ["api", "models"]:
            self.api("/".join(words[2:4]), words[4:])
        elif words[0] == "store":
            if "Authorization" in self.headers:
                self.server.strangers_with_token.append(path)
            self.content("/".join(words[1:3]), "/".join(words[3:]))
        elif len(words) > 4 and words[2] == "resolve":
            self.file("/".join(words[:2]), "/".join(words[4:]))
        else:
            self.refuse(404, "EntryNotFound")

    def allowed(self, repo: str) -> bool:
        if repo not in self.server.repositories:
            self.refuse(404, "RepoNotFound")
        elif repo == "owner/gated" and not self.path.startswith("/api"):
            self.refuse(403, "GatedRepo")
        elif repo == "owner/gated-for-strangers" and not self.path.startswith("/api"):
            self.refuse(401, "GatedRepo")
        elif repo == "owner/private" and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self.refuse(401, "RepoNotFound")
        else:
            return True
        return False

    def api(self, repo: str, rest: list[str]) -> None:
        if not self.allowed(repo):
            return
        files = self.server.repositories[repo]
        if rest[:1] == ["tree"]:
            tree = [{"type": "file", "path": n, "size": len(c), "oid": git_oid(c)} for n, c in files.items()]
            self.send(200, json.dumps(tree).encode())
        elif rest and rest[0] == "revision" and rest[1] not in ("main", COMMIT):
            self.refuse(404, "RevisionNotFound")
        else:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            self.send(200, json.dumps(info).encode())

    def file(self, repo: str, name: str) -> None:
        if not self.allowed(repo):
            return
        if repo == "owner/far" and name.endswith((".safetensors", ".gguf")):
            # Another name of this machine is another host to a client.
            place = f"http://localhost:{self.server.server_address[1]}/store/{repo}/{name}?signature=once"
            self.send(302, b"", {"Location": place})
        else:
            self.content(repo, name)

    def content(self, repo: str, name: str) -> None:
        content = self.server.repositories[repo].get(name)
        if content is None:
            self.refuse(404, "EntryNotFound")
            return
        headers = {"ETag": f'"{git_oid(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if repo == "owner/torn" and name == "model.safetensors" and self.command == "GET":
            content = content[:5000]
        wanted = self.headers.get("Range")
        if wanted and self.command == "GET" and repo != "owner/deaf":
            self.server.ranges.append((self.path_asked, wanted))
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            if int(first) >= len(content):
                self.send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                return
            piece = content[int(first) : int(last) + 1 if last else None]
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(piece) - 1}/{len(content)}"
            self.send(206, piece, headers)
        else:
            self.send(200, content, headers)

    def refuse(self, status: int, code: str) -> None:
        self.send(status, b'{"error": "no"}', {"X-Error-Code": code, "X-Error-Message": f"no: {code}"})

    def send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        # A client may have had enough in the middle.
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(content), 1 << 16):
                self.wfile.write(content[start : start + (1 << 16)])
                self.server.served[self.path_asked] += len(content[start : start + (1 << 16)])


def git_oid(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


@pytest.fixture(scope="session")
def serve_hub() -> Callable[..., contextlib.AbstractContextManager[Hub]]:
    """Starts a hub with the given repositories, for the length of a `with`."""

    @contextlib.contextmanager
    def serve(repositories: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
        with Hub(repositories) as served:
            thread = threading.Thread(target=served.serve_forever)
            thread.start()
            try:
                yield served
            finally:
                served.shutdown()
                thread.join()

    return serve
