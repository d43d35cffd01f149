"""transformers' own model from a GGUF file, to hold ours against."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch


def reference_from_gguf(path: Path) -> Any:
    """It reads the file twice, and makes a table of all names for every module: here each is done once."""
    from transformers import AutoModelForCausalLM

    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
