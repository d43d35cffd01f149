"""What `bench throughput` and `bench latency` share: the engine's settings from words, prompts of random token ids."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

from holdfast.config import EngineConfig
from holdfast.config.sources import add_flags

HIGHEST_TOKEN_ID = 10_000
"""vLLM's."""


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, EngineConfig, title="model and engine")


def open_engine(arguments: argparse.Namespace, **changes: Any) -> Any:
    """`holdfast.LLM` in this process, with the settings that were given."""
    import holdfast

    names = {field.name for field in dataclasses.fields(EngineConfig)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    return holdfast.LLM(given.pop("model", None), **{**changes, **given})


def random_prompts(count: int, tokens: int, seed: int | str, *, prefix: int = 0) -> list[dict[str, list[int]]]:
    draw = random.Random(seed)
    shared = [draw.randrange(100, HIGHEST_TOKEN_ID) for _ in range(prefix)]
    return [
        {"prompt_token_ids": shared + [draw.randrange(100, HIGHEST_TOKEN_ID) for _ in range(tokens)]}
        for _ in range(count)
    ]


def save(path: str | None, document: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(document, indent=4), encoding="utf-8")
