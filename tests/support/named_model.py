"""Real models for tests on machines that may have no network."""

from __future__ import annotations

import os

from holdfast.checkpoints import locate
from holdfast.errors import ModelAccessError

MODEL_VARIABLE = "HOLDFAST_TEST_MODEL"
"""A file or folder; where it is not set, built-in ones are taken."""
BUILT_IN = "qwen2.5-coder-0.5b", "smollm2"


def named_models() -> tuple[str, ...]:
    """Which may not be there."""
    named = os.environ.get(MODEL_VARIABLE)
    return (named,) if named else BUILT_IN


def why_not(name: str) -> str | None:
    """None: it is there, or was named, and then its absence is a failure."""
    if os.environ.get(MODEL_VARIABLE):
        return None
    try:
        locate(name)
    except ModelAccessError as error:
        return error.message
    return None
