"""What the catalogue knows of a model that a log names: over how many GPUs it splits, what a token of KV takes.

Asks no network: of a model that is not in the catalogue nothing is known.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError
from holdfast.units import GIB

if TYPE_CHECKING:
    from holdfast.models.spec import ModelSpec

MOST_RANKS = 64
QUANTIZED_NAME = re.compile(r"(?i)awq|gptq|fp8|fp4|int[48]|[48]-?bit|gguf|bnb|w\da\d+")
"""In a model's name: the catalogue has its shapes, and not these weights."""


@lru_cache(maxsize=32)
def spec_of(model: str | None) -> ModelSpec | None:
    from holdfast.models import catalogue
    from holdfast.models.registry import describe_config

    entry = None if model is None else catalogue.lookup(model)
    if entry is None:
        return None
    try:
        return describe_config(entry.config)
    except HoldfastError:
        return None


def ranks_of(model: str | None) -> tuple[int, ...]:
    """Sizes that it splits over, from 1; empty: not known."""
    from holdfast.footprint.identity_key import Same
    from holdfast.planner.fit.count import sizes

    spec = spec_of(model)
    return () if spec is None else sizes(Same(spec), MOST_RANKS)


def kv_token_gib(model: str | None) -> float | None:
    """In 16 bits, on one GPU."""
    spec = spec_of(model)
    return None if spec is None else spec.kv_bytes_per_token(2) / GIB


def longest_of(model: str | None) -> int | None:
    """Tokens that it reads, which engines serve where nothing else is set."""
    spec = spec_of(model)
    return None if spec is None else spec.max_position


def weights_bytes_of(model: str) -> int | None:
    """In 16 bits, where the catalogue has its number of parameters."""
    from holdfast.models import catalogue

    entry = catalogue.lookup(model)
    return None if entry is None or entry.parameters is None else 2 * entry.parameters
