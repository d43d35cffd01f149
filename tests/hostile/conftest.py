"""How many cases the fuzzers draw, and from which seed: the same few in `make test`, fresh ones in `make test-all`.

A failure names its seed and case; HOSTILE_SEED=SEED brings the same cases back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from random import Random

import pytest

LONG_S = float(os.environ.get("HOSTILE_SECONDS", "170"))
"""Of one long fuzzer."""

Cases = Callable[[int], Iterator[tuple[str, Random]]]


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> Cases:
    """cases(100): a hundred names, each with its own random numbers; in a long test, as many as there is time for."""
    long = request.node.get_closest_marker("long") is not None
    fresh = int.from_bytes(os.urandom(4), "little") if long else 1
    seed = int(os.environ.get("HOSTILE_SEED", fresh))

    def draw(count: int) -> Iterator[tuple[str, Random]]:
        end, number = time.monotonic() + LONG_S, 0
        while time.monotonic() < end if long else number < count:
            yield f"HOSTILE_SEED={seed}, case {number}", Random(f"{seed}/{number}")
            number += 1

    return draw
