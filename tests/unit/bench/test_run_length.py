"""How long a run is, from the words of its command: who asks for a short peak gets a short run."""

from __future__ import annotations

import argparse

import pytest

from holdfast.bench.arguments import read_load
from holdfast.cli.commands import bench


def seconds(*words: str) -> list[float]:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    load, _ = read_load(parser.parse_args(["http://127.0.0.1:1", *words]), "http://127.0.0.1:1")
    return [phase.seconds for phase in load.phases]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], [60, 300, 60]),
        (["--peak", "5s"], [1, 5, 1]),
        (["--peak", "30s"], [6, 30, 6]),
        (["--peak", "1h"], [60, 3600, 60]),
        (["--peak", "5s", "--up", "1m"], [60, 5, 1]),
        (["--peak", "30s", "--up", "0s", "--down", "2s"], [30, 2]),
        (["--up", "5s"], [5, 300, 60]),
    ],
)
def test_load_rises_and_falls_for_a_fifth_of_the_peak_at_most(words: list[str], expected: list[float]) -> None:
    assert seconds(*words) == expected
