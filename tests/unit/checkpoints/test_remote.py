"""Headers from a hub, by range: the records that local files give, few bytes served, and every way to fail coded.

As with downloads, each environment gets a process of its own, which is asked for several models.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf as gguf_library
import numpy
import pytest

from holdfast.checkpoints import from_path, locate_headers, open_checkpoint
from holdfast.units import MIB

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS_BYTES = 24 * MIB
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


def safetensors_file(name: str, weights_bytes: int = 4096) -> bytes:
    entries = {
        f"{name}.weight": {"dtype": "BF16", "shape": [weights_bytes // 4, 2], "data_offsets": [0, weights_bytes]},
        f"{name}.scale": {"dtype": "F8_E8M0", "shape": [16], "data_offsets": [weights_bytes, weights_bytes + 16]},
    }
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(weights_bytes + 16)


def gguf_file(folder: Path, *, tokens: int, rows: int = 4096) -> bytes:
    path = folder / "written.gguf"
    writer = gguf_library.GGUFWriter(path, "llama")
    writer.add_token_list([f"token-{number}" for number in range(tokens)])
    writer.add_chat_template("template")
    writer.add_tensor("x.weight", numpy.zeros((rows, 256), "<f4"))
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    return path.read_bytes()


def gguf_parts() -> dict[str, bytes]:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    files = {}
    for number in range(2):
        keys = [
            text("split.no") + struct.pack("<IH", 2, number),
            text("split.count") + struct.pack("<IH", 2, 2),
            text("split.tensors.count") + struct.pack("<Ii", 5, 2),
        ]
        if number == 0:
            keys.append(text("general.architecture") + struct.pack("<I", 8) + text("llama"))
        head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(keys)) + b"".join(keys)
        head += text(f"part{number}") + struct.pack("<IQIQ", 1, 256, 12, 0)
        files[f"Q4_K_M/big-Q4_K_M-{number + 1:05}-of-00002.gguf"] = head + bytes(-len(head) % 32) + bytes(144)
    return files


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("repositories")
    config = json.dumps(CONFIG).encode()
    good = {
        "config.json": config,
        "generation_config.json": b'{"eos_token_id": 2}',
        "model.safetensors": safetensors_file("x", WEIGHTS_BYTES),
        "original/consolidated.00.pth": bytes(100),
        "pytorch_model.bin": bytes(100),
        "tokenizer.json": bytes(MIB),
    }
    shards = {f"model-0000{number}-of-00003.safetensors": safetensors_file(f"x{number}") for number in (1, 2, 3)}
    weight_map = {f"x{number}.weight": f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    index = {"metadata": {"total_size": 5}, "weight_map": weight_map}
    sharded = {"config.json": config, "model.safetensors.index.json": json.dumps(index).encode(), **shards}
    large, small = gguf_file(folder, tokens=20_000, rows=16_384), gguf_file(folder, tokens=3)
    ggufs = {"m-Q4_K_M.gguf": large, "m-Q8_0.gguf": small, "mmproj-F16.gguf": b"another thing", "config.json": config}
    return {
        "owner/good": good,
        "owner/private": good,
        "owner/gated": good,
        "owner/gated-for-strangers": good,
        "owner/torn": good,
        "owner/deaf": good | {"m-Q4_K_M.gguf": large},
        "owner/far": good | {"m-Q4_K_M.gguf": large},
        "owner/sharded": sharded,
        "owner/holes": {name: content for name, content in sharded.items() if "00002" not in name},
        "owner/ggufs": ggufs,
        "owner/parts": gguf_parts() | {"m-Q8_0.gguf": small},
        "owner/lost-part": {"big-Q8_0-00001-of-00002.gguf": small},
        "owner/pickles": {"config.json": config, "original/consolidated.00.pth": bytes(9), "model.bin": bytes(9)},
        "owner/adapter": {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(9)},
        "owner/hostile": {"config.json": config, "model.safetensors": struct.pack("<Q", 1 << 62) + bytes(100)},
        "owner/large-config": {"config.json": b" " * (17 * MIB), "model.safetensors": safetensors_file("x")},
        "owner/no-config": {"model.safetensors": safetensors_file("x")},
        "owner/empty-file": {"config.json": config, "model.safetensors": b""},
        "owner/config-only": {"config.json": config},
    }


@pytest.fixture(scope="module")
def server(serve_hub: Callable[..., Any], repositories: dict[str, dict[str, bytes]]) -> Iterator[Any]:
    with serve_hub(repositories) as served:
        yield served


ASKER = """
import json, sys
from dataclasses import asdict
from holdfast.checkpoints import locate_headers, open_checkpoint
from holdfast.errors import HoldfastError
for name in sys.argv[1:]:
    name, _, revision = name.partition("@")
    try:
        files = locate_headers(name, revision=revision or None)
        tensors = {} if files.format == "none" else open_checkpoint(files).tensors
        answer = {"name": files.name, "format": files.format, "remote": files.remote, "chosen": files.chosen,
                  "revision": files.revision, "weights": [path.name for path in files.weights],
                  "config": files.config, "generation_config": files.generation_config,
                  "template": files.chat_template, "header": files.header and sorted(files.header.metadata),
                  "tensors": [[t.name, list(t.shape), t.layout, t.offset, t.nbytes] for t in tensors.values()]}
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
    return dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf-home")


@pytest.fixture(scope="module")
def answers(server: Any, home: Path, repositories: dict[str, dict[str, bytes]]) -> dict[str, dict[str, Any]]:
    """Of every repository, with no token, from a mirror named by HF_ENDPOINT."""
    chosen = ["owner/ggufs:Q4_K_M", "owner/ggufs:m-q8_0.gguf", "owner/ggufs:Q2_K", "owner/parts:q4_k_m"]
    more = ["owner/deaf:Q4_K_M", "owner/far:Q4_K_M", "owner/good:Q4_0", "owner/absent", "owner/good@nowhere"]
    return ask(home, server.address, *repositories, *chosen, *more)


def local_answer(folder: Path, files: dict[str, bytes], wanted: str | None = None) -> list[list[Any]]:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    with open_checkpoint(from_path(folder, name="here", wanted=wanted)) as checkpoint:
        return [[t.name, list(t.shape), t.layout, t.offset, t.nbytes] for t in checkpoint.tensors.values()]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("owner/good", None),
        ("owner/sharded", None),
        ("owner/deaf", None),
        ("owner/far", None),
        ("owner/ggufs", "Q4_K_M"),
        ("owner/ggufs", "m-q8_0.gguf"),
        ("owner/deaf", "Q4_K_M"),
        ("owner/far", "Q4_K_M"),
        ("owner/parts", "q4_k_m"),
    ],
)
def test_the_records_equal_those_of_the_files_themselves(
    answers: dict[str, dict[str, Any]],
    repositories: dict[str, dict[str, bytes]],
    tmp_path: Path,
    name: str,
    wanted: str | None,
) -> None:
    asked = name if wanted is None else f"{name}:{wanted}"
    answer = answers[asked]
    assert "error" not in answer, answer
    assert answer["tensors"] == local_answer(tmp_path, repositories[name], wanted)
    assert answer["tensors"]
    assert (answer["remote"], answer["name"], answer["revision"][:4]) == (True, asked, "0123")


def test_small_files_come_along(answers: dict[str, dict[str, Any]]) -> None:
    good = answers["owner/good"]
    assert good["config"] == CONFIG
    assert good["generation_config"] == {"eos_token_id": 2}
    assert answers["owner/ggufs:Q4_K_M"]["template"] == "template"
    assert "tokenizer.ggml.tokens" in answers["owner/ggufs:Q4_K_M"]["header"]
    assert answers["owner/config-only"]["format"] == "none"


def test_what_was_chosen_is_said(answers: dict[str, dict[str, Any]]) -> None:
    said = answers["owner/good"]["chosen"]
    assert said == "model.safetensors; left out: original/consolidated.00.pth, pytorch_model.bin"
    assert answers["owner/ggufs:Q4_K_M"]["chosen"].startswith("m-Q4_K_M.gguf, selected with Q4_K_M; left out:")
    assert answers["owner/sharded"]["chosen"] == "model-00001-of-00003.safetensors and 2 more"


def served(server: Any, repo: str) -> int:
    return sum(
        count for path, count in server.served.items() if repo in path and path.endswith((".safetensors", ".gguf"))
    )


def header_bytes(raw: bytes) -> int:
    return 8 + int.from_bytes(raw[:8], "little")


def test_not_one_byte_of_weights_is_served(
    answers: dict[str, dict[str, Any]], server: Any, repositories: dict[str, dict[str, bytes]]
) -> None:
    good = header_bytes(repositories["owner/good"]["model.safetensors"])
    shards = [raw for name, raw in repositories["owner/sharded"].items() if name.endswith(".safetensors")]
    asked = {path: count for path, count in server.served.items() if path.endswith(".safetensors")}
    assert served(server, "owner/good/") == good
    assert served(server, "owner/sharded/") == sum(map(header_bytes, shards))
    assert asked
    fetched = {path for method, path in server.asked if method == "GET" and path.startswith("/owner/good/resolve")}
    assert {path.rpartition("/")[2] for path in fetched} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }


def test_a_gguf_header_comes_in_growing_pieces(answers: dict[str, dict[str, Any]], server: Any) -> None:
    ranges = [
        wanted for path, wanted in server.ranges if path.endswith("owner/ggufs/resolve/" + COMMIT + "/m-Q4_K_M.gguf")
    ]
    assert ranges[0] == "bytes=0-65535"
    assert 2 <= len(ranges) <= 5
    # The header has about 380 kB, the file 16 MiB more.
    assert (
        sum(count for path, count in server.served.items() if path.endswith("/m-Q4_K_M.gguf") and "ggufs" in path) < MIB
    )


def test_a_server_that_ignores_ranges_is_cut_off(answers: dict[str, dict[str, Any]], server: Any) -> None:
    # What the machine's sockets buffer is served before the server notices; the file has 24 MiB.
    asked = [
        path
        for method, path in server.asked
        if method == "GET" and "owner/deaf" in path and path.endswith(".safetensors")
    ]
    assert len(asked) == 2
    assert served(server, "owner/deaf/") < WEIGHTS_BYTES
    assert answers["owner/deaf"]["tensors"]


def test_the_token_stays_with_the_hub(server: Any, home: Path) -> None:
    answer = ask(home, server.address, "owner/private", "owner/far", HF_TOKEN=server.token)
    assert answer["owner/private"]["tensors"]
    assert answer["owner/far"]["tensors"]
    assert server.strangers_with_token == []


@pytest.mark.parametrize(
    ("name", "error", "code", "words"),
    [
        ("owner/gated", "ModelAccessError", "HF220", ["gated", "HF_TOKEN", "hf auth login"]),
        ("owner/gated-for-strangers", "ModelAccessError", "HF220", ["gated", "HF_TOKEN"]),
        ("owner/private", "ModelNotFoundError", "HF210", ["private", "HF_TOKEN"]),
        ("owner/absent", "ModelNotFoundError", "HF210", ["no model"]),
        ("owner/good@nowhere", "ModelNotFoundError", "HF210", ["revision"]),
        ("owner/torn", "CheckpointError", "HF231", ["is truncated", "5000 bytes", "HF_ENDPOINT"]),
        ("owner/holes", "CheckpointError", "HF230", ["model-00002-of-00003.safetensors"]),
        ("owner/ggufs", "CheckpointError", "HF230", ["several GGUF", "Q4_K_M, Q8_0", "owner/ggufs:Q4_K_M"]),
        ("owner/ggufs:Q2_K", "CheckpointError", "HF230", ["no GGUF file for 'Q2_K'", "Q4_K_M, Q8_0"]),
        ("owner/good:Q4_0", "CheckpointError", "HF230", ["no GGUF file to choose"]),
        ("owner/lost-part", "CheckpointError", "HF230", ["1 of the 2 parts", "00002-of-00002"]),
        ("owner/pickles", "CheckpointError", "HF232", ["pickle", "original/consolidated.00.pth", "save_pretrained"]),
        ("owner/adapter", "CheckpointError", "HF230", ["an adapter"]),
        ("owner/hostile", "CheckpointError", "HF230", ["beyond its end"]),
        ("owner/large-config", "CheckpointError", "HF230", ["implausibly large"]),
        ("owner/no-config", "CheckpointError", "HF230", ["config.json"]),
        ("owner/empty-file", "CheckpointError", "HF230", ["truncated"]),
    ],
)
def test_refusals(answers: dict[str, dict[str, Any]], name: str, error: str, code: str, words: list[str]) -> None:
    answer = answers[name]
    assert (answer.get("error"), answer.get("code")) == (error, code), answer
    for word in words:
        assert word in answer["text"]


def test_offline_and_out_of_reach(server: Any, home: Path) -> None:
    before = len(server.asked)
    offline = ask(home, server.address, "owner/good", "owner/ggufs:Q8_0", HF_HUB_OFFLINE="1")
    # Port 1 is reserved and refuses at once.
    unreachable = ask(home, "http://127.0.0.1:1", "owner/good")["owner/good"]
    assert len(server.asked) == before
    for answer in offline.values():
        assert (answer["error"], answer["code"]) == ("ModelAccessError", "HF223")
        assert "HF_HUB_OFFLINE" in answer["text"]
    assert (unreachable["error"], unreachable["code"]) == ("ModelAccessError", "HF222")
    assert "http://127.0.0.1:1" in unreachable["text"]


def test_what_was_downloaded_earlier_serves_without_a_hub(server: Any, tmp_path: Path) -> None:
    code = "import sys; from holdfast.checkpoints import locate; [locate(name) for name in sys.argv[1:]]"
    variables = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": server.address, "NO_PROXY": "*"}
    names = ["owner/sharded", "owner/ggufs:Q8_0", "owner/parts:Q4_K_M"]
    subprocess.run([sys.executable, "-c", code, *names], env=variables, check=True, capture_output=True, timeout=120)
    for environment in ({"HF_HUB_OFFLINE": "1"}, {}):
        found = ask(tmp_path, "http://127.0.0.1:1", *names, **environment)
        for name in names:
            assert "error" not in found[name], found[name]
            assert found[name]["remote"] is False
            assert found[name]["name"] == name


def test_what_lies_here_needs_no_hub(gguf_file: Path) -> None:
    files = locate_headers(str(gguf_file))
    assert (files.kind, files.remote) == ("file", False)
