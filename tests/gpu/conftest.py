"""For tests that need an NVIDIA GPU: elsewhere all of this folder is skipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(f"{HERE}{os.sep}"):  # A path's parents are slow, for ten thousand tests.
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="there is no NVIDIA GPU"))


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "hidden_act": "silu", "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "bos_token_id": 1,
    "eos_token_id": 2, "num_key_value_heads": 8,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "1B": {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True},
    "8B": {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "head_dim": 128, "tie_word_embeddings": False},
}  # fmt: skip


@pytest.fixture(scope="session")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The folder of a model of this shape, for load_format=dummy; with other settings of its config."""

    def folder(name: str, **settings: Any) -> str:
        path = tmp_path_factory.mktemp(name)
        (path / "config.json").write_text(json.dumps(LLAMA | SHAPES[name] | settings))
        return str(path)

    return folder


class Neighbour:
    """Another process on the same GPU. `take` gets it all but so many bytes, at once; `give_back` all that it took;
    `end` likewise, with its context."""

    CODE = """
import sys, torch
torch.zeros(1, device="cuda")
print("here", flush=True)
held = []
for line in sys.stdin:
    if line.strip() == "give back":
        held.clear()
        torch.cuda.empty_cache()
        print(torch.cuda.mem_get_info()[0], flush=True)
        continue
    wanted = torch.cuda.mem_get_info()[0] - int(line)
    while wanted > (1 << 20):
        try:
            held.append(torch.empty(wanted, dtype=torch.uint8, device="cuda"))
            wanted = torch.cuda.mem_get_info()[0] - int(line)
        except torch.OutOfMemoryError:
            wanted = wanted * 7 // 8
    print(torch.cuda.mem_get_info()[0], flush=True)
"""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._read() == "here"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def take(self, but_bytes: int) -> int:
        """What is still free then."""
        return self._ask(str(but_bytes))

    def give_back(self) -> int:
        """What is free then."""
        return self._ask("give back")

    def _ask(self, line: str) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return int(self._read())

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def neighbour() -> Iterator[Neighbour]:
    one = Neighbour()
    yield one
    one.end()
