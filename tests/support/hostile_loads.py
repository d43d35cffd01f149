"""What a start does with a model's files and with an adapter's, in one call each: for `limits.Limited`. No torch."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from holdfast.checkpoints import from_path, match, open_checkpoint, spec_of
from holdfast.checkpoints.sources.resolve import describe
from holdfast.config import EngineConfig
from holdfast.engine.requests.adapters import Adapters
from holdfast.engine.requests.sampling_defaults import default_sampling
from holdfast.engine.startup.build import find_model, plan_model
from holdfast.models import from_config
from holdfast.text.load_checks import check_text
from holdfast.text.structured.client import vocabulary_of
from holdfast.text.tokenizer.tokenizer import Tokenizer

TEXTS = ("", "a", "ab ba aab 12\n\n  é日本" * 5, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!", "<s>a</s>" * 20)


def load_tokenizer(folder: str) -> dict[str, Any]:
    """With tokenizer_config.json, where there is one; used as a server would."""
    from holdfast.checkpoints.bounded_files import read_json

    config = read_json(Path(folder) / "tokenizer_config.json")
    return use_tokenizer(Tokenizer.from_tokenizer_json(Path(folder) / "tokenizer.json", config))


def use_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    tokens = []
    for text in TEXTS:
        ids = tokenizer.encode(text)
        tokenizer.encode(text, split_special_tokens=True)
        tokenizer.decode(ids)
        tokens.append(len(ids))
    if tokenizer.pieces is not None:
        vocabulary_of(tokenizer)
    return {"ids_end": tokenizer.ids_end, "tokens": tokens, "longest": tokenizer.longest_token_chars}


def load_model(path: str) -> dict[str, Any]:
    """A folder or a GGUF file: found, planned, every tensor read, its tokenizer used where it has one."""
    config = EngineConfig(model=path, load_format="auto")
    model = find_model(config, progress=False)
    plan = plan_model(config, model)
    default_sampling(config, model.files)
    with open_checkpoint(model.files) as checkpoint:
        matched = match(model.spec, checkpoint)
        read = sum(checkpoint.read(stored.name).nbytes for stored in matched.values())
    header = model.files.header
    told: dict[str, Any] = {"blocks": plan.engine.blocks, "read": read}
    if model.files.tokenizer_json is not None or (header and "tokenizer.ggml.model" in header.metadata):
        tokenizer = Tokenizer.from_files(model.files)
        told |= use_tokenizer(tokenizer)
        told["warnings"] = [warning.code for warning in check_text(model.spec, tokenizer, model.files)]
    return told


def describe_folder(folder: str) -> int:
    """As a plan does, of any known model: what its config says, and what that takes."""
    files = from_path(Path(folder), name="case")
    spec = describe(files)
    spec_of(files)
    return spec.parameters


def load_adapter(folder: str, allowed: str, model_config: dict[str, Any]) -> str:
    """As a client of a server does that was started with --lora-folders ALLOWED."""
    adapters = Adapters(from_config(model_config), "tiny", EngineConfig(enable_lora=True), [Path(allowed)])
    return adapters.load("one", folder).name


# ---- what the limits are tried with


def take_memory(count_bytes: int) -> int:
    return len(bytearray(count_bytes))


def abort() -> None:
    os.abort()


def wait(seconds: float) -> float:
    time.sleep(seconds)
    return seconds
