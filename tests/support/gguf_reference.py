"""transformers' own model and tokenizer from a GGUF file, to hold ours against."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch


def reference_from_gguf(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    with quick_reader():
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def tokenizer_from_gguf(path: Path) -> Any:
    from transformers import AutoTokenizer

    with quick_reader():
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@contextlib.contextmanager
def quick_reader() -> Iterator[None]:
    """transformers reads the file twice, and makes a table of all names for every module: here each is done once. And
    every slice of a mapped array is a mapped array, which takes longer to make than all else: here a plain one."""
    mapped = numpy.memmap
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        patch.setattr(numpy, "memmap", lambda *place, **more: numpy.asarray(mapped(*place, **more)))
        yield
