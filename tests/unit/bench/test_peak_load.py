"""What benchmarks/peak_load.py says of a run: memory of both kinds over time, and the flags that it hands on."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.peak_load import bench_words, held_over_time, options, serve_words

from holdfast.bench.load.load import COMPLETIONS, LengthRange, Load
from holdfast.bench.load.prompts import RequestMaker


def test_memory_is_that_of_the_first_and_the_last_fifth_and_the_most() -> None:
    samples = [{"at_s": float(at), "ram_bytes": 100 + at, "vram_bytes": None} for at in range(101)]
    samples[50]["ram_bytes"] = 900
    assert held_over_time(samples, "ram_bytes") == {"first_fifth": 110, "most": 900, "last_fifth": 190}
    assert held_over_time(samples, "vram_bytes") is None


def test_flags_are_handed_on_to_both(tmp_path: Path) -> None:
    words = [
        "--out",
        str(tmp_path),
        "--bench-flags",
        "--prefix-tokens 1000 --prefixes 40",
        "--serve-flags",
        "--kv-ram 8GiB",
    ]
    arguments: argparse.Namespace = options().parse_args(words)
    asked = bench_words(arguments, "http://127.0.0.1:1", 3)
    assert asked[asked.index("--prefixes") + 1] == "40"
    assert asked[asked.index("--save") + 1] == str(tmp_path / "run-3.json")
    assert "--token-ids" in asked
    assert "8GiB" in serve_words(arguments, tmp_path, 1)


def test_prompts_of_ids_may_begin_alike() -> None:
    load = Load(
        url="", path=COMPLETIONS, token_ids=True, prompt=LengthRange(50, 50), prefix_tokens=20, prefixes=2,
        prefix_share=0.5,
    )  # fmt: skip
    maker = RequestMaker(load)
    prompts = [json.loads(maker.conversation(number).ask().body)["prompt"] for number in range(60)]
    assert {len(prompt) for prompt in prompts} == {50}
    begins = [tuple(prompt[:20]) for prompt in prompts]
    shared = [begin for begin in set(begins) if begins.count(begin) > 1]
    assert len(shared) == 2
    assert 15 < sum(begin in shared for begin in begins) < 45
    assert len({tuple(prompt[20:]) for prompt in prompts}) == 60
