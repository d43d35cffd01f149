"""A hub's model that does not fit is refused by its headers: nothing of its weights is fetched."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

from holdfast.models import from_config

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 20000, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip

FINDER = """
import json, sys
from holdfast.config import EngineConfig
from holdfast.engine.startup.build import find_model
from holdfast.errors import DoesNotFitError
try:
    print(json.dumps(find_model(EngineConfig.from_arguments(**json.loads(sys.argv[1]))).files.format))
except DoesNotFitError as error:
    print(json.dumps({"code": error.code, "found": error.found}))
assert "torch" not in sys.modules
"""


def weights() -> bytes:
    entries: dict[str, Any] = {}
    end = 0
    for tensor in from_config(CONFIG).tensors:
        if not tensor.optional:
            size = 4 * prod(tensor.shape)
            entries[tensor.hf_name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + size]}
            end += size
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def find(home: Path, endpoint: str, **settings: Any) -> Any:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    variables = {**inherited, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "NO_PROXY": "*"}
    asked = json.dumps({"model": "owner/model", **settings})
    done = subprocess.run(
        [sys.executable, "-c", FINDER, asked], env=variables, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def fetched(home: Path) -> int:
    return sum(path.stat().st_size for path in home.rglob("*") if path.is_file() and not path.is_symlink())


def test_headers_are_enough_to_refuse(serve_hub: Callable[..., Any], tmp_path: Path) -> None:
    stored = weights()
    files = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": stored}
    with serve_hub({"owner/model": files}) as hub:
        refused = find(tmp_path, hub.address, ram="100MiB")
        assert refused["code"] == "HF110"
        assert "short" in refused["found"]
        assert fetched(tmp_path) < len(stored) // 10
        assert find(tmp_path, hub.address) == "safetensors"
        assert fetched(tmp_path) >= len(stored)
